"""What takes time in the life of a lease, one step at a time: blocking code does it, asyncio awaits it."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Awaitable, Callable, Generator, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from fencelock._owners import switches_greenlets, waits_in_vain_for
from fencelock._steps import block, wait_for
from fencelock.authority.base import Authority, GivenUp, Grant, is_given_up, named
from fencelock.errors import LockTimeoutError
from fencelock.lease import held_leases
from fencelock.lock.hold import owners_of

if TYPE_CHECKING:
    from fencelock.authority.base import Seal

logger = logging.getLogger("fencelock.lock")

_T = TypeVar("_T")

_IN_VAIN = (
    "another greenlet of this thread holds it, and cannot go on while this one waits, for what waits is not "
    "patched: call gevent.monkey.patch_all() or eventlet.monkey_patch() before anything else is imported"
)

_PARENT = (
    "the task or thread that started this one holds it, and waits in vain if it waits for this one: take the "
    "lock in one of the two only. What the holder starts may write under its lease"
)

_ITSELF = (
    "this very thread, task or greenlet holds the lock itself, and does not enter again because of "
    "reentrant=False: leave the outer block first, or write reentrant=True, which enters again"
)


class Step:
    """Something that takes time: one function blocks for it, the other returns what is to be awaited.

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
        """Do it."""
        self.answer = self._block()

    async def wait(self) -> None:
        """Do it, letting other tasks run."""
        self.answer = await self._wait()


Steps = Generator[Step, None, _T]


#: The acquisitions that wait for their authority.
under_way: set[Acquisition] = set()


class Acquisition(Step):
    """An acquisition of resources, which waits for others for `timeout` seconds."""

    __slots__ = ("authority", "given_up", "itself", "lock", "resources", "timeout")

    def __init__(
        self,
        authority: Authority,
        resources: tuple[str, ...],
        *,
        ttl: float,
        timeout: float | None,
        fair: bool,
        above: tuple[int, ...] = (),
        seal: Seal | None = None,
        itself: bool = False,
        lock: object = None,
    ) -> None:
        def ask(its: Any) -> Any:
            if seal is None:
                return its.acquire(resources, ttl=ttl, timeout=timeout, fair=fair, above=above)
            return its.acquire(resources, ttl=ttl, timeout=timeout, fair=fair, seal=seal)

        super().__init__(lambda: ask(authority), lambda: ask(authority.aio))
        self.authority = authority
        self.resources = resources
        self.timeout = timeout
        self.itself = itself
        self.lock = lock
        self.given_up = False

    def block(self) -> None:
        """Do it."""
        with self._telling():
            self.answer = self._block()

    async def wait(self) -> None:
        """Do it, letting other tasks run."""
        with self._telling():
            self.answer = await self._wait()

    @contextlib.contextmanager
    def _telling(self) -> Iterator[None]:
        """Say at once, and in the error, where it waits for code that may be waiting for it."""
        parent = self._waits_for_parent() and self.timeout != 0
        why = _ITSELF if self.itself else _PARENT if parent else _IN_VAIN
        if parent or (self.timeout is None and self._is_in_vain()):
            logger.warning("%s: %s", named(self.resources), why)
        under_way.add(self)
        before = is_given_up.set(lambda: self.given_up)
        try:
            yield
        except GivenUp:
            raise LockTimeoutError(f"{named(self.resources)}: the acquisition was cancelled") from None
        except LockTimeoutError as error:
            if self.itself or parent or (self.timeout != 0 and self._is_in_vain()):
                raise LockTimeoutError(f"{error}; {why}", holder_ttl=error.holder_ttl) from None
            raise
        finally:
            under_way.discard(self)
            with contextlib.suppress(ValueError):  # a coroutine that is thrown away ends in another context
                is_given_up.reset(before)

    def _is_in_vain(self) -> bool:
        return switches_greenlets() and waits_in_vain_for(owners_of(self.authority, self.resources))

    def _waits_for_parent(self) -> bool:
        """Tell whether the lease stands in this context, which was copied from that of its holder."""
        held = [lease.resource for lease in held_leases() if lease.resource in self.resources]
        return bool(held and owners_of(self.authority, held))


def _call(authority: Authority, ask: Callable[[Any], Any]) -> Step:
    return Step(lambda: ask(authority), lambda: ask(authority.aio))


def ask_to_extend(authority: Authority, grant: Grant, seconds: float) -> Step:
    """Let a grant live on."""
    return _call(authority, lambda its: its.extend_many([(grant, seconds)]))


def ask_to_remint(authority: Authority, grant: Grant, seconds: float) -> Step:
    """Exchange a grant for one with larger tokens."""
    return _call(authority, lambda its: its.remint(grant, seconds))


def ask_to_release(authority: Authority, grant: Grant) -> Step:
    """Give a grant back."""
    return _call(authority, lambda its: its.release(grant))


def run_blocking(steps: Steps[_T]) -> _T:
    """Take steps to their end, blocking."""
    return block(steps, lambda step: step.block())


def run_waiting(steps: Steps[_T]) -> Awaitable[_T]:
    """Take steps to their end, letting other tasks run."""
    return wait_for(steps, lambda step: step.wait())
