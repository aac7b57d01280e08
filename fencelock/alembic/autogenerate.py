"""For autogenerate and `alembic check`: compares triggers, and uses fencelock's own operations."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final

from alembic import util
from alembic.operations import ops
from sqlalchemy import BigInteger, Table

from fencelock._databases import EVENT_TABLE
from fencelock.alembic import operations
from fencelock.authority.database.table import LEASE_TABLE
from fencelock.guard import tables, triggers

if TYPE_CHECKING:
    from alembic.autogenerate.api import AutogenContext
    from alembic.operations.ops import UpgradeOps

#: The result with which a comparator lets other comparators run, too; since Alembic 1.18.
_CONTINUE: Final = getattr(getattr(util, "PriorityDispatchResult", None), "CONTINUE", None)


def compare_trigger(  # noqa: PLR0917  Alembic's signature
    context: AutogenContext,
    changes: ops.ModifyTableOps,
    schema: str | None,
    table_name: str,
    in_database: Table | None,
    in_model: Table | None,
) -> object:
    wanted = False if in_model is None else tables.trigger_of(in_model)
    found, left_out = _found(context, table_name, schema) if in_database is not None else (False, [])
    if in_model is not None and wanted and not (wanted == found == _found(context, in_model)[0]):
        excluded = triggers.excluded_names(in_model)
        creating = operations.CreateFenceTriggerOp(
            table_name, schema=schema, trigger=wanted, excluded=excluded
        )
        if found:
            creating.replaces, creating.excluded_before = found, left_out
        changes.ops.append(creating)
    elif found and not wanted:
        changes.ops.append(
            operations.DropFenceTriggerOp(table_name, schema=schema, trigger=found, excluded=left_out)
        )
    return _CONTINUE


def _found(
    context: AutogenContext, table: Any, schema: str | None = None
) -> tuple[tables.FenceTrigger, list[str]]:
    """Return the trigger in the database, and if a name is given, the columns that it lets change."""
    connection = context.connection
    if connection is None or not triggers.knows(connection.dialect.name):
        return False, []
    found = triggers.installed(connection, table, schema=schema)
    is_wanted = found and isinstance(table, str)
    return found, triggers.excluded_in(connection, table, schema=schema) if is_wanted else []


def use_operations(context: AutogenContext, upgrade: UpgradeOps, _schemas: Iterable[str | None]) -> object:
    """Replace changes of fences by fencelock's operations, outside of batches (which copy tables on SQLite).

    Operations that drop something come before the other changes of their table, and operations that add
    something come after these. So the reversed order of the downgrade is right, too.
    """
    upgrade.ops[:] = [
        said for op in upgrade.ops if not _is_kept(context, op) for said in _translated(context, op)
    ]
    return _CONTINUE


def _is_kept(context: AutogenContext, op: ops.MigrateOperation) -> bool:
    """Tell whether an operation drops a table that `fencelock init` or `history.record` has made."""
    name = op.table_name if isinstance(op, ops.DropTableOp | ops.ModifyTableOps) else None
    return name in {LEASE_TABLE, EVENT_TABLE} and _in_model(context, op) is None


def _in_model(context: AutogenContext, op: Any) -> Table | None:
    key = op.table_name if op.schema is None else f"{op.schema}.{op.table_name}"
    return context.table_key_to_table.get(key)


_COLUMNS: Final = frozenset({tables.FENCE_COLUMN, tables.WRITE_COLUMN})
_OWN: Final = {
    (tables.FENCE_TABLE, ops.CreateTableOp): operations.CreateFenceTableOp,
    (tables.FENCE_TABLE, ops.DropTableOp): operations.DropFenceTableOp,
    (LEASE_TABLE, ops.CreateTableOp): operations.CreateLeaseTableOp,
    (tables.RECEIPT_TABLE, ops.CreateTableOp): operations.CreateReceiptTableOp,
    (tables.RECEIPT_TABLE, ops.DropTableOp): operations.DropReceiptTableOp,
}


def _translated(context: AutogenContext, op: ops.MigrateOperation) -> Iterator[ops.MigrateOperation]:
    if isinstance(op, ops.CreateTableOp | ops.DropTableOp) and op.table_name in operations.OWN_TABLES:
        if (own := _OWN.get((op.table_name, type(op)))) is not None:
            yield own(op.table_name, schema=op.schema)
    elif isinstance(op, ops.CreateTableOp):
        op.info = {key: value for key, value in op.info.items() if key not in tables.GUARDS_OWN}
        yield op
    elif isinstance(op, ops.ModifyTableOps):
        ours = _taken_out(op)
        before = [each for each in ours if each.name.startswith("drop")]
        after = [each for each in ours if each not in before]
        if not before and (found := _to_renew(context, op)) is not None:
            in_model = _in_model(context, op)
            excluded = [] if in_model is None else triggers.excluded_names(in_model)
            again = operations.CreateFenceTriggerOp(
                op.table_name, schema=op.schema, trigger=found.trigger, excluded=excluded
            )
            before, after = [found], after or [again]
            for each in after:  # then its reverse drops the trigger, and that of `found` creates it again
                each.replaces = False
        yield from before
        if op.ops:
            yield op
        yield from after
    else:
        yield op


def _to_renew(context: AutogenContext, op: ops.ModifyTableOps) -> operations.DropFenceTriggerOp | None:
    """Return the trigger that has to go before changes of its table, and come again after them.

    On SQLite, a batch copies the table without it. Outside of PostgreSQL, a trigger that leaves out columns
    names all others.
    """
    changes = [each for each in op.ops if not isinstance(each, ops.CreateIndexOp | ops.DropIndexOp)]
    if not changes or context.dialect.name == "postgresql":
        return None
    found, excluded = _found(context, op.table_name, op.schema)
    is_copied = context.opts.get("render_as_batch") and context.dialect.name == "sqlite"
    if not found or not (is_copied or excluded):
        return None
    return operations.DropFenceTriggerOp(op.table_name, schema=op.schema, trigger=found, excluded=excluded)


def _taken_out(op: ops.ModifyTableOps) -> list[operations.FenceOperation]:
    """Take the changes of a table's fence out of its changes, and return operations for them.

    If only one of the two columns comes or goes, its change stays what it is.
    """
    ours = [each for each in op.ops if isinstance(each, operations.FenceOperation)]
    added = [each for each in op.ops if isinstance(each, ops.AddColumnOp) and _is_added(each)]
    dropped = [each for each in op.ops if isinstance(each, ops.DropColumnOp) and _is_dropped(each)]
    trigger = ours[0].trigger if ours else False
    excluded = ours[0].excluded if ours else ()
    for columns, kind in ((added, operations.AddFenceOp), (dropped, operations.DropFenceOp)):
        if len(columns) == len(_COLUMNS):
            ours = [kind(op.table_name, schema=op.schema, trigger=trigger, excluded=excluded)]
            op.ops[:] = [each for each in op.ops if each not in columns]
    op.ops[:] = [each for each in op.ops if not isinstance(each, operations.FenceOperation)]
    return ours


def _is_added(op: ops.AddColumnOp) -> bool:
    return any(mark.items() <= op.column.info.items() for mark in (tables.FENCE_MARK, tables.WRITE_MARK))


def _is_dropped(op: ops.DropColumnOp) -> bool:
    column = op.to_column()
    return op.column_name in _COLUMNS and isinstance(column.type, BigInteger) and not column.nullable
