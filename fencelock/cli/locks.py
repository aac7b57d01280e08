"""The commands for locks: `inspect`, `leaks`, `top`, `history`, `release --force` and `prune`."""

from __future__ import annotations

import itertools
import logging
import math
import os
import re
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.console import Group
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text
from sqlalchemy import Engine, column, select, table
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from fencelock._databases import EVENT_TABLE, has_table
from fencelock.authority.database.database import Database
from fencelock.authority.line.line import LineAuthority
from fencelock.authority.redlock.redlock import DEFAULT_NAMESPACE, Redlock
from fencelock.cli import shared
from fencelock.errors import FencelockError, StaleTokenError
from fencelock.guard._gate import gate
from fencelock.guard.leases import bind
from fencelock.guard.receipts import prune_receipts
from fencelock.guard.sql import conditional_update
from fencelock.guard.tables import FENCE_COLUMN, FENCE_TABLE, RECEIPT_TABLE
from fencelock.holder import LockInfo, printable
from fencelock.lease import Lease, check_resource
from fencelock.lock.slots import slot_names
from fencelock.observe.history import note, read

if TYPE_CHECKING:
    from fencelock._locking import Shipped

logger: logging.Logger = logging.getLogger("fencelock.command")

_MOST_ROWS: Final = 100  # the most rows of a printed table; `--json` prints all rows
_SLOTS: Final = 100  # the number of slots of a name that `inspect` asks for
_FENCES: Final = table(FENCE_TABLE, column("resource"), column(FENCE_COLUMN))


def inspect(
    resource: Annotated[str | None, typer.Argument(help="Name of the lock; all by default.")] = None,
    *,
    url: shared.Url = "",
    namespace: shared.Namespace = DEFAULT_NAMESPACE,
    database: Annotated[
        str, shared.database_option("SQLAlchemy URL of a database with a fence table: show the fence, too.")
    ] = "",
    as_json: shared.AsJson = False,
) -> None:
    """Show the held locks: by whom, since when, and for how much longer. Status 3: the named lock is free.

    With a name, show also the slots of a semaphore and the readers of a lock.
    """
    with shared.authority_of(url, namespace) as authority:
        names = () if resource is None else (check_resource(resource), *slot_names(resource, 0, _SLOTS))
        held = authority.run(authority.inspect_gen(names))
    fences = _fences_of(database, [info.resource for info in held]) if database else None
    if as_json:
        shared.print_json([_as_json(info, fences) for info in held])
    elif held:
        shared.console().print(_table(held, fences))
        if len(held) > _MOST_ROWS:
            shared.console().print(f"… and {len(held) - _MOST_ROWS} more: --json lists them all")
    else:
        shown = f"{resource!r} is free" if resource else "no lock is held"
        shared.console().print(shown, markup=False)
    if resource is not None and not held:
        raise typer.Exit(shared.FOUND_NOTHING)


def _fences_of(url: str, resources: Sequence[str]) -> dict[str, int]:
    """Return the fences in a database's fence table, by resource; resources without a row are left out."""
    found: dict[str, int] = {}
    with shared.database_at(url) as engine, engine.connect() as connection:
        for start in range(0, len(resources), 500):
            wanted = _FENCES.c.resource.in_(resources[start : start + 500])
            rows = connection.execute(select(_FENCES.c.resource, _FENCES.c[FENCE_COLUMN]).where(wanted))
            found |= {name: int(fence) for name, fence in rows}
    return found


def _as_json(info: LockInfo, fences: dict[str, int] | None = None) -> dict[str, Any]:
    facts = asdict(info)
    if info.remaining == math.inf:
        facts["remaining"] = None
    if fences is not None:
        facts["fence"] = fences.get(info.resource)
    return facts


