"""The migrations run to and fro, by Alembic's own command line on real databases."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import psycopg
import pymysql
import pytest
from alembic.config import main
from alembic.migration import MigrationContext
from alembic.operations import Operations
from pymysql.constants import CLIENT
from sqlalchemy import Engine, String, inspect, make_url, select, text
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from fencelock import FencedModel, FenceError, Lease, UnfencedWriteError, bind, claim

pytestmark = pytest.mark.usefixtures("alembic_plugin")

ROOT = Path(__file__).parent.parent
DIALECT_URLS = {
    "sqlite": "sqlite://",
    "postgresql": "postgresql+psycopg://",
    "mysql": "mysql+pymysql://",
    "mariadb": "mariadb+pymysql://",
}


class Base(DeclarativeBase):
    """The models of a program that runs on the migrated database."""


class Order(FencedModel, Base):
    """What the program knows of the orders."""

    __tablename__ = "shop_orders"
    __fence_resource__ = "order:{id}"

    id: Mapped[int] = mapped_column(primary_key=True)
    status: Mapped[str] = mapped_column(String(20))
    total_cents: Mapped[int]


def alembic(url: str, *arguments: str) -> None:
    """Run Alembic's command line in this process; it exits where it fails."""
    main(["-c", str(ROOT / "alembic.ini"), "-x", f"url={url}", *arguments], prog="alembic")


def execute(engine: Engine, sql: str) -> None:
    """Execute SQL as a program does that has never heard of fencelock."""
    with engine.begin() as connection:
        connection.execute(text(sql), execution_options={"fencelock": "bypass"})


def schema(engine: Engine) -> dict[str, Any]:
    """Return the schema of the database, apart from Alembic's own table."""
    inspector = inspect(engine)
    found: dict[str, Any] = {
        table: {
            "columns": [(c["name"], str(c["type"]), c["nullable"], c["default"]) for c in columns],
            "key": inspector.get_pk_constraint(table)["constrained_columns"],
            "indexes": [(i["name"], i["column_names"]) for i in inspector.get_indexes(table)],
        }
        for (_, table), columns in inspector.get_multi_columns().items()
        if table != "alembic_version"
    }
    if engine.dialect.supports_sequences:
        found.update(dict.fromkeys(inspector.get_sequence_names()))
    return found


def test_migrations_lead_to_the_models_and_back(engine: Engine, database_url: str) -> None:
    """`upgrade head` makes what the models say, `downgrade base` leaves nothing, and again."""
    alembic(database_url, "upgrade", "head")
    alembic(database_url, "check")
    migrated = schema(engine)
    assert {"shop_orders", "shop_stock_items", "fencelock_fences"} <= migrated.keys()

    alembic(database_url, "downgrade", "base")
    assert schema(engine) == {}

    alembic(database_url, "upgrade", "head")
    assert schema(engine) == migrated


def test_program_that_knows_no_fence_goes_on_working(engine: Engine, database_url: str) -> None:
    """The column's default lets old programs insert and update between migration and deployment."""
    alembic(database_url, "upgrade", "head")
    execute(engine, "INSERT INTO shop_stock_items (id, name, quantity) VALUES (1, 'tea pot', 3)")
    execute(engine, "UPDATE shop_stock_items SET quantity = 2 WHERE id = 1")
    with engine.connect() as connection:
        (item,) = connection.execute(text("SELECT * FROM shop_stock_items")).all()
    assert tuple(item) == (1, "tea pot", 2, 0, 0)


def test_resources_that_differ_in_case_have_fences_of_their_own(engine: Engine, database_url: str) -> None:
    """The migrated fence table compares resources exactly, whatever the database's default collation."""
    alembic(database_url, "upgrade", "head")
    execute(
        engine,
        "INSERT INTO fencelock_fences (resource, last_fencing_token)"
        " VALUES ('order:a', 1), ('order:A', 2), ('order:ä', 3)",
    )
    with engine.connect() as connection:
        found = connection.scalar(
            text("SELECT last_fencing_token FROM fencelock_fences WHERE resource = 'order:A'")
        )
    assert found == 2


@pytest.mark.parametrize(
    ("wrong", "operation"),
    [
        (None, "add_column"),
        ("INTEGER DEFAULT 0 NOT NULL", "modify_type"),
        ("BIGINT DEFAULT 7 NOT NULL", "modify_default"),
        ("BIGINT DEFAULT 0", "modify_nullable"),
    ],
)
def test_check_notices_a_wrong_fence(
    engine: Engine, database_url: str, wrong: str | None, operation: str, caplog: pytest.LogCaptureFixture
) -> None:
    """`alembic check` fails where the column is missing, or not `BIGINT NOT NULL DEFAULT 0`."""
    alembic(database_url, "upgrade", "head")
    execute(engine, "ALTER TABLE shop_orders DROP COLUMN last_fencing_token")
    if wrong:
        execute(engine, f"ALTER TABLE shop_orders ADD COLUMN last_fencing_token {wrong}")
    with pytest.raises(SystemExit):
        alembic(database_url, "check")
    assert f"New upgrade operations detected: [('{operation}'" in caplog.text.replace("[[", "[")


