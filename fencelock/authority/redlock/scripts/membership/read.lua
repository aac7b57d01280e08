-- READ: the state of this node at one moment; '' for a value that it does not have.
-- Returns STANDING, id, members, whether it is admitted, epoch, promised epoch, fingerprint, fingerprint and members
-- of the list that it is closed for, ticket (of this server process only), ms for which the node still stays out.
local ticket, left = '', ''
if has_ticket() then
  ticket, left = is.ticket, digits(ms_out(is.ticket_at, is.ticket_ttl))
end
return {'STANDING', is.id or '', is.members or '', is_admitted() and '1' or '', is.e or '', is.p or '', is.cfg or '',
  is.next or '', is.next_members or '', ticket, left}
