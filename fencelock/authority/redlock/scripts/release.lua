-- include shortcut
-- RELEASE: delete the locks that are still ours, and let a laggard's counters catch up. No vote: it never refuses.
-- ARGV[3] the epoch of the decision; then for each lock its stripe and T (0 where nothing was decided). After these, of
-- a contender in line: its place, which it leaves; where it waits on, also the ms waited and since when in ms.
-- Returns RELEASED | LOST | AMNESIA: blank, and without the locks.
local state = redis.call('HMGET', NODE, 'e', 'cfg', 'b', 'c' .. ARGV[4])
local is_decided_here = state[1] == ARGV[3] and state[2] == ARGV[1]

-- Most often one lock is ours still, no contender waits for it, and the counter is not behind: then it is only deleted.
if #ARGV == 5 and is_decided_here and (tonumber(state[4] or state[3]) or 0 / 0) >= tonumber(ARGV[5])
  and let_go(KEYS[2], NONCE) then
  return {'RELEASED'}
end

-- include marker
-- include queue
local place, waited, since = unpack(ARGV, 4 + 2 * LOCKS)
local leaves = place and not since
-- Before anything is passed on: a contender that gives way, but has waited longest, is the next all the same. So
-- contenders that have split the votes end up with one of them, the same on all nodes.
if since and state[1] then line_up(KEYS[2], place, waited, since) end

local released = 0
for i = 1, LOCKS do
  local key = KEYS[i + 1]
  local nonce = read_lock(key)
  if place then hear_from(key, place) end
  if leaves then queued('ZREM', key_of('q', key), place) end
  -- Only for a lock that is ours: a number that is made up may hurt the lock of its client, and no other.
  if is_decided_here and nonce == NONCE then catch_up(ARGV[2 + 2 * i], ARGV[3 + 2 * i], state[3]) end
  if nonce == NONCE then
    pass_on(key)
    released = released + 1
  elseif leaves and nonce == '>' .. place then
    pass_on(key)
  end
end
if released == LOCKS then return {'RELEASED'} end
return {state[1] and 'LOST' or 'AMNESIA'}
