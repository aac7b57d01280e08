"""An authority written once, as generators of steps, for blocking code and for coroutines.

Its author writes `acquiring`, `extending`, `reminting`, `releasing`, `inspecting` and `forcing`, which yield
steps of their own, and `do` and `do_soon`, which take such a step in each world. `Stepped` makes an
`Authority` of that. It knows two more steps: `Wait`, and `Abandon`.
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import contextvars
import logging
import random
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterator, Sequence
from typing import Any, ClassVar, NamedTuple, Self, TypeVar, Unpack, overload
from weakref import WeakSet

from fencelock._checks import check_ttl
from fencelock._owners import running_loop
from fencelock._steps import Steps, block, wait_for
from fencelock.authority.base import Grant, Terms, Wish, go_on_waiting
from fencelock.errors import FencelockError
from fencelock.holder import LockInfo
from fencelock.lease import check_resource
from fencelock.lock.lock import FencedLock
from fencelock.lock.options import LockSettings

_T = TypeVar("_T")

logger = logging.getLogger("fencelock.authority")

#: Event loops in which a blocking lock had to wait, and which the log has told of it.
_warned_of: WeakSet[asyncio.AbstractEventLoop] = WeakSet()


class Wait(NamedTuple):
    """A step: wait for another holder of `key` until that time, on the clock of `time.monotonic`."""

    until: float
    key: str


class Abandon(NamedTuple):
    """A step: give back what an interrupted operation may have left, by the steps that `giving_back` makes.

    Blocking code does it now. Coroutines do it in a task, behind the step that was interrupted, because a
    task that is cancelled must not wait.
    """

    giving_back: Callable[[], Steps[Any]]


def pauses(shortest: float, longest: float, growth: float = 1.5) -> Iterator[float]:
    """Yield for how long to wait before each next look; others who wait look at other moments."""
    pause = shortest
    while True:
        yield pause * random.uniform(0.5, 1.0)  # noqa: S311 - no secret
        pause = min(longest, pause * growth)


def warn_of_blocked_loop(key: str) -> None:
    """Tell, once for each event loop, that a blocking acquisition keeps it from running."""
    if (loop := running_loop()) is not None and loop not in _warned_of:
        _warned_of.add(loop)
        logger.warning(
            "%s: a blocking lock waits for its holder inside an event loop, which runs nothing meanwhile: no "
            "task of it, and not the holder's either. In coroutines write `async with`, or `await "
            "lock.aio.acquire()`",
            key,
        )


class LoopEnd:
    """What an event loop does before it closes: it waits until these tasks have ended, then it calls `close`.

    `asyncio.run` ends the asynchronous generators that have begun in its loop. This is one of them. `kept` is
    what an authority has for this loop; `over` tells whether all that has been done.
    """

    def __init__(self, kept: Any = None, close: Callable[[], Awaitable[None]] | None = None) -> None:
        self.tasks: set[asyncio.Task[Any]] = set()
        self.kept = kept
        self.over = False
        self._close = close
        self._generator = self._wait_for_end()
        with contextlib.suppress(StopIteration):  # it has come to its `yield`
            self._generator.asend(None).send(None)

    async def _wait_for_end(self) -> AsyncGenerator[None]:
        try:
            yield
        finally:
            while self.tasks:
                await asyncio.wait(self.tasks)
            self.over = True
            if self._close is not None:
                await self._close()

    async def end(self) -> None:
        """Do it now."""
        await self._generator.aclose()

    def begin_to_end(self) -> None:
        """Do it now, in a task of the running loop."""
        self._ending = asyncio.get_running_loop().create_task(self.end())

    def begin(self, work: Coroutine[Any, Any, _T]) -> asyncio.Task[_T]:
        """Have a task do something."""
        task = asyncio.get_running_loop().create_task(work, context=contextvars.Context())
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task


class Stepped(abc.ABC):
    """An `Authority` whose operations are generators of steps. May be used in a `with`, which closes it."""

    #: What else it can do; see `Authority`.
    kinds: ClassVar[frozenset[str]] = frozenset()

    aio: AsyncView

    @abc.abstractmethod
    def acquiring(self, resources: tuple[str, ...], **terms: Unpack[Terms]) -> Steps[Grant]:
        """Do as `Authority.acquire`; the ttl is checked, and `fair` refused or among the `kinds`."""

    @abc.abstractmethod
    def extending(self, wishes: Sequence[Wish]) -> Steps[list[Grant | FencelockError]]:
        """Do as `Authority.extend_many`."""

    @abc.abstractmethod
    def reminting(self, grant: Grant, ttl: float) -> Steps[Grant]:
        """Do as `Authority.remint`."""

    @abc.abstractmethod
    def releasing(self, grant: Grant) -> Steps[bool | None]:
        """Do as `Authority.release`."""

    @abc.abstractmethod
    def inspecting(self, resources: tuple[str, ...]) -> Steps[list[LockInfo]]:
        """Return the locks that are held of these resources; of all, where none is named."""

    @abc.abstractmethod
    def forcing(self, resource: str) -> Steps[LockInfo | None]:
        """Do as `force_release`."""

    @abc.abstractmethod
    def do(self, step: Any) -> Any:
        """Take a step, blocking."""

    @abc.abstractmethod
    async def do_soon(self, step: Any) -> Any:
        """Take a step, letting other tasks run."""

    def __init__(self) -> None:
        self._loop_ends: dict[asyncio.AbstractEventLoop, LoopEnd] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    @overload
    def lock(self, resource: str, /, **settings: Unpack[LockSettings]) -> FencedLock[int]: ...
    @overload
    def lock(self, *resources: str, **settings: Unpack[LockSettings]) -> FencedLock[tuple[int, ...]]: ...
    def lock(self, *resources: str, **settings: Unpack[LockSettings]) -> Any:
        """Return `fenced_lock(*resources, …)` of this authority, with the same settings.

        Raises:
            TypeError, ValueError: as `fenced_lock` does.
        """
        return FencedLock(resources, lambda: self, **settings)

    def open_in_loop(self) -> LoopEnd:
        """Return the end of the running event loop, with what the authority has for this loop only."""
        return LoopEnd()

    def loop_end(self) -> LoopEnd:
        """Return what the running event loop does before it closes."""
        loop = asyncio.get_running_loop()
        if (end := self._loop_ends.get(loop)) is None or end.over:
            for each in list(self._loop_ends):
                if each.is_closed():  # before everything was over
                    del self._loop_ends[each]
            end = self._loop_ends[loop] = self.open_in_loop()
        return end

    def close(self) -> None:
        """Close the connections. Leases that are held end by themselves; using it again connects again."""
        for loop, end in list(self._loop_ends.items()):
            with contextlib.suppress(RuntimeError):  # it has been closed
                loop.call_soon_threadsafe(end.begin_to_end)

    def checked(self, resources: tuple[str, ...], **terms: Unpack[Terms]) -> Steps[Grant]:
        """Return `acquiring(…)`, unless this authority cannot do it."""
        check_ttl(terms["ttl"])
        if terms.get("fair") and "fair" not in self.kinds:
            raise ValueError(f"{self!r} keeps no waiting line: fair=True needs nodes of Redis or Valkey")
        return self.acquiring(resources, **terms)

    def acquire(self, resources: tuple[str, ...], **terms: Unpack[Terms]) -> Grant:
        """Return leases of all the resources, or of none: see `Authority.acquire`."""
        return self.run(self.checked(resources, **terms))

    def extend_many(self, wishes: Sequence[Wish]) -> list[Grant | FencelockError]:
        """Extend grants: see `Authority.extend_many`."""
        return self.run(self.extending(wishes))

    def remint(self, grant: Grant, ttl: float) -> Grant:
        """Exchange a grant for one with larger tokens: see `Authority.remint`."""
        return self.run(self.reminting(grant, ttl))

    def release(self, grant: Grant) -> bool | None:
        """Give the leases back: see `Authority.release`."""
        return self.run(self.releasing(grant))

    def run(self, steps: Steps[_T]) -> _T:
        """Take steps to their end, blocking."""
        return block(steps, self._do)

    def _do(self, step: Any) -> Any:
        if isinstance(step, Wait):
            warn_of_blocked_loop(step.key)
            time.sleep(max(0.0, step.until - time.monotonic()))
            return go_on_waiting()
        if not isinstance(step, Abandon):
            return self.do(step)
        try:
            return self.run(step.giving_back())
        except FencelockError as error:
            return _note_left(error)

    def holder_ttl(self, resources: tuple[str, ...]) -> float | None:
        """Tell for how many seconds one of them is held: see `Authority`."""
        return _last_end(self.run(self.inspecting(resources)))

    def force_release(self, resource: str) -> LockInfo | None:
        """Give back what another holds, and return what it was; None where it was free.

        Nothing stops the holder, which hears of it when it extends its lease. Have a new holder claim what
        the old one may write, so that the database refuses it: `fencelock release --force` does so.

        Raises:
            AuthorityError: it could not be done, or not be told whether it was.
        """
        return self.run(self.forcing(check_resource(resource)))

    @overload
    def inspect(self, resource: str, /) -> LockInfo | None: ...
    @overload
    def inspect(self, resource: None = None, /) -> list[LockInfo]: ...
    def inspect(self, resource: str | None = None, /) -> LockInfo | list[LockInfo] | None:
        """Tell by whom a resource is held, None where it is free; without one, all that is held.

        Raises:
            AuthorityError: it could not be told.
        """
        if resource is None:
            return self.run(self.inspecting(()))
        return next(iter(self.run(self.inspecting((check_resource(resource),)))), None)


class AsyncView:
    """A `Stepped` authority for coroutines. May be used in an `async with`, which closes it.

    A step that has begun is taken to its end, also where its caller is cancelled meanwhile.
    """

    def __init__(self, authority: Stepped) -> None:
        self._authority = authority

    def __repr__(self) -> str:
        return f"{self._authority!r}.aio"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections of the running loop; using it again connects again."""
        await self._authority.loop_end().end()

    async def acquire(self, resources: tuple[str, ...], **terms: Unpack[Terms]) -> Grant:
        """Return leases of all the resources, or of none: see `Authority.acquire`.

        Cancelled, it gives back what it may have acquired, without waiting for that.
        """
        return await self.wait_for(self._authority.checked(resources, **terms))

    async def extend_many(self, wishes: Sequence[Wish]) -> list[Grant | FencelockError]:
        """Extend grants: see `Authority.extend_many`."""
        return await self.wait_for(self._authority.extending(wishes))

    async def remint(self, grant: Grant, ttl: float) -> Grant:
        """Exchange a grant for one with larger tokens: see `Authority.remint`."""
        return await self.wait_for(self._authority.reminting(grant, ttl))

    async def release(self, grant: Grant) -> bool | None:
        """Give the leases back: see `AsyncAuthority.release`."""
        return await self.wait_for(self._authority.releasing(grant))

    async def holder_ttl(self, resources: tuple[str, ...]) -> float | None:
        """Tell for how many seconds one of them is held: see `Authority`."""
        return _last_end(await self.wait_for(self._authority.inspecting(resources)))

    @overload
    async def inspect(self, resource: str, /) -> LockInfo | None: ...
    @overload
    async def inspect(self, resource: None = None, /) -> list[LockInfo]: ...
    async def inspect(self, resource: str | None = None, /) -> LockInfo | list[LockInfo] | None:
        """Tell by whom a resource is held: see `Stepped.inspect`."""
        if resource is None:
            return await self.wait_for(self._authority.inspecting(()))
        found = await self.wait_for(self._authority.inspecting((check_resource(resource),)))
        return next(iter(found), None)

    async def wait_for(self, steps: Steps[_T]) -> _T:
        """Take steps to their end, letting other tasks run."""
        latest: asyncio.Task[Any] | None = None
        end = self._authority.loop_end()

        async def do(step: Any) -> Any:
            nonlocal latest
            if isinstance(step, Wait):
                await asyncio.sleep(max(0.0, step.until - time.monotonic()))
                return go_on_waiting()
            if isinstance(step, Abandon):
                return end.begin(self._abandon(step, latest))
            latest = end.begin(self._authority.do_soon(step))
            return await asyncio.shield(latest)

        return await wait_for(steps, do)

    async def _abandon(self, step: Abandon, latest: asyncio.Task[Any] | None) -> None:
        try:
            if latest is not None:
                await asyncio.wait([latest])
            await self.wait_for(step.giving_back())
        except asyncio.CancelledError:  # with all tasks, by a loop that ends; it waits for this one
            self._authority.loop_end().begin(self._abandon(step, latest))
            raise
        except FencelockError as error:
            _note_left(error)


def _last_end(found: Sequence[LockInfo]) -> float | None:
    return max((info.remaining for info in found), default=None)


def _note_left(error: FencelockError) -> None:
    logger.warning("what an interrupted operation has left ends by itself: %s", error)
