"""How threads are started, and how they sleep until they are woken."""

from __future__ import annotations

import sys
import threading
import time
from typing import Final

from fencelock._owners import blocks_greenlets

#: How often a lock is looked at that cannot be waited for.
_GLANCE: Final = 0.01


def start(thread: threading.Thread) -> None:
    """Start a thread, as its own method does: RuntimeError where there are too many, or the program ends.

    An error that a signal handler raises meanwhile comes out as it is. Where one raises when the thread has
    just begun, that method fails with an error of its own instead: it cannot strike the thread off a list, or
    gives back a lock that it does not hold.
    """
    if sys.is_finalizing():  # Python 3.11 would wait for ever for it to begin
        raise RuntimeError("the interpreter ends: no thread can be started any more")
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


class Bells:
    """Wakes threads when something has changed; used with their lock held.

    No `Condition`: where a signal handler raises while that takes its lock again, leaving `with condition:`
    gives back the hold of another thread.
    """

    __slots__ = ("_hung",)

    def __init__(self) -> None:
        self._hung: dict[threading.Lock, None] = {}

    def hang(self) -> threading.Lock:
        """Return a bell to sleep on."""
        bell = threading.Lock()
        bell.acquire()
        self._hung[bell] = None
        return bell

    def ring(self) -> None:
        """Wake all that sleep."""
        hung, self._hung = self._hung, {}
        for bell in hung:
            bell.release()

    def take_down(self, bell: threading.Lock) -> None:
        """Forget a bell that no thread sleeps on."""
        self._hung.pop(bell, None)


def sleep_until_rung(bell: threading.Lock, seconds: float) -> None:
    """Return when a bell has been rung, at the latest after so many seconds."""
    if blocks_greenlets(bell.acquire) and not blocks_greenlets(time.sleep):
        # `threading` alone is not patched: the greenlet that is to ring could never run.
        deadline = time.monotonic() + seconds
        while not bell.acquire(blocking=False) and (left := deadline - time.monotonic()) > 0:
            time.sleep(min(_GLANCE, left))
    else:
        bell.acquire(timeout=seconds)
