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

-- That bid is over, and those before it; one that came after it is not.
local function forget_bid(place, waited)
  local last = recall(place)
  if not last or tonumber(last) <= tonumber(waited) then remember(place, waited, '') end
end
