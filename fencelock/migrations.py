"""Fences in Alembic: operations for migrations, and an autogenerate that knows them.

`pip install 'fencelock[alembic]'` is all that it takes: Alembic (1.18 or later) finds the plugin by itself.
Migrations then have `op.add_fence`, `op.drop_fence`, `op.add_write_id`, `op.drop_write_id`,
`op.create_fence_trigger`, `op.drop_fence_trigger`, `op.relaxed_fence_trigger`, `op.create_fence_table`,
`op.drop_fence_table`, `op.create_lease_table` and `op.drop_lease_table`; `alembic revision --autogenerate`
writes them, and `alembic check` notices what is missing, a trigger that SQLite's batch mode has dropped
included.

What an operation makes never changes with the version of fencelock, because migrations are history: whatever
a later version needs will be an operation of its own, which autogenerate finds.

Alembic loads plugins while it is half imported itself: hence the imports of its innermost modules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias

from alembic.autogenerate.render import renderers
from alembic.operations.base import BatchOperations, Operations
from alembic.operations.ops import (
    AddColumnOp,
    CreateTableOp,
    DropColumnOp,
    DropTableOp,
    MigrateOperation,
    ModifyTableOps,
)
from alembic.util import PriorityDispatchResult
from sqlalchemy import BigInteger, Connection, MetaData, Table
from sqlalchemy.exc import DBAPIError

from fencelock.authority.database.table import LEASE_TABLE, lease_table
from fencelock.guard import triggers
from fencelock.guard.endings import is_refused
from fencelock.guard.fences import fence_table
from fencelock.guard.tables import (
    FENCE_COLUMN,
    FENCE_MARK,
    FENCE_TABLE,
    GUARDS_OWN,
    WRITE_COLUMN,
    WRITE_MARK,
    FenceTrigger,
    new_column,
    trigger_of,
)

FoundTrigger: TypeAlias = FenceTrigger | Literal["fence"]
"""A trigger of a database: "fence" is a plain one that gives no write ids, as `op.add_fence` makes it."""

if TYPE_CHECKING:
    from alembic.autogenerate.api import AutogenContext
    from alembic.operations.ops import UpgradeOps


class FenceOperation(MigrateOperation):
    """What the operations have in common: a table, and a line in the migration."""

    name: ClassVar[str]

    def __init__(self, table_name: str, *, schema: str | None = None, trigger: FoundTrigger = False) -> None:
        self.table_name = table_name
        self.schema = schema
        self.trigger = trigger

    def arguments(self) -> dict[str, Any]:
        """Return the arguments that stand in the migration, apart from what is left as it is by default."""
        return {"trigger": self.trigger, "schema": self.schema}

    def to_diff_tuple(self) -> tuple[Any, ...]:
        """Return how `alembic check` shows it."""
        return (self.name, self.schema, self.table_name, self.trigger)


@Operations.register_operation("add_fence")
@BatchOperations.register_operation("add_fence", "batch_add_fence")
class AddFenceOp(FenceOperation):
    """The column, and the trigger if one is wanted."""

    name = "add_fence"

    def reverse(self) -> DropFenceOp:
        """Return the way back."""
        return DropFenceOp(self.table_name, schema=self.schema, trigger=self.trigger)

    @classmethod
    def add_fence(
        cls,
        operations: Operations,
        table_name: str,
        *,
        trigger: FenceTrigger = False,
        schema: str | None = None,
    ) -> None:
        """Give a table the column `last_fencing_token`, with 0 in every row, which no database rewrites.

        Args:
            operations: given by Alembic.
            table_name: the table.
            trigger: True or `"strict"` to give it a trigger too (see `fencelock.guard.triggers`).
            schema: where the table is.
        """
        operations.invoke(cls(table_name, schema=schema, trigger=trigger))

    @classmethod
    def batch_add_fence(cls, operations: BatchOperations) -> None:
        """Give the table of a batch the column; a trigger comes afterwards, `op.create_fence_trigger`."""
        operations.invoke(AddColumnOp(**_of_batch(operations), column=new_column(FENCE_COLUMN, {})))


@Operations.register_operation("drop_fence")
@BatchOperations.register_operation("drop_fence", "batch_drop_fence")
class DropFenceOp(FenceOperation):
    """The column and the trigger, if there is one."""

    name = "drop_fence"

    def arguments(self) -> dict[str, Any]:
        """Return the arguments that stand in the migration."""
        return {"schema": self.schema}

    def reverse(self) -> AddFenceOp:
        """Return the way back."""
        return AddFenceOp(self.table_name, schema=self.schema, trigger=self.trigger)

    @classmethod
    def drop_fence(cls, operations: Operations, table_name: str, *, schema: str | None = None) -> None:
        """Take the column away, and the trigger with it. SQLite must be 3.35 or later."""
        operations.invoke(cls(table_name, schema=schema))

    @classmethod
    def batch_drop_fence(cls, operations: BatchOperations) -> None:
        """Take the column of a batch's table away, and the trigger with it."""
        of_table = _of_batch(operations)
        _drop_trigger(operations, DropFenceTriggerOp(**of_table))
        operations.invoke(DropColumnOp(**of_table, column_name=FENCE_COLUMN))


