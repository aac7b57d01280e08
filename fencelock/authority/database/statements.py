"""The SQL statements for each database. Within a statement, the clock of the database stands still.

A token is the time at which it was minted, in Unix milliseconds plus a base, and ten bits of the server:

    token = GREATEST((own >> 10) + 1, base + now) << 10 | server

`own` is the last token of the resource, so the tokens of a resource rise whatever clocks say. The time makes
a token larger than the tokens that a failover or a restore has lost, if clocks differ by less than the
failover or restore took. The ten bits distinguish servers that grant at the same time in a split brain.
`base` is 0 until `init` stores another in the row with an empty resource. From 2**62 on it is ignored:
no use explains it, and it would close rows for good. `proof/minting.py` is the model.

The statements for MySQL and MariaDB use only what both have: no RETURNING and no SET STATEMENT. A server of
Galera repeats a statement after a conflict. Then it sends the rows of both tries, although the first one was
rolled back. So the statements return the token in `lastrowid`, which the last try has written.
"""

from __future__ import annotations

import functools
from typing import Any, Final

from sqlalchemy import Dialect, text

from fencelock.authority.database.table import LEASE_TABLE
from fencelock.tokens import FORGED

SERVER_BITS: Final = 10  # bits of the server, by which the time is shifted

# Acquisitions and releases wait at most a second for a lock of another transaction on a row or SQLite's file.
_UPSERT: Final = """
INSERT INTO {table} AS l (resource, token, nonce, expires_at, holder, since)
SELECT CAST(:resource AS TEXT), {first}, CAST(:nonce AS TEXT),
    {until}, CAST(:holder AS TEXT), {now}
FROM (SELECT {durable} AS settings) AS its WHERE settings IS NOT NULL
ON CONFLICT (resource) DO UPDATE SET
    token = CASE WHEN l.nonce = excluded.nonce THEN l.token ELSE {later}({next}, excluded.token) END,
    nonce = excluded.nonce, expires_at = excluded.expires_at, holder = excluded.holder,
    since = excluded.since, queue = {pg}replace(l.queue, CAST(:world AS TEXT), '')
WHERE l.nonce IS NULL OR l.expires_at <= {now} OR l.nonce IN (excluded.nonce, CAST(:world AS TEXT))
"""
# `LAST_INSERT_ID(x)` stores x for the answer and for later expressions: the token, or 0 if another holder has
# the resource. At first x is the token that a new row would get. No assignment reads a column that an earlier
# one has changed. The function VALUES is not used, because MySQL deprecates it.
_ON_DUPLICATE_KEY: Final = """
INSERT INTO {table} (resource, token, nonce, expires_at, holder, since)
VALUES (:resource, LAST_INSERT_ID({first}), :nonce, {until}, :holder, {now})
ON DUPLICATE KEY UPDATE
    token = IF(nonce = :nonce, LAST_INSERT_ID(token),
               IF(nonce IS NULL OR nonce = :world OR expires_at <= {now},
                  LAST_INSERT_ID(GREATEST({next}, LAST_INSERT_ID())), token + LAST_INSERT_ID(0))),
    queue = IF(LAST_INSERT_ID() > 0, REPLACE(queue, :world, ''), queue),
    nonce = IF(LAST_INSERT_ID() > 0, :nonce, nonce),
    expires_at = IF(LAST_INSERT_ID() > 0, {until}, expires_at),
    holder = IF(LAST_INSERT_ID() > 0, :holder, holder),
    since = IF(LAST_INSERT_ID() > 0, {now}, since)
"""
_REMINT: Final = (
    "UPDATE {table} AS l SET token = {minted}, expires_at = {later}(expires_at, {until}) WHERE {held}"
)
_TRANSFER: Final = """
UPDATE {table} AS l SET token = {minted}, nonce = :next_nonce, expires_at = {until}, holder = :holder,
    since = {now} WHERE {held}{durably}"""
# A released resource is kept 0.1 seconds for the first name in `queue`: a world, or a caller of several
# resources (see `queues`). No assignment reads a column that an earlier one has changed.
_RELEASE: Final = """
UPDATE {table} SET expires_at = CASE WHEN COALESCE(queue, '') = '' THEN expires_at ELSE {moment} END,
    nonce = NULLIF({pg}substr(queue, 1, 8), ''), queue = {pg}substr(queue, 9) WHERE {ours}"""
