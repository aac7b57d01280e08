"""`op.add_fence` and the other operations of migrations.

Do not change the effect of a released operation, because old migrations must keep theirs. If a later version
needs another effect, add a new operation, and let `autogenerate.py` write that one.

Alembic loads plugins during its own import, so only Alembic's innermost modules are imported here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, Final, TypeAlias

from alembic.autogenerate.render import renderers
from alembic.operations.base import BatchOperations, Operations
from alembic.operations.ops import AddColumnOp, CreateTableOp, DropColumnOp, DropTableOp, MigrateOperation
from sqlalchemy import Column, Computed, MetaData, Table, inspect

from fencelock._databases import MYSQL
from fencelock.authority.database.table import LEASE_TABLE, lease_table
from fencelock.errors import FenceError
from fencelock.guard import fence_table, tables, triggers
from fencelock.guard.receipts import receipt_table
from fencelock.guard.sessions import unguarded

if TYPE_CHECKING:
    from alembic.autogenerate.api import AutogenContext

_Operations: TypeAlias = Operations | BatchOperations

_COLUMNS: Final = (tables.FENCE_COLUMN, tables.WRITE_COLUMN)

BY_NAME: Final[dict[str, type[FenceOperation]]] = {}

OWN_TABLES: Final[dict[str, Callable[..., Table]]] = {
    tables.FENCE_TABLE: fence_table,
    LEASE_TABLE: lease_table,
    tables.RECEIPT_TABLE: receipt_table,
}
"""The functions that define fencelock's own tables, by the names of the tables."""


class FenceOperation(MigrateOperation):
    """One operation on a table.

    Call it as `op.NAME(table_name, schema=None)`, or as `op.NAME(schema=None)` if `own` names its table. A
    subclass whose operation takes other arguments has a class method with the operation's name.
    """

    name: ClassVar[str]

    def __init_subclass__(cls, *, name: str, own: str = "") -> None:
        cls.name, BY_NAME[name] = name, cls
        if name not in vars(cls):
            setattr(cls, name, classmethod(_operation(name, cls.__doc__, own)))
        Operations.register_operation(name)(cls)

    def __init__(
        self,
        table_name: str,
        *,
        schema: str | None = None,
        trigger: tables.FenceTrigger = False,  # the trigger that is created or dropped
        replaces: tables.FenceTrigger = False,  # the trigger that the table had before
        excluded: Iterable[str] = (),  # the columns of `__fence_excluded__`
        excluded_before: Iterable[str] = (),  # those of the trigger before
    ) -> None:
        self.table_name: str = table_name
        self.schema: str | None = schema
        self.trigger: tables.FenceTrigger = trigger
        self.replaces: tables.FenceTrigger = replaces
        self.excluded: list[str] = sorted(tables.check_names(excluded))
        self.excluded_before: list[str] = sorted(excluded_before)

    @property
    def arguments(self) -> dict[str, Any]:
        return {"schema": self.schema}

    def reverse(self) -> MigrateOperation:
        """Return the operation that undoes this one; Alembic calls it."""
        verb, _, what = self.name.partition("_")
        kind = BY_NAME.get(f"create_{what}", AddFenceOp) if verb == "drop" else BY_NAME[f"drop_{what}"]
        if self.replaces:
            before = self.excluded_before
            return type(self)(self.table_name, schema=self.schema, trigger=self.replaces, excluded=before)
        return kind(self.table_name, schema=self.schema, trigger=self.trigger, excluded=self.excluded)

    def to_diff_tuple(self) -> tuple[Any, ...]:
        """Return the tuple that `alembic check` prints for this operation."""
        return (self.name, self.schema, self.table_name, self.trigger)


def _operation(name: str, doc: str | None, own: str) -> Callable[..., None]:
    """Return the function behind `op.NAME`. Alembic reads its signature, and changes its docstring."""

    def on_table(cls: Any, operations: Operations, table_name: str, *, schema: str | None = None) -> None:
        operations.invoke(cls(table_name, schema=schema))

    def on_own_table(cls: Any, operations: Operations, *, schema: str | None = None) -> None:
        operations.invoke(cls(own, schema=schema))

    made = on_own_table if own else on_table
    made.__name__, made.__doc__ = name, doc
    return made


