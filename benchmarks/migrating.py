"""What it costs to fence a table of a million rows that is in use: the numbers of benchmarks/migrating.md.

Beside the migration one writer goes on updating single rows, each in a transaction of its own. Shown are how
long the operation took, the longest that the writer was kept waiting meanwhile, and whether the table was
rewritten: is it another file (PostgreSQL), another table inside (MariaDB), or is half as much in the log as
in the rows (SQLite, in WAL mode)? The last line of each database is one that is known to rewrite it.

    python -m benchmarks.migrating
    python -m benchmarks.migrating --docs benchmarks/migrating.md    # writes the table into it
"""

from __future__ import annotations

import argparse
import os
import platform
import secrets
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from alembic.migration import MigrationContext
from alembic.operations import Operations
from alembic.operations.ops import ExecuteSQLOp, MigrateOperation
from sqlalchemy import Connection, Engine, NullPool, create_engine, event, make_url, text
from sqlalchemy.exc import DBAPIError

from fencelock.alembic.operations import AddFenceOp, CreateFenceTriggerOp, DropFenceOp
from proof.servers import Postgres

MARIADB: Final = os.environ.get("FENCELOCK_TEST_MARIADB_URL", "mysql+pymysql://root@127.0.0.1:3306/")
BEGIN: Final = "<!-- measured: python -m benchmarks.migrating --docs benchmarks/migrating.md -->"
END: Final = "<!-- end -->"
OPERATIONS: Final[dict[str, MigrateOperation]] = {
    '`op.add_fence("orders")`': AddFenceOp("orders"),
    '`op.create_fence_trigger("orders", strict=True)`': CreateFenceTriggerOp("orders", trigger="strict"),
    '`op.create_fence_trigger("orders")`': CreateFenceTriggerOp("orders", trigger=True),
    '`op.drop_fence("orders")`': DropFenceOp("orders"),
}
FILL: Final = {
    "postgresql": "INSERT INTO orders SELECT n, 'open', repeat('x', 80) FROM generate_series(1, {rows}) n",
    "mysql": "INSERT INTO orders SELECT seq, 'open', repeat('x', 80) FROM seq_1_to_{rows}",
    "sqlite": "WITH RECURSIVE numbers(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM numbers WHERE n < {rows}) "
    "INSERT INTO orders SELECT n, 'open', printf('%.80c', 'x') FROM numbers",
}
REWRITE: Final = {
    "postgresql": "ALTER TABLE orders ALTER COLUMN id TYPE BIGINT",
    "mysql": "ALTER TABLE orders MODIFY COLUMN id BIGINT",
    "sqlite": "UPDATE orders SET note = note || 'y'",
}
IDENTITY: Final = {
    "postgresql": "SELECT pg_relation_filenode('orders')",
    "mysql": "SELECT table_id FROM information_schema.innodb_sys_tables WHERE name = "
    "CONCAT(DATABASE(), '/orders')",
}


@dataclass(frozen=True, slots=True)
class Measured:
    """One operation on one database: how long it took, and how long the writer waited."""

    database: str
    operation: str
    seconds: float
    longest_wait: float
    rewritten: bool

    def row(self) -> str:
        """Return it as a row of the table."""
        return (
            f"| {self.database} | {self.operation} | {_time(self.seconds)} | {_time(self.longest_wait)} "
            f"| {'**yes**' if self.rewritten else 'no'} |"
        )


