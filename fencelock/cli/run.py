"""`fencelock run`: runs a command under a lock."""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import suppress
from types import FrameType
from typing import Annotated, Final

import typer

from fencelock._locking import fenced_lock
from fencelock.authority.redlock.redlock import DEFAULT_NAMESPACE
from fencelock.cli import shared
from fencelock.cli.keeper import Keeper
from fencelock.errors import LockLostError, LockTimeoutError
from fencelock.lock.lock import FencedLock
from fencelock.lock.options import IfHeld

#: Our own statuses, which few commands use, from `sysexits.h`: what grants the lock failed; another
#: holder kept the lock; the lock was lost.
FAILED, NOT_ACQUIRED, LOST = 74, 75, 76
_GRACE: Final = 10.0  # seconds for a command to end after its lock was lost, before it is killed


def run(
    context: typer.Context,
    resource: Annotated[str, typer.Argument(help="Name of the lock.")],
    *,
    url: shared.Url = "",
    namespace: shared.Namespace = DEFAULT_NAMESPACE,
    ttl: Annotated[float, typer.Option(help="Seconds that the lease lasts; it is extended.")] = 30.0,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for another holder; 0 for one try.")] = 10.0,
    at_least: Annotated[
        str,
        typer.Option(help="Keep the lock for at least this time, such as 90s, 15m or 1h."),
    ] = "",
    if_held: Annotated[
        IfHeld, typer.Option(help="If another holder has the lock: wait, or skip the command.")
    ] = "wait",
    keep_url: Annotated[
        bool,
        typer.Option("--keep-url", help="Pass FENCELOCK_URL on to the command; it may contain a password."),
    ] = False,
) -> None:
    """Run a command under a lock: fencelock run RESOURCE -- COMMAND. Its token is in FENCELOCK_TOKEN.

    The status is the command's. It is 75 if another holder kept the lock (0 with --if-held skip), 74 if the
    nodes or the database failed, and 76 if the lock was lost. If it is lost, the command and all processes
    that it has started are terminated (at a terminal, only the command). If this process is killed, the
    command is killed, on Linux with all that it has started.
    """
    if not context.args:
        shared.fail("which command? Write fencelock run RESOURCE -- COMMAND ARGUMENTS", 2)
    if unknown := [word for word in (resource, context.args[0]) if word.startswith("-")]:
        shared.fail(f"there is no option {unknown[0]}: see fencelock run --help", 2)
    if not hasattr(os, "killpg"):
        shared.fail("fencelock run needs process groups, which this system has not", FAILED)
    try:
        kept = shared.seconds_of(at_least, 2) if at_least else None
        fenced_lock(resource, ttl=ttl, timeout=timeout, max_hold=None, at_least=kept)  # checks the settings
    except ValueError as error:
        shared.fail(str(error), 2)
    if not (url or os.environ.get("FENCELOCK_URL", "")).strip():
        shared.fail("no authority is named: set FENCELOCK_URL, or add --url", 2)
    sys.argv[0] = context.args[0]  # the name of the holder for other processes
    command = _Command(context.args, keep_url=keep_url)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, command.on_signal)
    try:
        with shared.authority_of(url, namespace) as authority:
            lock = authority.lock(
                resource, ttl=ttl, timeout=timeout, max_hold=None, if_held=if_held, at_least=kept
            )
            status = _run(command, lock, skips=if_held == "skip")
    except typer.Exit as error:  # the reason was printed
        status = 2 if isinstance(error.__context__, ValueError) else FAILED
    raise typer.Exit(status)


def _run(command: _Command, lock: FencedLock[int], *, skips: bool) -> int:
    try:
        with lock:
            return command.run(lock)
    except LockTimeoutError as error:
        by = error.holder or "another"
        shared.say(f"skipped: held by {by}, or kept for it by --at-least" if skips else str(error))
        return 0 if skips else NOT_ACQUIRED
    except LockLostError as error:  # the loss may be noticed only at the release
        shared.say(str(error))
        command.end_what_is_left()
        return LOST


class _Command:
    """The command to run. After its start it gets our signals; before, a signal ends this process."""

    def __init__(self, arguments: list[str], *, keep_url: bool) -> None:
        environment = dict(os.environ)
        if not keep_url:
            environment.pop("FENCELOCK_URL", None)
        # True: it has a process group of its own, which gets signals. At a terminal it could not read input.
        self._has_group = not sys.stdin.isatty()
        self._keeper = Keeper(arguments, environment, 0 if self._has_group else None)
        self._starting = False
        self._early: list[int] = []

    def on_signal(self, number: int, _frame: FrameType | None) -> None:
        """Exit if the command has not started yet; else pass the signal on, unless a terminal does."""
        if not self._starting:
            sys.exit(128 + number)
        if not self._keeper.pid:
            self._early.append(number)
        elif number != signal.SIGINT or self._has_group:  # a terminal itself sends SIGINT to both
            self._tell(number)

    def _tell(self, number: int) -> None:
        with suppress(ProcessLookupError):
            (os.killpg if self._has_group else os.kill)(self._keeper.pid, number)

    def end_what_is_left(self) -> None:
        """Kill the command's remaining process group after some seconds: others may hold the lock."""
        until = time.monotonic() + _GRACE
        with suppress(ProcessLookupError, PermissionError):
            while self._has_group and self._keeper.pid:
                os.killpg(self._keeper.pid, 0 if time.monotonic() < until else signal.SIGKILL)
                time.sleep(0.1)

    def run(self, lock: FencedLock[int]) -> int:
        """Run the command, and terminate it if the lease is lost; return its status, as a shell does."""
        lease = lock.lease
        self._starting = True
        if error := self._keeper.start(
            {"FENCELOCK_TOKEN": str(lease.token), "FENCELOCK_RESOURCE": lease.resource}
        ):
            shared.say(error)
            return 127  # the status of a shell for a command that cannot be started
        for number in self._early:
            self._tell(number)
        lock.on_lost(lambda _: self._tell(signal.SIGTERM))
        while (status := self._keeper.wait(1.0)) is None:
            if lease.lost and lease.expires_at + _GRACE < time.monotonic():
                self._tell(signal.SIGKILL)
        return 128 - status if status < 0 else status
