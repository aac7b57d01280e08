"""Signal handlers that raise, at a line that a test chooses."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any


class InterruptionError(Exception):
    """What a signal handler raises: an Exception, as the time limits of task queues are."""


def _is_atomic(frame: FrameType) -> bool:
    """Whether no signal handler can run here: Python looks for signals after calls and when it jumps back."""
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
    # The second is the first line of `__exit__`, which calls nothing; nor do the last two, where steps end.
    return line in {"try:", "entry = None"} or line.startswith(
        ("with ", "except StopIteration", "return end.value")
    )


def strike_at(line: int, rooms: Sequence[str] = ("/fencelock/",)) -> None:
    """Raise, once, at the n-th line of these rooms that this thread executes from now on."""
    left = line

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal left
        if not any(room in frame.f_code.co_filename for room in rooms):
            return None
        if event == "line" and not _is_atomic(frame):
            left -= 1
            if left == 0:
                sys.settrace(None)
                raise InterruptionError
        return trace

    sys.settrace(trace)


def interrupt_at(line: int, action: Callable[[], object]) -> bool:
    """Run an action, and raise at the n-th line of the library that it executes; tell whether that came."""
    strike_at(line)
    try:
        action()
    except InterruptionError:
        return True
    finally:
        sys.settrace(None)
    return False