_QUEUE_UP: Final = """
UPDATE {table} SET queue = CASE WHEN {joined} > 0 OR {pg}length(queue) > 240 THEN queue ELSE {longer} END
WHERE resource = :resource AND expires_at > {now} AND nonce <> :world"""
# PostgreSQL prefers exact types: it would run a function or operator of another role, in a schema of the
# search path, if it fits better than the one in `pg_catalog`. So functions are qualified, and operators have
# operands of exactly their types; `tests/authorities/test_search_path.py` creates all others.
_MS: Final = (
    "(CAST(EXTRACT(EPOCH FROM pg_catalog.{}()) AS DOUBLE PRECISION) * CAST(1000 AS DOUBLE PRECISION))"
)
#: Whether the table is of a role that can be trusted, because its triggers run as the role that locks. No row
#: if there is no table. SQLAlchemy's look at tables would run operators of the search path.
_TRUSTED: Final = """
SELECT NOT EXISTS (SELECT 1 FROM pg_catalog.pg_trigger WHERE tgrelid = pg_class.oid)
    AND NOT EXISTS (SELECT 1 FROM pg_catalog.pg_rewrite WHERE ev_class = pg_class.oid)
    AND (pg_catalog.pg_has_role(relowner, CAST('MEMBER' AS TEXT)) OR rolsuper OR relowner =
        (SELECT datdba FROM pg_catalog.pg_database WHERE datname = pg_catalog.current_database()))
FROM pg_catalog.pg_class JOIN pg_catalog.pg_roles ON pg_roles.oid = relowner
WHERE pg_class.oid = CAST(pg_catalog.to_regclass(CAST(:table AS TEXT)) AS OID)"""
_WORDS: Final[dict[str, dict[str, str]]] = {
    "postgresql": {
        "acquire": _UPSERT + "RETURNING token",
        "remint": _REMINT + "{durably} RETURNING token",
        "transfer": _TRANSFER + " RETURNING token",
        "durably": " AND {durable} IS NOT NULL",
        "release": _RELEASE + " AND {lazy} IS NOT NULL AND (COALESCE(queue, '') = '' "
        "OR pg_catalog.pg_notify('fencelock_' || pg_catalog.left(queue, 4), "
        "pg_catalog.left(queue, 8) || resource) IS NOT NULL) "
        "RETURNING resource, nonce",
        "moment": "{now} + INTERVAL '0.1 second'",
        "kept": "{now} + INTERVAL '0.5 second'",
        "lazily": " AND {lazy} IS NOT NULL",
        "queue_up": _QUEUE_UP + " AND {lazy} IS NOT NULL RETURNING {left}, {joined}",
        "joined": "pg_catalog.strpos(COALESCE(queue, ''), CAST(:world AS TEXT))",
        "begin": "BEGIN ISOLATION LEVEL READ COMMITTED",
        "standby": "pg_catalog.pg_is_in_recovery()",
        # A grant must outlive a crash and a failover, whatever the server does by default.
        "durable": "pg_catalog.set_config('lock_timeout', '1s', true) || CASE"
        " WHEN pg_catalog.current_setting('synchronous_commit') IN ('off', 'local', 'remote_write')"
        " THEN pg_catalog.set_config('synchronous_commit', 'on', true) ELSE '' END",
        # If a crash loses a release, the lease only lasts until its end.
        "lazy": "pg_catalog.set_config('lock_timeout', '1s', true)"
        " || pg_catalog.set_config('synchronous_commit', 'off', true)",
        "now": "pg_catalog.statement_timestamp()",
        "until": "pg_catalog.statement_timestamp() + CAST(:ttl AS DOUBLE PRECISION) * INTERVAL '1 second'",
        "left": "CAST(EXTRACT(EPOCH FROM expires_at - pg_catalog.statement_timestamp()) AS DOUBLE PRECISION)",
        "since": "CAST(EXTRACT(EPOCH FROM since) AS DOUBLE PRECISION)",
        "milliseconds": f"CAST({_MS.format('statement_timestamp')} AS BIGINT)",
        "server": f"CAST({_MS.format('pg_postmaster_start_time')} AS BIGINT) % CAST(1024 AS BIGINT)",
    },
    "mysql": {
        "acquire": _ON_DUPLICATE_KEY,
        "own": "token",
        "remint": "UPDATE {table} SET token = LAST_INSERT_ID({minted}), "
        "expires_at = {later}(expires_at, {until}) WHERE {held}",
        "transfer": "UPDATE {table} SET token = LAST_INSERT_ID({minted}), nonce = :next_nonce, "
        "expires_at = {until}, holder = :holder, since = {now} WHERE {held}",
        "begin": "START TRANSACTION",
        "now": "UTC_TIMESTAMP(6)",
        "until": "UTC_TIMESTAMP(6) + INTERVAL :ttl SECOND",
        "moment": "UTC_TIMESTAMP(6) + INTERVAL 100000 MICROSECOND",
        "kept": "UTC_TIMESTAMP(6) + INTERVAL 500000 MICROSECOND",
        "joined": "LOCATE(:world, COALESCE(queue, ''))",
        "longer": "CONCAT(COALESCE(queue, ''), :world)",
        "left": "TIMESTAMPDIFF(MICROSECOND, UTC_TIMESTAMP(6), expires_at) / 1e6",
        "since": "TIMESTAMPDIFF(MICROSECOND, '1970-01-01', since) / 1e6",
        "milliseconds": "TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6)) DIV 1000",
        "server": "MOD(@@server_id, 1024)",
        # MySQL refuses a subquery on the table that is written, unless it is a derived table.
        "noted": "COALESCE((SELECT m.token FROM (SELECT token FROM {table} "
        "WHERE resource = '' AND token < {forged} LIMIT 1) AS m), 0)",
    },
    "sqlite": {
        "acquire": _UPSERT,  # no RETURNING, because the file stays locked until its row is fetched
        "begin": "BEGIN IMMEDIATE",
        "durable": "1",
        "now": "strftime('%Y-%m-%d %H:%M:%f', 'now')",
        "until": "strftime('%Y-%m-%d %H:%M:%f', 'now', '+' || :ttl || ' seconds')",
        "moment": "strftime('%Y-%m-%d %H:%M:%f', 'now', '+0.1 seconds')",
        "kept": "strftime('%Y-%m-%d %H:%M:%f', 'now', '+0.5 seconds')",
        "joined": "instr(COALESCE(queue, ''), :world)",
        "left": "(julianday(expires_at) - julianday('now')) * 86400.0",
        "since": "(julianday(since) - 2440587.5) * 86400.0",
        "later": "MAX",
        "milliseconds": "CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER)",
        "server": "0",
    },
}
#: The statements for each new connection.
SET_UP: Final[dict[str, tuple[str, ...]]] = {
    # A server may begin another transaction after each COMMIT by default.
    "mysql": (
        "SET SESSION completion_type = 0, innodb_lock_wait_timeout = 1",
        "SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED",
    ),
    "sqlite": (
        "PRAGMA busy_timeout = 1000",
        "PRAGMA journal_mode = WAL",
        "PRAGMA synchronous = FULL",
        f"CREATE TABLE IF NOT EXISTS {LEASE_TABLE} (resource TEXT PRIMARY KEY, token INTEGER NOT NULL, "  # noqa: ISC004
        "nonce TEXT, expires_at TEXT, holder TEXT, since TEXT, queue TEXT, "
        "CHECK (typeof(token) = 'integer'))",
    ),
}


