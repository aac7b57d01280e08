local function now_ms()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

-- Ms for which a node still stays out: so long may locks live that it has forgotten since it got its ticket.
local function ms_out(ticket_at, ticket_ttl)
  return math.max(0, math.min(ticket_ttl, ticket_at + ticket_ttl - now_ms()))
end

-- RESTARTED, and for how many ms the node still stays out; -1 where it has no ticket yet.
local function restarted(run_id)
  local ticket = redis.call('HMGET', NODE, 'ticket_of', 'ticket_at', 'ticket_ttl')
  local is_valid = ticket[1] and string.find(ticket[1], run_id .. '/', 1, true) == 1 and is_unbroken()
  return {'RESTARTED', is_valid and ms_out(ticket[2], ticket[3]) or -1}
end

-- Why this node must not vote, or nil. `r` was written at admission: a server that was restarted since, or that came
-- back with an older file, has another run_id.
local function refusal(epoch, admitted_run_id, membership, closed)
  if not epoch then return {'AMNESIA'} end
  local run_id, replid = ARGV[#ARGV - 1], ARGV[#ARGV]
  if replid ~= '' then
    -- A socket proves nothing where a proxy or a failover may stand behind it: ask the server itself.
    run_id = string.match(redis.call('INFO', 'server'), 'run_id:(%x+)')
    local now = string.match(redis.call('INFO', 'replication'), 'master_replid:(%x+)')
    if now ~= redis.call('HGET', NODE, 'm') then return restarted(run_id) end
  end
  if admitted_run_id ~= run_id or not is_unbroken() then return restarted(run_id) end
  if membership ~= ARGV[1] then return {'CONFIG'} end
  if closed then return {'CLOSED'} end
end

-- What a lock key holds: the nonce, epoch and counter of the grant, and all of the value. One that EXTEND has made again has no counter. A claim
-- is itself. Anything else, of whatever type, is foreign: '#' and its digest, which is the nonce for RELEASE.
local function read_lock(key)
  local value = redis.pcall('GET', key)
  if not value then return nil end
  if type(value) ~= 'string' then return '#' end
  local nonce, epoch, counter = string.match(value, '^([^|]+)|(%d+)|(%w+)$')
  if nonce or string.sub(value, 1, 1) == '>' then
    return nonce or value, tonumber(epoch), tonumber(counter), value
  end
  return '#' .. redis.sha1hex(value)
end

-- Lua would print a large number with an exponent.
local function digits(number)
  return string.format('%.0f', number)
end

-- Whether this node may have missed all the grants between its counter and a number that a client names. A stripe is
-- shared by many names, and none of them could be granted any more behind a number that is made up.
local function is_near(number, last)
  return number - last <= 4294967296  -- 2^32: a thousand a second for fifty days
end

-- Raise a stripe's counter to a decided value; never lower it. A missing counter stands at `base`. Returns false for a
-- value that no grants explain.
local function catch_up(stripe, decided, base)
  local last = tonumber(redis.call('HGET', NODE, 'c' .. stripe) or base) or 0 / 0
  decided = tonumber(decided)
  if decided <= last then return true end
  if not is_near(decided, last) then return false end  -- also where the counter is no number
  redis.call('HSET', NODE, 'c' .. stripe, digits(decided))
  return true
end
