-- include marker
-- INSPECT: show which locks are held, and their holders. KEYS[2..] are the locks; without them, a page of all locks:
-- ARGV[3] the cursor, 0 at first, ARGV[4] how many keys to scan. ARGV[5] a pattern of other keys instead, or '': it
-- shows those that have no expiry.
-- Returns SHOWN, cursor (0 at the end), then for each lock its resource, value, remaining ms (-1: no expiry), number of
-- waiters, and the introduction of its client; for other keys only their names | a refusal.
local refused = refusal(unpack(redis.call('HMGET', NODE, 'e', 'r', 'cfg', 'next')))
if refused then return refused end
local from, count, pattern = unpack(ARGV, 3)
local prefix, keys, following = NODE .. ':l:', {unpack(KEYS, 2)}, '0'
if LOCKS == 0 then
  local locks = string.gsub(prefix, '[%*%?%[%]\\]', '\\%0') .. '*'
  following, keys = unpack(redis.call('SCAN', from, 'MATCH', pattern ~= '' and pattern or locks, 'COUNT', count))
end

local answer = {'SHOWN', following}
local function show(key)
  local nonce, epoch, _, value = read_lock(key)
  if not nonce or is_claim(key, nonce, epoch) then return end
  local waiters = redis.pcall('ZCARD', key_of('q', key))
  local told = redis.pcall('GET', NODE .. ':w:' .. string.sub(nonce, 1, 16))
  answer[#answer + 1] = string.sub(key, #prefix + 1)
  answer[#answer + 1] = value or nonce
  answer[#answer + 1] = digits(redis.call('PTTL', key))
  answer[#answer + 1] = digits(type(waiters) == 'number' and waiters or 0)
  answer[#answer + 1] = type(told) == 'string' and told or ''
end

for _, key in ipairs(keys) do
  if LOCKS > 0 or pattern == '' then
    show(key)
  elseif redis.call('PTTL', key) == -1 then
    answer[#answer + 1] = key
  end
end
return answer
