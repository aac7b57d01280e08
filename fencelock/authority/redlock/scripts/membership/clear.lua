-- CLEAR: delete what this node remembers, then its locks, queues and clients, looking at a part of its keys. For an
-- operator only, and only once the list has lost its majority. ARGV[2] where to go on, 0 at first.
-- Returns CLEARED, where to go on (0 at the end), and how many keys it has deleted.
local deleted = redis.call('DEL', NODE, NODE .. ':m')
local pattern = string.gsub(NODE, '[%*%?%[%]\\]', '\\%0') .. ':[lqw]:*'
local found = redis.call('SCAN', ARGV[2], 'MATCH', pattern, 'COUNT', 10000)
for _, key in ipairs(found[2]) do deleted = deleted + redis.call('DEL', key) end
return {'CLEARED', found[1], tostring(deleted)}
