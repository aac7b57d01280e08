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

-- What a lock key holds: the nonce, epoch and counter of the grant.
local function read_lock(key)
  local value = redis.call('GET', key)
  if not value then return nil end
  local nonce, epoch, counter = string.match(value, '^([^|]+)|(%d+)|(%d+)$')
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
