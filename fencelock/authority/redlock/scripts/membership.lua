-- The scripts about membership begin with this too. ARGV[1] is the fingerprint of the list in question.
-- They are rare, so they ask the server for its run_id, whatever the socket was opened to.
local RUN_ID = string.match(redis.call('INFO', 'server'), 'run_id:(%x+)')
local REPLID = string.match(redis.call('INFO', 'replication'), 'master_replid:(%x+)') or ''
-- What a ticket is bound to: neither a restart nor a failover leaves it valid.
local INCARNATION = RUN_ID .. '/' .. REPLID

-- All that the node keeps stands in one hash, so that it is lost as a whole: a ticket that outlived the
-- promises beside it would let a node vote in an epoch that it has forgotten to have promised.
local FIELDS = {'e', 'p', 'r', 'm', 'cfg', 'next', 'id', 'members', 'next_members', 'ticket', 'ticket_of',
  'ticket_at', 'ticket_ttl'}
local is = {}
for i, value in ipairs(redis.call('HMGET', NODE, unpack(FIELDS))) do is[FIELDS[i]] = value or nil end

-- The marker is there, and was put there by this very server process, which has loaded nothing else since.
local function is_admitted()
  return is.e and is.r == RUN_ID and is_unbroken() and (SOCKET_REPLID == '' or is.m == REPLID)
end

local function has_ticket()
  return is.ticket_of == INCARNATION and is_unbroken()
end

local function holds(ticket)
  return ticket ~= '' and is.ticket == ticket and has_ticket()
end

-- From now on `is_unbroken`, until this process loads data. Whatever was admitted before must not vote by that.
-- Neither replicas nor the append-only file are told: executed again, it would be a mark that was never lost.
local function mark()
  redis.call('HDEL', NODE, 'r')
  redis.set_repl(redis.REPL_NONE)
  redis.call('DEL', NODE .. ':m')
  redis.call('SETRANGE', NODE .. ':m', 0, '1')
  redis.set_repl(redis.REPL_ALL)
end

-- Make this node a member, with nothing else left of what it was; the locks have keys of their own, and stay.
-- `p` is never lowered: another recoverer may count on what this node has promised it meanwhile.
local function admit(epoch, id, base, members)
  local promised = math.max(tonumber(is.p or 0), tonumber(epoch))
  redis.call('DEL', NODE)
  redis.call('HSET', NODE, 'e', epoch, 'p', promised, 'r', RUN_ID, 'm', REPLID, 'id', id, 'cfg', ARGV[1], 'b', base,
    'members', members)
end
