"""What is said to each database. A statement reads the clock once, and the clock is the database's.

A new token exceeds the last one of its resource, what a storage has seen (`above`), and the beginning of this
database's tokens. That is an epoch and the time in Unix milliseconds. The epoch is what `init(above=…)` has
noted in the row of no resource and, on PostgreSQL, the timeline: a standby that is promoted may not have
received what was granted last, and begins another timeline. MariaDB has none; there a row notes which server
has minted its token, and another server leaves a gap.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from sqlalchemy import TextClause, bindparam, text

from fencelock.authority.database.table import LEASE_TABLE
from fencelock.token import COUNTER_BITS

#: Tokens that are left out where another server of MariaDB goes on.
_GAP: Final = 1 << 32
#: Seconds that a statement waits for a row that another transaction has locked.
_PATIENCE: Final = 1

_POSTGRESQL: Final = """
INSERT INTO {table} AS l (resource, token, nonce, expires_at, holder, since)
SELECT CAST(:resource AS VARCHAR), GREATEST(CAST(:above AS BIGINT) + 1, {floor}), CAST(:nonce AS VARCHAR),
    {until}, CAST(:holder AS VARCHAR), {now}
FROM (SELECT set_config('lock_timeout', '{patience}s', true) AS patience) AS its WHERE patience IS NOT NULL
ON CONFLICT (resource) DO UPDATE SET
    token = CASE WHEN l.nonce = excluded.nonce THEN l.token ELSE GREATEST(l.token + 1, excluded.token) END,
    nonce = excluded.nonce, expires_at = excluded.expires_at, holder = excluded.holder, since = excluded.since
WHERE l.nonce IS NULL OR l.expires_at <= {now} OR l.nonce = excluded.nonce
RETURNING token, nonce, {durable}
"""
_SQLITE: Final = """
INSERT INTO {table} AS l (resource, token, nonce, expires_at, holder, since)
VALUES (:resource, MAX(:above + 1, {floor}), :nonce, {until}, :holder, {now})
ON CONFLICT (resource) DO UPDATE SET
    token = CASE WHEN l.nonce = excluded.nonce THEN l.token ELSE MAX(l.token + 1, excluded.token) END,
    nonce = excluded.nonce, expires_at = excluded.expires_at, holder = excluded.holder, since = excluded.since
WHERE l.nonce IS NULL OR l.expires_at <= {now} OR l.nonce = excluded.nonce
RETURNING token, nonce
"""
# MariaDB assigns from left to right, and later assignments see what the earlier ones have made.
_MARIADB: Final = """
SET STATEMENT innodb_lock_wait_timeout = {patience} FOR
INSERT INTO {table} (resource, token, nonce, expires_at, holder, since, incarnation)
VALUES (:resource, GREATEST(:above + 1, {floor}), :nonce, {until}, :holder, {now}, @@server_id)
ON DUPLICATE KEY UPDATE
    token = IF(nonce IS NULL OR (nonce <> VALUES(nonce) AND expires_at <= {now}),
               GREATEST(token + IF(incarnation <=> @@server_id, 1, {gap}), VALUES(token)), token),
    nonce = IF(nonce IS NULL OR expires_at <= {now}, VALUES(nonce), nonce),
    holder = IF(nonce = VALUES(nonce), VALUES(holder), holder),
    since = IF(nonce = VALUES(nonce), VALUES(since), since),
    incarnation = IF(nonce = VALUES(nonce), VALUES(incarnation), incarnation),
    expires_at = IF(nonce = VALUES(nonce), VALUES(expires_at), expires_at)