class Statement:
    """A statement for a driver. `:name` stands for a value, and `(:name…)` for a list of values."""

    def __init__(self, template: str, dialect: Dialect) -> None:
        self._template = template
        self._dialect = dialect
        self._lists = tuple(name for name in ("resources", "nonces") if f"(:{name}…)" in template)
        self._compiled = functools.lru_cache(32)(self._compile)

    def __str__(self) -> str:
        return self._template

    def of(self, values: dict[str, Any]) -> tuple[str, Any]:
        """Return the statement for the driver, and its values by name or in order."""
        sql, order = self._compiled(tuple(len(values[name]) for name in self._lists))
        if self._lists:
            listed = {f"{name}_{at}": each for name in self._lists for at, each in enumerate(values[name])}
            values = {**values, **listed}
        return sql, values if order is None else tuple(values[name] for name in order)

    def _compile(self, lengths: tuple[int, ...]) -> tuple[str, list[str] | None]:
        sql = self._template
        for name, length in zip(self._lists, lengths, strict=True):
            sql = sql.replace(f":{name}…", ", ".join(f":{name}_{at}" for at in range(length)))
        compiled: Any = text(sql).compile(dialect=self._dialect)
        return str(compiled), compiled.positiontup


#: Stands for the name of the table while templates are formatted, because the name may contain braces.
_NAME: Final = "\0"


