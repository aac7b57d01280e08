-- include shortcut
-- RELEASE: delete the locks that are still ours, and let a laggard's counters catch up.
-- No vote: it never refuses. A blank node that does not know the locks says AMNESIA. ARGV[3] the epoch of the decision;
-- then for each lock its stripe and T (0 where nothing was decided). After these, of a contender in line: its place,
-- which it leaves; where it waits on, also the ms waited and since when in ms.
-- Returns RELEASED | LOST | AMNESIA.
local state = redis.call('HMGET', NODE, 'e', 'cfg', 'b', 'c' .. ARGV[4])

-- Most often one lock is ours still, no contender waits for it, and the counter is not behind: then it is only deleted.
if #ARGV == 7 and state[1] == ARGV[3] and state[2] == ARGV[1]
  and (tonumber(state[4] or state[3]) or 0 / 0) >= tonumber(ARGV[5]) and let_go(KEYS[2], NONCE) then
  return {'RELEASED'}
end

-- include marker
-- include queue
-- Only for a lock that is ours: a number that is made up may hurt the lock of its client, and no other. A blank node stays
-- blank: a counter alone would be state without a marker.
if state[1] == ARGV[3] and state[2] == ARGV[1] then
  for i = 1, LOCKS do
    if read_lock(KEYS[i + 1]) == NONCE then catch_up(ARGV[2 + 2 * i], ARGV[3 + 2 * i], state[3]) end
  end
end

-- Before anything is passed on: a contender that gives way, but has waited longest, is the next all the same. So
-- contenders that have split the votes end up with one of them, the same on all nodes.
local place, leaves = #ARGV > 5 + 2 * LOCKS and ARGV[4 + 2 * LOCKS], #ARGV == 6 + 2 * LOCKS
if place and not leaves and state[1] then line_up(KEYS[2], place, ARGV[5 + 2 * LOCKS], ARGV[6 + 2 * LOCKS]) end

local released = 0
for i = 1, LOCKS do
  local key = KEYS[i + 1]
  local nonce = read_lock(key)
  if place then hear_from(key, place) end
  if leaves then queued('ZREM', queue_of(key), place) end
  if nonce == NONCE then
    pass_on(key)
    released = released + 1
  elseif leaves and nonce == '>' .. place then
    pass_on(key)
  end
end
if released == LOCKS then return {'RELEASED'} end
return {state[1] and 'LOST' or 'AMNESIA'}
