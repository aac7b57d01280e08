"""Steps (see `_generators`) that threads and event loops execute in different ways, and how they do so."""

from __future__ import annotations

import abc
import asyncio
import contextlib
import contextvars
import threading
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from typing import Any, Final, NamedTuple, TypeVar
from weakref import WeakSet, ref

from fencelock import _threads
from fencelock._generators import Steps, run, run_async
from fencelock._process import start_over_in_children
from fencelock.authority.base import before_closing, in_use, logger
from fencelock.authority.generators import AsyncView, GeneratorAuthority
from fencelock.errors import FencelockError

_T = TypeVar("_T")


class ThreadWakeup:
    """Wakes a thread that sleeps; a `wake` before the sleep counts, too. Any thread may call `wake`."""

    def __init__(self) -> None:
        self._asleep = threading.Lock()  # see `_threads.new_wakeup`
        self._asleep.acquire()

    def wake(self) -> None:
        _threads.wake(self._asleep)

    def sleep(self, seconds: float) -> None:
        _threads.sleep_until_woken(self._asleep, seconds)


class LoopWakeup:
    """Wakes a task of the event loop in which it was made. Any thread may call `wake`."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._woken = asyncio.Event()

    def wake(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._woken.set)

    async def sleep(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._woken.wait()
        self._woken.clear()


Wakeup = ThreadWakeup | LoopWakeup

#: A step; its result is the state of the authority for the caller's world: blocking code, or an event loop.
HERE: Final = object()


class Wait(NamedTuple):
    """A step: wait until the time `until` on the clock of `time.monotonic`.

    `wakeup` ends the wait. The wait may also end earlier without a reason.
    """

    until: float
    wakeup: Any = None


class Abandon(NamedTuple):
    """A step: release what an interrupted operation may have left, by the generator of `giving_back`.

    Blocking code does it at once. Coroutines do it in another task, after the interrupted step, because a
    cancelled task must not wait.
    """

    giving_back: Callable[[], Steps[Any]]


class Later(NamedTuple):
    """A step: run the generator of `steps` in the background. The caller does not wait for its end."""

    steps: Callable[[], Steps[None]]


_SLEEP: Final = 1.0  # the longest sleep in seconds; after it, the caller checks whether it still has to wait


class LoopEnd:
    """Waits until `tasks` have ended, and then calls `close`: when its event loop ends, or at `end`.

    It has an asynchronous generator, because `asyncio.run` closes such generators when its loop ends.
    """

    def __init__(
        self, here: Any = None, kept: Any = None, close: Callable[[], Awaitable[None]] | None = None
    ) -> None:
        self.tasks: set[asyncio.Task[Any]] = set()
        self.later: WeakSet[asyncio.Task[Any]] = WeakSet()  # the tasks that are cancelled at the end
        self.here: Any = here  # the state of an authority for this loop
        self.kept: Any = kept
        self.over: bool = False
        self.authority: Callable[[], Any] = lambda: None
        self._close = close
        self._generator = self._wait_for_end()
        with contextlib.suppress(StopIteration):  # it has reached its `yield`
            self._generator.asend(None).send(None)

    async def _wait_for_end(self) -> AsyncGenerator[None]:
        try:
            yield
        finally:
            for end in before_closing:
                await end(self.authority())
            while self.tasks:
                for task in list(self.later):  # also those that have begun meanwhile
                    if not task.cancelling():
                        task.cancel()
                await asyncio.wait(self.tasks)
            self.over = True
            if self._close is not None:
                await self._close()

    async def end(self) -> None:
        await self._generator.aclose()

    def begin_to_end(self) -> None:
        self._ending = asyncio.get_running_loop().create_task(self.end())

    def begin(self, work: Coroutine[Any, Any, _T]) -> asyncio.Task[_T]:
        """Start a task, which the end waits for."""
        task = asyncio.get_running_loop().create_task(work, context=contextvars.Context())
        self.tasks.add(task)
        task.add_done_callback(self._end_task)
        return task

    def _end_task(self, task: asyncio.Task[Any]) -> None:
        self.tasks.discard(task)
        if not task.cancelled():
            task.exception()  # retrieved here, because a cancelled caller does not retrieve it


#: What authorities had in a parent process. A child keeps it, because a driver that frees a connection closes
#: it, and may send data.
_of_parents: list[dict[str, Any]] = []


class WithLoops(GeneratorAuthority):
    """An authority whose steps are those of this module, and those that `work` and `work_soon` execute.

    `__init__` of a subclass ends with `_begin`.
    """

    def _begin(self) -> None:
        self._start_over()
        start_over_in_children(self)
        in_use.add(self)

    def begin_in_child(self) -> None:
        """Leave the connections to the parent, and start over."""
        _of_parents.append(vars(self).copy())
        self._start_over()

    def _start_over(self) -> None:
        """Begin without connections: at first, and in a forked child."""
        self._loop_ends: dict[asyncio.AbstractEventLoop, LoopEnd] = {}
        self.here: Any = None  # the state of the authority for blocking code

    @abc.abstractmethod
    def work(self, step: Any) -> Any:
        """Execute a step of the subclass, blocking."""

    @abc.abstractmethod
    async def work_soon(self, step: Any) -> Any:
        """Execute a step of the subclass; other tasks run meanwhile."""

    def open_in_loop(self) -> LoopEnd:
        """Return a `LoopEnd` for the running event loop, with the authority's state for this loop."""
        return LoopEnd()

    def loop_end(self) -> LoopEnd:
        """Return the `LoopEnd` of the running event loop; a new one if there is none, or it is over."""
        loop = asyncio.get_running_loop()
        if (end := self._loop_ends.get(loop)) is None or end.over:
            for each in list(self._loop_ends):
                if each.is_closed():
                    self._loop_ends.pop(each, None)  # another loop may remove it, too
            end = self._loop_ends[loop] = self.open_in_loop()
            end.authority = ref(self)
        return end

    def close(self) -> None:
        """Close the connections of event loops; subclasses close the others. The next use connects again."""
        for loop, end in list(self._loop_ends.items()):
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(end.begin_to_end)

    def run(self, steps: Steps[_T]) -> _T:
        return run(steps, self.do)

    def do(self, step: Any) -> Any:
        if isinstance(step, Wait):
            return (time.sleep if step.wakeup is None else step.wakeup.sleep)(_seconds_of(step))
        if step is HERE:
            return self.here
        if isinstance(step, Later):
            # An empty context, because the thread must not keep the leases of its starter alive.
            run = contextvars.Context().run
            return _threads.start(threading.Thread(target=run, args=(self.run, step.steps()), daemon=True))
        if not isinstance(step, Abandon):
            return self.work(step)
        try:
            return self.run(step.giving_back())
        except FencelockError as error:
            return _note_left(error)