class AddFenceOp(FenceOperation, name="add_fence"):
    """Add the columns of a fenced table, and the trigger that its model wants."""

    @classmethod
    def add_fence(
        cls,
        operations: Operations,
        table_name: str,
        *,
        trigger: tables.FenceTrigger = False,
        excluded: Iterable[str] = (),
        schema: str | None = None,
    ) -> None:
        """Add `last_fencing_token` and `last_write_id`, with 0 in every row. No database rewrites the table.

        Args:
            operations: given by Alembic.
            table_name: the name of the table.
            trigger: the model's `__fence_trigger__`: False, True or `"strict"`.
            excluded: the model's `__fence_excluded__`, for the trigger, by the names of the columns.
            schema: the schema of the table.

        Raises:
            ValueError: `trigger` is another value.
        """
        trigger = tables.check_trigger(trigger)
        operations.invoke(cls(table_name, schema=schema, trigger=trigger, excluded=excluded))

    @property
    def arguments(self) -> dict[str, Any]:
        return {"trigger": self.trigger, "excluded": self.excluded, "schema": self.schema}


class DropFenceOp(FenceOperation, name="drop_fence"):
    """Drop the trigger and both columns of a fenced table. SQLite must be 3.35 or later."""


class CreateFenceTriggerOp(FenceOperation, name="create_fence_trigger"):
    """Create the trigger of a table."""

    @classmethod
    def create_fence_trigger(
        cls,
        operations: Operations,
        table_name: str,
        *,
        strict: bool = False,
        excluded: Iterable[str] = (),
        schema: str | None = None,
    ) -> None:
        """Create a table's trigger, in place of any other: `__fence_trigger__ = True` of a model.

        Args:
            operations: given by Alembic.
            table_name: the name of the table.
            strict: create the trigger of `__fence_trigger__ = "strict"`.
            excluded: the model's `__fence_excluded__`, by the names of the columns. Create the trigger again
                when columns are added, and drop it before columns are dropped.
            schema: the schema of the table.
        """
        trigger: tables.FenceTrigger = "strict" if strict else True
        operations.invoke(cls(table_name, schema=schema, trigger=trigger, excluded=excluded))

    @property
    def arguments(self) -> dict[str, Any]:
        return {"strict": self.trigger == "strict", "excluded": self.excluded, "schema": self.schema}


class DropFenceTriggerOp(FenceOperation, name="drop_fence_trigger"):
    """Drop the table's trigger, of any form. The columns stay, and the guard in Python goes on working."""


class CreateFenceTableOp(FenceOperation, name="create_fence_table", own=tables.FENCE_TABLE):
    """Create the table `fencelock_fences`, as `fencelock.fence_table` describes it."""


class DropFenceTableOp(FenceOperation, name="drop_fence_table", own=tables.FENCE_TABLE):
    """Drop the table `fencelock_fences`, and with it every fence of `gate`."""


class CreateLeaseTableOp(FenceOperation, name="create_lease_table", own=LEASE_TABLE):
    """Create the table `fencelock_leases`, as `fencelock.lease_table` describes it."""


class DropLeaseTableOp(FenceOperation, name="drop_lease_table", own=LEASE_TABLE):
    """Drop the table `fencelock_leases`, and with it every token that the database has minted."""


class CreateReceiptTableOp(FenceOperation, name="create_receipt_table", own=tables.RECEIPT_TABLE):
    """Create the table `fencelock_receipts`, as `fencelock.receipt_table` describes it."""


class DropReceiptTableOp(FenceOperation, name="drop_receipt_table", own=tables.RECEIPT_TABLE):
    """Drop the table `fencelock_receipts`, and every record of done work."""


class _InBatch:
    """The operations of `op.batch_alter_table`, which knows its table."""

    @classmethod
    def add_fence(cls, operations: BatchOperations) -> None:
        """Add both columns; for a trigger, call `op.create_fence_trigger` after the batch."""
        _add_fence(operations, AddFenceOp(**_of_batch(operations)))

    @classmethod
    def drop_fence(cls, operations: BatchOperations) -> None:
        """Drop the trigger and both columns of the batch's table."""
        _drop_fence(operations, DropFenceOp(**_of_batch(operations)))


for _name in ("add_fence", "drop_fence"):
    BatchOperations.register_operation(_name)(_InBatch)


def _of_batch(operations: BatchOperations) -> dict[str, Any]:
    return {"table_name": operations.impl.table_name, "schema": operations.impl.schema}


@Operations.implementation_for(AddFenceOp)
def _add_fence(operations: _Operations, op: FenceOperation) -> None:
    for name in _COLUMNS:
        operations.invoke(AddColumnOp(op.table_name, tables.new_column(name, {}), schema=op.schema))
    if op.trigger:
        _create_trigger(operations, op)


