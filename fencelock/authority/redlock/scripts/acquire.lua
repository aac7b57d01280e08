-- include shortcut
-- ACQUIRE: grant all the locks, or none.
-- ARGV[3] ttl in ms, ARGV[4] the epoch that the hints are of; then for each lock its stripe and a hint.
-- After these, from a contender that waits in line, or is fair: its place (or ''), ms waited, since when in Unix ms,
-- and 1 for fair; then, from a holder that remints: the nonce of its own grant, whose locks it takes over.
-- Returns GRANTED, epoch, counter … | HELD, remaining ms | FULL | a refusal.
local fields = {'e', 'r', 'cfg', 'next', 'b'}
for i = 1, LOCKS do fields[5 + i] = 'c' .. ARGV[3 + 2 * i] end
local state = redis.call('HMGET', NODE, unpack(fields))

-- The shortcut for most calls takes two more commands: one lock that is free, a contender without a place and a hint,
-- and a valid marker. In all other cases it changes nothing, and the rest of this script is executed.
if #ARGV == 6 and ARGV[6] == '0' and state[1] and state[2] == SOCKET_RUN_ID and SOCKET_REPLID == ''
  and state[3] == ARGV[1] and not state[4] and is_unbroken() then
  local counter = grant(state[1], KEYS[2], NONCE, ARGV[3], fields[6], state[6] or state[5])
  if counter then return {'GRANTED', tonumber(state[1]), counter} end
end

-- include marker
-- include queue
local refused = refusal(unpack(state, 1, 4))
if refused then return refused end
local epoch = tonumber(state[1])
local place, waited, since, fair, old = unpack(ARGV, 5 + 2 * LOCKS)
local waits = place and place ~= ''
local claim = waits and '>' .. place
if waits then
  for i = 1, LOCKS do hear_from(KEYS[i + 1], place) end
end

-- Refuse, and put the contender in line. If it cannot have all the locks, it must not keep one from others.
local function held(key)
  local ttl = redis.call('PTTL', key)
  if waits then
    for i = 1, LOCKS do
      if read_lock(KEYS[i + 1]) == claim then pass_on(KEYS[i + 1]) end
    end
    line_up(key, place, waited, since)
  end
  return {'HELD', ttl}
end

-- Whether a free lock must go to another contender, which has waited longer.
local function is_anothers_turn(key)
  local queue = key_of('q', key)
  if redis.call('EXISTS', queue) == 0 then return false end
  if waits then
    line_up(key, place, waited, since)
    if queued('ZRANGE', queue, 0, 0)[1] == place then return false end
  end
  local called = call_next(key)
  return called and called ~= place
end

local answer, counters, values, is_full = {'GRANTED', epoch}, {}, {}, false
for i = 1, LOCKS do
  local key, field = KEYS[i + 1], fields[5 + i]
  local nonce, its_epoch, its_counter = read_lock(key)
  if nonce and (nonce == claim or nonce == old) then
    nonce = nil
  elseif nonce and (nonce ~= NONCE or not its_counter) then
    -- Also our own lock, if EXTEND has made it again: its lease was completed, so this is a late duplicate.
    return held(key)
  elseif not nonce and (waits or fair == '1') and is_anothers_turn(key) then
    return held(key)
  end
  if nonce and its_epoch == epoch then
    answer[2 + i] = its_counter  -- a resent request gets the answer that it got before
  else
    -- Two locks of one call may share a stripe: then the second gets the next counter after the first.
    local last = counters[field] or tonumber(state[5 + i] or state[5]) or 0 / 0
    local hint = tonumber(ARGV[4]) == epoch and tonumber(ARGV[4 + 2 * i]) or 0
    local counter = math.max(last + 1, is_near(hint, last) and hint or 0)
    is_full = is_full or not is_counter(counter)
    answer[2 + i] = counter
    counters[field] = counter
    values[key] = NONCE .. '|' .. state[1] .. '|' .. counter
  end
end
if is_full then return {'FULL'} end
for field, counter in pairs(counters) do redis.call('HSET', NODE, field, counter) end
for key, value in pairs(values) do redis.call('SET', key, value, 'PX', ARGV[3]) end
if waits then
  for i = 1, LOCKS do queued('ZREM', key_of('q', KEYS[i + 1]), place) end
end
return answer