def _table(held: Sequence[LockInfo], fences: dict[str, int] | None = None) -> Table:
    names = ["resource", "holder", "held for", "ends in", "waiting", "token"]
    shown = Table(header_style="bold")
    for name in names if fences is None else [*names, "fence"]:
        shown.add_column(name, overflow="fold")
    now = time.time()
    for info in held[:_MOST_ROWS]:
        holder, age = "not fencelock", ""
        if info.holder is not None:
            age = _span(now - info.holder.since)
            holder = f"{info.holder.program}\n{info.holder.pid} on {info.holder.host}"
            holder = holder if info.holder.host else "unknown process"
        its = [
            shared.shown(info.resource),
            escape(holder),
            age,
            "[red]never[/]" if info.remaining == math.inf else _span(info.remaining),
            "" if info.waiters is None else str(info.waiters),
            "" if info.token is None else str(info.token),
        ]
        if fences is not None:
            fence = fences.get(info.resource)
            above = fence is not None and info.token is not None and fence > info.token
            its.append("" if fence is None else f"[red]{fence}[/]" if above else str(fence))
        shown.add_row(*its)
    return shown


def _span(seconds: float) -> str:
    seconds = max(0.0, seconds)
    for unit, name in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:.0f} {name}"
    return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"  # noqa: PLR2004 - tenths of short times


def leaks(
    *,
    url: shared.Url = "",
    namespace: shared.Namespace = DEFAULT_NAMESPACE,
    longest: Annotated[
        float, typer.Option(help="Also report leases that last longer than this number of seconds.")
    ] = 3600.0,
    pattern: Annotated[
        str, typer.Option(help="Also report keys of other programs without a ttl, such as 'lock:*'.")
    ] = "",
    as_json: shared.AsJson = False,
) -> None:
    """Find locks that end late or never. Status 3: there are some."""
    with shared.authority_of(url, namespace) as authority:
        if pattern and not isinstance(authority, Redlock):
            shared.fail("--pattern looks for keys on nodes, and a database has none")
        found = [info for info in authority.inspect() if info.remaining > longest]
        foreign = authority.endless(pattern) if pattern and isinstance(authority, Redlock) else {}
    keys = sorted({key for its in foreign.values() for key in its})
    console = shared.console(markup=False)
    if as_json:
        shared.print_json({"locks": [_as_json(info) for info in found], "keys": foreign})
    elif not found and not keys:
        console.print("no lock was found that would never end")
    else:
        if found:
            console.print(_table(found), markup=True)
            console.print("fencelock release RESOURCE --force --reason … releases a lock")
        for key in keys[:_MOST_ROWS]:
            on = ", ".join(node for node, its in foreign.items() if key in its)
            console.print(f"{printable(key)} has no end on {on}")
    if found or keys:
        raise typer.Exit(shared.FOUND_NOTHING)


def history(
    resource: Annotated[str, typer.Argument(help="Name of the lock.")],
    *,
    database: Annotated[str, shared.database_option("SQLAlchemy URL of the database that has the history.")],
    last: Annotated[int, typer.Option(min=1, help="How many entries.")] = 50,
    as_json: shared.AsJson = False,
) -> None:
    """Show the history of a lock: granted, lost, refused, released by force. Status 3: nothing is known.

    The program must write the history: fencelock.observe.history.record(engine).
    """
    with shared.database_at(database) as engine:
        if not has_table(engine, EVENT_TABLE):
            shared.fail(
                f"the database has no table {EVENT_TABLE}: a program that calls "
                "fencelock.observe.history.record(engine) makes it, and writes there"
            )
        found = read(engine, resource, last)
    if as_json:
        shared.print_json([{**asdict(entry), "at": f"{entry.at.isoformat()}Z"} for entry in found])
    elif found:
        shown = Table("at (UTC)", "what", "token", "process", "", header_style="bold")
        for entry in found:
            token = "" if entry.token is None else str(entry.token)
            its = (f"{entry.at:%m-%d %H:%M:%S}", entry.what, token, entry.holder, entry.detail)
            shown.add_row(*map(shared.shown, its))
        shared.console().print(shown)
    else:
        shared.console().print(f"the history has no entry for {resource!r}", markup=False)
    if not found:
        raise typer.Exit(shared.FOUND_NOTHING)


def top(
    *,
    url: shared.Url = "",
    namespace: shared.Namespace = DEFAULT_NAMESPACE,
    every: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks.")] = 1.0,
    times: Annotated[int, typer.Option(min=0, help="How often to look; 0 until Ctrl-C.")] = 0,
) -> None:
    """Watch the locks with the most waiters, and those that are held longest. Ctrl-C ends the command."""
    with (
        shared.authority_of(url, namespace) as authority,
        Live(console=shared.console(), screen=times == 0, auto_refresh=False) as live,
        suppress(KeyboardInterrupt),
    ):
        for look in itertools.count(1):
            live.update(_screen(authority, live.console.height), refresh=True)
            if look == times:
                if not live.console.is_terminal:
                    live.console.print()  # Live does not end its last line
                break
            time.sleep(every)


