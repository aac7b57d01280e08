"""How threads are started: an error that a signal handler raises meanwhile comes out as it is."""

from __future__ import annotations

import threading


def start(thread: threading.Thread) -> None:
    """Start a thread, as its own method does: RuntimeError where there are too many, or the program ends.

    Where a handler raises when the thread has just begun, that method fails to strike the thread off a list,
    with a KeyError of its own instead.
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
