-- Every script begins with this. KEYS[1] is the node's hash, KEYS[2..] are the locks, in canonical order.
-- ARGV[1] is the client's fingerprint of the membership, ARGV[2] the nonce of the acquisition.
-- The last two belong to the socket: its server's run_id; the replication id if each vote has to prove both, or ''.
local SOCKET_REPLID = table.remove(ARGV)
local SOCKET_RUN_ID = table.remove(ARGV)
local NODE = KEYS[1]
local NONCE = ARGV[2]
local LOCKS = #KEYS - 1

-- Whether this process has loaded no data since the node got its ticket. BEGIN makes a key whose string has the
-- encoding "raw", because it was changed in place; a short string that a server loads has another encoding. This shows
-- if a node has followed another server, or reloaded a file, under the same run_id and connection.
local function is_unbroken()
  return redis.call('OBJECT', 'ENCODING', NODE .. ':m') == 'raw'
end

-- The key of a lock's queue ('q'), or of its silent clients ('s').
local function key_of(kind, lock)
  return NODE .. ':' .. kind .. string.sub(lock, #NODE + 3)
end

