-- include prelude
-- RELEASE: delete the locks that are still ours, and let a laggard's counters catch up.
-- No vote: it never refuses. A blank node that does not know the locks says AMNESIA. ARGV[3] the epoch of the decision;
-- then for each lock its stripe and T (0 where nothing was decided). After these, of one who waited in line: its
-- place, and µs waited and since when in ms; 'leave' if it waits no longer; '' for since when, if only this bid is
-- over.
-- Returns RELEASED | LOST | AMNESIA.
local state = redis.call('HMGET', NODE, 'e', 'cfg', 'b', 'c' .. ARGV[4])

-- Most often one lock is ours still, nobody waits for it, and the counter is not behind: then it is only deleted.
-- Whatever is otherwise goes the long way, and nothing has been changed by then.
if #ARGV == 7 and state[1] == ARGV[3] and state[2] == ARGV[1]
  and tonumber(state[4] or state[3]) >= tonumber(ARGV[5]) then
  local value = redis.call('GET', KEYS[2])
  if value and string.sub(value, 1, #NONCE + 1) == NONCE .. '|'
    and redis.call('EXISTS', queue_of(KEYS[2])) == 0 then
    redis.call('DEL', KEYS[2])
    return {'RELEASED'}
  end
end

-- include marker
-- include queue
-- A blank node stays blank: a counter alone would be state without a marker.
if state[1] == ARGV[3] and state[2] == ARGV[1] then
  for i = 1, LOCKS do catch_up(ARGV[2 + 2 * i], ARGV[3 + 2 * i], state[3]) end
end

local place, waited, since
if #ARGV > 5 + 2 * LOCKS then
  place, waited, since = ARGV[4 + 2 * LOCKS], ARGV[5 + 2 * LOCKS], ARGV[6 + 2 * LOCKS]
end

-- The ACQUIRE of a parked bid, executed now that its lock is free: with all that ACQUIRE asks for, the
-- incarnation that the bidder's socket was opened to included. That stands on the disk beside the marker, and
-- comes back with it when a server falls back to an older state; so the socket of who releases has to prove it
-- as well, and where sockets prove nothing, nobody is granted anything here.
local function grant_parked(key, waiting)
  local _, bid = recall(waiting)
  local bidder, ttl, run_id, membership, at = string.match(bid or '', '^([^|]+)|(%d+)|([^|]+)|([^|]*)|(%d+)$')
  if not bidder or now_ms() - tonumber(at) > PARK_MS then return nil end
  local stripe = 'c' .. ARGV[4]
  local node = redis.call('HMGET', NODE, 'e', 'r', 'cfg', 'next', 'b', stripe)
  if not node[1] or node[2] ~= run_id or node[3] ~= membership or node[4] then return nil end
  if run_id ~= ARGV[#ARGV - 1] or ARGV[#ARGV] ~= '' or not is_unbroken() then return nil end
  local counter = tonumber(node[6] or node[5]) + 1
  if counter > COUNTER_LIMIT then return nil end
  redis.call('HSET', NODE, stripe, digits(counter))
  redis.call('SET', key, bidder .. '|' .. node[1] .. '|' .. digits(counter), 'PX', ttl)
  return ' = ' .. node[1] .. ' ' .. digits(counter) .. ' ' .. bidder
end
-- A stripe is known here for the locks that are released; of several, the first would serve for all.
local grant = LOCKS == 1 and grant_parked or nil

if state[1] and place then forget_bid(place, waited == 'leave' and OVER or waited) end
-- Before anything is passed on: whoever gives way, but has waited longest, is the next all the same. So
-- contenders that have split the votes end up with one of them, the same on all nodes.
if state[1] and place and waited ~= 'leave' and since ~= '' then line_up(KEYS[2], place, waited, since) end

local released = 0
for i = 1, LOCKS do
  local key = KEYS[i + 1]
  local nonce = read_lock(key)
  if waited == 'leave' then redis.call('ZREM', queue_of(key), place) end
  if nonce == NONCE then
    pass_on(key, grant)
    released = released + 1
  elseif waited == 'leave' and nonce == '>' .. place then
    pass_on(key, grant)
  end
end
if released == LOCKS then return {'RELEASED'} end
return {state[1] and 'LOST' or 'AMNESIA'}
