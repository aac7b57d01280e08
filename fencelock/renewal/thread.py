"""Extends the leases of blocking code: a thread for each authority, which ends when nothing is held."""

from __future__ import annotations

import asyncio
import contextvars
import math
import os
import threading
import time
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from fencelock import _threads
from fencelock._steps import block
from fencelock.authority.base import Authority
from fencelock.renewal.schedule import Calls, Renewer, ask, logger, tell

if TYPE_CHECKING:
    from fencelock.lock.hold import Hold

_IDLE = 30.0


def _tell_apart(calls: Calls) -> None:
    """Do as `tell`, in a thread of its own: leases are not to be lost because a callback takes its time."""
    thread = threading.Thread(
        target=contextvars.Context().run, args=(tell, calls), name="fencelock-lost", daemon=True
    )
    try:
        _threads.start(thread)
    except RuntimeError:  # too many threads, or the interpreter is on its way out
        tell(calls)


class ThreadRenewer(Renewer):
    """Extends the holds of blocking code, from a thread that is started when it is first needed."""

    def __init__(self) -> None:
        super().__init__()
        # Of a lock that may be taken again: for signal handlers that lock, and strike in the midst of it.
        self._changed = threading.Condition(threading.RLock())
        self._wakes_at = -math.inf
        self._thread: threading.Thread | None = None

    def watch(self, hold: Hold) -> None:
        """Begin to extend a hold."""
        with self._changed:
            self.plan(hold, time.monotonic())
            if self._thread is None or not self._thread.is_alive():  # its start may have been interrupted
                self._start()
            elif self.next_at < self._wakes_at:
                self._wakes_at = self.next_at
                self._changed.notify_all()

    def strike(self, hold: Hold) -> bool:
        """Cease to extend a hold; or return False, and go on, where an extension is under way."""
        with self._changed:
            return super().strike(hold)

    def plan(self, hold: Hold, now: float) -> None:
        """Look at a hold when it is to be extended next, or ends."""
        with self._changed:
            super().plan(hold, now)

    def stop(self, hold: Hold) -> None:
        """Cease to extend a hold; an extension under way has ended when this returns."""
        with self._changed:
            self._changed.wait_for(lambda: self.strike(hold))

    async def stop_soon(self, hold: Hold) -> None:
        """Do as `stop`, and let other tasks run meanwhile."""
        while not self.strike(hold):
            # Not `stop`: a thread cannot be cancelled, and would strike off what is planned anew by then.
            await asyncio.to_thread(self._wait_for, hold)

    def _wait_for(self, hold: Hold) -> None:
        with self._changed:
            self._changed.wait_for(lambda: hold not in self._tended)

    def _start(self) -> None:
        # An empty context: the thread must not keep the leases that its starter happens to hold.
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
            self._extend(due)
            del due  # while it waits, it must not keep what nothing else keeps

    def _extend(self, due: list[Hold]) -> None:
        authority = due[0].authority
        calls = block(self.tend(due, time.monotonic), lambda step: ask(authority, step))
        with self._changed:
            self._tended = frozenset()
            self._changed.notify_all()
        if calls:
            _tell_apart(calls)

    def _await_due(self) -> list[Hold]:
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
                if due := self.take(now):
                    self._wakes_at = -math.inf
                    return due
                self._wakes_at = min(self.next_at, idle_since + _IDLE)
                if now >= self._wakes_at:
                    self._thread = None
                    break
                self._changed.wait(self._wakes_at - now)
            return []


_of_threads: WeakKeyDictionary[Authority, ThreadRenewer] = WeakKeyDictionary()


def for_thread(authority: Authority) -> ThreadRenewer:
    """Return what extends the holds of blocking code."""
    return _of_threads.get(authority) or _of_threads.setdefault(authority, ThreadRenewer())


if hasattr(os, "register_at_fork"):  # in a forked child no thread has come along, and nothing is held
    os.register_at_fork(after_in_child=_of_threads.clear)
