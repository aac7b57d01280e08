"""The grants that this process holds, and the blocks that have entered them; `base` has the operations."""

from __future__ import annotations

import abc
import asyncio
import functools
import math
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import CodeType
from typing import Any, Literal
from weakref import ReferenceType, WeakValueDictionary, ref

from fencelock import _events
from fencelock._events import LeaseLost, LockAcquired, LockEnd, LockReleased, LossReason, TokenReminted
from fencelock._generators import Steps
from fencelock._owners import current_owner
from fencelock.authority.base import Authority, Grant, named
from fencelock.lease import Lease, note_ended


class Renewer(abc.ABC):
    """Extends holds until they are released or lost; `renewal` implements it for threads and event loops."""

    @abc.abstractmethod
    def add(self, hold: Hold) -> None:
        """Begin to extend a hold."""

    @abc.abstractmethod
    def cancel(self, hold: Hold) -> bool:
        """Stop extending a hold at once; return False if an extension is under way."""

    @abc.abstractmethod
    def stop(self, hold: Hold) -> None:
        """Stop extending a hold; the renewer of threads waits for an extension that is under way."""

    @abc.abstractmethod
    async def stop_soon(self, hold: Hold) -> None:
        """Stop extending a hold, and wait for an extension, unless another loop makes it; other tasks run."""


@dataclass(eq=False, repr=False, slots=True, weakref_slot=True)
class Hold:
    """One grant while it is held."""

    authority: Authority
    grant: Grant  # the grant with its latest end and tokens
    owner: object
    ttl: float  # seconds that an extension asks for
    deadline: float = math.inf  # when `max_hold` is over, on the clock of `time.monotonic`
    renewer: Renewer | None = None  # extends the hold; None without renewal
    #: Returns the event loop whose task acquired the hold; returns None for blocking code.
    loop: Callable[[], asyncio.AbstractEventLoop | None] = lambda: None
    leases: tuple[Lease, ...] = field(init=False)  # one for each resource. All of them end together.
    #: A weak reference to the hold, because the renewer must not keep an abandoned lock alive.
    itself: ReferenceType[Hold] = field(init=False)
    #: Marks of the blocks that have entered the hold; it is released when the last one is left.
    blocks: set[object] = field(default_factory=set)
    last_error: str = ""  # why the last extension failed; empty if it did not
    renew_at: float = math.inf  # when the renewer looks at the hold next
    #: Whether an extension ended after the release was sent, and so may have made locks again.
    extended_after_release: bool = False
    #: Whether a release was sent. Another thread's, such as that at the end of the process, may find nothing.
    release_began: bool = False
    #: Whether the release was answered, or given up. Before that, a late extension must not release once
    #: more, because the first release would then report a loss.
    release_finished: bool = False
    #: Whether `release_hold_gen` has ended, even with an AuthorityError: it does not run again.
    given_back: bool = False
    #: Until when the lease is kept, even after the last block was left, on the clock of `time.monotonic`.
    keep_until: float = -math.inf
    #: Releases the grant, or moves its end to `keep_until`.
    give_back: Callable[[Grant], Steps[bool | None]] = field(init=False)
    template: str = ""  # the template of `@fenced`; empty for other locks
    #: When listeners were told of the acquisition; None before that, and after the release.
    since: float | None = None
    #: Why the hold was lost, as in `LeaseLost.reason`; empty if it was not.
    loss: LossReason | Literal[""] = ""
    #: The line of the program that acquired the hold: code and line number.
    place: tuple[CodeType, int] | None = None
    thread: int = field(default_factory=threading.get_ident)  # the thread that acquired the hold
    _listeners: tuple[Callable[[Lease], object], ...] = ()
    _waiting: list[bool] = field(default_factory=list)

    def __post_init__(self) -> None:
        granted = zip(self.grant.resources, self.grant.tokens, strict=True)
        self.leases = tuple([Lease(resource, token, self.grant.expires_at) for resource, token in granted])
        for lease in self.leases:
            lease._granted_at = time.monotonic()
        self.give_back = self.authority.release_gen
        self.itself = ref(self)

    def keep_at_least(self, seconds: float) -> None:
        """Keep the lease for `seconds` after its grant; the longest time of all its blocks counts."""
        self.keep_until = max(self.keep_until, self.leases[0]._granted_at + seconds)

    def wait_for_transactions(self) -> None:
        """Note that the last block was left, so that the end of the open transactions releases the hold."""
        self._waiting[:] = [True]

    def stop_waiting(self) -> bool:
        """Return True to the first caller after `wait_for_transactions`; only it may enter or release."""
        # The owner may enter the hold again while another thread ends the transaction. `pop` is atomic.
        try:
            return self._waiting.pop()
        except IndexError:
            return False

    @property
    def name(self) -> str:
        return named(self.grant.resources)

    @property
    def inherited(self) -> bool:
        """Whether this is a forked child's copy, which the child neither holds nor may release."""
        return self.leases[0]._inherited

    @property
    def lost(self) -> bool:
        return self.leases[0].lost

    @property
    def over(self) -> bool:
        """Whether nothing is left to extend: it was released or inherited, or its loss was noted."""
        return self.leases[0]._over

    @property
    def released(self) -> bool:
        return self.leases[0]._released

    def ttl_left(self, now: float) -> float:
        """Return for how many seconds to extend the hold: for its ttl, but not beyond its deadline."""
        return min(self.ttl, self.deadline - now)

    def tell_when_lost(self, listeners: Iterable[Callable[[Lease], object]]) -> None:
        """Call each listener once with each lease when the hold is lost; at once if it is lost already."""
        if new := tuple(each for each in listeners if each not in self._listeners):
            self._listeners = (*self._listeners, *new)
            if self.lost:
                for call in self.mark_lost("its time ran out", "expired"):
                    call()

    def note_extension(self, grant: Grant) -> None:
        self.grant = grant
        self.last_error = ""
        for lease in self.leases:
            lease._extend_to(grant.expires_at)

    def remint(self, grant: Grant) -> None:
        self.grant = grant
        for lease, token in zip(self.leases, grant.tokens, strict=True):
            lease._remint(token, grant.expires_at)
        if _events.listeners:
            _events.tell(TokenReminted(*self.names, grant.tokens))

    def mark_lost(self, detail: str, reason: LossReason = "gone") -> tuple[Callable[[], object], ...]:
        """Note that the hold ended before its release; return the callbacks to call."""
        if self.released:
            return ()
        for lease in self.leases:
            lease._mark_lost(detail)
        self.note_loss(detail, reason)
        return self.calls_when_lost()

    @property
    def names(self) -> tuple[Authority, tuple[str, ...], str]:
        return self.authority, self.grant.resources, self.template

    def note_acquired(self, seconds: float, *, has_waited: bool) -> None:
        self.since = time.monotonic()
        _events.tell(LockAcquired(*self.names, self.grant.tokens, seconds, has_waited))

    def note_loss(self, detail: str, reason: LossReason) -> None:
        """Tell listeners that the hold was lost; a second call has no effect."""
        if not self.loss:
            self.loss = reason
            if _events.listeners:
                _events.tell(LeaseLost(*self.names, self.grant.tokens, reason, detail))

    def note_released(self, error: BaseException | None = None) -> None:
        """Tell listeners of the release if they were told of the acquisition."""
        giving_back.discard(self)
        since, self.since = self.since, None
        if since is not None:
            held = time.monotonic() - since
            end: LockEnd = "max_hold" if self.loss == "max_hold" else "lost" if self.loss else "released"
            _events.tell(LockReleased(*self.names, self.grant.tokens, held, end, error))

    def calls_when_lost(self) -> tuple[Callable[[], object], ...]:
        """Return the callbacks to call for a lost hold, and forget them: each is called once."""
        listeners, self._listeners = self._listeners, ()
        return tuple(functools.partial(listener, lease) for listener in listeners for lease in self.leases)