@Operations.register_operation("add_write_id")
@BatchOperations.register_operation("add_write_id", "batch_add_write_id")
class AddWriteIdOp(FenceOperation):
    """The column that says which write a row has seen last."""

    name = "add_write_id"

    def arguments(self) -> dict[str, Any]:
        """Return the arguments that stand in the migration."""
        return {"schema": self.schema}

    def reverse(self) -> DropWriteIdOp:
        """Return the way back."""
        return DropWriteIdOp(self.table_name, schema=self.schema)

    @classmethod
    def add_write_id(cls, operations: Operations, table_name: str, *, schema: str | None = None) -> None:
        """Give a table the column `last_write_id`, with 0 in every row, which no database rewrites."""
        operations.invoke(cls(table_name, schema=schema))

    @classmethod
    def batch_add_write_id(cls, operations: BatchOperations) -> None:
        """Give the table of a batch the column."""
        operations.invoke(AddColumnOp(**_of_batch(operations), column=new_column(WRITE_COLUMN, {})))


@Operations.register_operation("drop_write_id")
@BatchOperations.register_operation("drop_write_id", "batch_drop_write_id")
class DropWriteIdOp(FenceOperation):
    """The column goes."""

    name = "drop_write_id"

    def arguments(self) -> dict[str, Any]:
        """Return the arguments that stand in the migration."""
        return {"schema": self.schema}

    def reverse(self) -> AddWriteIdOp:
        """Return the way back."""
        return AddWriteIdOp(self.table_name, schema=self.schema)

    @classmethod
    def drop_write_id(cls, operations: Operations, table_name: str, *, schema: str | None = None) -> None:
        """Take the column away. SQLite must be 3.35 or later."""
        operations.invoke(cls(table_name, schema=schema))

    @classmethod
    def batch_drop_write_id(cls, operations: BatchOperations) -> None:
        """Take the column of a batch's table away."""
        operations.invoke(DropColumnOp(**_of_batch(operations), column_name=WRITE_COLUMN))


@Operations.register_operation("create_fence_trigger")
class CreateFenceTriggerOp(FenceOperation):
    """The trigger of a table that has the column.

    Attributes:
        replaces: the trigger that it had before.
    """

    name = "create_fence_trigger"

    def __init__(
        self,
        table_name: str,
        *,
        schema: str | None = None,
        trigger: FoundTrigger = True,
        replaces: FoundTrigger = False,
    ) -> None:
        super().__init__(table_name, schema=schema, trigger=trigger)
        self.replaces = replaces

    def arguments(self) -> dict[str, Any]:
        """Return the arguments that stand in the migration."""
        return {"strict": self.trigger == "strict", "ids": self.trigger is True, "schema": self.schema}

    def reverse(self) -> FenceOperation:
        """Return the way back."""
        if self.replaces:
            return CreateFenceTriggerOp(self.table_name, schema=self.schema, trigger=self.replaces)
        return DropFenceTriggerOp(self.table_name, schema=self.schema, trigger=self.trigger)

    @classmethod
    def create_fence_trigger(
        cls,
        operations: Operations,
        table_name: str,
        *,
        strict: bool = False,
        ids: bool = False,
        schema: str | None = None,
    ) -> None:
        """Give a table that has the columns its trigger, in place of any other.

        Args:
            operations: given by Alembic.
            table_name: the table.
            strict: refuse also what carries no token (see `fencelock.guard.triggers`).
            ids: give a new write id to each UPDATE that brings none, as models with
                `__fence_trigger__ = True` want it. It takes the column of `op.add_write_id`.
            schema: where the table is.
        """
        trigger: FoundTrigger = "strict" if strict else True if ids else "fence"
        operations.invoke(cls(table_name, schema=schema, trigger=trigger))


