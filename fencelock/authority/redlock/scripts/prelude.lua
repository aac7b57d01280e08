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

local function queue_of(key)
  return NODE .. ':q' .. string.sub(key, #NODE + 3)
end

local function now_ms()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

local function line_up(key, place, waited)
  local queue = queue_of(key)
  if redis.call('ZCARD', queue) >= LONGEST_QUEUE then return end
  redis.call('ZADD', queue, 'NX', digits(now_ms() - tonumber(waited)), place)
  redis.call('PEXPIRE', queue, QUEUE_MS)
end

-- Call a place; true if there is somebody to hear it. A process that died hears nothing.
local function call(place, message)
  local client, number = string.match(place, '^(.-)%.(.*)$')
  local heard = redis.pcall('PUBLISH', NODE .. ':w:' .. (client or ''), (number or '') .. message)
  return type(heard) == 'number' and heard > 0
end

-- Keep a lock that is free for the first in line, and call them. Returns their place, or nil where
-- nobody waits.
local function call_next(key)
  local queue = queue_of(key)
  local place
  repeat
    place = redis.call('ZPOPMIN', queue)[1]
    if not place then return nil end
  until call(place, '')
  redis.call('SET', key, '>' .. place, 'PX', CLAIM_MS)
  local second = redis.call('ZRANGE', queue, 0, 0, 'WITHSCORES')
  -- Should the first never come, the second looks when the claim ends. Where locks change hands faster
  -- than that, a second call each time would cost more than it is worth.
  if second[1] and now_ms() - tonumber(second[2]) > CLAIM_MS then call(second[1], ' ' .. CLAIM_MS) end
  return place
end

local function pass_on(key)
  if not call_next(key) then redis.call('DEL', key) end
end
