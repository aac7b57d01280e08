"""The migrations run to and fro, by Alembic's own command line on real databases."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from alembic.config import main
from alembic.migration import MigrationContext
from alembic.operations import Operations
from sqlalchemy import Engine, String, inspect, text
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from fencelock import FencedModel, UnfencedWriteError
from tests.programs import python

pytestmark = pytest.mark.usefixtures("alembic_plugin")

ROOT = Path(__file__).parent.parent
DIALECT_URLS = {
    "sqlite": "sqlite://",
    "postgresql": "postgresql+psycopg://",
    "mysql": "mysql+pymysql://",
    "mariadb": "mariadb+pymysql://",
}


class Base(DeclarativeBase): ...


class Order(FencedModel, Base):
    __tablename__ = "shop_orders"
    __fence_resource__ = "order:{id}"
    id: Mapped[int] = mapped_column(primary_key=True)
    status: Mapped[str] = mapped_column(String(20))


def alembic(url: str, *arguments: str) -> None:
    main(["-c", str(ROOT / "alembic.ini"), "-x", f"url={url}", *arguments], prog="alembic")


def execute(engine: Engine, sql: str) -> None:
    with engine.begin() as connection:
        connection.execute(text(sql), execution_options={"fencelock": "bypass"})


def schema(engine: Engine) -> dict[str, Any]:
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
    alembic(database_url, "upgrade", "head")
    alembic(database_url, "check")
    migrated = schema(engine)
    assert {"shop_orders", "shop_stock_items", "fencelock_fences"} <= migrated.keys()

    execute(engine, "INSERT INTO shop_stock_items (id, name, quantity) VALUES (1, 'tea pot', 3)")
    execute(engine, "UPDATE shop_stock_items SET quantity = 2 WHERE id = 1")
    fences = "('order:a', 1), ('order:A', 2), ('order:ä', 3)"
    execute(engine, f"INSERT INTO fencelock_fences (resource, last_fencing_token) VALUES {fences}")  # noqa: S608
    with engine.connect() as connection:
        (item,) = connection.execute(text("SELECT * FROM shop_stock_items")).all()
        found = connection.scalar(
            text("SELECT last_fencing_token FROM fencelock_fences WHERE resource = 'order:A'")
        )
    assert tuple(item) == (1, "tea pot", 2, 0, 0), "a program that knows no fence goes on working"
    assert found == 2, "resources are compared exactly, whatever the collation of the database"

    alembic(database_url, "downgrade", "base")
    assert schema(engine) == {}

    alembic(database_url, "upgrade", "head")
    assert schema(engine) == migrated


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_data_migration_says_that_it_goes_around_the_fence(engine: Engine, database_url: str) -> None:
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


def command_line(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if name != "FENCELOCK_DATABASE_URL"}
    return python("-m", "alembic", *arguments, cwd=ROOT, env={**kept, **environment})


def test_url_comes_from_the_command_or_from_the_environment(tmp_path: Path) -> None:
    """`-x url=` wins, and may hold what a configuration file would mangle."""
    url, mangled = (f"sqlite:///{tmp_path / name}" for name in ("shop.sqlite", "100%(here)s.sqlite"))
    ended = command_line("upgrade", "head", FENCELOCK_DATABASE_URL=url)
    assert (ended.returncode, "Running upgrade  -> 0001" in ended.stderr) == (0, True), ended.stderr
    ended = command_line(
        "-x", f"url={mangled}", "upgrade", "head", FENCELOCK_DATABASE_URL="sqlite:////nowhere/x"
    )
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "100%(here)s.sqlite").exists()


def test_no_url_is_one_clear_error() -> None:
    ended = command_line("upgrade", "head")
    assert ended.returncode != 0
    assert "Traceback" not in ended.stderr
    assert "alembic -x url=" in ended.stderr + ended.stdout
    assert "FENCELOCK_DATABASE_URL" in ended.stderr + ended.stdout
