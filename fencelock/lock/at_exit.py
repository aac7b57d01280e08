"""Releases held leases when the process ends.

A process releases its leases when it leaves its blocks, and at its end (`atexit`). If it is
killed, its leases end with their ttl. SIGTERM kills by default; `exit_on_signals` changes that.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import signal
import sys
import threading
import time
from types import FrameType

from fencelock.authority.base import in_use
from fencelock.lock.base import end_acquisitions, under_way
from fencelock.lock.hold import everything_held
from fencelock.lock.releasing import release_hold_gen

#: Seconds that the releases may take at the end of the process; leases that remain end with their ttl.
_PATIENCE = 2.0
#: Servers whose own signal handlers end a worker so that it leaves its blocks.
_SERVERS = frozenset({"uvicorn", "gunicorn", "hypercorn"})
_LOOK = 0.005  # seconds between two checks for locks that other threads have acquired meanwhile

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
            signal.signal(number, _exit)


def _is_of_a_server(handler: object) -> bool:
    return str(getattr(handler, "__module__", "")).partition(".")[0] in _SERVERS


def _exit(number: int, _frame: FrameType | None) -> None:
    sys.exit(128 + number)


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


def _give_back_everything() -> None:
    deadline = time.monotonic() + _PATIENCE
    here = threading.get_ident()  # an acquisition of this thread cannot go on
    for authority in {hold.authority for hold in everything_held()}:
        if (connect_here := getattr(authority, "connect_here", None)) is not None:
            with contextlib.suppress(Exception):  # the end of the process must not raise
                connect_here(deadline)
    while (held := everything_held()) or any(block.thread != here for block in list(under_way)):
        for hold in held:
            if time.monotonic() > deadline:
                logger.warning("some leases could not be released, and end by themselves")
                return
            try:
                hold.authority.run(release_hold_gen(hold))
            except Exception as error:  # noqa: BLE001 - the end of the process must not raise
                logger.debug("a lease could not be released at the end of the process: %s", error)
        if time.monotonic() > deadline:
            return
        time.sleep(_LOOK)
