-- EXTEND: let the locks live on, if all of them are still ours. The token stays.
-- ARGV[3] ttl in ms. Returns EXTENDED | LOST | a refusal.
local state = redis.call('HMGET', NODE, 'e', 'r', 'cfg', 'next')
local refused = refusal(state[1], state[2], state[3], state[4])
if refused then return refused end

for i = 1, LOCKS do
  if read_lock(KEYS[i + 1]) ~= NONCE then return {'LOST'} end
end
for i = 1, LOCKS do
  if redis.call('PTTL', KEYS[i + 1]) < tonumber(ARGV[3]) then
    redis.call('PEXPIRE', KEYS[i + 1], ARGV[3])
  end
end
return {'EXTENDED'}
