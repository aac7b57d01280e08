"""What takes time in the life of a lease, one step at a time: blocking code does it, asyncio awaits it."""

from __future__ import annotations

import logging
import shlex
import sys
import threading
from collections.abc import Awaitable, Callable, Generator
from contextvars import Token as ContextToken
from dataclasses import dataclass, field
from functools import partial
from types import CodeType
from typing import Any, Protocol, TypeVar

from fencelock import _events
from fencelock._events import LockWaiting
from fencelock._owners import running_loop
from fencelock._steps import block, wait_for
from fencelock.authority.base import Authority, GivenUp, Grant, asked_here, named
from fencelock.errors import AuthorityError, LockError, LockTimeoutError
from fencelock.lease import held_leases, latest_session
from fencelock.lock.hold import holds_of

logger = logging.getLogger("fencelock.lock")

#: What was waited for when the log told of a connection that is kept meanwhile.
_warned: list[tuple[str, ...]] = []

_T = TypeVar("_T")

_OTHER_CALLER = (
    "this very thread has taken it, {}, for a caller of another context. A lock is entered again only where "
    "its lease is held: take and leave it within one call, or hand the lease over"
)

_PARENT = (
    "the task or thread that started this one holds it, and waits in vain if it waits for this one: take the "
    "lock in one of the two only. What the holder starts may write under its lease"
)


class Step:
    """Something that takes time: one function blocks for it, the other returns an awaitable.

    The functions write their arguments out. Behind a call with `*` or `**`, as behind all that goes through
    C, Python runs signal handlers: if one raised, the answer would be lost on its way.

    Attributes:
        answer: what came of it. It is kept here so that an interruption on the way back does not lose it.
    """

    __slots__ = ("_block", "_wait", "answer")

    def __init__(self, block: Callable[[], Any], wait: Callable[[], Awaitable[Any]]) -> None:
        self._block = block
        self._wait = wait
        self.answer: Any = None

    def block(self) -> None:
        self.answer = self._block()

    async def wait(self) -> None:
        self.answer = await self._wait()


class Locking(Protocol):
    """A lock, as its acquisition sees it."""

    template: str


#: The acquisitions that wait for their authority.
under_way: set[Acquisition] = set()

_ends: list[bool] = []


def end_acquisitions() -> None:
    """Give up the acquisitions that wait, and refuse those of other threads from now on: the process ends."""
    _ends[:] = [True]
    for asked in list(under_way):
        asked.given_up = True


@dataclass(eq=False, repr=False, slots=True, kw_only=True)
class Acquisition:
    """A step: acquire resources, which waits for other holders for `timeout` seconds.

    Attributes:
        lock: for which.
        given_up: whether `FencedLock.cancel` has given it up.
        had_to_wait: whether listeners have been told that it waits.
        answer: the grant.
        thread: in which it waits.
    """

    authority: Authority
    resources: tuple[str, ...]
    ttl: float
    timeout: float | None
    fair: bool
    lock: Locking
    given_up: bool = False
    had_to_wait: bool = False
    answer: Any = None
    thread: int = field(default_factory=threading.get_ident)
    _before: ContextToken[Any] | None = None

    def block(self) -> None:
        with self:
            self.answer = self._ask(self.authority)

    async def wait(self) -> None:
        with self:
            self.answer = await self._ask(self.authority.aio)

    def _ask(self, its: Any) -> Any:
        return its.acquire(self.resources, ttl=self.ttl, timeout=self.timeout, fair=self.fair)

    def __enter__(self) -> None:
        """Be known to what waits for the authority."""
        under_way.add(self)
        if _ends and (sys.is_finalizing() or threading.current_thread() is not threading.main_thread()):
            under_way.discard(self)
            raise LockError(f"{named(self.resources)} is not acquired any more: the process ends")
        self._before = asked_here.set(self)

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        """Add to a timeout that a parent holds the lock, or the same thread for another caller."""
        under_way.discard(self)
        # A coroutine that is thrown away ends in another context.
        if self._before is not None and not isinstance(error, GeneratorExit):
            asked_here.reset(self._before)
        if isinstance(error, GivenUp):
            raise LockTimeoutError(f"{named(self.resources)}: the acquisition was cancelled") from None
        if isinstance(error, LockTimeoutError) and self.timeout != 0 and (why := self._why_in_vain()):
            raise LockTimeoutError(f"{error}; {why}", holder_ttl=error.holder_ttl) from None

    def go_on_waiting(self) -> None:
        """Tell listeners once that it waits; raise GivenUp if it was cancelled."""
        if self.given_up:
            raise GivenUp
        if not self.had_to_wait:
            self.had_to_wait = True
            _warn_of_connection(self.resources)
            if _events.listeners:
                _events.tell(LockWaiting(*self.names))

    @property
    def names(self) -> tuple[Authority, tuple[str, ...], str]:
        return self.authority, self.resources, self.lock.template

    def _why_in_vain(self) -> str:
        """Tell whether this very thread holds it; or the context that this one was copied from."""
        holds = [hold for hold in holds_of(self.authority, self.resources) if not hold.lost]
        inherited = held_leases()
        here = None if running_loop() else threading.get_ident()
        for hold in holds:
            if hold.thread == here and hold.loop() is None:
                return _OTHER_CALLER.format(_place(hold.place))
        return _PARENT if any(lease in inherited for hold in holds for lease in hold.leases) else ""


