from typing import Any

class ACL:
    id: Any

def make_digest_acl(username: str, password: str, *, all: bool = False) -> ACL: ...
def make_acl(scheme: str, credential: str, *, read: bool = False, admin: bool = False) -> ACL: ...