RETURNING token, nonce
"""
#: What a new connection to a file of leases is told. A crash of the machine forgets nothing.
SQLITE_SET_UP: Final = (
    f"PRAGMA busy_timeout = {_PATIENCE * 1000}",
    "PRAGMA journal_mode = WAL",
    "PRAGMA synchronous = FULL",
    (
        f"CREATE TABLE IF NOT EXISTS {LEASE_TABLE} (resource TEXT PRIMARY KEY, "
        "token INTEGER NOT NULL CHECK (typeof(token) = 'integer'), nonce TEXT, expires_at TEXT, holder TEXT, "
        "since TEXT, incarnation INTEGER)"
    ),
)
_NOTED: Final = "COALESCE((SELECT token FROM {table} AS m WHERE m.resource = ''), 0)"
_DIALECTS: Final[dict[str, dict[str, str]]] = {
    "postgresql": {
        "acquire": _POSTGRESQL,
        "now": "statement_timestamp()",
        "until": "statement_timestamp() + CAST(:ttl AS DOUBLE PRECISION) * INTERVAL '1 second'",
        "left": "CAST(EXTRACT(EPOCH FROM expires_at - statement_timestamp()) AS DOUBLE PRECISION)",
        "later": "GREATEST",
        "milliseconds": "CAST(EXTRACT(EPOCH FROM statement_timestamp()) * 1000 AS BIGINT)",
        "timeline": (
            "CAST(CAST('x' || left(pg_walfile_name(pg_current_wal_insert_lsn()), 8) AS BIT(32)) AS BIGINT)"
        ),
        # What is granted must not be forgotten in a crash, whatever the server does by default.
        "durable": (
            "CASE current_setting('synchronous_commit') WHEN 'off' THEN"
            " set_config('synchronous_commit', 'on', true) END"
        ),
    },
    "mysql": {
        "acquire": _MARIADB,
        "now": "UTC_TIMESTAMP(6)",
        "until": "UTC_TIMESTAMP(6) + INTERVAL :ttl SECOND",
        "left": "TIMESTAMPDIFF(MICROSECOND, UTC_TIMESTAMP(6), expires_at) / 1e6",
        "later": "GREATEST",
        "milliseconds": "TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6)) DIV 1000",
        "timeline": "1",
    },
    "sqlite": {
        "acquire": _SQLITE,
        "now": "strftime('%Y-%m-%d %H:%M:%f', 'now')",
        "until": "strftime('%Y-%m-%d %H:%M:%f', 'now', '+' || :ttl || ' seconds')",
        "left": "(julianday(expires_at) - julianday('now')) * 86400.0",
        "later": "MAX",
        "milliseconds": "CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER)",
        "timeline": "1",
    },
}

_NOTES: Final[dict[str, str]] = {
    "postgresql": "INSERT INTO {table} AS l (resource, token) VALUES ('', :token)"
    " ON CONFLICT (resource) DO UPDATE SET token = GREATEST(l.token, excluded.token)",
    "mysql": "INSERT INTO {table} (resource, token) VALUES ('', :token)"
    " ON DUPLICATE KEY UPDATE token = GREATEST(token, VALUES(token))",
    "sqlite": "INSERT INTO {table} AS l (resource, token) VALUES ('', :token)"
    " ON CONFLICT (resource) DO UPDATE SET token = MAX(l.token, excluded.token)",
}


@dataclass(frozen=True, slots=True)
class Statements:
    """What an authority says to its database.

    Attributes:
        acquire: takes :resource, :nonce, :ttl, :holder and :above; returns (token, nonce) where a row was
            written, and on MariaDB always. The resource is held if that is the nonce that was given.
        left: takes :resource; returns the seconds for which it is still held, or NULL; no row where it is
            new.
        extend: takes :resources, :nonces and :ttl.
        ours: takes :resources and :nonces; returns those (resource, nonce) that are still held.
        remint: takes :resource, :nonce and :ttl.
        token: takes :resource and :nonce; returns the token.
        release: takes :resource and :nonce.
        begin: returns what the row of no resource notes, and where the tokens that are minted now begin.
        note: takes :token, and notes it in the row of no resource, unless that has a larger one.
    """

    acquire: TextClause
    left: TextClause
    extend: TextClause
    ours: TextClause
    remint: TextClause
    token: TextClause
    release: TextClause
    begin: TextClause
    note: TextClause


def statements(dialect: str, table: str = LEASE_TABLE, *, timeline: str = "") -> Statements:
    """Return what is said to a database.

    Args:
        dialect: its name.
        table: its table of leases, quoted where that has to be.
        timeline: an expression in place of PostgreSQL's, where the server has none.
    """
    words = {"table": table, "patience": str(_PATIENCE), "gap": str(_GAP), **_DIALECTS[dialect]}
    if timeline:
        words["timeline"] = timeline
    noted = _NOTED.format(**words)
    begin = f"{noted} + ({words['timeline']} - 1) * {1 << COUNTER_BITS}"
    words["floor"] = f"{begin} + {words['milliseconds']}"
    words["of_grants"] = "resource IN :resources AND nonce IN :nonces"
    words["held"] = "resource = :resource AND nonce = :nonce"

    def said(template: str, *expanding: str) -> TextClause:
        clause = text(template.format(**words))
        return clause.bindparams(*(bindparam(name, expanding=True) for name in expanding))

    return Statements(
        acquire=said(words["acquire"]),
        left=said(
            "SELECT CASE WHEN nonce IS NOT NULL THEN {left} END FROM {table} WHERE resource = :resource"
        ),
        extend=said(
            "UPDATE {table} SET expires_at = {later}(expires_at, {until}) WHERE {of_grants}",
            "resources",
            "nonces",
        ),
        ours=said("SELECT resource, nonce FROM {table} WHERE {of_grants}", "resources", "nonces"),
        remint=said(
            "UPDATE {table} SET token = token + 1, expires_at = {later}(expires_at, {until}) WHERE {held}"
        ),
        token=said("SELECT token FROM {table} WHERE {held}"),
        release=said("UPDATE {table} SET nonce = NULL WHERE {held}"),
        begin=text(f"SELECT {noted}, {begin}"),
        note=said(_NOTES[dialect]),
    )
