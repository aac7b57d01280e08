"""Triggers, optional for each table: the database itself refuses stale writes, from any program.

- Plain: an UPDATE that lowers a fence is refused. An UPDATE without a write id gives its row a new write id.
- Strict: an UPDATE that lowers a fence is refused, and also one that changes neither fence nor write id.

What triggers cannot see: https://fencelock.github.io/fencelock/existing-code/#triggers
"""

from __future__ import annotations

import hashlib
import re
from contextlib import suppress
from typing import Any, Final

from sqlalchemy import Column, MetaData, Table, inspect, text
from sqlalchemy.engine import Connection, ExceptionContext
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.schema import DropTable, ExecutableDDLElement
from sqlalchemy.sql.compiler import DDLCompiler

from fencelock._databases import MYSQL, SUPPORTED
from fencelock.errors import FenceError, StaleTokenError, UnfencedWriteError
from fencelock.guard import trigger_sql as sql
from fencelock.guard._sqlalchemy import doubles_percents
from fencelock.guard.events import report
from fencelock.guard.refused import note_undone, refuse
from fencelock.guard.tables import (
    FENCE_COLUMN,
    FENCE_TABLE,
    RECEIPT_TABLE,
    WRITE_COLUMN,
    FenceTrigger,
    excluded_of,
    trigger_of,
)
from fencelock.guard.trigger_sql import Form

__all__ = ["FenceDDL", "FenceTrigger", "create", "drop", "installed", "knows"]

_LONGEST_NAME: Final = 60
"""The most bytes of a trigger's name. PostgreSQL cuts names that are too long; MariaDB refuses them."""

_REFUSED: Final = re.compile(
    r"fencelock: (?:token (?P<token>-?\d+) < (?P<current>\d+)|(?P<stale>a token below the fence)"
    r"|(?P<unfenced>UPDATE without a token)) in (?P<table>.+)"
)
_MISSING_TABLE: Final = re.compile(r"no such table|^relation .* does not exist|doesn't exist", re.IGNORECASE)
#: Errors of MariaDB and MySQL about the account that has created a trigger: 1449 and 1142.
_DEFINER: Final = re.compile(r"specified as a definer|TRIGGER command denied")
#: Statements that use rows. A failed DESCRIBE is no error: it tells SQLAlchemy that a table is missing.
_USES_ROWS: Final = re.compile(r"\s*(?:insert|update|delete|select)\b", re.IGNORECASE)
_MISSING_COLUMN: Final = re.compile(
    r"no such column|no column named|unknown column|column .* does not exist|undefined column", re.IGNORECASE
)


class FenceDDL(ExecutableDDLElement):
    """One statement that makes or drops a part of a table's trigger; it uses the table's name and schema.

    `connection.execute()` executes it, and its SQL is `str(ddl.compile(dialect=engine.dialect))`.
    """

    def __init__(self, template: str, table: Table) -> None:
        self.template: str = template.strip()
        self.table: Table = table


@compiles(FenceDDL)
def _compile(ddl: FenceDDL, compiler: DDLCompiler, **_: Any) -> str:
    table, preparer = ddl.table, compiler.preparer
    fields = {
        "table": preparer.format_table(table),
        "bare_table": preparer.format_table(table, use_schema=False),
        "label": _literal(table.name, preparer),
        "stale": _literal(f"fencelock: a token below the fence in {table.name}", preparer),
        "unfenced_update": _literal(f"fencelock: UPDATE without a token in {table.name}", preparer),
        "excluded": ", ".join(_literal(name, preparer) for name in excluded_names(table)),
    }
    looks = _looks(table, preparer) if excluded_of(table) and preparer.dialect.name != "postgresql" else {}
    guarded = [look for name, look in looks.items() if name not in excluded_names(table)]
    fields["changed"] = f" AND ({' OR '.join(guarded)})" if guarded else ""
    for form in (*sql.TRIGGERS, "refuse", "renew"):
        named = Table(_name(table.name, form), MetaData(), schema=table.schema)
        of_table = preparer.dialect.name == "postgresql" and form not in {"refuse", "renew"}
        fields[form] = preparer.format_table(named, use_schema=not of_table)
    return ddl.template.format_map(fields)


