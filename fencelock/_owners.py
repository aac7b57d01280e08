"""The owner of locks and transactions: what is running.

A task, where an event loop runs one; or else a greenlet, where gevent or eventlet switches between several
in one thread; or else the thread. Greenlets of SQLAlchemy's asyncio extension do a task's work: it owns them.
"""

from __future__ import annotations

import asyncio
import functools
import select
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import BuiltinFunctionType, FrameType
from typing import Any
from weakref import ref


class _Thread(threading.local):
    """Stands for a thread, and not for a later one of the same ident, as `threading.current_thread` may."""

    def __init__(self) -> None:
        self.itself = object()


_thread = _Thread()


def running_loop() -> asyncio.AbstractEventLoop | None:
    """Return the event loop that runs in this thread; None where none does."""
    return asyncio._get_running_loop()  # noqa: SLF001 - documented, and an error for each thread is slow


def current_owner() -> object:
    """Return what is running, equal only to what it returns for the same later; keeps nothing alive."""
    loop = running_loop()
    task = asyncio.current_task(loop) if loop is not None else None
    # Without greenlet there is but one in each thread.
    library = sys.modules.get("greenlet")
    current = library.getcurrent() if library is not None and hasattr(library, "getcurrent") else None
    if task is not None and (current is None or _is_run_in(current, task)):
        return ref(task)
    return _thread.itself if current is None or current.parent is None else ref(current)


def _is_run_in(greenlet: Any, task: asyncio.Task[Any]) -> bool:
    """Whether the loop's current task is what runs in the current greenlet.

    Where a task has switched to another greenlet, as gevent does to wait, the loop does not know.
    """
    frame_of_task = getattr(task.get_coro(), "cr_frame", None)
    frame: FrameType | None = sys._getframe()  # noqa: SLF001 - as `inspect.currentframe` does
    while frame_of_task is not None:  # or else it is a compiled one: it cannot be told
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
    """Return host, process id and program of this process: at most 255 characters."""
    path = Path(sys.argv[0])
    program = path.parent.name if path.name == "__main__.py" else path.name  # of `python -m package`
    return f"{socket.gethostname()} {pid} {program}"[:255]


def switches_greenlets() -> bool:
    """Whether a library is there that switches from greenlet to greenlet wherever one waits."""
    return any(sys.modules.get(name) is not None for name in ("gevent", "eventlet"))


def blocks_greenlets(function: Callable[..., object]) -> bool:
    """Whether a function that waits is the interpreter's own one: no other greenlet runs meanwhile."""
    return isinstance(function, BuiltinFunctionType)


def waits_in_vain_for(owners: Iterable[object]) -> bool:
    """Whether one of these is another greenlet of this thread, that cannot run while this one waits."""
    if not blocks_greenlets(time.sleep) and not blocks_greenlets(getattr(select, "poll", select.select)):
        return False
    own, here = current_owner(), _main_of(sys.modules["greenlet"].getcurrent())
    return any(owner != own and _runs_in(owner, here) for owner in owners)


def _runs_in(owner: object, main: Any) -> bool:
    """Whether an owner is of the thread that has this main greenlet."""
    if not isinstance(owner, ref):
        return owner is _thread.itself
    greenlet = owner()
    return isinstance(greenlet, type(main)) and not greenlet.dead and _main_of(greenlet) is main


def _main_of(greenlet: Any) -> Any:
    while greenlet.parent is not None:
        greenlet = greenlet.parent
    return greenlet
