-- Every script begins with this. KEYS[1] is the node's hash, KEYS[2..] are the locks, in canonical order.
-- ARGV[1] is the client's fingerprint of the membership, ARGV[2] the nonce of the acquisition.
-- The last two belong to the socket: the run_id that it was opened to; the replication id where votes prove both, or ''.
local NODE = KEYS[1]
local NONCE = ARGV[2]
local LOCKS = #KEYS - 1
local COUNTER_LIMIT = 17592186044415  -- 2^44 - 1: what a token has room for; Lua writes its 14 digits in full

-- Whether this process's memory is what it was when the node got its ticket. BEGIN makes a key whose string the
-- server keeps in the way ("raw") of one that was written into. Whatever a server loads, at its start or while it
-- runs, has short strings in another way. So a node that has followed another server, or reloaded a file, is known
-- by this, though neither its run_id nor any connection has changed.
local function is_unbroken()
  return redis.call('OBJECT', 'ENCODING', NODE .. ':m') == 'raw'
end

-- Whether a number may be granted. What another program has written into a counter may be anything, also no number.
local function is_counter(number)
  return number >= 1 and number <= COUNTER_LIMIT and number % 1 == 0
end

local function queue_of(key)
  return NODE .. ':q' .. string.sub(key, #NODE + 3)
end

