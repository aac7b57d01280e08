-- OPEN: let a node vote in a new list. The node must still have the ticket with which the list was made (its id), or be
-- closed for this list. OPEN removes the ticket, and the closing.
-- ARGV[2] the epoch, ARGV[3] the node's id, ARGV[4] where counters start, ARGV[5] the members.
-- Returns OPENED, id, members | ADMITTED, id, members | NO_TICKET.
local awaits = is_admitted() and is.next == ARGV[1]
if is.e and not awaits then return {'ADMITTED', is.id, is.members} end
if not awaits and not holds(ARGV[3]) then return {'NO_TICKET'} end
admit(ARGV[2], ARGV[3], ARGV[4], ARGV[5])
return {'OPENED', ARGV[3], ARGV[5]}
