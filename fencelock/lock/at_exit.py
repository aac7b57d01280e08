"""Releases held leases when the process ends.

A process releases its leases when it leaves its blocks, and at its end (`atexit`). If it is
killed, its leases end with their ttl. SIGTERM kills by default; `exit_on_signals` changes that.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import logging
import signal
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from types import FrameType
from typing import Any, cast
from weakref import ReferenceType, WeakSet

from fencelock._process import in_forked_child
from fencelock.authority.base import before_closing, in_use
from fencelock.lock.hold import Block, Hold, end_acquisitions, everything_held, giving_back, under_way
from fencelock.lock.releasing import release_hold_gen

#: Seconds that the releases may take at the end of the process; leases that remain end with their ttl.
_PATIENCE = 2.0
#: Servers whose own signal handlers end a worker so that it leaves its blocks.
_SERVERS = frozenset({"uvicorn", "gunicorn", "hypercorn"})
_LOOK = 0.005  # seconds between two checks for locks that other threads have acquired meanwhile

_handled: set[int] = set()  # the signals that end the process; those that come later change nothing

logger: logging.Logger = logging.getLogger(__name__)


def exit_on_signals(*signals: signal.Signals) -> None:
    """End the process on signals as `sys.exit` does: blocks are left, and leases released.

    ```python
    exit_on_signals()

    with fenced_lock("report"):
        ...                                      # SIGTERM leaves the block, which releases the lock
    ```

    Without this call no handler is installed. SIGINT does not need it, because KeyboardInterrupt leaves the
    blocks. A signal that the process ignores, such as SIGHUP under `nohup`, stays ignored; a log line says
    so. The handlers of uvicorn, gunicorn and hypercorn stay, too, because these servers leave the blocks.

    Args:
        *signals: the signals; SIGTERM by default. The exit status is 128 plus the number, as in shells.

    Raises:
        RuntimeError: outside the main thread, or if the program handles a signal itself. Then its handler
            should call `sys.exit()`.
    """
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("signal handlers can only be installed by the main thread: call this at the start")
    found = {number: signal.getsignal(number) for number in signals or (signal.SIGTERM,)}
    handlers = {number: handler for number, handler in found.items() if not _is_of_a_server(handler)}
    for number, handler in handlers.items():
        if handler not in {signal.SIG_IGN, signal.SIG_DFL, _exit}:
            raise RuntimeError(
                f"{signal.Signals(number).name} has a handler already: make it call sys.exit(), which "
                "leaves the blocks and releases the leases"
            )
    for number, handler in handlers.items():
        if handler is signal.SIG_IGN:
            logger.warning(
                "%s stays ignored, because the process was started with this signal ignored (nohup does "
                "that): it does not end the process",
                signal.Signals(number).name,
            )
        else:
            _handled.add(number)
            signal.signal(number, _exit)


def _is_of_a_server(handler: object) -> bool:
    return str(getattr(handler, "__module__", "")).partition(".")[0] in _SERVERS


def _exit(number: int, _frame: FrameType | None) -> None:
    for each in _handled:
        signal.signal(each, lambda *_: None)  # for a signal that comes again while the process ends
    sys.exit(128 + number)


handler_seen: list[object] = [None]  # the handler of SIGTERM that was looked at last
_watched: WeakSet[Any] = WeakSet()  # the servers whose `shutdown` releases, too


def arrange_end() -> None:
    """See to it that this process releases at its end; called before its first acquisition.

    A child of `multiprocessing` may end without `atexit`. A server of uvicorn shuts down, and then sends
    itself the signal again, which kills the process before tasks and threads have left their blocks.
    """
    handler_seen[0] = handler = signal.getsignal(signal.SIGTERM)
    if (process := sys.modules.get("multiprocessing.process")) and process.parent_process() is not None:
        from multiprocessing.util import Finalize  # noqa: PLC0415 - loaded already

        Finalize(None, _end, exitpriority=0)
    server: Any = getattr(handler, "__self__", None)
    kind: Any = getattr(sys.modules.get("uvicorn.server"), "Server", ())
    if isinstance(server, kind) and server not in _watched:
        _watched.add(server)
        server.shutdown = functools.partial(_shut_down, server, server.shutdown)


in_forked_child(functools.partial(handler_seen.__setitem__, 0, None))


async def _shut_down(server: Any, shutdown: Callable[..., Awaitable[None]], *its: Any, **named: Any) -> None:
    try:
        await shutdown(*its, **named)
    finally:
        if signal.SIGTERM in getattr(server, "_captured_signals", ()):  # it is about to raise them again
            end_acquisitions(_PATIENCE)
            for authority in list(in_use):
                await _release_of_loop(authority, ends=True)
                await asyncio.wait([asyncio.ensure_future(authority.aio.close())], timeout=_PATIENCE)
            _give_back_everything()


async def _release_of_loop(authority: Any, *, ends: bool = False) -> None:
    """Wait until cancelled tasks of this loop have released; release the holds of tasks that have ended.

    Args:
        authority: whose locks are released.
        ends: whether the process ends. Then the other tasks are cancelled.
    """
    here, this, deadline = asyncio.get_running_loop(), asyncio.current_task(), time.monotonic() + _PATIENCE
    while True:
        is_over = time.monotonic() > deadline
        everything = (*everything_held(), *giving_back)
        held = {each for each in everything if each.authority is authority and each.loop() is here}
        acquiring = {each for each in list(under_way) if each.authority is authority and each.in_loop}
        owned: list[Hold | Block] = [*held, *acquiring]
        tasks = {task for each in owned if (task := _task_of(each)) and task.get_loop() is here}
        leaving = bool(held & giving_back)
        for task in tasks - {this}:
            if ends and not task.cancelling():
                task.cancel()
            leaving = leaving or task.cancelling() > 0
        for hold in held - giving_back:
            if (task := _task_of(hold)) not in tasks or (ends and (is_over or task is this)):
                with contextlib.suppress(Exception):  # an end must not raise
                    await authority.aio.run(release_hold_gen(hold))
        if is_over or not leaving:
            return
        await asyncio.sleep(_LOOK)


def _task_of(each: Hold | Block) -> asyncio.Task[Any] | None:
    task = each.owner() if isinstance(each.owner, ReferenceType) else None
    return task if isinstance(task, asyncio.Task) and not task.done() else None


before_closing.append(_release_of_loop)


@atexit.register
def _end() -> None:
    """Release all leases, also those of daemon threads, and then close all connections."""
    end_acquisitions()
    _give_back_everything()
    for authority in list(in_use):
        if (settle := getattr(authority, "settle", None)) is not None:
            with contextlib.suppress(Exception):  # the end of the process must not raise
                settle()
        authority.close()
    for number in _handled:  # Python is about to take its handlers away
        signal.signal(number, signal.SIG_IGN)


def _give_back_everything() -> None:
    deadline = time.monotonic() + _PATIENCE
    here = threading.get_ident()  # an acquisition of this thread cannot go on
    for authority in {hold.authority for hold in everything_held()}:
        if (connect_here := getattr(authority, "connect_here", None)) is not None:
            with contextlib.suppress(Exception):  # the end of the process must not raise
                connect_here(deadline)
    while (
        (held := everything_held()) or giving_back or any(block.thread != here for block in list(under_way))
    ):
        for hold in held:
            if time.monotonic() > deadline:
                logger.warning("some leases could not be released, and end by themselves")
                return
            try:
                _release(hold)
            except Exception as error:  # noqa: BLE001 - the end of the process must not raise
                logger.debug("a lease could not be released at the end of the process: %s", error)
        if time.monotonic() > deadline:
            return
        time.sleep(_LOOK)


def _release(hold: Hold) -> None:
    loop, steps = hold.loop(), release_hold_gen(hold)
    if not getattr(hold.authority, "is_async", False):
        hold.authority.run(steps)
    elif loop is not None and not loop.is_closed() and not loop.is_running():
        loop.run_until_complete(cast("Any", hold.authority.aio).run(steps))
