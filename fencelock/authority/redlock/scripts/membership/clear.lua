-- CLEAR: delete the memory of this node, and the locks, queues and clients in one part of its keys. For an operator
-- only, and only after the list has lost its majority. ARGV[2] the cursor, 0 at first.
-- Returns CLEARED, cursor (0 at the end), and how many keys it has deleted.
local deleted = redis.call('DEL', NODE, NODE .. ':m')
local pattern = string.gsub(NODE, '[%*%?%[%]\\]', '\\%0') .. ':[lqw]:*'
local found = redis.call('SCAN', ARGV[2], 'MATCH', pattern, 'COUNT', 10000)
for _, key in ipairs(found[2]) do deleted = deleted + redis.call('DEL', key) end
return {'CLEARED', found[1], tostring(deleted)}
