-- LEASES: when the last lock in one part of this node's keys ends. ARGV[2] the cursor, 0 at first.
-- Returns LEASES, cursor (0 at the end), and ms until the last lock of this part ends.
local pattern = string.gsub(NODE, '[%*%?%[%]\\]', '\\%0') .. ':l:*'
local found = redis.call('SCAN', ARGV[2], 'MATCH', pattern, 'COUNT', 10000)
local longest = 0
for _, key in ipairs(found[2]) do longest = math.max(longest, redis.call('PTTL', key)) end
return {'LEASES', found[1], digits(longest)}
