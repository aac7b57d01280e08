-- OPEN: admit a blank node into epoch 0, if it still holds the ticket that the membership was made with.
-- KEYS[2] the ticket. ARGV[1] the fingerprint, ARGV[2] the node's id, ARGV[3] where counters start,
-- ARGV[4] the members.
-- Returns OPENED | ADMITTED, id, members | NO_TICKET.
local admitted = redis.call('HMGET', NODE, 'id', 'members')
if admitted[2] then return {'ADMITTED', admitted[1], admitted[2]} end

local run_id = ARGV[#ARGV - 1]
local ticket = redis.call('HMGET', KEYS[2], 'run_id', 'id')
if ticket[1] ~= run_id or ticket[2] ~= ARGV[2] then return {'NO_TICKET'} end
local replid = string.match(redis.call('INFO', 'replication'), 'master_replid:(%x+)')
redis.call('HSET', NODE, 'e', 0, 'p', 0, 'r', run_id, 'm', replid, 'id', ARGV[2], 'cfg', ARGV[1],
  'b', ARGV[3], 'members', ARGV[4])
redis.call('DEL', KEYS[2])
return {'OPENED'}
