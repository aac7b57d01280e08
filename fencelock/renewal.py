"""Extending held leases in the background: in batches, in time, and not for ever.

What is to be done when (`Agenda`, `tend`) is one thing, and knows neither threads nor event loops; who does
it is another: for blocking code a thread for each authority (`ThreadRenewer`), for asyncio the event loop
itself (`LoopRenewer`), with timers and short-lived tasks, so that nothing is pending while nothing is held.

A lease is looked at after a third of its ttl; if the nodes cannot be reached then, again and again until its
validity is over. Then it is *lost*, and so it is at the end of `max_hold`: a worker that hangs beside a
healthy renewer must not hold for ever. Whoever works under a lost lease is not interrupted, but hears of it
from the next use of the lease, from `on_lost`, and on leaving the block; the storage has the last word.

A lease that is given back is taken off the agenda first, and an extension that is under way is waited for:
nothing is extended after its release. Where it cannot be waited for, in another thread than the loop's, nodes
may make locks again behind the release: then the one of the two that ends last releases once more.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import heapq
import logging
import math
import os
import random
import threading
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Protocol
from weakref import ReferenceType, WeakKeyDictionary, ref

from fencelock import _threads
from fencelock._owners import running_loop
from fencelock.authority.base import Authority, Grant, Wish
from fencelock.errors import AuthorityError, FencelockError, LockLostError

_PARTS = 16
_SHORTEST_PAUSE = 0.01
_IDLE = 30.0

logger = logging.getLogger("fencelock.renewal")

#: What is wanted.
Wishes = list[Wish]
#: What became of a wish.
Extended = Grant | FencelockError


class Renewable(Protocol):
    """What is renewed: a hold of the lock's."""

    grant: Grant
    planned: float
    trouble: str
    extended_behind: bool

    @property
    def authority(self) -> Authority:
        """The authority that granted it."""

    @property
    def itself(self) -> Callable[[], Renewable | None]:
        """A weak reference."""

    @property
    def ttl(self) -> float:
        """Seconds that an extension asks for."""

    @property
    def deadline(self) -> float:
        """When it is to end whatever happens."""

    @property
    def release_ended(self) -> bool:
        """Whether its release has been answered, or given up."""

    @property
    def over(self) -> bool:
        """Whether there is nothing to extend."""

    @property
    def released(self) -> bool:
        """Whether it has been given back, or is being so."""

    def most_seconds(self, now: float) -> float:
        """Return for how long it may be extended at that time."""

    def prolong(self, grant: Grant) -> None:
        """Note that the authority has extended the grant."""

    def lose(self, reason: str) -> tuple[Callable[[], object], ...]:
        """Note that it has ended; return what is to be called for that."""


class Agenda:
    """When each hold is to be looked at: in steps of a sixteenth of its interval, so that batches form.

    Not for two threads at once, save `strike`; but a signal handler may plan in the midst of planning. Holds
    are referred to weakly.

    Attributes:
        next_at: when something is to be done; infinite if nothing is.
    """

    def __init__(self) -> None:
        self._steps: dict[float, set[Callable[[], Renewable | None]]] = {}
        self._times: list[float] = []
        self.next_at = math.inf
        # Another one in every process, or all would ask the nodes at the same moments.
        self._phase = random.random()  # noqa: S311 - no secret

    def enter(self, hold: Renewable, now: float) -> None:
        """Plan the first look at a hold."""
        self.plan(hold, *first_look(hold, now))

    def plan(self, hold: Renewable, at: float, interval: float) -> None:
        """Look at a hold at that time, or up to a sixteenth of the interval later; and at no other."""
        self.strike(hold)
        width = interval / _PARTS
        hold.planned = step = (math.ceil(at / width - self._phase) + self._phase) * width
        if step not in self._steps:
            heapq.heappush(self._times, step)  # twice, if a handler does the same here
        self._steps.setdefault(step, set()).add(hold.itself)
        self.next_at = min(self.next_at, step)

    def strike(self, hold: Renewable) -> None:
        """Take a hold off the agenda."""
        if (holds := self._steps.get(hold.planned)) is not None:
            holds.discard(hold.itself)

    def take(self, now: float) -> list[Renewable]:
        """Take off, and return, what is to be looked at now."""
        due: list[Renewable] = []
        while self._times and (self._times[0] <= now or not self._steps.get(self._times[0])):
            references = self._steps.pop(heapq.heappop(self._times), ())
            # A copy, made in one step: another thread may strike one.
            due += [hold for reference in list(references) if (hold := reference()) is not None]
        self.next_at = self._times[0] if self._times else math.inf
        return due


