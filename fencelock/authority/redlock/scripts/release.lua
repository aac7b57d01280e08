-- RELEASE: delete the locks that are still ours, and let a laggard's counters catch up.
-- No vote: it never refuses. ARGV[3] the epoch of the decision; then for each lock its stripe and T
-- (0 where nothing was decided).
-- Returns RELEASED | LOST.
local state = redis.call('HMGET', NODE, 'e', 'cfg', 'b')
-- A blank node stays blank: a counter alone would be state without a marker.
if state[1] == ARGV[3] and state[2] == ARGV[1] then
  for i = 1, LOCKS do catch_up(ARGV[2 + 2 * i], ARGV[3 + 2 * i], state[3]) end
end

local released = 0
for i = 1, LOCKS do
  if read_lock(KEYS[i + 1]) == NONCE then
    redis.call('DEL', KEYS[i + 1])
    -- Only a lock that went away wakes anybody up, else losers wake losers for ever. A user without
    -- rights to the channel must still be able to release.
    redis.pcall('PUBLISH', NODE .. ':w:' .. string.sub(KEYS[i + 1], #NODE + 4), '')
    released = released + 1
  end
end
if released == LOCKS then return {'RELEASED'} end
return {'LOST'}
