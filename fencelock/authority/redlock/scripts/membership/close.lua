-- CLOSE: refuse all votes from now on, because another list replaces this node's list. The next list is set only once,
-- so that two operators cannot both get a majority for theirs.
-- ARGV[2] fingerprint of the next list, ARGV[3] its members, so that a later run can finish the change.
-- Returns SHUT | CLOSED (for another list) | a refusal.
local refused = refusal(is.e, is.r, is.cfg, is.next and is.next ~= ARGV[2])
if refused then return refused end
redis.call('HSET', NODE, 'next', ARGV[2], 'next_members', ARGV[3])
return {'SHUT'}