@Operations.implementation_for(DropFenceOp)
def _drop_fence(operations: _Operations, op: FenceOperation) -> None:
    _drop_trigger(operations, op)
    for name in reversed(_COLUMNS):
        operations.invoke(DropColumnOp(op.table_name, name, schema=op.schema))


@Operations.implementation_for(CreateFenceTriggerOp)
def _create_trigger(operations: _Operations, op: FenceOperation) -> None:
    dialect = operations.migration_context.dialect.name
    _drop_renamed(operations, op)
    target = _with_columns(operations, op) if op.excluded else op.table_name
    made = triggers.create(target, dialect, strict=op.trigger == "strict", schema=op.schema)
    _execute(operations, made)


def _with_columns(operations: _Operations, op: FenceOperation) -> Table:
    """Return the table with the columns that it has now, because the trigger has to know them."""
    if operations.migration_context.as_sql:
        raise FenceError(
            "the trigger of a table with excluded columns needs the names of all its columns, which --sql "
            "cannot look up: run this migration with a connection"
        )
    columns = inspect(operations.get_bind()).get_columns(op.table_name, schema=op.schema)
    made = [Column(its["name"], its["type"], *_generated(its)) for its in columns]
    table = Table(op.table_name, MetaData(), *made, schema=op.schema)
    if unknown := {*op.excluded} - {*table.c.keys()}:
        raise ValueError(f"{op.table_name!r} has no column {', '.join(map(repr, sorted(unknown)))}")
    tables.exclude(table, op.excluded)
    return table


def _generated(column: Any) -> list[Computed]:
    return [Computed(its["sqltext"]) for its in [column.get("computed")] if its]


@Operations.implementation_for(DropFenceTriggerOp)
def _drop_trigger(operations: _Operations, op: FenceOperation) -> None:
    dialect = operations.migration_context.dialect.name
    _drop_renamed(operations, op)
    _execute(operations, triggers.drop(op.table_name, dialect, schema=op.schema))


def _drop_renamed(operations: _Operations, op: FenceOperation) -> None:
    """Drop the triggers that a renamed table has kept; without a connection (--sql) they are unknown."""
    if not operations.migration_context.as_sql:
        connection = operations.get_bind()
        _execute(operations, triggers.drop_renamed(connection, op.table_name, schema=op.schema))


@Operations.implementation_for(CreateFenceTableOp)
@Operations.implementation_for(CreateLeaseTableOp)
@Operations.implementation_for(CreateReceiptTableOp)
def _create_table(operations: Operations, op: FenceOperation) -> None:
    target = operations.migration_context.opts.get("target_metadata")
    convention = target.naming_convention if isinstance(target, MetaData) else None
    define = OWN_TABLES[op.table_name]
    table = CreateTableOp.from_table(define(MetaData(naming_convention=convention), schema=op.schema))
    table.if_not_exists = op.table_name == LEASE_TABLE  # `fencelock init` may have created it before
    operations.invoke(table)


@Operations.implementation_for(DropFenceTableOp)
@Operations.implementation_for(DropLeaseTableOp)
@Operations.implementation_for(DropReceiptTableOp)
def _drop_table(operations: Operations, op: FenceOperation) -> None:
    operations.invoke(DropTableOp(op.table_name, schema=op.schema))


def _execute(operations: _Operations, statements: Iterable[triggers.FenceDDL]) -> None:
    """Execute the statements; with --sql, print them in the form that the database's own client reads."""
    context = operations.migration_context
    for statement in statements:
        if context.as_sql and context.dialect.name in MYSQL:
            sql = str(statement.compile(dialect=context.dialect))
            compound = ";" in sql  # the client ends a statement at its first semicolon
            context.impl.static_output(f"DELIMITER //\n{sql}//\nDELIMITER ;" if compound else f"{sql};")
        else:
            context.impl.execute(statement)


@renderers.dispatch_for(FenceOperation)
def _render(context: AutogenContext, op: FenceOperation) -> str:
    table = [] if op.table_name in OWN_TABLES and "table" in op.name else [repr(str(op.table_name))]
    named = [f"{name}={value!r}" for name, value in op.arguments.items() if value]
    return f"{context.opts['alembic_module_prefix'] or ''}{op.name}({', '.join([*table, *named])})"


def _free_migrations() -> None:
    """Let migrations write to fenced tables without a lease, on any engine."""
    within = Operations.context

    @contextmanager
    def context(_: object, migration_context: Any) -> Iterator[Operations]:
        with unguarded(), within(migration_context) as operations:
            yield operations

    setattr(Operations, "context", classmethod(context))  # noqa: B010  mypy refuses an assignment


_free_migrations()
