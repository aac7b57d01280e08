"""Everybody who takes part in `benchmarks.authorities`: how each lock in a database is made.

As in `benchmarks.contenders`, each has processes of its own, this file imports nothing but the standard
library before it is known which contender is wanted, and settings are the fastest that a sensible user would
have. Connections are kept. psycopg prepares a statement that is used often, which fencelock tells it not to
do because of PgBouncer: so two bare statements are there with and without. The documentation of
sqlalchemy-dlock takes a connection for each lock; a connection and a lock object that are kept stand beside
that. mithril-locks lives in a home of its own, with psycopg2, which is the driver that it names.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks import contenders
from benchmarks.contenders import FENCELOCK, PATIENCE, TTL, AsyncLock, BlockingLock, Contender, Setting

POSTGRESQL, MARIADB, SQLITE = "PostgreSQL", "MariaDB", "SQLite"
_TABLE = "CREATE TABLE IF NOT EXISTS bare_leases (resource VARCHAR(255) PRIMARY KEY, token BIGINT NOT NULL,"
#: What makes the table of the bare statements, before the workers of any contender are there.
TABLES = {
    POSTGRESQL: f"{_TABLE} nonce VARCHAR(32), expires_at TIMESTAMPTZ) WITH (fillfactor = 70)",
    MARIADB: f"{_TABLE} nonce VARCHAR(32), expires_at DATETIME(6))",
}
#: As SQLite has them by default; and what fencelock chooses, with which less is waited for.
_DEFAULTS = ("PRAGMA journal_mode = DELETE", "PRAGMA synchronous = FULL")
_WAL = ("PRAGMA journal_mode = WAL", "PRAGMA synchronous = FULL")


@dataclass(frozen=True, slots=True)
class OnDatabase(Contender):
    """One way to lock in a database.

    Attributes:
        database: which one.
    """

    database: str = ""

    @property
    def key(self) -> str:
        """What tells it apart from all others."""
        return f"{self.style}, {self.name}, {self.database}"

    @property
    def label(self) -> str:
        """What it is called where there is little space."""
        return self.name


def _authority(setting: Setting, driver: str) -> Any:
    url = setting.urls[0]
    if driver:
        url = f"postgresql+{driver}:{url.partition(':')[2]}"
    return importlib.import_module("fencelock").Database(url)


def _timeout(setting: Setting) -> float:
    return PATIENCE if setting.waiting else 0


def _fencelock(setting: Setting, driver: str = "") -> Callable[[str], Any]:
    authority, timeout = _authority(setting, driver), _timeout(setting)
    return lambda resource: authority.lock(resource, ttl=TTL, timeout=timeout)


def _fencelock_bare(setting: Setting) -> Callable[[str], BlockingLock]:
    authority, timeout = _authority(setting, ""), _timeout(setting)

    def make_lock(resource: str) -> BlockingLock:
        def lock() -> Any:
            return authority.acquire((resource,), ttl=TTL, timeout=timeout)

        return contenders.AskedFor(lock, authority.release, waiting=False)

    return make_lock


class _Said:
    """Two pieces of work on a connection: one that acquires, one that releases."""

    __slots__ = ("_acquire", "_release")

    def __init__(self, acquire: Callable[[], object], release: Callable[[], object]) -> None:
        self._acquire = acquire
        self._release = release

    def __enter__(self) -> None:
        self._acquire()

    def __exit__(self, *details: object) -> None:
        self._release()


def _psycopg(setting: Setting, **options: Any) -> Any:
    url = setting.urls[0].replace("+psycopg", "")
    return importlib.import_module("psycopg").connect(url, **options)


def _fetched(rows: Any) -> Any:
    if rows is None:
        raise contenders.NotLockedError("it was not granted")
    return rows


def _two_statements(setting: Setting, *, is_prepared: bool = True) -> Callable[[str], BlockingLock]:
    threshold = {} if is_prepared else {"prepare_threshold": None}
    execute = _psycopg(setting, autocommit=True, **threshold).execute
    acquire = (
        "INSERT INTO bare_leases AS l (resource, token, nonce, expires_at) VALUES (%s, 1, %s, now() + %s *"
        " interval '1 second') ON CONFLICT (resource) DO UPDATE SET token = l.token + 1,"
        " nonce = excluded.nonce, expires_at = excluded.expires_at"
        " WHERE l.nonce IS NULL OR l.expires_at <= now() RETURNING token"
    )
    release = "UPDATE bare_leases SET nonce = NULL WHERE resource = %s AND nonce = %s"
    return lambda resource: _Said(
        lambda: _fetched(execute(acquire, (resource, "nonce", TTL)).fetchone()),
        lambda: execute(release, (resource, "nonce")),
    )


def _for_update(setting: Setting) -> Callable[[str], BlockingLock]:
    connection = _psycopg(setting)

    def make_lock(resource: str) -> BlockingLock:
        row = "INSERT INTO bare_leases (resource, token) VALUES (%s, 1) ON CONFLICT DO NOTHING"
        connection.execute(row, (resource,))
        connection.commit()
        locking = "SELECT token FROM bare_leases WHERE resource = %s FOR UPDATE"
        return _Said(lambda: _fetched(connection.execute(locking, (resource,)).fetchone()), connection.commit)

    return make_lock


def _advisory(setting: Setting) -> Callable[[str], BlockingLock]:
    connection = _psycopg(setting)
    locking = "SELECT pg_advisory_xact_lock(hashtextextended(%s, 0))"
    return lambda resource: _Said(
        lambda: connection.execute(locking, (resource,)).fetchone(), connection.commit
    )


def _dlock(setting: Setting) -> Callable[[str], BlockingLock]:
    engine = importlib.import_module("sqlalchemy").create_engine(setting.urls[0])
    create = _creating_dlocks(engine)
    return lambda resource: _DLock(engine, create, resource)


def _creating_dlocks(engine: Any) -> Callable[[Any, str], BlockingLock]:
    create: Callable[..., BlockingLock] = importlib.import_module("sqlalchemy_dlock").create_sadlock
    if engine.dialect.name == "postgresql":
        return create
    # MariaDB takes no name that is longer, and no timeout below 0, which is what it would be told.
    return functools.partial(create, contextual_timeout=PATIENCE, convert=lambda name: name[-64:])


class _DLock:
    """A lock on a connection that is taken from the pool for it, as its documentation has it."""

    __slots__ = ("_connection", "_create", "_engine", "_lock", "_resource")

    def __init__(self, engine: Any, create: Callable[[Any, str], BlockingLock], resource: str) -> None:
        self._engine = engine
        self._create = create
        self._resource = resource

    def __enter__(self) -> None:
        self._connection = self._engine.connect()
        self._lock = self._create(self._connection, self._resource)
        self._lock.__enter__()

    def __exit__(self, *details: object) -> None:
        self._lock.__exit__(*details)  # type: ignore[arg-type] # they are what it expects
        self._connection.close()


def _dlock_kept(setting: Setting) -> Callable[[str], BlockingLock]:
    engine = importlib.import_module("sqlalchemy").create_engine(
        setting.urls[0], isolation_level="AUTOCOMMIT"
    )
    create, connection = _creating_dlocks(engine), engine.connect()
    return lambda resource: create(connection, resource)


def _mithril(setting: Setting) -> Callable[[str], BlockingLock]:
    engine = importlib.import_module("sqlalchemy").create_engine(
        setting.urls[0].replace("+psycopg", "+psycopg2")
    )
    return contenders.mithril_locks(
        importlib.import_module("mithril.backends").PostgresBackend(engine), setting
    )


def _pymysql(setting: Setting, **options: Any) -> Any:
    url = importlib.import_module("sqlalchemy").make_url(setting.urls[0])
    given = {"host": url.host, "port": url.port or 3306, "user": url.username, "password": url.password or ""}
    return importlib.import_module("pymysql").connect(**given, database=url.database, **options)


def _two_statements_mariadb(setting: Setting) -> Callable[[str], BlockingLock]:
    cursor = _pymysql(setting, autocommit=True).cursor()
    acquire = (
        "INSERT INTO bare_leases (resource, token, nonce, expires_at) VALUES (%s, 1, %s, UTC_TIMESTAMP(6) +"
        " INTERVAL %s SECOND) ON DUPLICATE KEY UPDATE token = token + (nonce IS NULL),"
        " expires_at = IF(nonce IS NULL, VALUES(expires_at), expires_at),"
        " nonce = COALESCE(nonce, VALUES(nonce)) RETURNING token, nonce"
    )
    release = "UPDATE bare_leases SET nonce = NULL WHERE resource = %s AND nonce = %s"

    def lock(resource: str) -> None:
        cursor.execute(acquire, (resource, "nonce", TTL))
        _fetched(cursor.fetchone())

    return lambda resource: _Said(
        functools.partial(lock, resource), lambda: cursor.execute(release, (resource, "nonce"))
    )


def _for_update_mariadb(setting: Setting) -> Callable[[str], BlockingLock]:
    connection = _pymysql(setting, init_command=f"SET innodb_lock_wait_timeout = {PATIENCE}")
    cursor = connection.cursor()

    def make_lock(resource: str) -> BlockingLock:
        cursor.execute("INSERT IGNORE INTO bare_leases (resource, token) VALUES (%s, 1)", (resource,))
        connection.commit()
        locking = "SELECT token FROM bare_leases WHERE resource = %s FOR UPDATE"
        return _Said(lambda: cursor.execute(locking, (resource,)), connection.commit)

    return make_lock


def _sqlite(setting: Setting, settings: tuple[str, ...]) -> Any:
    path = setting.urls[0].partition(":///")[2]
    name = f"{path}-bare-{'wal' if settings is _WAL else 'default'}"
    connection = importlib.import_module("sqlite3").connect(
        name, isolation_level=None, timeout=PATIENCE, check_same_thread=False
    )
    for pragma in settings:
        connection.execute(pragma)
    connection.execute(f"{_TABLE} nonce TEXT, expires_at TEXT)")
    return connection.execute


def _two_transactions(setting: Setting, settings: tuple[str, ...]) -> Callable[[str], BlockingLock]:
    execute = _sqlite(setting, settings)
    acquire = (
        "INSERT INTO bare_leases AS l (resource, token, nonce, expires_at) VALUES (?, 1, ?,"
        " strftime('%Y-%m-%d %H:%M:%f', 'now', '+' || ? || ' seconds')) ON CONFLICT (resource) DO UPDATE SET"
        " token = l.token + 1, nonce = excluded.nonce, expires_at = excluded.expires_at"
        " WHERE l.nonce IS NULL OR l.expires_at <= strftime('%Y-%m-%d %H:%M:%f', 'now') RETURNING token"
    )
    release = "UPDATE bare_leases SET nonce = NULL WHERE resource = ? AND nonce = ?"

    def say(statement: str, *parameters: object) -> list[Any]:
        execute("BEGIN IMMEDIATE")
        rows: list[Any] = execute(statement, parameters).fetchall()
        execute("COMMIT")
        return rows

    return lambda resource: _Said(
        lambda: _fetched(say(acquire, resource, "nonce", TTL) or None),
        lambda: say(release, resource, "nonce"),
    )


def _held_transaction(setting: Setting) -> Callable[[str], BlockingLock]:
    execute = _sqlite(setting, _WAL)
    return lambda _: _Said(lambda: execute("BEGIN IMMEDIATE"), lambda: execute("COMMIT"))


Make = Callable[[Setting], Callable[[str], BlockingLock | AsyncLock]]


def _on(database: str, name: str, make: Make, **more: Any) -> OnDatabase:
    return OnDatabase(name, 1, make, database=database, **more)


BARE = f"{FENCELOCK}, without a lock object"
TWO_STATEMENTS = "two bare statements"
NOT_PREPARED = f"{TWO_STATEMENTS}, not prepared"
TWO_TRANSACTIONS = "two bare transactions"
DLOCK, DLOCK_KEPT = "sqlalchemy-dlock", "sqlalchemy-dlock, connection kept"
MITHRIL = "mithril-locks"

#: One caller, by the database.
ALONE = {
    POSTGRESQL: (
        _on(POSTGRESQL, FENCELOCK, _fencelock),
        _on(POSTGRESQL, BARE, _fencelock_bare),
        _on(POSTGRESQL, TWO_STATEMENTS, _two_statements),
        _on(
            POSTGRESQL,
            NOT_PREPARED,
            functools.partial(_two_statements, is_prepared=False),
        ),
        _on(POSTGRESQL, "SELECT … FOR UPDATE, COMMIT", _for_update),
        _on(POSTGRESQL, "pg_advisory_xact_lock, COMMIT", _advisory),
        _on(POSTGRESQL, DLOCK, _dlock, module="sqlalchemy_dlock"),
        _on(POSTGRESQL, DLOCK_KEPT, _dlock_kept, module="sqlalchemy_dlock"),
        _on(POSTGRESQL, MITHRIL, _mithril, home="mithril-locks"),
    ),
    MARIADB: (
        _on(MARIADB, FENCELOCK, _fencelock),
        _on(MARIADB, BARE, _fencelock_bare),
        _on(MARIADB, TWO_STATEMENTS, _two_statements_mariadb),
        _on(MARIADB, "SELECT … FOR UPDATE, COMMIT", _for_update_mariadb),
        _on(MARIADB, DLOCK, _dlock, module="sqlalchemy_dlock"),
        _on(MARIADB, DLOCK_KEPT, _dlock_kept, module="sqlalchemy_dlock"),
    ),
    SQLITE: (
        _on(SQLITE, FENCELOCK, _fencelock),
        _on(SQLITE, BARE, _fencelock_bare),
        _on(SQLITE, TWO_TRANSACTIONS, functools.partial(_two_transactions, settings=_DEFAULTS)),
        _on(SQLITE, f"{TWO_TRANSACTIONS}, WAL", functools.partial(_two_transactions, settings=_WAL)),
    ),
}
_HELD_TRANSACTION = _on(SQLITE, "BEGIN IMMEDIATE, COMMIT", _held_transaction)
_CONNECTION_KEPT = {DLOCK_KEPT, BARE, NOT_PREPARED}
#: Those of them that can wait for each other.
CONTENDING = {
    POSTGRESQL: tuple(
        one for one in ALONE[POSTGRESQL] if one.name not in _CONNECTION_KEPT | {TWO_STATEMENTS}
    ),
    MARIADB: tuple(one for one in ALONE[MARIADB] if one.name not in _CONNECTION_KEPT | {TWO_STATEMENTS}),
    SQLITE: (ALONE[SQLITE][0], _HELD_TRANSACTION),
}
#: Tasks of one loop.
TASKS = tuple(
    _on(
        POSTGRESQL,
        f"{FENCELOCK}, {title}",
        functools.partial(_fencelock, driver=driver),
        style="asyncio",
        module=module,
    )
    for title, driver, module in (
        ("asyncpg", "asyncpg", "asyncpg"),
        ("psycopg_async", "psycopg_async", "psycopg"),
        ("psycopg in threads", "psycopg", "psycopg"),
    )
)
ALL = (*(one for each in ALONE.values() for one in each), _HELD_TRANSACTION, *TASKS)
