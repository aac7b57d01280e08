-- RAISE: vote in epoch ARGV[2] from now on, and never in an earlier one. Counters start over, because all tokens of a
-- later epoch are larger; so exhausted counters have room again. Only for an epoch that a majority has promised: a
-- second recoverer could otherwise choose the same epoch.
-- Returns RAISED | a refusal.
local refused = refusal(is.e, is.r, is.cfg, is.next)
if refused then return refused end
if tonumber(ARGV[2]) > tonumber(is.e) then
  is.e, is.p, is.b = ARGV[2], math.max(tonumber(is.p), tonumber(ARGV[2])), 0
  redis.call('DEL', NODE)
  for field, value in pairs(is) do redis.call('HSET', NODE, field, value) end
end
return {'RAISED'}
