"""Extends the leases of blocking code: a thread for each authority, which ends when nothing is held."""

from __future__ import annotations

import asyncio
import contextvars
import math
import threading
import time
from weakref import WeakKeyDictionary

from fencelock import _threads
from fencelock._platform import in_forked_child
from fencelock._threads import sleep_until_rung
from fencelock.authority.base import Authority
from fencelock.renewal.schedule import Calls, Renewable, Renewer, logger, tell

#: Seconds after which a thread ends if it has nothing to extend.
_IDLE = 30.0
#: Seconds between two looks of a task that waits for the end of an extension.
_LOOK = 0.005


def _tell_apart(calls: Calls) -> None:
    """Call `tell` in a new thread, because leases must not be lost while a callback takes its time."""
    target = contextvars.Context().run
    thread = threading.Thread(target=target, args=(tell, calls), name="fencelock-lost", daemon=True)
    try:
        _threads.start(thread)
    except RuntimeError:  # too many threads, or the interpreter is on its way out
        tell(calls)


class ThreadRenewer(Renewer):
    """Extends the holds of blocking code, from a thread that is started when it is first needed."""

    def __init__(self) -> None:
        super().__init__()
        self._mutex = threading.RLock()  # reentrant, because a signal handler may interrupt its owner
        self._changed = _threads.Bells()
        self._wakes_at = -math.inf
        self._thread: threading.Thread | None = None

    def add(self, hold: Renewable) -> None:
        with self._mutex:
            super().reschedule(hold, time.monotonic())
            if self._thread is None or not self._thread.is_alive():  # its start may have been interrupted
                self._start()
            elif hold.renew_at < self._wakes_at:
                self._wakes_at = hold.renew_at
                self._changed.ring()

    def cancel(self, hold: Renewable) -> bool:
        with self._mutex:
            return super().cancel(hold)

    def reschedule(self, hold: Renewable, now: float) -> None:
        with self._mutex:
            super().reschedule(hold, now)

    def stop(self, hold: Renewable) -> None:
        """Stop extending a hold; wait for an extension that is under way."""
        while True:
            with self._mutex:
                if super().cancel(hold):
                    return
                bell = self._changed.hang()
            sleep_until_rung(bell, threading.TIMEOUT_MAX)

    async def stop_soon(self, hold: Renewable) -> None:
        """Stop extending a hold of blocking code, for a task that ends it; other tasks run meanwhile."""
        while not self.cancel(hold):  # noqa: ASYNC110 - a thread sets no event of a loop
            await asyncio.sleep(_LOOK)

    def _start(self) -> None:
        # An empty context: the thread must not keep the leases that its starter happens to hold.
        target = contextvars.Context().run
        thread = threading.Thread(target=target, args=(self._work,), name="fencelock-renewal", daemon=True)
        self._thread = thread
        self._changed.ring()  # if an older thread still runs, it ends
        try:
            _threads.start(thread)
        except RuntimeError as error:  # too many threads, or the interpreter is on its way out
            self._thread = None
            logger.warning("leases are not extended, for no thread can be started: %s", error)

    def _work(self) -> None:
        while due := self._await_due():
            self._extend(due)
            del due  # the thread must not keep these holds alive while it waits

    def _extend(self, due: list[Renewable]) -> None:
        due[0].authority.run(self.renew_due(due, time.monotonic, _tell_apart))
        with self._mutex:
            self._in_flight = frozenset()
            self._changed.ring()

    def _await_due(self) -> list[Renewable]:
        """Return the holds to look at; none if this thread is to end, because it was idle or is replaced.

        It is replaced if a signal handler raised inside `Thread.start`, because it seems dead then.
        """
        idle_since = time.monotonic()
        while True:
            with self._mutex:
                if self._thread is not threading.current_thread():
                    return []
                left = threading.TIMEOUT_MAX
                if not self._in_flight:  # else a replaced thread extends them, and ends after that
                    now = time.monotonic()
                    if due := self.pop_due(now):
                        self._wakes_at = -math.inf
                        return due
                    self._wakes_at = min(self.next_at, idle_since + _IDLE)
                    left = self._wakes_at - now
                    if left <= 0:
                        self._thread = None
                        return []
                bell = self._changed.hang()
            sleep_until_rung(bell, left)
            with self._mutex:
                self._changed.take_down(bell)


_of_threads: WeakKeyDictionary[Authority, ThreadRenewer] = WeakKeyDictionary()


def for_thread(authority: Authority) -> ThreadRenewer:
    return _of_threads.get(authority) or _of_threads.setdefault(authority, ThreadRenewer())


in_forked_child(_of_threads.clear)  # the child has no such thread, and holds nothing
