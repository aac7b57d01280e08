"""Commands that act: `release --force`, and `run`."""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from types import FrameType
from typing import Annotated, Final

import typer
from sqlalchemy import Engine, inspect
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from fencelock.authority.database.database import Database
from fencelock.authority.redlock.redlock import DEFAULT_NAMESPACE, Redlock
from fencelock.commands import shared
from fencelock.errors import FencelockError, LockLostError, LockTimeoutError
from fencelock.guard.gate import gate
from fencelock.guard.sql import conditional_update
from fencelock.guard.tables import FENCE_TABLE
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
    reason: Annotated[str, typer.Option(help="Why; it is required, and logged.")] = "",
    url: shared.Url = "",
    namespace: shared.Namespace = DEFAULT_NAMESPACE,
    database: Annotated[
        str, typer.Option(help="SQLAlchemy URL of the database that the holder writes to: refuse that.")
    ] = "",
    claim: Annotated[
        list[str] | None, typer.Option(help="Also claim a row in it, orders:id=1; several times for several.")
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
    with shared.authority_of(url, namespace) as authority, ExitStack() as opened:
        engine = opened.enter_context(shared.database_at(database)) if database else None
        if engine is not None:
            _check_tables(engine, rows)
        was = authority.force_release(resource)
        if was is None:
            shared.say(f"{resource!r} was free")
        else:
            holder = str(was.holder or "what is not fencelock")
            facts = {"resource": resource, "token": was.token, "holder": holder, "reason": reason}
            logger.warning("%r was taken from %s: %s", resource, holder, reason, extra=facts)
            if engine is None:
                shared.say("its holder may still write until the next one has: --database URL refuses it now")
            elif inspect(engine).has_table(EVENT_TABLE):
                note(engine, "forced", resource, was.token, f"from {holder}: {reason}")
        if engine is not None:
            _raise_fences(authority, engine, resource, rows)
    if was is None:
        raise typer.Exit(shared.FOUND_NOTHING)


def _row_of(text: str) -> tuple[str, dict[str, str]]:
    """Return the table and the key that `orders:id=1,shop=2` names."""
    name, _, pairs = text.partition(":")
    key = dict(pair.split("=", 1) for pair in pairs.split(",") if "=" in pair)
    if not re.fullmatch(r"\w+(\.\w+)?", name) or not key:
        shared.fail(f"{text!r} names no row: write --claim orders:id=1")
    return name, key


def _check_tables(engine: Engine, rows: list[tuple[str, dict[str, str]]]) -> None:
    """Refuse, before anything is taken, what has no fence to be raised."""
    tables = inspect(engine)
    for name in (FENCE_TABLE, *(name for name, _ in rows)):
        schema, _, table = name.rpartition(".")
        if not tables.has_table(table, schema=schema or None):
            shared.fail(f"the database has no table {name}; nothing was taken")


def _raise_fences(
    authority: Redlock | Database, engine: Engine, resource: str, rows: list[tuple[str, dict[str, str]]]
) -> None:
    """Lock with a new token, and pass the gate and claim the rows with it, so that older ones are refused."""
    dialect = engine.dialect
    try:
        with authority.lock(resource, ttl=3, timeout=5) as token, Session(engine) as session:
            if dialect.name != "sqlite":  # which waits for 5 seconds itself
                is_postgresql = dialect.name == "postgresql"
                wait = "LOCAL lock_timeout = '5s'" if is_postgresql else "innodb_lock_wait_timeout = 5"
                session.connection().exec_driver_sql(f"SET {wait}")
            gate(session, resource)
            for name, key in rows:
                sql, its = conditional_update(name, {}, key, token, dialect.paramstyle, dialect=dialect.name)
                if session.connection().exec_driver_sql(sql, its).rowcount == 0:
                    shared.fail(f"{name} has no row {key}, or a newer holder has it; no fence was raised")
            session.commit()
    except (FencelockError, SQLAlchemyError) as error:
        shared.fail(
            f"no fence was raised: {str(error).splitlines()[0]}. If a transaction of the old holder is open, "
            "end its connection (pg_stat_activity, SHOW PROCESSLIST); then run the same command again"
        )
    shared.say(f"the database refuses tokens of {resource!r} below {token}")


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
    command = context.args
    if not command:
        shared.fail("which command? Write fencelock run RESOURCE -- COMMAND ARGUMENTS")
    with shared.authority_of(url, namespace) as authority:
        lock = authority.lock(resource, ttl=ttl, timeout=timeout, max_hold=None)
        try:
            with lock:
                status = _run_under(lock, command)
        except LockTimeoutError as error:
            shared.say(str(error))
            status = NOT_ACQUIRED
        except LockLostError as error:  # maybe found only now
            shared.say(str(error))
            status = 1
    raise typer.Exit(status)


def _run_under(lock: FencedLock[int], command: list[str]) -> int:
    """Run a command until it ends or the lease is lost; return its status, as a shell has it."""
    lease = lock.lease
    its = {"FENCELOCK_TOKEN": str(lease.fencing_token), "FENCELOCK_RESOURCE": lease.resource}
    # A group of its own, so that what it starts is told, too; behind a terminal it could not read from that.
    group = None if sys.stdin.isatty() else 0
    try:
        program = subprocess.Popen(command, env=os.environ | its, process_group=group)  # noqa: S603 - as typed
    except OSError as error:
        shared.say(f"{command[0]}: {error.strerror}")
        return 127  # as a shell says it

    def tell(number: int, _frame: FrameType | None = None) -> None:
        with suppress(ProcessLookupError):
            program.send_signal(number) if group is None else os.killpg(program.pid, number)

    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, tell)
    signal.signal(signal.SIGINT, lambda *_: None if group is None else tell(signal.SIGINT))
    lock.on_lost(lambda _: tell(signal.SIGTERM))
    while True:
        try:
            status = program.wait(1.0)
        except subprocess.TimeoutExpired:
            if lease.lost and lease.expires_at + _GRACE < time.monotonic():
                tell(signal.SIGKILL)
        else:
            return 128 - status if status < 0 else status