def excluded_names(table: Table) -> list[str]:
    """Return the names of the columns that a trigger lets change: the excluded ones, and what follows.

    Generated columns are not among them, because no trigger looks at those.
    """
    excluded = excluded_of(table)
    follows = {each.key for each in table.c if each.onupdate is not None or each.server_onupdate is not None}
    keys = excluded | follows if excluded else ()
    return sorted(table.c[key].name for key in keys if table.c[key].computed is None)


def _looks(table: Table, preparer: Any) -> dict[str, str]:
    """Return the expressions that tell whether a column has changed, by the column's name."""
    look = sql.CHANGED[_family(preparer.dialect.name)]
    columns = [each for each in table.c if each.computed is None and each.name != WRITE_COLUMN]
    return {each.name: look.format(preparer.quote(each.name)) for each in columns}


def _literal(value: str, preparer: Any) -> str:
    quoted = value.replace("'", "''")
    if preparer.dialect.name in MYSQL:
        quoted = quoted.replace("\\", "\\\\")
    if doubles_percents(preparer):
        quoted = quoted.replace("%", "%%")
    return f"'{quoted}'"


def _name(table: str, form: str) -> str:
    name = f"fencelock_{table}_{form}"
    if len(name.encode()) <= _LONGEST_NAME:
        return name
    return f"fencelock_{hashlib.sha256(table.encode()).hexdigest()[:16]}_{form}"


def _family(dialect: str) -> str:
    if not knows(dialect):
        raise ValueError(f"there are triggers for postgresql, mysql, mariadb and sqlite, not for {dialect!r}")
    return "mysql" if dialect == "mariadb" else dialect


def _table(table: Any, schema: str | None) -> Table:
    if isinstance(table, str):
        return Table(table, MetaData(), schema=schema)
    found = getattr(table, "__table__", table)
    if not isinstance(found, Table):
        raise TypeError(f"a trigger is for a table: its name, a Table or a model, not {table!r}")
    return found


def knows(dialect: str) -> bool:
    return dialect in SUPPORTED


def create(table: Any, dialect: str, *, strict: bool = False, schema: str | None = None) -> list[FenceDDL]:
    """Return the statements that create a table's trigger, and replace any other.

    The table needs both columns of the guard. `create_all` creates the trigger of a model if
    `__fence_trigger__` is True or `"strict"`. In migrations, call `op.create_fence_trigger("orders")`. If a
    `Table` or model has `__fence_excluded__`, create its trigger again when columns are added or dropped.

    Args:
        table: the table's name, a `Table` or a model.
        dialect: the name of the engine's dialect: `"postgresql"`, `"mysql"`, `"mariadb"` or `"sqlite"`.
        strict: refuse an UPDATE that changes neither fence nor write id. Without it, such an UPDATE gives
            its row a new write id; on SQLite, the table must have rowids then.
        schema: the schema of a table that is given by its name.

    Raises:
        ValueError: if there are no triggers for this dialect.
        TypeError: if `table` is no name, `Table` or model.

    Example:
        ```python
        with engine.begin() as connection:
            for statement in triggers.create("orders", engine.dialect.name):
                connection.execute(statement)
        ```
    """
    target = _table(table, schema)
    forms: tuple[Form, ...] = (
        ("refuse", "renew", "inner", "strict") if strict else ("refuse", "fence", "renew", "ids")
    )
    templates = sql.CREATE[_family(dialect)]
    made = [FenceDDL(templates[form], target) for form in forms if form in templates]
    return [*drop(target, dialect), *made]


