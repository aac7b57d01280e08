-- include prelude
-- include marker
-- WHO: which list of nodes this one belongs to. Returns ADMITTED, id, members | AMNESIA.
local admitted = redis.call('HMGET', NODE, 'id', 'members')
if admitted[2] then return {'ADMITTED', admitted[1], admitted[2]} end
return {'AMNESIA'}
