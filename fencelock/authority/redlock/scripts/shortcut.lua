-- What ACQUIRE and RELEASE come to most often, for one lock.

-- Whether a number may be granted. What another program has written into a counter may be anything, also no number.
-- A token has room for 2^44 - 1, and Lua writes its 14 digits in full.
local function is_counter(number)
  return number >= 1 and number <= 17592186044415 and number % 1 == 0
end

-- Grant a lock that is free, with the counter after the last one; return nil, with nothing changed, where it is not.
local function grant(epoch, key, nonce, ttl, field, last)
  local counter = (tonumber(last) or 0 / 0) + 1
  if is_counter(counter) and redis.call('SET', key, nonce .. '|' .. epoch .. '|' .. counter, 'PX', ttl, 'NX') then
    redis.call('HSET', NODE, field, counter)
    return counter
  end
end

-- Delete a lock that is ours still, unless a contender waits for it; return whether that was done.
local function let_go(key, nonce)
  local value = redis.pcall('GET', key)
  return type(value) == 'string' and string.sub(value, 1, #nonce + 1) == nonce .. '|'
    and redis.call('EXISTS', key_of('q', key)) == 0 and redis.call('DEL', key)
end
