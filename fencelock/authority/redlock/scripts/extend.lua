-- include marker
-- EXTEND: extend the locks of completed leases, grant by grant, each if no other client has one of its locks. No lock
-- is shortened, except by a ttl below zero: such a grant ends after exactly -ttl ms.
-- A missing lock is made again with a value that no CONFIRM accepts. It does not count in this round, because another
-- holder may have had it in between. A blank or restarted node makes locks as well, and has them when it is admitted.
-- A claim counts as missing, too: the majority that has our lock refuses the called contender, which stays in line.
-- Otherwise a node with many waiters would never have our lock again.
-- ARGV[3..]: for each grant its nonce, ttl in ms, the number of its locks, and the value for a missing one.
-- Returns EXTENDED, epoch and for each grant 2 (extended), 1 (a lock was made again) or 0 (another client has one of
-- its locks) | a refusal.
local state = redis.call('HMGET', NODE, 'e', 'r', 'cfg', 'next')
local refused = refusal(unpack(state))
local restarted = refused and refused[1] == 'RESTARTED' and state[3] == ARGV[1] and not state[4]
if refused and refused[1] ~= 'AMNESIA' and not restarted then return refused end

local answer, key = {'EXTENDED', tonumber(state[1] or 0)}, 2
for at = 3, #ARGV, 4 do
  local nonce, ttl, last = ARGV[at], tonumber(ARGV[at + 1]), key + tonumber(ARGV[at + 2]) - 1
  local code, missing = 2, {}
  for i = key, last do
    local holder, epoch = read_lock(KEYS[i])
    missing[i] = not holder or is_claim(KEYS[i], holder, epoch)
    if not missing[i] and holder ~= nonce then code = 0 end
  end
  if code == 2 then
    for i = key, last do
      if missing[i] then
        redis.call('SET', KEYS[i], ARGV[at + 3], 'PX', math.abs(ttl))
        code = 1
      elseif ttl < 0 or redis.call('PTTL', KEYS[i]) < ttl then
        redis.call('PEXPIRE', KEYS[i], math.abs(ttl))
      end
    end
  end
  answer[#answer + 1] = code
  key = last + 1
end
return refused or answer
