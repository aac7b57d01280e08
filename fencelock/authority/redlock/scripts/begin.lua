-- BEGIN: put a ticket on a blank node. The ticket carries the id that the node is going to have, and is
-- bound to the run_id: a node that restarts before it is opened has no ticket any more.
-- A ticket that is already there is returned unchanged, so that all who initialise see the same ids.
-- KEYS[2] the ticket. ARGV[1] unused, ARGV[2] the id to use if there is none, ARGV[3] longest ttl in ms.
-- Returns TICKET, id, longest ttl | ADMITTED, id, members, and whether it may vote or has restarted.
local run_id = ARGV[#ARGV - 1]
local admitted = redis.call('HMGET', NODE, 'id', 'members', 'r')
if admitted[2] then
  return {'ADMITTED', admitted[1], admitted[2], admitted[3] == run_id and 'votes' or 'restarted'}
end

local ticket = redis.call('HMGET', KEYS[2], 'run_id', 'id', 'max_ttl')
if ticket[1] ~= run_id then
  ticket = {run_id, ARGV[2], ARGV[3]}
  redis.call('HSET', KEYS[2], 'run_id', ticket[1], 'id', ticket[2], 'max_ttl', ticket[3])
end
return {'TICKET', ticket[2], ticket[3]}
