"""The grants that this process holds, who in it holds them, and which blocks are inside.

Who: a thread, or inside a running event loop the task. That is what re-entry asks: the same thread or task
that holds a resource enters again and gets the same token; any other one waits like anybody else. (Which
leases a *write* may use is another question, and the context answers it: see `lease`.)
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable
from weakref import WeakValueDictionary

from fencelock.authority.base import Authority, Grant
from fencelock.lease import Lease, note_ended, note_held


def current_owner() -> object:
    """Return who is running: the task of the running event loop, or else the thread."""
    try:
        task = asyncio.current_task()
    except RuntimeError:
        task = None
    return task if task is not None else threading.current_thread()


class Hold:
    """One grant while it is held.

    Attributes:
        authority: who granted it.
        grant: as it was last extended.
        leases: of each of its resources.
        blocks: what is inside it; when that is nothing any more, it is given back.
    """

    __slots__ = ("__weakref__", "authority", "blocks", "grant", "leases", "owner")

    def __init__(self, authority: Authority, grant: Grant, owner: object) -> None:
        self.authority = authority
        self.grant = grant
        self.owner = owner
        self.blocks: set[object] = set()
        self.leases = tuple(
            Lease(resource, token, grant.expires_at)
            for resource, token in zip(grant.resources, grant.tokens, strict=True)
        )

    @property
    def inherited(self) -> bool:
        """Whether it is a forked child's copy: nothing that the child holds, or may give back."""
        return self.leases[0].inherited


_Key = tuple[Authority, object, str]
#: Weak: a lock object that was thrown away while it was held is nobody's to enter again.
_holds: WeakValueDictionary[_Key, Hold] = WeakValueDictionary()


def find(authority: Authority, owner: object, resource: str) -> Hold | None:
    """Return the hold of a resource that the owner may enter again."""
    hold = _holds.get((authority, owner, resource))
    return None if hold is None or hold.inherited else hold


def add(hold: Hold) -> None:
    """Note a hold, and its leases in the current context; again has no effect."""
    for key in _keys(hold):
        _holds[key] = hold
    note_held(*hold.leases)


def remove(hold: Hold) -> None:
    """Note that a hold is over."""
    for lease in hold.leases:
        lease.release()
    note_ended(*hold.leases)
    for key in _keys(hold):
        if _holds.get(key) is hold:
            del _holds[key]


def _keys(hold: Hold) -> Iterable[_Key]:
    return ((hold.authority, hold.owner, resource) for resource in hold.grant.resources)
