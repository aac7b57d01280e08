-- ADMIT: let a node vote again that has lost its memory, in an epoch in which no node has ever voted.
-- ARGV[2] the epoch, ARGV[3] the ticket, ARGV[4] the id of its seat, ARGV[5] the members.
-- Only with the ticket: an ADMIT that arrives again, after the node has voted and forgotten, finds another ticket.
-- Not before the ticket is as old as the longest lease, by this node's own clock: after that, any client may admit.
-- Returns ADMITTED, id, members | CLOSED | NO_TICKET | EARLY, ms for which the node still stays out.
if is_admitted() then return {'ADMITTED', is.id, is.members} end
if is.next then return {'CLOSED'} end
if not holds(ARGV[3]) then return {'NO_TICKET'} end
local left = ms_out(is.ticket_at, is.ticket_ttl)
if left > 0 then return {'EARLY', left} end
admit(ARGV[2], ARGV[4], 0, ARGV[5])
return {'ADMITTED', ARGV[4], ARGV[5]}
