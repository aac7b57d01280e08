"""What is said to each database. A statement reads the clock once, and the clock is the database's.

A new token exceeds the last one of its resource, and the floor of this database: an epoch, and the time in
Unix milliseconds. The epoch is what `init(above=…)` has noted in the row of no resource and, on PostgreSQL,
the timeline: a standby that is promoted may not have received what was granted last, and begins another
timeline. MariaDB has none. There a row notes which server has minted its token, and another server leaves a
gap.
"""

from __future__ import annotations

from typing import Final

from sqlalchemy import TextClause, bindparam, text

from fencelock.authority.database.table import LEASE_TABLE
from fencelock.tokens import COUNTER_BITS

# Each statement waits a second for a row, or a file, that another transaction has locked.
_UPSERT: Final = """
INSERT INTO {table} AS l (resource, token, nonce, expires_at, holder, since)
SELECT CAST(:resource AS VARCHAR), {floor}, CAST(:nonce AS VARCHAR),
    {until}, CAST(:holder AS VARCHAR), {now}
FROM (SELECT {settings} AS settings) AS its WHERE settings IS NOT NULL
ON CONFLICT (resource) DO UPDATE SET
    token = CASE WHEN l.nonce = excluded.nonce THEN l.token ELSE {later}(l.token + 1, excluded.token) END,
    nonce = excluded.nonce, expires_at = excluded.expires_at, holder = excluded.holder, since = excluded.since
WHERE l.nonce IS NULL OR l.expires_at <= {now} OR l.nonce = excluded.nonce
"""
# MariaDB assigns from left to right, and later assignments see what the earlier ones have made.
_ON_DUPLICATE_KEY: Final = """
SET STATEMENT innodb_lock_wait_timeout = 1 FOR
INSERT INTO {table} (resource, token, nonce, expires_at, holder, since, incarnation)
VALUES (:resource, {floor}, :nonce, {until}, :holder, {now}, @@server_id)
ON DUPLICATE KEY UPDATE
    token = IF(nonce IS NULL OR (nonce <> VALUES(nonce) AND expires_at <= {now}),
               GREATEST(token + IF(incarnation <=> @@server_id, 1, 1 << 32), VALUES(token)), token),
    nonce = IF(nonce IS NULL OR expires_at <= {now}, VALUES(nonce), nonce),
    holder = IF(nonce = VALUES(nonce), VALUES(holder), holder),
    since = IF(nonce = VALUES(nonce), VALUES(since), since),
    incarnation = IF(nonce = VALUES(nonce), VALUES(incarnation), incarnation),
    expires_at = IF(nonce = VALUES(nonce), VALUES(expires_at), expires_at)
RETURNING token, nonce
"""
_WORDS: Final[dict[str, dict[str, str]]] = {
    "postgresql": {
        "acquire": _UPSERT + "RETURNING token, nonce",
        "begin": "BEGIN ISOLATION LEVEL READ COMMITTED",
        # What is granted must outlive a crash, whatever the server does by default.
        "settings": "set_config('lock_timeout', '1s', true) || CASE current_setting('synchronous_commit')"
        " WHEN 'off' THEN set_config('synchronous_commit', 'on', true) ELSE '' END",
        "now": "statement_timestamp()",
        "until": "statement_timestamp() + CAST(:ttl AS DOUBLE PRECISION) * INTERVAL '1 second'",
        "left": "CAST(EXTRACT(EPOCH FROM expires_at - statement_timestamp()) AS DOUBLE PRECISION)",
        "since": "CAST(EXTRACT(EPOCH FROM since) AS DOUBLE PRECISION)",
        "later": "GREATEST",
        "milliseconds": "CAST(EXTRACT(EPOCH FROM statement_timestamp()) * 1000 AS BIGINT)",
        "timeline": "('x' || left(pg_walfile_name(pg_current_wal_insert_lsn()), 8))::bit(32)::bigint",
    },
    "mysql": {
        "acquire": _ON_DUPLICATE_KEY,
        "begin": "SET TRANSACTION ISOLATION LEVEL READ COMMITTED; BEGIN",
        "now": "UTC_TIMESTAMP(6)",
        "until": "UTC_TIMESTAMP(6) + INTERVAL :ttl SECOND",
        "left": "TIMESTAMPDIFF(MICROSECOND, UTC_TIMESTAMP(6), expires_at) / 1e6",
        "since": "TIMESTAMPDIFF(MICROSECOND, '1970-01-01', since) / 1e6",
        "later": "GREATEST",
        "milliseconds": "TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6)) DIV 1000",
    },
    "sqlite": {
        "acquire": _UPSERT,  # what it returned would keep the file locked until it is fetched
        "begin": "BEGIN IMMEDIATE",
        "settings": "1",
        "now": "strftime('%Y-%m-%d %H:%M:%f', 'now')",
        "until": "strftime('%Y-%m-%d %H:%M:%f', 'now', '+' || :ttl || ' seconds')",
        "left": "(julianday(expires_at) - julianday('now')) * 86400.0",
        "since": "(julianday(since) - 2440587.5) * 86400.0",
        "later": "MAX",
        "milliseconds": "CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER)",
    },
}
#: What a new connection to a file of leases is told. A crash of the machine forgets nothing.
SQLITE_SET_UP: Final = (
    "PRAGMA busy_timeout = 1000",
    "PRAGMA journal_mode = WAL",
    "PRAGMA synchronous = FULL",
    f"CREATE TABLE IF NOT EXISTS {LEASE_TABLE} (resource TEXT PRIMARY KEY, token INTEGER NOT NULL, "  # noqa: ISC004
    "nonce TEXT, expires_at TEXT, holder TEXT, since TEXT, CHECK (typeof(token) = 'integer'))",
)


