-- Every script begins with this text.
-- KEYS[1] is the node's hash, KEYS[2..] are the locks, in canonical order.
-- ARGV[1] is the client's fingerprint of the membership, ARGV[2] the nonce of the acquisition.
-- The last two ARGV belong to the socket: the run_id that it was opened to, and the replication id
-- where every vote must prove both (else '').
local NODE = KEYS[1]
local NONCE = ARGV[2]
local LOCKS = #KEYS - 1

-- Why this node must not vote, or nil. `r` was written at admission: a server that was restarted, or
-- that came back with an older file, has another run_id than the one it was admitted with.
local function refusal(epoch, admitted_run_id, membership, closed)
  if not epoch then return {'AMNESIA'} end
  local run_id, replid = ARGV[#ARGV - 1], ARGV[#ARGV]
  if replid ~= '' then
    -- A socket proves nothing where a proxy or a failover may stand behind it: ask the server itself.
    run_id = string.match(redis.call('INFO', 'server'), 'run_id:(%x+)')
    local now = string.match(redis.call('INFO', 'replication'), 'master_replid:(%x+)')
    if now ~= redis.call('HGET', NODE, 'm') then return {'RESTARTED'} end
  end
  if admitted_run_id ~= run_id then return {'RESTARTED'} end
  if membership ~= ARGV[1] then return {'CONFIG'} end
  if closed then return {'CLOSED'} end
end

-- What a lock key holds: the nonce, epoch and counter of the grant. One that EXTEND has made again has no counter.
local function read_lock(key)
  local value = redis.call('GET', key)
  if not value then return nil end
  local nonce, epoch, counter = string.match(value, '^([^|]+)|(%d+)|(%w+)$')
  return nonce or value, tonumber(epoch), tonumber(counter)
end

-- Lua would print a large number with an exponent.
local function digits(number)
  return string.format('%.0f', number)
end

-- Raise a stripe's counter to a decided value; never lower it. A missing counter stands at `base`.
local function catch_up(stripe, decided, base)
  local last = redis.call('HGET', NODE, 'c' .. stripe) or base
  if tonumber(decided) > tonumber(last) then redis.call('HSET', NODE, 'c' .. stripe, decided) end
end

-- Waiting in line. A queue ({ns}:q:<resource>, sorted by since when each has waited) and the claim of
-- whoever has been called are hints: they can make this node say HELD, and never more than that. A claim
-- is a lock of nobody's, '>' and the place, that only the one who was called may take over.
local CLAIM_MS = 100          -- how long the lock is kept for one who was called: longer than any wake-up
local LONGEST_QUEUE = 128     -- who comes later looks from time to time instead
local QUEUE_MS = 5000         -- longer than anybody waits without looking again
local PARK_MS = 50            -- how fresh a bid must be to be granted while its bidder waits
local MEMORY_MS = 1000        -- how long a place is remembered, for messages that overtake each other
local OVER = '9007199254740991'
local SHORTEST_PARKED = 1000  -- ttl in ms: of a shorter one, waiting would use up too much
local COUNTER_LIMIT = 17592186044415  -- 2^44 - 1: what a token has room for

local function queue_of(key)
  return NODE .. ':q' .. string.sub(key, #NODE + 3)
end

local function now_ms()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

-- The bidder says since when it has waited, by its own clock and in ms: so all nodes have one order, however
-- the bids arrived. Where that clock is wrong by more than a second, this node's own decides.
local function line_up(key, place, waited, since)
  local queue = queue_of(key)
  if redis.call('ZCARD', queue) >= LONGEST_QUEUE then return end
  local arrived, said = now_ms() - tonumber(waited) / 1000, tonumber(since)
  if math.abs(said - arrived) <= 1000 then arrived = said end
  redis.call('ZADD', queue, 'NX', digits(arrived), place)
  redis.call('PEXPIRE', queue, QUEUE_MS)
end

-- Call a place; true if there is somebody to hear it. A process that died hears nothing.
local function call(place, message)
  local client, number = string.match(place, '^(.-)%.(.*)$')
  local heard = redis.pcall('PUBLISH', NODE .. ':w:' .. (client or ''), (number or '') .. message)
  return type(heard) == 'number' and heard > 0
end

-- Keep a lock that is free for the first in line, and call them. Returns their place, or nil where
-- nobody waits. `grant`, if given, may give them the lock itself, and returns what to tell them.
local function call_next(key, grant)
  local queue = queue_of(key)
  local place, granted, heard
  repeat
    place = redis.call('ZPOPMIN', queue)[1]
    if not place then return nil end
    granted = grant and grant(key, place)
    heard = call(place, granted or '')
    if granted and not heard then redis.call('DEL', key) end
  until heard
  if not granted then redis.call('SET', key, '>' .. place, 'PX', CLAIM_MS) end
  local second = redis.call('ZRANGE', queue, 0, 0, 'WITHSCORES')
  -- Should the first never come, the second looks when the claim ends. Where locks change hands faster
  -- than that, a second call each time would cost more than it is worth.
  if second[1] and now_ms() - tonumber(second[2]) > CLAIM_MS then call(second[1], ' ' .. CLAIM_MS) end
  return place
end

local function pass_on(key, grant)
  if not call_next(key, grant) then redis.call('DEL', key) end
end

-- What is remembered of a place, `waited|bid`: the latest bid, parked, which may be granted for a moment, for its
-- bidder waits and an ACQUIRE may arrive late; or nothing after `|`, when that bid was released. An ACQUIRE that
-- comes after its own RELEASE, or after a later bid's, is known by how long its bidder had waited.
local function remember(place, waited, bid)
  redis.call('SET', NODE .. ':p:' .. place, waited .. '|' .. bid, 'PX', MEMORY_MS)
end

local function recall(place)
  local value = redis.call('GET', NODE .. ':p:' .. place)
  if value then return string.match(value, '^(%d+)|(.*)$') end
end