class AsyncWithLoops(AsyncView):
    """A `WithLoops` for coroutines.

    A step of `work_soon` that has begun goes on to its end, even if its caller is cancelled meanwhile.
    """

    _authority: WithLoops

    async def close(self) -> None:
        await self._authority.loop_end().end()

    async def run(self, steps: Steps[_T]) -> _T:
        latest: asyncio.Task[Any] | None = None
        end = self._authority.loop_end()

        async def do(step: Any) -> Any:
            nonlocal latest
            if isinstance(step, Wait):
                return await (asyncio.sleep if step.wakeup is None else step.wakeup.sleep)(_seconds_of(step))
            if step is HERE:
                return end.here
            if isinstance(step, Abandon):
                return end.begin(self._abandon(step, latest))
            if isinstance(step, Later):
                present = self._authority.loop_end()  # because `end` may be over
                return present.later.add(present.begin(self.run(step.steps())))
            latest = end.begin(self._authority.work_soon(step))
            return await asyncio.shield(latest)

        return await run_async(steps, do)

    async def _abandon(self, step: Abandon, latest: asyncio.Task[Any] | None) -> None:
        try:
            if latest is not None:
                await asyncio.wait([latest])
            await self.run(step.giving_back())
        except asyncio.CancelledError:  # a loop that ends cancels all tasks; `LoopEnd` waits for a new one
            self._authority.loop_end().begin(self._abandon(step, latest))
            raise
        except FencelockError as error:
            _note_left(error)


def _seconds_of(step: Wait) -> float:
    return min(_SLEEP, max(0.0, step.until - time.monotonic()))


def _note_left(error: FencelockError) -> None:
    logger.warning(
        "an interrupted operation could not be undone; a lease that it has left ends by itself: %s", error
    )
