-- include marker
-- CONFIRM: raise the counters to the decided values T, if the locks are still ours.
-- ARGV[3] the epoch of the decision; then for each lock its stripe and T.
-- Returns CONFIRMED | LOST | EPOCH, epoch | HIGHER, epoch, counter … | a refusal.
local state = redis.call('HMGET', NODE, 'e', 'r', 'cfg', 'next', 'b')
local refused = refusal(unpack(state, 1, 4))
if refused then return refused end
local epoch = tonumber(state[1])
if epoch ~= tonumber(ARGV[3]) then return {'EPOCH', epoch} end

local answer, higher = {'HIGHER', epoch}, false
for i = 1, LOCKS do
  local nonce, its_epoch, counter = read_lock(KEYS[i + 1])
  -- A lock without a counter was made again by EXTEND: in between, another holder may have had it, with T.
  if nonce ~= NONCE or its_epoch ~= epoch or not counter then return {'LOST'} end
  answer[2 + i] = counter
  -- If this node granted more than T, another holder may have got T from it already: it must not be counted.
  if counter > tonumber(ARGV[3 + 2 * i]) then higher = true end
end
if higher then return answer end

for i = 1, LOCKS do
  if not catch_up(ARGV[2 + 2 * i], ARGV[3 + 2 * i], state[5]) then return {'LOST'} end
end
return {'CONFIRMED'}
