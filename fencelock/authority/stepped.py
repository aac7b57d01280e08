"""An authority written once, as generators of steps, for blocking code and for coroutines.

Its author writes `acquiring`, `extending`, `reminting`, `releasing` and `looking`, which yield steps of their
own, and `do` and `do_soon`, which take such a step in each world. `Stepped` makes an `Authority` of that. It
knows two more steps: `Wait`, and `Abandon`.
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import contextvars
import inspect
import logging
import random
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar
from weakref import WeakSet

from fencelock._checks import check_ttl
from fencelock._owners import running_loop
from fencelock.authority.base import AsyncClosing, Grant, Locking, Seal, Wish
from fencelock.errors import FencelockError

_T = TypeVar("_T")

Steps = Generator[Any, Any, _T]

logger = logging.getLogger("fencelock.authority")

#: Event loops in which a blocking lock had to wait, and which the log has told of it.
_warned_of: WeakSet[asyncio.AbstractEventLoop] = WeakSet()


@dataclass(frozen=True, slots=True)
class Wait:
    """A step: wait for another holder of `key` until that time, on the clock of `time.monotonic`."""

    until: float
    key: str


@dataclass(frozen=True, slots=True)
class Abandon:
    """A step: give back what an interrupted operation may have left.

    Blocking code does it now. Coroutines do it in a task, behind the step that was interrupted, because a
    task that is cancelled must not wait.

    Attributes:
        giving_back: makes the steps that do it.
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


def block(steps: Steps[_T], do: Callable[[Any], Any]) -> _T:
    """Take steps to their end, blocking."""
    error: BaseException | None = None
    while True:
        try:
            answer: Any = None
            while True:  # inside, because signal handlers run where a loop goes round
                step = steps.send(answer) if error is None else steps.throw(error)
                error = answer = None
                if isinstance(step, Wait):
                    warn_of_blocked_loop(step.key)
                    time.sleep(max(0.0, step.until - time.monotonic()))
                elif isinstance(step, Abandon):
                    try:
                        block(step.giving_back(), do)
                    except FencelockError as left:
                        _note_left(left)
                else:
                    answer = do(step)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
        except BaseException as caught:
            if inspect.getgeneratorstate(steps) == inspect.GEN_CLOSED:
                raise
            error = caught  # of the step, or of a signal handler: the steps decide what to do about it


class LoopEnd:
    """What an event loop does before it closes: it ends these tasks, then it calls `close`.

    `asyncio.run` ends the asynchronous generators that have begun in its loop. This is one of them.

    Attributes:
        tasks: that must end.
        kept: what an authority has for this loop.
        over: whether all that has been done.
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


class Stepped(Locking, abc.ABC):
    """An `Authority` whose operations are generators of steps."""

    #: What else it can do; see `Authority`.
    kinds: ClassVar[frozenset[str]] = frozenset()

    @abc.abstractmethod
    def acquiring(
        self,
        resources: tuple[str, ...],
        *,
        ttl: float,
        timeout: float | None,
        fair: bool = False,
        above: tuple[int, ...] = (),
        seal: Seal | None = None,
    ) -> Steps[Grant]:
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
    def looking(self, resources: tuple[str, ...]) -> Steps[float | None]:
        """Do as `Authority.holder_ttl`."""

    @abc.abstractmethod
    def do(self, step: Any) -> Any:
        """Take a step, blocking."""

    @abc.abstractmethod
    async def do_soon(self, step: Any) -> Any:
        """Take a step, letting other tasks run."""

    def __init__(self) -> None:
        self._loop_ends: dict[asyncio.AbstractEventLoop, LoopEnd] = {}

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

    def acquire(
        self,
        resources: tuple[str, ...],
        *,
        ttl: float,
        timeout: float | None,
        fair: bool = False,
        above: tuple[int, ...] = (),
        seal: Seal | None = None,
    ) -> Grant:
        """Return leases of all the resources, or of none: see `Authority.acquire`."""
        self.check(ttl, fair=fair)
        steps = self.acquiring(resources, ttl=ttl, timeout=timeout, fair=fair, above=above, seal=seal)
        return block(steps, self.do)

    def check(self, ttl: float, *, fair: bool) -> None:
        """Refuse what this authority cannot do."""
        check_ttl(ttl)
        if fair and "fair" not in self.kinds:
            raise ValueError(f"{self!r} keeps no waiting line: fair=True needs nodes of Redis or Valkey")

    def extend_many(self, wishes: Sequence[Wish]) -> list[Grant | FencelockError]:
        """Extend grants: see `Authority.extend_many`."""
        return block(self.extending(wishes), self.do)

    def remint(self, grant: Grant, ttl: float) -> Grant:
        """Exchange a grant for one with larger tokens: see `Authority.remint`."""
        return block(self.reminting(grant, ttl), self.do)

    def release(self, grant: Grant) -> bool | None:
        """Give the leases back: see `Authority.release`."""
        return block(self.releasing(grant), self.do)

    def holder_ttl(self, resources: tuple[str, ...]) -> float | None:
        """Tell for how many seconds one of them is held: see `Authority`."""
        return block(self.looking(resources), self.do)


class AsyncView(AsyncClosing):
    """A `Stepped` authority for coroutines.

    A step that has begun is taken to its end, also where its caller is cancelled meanwhile.
    """

    def __init__(self, authority: Stepped) -> None:
        self._authority = authority

    def __repr__(self) -> str:
        return f"{self._authority!r}.aio"

    async def close(self) -> None:
        """Close the connections of the running loop; using it again connects again."""
        await self._authority.loop_end().end()

    async def acquire(
        self,
        resources: tuple[str, ...],
        *,
        ttl: float,
        timeout: float | None,  # noqa: ASYNC109 - it waits for other holders, with errors of its own
        fair: bool = False,
        above: tuple[int, ...] = (),
        seal: Seal | None = None,
    ) -> Grant:
        """Return leases of all the resources, or of none: see `Authority.acquire`.

        Cancelled, it gives back what it may have acquired, without waiting for that.
        """
        self._authority.check(ttl, fair=fair)
        steps = self._authority.acquiring(
            resources, ttl=ttl, timeout=timeout, fair=fair, above=above, seal=seal
        )
        return await self.wait_for(steps)

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
        return await self.wait_for(self._authority.looking(resources))

    async def wait_for(self, steps: Steps[_T]) -> _T:
        """Take steps to their end, letting other tasks run."""
        error: BaseException | None = None
        answer: Any = None
        latest: asyncio.Task[Any] | None = None
        end = self._authority.loop_end()
        while True:
            try:
                step = steps.send(answer) if error is None else steps.throw(error)
            except StopIteration as done:
                return done.value  # type: ignore[no-any-return]
            error = answer = None
            try:
                if isinstance(step, Wait):
                    await asyncio.sleep(max(0.0, step.until - time.monotonic()))
                elif isinstance(step, Abandon):
                    end.begin(self._abandon(step, latest))
                else:
                    latest = end.begin(self._authority.do_soon(step))
                    answer = await asyncio.shield(latest)
            except BaseException as caught:  # noqa: BLE001 - the steps decide what to do about it
                error = caught

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


def _note_left(error: FencelockError) -> None:
    logger.warning("what an interrupted operation has left ends by itself: %s", error)
