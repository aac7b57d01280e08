-- Waiting in line. A queue ({ns}:q:<resource>, sorted by the time when each contender began to wait) and the claim of
-- the contender that was called are hints: they can only make this node answer HELD. A claim is a lock of no client,
-- '>' and the place, which only the contender at this place may take over.
local CLAIM_MS = 100       -- how long the lock is kept for a contender that was called: longer than any wake-up
local LONGEST_QUEUE = 1000  -- younger contenders get no place, and try again from time to time
local QUEUE_MS = 5000      -- longer than any contender waits before it tries again
local SILENT_MS = 60000    -- how long a client is passed over that did not follow a call; it tries again without one

-- Execute a command on a queue; a key of another type, from another program, counts as an empty queue.
local function queued(...)
  local answer = redis.pcall(...)
  if type(answer) == 'table' and answer.err then return {} end
  return answer
end

local function client_of(place)
  return string.match(place, '^(.-)%.(.*)$')
end

-- A client that was called for a lock counts as silent until its next command for this lock. It keeps its places.
local function hear_from(key, place)
  queued('ZREM', key_of('s', key), client_of(place) or '')
end

-- The contender says since when it has waited, in ms by its own clock, so that all nodes have one order, in whatever
-- order attempts arrive. If that clock is wrong by more than a second, this node's own clock decides.
local function line_up(key, place, waited, since)
  local queue = key_of('q', key)
  local arrived, said = now_ms() - tonumber(waited), tonumber(since)
  if math.abs(said - arrived) <= 1000 then arrived = said end
  queued('ZADD', queue, 'NX', arrived, place)
  for _, youngest in ipairs(queued('ZRANGE', queue, LONGEST_QUEUE, -1)) do queued('ZREM', queue, youngest) end
  redis.call('PEXPIRE', queue, QUEUE_MS)
end

-- Keep a free lock for the first in line that hears its call. Returns its place, or nil if none waits.
local function call_next(key)
  local queue, called, silent, at = key_of('q', key), key_of('s', key), {}, 0
  for _, client in ipairs(queued('ZRANGE', called, 0, -1)) do silent[client] = true end
  while true do
    local place = queued('ZRANGE', queue, at, at)[1]
    if not place then return nil end
    local client, number = client_of(place)
    if silent[client or ''] then
      at = at + 1
    else
      queued('ZREM', queue, place)
      local heard = redis.pcall('PUBLISH', NODE .. ':w:' .. (client or ''), number or '')
      if type(heard) == 'number' and heard > 0 then
        queued('ZADD', called, 0, client)
        redis.call('PEXPIRE', called, SILENT_MS)
        redis.call('SET', key, '>' .. place, 'PX', CLAIM_MS)
        return place
      end
    end
  end
end

local function pass_on(key)
  if not call_next(key) then redis.call('DEL', key) end
end
