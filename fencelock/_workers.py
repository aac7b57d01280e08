"""Threads in the background that start when they are needed, and end when they are idle."""

from __future__ import annotations

import contextvars
import math
import threading
import time
from collections.abc import Callable

from fencelock import _threads
from fencelock._process import start_over_in_children
from fencelock._threads import new_wakeup, sleep_until_woken

# Why no work is left undone: a caller first notes its work where `turn` looks, and then reads `wakes_at`. The
# thread first sets `wakes_at` to infinity, then clears its wakeup, and then makes a turn. So either the turn
# finds the work, or the caller finds infinity and calls `wake`. `wake` and the end of the thread exclude each
# other: a thread does not end if it was woken since its turn began, and a later `wake` starts another one.
#
# Why no two threads make turns at once: `wake` starts a thread only if none is alive, with the mutex held. A
# signal handler may interrupt `wake` and call it again, because the mutex is reentrant; and a handler that
# raises inside `Thread.start` makes a thread seem dead that begins a moment later. Then two threads run. The
# one whose wakeup was replaced ends before its next turn, and `_turns` makes the other wait for the current
# one. Only threads of workers take `_turns`, and no signal handler runs in them.
#
# A thread that `turn` killed by an exception leaves `wakes_at` at infinity, so the next work starts another.
# The threads are daemons: they do not keep the interpreter from its exit, which may end them at any line. In
# a forked child there is no thread, and another thread may have held the mutex: the worker starts over.


class Worker:
    """A thread that calls `turn`, which does all due work, and returns the time of its next call.

    The time is on the clock of `time.monotonic`. If it is infinity for `idle` seconds, the thread ends.
    """

    def __init__(self, name: str, turn: Callable[[], float], idle: float = 0.0) -> None:
        self._name, self._turn, self._idle = name, turn, idle
        self.begin_in_child()
        start_over_in_children(self)

    def begin_in_child(self) -> None:
        self._mutex = threading.RLock()
        self._turns = threading.Lock()
        self._wakeup = new_wakeup()
        self._thread: threading.Thread | None = None
        self._at_work: int | None = None
        #: When the thread makes its next turn by itself; infinity during a turn, and without a thread. A
        #: caller with work for an earlier time calls `wake`.
        self.wakes_at: float = math.inf

    def wake(self) -> None:
        """Let the thread make a turn now; start it if it does not run: RuntimeError if that is impossible."""
        with self._mutex:
            if self.is_alive:
                _threads.wake(self._wakeup)
                return
            wakeup = new_wakeup()
            # An empty context, because the thread must not keep the leases of its starter alive.
            run = contextvars.Context().run
            thread = threading.Thread(target=run, args=(self._serve, wakeup), name=self._name, daemon=True)
            self._wakeup, self._thread = wakeup, thread
            _threads.start(thread)

    @property
    def is_alive(self) -> bool:
        thread = self._thread
        return thread is not None and thread.is_alive()

    @property
    def is_caller(self) -> bool:
        """Whether this code is called by a turn."""
        return self._at_work == threading.get_ident()

    def close(self, seconds: float) -> bool:
        """End the thread after its turn; wait for that at most `seconds`, and return whether it has ended."""
        with self._mutex:
            thread, self._thread = self._thread, None
            _threads.wake(self._wakeup)
            self._wakeup = new_wakeup()
            self.wakes_at = math.inf
        if thread is None or not thread.is_alive():
            return True
        if thread is not threading.current_thread():
            thread.join(seconds)
        return not thread.is_alive()

    def _serve(self, wakeup: threading.Lock) -> None:
        idle_at = time.monotonic() + self._idle
        while True:
            with self._turns:
                if self._wakeup is not wakeup:  # another thread has replaced this one
                    return
                self.wakes_at = math.inf
                wakeup.acquire(blocking=False)
                self._at_work = threading.get_ident()
                try:
                    next_at = self._turn()
                finally:
                    self._at_work = None
            now = time.monotonic()
            if next_at < math.inf:
                idle_at = now + self._idle
            with self._mutex:
                if self._wakeup is not wakeup:
                    return
                if next_at == math.inf and now >= idle_at:
                    if not wakeup.acquire(blocking=False):
                        self._thread = None
                        return
                    next_at = now
                until = self.wakes_at = idle_at if next_at == math.inf else next_at
            sleep_until_woken(wakeup, min(threading.TIMEOUT_MAX, max(0.0, until - now)))
