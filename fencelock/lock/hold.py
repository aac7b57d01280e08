"""The grants that this process holds, their owners, and which blocks are inside.

An owner is a thread, task or greenlet (see `_owners`). It enters again, and gets the same token, if its
context has the lease. All others wait, also other callers that the same thread serves.
"""

from __future__ import annotations

import asyncio
import functools
import math
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import CodeType
from typing import Literal
from weakref import ReferenceType, WeakValueDictionary, ref

from fencelock import _events
from fencelock._events import LeaseLost, LockAcquired, LockEnd, LockReleased, LossReason, TokenReminted
from fencelock.authority.base import Authority, Grant, named
from fencelock.lease import Lease, note_ended, note_held, stands_here
from fencelock.renewal.schedule import Renewer


@dataclass(eq=False, repr=False, slots=True, weakref_slot=True)
class Hold:
    """One grant while it is held.

    Attributes:
        grant: as it was last extended.
        ttl: seconds that an extension asks for.
        deadline: when it is to end whatever happens, on the clock of `time.monotonic`.
        renewer: extends it; None if nothing does.
        loop: whose task has acquired it; returns None for blocking code's.
        leases: of each of its resources. All of them end together.
        itself: a weak reference: a lock that is thrown away while it is held is not extended any more.
        blocks: those that stand on it; when the last has ended, it is given back.
        trouble: why it could not be extended last time; empty if it could.
        planned: when the renewer means to look at it next.
        extended_behind: whether an extension has ended since its release was sent: it may have arrived after
            that, and made locks again.
        release_ended: whether its release has been answered, or given up. Of the two that set these marks,
            the one that sees the other's releases once more; earlier, the release would hear of a loss.
        given_back: whether its release has gone through, so that none is sent again.
        template: what `@fenced` was given; empty otherwise.
        since: when listeners were told that it is held; None until then, and when it has ended.
        place: the line of the program that has taken it, as code and number.
        thread: that has.
        loss: why it was lost, as `LeaseLost.reason` says it; empty if it was not.
    """

    authority: Authority
    grant: Grant
    owner: object
    ttl: float
    deadline: float = math.inf
    renewer: Renewer | None = None
    loop: Callable[[], asyncio.AbstractEventLoop | None] = lambda: None
    leases: tuple[Lease, ...] = field(init=False)
    itself: ReferenceType[Hold] = field(init=False)
    blocks: set[object] = field(default_factory=set)
    trouble: str = ""
    planned: float = math.inf
    extended_behind: bool = False
    release_ended: bool = False
    given_back: bool = False
    template: str = ""
    since: float | None = None
    loss: LossReason | Literal[""] = ""
    place: tuple[CodeType, int] | None = None
    thread: int = field(default_factory=threading.get_ident)
    _listeners: tuple[Callable[[Lease], object], ...] = ()
    _waiting: list[bool] = field(default_factory=list)

    def __post_init__(self) -> None:
        granted = zip(self.grant.resources, self.grant.tokens, strict=True)
        self.leases = tuple([Lease(resource, token, self.grant.expires_at) for resource, token in granted])
        for lease in self.leases:
            lease.granted_at = time.monotonic()
        self.itself = ref(self)

    def wait_for_transactions(self) -> None:
        """Note that no block is inside any more, and that the end of open transactions gives it back."""
        self._waiting[:] = [True]

    def stop_waiting(self) -> bool:
        """Tell whether the caller is the one to go on with a hold that waits for transactions.

        Its owner may enter it again while another thread ends the transaction and gives it back: the pop is
        atomic, so only one of them gets True.
        """
        try:
            return self._waiting.pop()
        except IndexError:
            return False

    @property
    def name(self) -> str:
        return named(self.grant.resources)

    @property
    def inherited(self) -> bool:
        """Whether it is a forked child's copy: nothing that the child holds, or may give back."""
        return self.leases[0].inherited

    @property
    def lost(self) -> bool:
        return self.leases[0].lost

    @property
    def over(self) -> bool:
        """Whether it has been given back, or was noted to be lost: there is nothing to extend."""
        return self.leases[0].over

    @property
    def released(self) -> bool:
        return self.leases[0].released

    def most_seconds(self, now: float) -> float:
        """Return for how long it may be extended at that time: for its ttl, and not beyond its deadline."""
        return min(self.ttl, self.deadline - now)

    def tell_when_lost(self, listeners: Iterable[Callable[[Lease], object]]) -> None:
        """Have these called with each lease, once, when the hold is lost; at once if it is lost already."""
        if new := tuple(each for each in listeners if each not in self._listeners):
            self._listeners = (*self._listeners, *new)
            if self.lost:
                for call in self.lose("its time ran out", "expired"):
                    call()

    def prolong(self, grant: Grant) -> None:
        """Note that the authority has extended the grant."""
        self.grant = grant
        self.trouble = ""
        for lease in self.leases:
            lease.extend_to(grant.expires_at)

    def remint(self, grant: Grant) -> None:
        """Note that the authority has given larger tokens to the same hold."""
        self.grant = grant
        for lease, token in zip(self.leases, grant.tokens, strict=True):
            lease.remint(token, grant.expires_at)
        if _events.listeners:
            _events.tell(TokenReminted(*self.names, grant.tokens))

    def lose(self, detail: str, reason: LossReason = "gone") -> tuple[Callable[[], object], ...]:
        """Note that the hold has ended before it was given back; return the functions to call."""
        if self.released:
            return ()
        for lease in self.leases:
            lease.lose(detail)
        self.note_loss(detail, reason)
        return self.calls_when_lost()

    @property
    def names(self) -> tuple[Authority, tuple[str, ...], str]:
        return self.authority, self.grant.resources, self.template

    def note_acquired(self, waited: float, *, had_to_wait: bool) -> None:
        """Tell listeners that it is held, after so many seconds."""
        if _events.listeners:
            self.since = time.monotonic()
            _events.tell(LockAcquired(*self.names, self.grant.tokens, waited, had_to_wait))

    def note_loss(self, detail: str, reason: LossReason) -> None:
        """Tell listeners that it was lost, unless they have heard that."""
        if not self.loss:
            self.loss = reason
            if _events.listeners:
                _events.tell(LeaseLost(*self.names, self.grant.tokens, reason, detail))

    def note_released(self, error: BaseException | None = None) -> None:
        """Tell listeners that it is not held any more, if they were told that it was."""
        since, self.since = self.since, None
        if since is not None:
            held = time.monotonic() - since
            end: LockEnd = "max_hold" if self.loss == "max_hold" else "lost" if self.loss else "released"
            _events.tell(LockReleased(*self.names, self.grant.tokens, held, end, error))

    def calls_when_lost(self) -> tuple[Callable[[], object], ...]:
        """Return the functions to call for a lost hold, which is only told once."""
        listeners, self._listeners = self._listeners, ()
        return tuple(functools.partial(listener, lease) for listener in listeners for lease in self.leases)


