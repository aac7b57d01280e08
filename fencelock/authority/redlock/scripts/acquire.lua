-- include shortcut
-- ACQUIRE: grant all the locks, or none.
-- ARGV[3] ttl in ms, ARGV[4] the epoch that the hints are of; then for each lock its stripe and a hint.
-- After these, of a contender that waits in line or heeds it: its place (or ''), ms waited, since when in ms, and 1 for
-- fair; then, of a holder that mints anew: the nonce of its own grant, whose locks it takes over.
-- Returns GRANTED, epoch, counter … | HELD, remaining ms | FULL | a refusal.
local fields = {'e', 'r', 'cfg', 'next', 'b', 'c' .. ARGV[5]}
for i = 2, LOCKS do fields[5 + i] = 'c' .. ARGV[3 + 2 * i] end
local state = redis.call('HMGET', NODE, unpack(fields))

-- Most often one lock is free, its contender neither waits nor hints, and the marker is in order: that takes two
-- commands more. Every other case goes the long way, and nothing has been changed by then.
if #ARGV == 8 and ARGV[6] == '0' and state[1] and state[2] == ARGV[7] and ARGV[8] == '' and state[3] == ARGV[1]
  and not state[4] and is_unbroken() then
  local counter = grant(state[1], KEYS[2], NONCE, ARGV[3], fields[6], state[6] or state[5])
  if counter then return {'GRANTED', tonumber(state[1]), counter} end
end

-- include marker
-- include queue
local refused = refusal(state[1], state[2], state[3], state[4])
if refused then return refused end
local epoch = tonumber(state[1])

local place, waited, since, fair, old = '', 0, 0, false, nil
if #ARGV > 6 + 2 * LOCKS then
  local at = 5 + 2 * LOCKS
  place, waited, since, fair = ARGV[at], ARGV[at + 1], ARGV[at + 2], ARGV[at + 3] == '1'
  if #ARGV > 10 + 2 * LOCKS then old = ARGV[at + 4] end
end
local claim = '>' .. place
if place ~= '' then
  for i = 1, LOCKS do hear_from(KEYS[i + 1], place) end
end

-- Refuse, and put the contender in line. One that cannot have all the locks must not keep one from others.
local function held(key)
  local ttl = redis.call('PTTL', key)
  if place ~= '' then
    for i = 1, LOCKS do
      if read_lock(KEYS[i + 1]) == claim then pass_on(KEYS[i + 1]) end
    end
    line_up(key, place, waited, since)
  end
  return {'HELD', ttl}
end

-- Whether a lock that is free is for another contender, which has waited longer.
local function is_anothers_turn(key)
  local queue = queue_of(key)
  if redis.call('EXISTS', queue) == 0 then return false end
  if place ~= '' then
    line_up(key, place, waited, since)
    if queued('ZRANGE', queue, 0, 0)[1] == place then return false end
  end
  local called = call_next(key)
  return called and called ~= place
end

local ours = {}
for i = 1, LOCKS do
  local key = KEYS[i + 1]
  local nonce, its_epoch, its_counter = read_lock(key)
  if nonce == claim or (old and nonce == old) then nonce = nil
  elseif nonce and nonce ~= NONCE then return held(key)
  -- Our own that EXTEND has made again is of a lease that was completed: this is a late duplicate.
  elseif nonce and not its_counter then return held(key)
  elseif not nonce and (place ~= '' or fair) and is_anothers_turn(key) then return held(key) end
  -- A resent request gets the answer that it got before.
  if nonce and its_epoch == epoch then ours[i] = its_counter end
end

local answer, counters = {'GRANTED', epoch}, {}
for i = 1, LOCKS do
  local field = fields[5 + i]
  if not ours[i] then
    -- Two locks of one call may share a stripe: the second counts on from the first.
    local last = counters[field] or tonumber(state[5 + i] or state[5]) or 0 / 0
    local hint = 0
    if tonumber(ARGV[4]) == epoch then hint = tonumber(ARGV[4 + 2 * i]) end
    if not is_near(hint, last) then hint = 0 end
    counters[field] = math.max(last + 1, hint)
    if not is_counter(counters[field]) then return {'FULL'} end
    answer[2 + i] = counters[field]
  else
    answer[2 + i] = ours[i]
  end
end
for field, counter in pairs(counters) do redis.call('HSET', NODE, field, digits(counter)) end
for i = 1, LOCKS do
  if not ours[i] then
    local value = NONCE .. '|' .. state[1] .. '|' .. digits(answer[2 + i])
    redis.call('SET', KEYS[i + 1], value, 'PX', ARGV[3])
  end
  if place ~= '' then queued('ZREM', queue_of(KEYS[i + 1]), place) end
end
return answer