giving_back: set[Hold] = set()  # the holds whose release is under way

#: Holds by authority, owner and resource. Weak, because an abandoned lock object must be freed.
by_owner: WeakValueDictionary[tuple[Authority, object, str], Hold] = WeakValueDictionary()


def remove(hold: Hold) -> None:
    for lease in hold.leases:
        lease._released = True
    note_ended(*hold.leases)
    for resource in hold.grant.resources:
        key = (hold.authority, hold.owner, resource)
        if by_owner.get(key) is hold:
            by_owner.pop(key, None)  # a signal handler may have removed it already


def holds_of(authority: Authority, resources: Iterable[str]) -> list[Hold]:
    wanted = set(resources)
    found = [(key, by_owner.get(key)) for key in list(by_owner)]
    return [hold for (its, _, name), hold in found if hold and its is authority and name in wanted]


def everything_held() -> list[Hold]:
    return [hold for hold in dict.fromkeys(by_owner.values()) if not hold.inherited]


@dataclass(eq=False, slots=True)
class Block:
    """A block of code in which a lock is held: from its acquisition until it is left."""

    authority: Authority  # grants the resources that the owner does not hold yet
    timeout: float | None = None  # seconds to wait for another holder; None for ever
    is_with: bool = False  # whether `with` or `async with` enters it
    is_try: bool = False  # whether the error need not name the holder, as for `try_acquire`
    names: tuple[str, ...] = ()  # the resources whose leases and tokens the user gets
    in_loop: bool = False  # whether a task of an event loop enters it
    owner: object = field(default_factory=current_owner)  # the thread, task or greenlet that enters it
    #: Represents the block in `Hold.blocks`. A hold must not refer to a block, because this cycle would keep
    #: an abandoned lock alive, and renewed, until the next garbage collection.
    mark: object = field(default_factory=object)
    thread: int = field(default_factory=threading.get_ident)  # the thread that enters it
    given_up: bool = False  # whether its acquisition must stop waiting
    had_to_wait: bool = False  # whether its acquisition has waited
    grant: Grant | None = None  # a grant that has not become a hold yet
    holds: tuple[Hold, ...] = ()  # the holds that it has entered; empty when it was left
    leases: tuple[Lease, ...] = ()  # in the order of `names`

    @property
    def tokens(self) -> Any:
        """The token, or the tokens of several resources, as `with` yields them."""
        tokens = tuple([lease.token for lease in self.leases])
        return tokens[0] if len(tokens) == 1 else tokens


under_way: dict[Block, object] = {}  # the acquisitions that are under way, each with its lock object

ends: list[float] = []  # until when acquisitions are refused, on the clock of `time.monotonic`


def end_acquisitions(seconds: float = math.inf) -> None:
    """End waiting acquisitions, and refuse new ones outside the main thread, because the process ends."""
    ends[:] = [time.monotonic() + seconds]
    for block in list(under_way):
        block.given_up = True


def acquisitions_have_ended() -> bool:
    """Return whether this thread may not acquire any more. A daemon thread stops here when the process ends.

    An error of it could be printed while the interpreter ends, which may abort the process.
    """
    if not ends or time.monotonic() > ends[0]:
        return False
    if ends == [math.inf] and threading.current_thread().daemon:
        threading.Event().wait()
    return sys.is_finalizing() or threading.current_thread() is not threading.main_thread()
