-- The shortcuts of ACQUIRE and RELEASE, for one lock.

-- Whether a number may be granted. Another program may have written anything into a counter, also no number.
-- A token has room for 2^44 - 1, and Lua writes its 14 digits in full.
local function is_counter(number)
  return number >= 1 and number <= 17592186044415 and number % 1 == 0
end

-- Grant a lock that is free, with the counter after the last one; change nothing and return nil if it is not free.
local function grant(epoch, key, nonce, ttl, field, last)
  local counter = (tonumber(last) or 0 / 0) + 1
  if is_counter(counter) and redis.call('SET', key, nonce .. '|' .. epoch .. '|' .. counter, 'PX', ttl, 'NX') then
    redis.call('HSET', NODE, field, counter)
    return counter
  end
end

-- Delete a lock that is still ours, unless a contender waits for it; return whether it was deleted.
local function let_go(key, nonce)
  local value = redis.pcall('GET', key)
  return type(value) == 'string' and string.sub(value, 1, #nonce + 1) == nonce .. '|'
    and redis.call('EXISTS', key_of('q', key)) == 0 and redis.call('DEL', key)
end
