"""Finds problems for `fencelock doctor` in the settings of a database, and in its servers.

A setting that the role may not see is not reported.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple

from sqlalchemy import URL, Connection, NullPool, create_engine, text
from sqlalchemy.exc import DBAPIError

from fencelock._databases import MYSQL
from fencelock._engines import shown

_HANGS: Final = "a transaction that hangs keeps its rows locked for ever, unless its program sets a timeout"
_FORGETS: Final = "a crash may lose what was committed, leases and their tokens too"
_ON_GALERA: Final = "a crash of all nodes of the cluster may lose what was committed"
_IDLE: Final = "idle_in_transaction_session_timeout"
_CLUSTER: Final = 3  # the smallest number of nodes that survive the loss of one node
_FLUSH: Final = "innodb_flush_log_at_trx_commit"
_MIXES: Final = "a transaction sees new versions of the rows that it locks, beside old versions of others"


@dataclass(frozen=True, slots=True)
class Finding:
    """A place, a fact, and advice: a problem if locks or data are in danger, else a note."""

    where: str
    what: str
    advice: str
    is_problem: bool = True


note: Final = partial(Finding, is_problem=False)


class _Setting(NamedTuple):
    """A setting, its bad values, their effect, and advice."""

    dialect: str
    name: str
    bad: tuple[str, ...]
    what: str
    advice: str


_SETTINGS: Final = (
    _Setting("postgresql", _IDLE, ("0",), _HANGS, f"{_IDLE} = '30s' for the program's role"),
    _Setting("postgresql", "lock_timeout", ("0",), "a statement waits for ever", "lock_timeout = '5s'"),
    _Setting("postgresql", "fsync", ("off",), _FORGETS, "fsync = on"),
    _Setting("postgresql", "full_page_writes", ("off",), _FORGETS, "full_page_writes = on"),
    _Setting("mysql", "idle_transaction_timeout", ("0",), _HANGS, "idle_transaction_timeout = 30"),
    _Setting("mysql", "innodb_snapshot_isolation", ("OFF",), _MIXES, "innodb_snapshot_isolation = ON"),
    _Setting("mysql", _FLUSH, ("0", "2"), _FORGETS, f"{_FLUSH} = 1"),
)
_VALUES: Final = {
    "postgresql": "SELECT name, setting FROM pg_settings",
    "mysql": "SHOW GLOBAL VARIABLES",
}
_OPEN_SCHEMAS: Final = """
SELECT DISTINCT nspname FROM pg_namespace, LATERAL aclexplode(nspacl) AS its
WHERE nspname = ANY (current_schemas(FALSE)) AND its.privilege_type = 'CREATE'
    AND its.grantee NOT IN (nspowner, (SELECT oid FROM pg_roles WHERE rolname = CURRENT_USER))
ORDER BY nspname
"""
_STANDBYS: Final = """
SELECT count(*) FROM pg_stat_replication AS r WHERE state IS DISTINCT FROM 'backup' AND NOT EXISTS (
    SELECT FROM pg_replication_slots AS s WHERE s.active_pid = r.pid AND s.slot_type = 'logical')
