"""For autogenerate and `alembic check`: compares triggers, and uses fencelock's own operations."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Final

from alembic import util
from alembic.operations.ops import (
    AddColumnOp,
    CreateIndexOp,
    CreateTableOp,
    DropColumnOp,
    DropIndexOp,
    DropTableOp,
    MigrateOperation,
    ModifyTableOps,
)
from sqlalchemy import BigInteger, Table

from fencelock.alembic.operations import (
    OWN_TABLES,
    AddFenceOp,
    AddWriteIdOp,
    CreateFenceTableOp,
    CreateFenceTriggerOp,
    CreateLeaseTableOp,
    CreateReceiptTableOp,
    DropFenceOp,
    DropFenceTableOp,
    DropFenceTriggerOp,
    DropReceiptTableOp,
    DropWriteIdOp,
    FenceOperation,
    FoundTrigger,
)
from fencelock.authority.database.table import LEASE_TABLE
from fencelock.guard import triggers
from fencelock.guard.tables import (
    FENCE_COLUMN,
    FENCE_MARK,
    FENCE_TABLE,
    GUARDS_OWN,
    RECEIPT_TABLE,
    WRITE_COLUMN,
    WRITE_MARK,
    trigger_of,
)

if TYPE_CHECKING:
    from alembic.autogenerate.api import AutogenContext
    from alembic.operations.ops import UpgradeOps

#: The result with which a comparator lets other comparators run, too; since Alembic 1.18.
_CONTINUE: Final = getattr(getattr(util, "PriorityDispatchResult", None), "CONTINUE", None)


def compare_trigger(  # noqa: PLR0917  Alembic's signature
    context: AutogenContext,
    changes: ModifyTableOps,
    schema: str | None,
    table_name: str,
    in_database: Table | None,
    in_model: Table | None,
) -> object:
    wanted = False if in_model is None else _wanted(in_model)
    found = _found(context, table_name, schema) if in_database is not None else False
    if _comes_or_goes(in_database, in_model) and {True, "strict"}.isdisjoint((wanted, found)):
        pass  # the operation that adds or drops the column does the same with the trigger
    elif wanted and wanted != found:
        changes.ops.append(CreateFenceTriggerOp(table_name, schema=schema, trigger=wanted, replaces=found))
    elif found and not wanted:
        changes.ops.append(DropFenceTriggerOp(table_name, schema=schema, trigger=found))
    return _CONTINUE


def _wanted(table: Table) -> FoundTrigger:
    """Return the trigger that a table should have: without `last_write_id`, one that sets no write ids."""
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


def use_operations(context: AutogenContext, upgrade: UpgradeOps, _schemas: Iterable[str | None]) -> object:
    """Replace changes of fences by fencelock's operations, outside of batches (which copy tables on SQLite).

    Operations that drop something come before the other changes of their table, and operations that add
    something come after these. So the reversed order of the downgrade is right, too.
    """
    upgrade.ops[:] = [said for op in upgrade.ops for said in _translated(context, op)]
    return _CONTINUE


#: A trigger is created after its columns, and dropped before them.
_ORDER: Final[tuple[type[FenceOperation], ...]] = (
    DropFenceTriggerOp,
    DropWriteIdOp,
    DropFenceOp,
    AddFenceOp,
    AddWriteIdOp,
    CreateFenceTriggerOp,
)
_OWN = {
    (FENCE_TABLE, CreateTableOp): CreateFenceTableOp,
    (FENCE_TABLE, DropTableOp): DropFenceTableOp,
    (LEASE_TABLE, CreateTableOp): CreateLeaseTableOp,
    (RECEIPT_TABLE, CreateTableOp): CreateReceiptTableOp,
    (RECEIPT_TABLE, DropTableOp): DropReceiptTableOp,
}


def _translated(context: AutogenContext, op: MigrateOperation) -> Iterator[MigrateOperation]:
    if isinstance(op, CreateTableOp | DropTableOp) and op.table_name in OWN_TABLES:
        # The table of leases is never dropped. It may be in no model, because `fencelock init` has made it.
        if (own := _OWN.get((op.table_name, type(op)))) is not None:
            yield own(op.table_name, schema=op.schema)
            if own is CreateFenceTableOp:
                yield AddWriteIdOp(op.table_name, schema=op.schema)
    elif isinstance(op, CreateTableOp):
        op.info = {key: value for key, value in op.info.items() if key not in GUARDS_OWN}
        yield op
    elif isinstance(op, ModifyTableOps):
        changes = [_translated_change(context, change) for change in op.ops]
        ours = sorted(
            [each for each in changes if isinstance(each, FenceOperation)],
            key=lambda each: _ORDER.index(type(each)),
        )
        yield from (each for each in ours if each.name.startswith("drop"))
        op.ops[:] = [each for each in changes if not isinstance(each, FenceOperation)]
        around = [] if ours else [*_restored(context, op)]
        yield from around
        if op.ops:
            yield op
        yield from around
        yield from (each for each in ours if not each.name.startswith("drop"))
    else:
        yield op


def _restored(context: AutogenContext, op: ModifyTableOps) -> Iterator[FenceOperation]:
    """Yield the operations that create a trigger again after a batch has copied its table on SQLite.

    They are also put before the batch, because the downgrade reverses the order, and copies the table, too.
    """
    is_copied = any(not isinstance(each, CreateIndexOp | DropIndexOp) for each in op.ops)
    is_batch = context.opts.get("render_as_batch") and context.dialect is not None
    if is_batch and is_copied and context.dialect.name == "sqlite":
        found = _found(context, op.table_name, op.schema)
        if found:
            yield CreateFenceTriggerOp(op.table_name, schema=op.schema, trigger=found, replaces=found)


def _translated_change(context: AutogenContext, op: MigrateOperation) -> MigrateOperation:
    if isinstance(op, AddColumnOp) and FENCE_MARK.items() <= op.column.info.items():
        trigger = _wanted(op.column.table) == "fence"
        return AddFenceOp(op.table_name, schema=op.schema, trigger=trigger)
    if isinstance(op, AddColumnOp) and WRITE_MARK.items() <= op.column.info.items():
        return AddWriteIdOp(op.table_name, schema=op.schema)
    if isinstance(op, DropColumnOp) and op.column_name in {FENCE_COLUMN, WRITE_COLUMN}:
        column = op.to_column()
        if isinstance(column.type, BigInteger) and not column.nullable:
            if op.column_name == WRITE_COLUMN:
                return DropWriteIdOp(op.table_name, schema=op.schema)
            trigger = _found(context, op.table_name, op.schema) == "fence"
            return DropFenceOp(op.table_name, schema=op.schema, trigger=trigger)
    return op
