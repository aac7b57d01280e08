-- ACQUIRE: grant all the locks, or none.
-- ARGV[3] ttl in ms, ARGV[4] the epoch that the hints are of; then for each lock its stripe and a hint.
-- Returns GRANTED, epoch, counter … | HELD, remaining ms | FULL | a refusal.
local COUNTER_LIMIT = 17592186044415  -- 2^44 - 1: what a token has room for

local fields = {'e', 'r', 'cfg', 'next', 'b'}
for i = 1, LOCKS do fields[5 + i] = 'c' .. ARGV[3 + 2 * i] end
local state = redis.call('HMGET', NODE, unpack(fields))
local refused = refusal(state[1], state[2], state[3], state[4])
if refused then return refused end
local epoch = tonumber(state[1])

local ours = {}
for i = 1, LOCKS do
  local nonce, its_epoch, its_counter = read_lock(KEYS[i + 1])
  if nonce and nonce ~= NONCE then return {'HELD', redis.call('PTTL', KEYS[i + 1])} end
  -- A resent request gets the answer that it got before.
  if nonce and its_epoch == epoch then ours[i] = its_counter end
end

local answer = {'GRANTED', epoch}
local counters = {}
for i = 1, LOCKS do
  local field = fields[5 + i]
  if not ours[i] then
    -- Two locks of one call may share a stripe: the second counts on from the first.
    local last = counters[field] or tonumber(state[5 + i] or state[5])
    local hint = 0
    if tonumber(ARGV[4]) == epoch then hint = tonumber(ARGV[4 + 2 * i]) end
    counters[field] = math.max(last + 1, hint)
    if counters[field] > COUNTER_LIMIT then return {'FULL'} end
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
end
return answer