@Operations.register_operation("drop_fence_trigger")
class DropFenceTriggerOp(FenceOperation):
    """The trigger, whichever it is."""

    name = "drop_fence_trigger"

    def arguments(self) -> dict[str, Any]:
        """Return the arguments that stand in the migration."""
        return {"schema": self.schema}

    def reverse(self) -> CreateFenceTriggerOp:
        """Return the way back."""
        return CreateFenceTriggerOp(self.table_name, schema=self.schema, trigger=self.trigger or "fence")

    @classmethod
    def drop_fence_trigger(
        cls, operations: Operations, table_name: str, *, schema: str | None = None
    ) -> None:
        """Take the trigger away; the column stays, and so does the guard in Python."""
        operations.invoke(cls(table_name, schema=schema))


@Operations.register_operation("relaxed_fence_trigger")
class RelaxedFenceTrigger:
    """A strict trigger that steps back while a migration changes rows."""

    @classmethod
    def relaxed_fence_trigger(
        cls, operations: Operations, table_name: str, *, schema: str | None = None
    ) -> AbstractContextManager[None]:
        """Have a table's strict trigger step back inside a `with` block, for a migration of its rows.

        The plain one takes its place, so that not even the migration lowers a fence; at the end of the block,
        however it ends, the strict one is there again. On PostgreSQL and SQLite other programs wait until the
        migration has been committed. MariaDB commits with each of these steps: there, writes of others are
        checked by the plain trigger meanwhile, and by the guard where they go through it. If the migration's
        process dies in the block, `alembic check` finds the trigger that is missing.

        Args:
            operations: given by Alembic.
            table_name: the table.
            schema: where the table is.

        Raises:
            ValueError: if the table has no strict trigger.

        Example:
            ```python
            with op.relaxed_fence_trigger("orders"):
                op.execute("UPDATE orders SET status = 'paid' WHERE status = 'settled'")
            ```
        """
        return _relaxed(operations, CreateFenceTriggerOp(table_name, schema=schema, trigger="strict"))


@contextmanager
def _relaxed(operations: Operations, strict: CreateFenceTriggerOp) -> Iterator[None]:
    _begin_relaxed(operations, strict)
    operations.invoke(CreateFenceTriggerOp(strict.table_name, schema=strict.schema, trigger="fence"))
    try:
        yield
    except BaseException as error:
        try:
            if _is_rolled_back(operations.get_bind()):
                raise
            operations.invoke(strict)
        except DBAPIError as failed:  # on PostgreSQL, the transaction's end puts it back
            error.add_note(
                f"the trigger of {strict.table_name!r} is back when all is rolled back: {failed.orig}"
            )
        raise
    operations.invoke(strict)


def _is_rolled_back(connection: Connection) -> bool:
    """Tell whether a refusal has rolled back everything, the relaxed trigger included.

    MariaDB has committed that one. There the transaction is ended, so that the strict one can be made again.
    """
    transaction = connection.get_transaction()
    if transaction is None or not is_refused(connection):
        return False
    if connection.dialect.name not in {"mysql", "mariadb"}:
        return True
    transaction.rollback()
    return False


def _begin_relaxed(operations: Operations, strict: CreateFenceTriggerOp) -> None:
    """Check that there is something to relax, and make it one transaction with what follows on SQLite.

    Its driver begins one with the first change of rows only: a rollback would leave the trigger relaxed.
    """
    connection = None if operations.migration_context.as_sql else operations.get_bind()
    if connection is None:
        return
    if triggers.installed(connection, strict.table_name, schema=strict.schema) != "strict":
        raise ValueError(f"{strict.table_name!r} has no strict trigger that could be relaxed")
    driver: Any = connection.connection.driver_connection
    if connection.dialect.name == "sqlite" and not driver.in_transaction:
        connection.exec_driver_sql("BEGIN IMMEDIATE")