def _screen(authority: Shipped, height: int) -> Group:
    held = authority.inspect()
    now = time.time()
    held.sort(key=lambda info: (-(info.waiters or 0), info.holder.since if info.holder else now))
    known = [info.waiters for info in held if info.waiters is not None]  # a database does not tell
    waiting = f"   {sum(known)} waiting" if known else ""
    where = f"{len(authority.nodes)} nodes" if isinstance(authority, Redlock) else repr(authority)
    line = Text(f"{time.strftime('%H:%M:%S')}   {len(held)} held{waiting}   {where}")
    return Group(line, _table(held[: max(1, (height - 6) // 2)]))


def release(
    resource: Annotated[str, typer.Argument(help="Name of the lock.")],
    *,
    force: Annotated[bool, typer.Option("--force", help="Required: the holder loses the lock.")] = False,
    reason: Annotated[str, typer.Option(help="Required: the reason, for the log.")] = "",
    token: Annotated[int | None, typer.Option(help="Only if the holder has this token.")] = None,
    process: Annotated[
        str,
        typer.Option("--holder", help="Only if this process holds it, as inspect shows it: '4711 on web-3'."),
    ] = "",
    url: shared.Url = "",
    namespace: shared.Namespace = DEFAULT_NAMESPACE,
    database: Annotated[
        str,
        shared.database_option("SQLAlchemy URL of the database to which the holder writes: close its gate."),
    ] = "",
    claim: Annotated[
        list[str] | None,
        typer.Option(help="A row of it that refuses the holder, too: orders:id=1; repeat for each row."),
    ] = None,
) -> None:
    """Take a lock from its holder. Status 3: the lock was free, or not held by that --token or --holder.

    The holder loses its lock, but is not stopped. With --database, the gate refuses the holder from now on;
    with --claim, that row does, too. Other rows refuse it after the next holder has written or claimed them.
    """
    if not force or not reason.strip():
        shared.fail("this takes the lock away from its holder: add --force, and --reason 'why'")
    rows = [_row_of(each) for each in claim or ()]
    if rows and not database:
        shared.fail("--claim needs the database that has the row: add --database URL")
    with shared.authority_of(url, namespace) as authority, ExitStack() as opened:
        engine = opened.enter_context(shared.database_at(database)) if database else None
        if engine is not None:
            _check_tables(engine, rows)
        if process:
            token = _token_of(process, authority.inspect(resource), token)
        was = authority.force_release(resource, token=token)
        if was is None:
            free = "was free" if token is None else f"is not held with token {token}"
            shared.say(f"{resource!r} {free}")
        else:
            holder = str(was.holder or "another program")
            facts = {"resource": resource, "token": was.token, "holder": holder, "reason": reason}
            logger.warning("%r was taken from %s: %s", resource, holder, reason, extra=facts)
            if engine is None:
                shared.say(
                    "its old holder may write until a new holder has written; --database and --claim "
                    "refuse it at once"
                )
            elif has_table(engine, EVENT_TABLE):
                note(engine, "forced", resource, was.token, f"from {holder}: {reason}")
        if engine is not None:
            _raise_fences(authority, engine, resource, rows, token if was is None else was.token)
    if was is None:
        raise typer.Exit(shared.FOUND_NOTHING)


def _token_of(process: str, info: LockInfo | None, token: int | None) -> int:
    """Return the token to release, if `process` holds the lock: `token`, else the lock's. Otherwise exit."""
    if info is None or info.holder is None:
        shared.say("no process holds that lock")
        raise typer.Exit(shared.FOUND_NOTHING)
    if process not in {f"{info.holder.pid} on {info.holder.host}", f"{info.holder.pid}"}:
        shared.say(f"that lock is not held by {process}, but by {info.holder}")
        raise typer.Exit(shared.FOUND_NOTHING)
    if info.token is None:
        shared.fail("its token is not known at the moment: try again")
    return info.token if token is None else token


def _row_of(text: str) -> tuple[str, dict[str, str]]:
    """Return the table and the key in a text such as `orders:id=1,shop=2`."""
    name, _, pairs = text.partition(":")
    key = dict(pair.split("=", 1) for pair in pairs.split(",") if "=" in pair)
    if not re.fullmatch(r"\w+(\.\w+)?", name) or not key:
        shared.fail(f"{text!r} names no row: write --claim orders:id=1")
    return name, key


def _check_tables(engine: Engine, rows: list[tuple[str, dict[str, str]]]) -> None:
    """Fail if the fence table or a table of these rows is missing, before the holder loses the lock."""
    for name in (FENCE_TABLE, *(name for name, _ in rows)):
        schema, _, table = name.rpartition(".")
        if not has_table(engine, table, schema or None):
            shared.fail(f"the database has no table {name}; nothing was released")


def _raise_fences(
    authority: Shipped, engine: Engine, resource: str, rows: list[tuple[str, dict[str, str]]], old: int | None
) -> None:
    """Pass the gate and claim the rows with the old token plus one: no successor's token is smaller.

    If the old token is unknown, a new token is acquired.
    """
    dialect = engine.dialect
    try:
        with ExitStack() as held, Session(engine) as session:
            if old is None:
                token = held.enter_context(authority.lock(resource, ttl=3, timeout=5))
            else:
                token = old + 1
                bind(session.connection(), Lease(resource, token))
            if dialect.name != "sqlite":  # by default, SQLite's driver waits for 5 seconds, too
                is_postgresql = dialect.name == "postgresql"
                wait = "LOCAL lock_timeout = '5s'" if is_postgresql else "innodb_lock_wait_timeout = 5"
                session.connection().exec_driver_sql(f"SET {wait}")
            gate(session, resource)
            for name, key in rows:
                sql, its = conditional_update(name, {}, key, token, dialect.paramstyle, dialect=dialect.name)
                if session.connection().exec_driver_sql(sql, its).rowcount == 0:
                    shared.fail(f"{name} has no row {key}, or a newer holder has it; no fence was raised")
            session.commit()
    except StaleTokenError:
        shared.say(f"a newer holder of {resource!r} has passed already, so older ones are refused")
        return
    except (FencelockError, SQLAlchemyError) as error:
        shared.fail(
            f"no fence was raised: {str(error).splitlines()[0]}. If a transaction of the old holder is open, "
            "end its connection (pg_stat_activity, SHOW PROCESSLIST); then run the same command again"
        )
    claimed = [f"{name} {key}" for name, key in rows]
    refuses = " and ".join(("the gate", *claimed))
    shared.say(f"tokens of {resource!r} below {token} are refused by {refuses}; other rows need --claim")


def prune(
    *,
    older_than: Annotated[str, typer.Option(help="Time since the last lock, such as 30d or 12h.")],
    url: shared.Url = "",
    database: Annotated[
        str,
        shared.database_option("The database of the receipts, if it is not the one that grants the locks."),
    ] = "",
) -> None:
    """Delete old receipts, and the authority's entries of resources that were free for long.

    A key whose receipt is gone can be used again. The fences stay, because they refuse late writers.
    """
    seconds = shared.seconds_of(older_than)
    url = url or os.environ.get("FENCELOCK_URL", "")
    with shared.authority_of(url) as authority:
        if isinstance(authority, Database):
            shared.say(f"{authority.prune(seconds)} rows of free resources deleted")
            database = database or url
        elif isinstance(authority, LineAuthority):
            shared.say(f"{authority.prune(seconds)} marks of free resources deleted")
        elif not database:
            shared.fail(
                "nodes keep no rows: a name that is not locked takes no memory there. For the receipts of "
                "once, name their database: --database URL"
            )
    if not database:
        return
    if (file := shared.file_of_sqlite(database)) and not Path(file).exists():
        return  # there is only the separate file of the locks
    with shared.database_at(database) as engine, engine.begin() as connection:
        if has_table(connection, RECEIPT_TABLE):
            shared.say(f"{prune_receipts(connection, seconds)} receipts deleted")
