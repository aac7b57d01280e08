-- PROMISE: from now on this node reports ARGV[2] or a larger epoch as its highest, so that clients choose larger ones.
-- ARGV[3] the ticket of a node that is not admitted, else ''; ARGV[4] 'change': a node closed for this list counts.
-- Returns PROMISED | NO_TICKET | a refusal.
local counts
if is_admitted() then
  counts = (is.cfg == ARGV[1] and not is.next) or (ARGV[4] == 'change' and is.next == ARGV[1])
else
  counts = holds(ARGV[3]) and not is.next and (not is.e or is.cfg == ARGV[1])
end
if not counts and ARGV[3] ~= '' then return {'NO_TICKET'} end
if not counts then return refusal(is.e, is.r, is.cfg, is.next) or {'CONFIG'} end
if tonumber(ARGV[2]) > tonumber(is.p or 0) then redis.call('HSET', NODE, 'p', ARGV[2]) end
return {'PROMISED'}