"""


def of_settings(connection: Connection, where: str) -> Iterator[Finding]:
    """Yield findings about settings of durability, of timeouts and of isolation."""
    dialect, values = _dialect(connection), _values(connection)
    for setting in _SETTINGS:
        if setting.dialect != dialect or values.get(setting.name) not in setting.bad:
            continue
        if setting.what is not _FORGETS:
            yield note(where, setting.what, setting.advice)
        elif values.get("wsrep_on") == "ON":
            yield note(where, _ON_GALERA, setting.advice)
        else:
            yield Finding(where, setting.what, setting.advice)
    if dialect == "postgresql":
        for (schema,) in _ask(connection, _OPEN_SCHEMAS):
            what = f"other roles can create functions in {schema!r}, which is in the search path"
            advice = "REVOKE CREATE ON SCHEMA: PostgreSQL may run them for a program or an administrator"
            yield note(where, what, advice)
    has_log = values.get("log_bin") == "ON" and values.get("wsrep_on") != "ON"
    if has_log and values.get("sync_binlog") != "1":  # after a crash, commits that the log lacks are lost
        yield Finding(where, _FORGETS, "sync_binlog = 1")


def of_granting(connection: Connection, where: str, url: URL) -> Iterator[Finding]:
    """Yield findings about the database that grants the locks; the program uses this URL."""
    yield from of_settings(connection, where)
    if _dialect(connection) == "postgresql":
        yield from _of_postgresql(connection, where, url)


def of_galera(url: URL) -> Iterator[Finding]:
    """Yield findings about the cluster of a Galera node; nothing for another database."""
    status = _status_of_galera(url)
    if status.get("wsrep_on") != "ON":
        return
    group, size = status.get("wsrep_cluster_status", ""), int(status.get("wsrep_cluster_size", "0"))
    if group != "Primary":
        what = f"is a node of Galera without a majority (wsrep_cluster_status is {group}): it refuses"
        yield Finding(shown(url), what, "see why it does not reach the others")
    elif status.get("wsrep_ready") != "ON":
        what = "is a node of Galera that is not ready (wsrep_ready is OFF): it refuses"
        yield Finding(shown(url), what, "wait until it has copied the others' data, or see its log")
    elif size < _CLUSTER:
        left = "the only node" if size == 1 else "one of two nodes"
        what = f"is {left} of its cluster (wsrep_cluster_size): without it, or its link, nothing is granted"
        yield note(shown(url), what, "start the others; a cluster needs three nodes")


def _status_of_galera(url: URL) -> dict[str, str]:
    # Without a majority a node accepts only SHOW, but SQLAlchemy sends other statements when it connects.
    dialect = create_engine(url, poolclass=NullPool).dialect
    found: dict[str, str] = {}
    if dialect.name in MYSQL:
        arguments, options = dialect.create_connect_args(url)
        with suppress(dialect.loaded_dbapi.Error), closing(dialect.connect(*arguments, **options)) as its:
            for ask in ("VARIABLES LIKE 'wsrep_on'", "STATUS LIKE 'wsrep_%'"):
                with closing(its.cursor()) as cursor:
                    cursor.execute(f"SHOW GLOBAL {ask}")
                    found |= {str(name): str(value) for name, value in cursor.fetchall()}
    return found


def _of_postgresql(connection: Connection, where: str, url: URL) -> Iterator[Finding]:
    values = _values(connection)
    if (default := values.get("synchronous_commit")) in {"off", "local", "remote_write"}:
        yield note(
            where,
            f"synchronous_commit is {default} by default: a crash or a failover may lose a COMMIT",
            "locks are granted with synchronous_commit = on all the same; what they guard needs it, too",
        )
    standbys = sum(int(count) for (count,) in _ask(connection, _STANDBYS))
    if not standbys:
        return
    them = f"{standbys} standby" if standbys == 1 else f"{standbys} standbys"
    if not values.get("synchronous_standby_names"):
        yield note(
            where,
            f"has {them} and waits for none: a failover may lose the last locks, and grant them again",
            "tokens are larger afterwards, so the guard refuses the old holder; work without a guard needs "
            "synchronous_standby_names, and synchronous_mode of Patroni",
        )
    if len(_hosts(url)) == 1:
        yield note(
            where,
            f"has {them} and the URL names one host: after a failover it is down, or refuses as a standby",
            "name all hosts and target_session_attrs=read-write, unless the host is an address that moves",
        )
    elif "target_session_attrs" not in url.query:
        what = "the URL names several hosts, of which one may be a standby, which refuses"
        yield note(where, what, "add target_session_attrs=read-write")


def _dialect(connection: Connection) -> str:
    return "mysql" if connection.dialect.name == "mariadb" else connection.dialect.name


def _values(connection: Connection) -> dict[str, str]:
    """Return the server's settings that the role may see; none for SQLite."""
    ask = _VALUES.get(_dialect(connection))
    return {} if ask is None else {str(name): str(value or "") for name, value in _ask(connection, ask)}


def _ask(connection: Connection, statement: str) -> Iterable[Any]:
    """Return the rows of a query; none if the query fails, mostly because the role may not see them."""
    try:
        return connection.execute(text(statement)).all()
    except DBAPIError:
        connection.rollback()
        return ()


def _hosts(url: URL) -> set[str]:
    given = url.query.get("host", ())
    named = [url.host or "", *([given] if isinstance(given, str) else given)]
    return set(filter(None, ",".join(named).split(",")))