#: Weak: a lock object that was thrown away while it was held cannot be entered again.
_holds: WeakValueDictionary[tuple[Authority, object, str], Hold] = WeakValueDictionary()


def find(authority: Authority, owner: object, resource: str) -> Hold | None:
    """Return the hold that the owner has of a resource, if it may be entered again.

    A lost one may not: its token may be exceeded. Nor may one of another context, which is another caller's.
    """
    hold = _holds.get((authority, owner, resource))
    if hold is None or hold.inherited or hold.lost or not stands_here(hold.leases[0]):
        return None
    return hold


def add(hold: Hold) -> None:
    """Note that the owner of a hold may enter it again, and that this context may write under it."""
    for resource in hold.grant.resources:
        _holds[hold.authority, hold.owner, resource] = hold
    note_held(*hold.leases)


def remove(hold: Hold) -> None:
    """Note that a hold is over."""
    for lease in hold.leases:
        lease.released = True
    note_ended(*hold.leases)
    for resource in hold.grant.resources:
        key = (hold.authority, hold.owner, resource)
        if _holds.get(key) is hold:
            _holds.pop(key, None)  # a signal handler may have been here


def holds_of(authority: Authority, resources: Iterable[str]) -> list[Hold]:
    wanted = set(resources)
    found = [(key, _holds.get(key)) for key in list(_holds)]
    return [hold for (its, _, name), hold in found if hold and its is authority and name in wanted]


def everything_held() -> list[Hold]:
    return [hold for hold in dict.fromkeys(_holds.values()) if not hold.inherited]
