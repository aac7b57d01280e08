-- RAISE: vote in epoch ARGV[2] from now on; never back. Counters begin anew, for all tokens of a later epoch are larger:
-- so there is room again where they have come to their end. Only for an epoch that a majority has promised: with fewer,
-- a second recoverer could choose it again, unaware.
-- Returns RAISED | a refusal.
local refused = refusal(is.e, is.r, is.cfg, is.next)
if refused then return refused end
if tonumber(ARGV[2]) > tonumber(is.e) then
  is.e, is.p, is.b = ARGV[2], math.max(tonumber(is.p), tonumber(ARGV[2])), 0
  redis.call('DEL', NODE)
  for field, value in pairs(is) do redis.call('HSET', NODE, field, value) end
end
return {'RAISED'}