def _place(place: tuple[CodeType, int] | None) -> str:
    return "somewhere" if place is None else f"in {place[0].co_filename}:{place[1]}"


def _warn_of_connection(resources: tuple[str, ...]) -> None:
    """Tell, once in a process, that a caller keeps a connection of the program while it waits."""
    session = latest() if (latest := latest_session.get()) is not None else None
    if session is not None and session.in_transaction() and not _warned:
        _warned.append(resources)
        logger.warning(
            "%s: a session of this thread or task has begun a transaction, and keeps a connection while the "
            "lock is waited for; so waiting callers can use up the pool. Call session.rollback() before the "
            "lock, or read inside it. This is told once",
            named(resources),
        )


Steps = Generator[Step | Acquisition, None, _T]


def _call(authority: Authority, ask: Callable[[Any], Any]) -> Step:
    return Step(lambda: ask(authority), lambda: ask(authority.aio))


def ask_to_extend(authority: Authority, grant: Grant, seconds: float) -> Step:
    return _call(authority, lambda its: its.extend_many([(grant, seconds)]))


def ask_to_vouch(authority: Authority, grant: Grant) -> Step:
    return _call(authority, lambda its: its.vouch(grant))


def ask_to_remint(authority: Authority, grant: Grant, seconds: float) -> Step:
    return _call(authority, lambda its: its.remint(grant, seconds))


def ask_to_release(authority: Authority, grant: Grant) -> Step:
    return _call(authority, lambda its: its.release(grant))


def name_holder(asked: Acquisition, error: LockTimeoutError) -> Steps[None]:
    """Have an error name the holder of the lock that could not be acquired, where the authority can tell."""
    if not hasattr(asked.authority, "inspect"):
        return
    for name in asked.resources:
        looked = _call(asked.authority, partial(_inspect, name))
        try:
            yield looked
        except AuthorityError:
            return
        if looked.answer is not None:
            error.holder = looked.answer.holder
            said, by = str(error), f"is held by {error.holder}"
            if error.holder is None:
                free = shlex.join(["fencelock", "release", "--force", name])
                by = f"is held by something that is no fencelock lease (`{free}` frees it)"
            one = len(asked.resources) == 1
            error.args = (said.replace("is held by another", by) if one else f"{said}. {name!r} {by}",)
            return


def _inspect(name: str, its: Any) -> Any:
    return its.inspect(name)


def run_blocking(steps: Steps[_T]) -> _T:
    return block(steps, lambda step: step.block())


def run_waiting(steps: Steps[_T]) -> Awaitable[_T]:
    return wait_for(steps, lambda step: step.wait())
