"""Extends the leases of blocking code: a thread for each authority, which ends when nothing is held."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from weakref import WeakKeyDictionary

from fencelock import _threads
from fencelock.authority.base import Authority, Grant
from fencelock.renewal.schedule import Agenda, Extended, Renewable, failed, tell, tend

logger = logging.getLogger("fencelock.renewal")

_IDLE = 30.0


def _tell_apart(calls: list[Callable[[], object]]) -> None:
    """Do as `tell`, in a thread of its own: leases are not to be lost because a callback takes its time."""
    thread = threading.Thread(
        target=contextvars.Context().run, args=(tell, calls), name="fencelock-lost", daemon=True
    )
    try:
        _threads.start(thread)
    except RuntimeError:  # too many threads, or the interpreter is on its way out
        tell(calls)


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
            del due, calls  # while it waits, it must not keep what nothing else keeps

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
                    answer = failed(asked, error)
                asked = steps.send(answer)
        except StopIteration as end:
            calls: list[Callable[[], object]] = end.value
            return calls

    def _plan(self, hold: Renewable, at: float, interval: float) -> None:
        with self._changed:
            self._agenda.plan(hold, at, interval)


_of_threads: WeakKeyDictionary[Authority, ThreadRenewer] = WeakKeyDictionary()


def for_thread(authority: Authority) -> ThreadRenewer:
    """Return what extends the holds of blocking code."""
    renewer = _of_threads.get(authority)
    if renewer is None:
        renewer = _of_threads.setdefault(authority, ThreadRenewer())
    return renewer


def _forget() -> None:
    """In a forked child: no thread has come along, and nothing is held."""
    _of_threads.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