def first_look(hold: Renewable, now: float) -> tuple[float, float]:
    """Return when to look at a hold that was granted or extended, and the interval of such looks."""
    interval = hold.ttl / 3
    left = hold.grant.expires_at - now
    # An acquisition that took long has left less than its ttl. At the end there is nothing to gain.
    return now + (left if _is_final(hold) else min(interval, left / 2)), interval


def second_look(hold: Renewable, now: float) -> tuple[float, float]:
    """Return when to look again at a hold that could not be extended, and the interval of such looks."""
    interval = max(hold.ttl / 20, _SHORTEST_PAUSE)
    return min(now + interval, hold.grant.expires_at), interval


def _is_final(hold: Renewable) -> bool:
    """Whether the grant lasts for as long as it ever may."""
    return hold.deadline - hold.grant.expires_at < hold.ttl / 20


def tend(
    due: Iterable[Renewable], now: Callable[[], float], plan: Callable[[Renewable, float, float], None]
) -> Generator[Wishes | Grant, Sequence[Extended], list[Callable[[], object]]]:
    """Extend what is due and can be, give up what cannot, and plan the rest.

    Yields wishes, and is sent what became of each; yields a grant that is lost, to be released
    for what may be left of it. Returns what is to be called for leases that were lost.
    """
    calls: list[Callable[[], object]] = []
    wanted: list[tuple[Renewable, Grant, float]] = []
    for hold in due:
        moment = now()
        if hold.over:
            continue
        if moment >= hold.grant.expires_at:
            reason = (
                "it was held for as long as max_hold allows"
                if _is_final(hold)
                else f"it could not be extended in time: {hold.trouble or 'this process was held up'}"
            )
            calls += hold.lose(reason)
            yield hold.grant
        elif _is_final(hold):
            plan(hold, *first_look(hold, moment))
        else:
            wanted.append((hold, hold.grant, hold.most_seconds(moment)))
    outcomes: Sequence[Extended] = ()
    if wanted:
        outcomes = yield [(grant, seconds) for _, grant, seconds in wanted]
    for (hold, grant, _), outcome in zip(wanted, outcomes, strict=True):
        # Who works in another thread or loop, or was interrupted, did not wait for this.
        if hold.released:
            yield from follow_release(hold)
        elif hold.grant is grant:  # or else extended or minted anew meanwhile, and planned
            calls += yield from _note(hold, outcome, now, plan)
    return calls


def follow_release(hold: Renewable) -> Generator[Grant, object, None]:
    """Release once more what may have been made again behind the release; or leave that to the releaser."""
    hold.extended_behind = True
    if hold.release_ended:
        yield hold.grant


def _note(
    hold: Renewable,
    outcome: Extended,
    now: Callable[[], float],
    plan: Callable[[Renewable, float, float], None],
) -> Generator[Grant, object, tuple[Callable[[], object], ...]]:
    calls: tuple[Callable[[], object], ...] = ()
    if hold.over or isinstance(outcome, LockLostError):
        calls = hold.lose(str(outcome))
        yield hold.grant
    elif isinstance(outcome, Grant):
        hold.prolong(outcome)
        plan(hold, *first_look(hold, now()))
    else:
        hold.trouble = str(outcome)
        plan(hold, *second_look(hold, now()))
    return calls


def tell(calls: Iterable[Callable[[], object]]) -> None:
    """Call what is to be called for leases that were lost; one that fails is logged."""
    for call in calls:
        try:
            call()
        except Exception:
            logger.exception("an on_lost callback failed")


def _tell_apart(calls: list[Callable[[], object]]) -> None:
    """Do as `tell`, in a thread of its own: leases are not to be lost because a callback takes its time."""
    thread = threading.Thread(
        target=contextvars.Context().run, args=(tell, calls), name="fencelock-lost", daemon=True
    )
    try:
        _threads.start(thread)
    except RuntimeError:  # too many threads, or the interpreter is on its way out
        tell(calls)


class Renewer(Protocol):
    """Who extends holds."""

    def watch(self, hold: Renewable) -> None:
        """Begin to extend a hold."""

    def strike(self, hold: Renewable) -> bool:
        """Cease to extend a hold; or return False, and go on, where an extension is under way."""

    def stop(self, hold: Renewable) -> None:
        """Cease to extend a hold; an extension under way has ended when this returns."""

    async def stop_soon(self, hold: Renewable) -> None:
        """Do as `stop`, and let other tasks run meanwhile."""


