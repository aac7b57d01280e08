-- RELEASE: delete the locks that are still ours, and let a laggard's counters catch up.
-- No vote: it never refuses. ARGV[3] the epoch of the decision; then for each lock its stripe and T
-- (0 where nothing was decided). After these, of one who waited in line: its place, and ms waited if it
-- goes on waiting, 'leave' otherwise.
-- Returns RELEASED | LOST.
local state = redis.call('HMGET', NODE, 'e', 'cfg', 'b')
-- A blank node stays blank: a counter alone would be state without a marker.
if state[1] == ARGV[3] and state[2] == ARGV[1] then
  for i = 1, LOCKS do catch_up(ARGV[2 + 2 * i], ARGV[3 + 2 * i], state[3]) end
end

local place, waited
if #ARGV > 5 + 2 * LOCKS then place, waited = ARGV[4 + 2 * LOCKS], ARGV[5 + 2 * LOCKS] end

local released = 0
for i = 1, LOCKS do
  local key = KEYS[i + 1]
  local nonce = read_lock(key)
  if waited == 'leave' then redis.call('ZREM', queue_of(key), place) end
  if nonce == NONCE then
    pass_on(key)
    released = released + 1
  elseif place and nonce == '>' .. place then
    pass_on(key)
  end
end
-- Behind whoever has just been called, and before all who have waited for less long.
if place and waited ~= 'leave' then line_up(KEYS[2], place, waited) end
if released == LOCKS then return {'RELEASED'} end
return {'LOST'}
