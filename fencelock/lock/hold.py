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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from types import CodeType
from typing import Any, Literal
from weakref import ReferenceType, WeakValueDictionary, ref

from fencelock import _events
from fencelock._events import LeaseLost, LockAcquired, LockEnd, LockReleased, LossReason, TokenReminted
from fencelock._owners import current_owner
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
        last_error: why it could not be extended last time; empty if it could.
        renew_at: when the renewer means to look at it next.
        extended_after_release: whether an extension has ended since its release was sent. It may have arrived
            after that, and made locks again.
        release_finished: whether its release has been answered, or given up. The later of an extension and a
            release releases once more; earlier, the release would hear of a loss.
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
    last_error: str = ""
    renew_at: float = math.inf
    extended_after_release: bool = False
    release_finished: bool = False
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

    def ttl_left(self, now: float) -> float:
        """Return for how long it may be extended at that time: for its ttl, and not beyond its deadline."""
        return min(self.ttl, self.deadline - now)

    def tell_when_lost(self, listeners: Iterable[Callable[[Lease], object]]) -> None:
        """Have these called with each lease, once, when the hold is lost; at once if it is lost already."""
        if new := tuple(each for each in listeners if each not in self._listeners):
            self._listeners = (*self._listeners, *new)
            if self.lost:
                for call in self.mark_lost("its time ran out", "expired"):
                    call()

    def note_extension(self, grant: Grant) -> None:
        """Note that the authority has extended the grant."""
        self.grant = grant
        self.last_error = ""
        for lease in self.leases:
            lease.extend_to(grant.expires_at)

    def remint(self, grant: Grant) -> None:
        """Note that the authority has given larger tokens to the same hold."""
        self.grant = grant
        for lease, token in zip(self.leases, grant.tokens, strict=True):
            lease.remint(token, grant.expires_at)
        if _events.listeners:
            _events.tell(TokenReminted(*self.names, grant.tokens))

    def mark_lost(self, detail: str, reason: LossReason = "gone") -> tuple[Callable[[], object], ...]:
        """Note that the hold has ended before it was given back; return the functions to call."""
        if self.released:
            return ()
        for lease in self.leases:
            lease.mark_lost(detail)
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


@dataclass(eq=False, slots=True)
class Block:
    """A block of code in which a lock is held: from its acquisition until it is left.

    Attributes:
        authority: grants what the owner does not hold yet.
        timeout: seconds to wait for another holder; None for ever.
        is_with: whether `with` or `async with` enters it.
        is_try: whether the caller does not want to know by whom the lock is held.
        owner: the thread, task or greenlet that enters it.
        mark: stands for it in the holds' blocks, which must not refer to it: a cycle would keep a lock that
            was thrown away alive, and renewed, until the garbage collector comes along.
        thread: in which it is entered.
        given_up: whether its acquisition is to wait no longer.
        had_to_wait: whether its acquisition has waited.
        grant: what was acquired and is no hold yet.
        holds: what it stands on.
        leases: in the order of the lock's resources.
    """

    authority: Authority
    timeout: float | None = None
    is_with: bool = False
    is_try: bool = False
    owner: object = field(default_factory=current_owner)
    mark: object = field(default_factory=object)
    thread: int = field(default_factory=threading.get_ident)
    given_up: bool = False
    had_to_wait: bool = False
    grant: Grant | None = None
    holds: tuple[Hold, ...] = ()
    leases: tuple[Lease, ...] = ()

    def enter_again(self, hold: Hold) -> bool:
        """Enter a hold that the owner has already; return False where that is being given back."""
        if hold not in self.holds:
            self.holds = (*self.holds, hold)  # first, so that an interruption leaves it again
            if not (hold.blocks or hold.stop_waiting()):
                self.holds = self.holds[:-1]
                return False
            hold.blocks.add(self.mark)
            for lease in hold.leases:
                lease.left = False
        return True

    def enter(self, holds: Sequence[Hold], resources: Iterable[str]) -> None:
        """Enter holds, which have all of the resources between them; note that in this context, too."""
        self.holds = tuple(dict.fromkeys(holds))
        self.grant = None
        by_name: dict[str, Lease] = {}
        for hold in self.holds:
            hold.blocks.add(self.mark)
            add(hold)
            by_name.update(zip(hold.grant.resources, hold.leases, strict=True))
        self.leases = tuple([by_name[resource] for resource in resources])

    @property
    def tokens(self) -> Any:
        """What `with` yields: the token, or the tokens of several resources."""
        tokens = tuple([lease.fencing_token for lease in self.leases])
        return tokens[0] if len(tokens) == 1 else tokens


def last_of_ours(blocks: list[Block], *, to_leave: bool = False) -> Block | None:
    """Return what this thread, task or greenlet entered last; or else the last entry of all.

    A thread of a pool may leave what another has entered: then a lost one, before that of a later caller.
    """
    snapshot = tuple(blocks)
    if len(snapshot) < 2:  # noqa: PLR2004 - then there is nothing to choose
        return snapshot[0] if snapshot else None
    owner = current_owner()
    ours = [block for block in snapshot if block.owner == owner]
    lost = [block for block in snapshot if to_leave and any(hold.lost for hold in block.holds)]
    return (ours or lost or snapshot)[-1]