class Statements:
    """The statements for a dialect and its table of leases, whose name is quoted where needed."""

    def __init__(self, dialect: str, table: str, driver: Dialect) -> None:
        words = {
            "remint": _REMINT,
            "transfer": _TRANSFER,
            "durably": "",
            "lazily": "",
            "text": "CHAR" if dialect == "mysql" else "TEXT",
            "release": _RELEASE,
            "queue_up": _QUEUE_UP,
            "longer": "COALESCE(queue, '') || CAST(:world AS TEXT)",
            "later": "GREATEST",
            "pg": "pg_catalog." if dialect == "postgresql" else "",
            "own": "l.token",
            "standby": "0",
            "noted": "COALESCE((SELECT m.token FROM {table} AS m "
            "WHERE m.resource = '' AND m.token < {forged}), 0)",
            "forged": str(FORGED),
            **_WORDS[dialect],
            "table": _NAME,
            "held": "resource = :resource AND nonce = :nonce",
            "ours": "resource IN (:resources…) AND nonce = :nonce",
            "of_grants": "resource IN (:resources…) AND nonce IN (:nonces…)",
            "time": "({noted} >> {bits}) + {milliseconds}",
            "first": "((({time}) << {bits}) | {server})",
            "next": "(((({own} >> {bits}) + 1) << {bits}) | {server})",
            "minted": "{later}({next}, {first})",
            "bits": str(SERVER_BITS),
        }

        doubles: bool = getattr(driver.identifier_preparer, "_double_percents", False)
        # `text` doubles each %, too
        name = (table.replace("%%", "%") if doubles else table).replace(":", r"\:")

        def said(template: str) -> Statement:
            while "{" in template:
                template = template.format(**words)
            return Statement(template.replace(_NAME, name), driver)

        self.begin: str = words["begin"]
        self.can_call: bool = dialect == "postgresql"  # whether a release calls the next world, by NOTIFY
        #: Returns the token if it acquires the resource: in a row, or as `lastrowid`. SQLite returns nothing.
        self.acquire: Statement = said(words["acquire"])
        #: A row for each held lock: resource, token, holder, Unix time of the grant, remaining seconds.
        holders = (
            "SELECT resource, token, holder, {since}, {left} FROM {table} "
            "WHERE {pg}length(nonce) = 32 AND expires_at > {now}"
        )
        self.holders_of: Statement = said(holders + " AND resource IN (:resources…) ORDER BY resource")
        self.holders: Statement = said(holders + " ORDER BY resource")
        #: A row for each resource that this world cannot acquire now: resource, remaining seconds, and the
        #: position of the world's name in `queue`, from 1 on; 0 if `queue` lacks the name.
        self.occupied: Statement = said(
            "SELECT resource, {left}, {joined} FROM {table} "
            "WHERE nonce IS NOT NULL AND nonce <> :world AND expires_at > {now} AND resource IN (:resources…)"
        )
        self.extend: Statement = said(
            "UPDATE {table} SET expires_at = {later}(expires_at, {until}) WHERE {of_grants}"
        )
        #: Moves the end of a lease, earlier or later.
        self.keep: Statement = said("UPDATE {table} SET expires_at = {until} WHERE {ours}{durably}")
        self.ours: Statement = said("SELECT resource, nonce FROM {table} WHERE {of_grants}")
        #: Joins the queue of a held resource; PostgreSQL also returns the seconds and position of `occupied`.
        self.queue_up: Statement = said(words["queue_up"])
        self.call: Statement = said("SELECT pg_catalog.pg_notify(:channel, '')")
        #: Keeps resources that are free, or kept for this caller, while the caller waits for another one.
        self.keep_free: Statement = said(
            "UPDATE {table} SET nonce = :world, expires_at = {kept} WHERE resource IN (:resources…) "
            "AND (nonce IS NULL OR nonce = :world OR expires_at <= {now}){lazily}"
        )
        self.leave_queue: Statement = said(
            "UPDATE {table} SET queue = {pg}replace(queue, CAST(:world AS {text}), '') "
            "WHERE resource IN (:resources…) AND {joined} > 0{lazily}"
        )
        self.is_standby: Statement = said("SELECT {standby}")
        #: Releases, and acquires for the next nonce; returns the token as `acquire` does.
        self.transfer: Statement = said(words["transfer"])
        self.remint: Statement = said(words["remint"])  # returns the token as `acquire` does
        self.token: Statement = said("SELECT token FROM {table} WHERE {held}")
        self.release: Statement = said(words["release"])
        self.force: Statement = said(
            "UPDATE {table} SET nonce = NULL WHERE resource = :resource AND token = :token"
        )
        self.is_trusted: Statement = said(_TRUSTED)  # for PostgreSQL
        #: The token that stores the base, the largest token, and the time of a token that is minted now.
        self.floor: Statement = said(
            "SELECT {noted}, COALESCE((SELECT {pg}max(token) FROM {table}), 0), {time}"
        )
        #: The last of the next names, in their order; NULL after the last one.
        self.batch: Statement = said(
            "SELECT {pg}max(resource) FROM (SELECT resource FROM {table} WHERE resource > :after "
            "ORDER BY resource LIMIT 2000) AS batch"
        )
        #: Deletes free rows with old tokens. New rows get larger ones if clocks differ by less than `age`.
        #: A token below the base shows no age, because it was minted with an earlier base.
        self.prune: Statement = said(
            "DELETE FROM {table} WHERE resource > :after AND resource <= :last "
            "AND (nonce IS NULL OR expires_at <= {now}) "
            "AND (token >> {bits}) BETWEEN {noted} >> {bits} AND {time} - :age"
        )
        self.forget: Statement = said("DELETE FROM {table} WHERE resource = ''")
        self.note: Statement = said("INSERT INTO {table} (resource, token) VALUES ('', :token)")
