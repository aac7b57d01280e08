-- include prelude
-- MERGED: ACQUIREs and RELEASEs of a client's many tasks in one call, each of one lock, and no lock twice. Each is
-- executed as its own script would, if nothing stands in its way; if anything does, it is left for that script.
-- From ARGV[3] on, for each lock: the nonce, its ttl in ms (of an ACQUIRE) or the decided T with a minus before it
-- (of a RELEASE), and its stripe.
-- Returns MERGED, epoch, and for each lock the counter that was granted, or 1 for one that was released, or 0 where
-- nothing was done | SINGLY where that holds for all of them.
local BAR = string.byte('|')
local fields = {'e', 'r', 'cfg', 'next', 'b'}
for i = 1, LOCKS do fields[5 + i] = 'c' .. ARGV[3 * i + 2] end
local state = redis.call('HMGET', NODE, unpack(fields))
if state[2] ~= ARGV[#ARGV - 1] or ARGV[#ARGV] ~= '' or state[3] ~= ARGV[1] or state[4]
  or not is_unbroken() then
  return {'SINGLY'}
end

local values = redis.call('MGET', unpack(KEYS, 2))
local answer, counters, raised, granted, released, queues = {'MERGED', tonumber(state[1])}, {}, {}, {}, {}, {}
for i = 1, LOCKS do
  local at, field = 3 * i, fields[5 + i]
  local counter = counters[field] or tonumber(state[5 + i] or state[5])
  local nonce, number, value = ARGV[at], tonumber(ARGV[at + 1]), values[i]
  local code = 0
  if number > 0 then
    if not value and counter < COUNTER_LIMIT then
      code = counter + 1
      counters[field] = code
      granted[#granted + 1] = i
    end
  elseif value and counter >= -number and string.find(value, nonce, 1, true) == 1
    and string.byte(value, #nonce + 1) == BAR then
    code = 1
    released[#released + 1] = i
    queues[#queues + 1] = queue_of(KEYS[i + 1])
  end
  answer[2 + i] = code
end

-- What only takes away comes last: should a node out of memory refuse the rest, each is asked for again, by its own
-- script, and finds what it needs.
if #granted > 0 then
  for field, counter in pairs(counters) do
    raised[#raised + 1] = field
    raised[#raised + 1] = counter
  end
  redis.call('HSET', NODE, unpack(raised))
  local epoch = '|' .. state[1] .. '|'
  for _, i in ipairs(granted) do
    local at = 3 * i
    local value = ARGV[at] .. epoch .. answer[2 + i]
    -- MGET has nothing to say of a key that is no string: it is somebody else's, and there.
    if not redis.call('SET', KEYS[i + 1], value, 'PX', ARGV[at + 1], 'NX') then answer[2 + i] = 0 end
  end
end
if #released > 0 then
  local somebody_waits = redis.call('EXISTS', unpack(queues)) > 0
  local gone = {}
  for position, i in ipairs(released) do
    if somebody_waits and redis.call('EXISTS', queues[position]) == 1 then
      answer[2 + i] = 0
    else
      gone[#gone + 1] = KEYS[i + 1]
    end
  end
  if #gone > 0 then redis.call('DEL', unpack(gone)) end
end
return answer