class ThreadRenewer:
    """Extends the holds of blocking code, from a thread that is started when it is first needed."""

    def __init__(self) -> None:
        self._agenda = Agenda()
        self._mutex = threading.RLock()  # for signal handlers that lock, and strike in the midst of it
        self._changed = threading.Condition(self._mutex)
        self._wakes_at = -math.inf
        self._thread: threading.Thread | None = None
        self._tended: frozenset[Renewable] = frozenset()

    def watch(self, hold: Renewable) -> None:
        """Begin to extend a hold."""
        now = time.monotonic()
        with self._mutex:
            self._agenda.enter(hold, now)
            if self._thread is None or not self._thread.is_alive():  # its start may have been interrupted
                self._start()
            elif self._agenda.next_at < self._wakes_at:
                self._wakes_at = self._agenda.next_at
                self._changed.notify_all()

    def strike(self, hold: Renewable) -> bool:
        """Cease to extend a hold; or return False, and go on, where an extension is under way."""
        with self._mutex:
            if hold in self._tended:
                return False
            self._agenda.strike(hold)
            return True

    def stop(self, hold: Renewable) -> None:
        """Cease to extend a hold; an extension under way has ended when this returns."""
        with self._mutex:
            while hold in self._tended:
                self._changed.wait()
            self._agenda.strike(hold)

    async def stop_soon(self, hold: Renewable) -> None:
        """Do as `stop`, and let other tasks run meanwhile."""
        while hold in self._tended:
            # Not `stop`: a thread cannot be cancelled, and would strike off what is planned anew by then.
            await asyncio.to_thread(self._wait_for, hold)
        self.stop(hold)

    def _wait_for(self, hold: Renewable) -> None:
        with self._changed:
            self._changed.wait_for(lambda: hold not in self._tended)

    def _start(self) -> None:
        # An empty context: the thread must not keep the leases of whoever happened to start it.
        self._thread = thread = threading.Thread(
            target=contextvars.Context().run, args=(self._work,), name="fencelock-renewal", daemon=True
        )
        self._changed.notify_all()  # one that is too many ends
        try:
            _threads.start(thread)
        except RuntimeError as error:  # too many threads, or the interpreter is on its way out
            self._thread = None
            logger.warning("leases are not extended, for no thread can be started: %s", error)

    def _work(self) -> None:
        while due := self._await_due():
            calls = self._tend(due)
            with self._changed:
                self._tended = frozenset()
                self._changed.notify_all()
            if calls:
                _tell_apart(calls)
            del due, calls  # while it waits, it must not keep what nobody else does

    def _await_due(self) -> list[Renewable]:
        """Return what is to be looked at; nothing when the thread may end: it was idle, or is one too many.

        For a signal handler that raises within `Thread.start` leaves a thread that seems not to be alive.
        """
        with self._changed:
            idle_since = time.monotonic()
            while self._thread is threading.current_thread():
                if self._tended:  # by one too many, which ends after that
                    self._changed.wait()
                    continue
                now = time.monotonic()
                if due := self._agenda.take(now):
                    self._tended = frozenset(due)
                    self._wakes_at = -math.inf
                    return due
                self._wakes_at = min(self._agenda.next_at, idle_since + _IDLE)
                if now >= self._wakes_at:
                    self._thread = None
                    return []
                self._changed.wait(self._wakes_at - now)
            return []

    def _tend(self, due: list[Renewable]) -> list[Callable[[], object]]:
        authority = due[0].authority
        steps = tend(due, time.monotonic, self._plan)
        answer: Sequence[Extended] = ()
        try:
            asked = next(steps)
            while True:
                try:
                    if isinstance(asked, Grant):
                        authority.release(asked)
                    else:
                        answer = authority.extend_many(asked)
                except Exception as error:  # noqa: BLE001 - the worker must outlive whatever happens
                    answer = _failed(asked, error)
                asked = steps.send(answer)
        except StopIteration as end:
            calls: list[Callable[[], object]] = end.value
            return calls

    def _plan(self, hold: Renewable, at: float, interval: float) -> None:
        with self._changed:
            self._agenda.plan(hold, at, interval)


