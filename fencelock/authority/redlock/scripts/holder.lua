-- include marker
-- HOLDER: whether one of the locks is held. A claim is no holder's.
-- Returns HELD, ms until the last of them ends (-1: never) | LOST, where all are free | a refusal.
local refused, longest = refusal(unpack(redis.call('HMGET', NODE, 'e', 'r', 'cfg', 'next'))), nil
for i = 1, LOCKS do
  local nonce, left = read_lock(KEYS[i + 1]), redis.call('PTTL', KEYS[i + 1])
  local is_held = nonce and string.sub(nonce, 1, 1) ~= '>'
  if is_held then longest = (left < 0 or longest == -1) and -1 or math.max(left, longest or 0) end
end
return refused or (longest and {'HELD', longest} or {'LOST'})
