"""How threads are started, and how they sleep until they are woken."""

from __future__ import annotations

import sys
import threading
import time
from contextlib import suppress
from typing import Final

from fencelock._owners import blocks_greenlets

_GLANCE: Final = 0.01  # seconds between two looks at a wakeup, if a wait for it would block all greenlets


def start(thread: threading.Thread) -> None:
    """Start a thread; raise RuntimeError if there are too many threads, or if the program ends.

    If a signal handler raises meanwhile, its error is raised here. `Thread.start` may hide it.
    """
    if sys.is_finalizing():  # Python 3.11 would wait for ever until the thread begins
        raise RuntimeError("the interpreter is exiting, so no thread can be started")
    try:
        thread.start()
    except (KeyError, RuntimeError) as error:
        has_begun = error.args == (thread,) or thread.ident is not None
        if not has_begun or error.__context__ is None:
            raise
        raised = error.__context__
    else:
        return
    raise raised


def new_wakeup() -> threading.Lock:
    """Return a lock that is held until `wake`.

    It is no Event, because a signal handler that interrupts `set` and calls it again could wait for ever.
    """
    wakeup = threading.Lock()
    wakeup.acquire()
    return wakeup


class Sleepers:
    """The threads that sleep until a change; all callers must hold one common lock.

    It replaces `threading.Condition`: if a signal handler raises while a Condition takes its lock again,
    leaving `with condition:` releases a lock that the thread lacks.
    """

    __slots__ = ("_asleep",)

    def __init__(self) -> None:
        self._asleep: dict[threading.Lock, None] = {}

    def add(self) -> threading.Lock:
        wakeup = new_wakeup()
        self._asleep[wakeup] = None
        return wakeup

    def wake_all(self) -> None:
        asleep, self._asleep = self._asleep, {}
        for wakeup in asleep:
            wakeup.release()

    def remove(self, wakeup: threading.Lock) -> None:
        """Forget a wakeup that no thread sleeps on."""
        self._asleep.pop(wakeup, None)


def wake(wakeup: threading.Lock) -> None:
    """Release a wakeup, or leave it released: a wake before the sleep counts, too."""
    with suppress(RuntimeError):  # it is released
        wakeup.release()


def sleep_until_woken(wakeup: threading.Lock, seconds: float) -> None:
    """Sleep until the wakeup is released, for at most `seconds`."""
    if blocks_greenlets(wakeup.acquire) and not blocks_greenlets(time.sleep):
        # gevent has patched `time`, but not `threading`: a wait would block the greenlet that wakes it.
        deadline = time.monotonic() + seconds
        while not wakeup.acquire(blocking=False) and (left := deadline - time.monotonic()) > 0:
            time.sleep(min(_GLANCE, left))
    else:
        wakeup.acquire(timeout=seconds)