class Statements:
    """What is said to a database of this dialect, about its table of leases (quoted where that has to be)."""

    def __init__(self, dialect: str, table: str) -> None:
        words = {
            "table": table,
            "held": "resource = :resource AND nonce = :nonce",
            "of_grants": "resource IN :resources AND nonce IN :nonces",
            "noted": f"COALESCE((SELECT token FROM {table} AS m WHERE m.resource = ''), 0)",  # noqa: S608
            "epoch": str(1 << COUNTER_BITS),
            "timeline": "1",
            **_WORDS[dialect],
        }
        words["from"] = "{noted} + ({timeline} - 1) * {epoch}".format(**words)
        words["floor"] = "{from} + {milliseconds}".format(**words)

        def said(template: str, *lists: str) -> TextClause:
            clause = text(template.format(**words))
            return clause.bindparams(*(bindparam(name, expanding=True) for name in lists))

        self.begin = words["begin"].split("; ")
        #: May return a row, with our nonce if the resource is ours. On SQLite it returns none.
        self.acquire = said(words["acquire"])
        #: For how many seconds the resource is still held; NULL, or no row, where it is free.
        self.left = said(
            "SELECT CASE WHEN nonce IS NOT NULL THEN {left} END FROM {table} WHERE resource = :resource"
        )
        #: Of the locks that are held: resource, token, holder, since when in Unix time, and how many seconds.
        holders = (
            "SELECT resource, token, holder, {since}, {left} FROM {table} "
            "WHERE nonce IS NOT NULL AND expires_at > {now}"
        )
        self.holder = said(holders + " AND resource = :resource")
        self.holders = said(holders + " ORDER BY resource")
        self.extend = said(
            "UPDATE {table} SET expires_at = {later}(expires_at, {until}) WHERE {of_grants}",
            "resources",
            "nonces",
        )
        self.ours = said("SELECT resource, nonce FROM {table} WHERE {of_grants}", "resources", "nonces")
        self.remint = said(
            "UPDATE {table} SET token = token + 1, expires_at = {later}(expires_at, {until}) WHERE {held}"
        )
        self.token = said("SELECT token, nonce FROM {table} WHERE {held}")
        self.release = said("UPDATE {table} SET nonce = NULL WHERE {held}")
        self.force = said("UPDATE {table} SET nonce = NULL WHERE resource = :resource")
        #: What the row of no resource notes, and above what tokens are minted now.
        self.floor = said("SELECT {noted}, {from}")
        self.forget = said("DELETE FROM {table} WHERE resource = ''")
        self.note = said("INSERT INTO {table} (resource, token) VALUES ('', :token)")
