-- BEGIN: put a ticket on a node that is not admitted; only a client that knows the ticket may admit the node later. An
-- existing ticket is returned unchanged, so that all clients that initialise or recover share it.
-- ARGV[2] a random word of the sender, ARGV[3] longest ttl in ms, ARGV[4] the id that the node has named; for a blank
-- node, the id of the seat that it gets back; '' for a seat in a new list.
-- Returns TICKET, ticket, longest ttl, ms for which the node still stays out | ADMITTED, id, members | CLOSED | CONFIG.
if is_admitted() then return {'ADMITTED', is.id, is.members} end
if is.next then return {'CLOSED'} end
if is.e and ARGV[4] == '' then return {'ADMITTED', is.id, is.members} end
if is.e and is.id ~= ARGV[4] then return {'CONFIG'} end

if not has_ticket() then
  mark()
  if not is_unbroken() then
    return redis.error_reply('ERR this server keeps strings otherwise than Redis and Valkey do, so that a node'
      .. ' that loads older data while it runs could not be known: use another server')
  end
  -- No ticket is made twice: a late ADMIT must not have the ticket of a BEGIN that arrives again after a flush. Lua's
  -- random numbers start over in every script, so a hash is used. The counters in INFO grow with each command, the
  -- clock mostly. The run_id differs between server processes, the sender's word between nodes that are alike.
  local now = redis.call('TIME')
  local seed = {RUN_ID, now[1], now[2], redis.call('INFO'), ARGV[2]}
  is.ticket = string.sub(redis.sha1hex(table.concat(seed, '|')), 1, 32)
  is.ticket_at, is.ticket_ttl = now_ms(), ARGV[3]
  redis.call('HSET', NODE, 'ticket', is.ticket, 'ticket_of', INCARNATION, 'ticket_at', is.ticket_at,
    'ticket_ttl', is.ticket_ttl)
elseif now_ms() < tonumber(is.ticket_at) then
  is.ticket_at = now_ms()  -- the clock was set back, so the wait starts over
  redis.call('HSET', NODE, 'ticket_at', is.ticket_at)
end
return {'TICKET', is.ticket, is.ticket_ttl, digits(ms_out(is.ticket_at, is.ticket_ttl))}
