"""Extends held leases in the background: in batches, in time, and not for ever.

A lease is extended after about a third of its ttl. If the authority does not answer, the renewer tries again
until the lease has ended: then the lease is *lost*. A lease is also lost at the end of `max_hold`, because a
worker that hangs must not hold its lock for ever. Work under a lost lease is not interrupted. It learns of
the loss from `on_lost`, from its next write, or on leaving the block. The storage refuses its token as soon
as a newer holder has claimed the row.

A release first stops the renewal, and waits for an extension that is under way, so that nothing is extended
after its release. Only the loop's own thread can wait for an extension of the loop. For other threads, the
extension may make locks again after the release, so whichever ends later sends another release.

`BatchRenewer` plans when holds are due, and handles the outcomes. `ThreadRenewer` extends them in one thread
for each authority, which ends after a while without holds. `LoopRenewer` uses timers and tasks of the loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import math
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal
from weakref import WeakKeyDictionary, ref

from fencelock import _events, _threads
from fencelock._events import LeaseExtended
from fencelock._generators import Steps
from fencelock._owners import running_loop
from fencelock._process import in_forked_child
from fencelock._threads import sleep_until_woken
from fencelock._workers import Worker
from fencelock.authority.base import Authority, Grant, Wish
from fencelock.errors import AuthorityError, FencelockError, LockLostError
from fencelock.lock.hold import Hold, Renewer

logger: logging.Logger = logging.getLogger("fencelock.renewal")

_PARTS = 16
_SHORTEST_PAUSE = 0.01

Calls = list[Callable[[], object]]  # functions to call for leases that were lost


class BatchRenewer(Renewer):
    """Extends many holds together, because the times when they are due are rounded up to common moments.

    Only `cancel`, `reschedule` and `_unplan` may run in two threads at once. A signal may interrupt each.
    """

    def __init__(self) -> None:
        self._mutex = threading.RLock()  # reentrant, because a signal handler may interrupt its owner
        self._due: dict[float, set[Callable[[], Hold | None]]] = {}  # weak references
        self._in_flight: frozenset[Hold] = frozenset()
        # Random, because all processes of a machine would otherwise ask at the same moments.
        self._phase = random.uniform(0.0, 1024.0)  # noqa: S311 - no secret

    def cancel(self, hold: Hold) -> bool:
        with self._mutex:
            if hold in self._in_flight:
                return False
            self._unplan(hold)
            return True

    def _unplan(self, hold: Hold) -> None:
        if (holds := self._due.get(hold.renew_at)) is not None:
            holds.discard(hold.itself)

    @property
    def next_at(self) -> float:
        return min(self._due, default=math.inf)

    def reschedule(self, hold: Hold, now: float) -> None:
        """Plan when a hold is due: at its next extension or its end, or up to 1/16 of the interval later."""
        left = hold.grant.expires_at - now
        interval = max(hold.ttl / 20, _SHORTEST_PAUSE) if hold.last_error else hold.ttl / 3
        if not _is_final(hold):  # a final hold cannot be extended any further
            # At most half of the time left; after a failure, all of it. A slow acquisition leaves less.
            left = min(interval, left if hold.last_error else left / 2)
        # A power of two, so that leases of different ttls are extended together.
        width = 2.0 ** math.floor(math.log2(interval / _PARTS))
        with self._mutex:
            self._unplan(hold)
            hold.renew_at = math.ceil((now + left - self._phase) / width) * width + self._phase
            self._due.setdefault(hold.renew_at, set()).add(hold.itself)

    def pop_due(self, now: float) -> list[Hold]:
        due: list[Hold] = []
        while (look := self.next_at) <= now:
            # `tuple` copies the set in one step of Python, because another thread may discard a hold.
            references = tuple(self._due.pop(look, ()))
            due += [hold for reference in references if (hold := reference()) is not None]
        self._in_flight = frozenset(due)
        return due

    def renew_due(
        self, due: Sequence[Hold], now: Callable[[], float], tell: Callable[[Calls], None]
    ) -> Steps[None]:
        """Extend the holds that are due, mark those that have ended as lost, and plan the next extensions."""
        authority = due[0].authority
        calls: Calls = []
        ended: list[Steps[Any]] = []
        wanted = list(self._look(due, now, calls, ended))
        wishes = [wish for _, wish, _ in wanted]
        outcomes = (yield from _tried(authority.extend_gen(wishes), len(wanted))) if wanted else ()
        for (hold, (grant, _), late), outcome in zip(wanted, outcomes, strict=True):
            # Another thread or loop, or an interrupted holder, releases without waiting for this extension.
            if hold.released:
                ended += release_again(hold)
            elif hold.grant is grant:  # otherwise its holder has extended or reminted it, and plans it
                calls += self._note(hold, outcome, late, now())
                if hold.over:
                    ended.append(authority.release_gen(hold.grant))
        if calls:
            tell(calls)
        for each in ended:
            yield from _tried(each)

    def _look(
        self, due: Iterable[Hold], now: Callable[[], float], calls: Calls, ended: list[Steps[Any]]
    ) -> Iterator[tuple[Hold, Wish, float]]:
        """Yield each hold to extend, its `Wish`, and by how many seconds it is late; give up ended holds."""
        for hold in due:
            moment = now()
            if hold.over:
                continue
            if moment >= hold.grant.expires_at:
                calls += _give_up(hold, moment)
                ended.append(hold.authority.release_gen(hold.grant))
            elif _is_final(hold):
                self.reschedule(hold, moment)
            else:
                late = max(0.0, moment - hold.renew_at)
                yield hold, (hold.grant, hold.ttl_left(moment)), late

    def _note(
        self, hold: Hold, outcome: Grant | FencelockError, late: float, now: float
    ) -> Iterable[Callable[[], object]]:
        """Note the outcome of an extension; return the callbacks to call if it is a loss."""
        _tell(hold, outcome, late)
        if hold.over or isinstance(outcome, LockLostError):
            return hold.mark_lost(str(outcome))
        if isinstance(outcome, Grant):
            hold.note_extension(outcome)
        else:
            hold.last_error = str(outcome)
        self.reschedule(hold, now)
        return ()


def _tried(steps: Steps[Any], outcomes: int = 0) -> Steps[Any]:
    """Return the result of a generator, or its error `outcomes` times, because renewal must go on."""
    try:
        return (yield from steps)
    except AuthorityError as error:
        return [error] * outcomes
    except Exception as error:
        logger.exception("leases could not be extended or released")
        return [error if isinstance(error, FencelockError) else AuthorityError(repr(error))] * outcomes


def _is_final(hold: Hold) -> bool:
    return hold.deadline - hold.grant.expires_at < hold.ttl / 20


def _give_up(hold: Hold, now: float) -> tuple[Callable[[], object], ...]:
    """Mark a hold as lost because its time has run out; return the callbacks to call."""
    if _is_final(hold):
        return hold.mark_lost("it was held for as long as max_hold allows", "max_hold")
    detail = f"it could not be extended in time: {hold.last_error or 'this process was held up'}"
    _tell(hold, LockLostError(detail), max(0.0, now - hold.renew_at))
    return hold.mark_lost(detail, "expired")


def _tell(hold: Hold, outcome: Grant | FencelockError, late: float) -> None:
    if _events.listeners:
        if isinstance(outcome, Grant):
            _events.tell(LeaseExtended(*hold.names, "extended", late, hold.ttl, None))
        else:
            word: Literal["lost", "error"] = "lost" if isinstance(outcome, LockLostError) else "error"
            _events.tell(LeaseExtended(*hold.names, word, late, hold.ttl, outcome))


def release_again(hold: Hold) -> Iterator[Steps[Any]]:
    """Yield the steps that release a hold once more, because an extension may have made its locks again."""
    hold.extended_after_release = True  # if the release is still under way, it releases once more itself
    if hold.release_finished:
        yield hold.give_back(hold.grant)


def tell(calls: Iterable[Callable[[], object]]) -> None:
    for call in calls:
        try:
            call()
        except Exception:
            logger.exception("an on_lost callback failed")


_IDLE = 30.0  # seconds after which a thread ends if it has nothing to extend
_LOOK = 0.005  # seconds between two checks by a task that waits until an extension has ended


def _tell_apart(calls: Calls) -> None:
    """Call `tell` in a new thread, because a slow callback must not delay the next extensions."""
    target = contextvars.Context().run
    thread = threading.Thread(target=target, args=(tell, calls), name="fencelock-lost", daemon=True)
    try:
        _threads.start(thread)
    except RuntimeError:  # too many threads, or the interpreter ends
        tell(calls)


class ThreadRenewer(BatchRenewer):
    """Extends the holds of blocking code, from a thread that is started when it is first needed."""

    def __init__(self) -> None:
        super().__init__()
        self._extended = _threads.Sleepers()
        self._worker = Worker("fencelock-renewal", self._turn, _IDLE)

    def add(self, hold: Hold) -> None:
        self.reschedule(hold, time.monotonic())
        if hold.renew_at < self._worker.wakes_at:
            try:
                self._worker.wake()
            except RuntimeError as error:  # too many threads, or the interpreter ends
                logger.warning("leases are not extended, because no thread can be started: %s", error)

    def stop(self, hold: Hold) -> None:
        while True:
            with self._mutex:
                if self.cancel(hold):
                    return
                wakeup = self._extended.add()
            sleep_until_woken(wakeup, threading.TIMEOUT_MAX)

    async def stop_soon(self, hold: Hold) -> None:
        while not self.cancel(hold):  # noqa: ASYNC110 - a thread sets no event of a loop
            await asyncio.sleep(_LOOK)

    def _turn(self) -> float:
        with self._mutex:
            due = self.pop_due(time.monotonic())
        try:
            if due:
                due[0].authority.run(self.renew_due(due, time.monotonic, _tell_apart))
        finally:
            with self._mutex:
                self._in_flight = frozenset()
                self._extended.wake_all()
        with self._mutex:
            return self.next_at


_of_threads: WeakKeyDictionary[Authority, ThreadRenewer] = WeakKeyDictionary()


def for_thread(authority: Authority) -> ThreadRenewer:
    return _of_threads.get(authority) or _of_threads.setdefault(authority, ThreadRenewer())


in_forked_child(_of_threads.clear)  # the child has no such thread, and holds nothing


class LoopRenewer(BatchRenewer):
    """Extends the holds of one event loop's tasks, by timers of that loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self._loop = ref(loop)
        #: Weak, because a timer refers to its loop, which `_of_loops` would keep alive by this renewer.
        self._timer: ref[asyncio.TimerHandle] | None = None
        self._wakes_at = math.inf
        self._round: asyncio.Task[None] | None = None

    def add(self, hold: Hold) -> None:
        """Begin to extend a hold; a call from another thread is passed on to the loop."""
        loop = self._loop()
        if running_loop() is loop:
            self.reschedule(hold, time.monotonic())
            if hold.renew_at < self._wakes_at:
                self._wind_up()
        elif loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed, and extends nothing any more
                loop.call_soon_threadsafe(self.add, hold, context=contextvars.Context())

    def stop(self, hold: Hold) -> None:
        self._unplan(hold)

    async def stop_soon(self, hold: Hold) -> None:
        """Stop extending a hold; in its loop, wait for an extension that is under way."""
        if self._round is not None and hold in self._in_flight and running_loop() is self._loop():
            await asyncio.wait([self._round])
        self._unplan(hold)

    def _wind_up(self) -> None:
        """Set the timer to when the next hold is due, unless it fires early enough or an extension runs."""
        at = self.next_at
        if self._round is not None or at >= self._wakes_at:
            return
        if self._timer is not None and (timer := self._timer()) is not None:
            timer.cancel()
        self._wakes_at = at
        pause, loop = max(0.0, at - time.monotonic()), asyncio.get_running_loop()
        self._timer = ref(loop.call_later(pause, self._ring, context=contextvars.Context()))

    def _ring(self) -> None:
        self._timer, self._wakes_at = None, math.inf
        if due := self.pop_due(time.monotonic()):
            extending = due[0].authority.aio.run(self.renew_due(due, time.monotonic, tell))
            self._round = asyncio.get_running_loop().create_task(extending, name="fencelock-renewal")
            self._round.add_done_callback(self._end_round)
        else:
            self._wind_up()

    def _end_round(self, done: asyncio.Task[None]) -> None:
        in_flight, self._round, self._in_flight = self._in_flight, None, frozenset()
        if done.cancelled():  # perhaps by a loop that ends; the leases are still held
            for hold in in_flight:
                if not hold.over:
                    hold.last_error = "the task that extends it was cancelled"
                    self.reschedule(hold, time.monotonic())
        self._wind_up()
        if not done.cancelled():
            done.result()


_of_loops: WeakKeyDictionary[asyncio.AbstractEventLoop, WeakKeyDictionary[Authority, LoopRenewer]]
_of_loops = WeakKeyDictionary()


def for_loop(authority: Authority) -> LoopRenewer:
    loop = asyncio.get_running_loop()
    renewers = _of_loops.get(loop) or _of_loops.setdefault(loop, WeakKeyDictionary())
    return renewers.get(authority) or renewers.setdefault(authority, LoopRenewer(loop))


in_forked_child(_of_loops.clear)  # the child holds nothing