def test_unmigrated_table_is_named_as_such(engine: Engine, database_url: str) -> None:
    """A fenced model on a table without the columns: one clear error, for reads and claims alike."""
    alembic(database_url, "upgrade", "head")
    for column in ("last_fencing_token", "last_write_id"):
        execute(engine, f"ALTER TABLE shop_orders DROP COLUMN {column}")
    execute(engine, "INSERT INTO shop_orders (id, status, total_cents) VALUES (1, 'open', 500)")
    with Session(engine) as session:
        with pytest.raises(FenceError, match=r"last_fencing_token.* migration"):
            session.scalars(select(Order)).all()
        session.rollback()
        bind(session, Lease("order:1", 1))
        with pytest.raises(FenceError, match=r"last_fencing_token.* migration"):
            claim(session, Order, 1)


def test_data_migration_says_that_it_goes_around_the_fence(engine: Engine, database_url: str) -> None:
    """`op.execute` on a fenced table is refused, and passes with the option that migrations/env.py names."""
    alembic(database_url, "upgrade", "head")
    execute(engine, "INSERT INTO shop_orders (id, status, total_cents) VALUES (1, 'open', 500)")
    with engine.connect() as connection:
        operations = Operations(MigrationContext.configure(connection))
        with pytest.raises(UnfencedWriteError):
            operations.execute("UPDATE shop_orders SET status = 'old'")
    with engine.begin() as connection:
        operations = Operations(MigrationContext.configure(connection))
        operations.execute("UPDATE shop_orders SET status = 'old'", execution_options={"fencelock": "bypass"})
    with engine.connect() as connection:
        assert connection.scalar(text("SELECT status FROM shop_orders")) == "old"


@pytest.mark.parametrize("dialect", DIALECT_URLS)
def test_script_fences_tables_without_touching_their_rows(
    dialect: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--sql` needs no database, and adds each fence with one ALTER TABLE that has a constant default."""
    alembic(DIALECT_URLS[dialect], "upgrade", "head", "--sql")
    script = capsys.readouterr().out
    in_mysql = dialect in {"mysql", "mariadb"}
    fence = "last_fencing_token BIGINT " + ("NOT NULL DEFAULT 0" if in_mysql else "DEFAULT 0 NOT NULL")
    for table in ("shop_orders", "shop_stock_items"):
        assert f"ALTER TABLE {table} ADD COLUMN {fence};" in script
    assert "CREATE TABLE fencelock_fences" in script
    assert script.count(fence) == 3
    assert "UPDATE " not in script
    assert ("resource VARCHAR(255) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin" in script) == in_mysql


def test_scripts_do_what_the_migrations_do(
    engine: Engine, database_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """What `--sql` prints runs as it is through the bare driver, and the result checks clean."""
    alembic(database_url, "upgrade", "head", "--sql")
    run_script(database_url, capsys.readouterr().out)
    alembic(database_url, "check")
    capsys.readouterr()
    alembic(database_url, "downgrade", "head:base", "--sql")
    run_script(database_url, capsys.readouterr().out)
    assert schema(engine) == {}


def run_script(database_url: str, script: str) -> None:
    """Run SQL statements through the database's driver."""
    url = make_url(database_url)
    if url.get_backend_name() == "sqlite":
        connection = sqlite3.connect(url.database or "")
        connection.executescript(script)
        connection.close()
    elif url.get_backend_name() == "postgresql":
        with psycopg.connect(database_url.replace("+psycopg", ""), autocommit=True) as postgres:
            postgres.execute(script.encode())
    else:
        with (
            pymysql.connect(
                host=url.host,
                port=url.port or 3306,
                user=url.username,
                password=url.password or "",
                database=url.database,
                client_flag=CLIENT.MULTI_STATEMENTS,
                autocommit=True,
            ) as server,
            server.cursor() as cursor,
        ):
            cursor.execute(script)
            while cursor.nextset():
                pass


def command_line(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `alembic` in the checkout."""
    kept = {name: value for name, value in os.environ.items() if name != "FENCELOCK_DATABASE_URL"}
    return subprocess.run(
        [sys.executable, "-m", "alembic", *arguments],
        cwd=ROOT,
        env={**kept, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_url_comes_from_the_environment(tmp_path: Path) -> None:
    """`alembic upgrade head` in the checkout migrates what FENCELOCK_DATABASE_URL names, and says so."""
    url = f"sqlite:///{tmp_path / 'shop.sqlite'}"
    ended = command_line("upgrade", "head", FENCELOCK_DATABASE_URL=url)
    assert ended.returncode == 0, ended.stderr
    assert "Running upgrade  -> 0001" in ended.stderr
    assert command_line("check", FENCELOCK_DATABASE_URL=url).returncode == 0


def test_url_of_the_command_goes_before_that_of_the_environment(tmp_path: Path) -> None:
    """`-x url=` wins, and may hold what a configuration file would mangle."""
    url = f"sqlite:///{tmp_path / '100%(here)s.sqlite'}"
    ended = command_line("-x", f"url={url}", "upgrade", "head", FENCELOCK_DATABASE_URL="sqlite:////nowhere/x")
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "100%(here)s.sqlite").exists()


def test_no_url_is_one_clear_error() -> None:
    """Without a URL nothing is migrated, and the error names both ways to give one."""
    ended = command_line("upgrade", "head")
    assert ended.returncode != 0
    assert "Traceback" not in ended.stderr
    assert "alembic -x url=" in ended.stderr + ended.stdout
    assert "FENCELOCK_DATABASE_URL" in ended.stderr + ended.stdout
