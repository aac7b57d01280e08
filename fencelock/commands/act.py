"""Commands that act: `release --force`, and `run`."""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
import time
from types import FrameType
from typing import Annotated, Final

import typer
from sqlalchemy import Engine, inspect
from sqlalchemy.orm import Session

from fencelock.authority.database.database import Database
from fencelock.authority.redlock.redlock import DEFAULT_NAMESPACE, Redlock
from fencelock.commands import shared
from fencelock.errors import LockTimeoutError
from fencelock.guard.gate import gate
from fencelock.guard.sql import conditional_update
from fencelock.lock.lock import FencedLock
from fencelock.observe.history import EVENT_TABLE, note

logger = logging.getLogger("fencelock.command")

#: The lock was not to be had: what `sysexits.h` calls a temporary failure, and cron's users may try again.
NOT_ACQUIRED: Final = 75
#: Seconds for a command to end after its lock was lost, before it is killed.
_GRACE: Final = 10.0


def release(
    resource: Annotated[str, typer.Argument(help="Which lock.")],
    *,
    force: Annotated[bool, typer.Option("--force", help="Yes, take it from its holder.")] = False,
    reason: Annotated[str, typer.Option(help="Why; it is logged.")] = "",
    url: shared.Url = "",
    namespace: shared.Namespace = DEFAULT_NAMESPACE,
    database: Annotated[
        str,
        typer.Option(
            help="SQLAlchemy URL of the database that the holder writes to: raise the fence there, so that "
            "its next write behind the gate is refused."
        ),
    ] = "",
    claim: Annotated[
        list[str] | None,
        typer.Option(help="Also claim a row in that database: orders:id=1. May be given several times."),
    ] = None,
) -> None:
    """Take a lock from its holder. Status 3: it was free.

    The holder is not stopped, and its lock is lost. With --database, what it writes is refused from now on.
    Without, the database refuses it once the next holder has written or claimed.
    """
    if not force or not reason.strip():
        shared.fail("this takes the lock from whoever works under it: add --force, and --reason 'why'")
    rows = [_row_of(each) for each in claim or ()]
    if rows and not database:
        shared.fail("--claim needs the database that has the row: add --database URL")
    with shared.authority_of(url, namespace) as authority:
        was = authority.force_release(resource)
        holder, token = (was.holder or "not fencelock", was.token) if was is not None else ("no one", None)
        facts = {"resource": resource, "token": token, "holder": str(holder), "reason": reason}
        logger.warning("%r was released by force: %s (held by %s)", resource, reason, holder, extra=facts)
        if database:
            with shared.database_at(database) as engine:
                if inspect(engine).has_table(EVENT_TABLE):
                    note(engine, "forced", resource, token, f"from {holder}: {reason}")
                _raise_fences(authority, engine, resource, rows)
    console = shared.error_console()
    if was is None:
        console.print(f"{resource!r} was free", markup=False)
        raise typer.Exit(shared.FOUND_NOTHING)
    console.print(f"{resource!r} was taken from {holder}", markup=False)
    if not database:
        console.print("its holder may still write until the next one has: --database URL refuses it now")


def _row_of(text: str) -> tuple[str, dict[str, str]]:
    """Return the table and the key that `orders:id=1,shop=2` names."""
    name, _, pairs = text.partition(":")
    key = dict(pair.split("=", 1) for pair in pairs.split(",") if "=" in pair)
    if not re.fullmatch(r"\w+(\.\w+)?", name) or not key:
        shared.fail(f"{text!r} names no row: write --claim orders:id=1")
    return name, key


def _raise_fences(
    authority: Redlock | Database, engine: Engine, resource: str, rows: list[tuple[str, dict[str, str]]]
) -> None:
    """Lock with a new token, and pass the gate and claim the rows with it, so that older ones are refused."""
    with authority.lock(resource, ttl=30, timeout=5) as token, Session(engine) as session:
        gate(session, resource)
        for name, key in rows:
            dialect = engine.dialect
            sql, parameters = conditional_update(
                name, {}, key, token, dialect.paramstyle, dialect=dialect.name
            )
            if session.connection().exec_driver_sql(sql, parameters).rowcount == 0:
                shared.fail(
                    f"{name} has no row {key}, or a newer holder has it; the gate was not raised either"
                )
        session.commit()
    shared.error_console().print(f"the database refuses tokens of {resource!r} below {token}", markup=False)


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
    the command is terminated.
    """
    command = context.args
    if not command:
        shared.fail("which command? Write fencelock run RESOURCE -- COMMAND ARGUMENTS")
    with shared.authority_of(url, namespace) as authority:
        lock = authority.lock(resource, ttl=ttl, timeout=timeout, max_hold=None, if_lost="warn")
        try:
            with lock:
                status = _run_under(lock, command)
        except LockTimeoutError as error:
            shared.error_console().print(str(error), markup=False)
            status = NOT_ACQUIRED
    raise typer.Exit(status)


def _run_under(lock: FencedLock[int], command: list[str]) -> int:
    """Run a command until it ends or the lease is lost; return its status, as a shell has it."""
    lease = lock.lease
    its = {"FENCELOCK_TOKEN": str(lease.fencing_token), "FENCELOCK_RESOURCE": lease.resource}
    try:
        program = subprocess.Popen(command, env=os.environ | its)  # noqa: S603 - what the user has typed
    except OSError as error:
        shared.fail(f"{command[0]}: {error.strerror}")

    def pass_on(number: int, _frame: FrameType | None) -> None:
        program.send_signal(number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, pass_on)
    signal.signal(signal.SIGINT, lambda *_: None)  # the terminal tells the command, too
    lock.on_lost(lambda _: program.terminate())
    while True:
        try:
            status = program.wait(1.0)
        except subprocess.TimeoutExpired:
            if lease.lost and lease.expires_at + _GRACE < time.monotonic():
                program.kill()
        else:
            return 1 if lease.lost else 128 - status if status < 0 else status