class _OfOwnTable(FenceOperation):
    """An operation that makes or drops a table of fencelock's own."""

    table: ClassVar[Callable[..., Table]]
    own_name: ClassVar[str]

    def __init__(self, *, schema: str | None = None) -> None:
        super().__init__(self.own_name, schema=schema)

    def arguments(self) -> dict[str, Any]:
        return {"schema": self.schema}


class _OfFenceTable(_OfOwnTable):
    table = fence_table
    own_name = FENCE_TABLE


class _OfLeaseTable(_OfOwnTable):
    table = lease_table
    own_name = LEASE_TABLE


@Operations.register_operation("create_fence_table")
class CreateFenceTableOp(_OfFenceTable):
    """The table behind `gate`."""

    name = "create_fence_table"

    def reverse(self) -> DropFenceTableOp:
        """Return the way back."""
        return DropFenceTableOp(schema=self.schema)

    @classmethod
    def create_fence_table(cls, operations: Operations, *, schema: str | None = None) -> None:
        """Make the table `fencelock_fences`, as `fencelock.guard.fence_table` describes it."""
        operations.invoke(cls(schema=schema))


@Operations.register_operation("drop_fence_table")
class DropFenceTableOp(_OfFenceTable):
    """The fence table goes, and with it the fence of every resource."""

    name = "drop_fence_table"

    def reverse(self) -> CreateFenceTableOp:
        """Return the way back."""
        return CreateFenceTableOp(schema=self.schema)

    @classmethod
    def drop_fence_table(cls, operations: Operations, *, schema: str | None = None) -> None:
        """Drop the table `fencelock_fences`; `gate` has forgotten every holder then."""
        operations.invoke(cls(schema=schema))


@Operations.register_operation("create_lease_table")
class CreateLeaseTableOp(_OfLeaseTable):
    """The table in which a database grants leases."""

    name = "create_lease_table"

    def reverse(self) -> DropLeaseTableOp:
        """Return the way back."""
        return DropLeaseTableOp(schema=self.schema)

    @classmethod
    def create_lease_table(cls, operations: Operations, *, schema: str | None = None) -> None:
        """Make the table `fencelock_leases`, as `fencelock.lease_table` describes it."""
        operations.invoke(cls(schema=schema))


@Operations.register_operation("drop_lease_table")
class DropLeaseTableOp(_OfLeaseTable):
    """The table of leases goes, and with it the last token of every resource."""

    name = "drop_lease_table"

    def reverse(self) -> CreateLeaseTableOp:
        """Return the way back."""
        return CreateLeaseTableOp(schema=self.schema)

    @classmethod
    def drop_lease_table(cls, operations: Operations, *, schema: str | None = None) -> None:
        """Drop the table `fencelock_leases`; the database has forgotten every token then."""
        operations.invoke(cls(schema=schema))


#: What autogenerate says of tables of fencelock's own, by their names.
_OWN_TABLES: dict[str, tuple[type[_OfOwnTable], type[_OfOwnTable]]] = {
    FENCE_TABLE: (CreateFenceTableOp, DropFenceTableOp),
    LEASE_TABLE: (CreateLeaseTableOp, DropLeaseTableOp),
}


def _of_batch(operations: BatchOperations) -> dict[str, Any]:
    return {"table_name": operations.impl.table_name, "schema": operations.impl.schema}


def _dialect(operations: Operations | BatchOperations) -> str:
    return operations.migration_context.dialect.name


@Operations.implementation_for(AddFenceOp)
def _add_fence(operations: Operations, op: AddFenceOp) -> None:
    operations.invoke(AddColumnOp(op.table_name, new_column(FENCE_COLUMN, {}), schema=op.schema))
    if op.trigger:
        _create_trigger(operations, op)