def drop(table: Any, dialect: str, *, schema: str | None = None) -> list[FenceDDL]:
    """Return the statements that drop a table's trigger of any form. A table without a trigger is no error.

    ```python
    with engine.begin() as connection:
        for statement in triggers.drop("orders", engine.dialect.name):
            connection.execute(statement)
    ```

    The arguments and errors are those of `create`.
    """
    target = _table(table, schema)
    family = _family(dialect)
    dropped = [FenceDDL(sql.DROP[family].format(form=form), target) for form in sql.TRIGGERS]
    if family == "postgresql":
        dropped += [FenceDDL(f"DROP FUNCTION IF EXISTS {{{each}}}()", target) for each in ("refuse", "renew")]
    return dropped


def installed(connection: Connection, table: Any, *, schema: str | None = None) -> FenceTrigger:
    """Return which trigger a table has in the database: False, True or `"strict"`.

    If the table is a `Table` or a model, a trigger with other excluded columns counts as none.

    ```python
    with engine.connect() as connection:
        triggers.installed(connection, "orders")     # False
    ```

    A disabled trigger counts as none, and so does one of an earlier version, whose function can be misled.
    """
    target = _table(table, schema)
    found = _found(connection, target.name, target.schema)
    wanted = None if isinstance(table, str) else excluded_names(target)
    forms = {
        form
        for form in sql.TRIGGERS
        if (details := found.get(_name(target.name, form))) is not None
        and (form == "fence" or wanted is None or _left_out(target, details, connection.dialect) == wanted)
    }
    needs_inner = connection.dialect.name == "postgresql"
    is_strict = "strict" in forms and ("inner" in forms or not needs_inner)
    return "strict" if is_strict else forms >= {"fence", "ids"}


def excluded_in(connection: Connection, table: str, *, schema: str | None = None) -> list[str]:
    """Return the columns that the trigger in the database lets change."""
    found = _found(connection, table, schema)
    details = found.get(_name(table, "strict")) or found.get(_name(table, "ids"))
    if details is None:
        return []
    columns = inspect(connection).get_columns(table, schema=schema)
    made = [Column(its["name"], its["type"]) for its in columns if not its.get("computed")]
    return _left_out(Table(table, MetaData(), *made), details, connection.dialect)


def _left_out(table: Table, details: Any, dialect: Any) -> list[str]:
    """Return which columns of a table a trigger with these arguments, or this SQL, lets change."""
    if dialect.name == "postgresql":
        return sorted(bytes(details).decode().split("\0")[:-1])
    looks = _looks(table, dialect.identifier_preparer)
    left_out = [name for name, look in looks.items() if look.replace("%%", "%") not in details]
    return sorted(left_out) if len(left_out) < len(looks) else []


def _found(connection: Connection, table: str, schema: str | None) -> dict[str, Any]:
    """Return the arguments or the SQL of triggers, by name; None for a trigger of an earlier version."""
    family = _family(connection.dialect.name)
    quoted = f"{connection.dialect.identifier_preparer.quote_schema(schema)}." if schema else ""
    look = text(sql.LOOK[family].format(schema=quoted))
    asked = {"table": table} if family == "sqlite" else {"table": table, "schema": schema}
    rows = connection.execute(look, asked)
    return {name: details if is_current else None for name, is_current, details in rows}


def drop_renamed(connection: Connection, table: str, *, schema: str | None = None) -> list[FenceDDL]:
    """Return the statements that drop the triggers which a table has kept from an earlier name.

    A database does not rename triggers with their table. PostgreSQL's function stays, because another table
    may have the old name by now.
    """
    family = _family(connection.dialect.name)
    own = {_name(table, form) for form in sql.TRIGGERS}
    endings = tuple(f"_{form}" for form in sql.TRIGGERS)
    preparer = connection.dialect.identifier_preparer
    dropped = []
    for name in sorted(_found(connection, table, schema).keys() - own):
        if not (name.startswith("fencelock_") and name.endswith(endings)):
            continue
        named = Table(name, MetaData(), schema=schema)
        quoted = preparer.format_table(named, use_schema=family != "postgresql")
        verbatim = quoted.replace("{", "{{").replace("}", "}}")
        template = sql.DROP[family].format(form="renamed").replace("{renamed}", verbatim)
        dropped.append(FenceDDL(template, _table(table, schema)))
    return dropped


