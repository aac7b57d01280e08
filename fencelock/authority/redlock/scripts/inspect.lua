-- INSPECT: which locks are held, and by whom. KEYS[2..] which; without them, a page of all: ARGV[3] where to go on,
-- 0 at first, ARGV[4] how many keys to look at. ARGV[5] other keys instead, by a pattern: those that have no end.
-- Returns SHOWN, where to go on (0 at the end), then for each lock its resource, value, remaining ms (-1: no end), how
-- many wait, and what its client has told of itself; for other keys only their names | a refusal.
-- include marker
local refused = refusal(unpack(redis.call('HMGET', NODE, 'e', 'r', 'cfg', 'next')))
if refused then return refused end
local prefix, keys, following = NODE .. ':l:', {unpack(KEYS, 2)}, '0'
if LOCKS == 0 then
  local pattern = ARGV[5] ~= '' and ARGV[5] or string.gsub(prefix, '[%*%?%[%]\\]', '\\%0') .. '*'
  following, keys = unpack(redis.call('SCAN', ARGV[3], 'MATCH', pattern, 'COUNT', ARGV[4]))
end
local function string_at(key)
  local value = redis.pcall('GET', key)
  return type(value) == 'string' and value or ''
end

local answer, told = {'SHOWN', following}, {}
for _, key in ipairs(keys) do
  local left = redis.call('PTTL', key)
  if LOCKS == 0 and ARGV[5] ~= '' then
    if left == -1 then answer[#answer + 1] = key end
  else
    local nonce, _, _, value = read_lock(key)
    if nonce and (string.sub(nonce, 1, 1) ~= '>' or left < 0) then
      local client = string.sub(nonce, 1, 16)
      told[client] = told[client] or string_at(NODE .. ':w:' .. client)
      local waiters = redis.pcall('ZCARD', queue_of(key))
      waiters = type(waiters) == 'number' and tostring(waiters) or '0'
      local its = {string.sub(key, #prefix + 1), value or nonce, tostring(left), waiters, told[client]}
      for _, fact in ipairs(its) do answer[#answer + 1] = fact end
    end
  end
end
return answer
