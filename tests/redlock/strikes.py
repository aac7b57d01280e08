"""Signal handlers that raise, at a line that a test chooses."""

from __future__ import annotations

import dis
import functools
import sys
from collections.abc import Callable, Sequence
from types import CodeType, FrameType
from typing import Any


class InterruptionError(Exception):
    """What a signal handler raises: an Exception, as the time limits of task queues are."""


#: What Python has done when it looks for signals: called, begun, gone on, or gone round a loop.
_CHECKS = ("CALL", "RESUME", "JUMP_BACKWARD")


@functools.cache
def _instructions(code: CodeType) -> dict[int, tuple[bool, int | None]]:
    """Return for each instruction whether signal handlers run behind it, and where its errors go."""
    bytecode = dis.Bytecode(code)
    entries = bytecode.exception_entries  # type: ignore[attr-defined]

    def target(offset: int) -> int | None:
        return next((entry.target for entry in entries if entry.start <= offset < entry.end), None)

    return {each.offset: (each.opname.startswith(_CHECKS), target(each.offset)) for each in bytecode}


def strike_at(line: int, rooms: Sequence[str] = ("/fencelock/",)) -> None:
    """Raise, once, at the n-th line of these rooms that this thread executes from now on.

    A line counts if a handler may run just before it, and if an error takes the same way from both places.
    The first line of `__exit__` does not: a handler that raises there leaves any lock of Python's, too.
    """
    left = line
    latest: dict[FrameType, int] = {}

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal left
        if not any(room in frame.f_code.co_filename for room in rooms):
            return None
        frame.f_trace_opcodes = True
        if event == "line":
            known = _instructions(frame.f_code)
            checks, target = known.get(latest.get(frame, -1), (False, None))
            begins = frame.f_code.co_name == "__exit__" and frame.f_lineno == frame.f_code.co_firstlineno + 1
            if checks and target == known[frame.f_lasti][1] and not begins:
                left -= 1
                if left == 0:
                    sys.settrace(None)
                    raise InterruptionError
        elif event in {"call", "opcode"}:
            latest[frame] = frame.f_lasti
        elif event == "return":
            latest.pop(frame, None)
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
