"""How threads are started, and how they sleep until they are woken."""

from __future__ import annotations

import threading
import time
from typing import Final

from fencelock._owners import blocks_greenlets

#: How often a lock is looked at that cannot be waited for.
_GLANCE: Final = 0.01


def start(thread: threading.Thread) -> None:
    """Start a thread, as its own method does: RuntimeError where there are too many, or the program ends.

    An error that a signal handler raises meanwhile comes out as it is. Where one raises when the thread has
    just begun, that method fails to strike the thread off a list, with a KeyError of its own instead.
    """
    try:
        thread.start()
    except KeyError as error:
        if error.args != (thread,) or error.__context__ is None:
            raise
        raised = error.__context__
    else:
        return
    raise raised


def sleep_until_rung(bell: threading.Lock, seconds: float) -> None:
    """Return when a bell has been rung, at the latest after so many seconds."""
    if blocks_greenlets(bell.acquire) and not blocks_greenlets(time.sleep):
        # `threading` alone is not patched: the greenlet that is to ring could never run.
        deadline = time.monotonic() + seconds
        while not bell.acquire(blocking=False) and (left := deadline - time.monotonic()) > 0:
            time.sleep(min(_GLANCE, left))
    else:
        bell.acquire(timeout=seconds)
