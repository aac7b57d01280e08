-- The scripts about membership begin with this, too. ARGV[1] is the fingerprint of the list in question.
-- They are rare, so they ask the server for its run_id, and do not rely on the arguments of the socket.
local RUN_ID = string.match(redis.call('INFO', 'server'), 'run_id:(%x+)')
local REPLID = string.match(redis.call('INFO', 'replication'), 'master_replid:(%x+)') or ''
-- A ticket is bound to this, so that a restart or a failover makes it invalid.
local INCARNATION = RUN_ID .. '/' .. REPLID

-- One hash has all that the node stores, so that it is lost as a whole: a ticket that outlived the promises
-- beside it would let a node vote in an epoch although it has forgotten its promises.
local FIELDS = {'e', 'p', 'r', 'm', 'cfg', 'next', 'id', 'members', 'next_members', 'ticket', 'ticket_of',
  'ticket_at', 'ticket_ttl'}
local is = {}
for i, value in ipairs(redis.call('HMGET', NODE, unpack(FIELDS))) do is[FIELDS[i]] = value or nil end

-- Whether the marker exists, and was written by this server process, which has loaded no other data since.
local function is_admitted()
  return is.e and is.r == RUN_ID and is_unbroken() and (SOCKET_REPLID == '' or is.m == REPLID)
end

local function has_ticket()
  return is.ticket_of == INCARNATION and is_unbroken()
end

local function holds(ticket)
  return ticket ~= '' and is.ticket == ticket and has_ticket()
end

-- Make `is_unbroken` true until this process loads data, and delete `r`, so that an earlier admission does not vote.
-- Replicas and the append-only file do not get the key: executed again, these commands would hide a loss.
local function mark()
  redis.call('HDEL', NODE, 'r')
  redis.set_repl(redis.REPL_NONE)
  redis.call('DEL', NODE .. ':m')
  redis.call('SETRANGE', NODE .. ':m', 0, '1')
  redis.set_repl(redis.REPL_ALL)
end

-- Make this node a member, and delete all of its earlier state; the locks have keys of their own, and stay.
-- `p` is never lowered: another recoverer may rely on what this node has promised it meanwhile.
local function admit(epoch, id, base, members)
  local promised = math.max(tonumber(is.p or 0), tonumber(epoch))
  redis.call('DEL', NODE)
  redis.call('HSET', NODE, 'e', epoch, 'p', promised, 'r', RUN_ID, 'm', REPLID, 'id', id, 'cfg', ARGV[1], 'b', base,
    'members', members)
end