@Operations.implementation_for(DropFenceOp)
def _drop_fence(operations: Operations, op: DropFenceOp) -> None:
    _drop_trigger(operations, op)
    operations.invoke(DropColumnOp(op.table_name, FENCE_COLUMN, schema=op.schema))


@Operations.implementation_for(AddWriteIdOp)
def _add_write_id(operations: Operations, op: AddWriteIdOp) -> None:
    operations.invoke(AddColumnOp(op.table_name, new_column(WRITE_COLUMN, {}), schema=op.schema))


@Operations.implementation_for(DropWriteIdOp)
def _drop_write_id(operations: Operations, op: DropWriteIdOp) -> None:
    operations.invoke(DropColumnOp(op.table_name, WRITE_COLUMN, schema=op.schema))


@Operations.implementation_for(CreateFenceTriggerOp)
def _create_trigger(operations: Operations, op: FenceOperation) -> None:
    strict, ids = op.trigger == "strict", op.trigger is True and not isinstance(op, AddFenceOp)
    dialect = _dialect(operations)
    _drop_renamed(operations, op)
    _execute(operations, triggers.create(op.table_name, dialect, strict=strict, ids=ids, schema=op.schema))


@Operations.implementation_for(DropFenceTriggerOp)
def _drop_trigger(operations: Operations | BatchOperations, op: FenceOperation) -> None:
    _drop_renamed(operations, op)
    _execute(operations, triggers.drop(op.table_name, _dialect(operations), schema=op.schema))


def _drop_renamed(operations: Operations | BatchOperations, op: FenceOperation) -> None:
    """Take away what a renamed table has brought along, which a script without a database cannot know of."""
    if not operations.migration_context.as_sql:
        connection = operations.get_bind()
        _execute(operations, triggers.drop_renamed(connection, op.table_name, schema=op.schema))


@Operations.implementation_for(CreateFenceTableOp)
@Operations.implementation_for(CreateLeaseTableOp)
def _create_table(operations: Operations, op: _OfOwnTable) -> None:
    table = CreateTableOp.from_table(_own_table(operations, op))
    table.if_not_exists = op.table_name == LEASE_TABLE  # `fencelock init` may have been first
    operations.invoke(table)


@Operations.implementation_for(DropFenceTableOp)
@Operations.implementation_for(DropLeaseTableOp)
def _drop_table(operations: Operations, op: _OfOwnTable) -> None:
    operations.invoke(DropTableOp(op.table_name, schema=op.schema))


def _own_table(operations: Operations, op: _OfOwnTable) -> Table:
    target = operations.migration_context.opts.get("target_metadata")
    convention = target.naming_convention if isinstance(target, MetaData) else None
    return type(op).table(MetaData(naming_convention=convention), schema=op.schema)


def _execute(operations: Operations | BatchOperations, statements: Iterable[triggers.FenceDDL]) -> None:
    """Execute the statements, or print them as the database's own client reads them."""
    context = operations.migration_context
    for statement in statements:
        if context.as_sql and context.dialect.name in {"mysql", "mariadb"}:
            sql = str(statement.compile(dialect=context.dialect))
            compound = ";" in sql  # the client ends a statement at its first semicolon
            context.impl.static_output(f"DELIMITER //\n{sql}//\nDELIMITER ;" if compound else f"{sql};")
        else:
            context.impl.execute(statement)


@renderers.dispatch_for(FenceOperation)
def _render(context: AutogenContext, op: FenceOperation) -> str:
    table = [] if isinstance(op, _OfOwnTable) else [repr(str(op.table_name))]
    named = [f"{name}={value!r}" for name, value in op.arguments().items() if value]
    return f"{context.opts['alembic_module_prefix'] or ''}{op.name}({', '.join([*table, *named])})"


def compare_trigger(  # noqa: PLR0917  Alembic's signature
    context: AutogenContext,
    changes: ModifyTableOps,
    schema: str | None,
    table_name: str,
    in_database: Table | None,
    in_model: Table | None,
) -> PriorityDispatchResult:
    """Find a trigger that is missing, too many or another one; those of a column that comes or goes aside."""
    wanted = False if in_model is None else _wanted(in_model)
    found = _found(context, table_name, schema) if in_database is not None else False
    if _comes_or_goes(in_database, in_model) and True not in (wanted, found):
        pass  # the trigger goes with the column
    elif wanted and wanted != found:
        changes.ops.append(CreateFenceTriggerOp(table_name, schema=schema, trigger=wanted, replaces=found))
    elif found and not wanted:
        changes.ops.append(DropFenceTriggerOp(table_name, schema=schema, trigger=found))
    return PriorityDispatchResult.CONTINUE


