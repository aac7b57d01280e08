local function now_ms()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

-- Ms for which a node still stays out: locks that it has forgotten may last for ticket_ttl after it got its ticket.
local function ms_out(ticket_at, ticket_ttl)
  return math.max(0, math.min(ticket_ttl, ticket_at + ticket_ttl - now_ms()))
end

-- Why this node must not vote, or nil; from its fields e, r, cfg and next. `r` is the run_id at its admission: a server
-- that was restarted since, or that came back with an older file, has another run_id.
local function refusal(epoch, admitted_run_id, membership, closed)
  if not epoch then return {'AMNESIA'} end
  local run_id, is_same = SOCKET_RUN_ID, true
  if SOCKET_REPLID ~= '' then
    -- A socket proves nothing if a proxy or a failover may be behind it: ask the server itself.
    run_id = string.match(redis.call('INFO', 'server'), 'run_id:(%x+)')
    local replid = string.match(redis.call('INFO', 'replication'), 'master_replid:(%x+)')
    is_same = replid == redis.call('HGET', NODE, 'm')
  end
  if not (is_same and admitted_run_id == run_id and is_unbroken()) then
    -- With the ms for which the node still stays out; -1 if it has no ticket yet.
    local ticket_of, at, ttl = unpack(redis.call('HMGET', NODE, 'ticket_of', 'ticket_at', 'ticket_ttl'))
    local has_ticket = ticket_of and string.find(ticket_of, run_id .. '/', 1, true) == 1 and is_unbroken()
    return {'RESTARTED', has_ticket and ms_out(at, ttl) or -1}
  end
  if membership ~= ARGV[1] then return {'CONFIG'} end
  if closed then return {'CLOSED'} end
end

-- Return the nonce, epoch and counter of the grant in a lock key, and its value. A lock that EXTEND has made again has
-- no counter. A claim is its own nonce. For a foreign value it returns '#' and its digest, the nonce for its RELEASE.
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

-- A claim keeps a lock for a contender that was called; it has an expiry.
local function is_claim(key, value, epoch)
  return not epoch and string.sub(value, 1, 1) == '>' and redis.call('PTTL', key) >= 0
end

-- Lua would print a large number with an exponent.
local function digits(number)
  return string.format('%.0f', number)
end

-- Whether this node may have missed all the grants between its counter and a number that a client names. Many names
-- share a stripe, and a false, huge number would leave no counters for any of them.
local function is_near(number, last)
  return number - last <= 4294967296  -- 2^32: a thousand a second for fifty days
end

-- Raise a stripe's counter to a decided value; never lower it. A missing counter has the value `base`. Returns false
-- for a value that is too large to come from missed grants.
local function catch_up(stripe, decided, base)
  local last = tonumber(redis.call('HGET', NODE, 'c' .. stripe) or base) or 0 / 0
  decided = tonumber(decided)
  if decided <= last then return true end
  if not is_near(decided, last) then return false end  -- also if the counter is no number
  redis.call('HSET', NODE, 'c' .. stripe, digits(decided))
  return true
end