class LoopRenewer:
    """Extends the holds of one event loop's tasks, by timers of that loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, authority: Authority) -> None:
        self._loop = ref(loop)
        self._authority = ref(authority)
        self._agenda = Agenda()
        self._timer: asyncio.TimerHandle | None = None
        self._wakes_at = math.inf
        self._round: asyncio.Task[list[Callable[[], object]]] | None = None
        self._tended: frozenset[Renewable] = frozenset()

    def watch(self, hold: Renewable) -> None:
        """Begin to extend a hold; called elsewhere than in the loop, begin soon."""
        loop = self._loop()
        if running_loop() is loop:
            self._agenda.enter(hold, time.monotonic())
            self._wind_up()
        elif loop is not None:
            with contextlib.suppress(RuntimeError):  # it has been closed, and nobody extends
                loop.call_soon_threadsafe(self.watch, hold, context=contextvars.Context())

    def serves(self, loop: asyncio.AbstractEventLoop, authority: Authority) -> bool:
        """Whether it extends an authority's holds in a loop."""
        return self._loop() is loop and self._authority() is authority

    def strike(self, hold: Renewable) -> bool:
        """Cease to extend a hold; or return False, and go on, where an extension is under way."""
        if hold in self._tended:
            return False
        self._agenda.strike(hold)
        return True

    def stop(self, hold: Renewable) -> None:
        """Cease to extend a hold; one under way is not waited for, as only tasks of the loop could."""
        self._agenda.strike(hold)

    async def stop_soon(self, hold: Renewable) -> None:
        """Cease to extend a hold; in its loop, an extension under way has ended when this returns."""
        if self._round is not None and hold in self._tended and running_loop() is self._loop():
            await asyncio.wait([self._round])
        self._agenda.strike(hold)

    def _wind_up(self) -> None:
        """Set the timer, if it is not to ring early enough."""
        at = self._agenda.next_at
        if self._round is not None or at >= self._wakes_at:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._wakes_at = at
        self._timer = asyncio.get_running_loop().call_later(
            max(0.0, at - time.monotonic()), self._ring, context=contextvars.Context()
        )

    def _ring(self) -> None:
        self._timer, self._wakes_at = None, math.inf
        if due := self._agenda.take(time.monotonic()):
            self._tended = frozenset(due)
            self._round = asyncio.get_running_loop().create_task(self._ask(due), name="fencelock-renewal")
            self._round.add_done_callback(self._end_round)
        else:
            self._wind_up()

    def _end_round(self, done: asyncio.Task[list[Callable[[], object]]]) -> None:
        tended, self._round, self._tended = self._tended, None, frozenset()
        if done.cancelled():  # by somebody who cancels all tasks that there are; what is held is held still
            now = time.monotonic()
            for hold in tended:
                if not hold.over:
                    self._agenda.plan(hold, *second_look(hold, now))
        self._wind_up()
        if not done.cancelled():
            tell(done.result())

    async def _ask(self, due: list[Renewable]) -> list[Callable[[], object]]:
        authority = due[0].authority.aio
        steps = tend(due, time.monotonic, self._agenda.plan)
        answer: Sequence[Extended] = ()
        try:
            asked = next(steps)
            while True:
                try:
                    if isinstance(asked, Grant):
                        await authority.release(asked)
                    else:
                        answer = await authority.extend_many(asked)
                except Exception as error:  # noqa: BLE001 - renewal must outlive whatever happens
                    answer = _failed(asked, error)
                asked = steps.send(answer)
        except StopIteration as end:
            calls: list[Callable[[], object]] = end.value
            return calls


def _failed(asked: Wishes | Grant, error: Exception) -> Sequence[Extended]:
    """Return an authority's error as what became of each wish."""
    if not isinstance(error, AuthorityError):
        logger.error("leases could not be extended or released", exc_info=error)
    count = 0 if isinstance(asked, Grant) else len(asked)
    return [error if isinstance(error, FencelockError) else AuthorityError(repr(error))] * count


_of_threads: WeakKeyDictionary[Authority, ThreadRenewer] = WeakKeyDictionary()
_of_loops: WeakKeyDictionary[asyncio.AbstractEventLoop, WeakKeyDictionary[Authority, LoopRenewer]] = (
    WeakKeyDictionary()
)


#: Which of these was asked for last: mostly there is but one. A list, to be changed in one step.
_latest_of_loops: list[ReferenceType[LoopRenewer]] = []


def for_thread(authority: Authority) -> ThreadRenewer:
    """Return who extends the holds of blocking code."""
    renewer = _of_threads.get(authority)
    if renewer is None:
        renewer = _of_threads.setdefault(authority, ThreadRenewer())
    return renewer


def for_loop(authority: Authority) -> LoopRenewer:
    """Return who extends the holds of the running event loop's tasks."""
    loop = asyncio.get_running_loop()
    for reference in _latest_of_loops:
        latest = reference()
        if latest is not None and latest.serves(loop, authority):
            return latest
    renewers = _of_loops.get(loop)
    if renewers is None:
        renewers = _of_loops.setdefault(loop, WeakKeyDictionary())
    renewer = renewers.get(authority)
    if renewer is None:
        renewer = renewers[authority] = LoopRenewer(loop, authority)
    _latest_of_loops[:] = [ref(renewer)]
    return renewer


def _forget() -> None:
    """In a forked child: no thread has come along, and nothing is held."""
    _of_threads.clear()
    _of_loops.clear()
    _latest_of_loops.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