def _wanted(table: Table) -> FoundTrigger:
    """Return the trigger that a table shall have; without the column there are no write ids to give."""
    wanted = trigger_of(table)
    return "fence" if wanted is True and WRITE_COLUMN not in table.c else wanted


def _comes_or_goes(in_database: Table | None, in_model: Table | None) -> bool:
    return (
        in_database is not None
        and in_model is not None
        and (FENCE_COLUMN in in_database.c) != (FENCE_COLUMN in in_model.c)
    )


def _found(context: AutogenContext, table_name: str, schema: str | None) -> FoundTrigger:
    connection = context.connection
    if connection is None or not triggers.knows(connection.dialect.name):
        return False
    return triggers.installed(connection, table_name, schema=schema)


def use_operations(
    context: AutogenContext, upgrade: UpgradeOps, _schemas: Iterable[str | None]
) -> PriorityDispatchResult:
    """Say it with the operations of this module, outside of batches: those copy tables on SQLite.

    What drops something goes before the other changes of a table and what adds something after them, so that
    the way back has the right order, too.
    """
    upgrade.ops[:] = [said for op in upgrade.ops for said in _said_anew(context, op)]
    return PriorityDispatchResult.CONTINUE


_DROPS = (DropFenceTriggerOp, DropWriteIdOp, DropFenceOp)
_ADDS = (AddFenceOp, AddWriteIdOp, CreateFenceTriggerOp)


def _order(op: MigrateOperation) -> int:
    """Return where an operation comes: a trigger comes after its columns, and goes before them."""
    return next(at for at, kind in enumerate((*_DROPS, *_ADDS)) if isinstance(op, kind))


def _said_anew(context: AutogenContext, op: MigrateOperation) -> Iterator[MigrateOperation]:
    if isinstance(op, DropTableOp) and op.table_name == LEASE_TABLE:
        return  # `fencelock init` has made it, and no model knows of it
    if isinstance(op, CreateTableOp | DropTableOp) and (own := _OWN_TABLES.get(op.table_name)):
        yield own[isinstance(op, DropTableOp)](schema=op.schema)
    elif isinstance(op, CreateTableOp):
        op.info = {key: value for key, value in op.info.items() if key not in GUARDS_OWN}
        yield op
    elif isinstance(op, ModifyTableOps):
        changes = [_fence_change(context, change) for change in op.ops]
        yield from sorted((each for each in changes if isinstance(each, _DROPS)), key=_order)
        op.ops[:] = [each for each in changes if not isinstance(each, FenceOperation)]
        if op.ops:
            yield op
        yield from sorted((each for each in changes if isinstance(each, _ADDS)), key=_order)
    else:
        yield op


def _fence_change(context: AutogenContext, op: MigrateOperation) -> MigrateOperation:
    if isinstance(op, AddColumnOp) and FENCE_MARK.items() <= op.column.info.items():
        wanted = _wanted(op.column.table)
        trigger = wanted if wanted == "strict" else wanted == "fence"
        return AddFenceOp(op.table_name, schema=op.schema, trigger=trigger)
    if isinstance(op, AddColumnOp) and WRITE_MARK.items() <= op.column.info.items():
        return AddWriteIdOp(op.table_name, schema=op.schema)
    if isinstance(op, DropColumnOp) and op.column_name in {FENCE_COLUMN, WRITE_COLUMN}:
        column = op.to_column()
        if isinstance(column.type, BigInteger) and not column.nullable:
            if op.column_name == WRITE_COLUMN:
                return DropWriteIdOp(op.table_name, schema=op.schema)
            found = _found(context, op.table_name, op.schema)
            trigger = found if found == "strict" else found == "fence"
            return DropFenceOp(op.table_name, schema=op.schema, trigger=trigger)
    return op
