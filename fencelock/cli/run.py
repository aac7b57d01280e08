"""`fencelock run`: a command under a lock."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from types import FrameType
from typing import Annotated, Final

import typer

from fencelock.authority.redlock.redlock import DEFAULT_NAMESPACE
from fencelock.cli import shared
from fencelock.errors import LockLostError, LockTimeoutError
from fencelock.lock.lock import FencedLock

#: The lock was not to be had: what `sysexits.h` calls a temporary failure, and cron's users may try again.
NOT_ACQUIRED: Final = 75
#: Seconds for a command to end after its lock was lost, before it is killed.
_GRACE: Final = 10.0


def run(
    context: typer.Context,
    resource: Annotated[str, typer.Argument(help="What to lock.")],
    *,
    url: shared.Url = "",
    namespace: shared.Namespace = DEFAULT_NAMESPACE,
    ttl: Annotated[float, typer.Option(help="Seconds that the lease lasts; it is extended.")] = 30.0,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for another holder; 0 for one try.")] = 10.0,
) -> None:
    """Run a command under a lock: fencelock run RESOURCE -- COMMAND. Its token is in FENCELOCK_TOKEN.

    The status is the command's; 75 where another holder kept the lock, and 1 where the lock was lost: then
    the command is terminated, with all that it has started (but for what a terminal has begun).
    """
    if not context.args:
        shared.fail("which command? Write fencelock run RESOURCE -- COMMAND ARGUMENTS")
    command = _Command(context.args)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, command.on_signal)
    with shared.authority_of(url, namespace) as authority:
        lock = authority.lock(resource, ttl=ttl, timeout=timeout, max_hold=None)
        try:
            with lock:
                status = command.run(lock)
        except LockTimeoutError as error:
            shared.say(str(error))
            status = NOT_ACQUIRED
        except LockLostError as error:  # maybe found only now
            shared.say(str(error))
            status = 1
    raise typer.Exit(status)


class _Command:
    """The command that is run, and who hears of a signal: we before it starts, it from then on."""

    def __init__(self, arguments: list[str]) -> None:
        self._arguments = arguments
        # A group of its own hears of signals, too; behind a terminal it could not read from that.
        self._group = None if sys.stdin.isatty() else 0
        self._program: subprocess.Popen[bytes] | None = None
        self._starting = False
        self._early: list[int] = []

    def on_signal(self, number: int, _frame: FrameType | None) -> None:
        """End before the command has started, and tell the command afterwards."""
        if not self._starting:
            sys.exit(128 + number)
        if self._program is None:
            self._early.append(number)
        elif number != signal.SIGINT or self._group is not None:  # a terminal tells the command itself
            self._tell(number)

    def _tell(self, number: int) -> None:
        if self._program is not None:
            with suppress(ProcessLookupError):
                if self._group is None:
                    self._program.send_signal(number)
                else:
                    os.killpg(self._program.pid, number)

    def run(self, lock: FencedLock[int]) -> int:
        """Run the command until it ends or the lease is lost; return its status, as a shell has it."""
        lease = lock.lease
        its = {"FENCELOCK_TOKEN": str(lease.fencing_token), "FENCELOCK_RESOURCE": lease.resource}
        self._starting = True
        try:
            program = subprocess.Popen(self._arguments, env=os.environ | its, process_group=self._group)  # noqa: S603 - as typed
        except OSError as error:
            shared.say(f"{self._arguments[0]}: {error.strerror}")
            return 127  # as a shell says it
        self._program = program
        for number in self._early:
            self._tell(number)
        lock.on_lost(lambda _: self._tell(signal.SIGTERM))
        while True:
            try:
                status = program.wait(1.0)
            except subprocess.TimeoutExpired:
                if lease.lost and lease.expires_at + _GRACE < time.monotonic():
                    self._tell(signal.SIGKILL)
            else:
                return 128 - status if status < 0 else status
