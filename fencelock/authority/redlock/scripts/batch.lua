-- include shortcut
-- BATCH: execute ACQUIREs and RELEASEs of one lock each, in their order, by their shortcuts only.
-- ARGV[2..]: for each lock a nonce and a stripe; then the ttl in ms and '' of an ACQUIRE, or '' and T of a RELEASE.
-- Returns BATCH, epoch and for each command the counter that was granted; 1 for a lock that was released; or 0: nothing
-- was changed, and the client has to send this command again, alone.
local state = redis.call('HMGET', NODE, 'e', 'r', 'cfg', 'next', 'b')
local epoch = state[1]
local votes = epoch and state[2] == SOCKET_RUN_ID and SOCKET_REPLID == '' and state[3] == ARGV[1] and not state[4]
  and is_unbroken()

local function take(key, nonce, field, ttl, decided)
  local last = tonumber(redis.call('HGET', NODE, field) or state[5]) or 0 / 0
  if decided == '' then return grant(epoch, key, nonce, ttl, field, last) end
  return last >= tonumber(decided) and let_go(key, nonce)
end

local answer = {'BATCH', tonumber(epoch or 0)}
for i = 2, #KEYS do
  local at = 4 * i - 6  -- 2, 6, 10 …
  answer[i + 1] = votes and take(KEYS[i], ARGV[at], 'c' .. ARGV[at + 1], ARGV[at + 2], ARGV[at + 3]) or 0
end
return answer
