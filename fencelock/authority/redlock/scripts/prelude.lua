-- Every script begins with this text.
-- KEYS[1] is the node's hash, KEYS[2..] are the locks, in canonical order.
-- ARGV[1] is the client's fingerprint of the membership, ARGV[2] the nonce of the acquisition.
-- The last two ARGV belong to the socket: the run_id that it was opened to, and the replication id
-- where every vote must prove both (else '').
local NODE = KEYS[1]
local NONCE = ARGV[2]
local LOCKS = #KEYS - 1
local COUNTER_LIMIT = 17592186044415  -- 2^44 - 1: what a token has room for; Lua writes its 14 digits in full

-- Where those stand who wait for a lock.
local function queue_of(key)
  return NODE .. ':q' .. string.sub(key, #NODE + 3)
end