def after_create(table: Table, connection: Any, **options: Any) -> None:
    wanted = trigger_of(table)
    if wanted:
        target = connection or options["_ddl_runner"]  # Alembic's --sql has no connection
        try:
            for statement in create(table, target.dialect.name, strict=wanted == "strict"):
                target.execute(statement)
        except (DBAPIError, FenceError):
            # MariaDB has committed the new table, and another `create_all` would leave it without a trigger.
            with suppress(DBAPIError):
                target.execute(DropTable(table))
            raise


def before_drop(table: Table, connection: Any, **options: Any) -> None:
    if trigger_of(table):
        target = connection or options["_ddl_runner"]
        for statement in drop(table, target.dialect.name):
            target.execute(statement)


def explain(context: ExceptionContext) -> None:
    """Raise a `FenceError` for the error of a trigger, or of a missing column or table of the guard."""
    error = context.original_exception
    message = str(error.args[-1]).splitlines()[0] if error.args and str(error.args[-1]) else ""
    refusal = _refusal(message) if "fencelock" in message else None
    # Only the first line, because the next lines quote the statement, which names the column anyway.
    refusal = refusal or _lack(str(error).partition("\n")[0], context.statement or "")
    if refusal is not None:
        if context.connection is not None:
            refuse(context.connection, refusal)
        raise refusal from error
    note_undone(context)


def _lack(message: str, statement: str) -> FenceError | None:
    """Return an error that names the missing column or table of the guard; None for other errors."""
    if FENCE_TABLE in message and _MISSING_TABLE.search(message) and _USES_ROWS.match(statement):
        return FenceError(
            f"the database lacks the table {FENCE_TABLE!r}, where gates keep their fences "
            f"({message}): call fence_table(Base.metadata) beside your models, then "
            f"Base.metadata.create_all(engine), or op.create_fence_table() in a migration; or pass no gate "
            f"(gate=False), and claim before you read"
        )
    if RECEIPT_TABLE in message and _MISSING_TABLE.search(message) and _USES_ROWS.match(statement):
        return FenceError(
            f"the database lacks the table {RECEIPT_TABLE!r}, where once() keeps receipts ({message}): call "
            f"receipt_table(Base.metadata) beside your models, then Base.metadata.create_all(engine), or "
            f"op.create_receipt_table() in a migration"
        )
    if _DEFINER.search(message):
        return FenceError(
            f"a trigger of the table, perhaps that of fencelock, cannot run ({message}): on MariaDB it has "
            f"the rights of the account that created it. Create it again with an account that stays and has "
            f"the right TRIGGER: op.create_fence_trigger in a migration, or fencelock.guard.triggers.create"
        )
    table = FENCE_TABLE if FENCE_TABLE in statement else "<table>"
    for column in (FENCE_COLUMN, WRITE_COLUMN):
        if column in message and _MISSING_COLUMN.search(message):
            return FenceError(
                f"the database lacks the column {column!r} of a fenced table ({message}); add it in a "
                f'migration: op.add_fence("{table}") for both columns, which fencelock[alembic] brings; or '
                f'op.add_column("{table}", sa.Column("{column}", sa.BigInteger(), nullable=False, '
                f'server_default=sa.text("0")))'
            )
    return None


def _refusal(message: str) -> FenceError | None:
    """Return and report the refusal behind an error of the database; None if it is no refusal."""
    refused = _REFUSED.search(message)
    table = refused and refused["table"].strip()
    refusal: FenceError
    if refused is None or not table:
        return None
    if refused["unfenced"]:
        refusal = UnfencedWriteError(
            f"the strict trigger of {table!r} has refused an UPDATE that changes neither {FENCE_COLUMN} nor "
            f"{WRITE_COLUMN}; write under a lease and through the guard, or with conditional_update()"
        )
    else:
        token, current = (int(refused[name]) if refused[name] else None for name in ("token", "current"))
        refusal = StaleTokenError(table, None, token or 0, current, detail="refused by the table's trigger")
    report(refusal, table=table)
    return refusal
