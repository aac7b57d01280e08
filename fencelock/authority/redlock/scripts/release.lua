-- include shortcut
-- RELEASE: delete the locks that are still ours, and raise counters that lag behind. It is no vote: it never refuses.
-- ARGV[3] the epoch of the decision; then for each lock its stripe and T (0 if nothing was decided). After these, from
-- a contender in line: its place, which it leaves; if it keeps the place, also the ms waited and since when in Unix ms.
-- Returns RELEASED | LOST | AMNESIA: blank, and without the locks.
local state = redis.call('HMGET', NODE, 'e', 'cfg', 'b', 'c' .. ARGV[4])
local is_decided_here = state[1] == ARGV[3] and state[2] == ARGV[1]

-- The shortcut for most calls only deletes the lock: one lock, still ours, without waiters, its counter not behind.
if #ARGV == 5 and is_decided_here and (tonumber(state[4] or state[3]) or 0 / 0) >= tonumber(ARGV[5])
  and let_go(KEYS[2], NONCE) then
  return {'RELEASED'}
end

-- include marker
-- include queue
local place, waited, since = unpack(ARGV, 4 + 2 * LOCKS)
local leaves = place and not since
-- Before locks are passed on, because a contender that gives way, but has waited longest, has to be the next. So after
-- contenders have split the votes, all nodes choose the same one of them.
if since and state[1] then line_up(KEYS[2], place, waited, since) end

local released = 0
for i = 1, LOCKS do
  local key = KEYS[i + 1]
  local nonce = read_lock(key)
  if place then hear_from(key, place) end
  if leaves then queued('ZREM', key_of('q', key), place) end
  -- Only for a lock that is ours, so that a false number can harm only the lock of its own client.
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