def _time(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms" if seconds < 1 else f"{seconds:.1f} s"


class Writer(threading.Thread):
    """Updates one row after the other, and notes how long each took."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(daemon=True)
        self._engine = engine
        self._stop_soon = threading.Event()
        self.seconds: list[float] = []

    def run(self) -> None:
        """Write until the end."""
        number = 0
        while not self._stop_soon.wait(0.001):
            number = number % 1000 + 1
            begun = time.perf_counter()
            with suppress(DBAPIError), self._engine.begin() as connection:
                status = text("UPDATE orders SET status = 'paid' WHERE id = :id")
                connection.execute(status, {"id": number})
            self.seconds.append(time.perf_counter() - begun)

    def end(self) -> None:
        """Stop and wait for it."""
        self._stop_soon.set()
        self.join()


def database_name(connection: Connection) -> str:
    """Return what the database calls itself, with its version."""
    if connection.dialect.name == "sqlite":
        return f"SQLite {connection.scalar(text('SELECT sqlite_version()'))}"
    version = str(connection.scalar(text("SELECT version()")))
    return " ".join(version.split()[:2]) if "Postgre" in version else f"MariaDB {version.split('-', 1)[0]}"


def state(engine: Engine, path: Path | None) -> int:
    """Return what changes when a table is rewritten: the number of its file, or how much is in the log."""
    if path is not None:
        return Path(f"{path}-wal").stat().st_size
    with engine.connect() as connection:
        return int(connection.scalar(text(IDENTITY[connection.dialect.name])) or 0)


def measure(engine: Engine, rows: int, path: Path | None) -> Iterator[Measured]:
    """Run the operations, each beside a writer."""
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE orders (id INT PRIMARY KEY, status VARCHAR(20), note TEXT)"))
        connection.execute(text(FILL[connection.dialect.name].format(rows=rows)))
        name = database_name(connection)
    if engine.dialect.name == "postgresql":
        with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            connection.execute(text("VACUUM ANALYZE orders"))
    rewrite = REWRITE[engine.dialect.name]
    for shown, operation in {**OPERATIONS, f"for comparison: `{rewrite}`": ExecuteSQLOp(rewrite)}.items():
        writer = Writer(engine)
        writer.start()
        time.sleep(0.5)
        before = state(engine, path)
        already = len(writer.seconds)
        begun = time.perf_counter()
        with engine.begin() as connection:
            Operations(MigrationContext.configure(connection)).invoke(operation)
        seconds = time.perf_counter() - begun
        time.sleep(0.2)
        change = state(engine, path) - before
        writer.end()
        rewritten = change != 0 if path is None else change > rows * 50
        yield Measured(name, shown, seconds, max(writer.seconds[already:]), rewritten=rewritten)


@contextmanager
def sqlite_database() -> Iterator[tuple[Engine, Path | None]]:
    """Yield a database in a file, in WAL mode."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "orders.sqlite"
        engine = create_engine(f"sqlite:///{path}", connect_args={"timeout": 60})

        @event.listens_for(engine, "connect")
        def _use_wal(connection: object, _record: object) -> None:
            connection.execute("PRAGMA journal_mode = WAL")  # type: ignore[attr-defined]
            connection.execute("PRAGMA wal_autocheckpoint = 0")  # type: ignore[attr-defined]

        yield engine, path
        engine.dispose()


@contextmanager
def postgresql_database() -> Iterator[tuple[Engine, Path | None]]:
    """Yield a database of a server of our own."""
    with Postgres() as server:
        engine = create_engine(server.create_database())
        yield engine, None
        engine.dispose()


@contextmanager
def mariadb_database() -> Iterator[tuple[Engine, Path | None]]:
    """Yield a database on the MariaDB that the tests use."""
    name = f"fencelock_bench_{secrets.token_hex(4)}"
    server = create_engine(make_url(MARIADB), poolclass=NullPool, isolation_level="AUTOCOMMIT")
    with server.connect() as connection:
        connection.execute(text(f"CREATE DATABASE {name}"))
    engine = create_engine(make_url(MARIADB).set(database=name))
    try:
        yield engine, None
    finally:
        engine.dispose()
        with server.connect() as connection:
            connection.execute(text(f"DROP DATABASE {name}"))


def main() -> None:
    """Measure, print, and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--docs", type=Path, metavar="FILE", help="write the table into it")
    options = parser.parse_args()
    lines = [
        f"{options.rows:,} rows, {os.cpu_count()} cores, {platform.system()}:",
        "",
        "| database | operation | took | longest wait of a writer | table rewritten |",
        "|---|---|---|---|---|",
    ]
    for opened in (postgresql_database, mariadb_database, sqlite_database):
        with opened() as (engine, path):
            for found in measure(engine, options.rows, path):
                print(found.row(), file=sys.stderr)
                lines.append(found.row())
    table = "\n".join(lines)
    print(table)
    if options.docs:
        before, _, rest = options.docs.read_text().partition(BEGIN)
        _, _, after = rest.partition(END)
        options.docs.write_text(f"{before}{BEGIN}\n{table}\n{END}{after}")


if __name__ == "__main__":
    main()
