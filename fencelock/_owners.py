"""The owner of locks and transactions: a thread, task or greenlet.

The owner is the first of these that exists: the task of an event loop that runs here; the call that an
executor's thread executes; the greenlet, unless it is the main greenlet of its thread; the thread. A greenlet
of SQLAlchemy's asyncio extension does the work of a task, so the task is the owner.
"""

from __future__ import annotations

import asyncio
import functools
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import BuiltinFunctionType, FrameType
from typing import Any, Final
from weakref import ref

from fencelock.holder import printable


class _Thread(threading.local):
    """Identifies a thread. Its ident does not, because a later thread may get the same ident."""

    def __init__(self) -> None:
        self.itself = object()  # an object that only this thread has
        #: Whether the thread is an executor's, which serves one caller after the other.
        self.serves = _executors_call() is not None


#: Documented; the public one raises, which is slow.
running_loop: Final[Callable[[], asyncio.AbstractEventLoop | None]] = asyncio._get_running_loop  # noqa: SLF001


def current_owner() -> object:
    """Return a value for the owner of the running code; it is equal for the same owner only."""
    loop = running_loop()
    task = asyncio.current_task(loop) if loop is not None else None
    current = _current_greenlet()
    if task is not None and (current is None or _is_run_in(current, task)):
        return ref(task)
    if _thread.serves and (call := _executors_call()) is not None:
        return ref(call)
    return _thread.itself if current is None or current.parent is None else ref(current)


def _executors_call() -> object | None:
    """Return the call that this thread of an executor executes; None in other threads."""
    library: Any = sys.modules.get("concurrent.futures.thread")
    frame: FrameType | None = None if library is None else sys._getframe()  # noqa: SLF001
    while frame is not None and frame.f_code is not library._WorkItem.run.__code__:  # noqa: SLF001
        frame = frame.f_back
    return None if frame is None else frame.f_locals["self"]


_thread = _Thread()


def current_stack() -> int:
    """Return a number that identifies the running stack of frames, of a greenlet or of a thread."""
    current = _current_greenlet()
    return threading.get_ident() if current is None else id(current)


def _current_greenlet() -> Any:
    """Return the running greenlet; None if the greenlet library is not loaded."""
    library = sys.modules.get("greenlet")
    return library.getcurrent() if library is not None and hasattr(library, "getcurrent") else None


def _is_run_in(greenlet: Any, task: asyncio.Task[Any]) -> bool:
    """Return whether the current greenlet does the work of the loop's current task.

    The loop does not notice if a task switches to another greenlet, as gevent does for each wait.
    """
    frame_of_task = getattr(task.get_coro(), "cr_frame", None)
    frame: FrameType | None = sys._getframe()  # noqa: SLF001 - as `inspect.currentframe` does
    while frame_of_task is not None:  # a compiled coroutine has no frame, and is assumed to run here
        while frame is not None:
            if frame is frame_of_task:
                return True
            frame = frame.f_back
        if not getattr(greenlet, "__sqlalchemy_greenlet_provider__", False):
            return False
        greenlet = greenlet.parent
        frame = greenlet.gr_frame
    return True


@functools.cache
def name_of_process(pid: int) -> str:
    """Return host, process id and program of this process in one text of at most 255 characters."""
    path = Path(next(iter(getattr(sys, "argv", ())), ""))
    program = path.parent.name if path.name == "__main__.py" else path.name  # of `python -m package`
    if program in {"", "-", "-c"}:
        program = f"python {program}".rstrip()
    return printable(f"{socket.gethostname()} {pid} {program}")[:255]


def blocks_greenlets(function: Callable[..., object]) -> bool:
    """Return whether a waiting function blocks all greenlets, because gevent has not patched it."""
    return isinstance(function, BuiltinFunctionType)
