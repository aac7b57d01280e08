"""Which tables are fenced, and which resource guards each of their rows.

A fenced table is one whose column `last_fencing_token` carries the mark that `fence_column` puts on it; the
models' mixins make their column with it. What the guard knows of such a table is kept in `Table.info`, so it
lives and dies with the table, and a copy made by `to_metadata` takes it along.

Apart from the rest because nothing here executes anything: it answers questions about schema objects.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal, NoReturn, TypeAlias
from weakref import ReferenceType, WeakSet, ref

from sqlalchemy import (
    BigInteger,
    Column,
    Table,
    text,
)
from sqlalchemy.sql import FromClause
from sqlalchemy.sql.selectable import AliasedReturnsRows

from fencelock.errors import FenceError

if TYPE_CHECKING:
    from sqlalchemy.orm import Mapper

from fencelock.guard.templates import ResourceTemplate

FENCE_COLUMN: Final = "last_fencing_token"
WRITE_COLUMN: Final = "last_write_id"
FENCE_TABLE: Final = "fencelock_fences"
TRANSLATED: Final = "schema_translate_map"
"""The execution option that says which schema tables are in."""


class _Unpicklable:
    """What another process must not load: it may have no guard."""

    __slots__ = ()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "metadata with a fenced table cannot be pickled, because nothing would guard it where it is "
            "loaded: import the models there"
        )


FENCE_MARK: Final[dict[Any, Any]] = {"fencelock": _Unpicklable()}
WRITE_MARK: Final[dict[Any, Any]] = {"fencelock.write_id": True}
TRIGGER_MARK: Final = "fencelock.trigger"
RESOURCE_MARK: Final = "fencelock.resource"
_FENCED: Final = "fencelock.fenced"
_SUB_TABLE_OF: Final = "fencelock.sub_table_of"
GUARDS_OWN: Final = frozenset({_FENCED, _SUB_TABLE_OF})
"""What the guard keeps in `Table.info`, where it is of no interest to anybody else."""

FenceTrigger: TypeAlias = bool | Literal["strict"]
"""A table's trigger: none, one that keeps the fence from going down, or one that is strict as well."""


@dataclass(eq=False, slots=True)
class FencedTable(_Unpicklable):
    """What the guard knows of one fenced table.

    Attributes:
        table: the table.
        fence: its column `last_fencing_token`.
        write: its column `last_write_id`, which only the fence table lacks.
        template: how the resource of a row is named.
        of_models: the base mappers of the models that it belongs to, as weak references.
        statements: of claims and gates, which are made once.
    """

    table: Table
    template: ResourceTemplate
    of_models: list[ReferenceType[Mapper[Any]]] = field(default_factory=list)
    fence: Column[int] = field(init=False)
    write: Column[int] | None = field(init=False)
    statements: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        self.fence = self.table.c[FENCE_COLUMN]
        self.write = self.table.c.get(WRITE_COLUMN)

    def mappers(self) -> list[Mapper[Any]]:
        """Return the base mappers of the models that it belongs to: mostly one."""
        return [mapper for reference in self.of_models if (mapper := reference()) is not None]

    def note_mapper(self, mapper: Mapper[Any]) -> None:
        """Note a model that it belongs to, by its base mapper."""
        self.of_models.append(ref(mapper))

    @property
    def name(self) -> str:
        """The table's name as error messages and users know it."""
        return self.table.name

    @property
    def strict(self) -> bool:
        """Whether the table has a trigger that wants each statement to carry its token."""
        return self.fence.info.get(TRIGGER_MARK) == "strict"


_names: dict[str, WeakSet[Table]] = {}
"""By name in lower case, the fenced tables and their sub-tables."""

NO_OPTIONS: Final[Mapping[str, Any]] = {}


def register(fenced: FencedTable) -> FencedTable:
    """Make a table known as fenced."""
    fenced.table.info[_FENCED] = fenced
    _note_name(fenced.table)
    return fenced


def _note_name(table: Table) -> None:
    _names.setdefault(table.name.lower(), WeakSet()).add(table)


def register_sub_table(table: Table, base: FencedTable) -> None:
    """Make `table` known as one that holds the rest of the rows of a fenced one (joined inheritance)."""
    table.info[_SUB_TABLE_OF] = base
    _note_name(table)


def new_fence_column(info: Mapping[Any, Any] | None = None) -> Column[int]:
    """Return a column `last_fencing_token BIGINT NOT NULL DEFAULT 0`."""
    return Column(FENCE_COLUMN, BigInteger, nullable=False, server_default=text("0"), info=dict(info or {}))


def new_write_column(info: Mapping[Any, Any] | None = None) -> Column[int]:
    """Return a column `last_write_id BIGINT NOT NULL DEFAULT 0`."""
    return Column(WRITE_COLUMN, BigInteger, nullable=False, server_default=text("0"), info=dict(info or {}))


def trigger_of(table: Table) -> FenceTrigger:
    """Return which trigger the table shall have, as its model or its `fence_column` says."""
    fence = table.c.get(FENCE_COLUMN)
    wanted: FenceTrigger = False if fence is None else fence.info.get(TRIGGER_MARK, False)
    return wanted


def check_trigger(wanted: object) -> FenceTrigger:
    """Return what was asked for.

    Raises:
        ValueError: if there is no such trigger.
    """
    if wanted is True or wanted is False:
        return wanted
    if wanted == "strict":
        return "strict"
    raise ValueError(f"a fence's trigger is False, True or 'strict', not {wanted!r}")


def fenced_names() -> list[str]:
    """Return the names, in lower case, of the fenced tables that are alive, and of their sub-tables.

    Those that lower case may have changed for good, such as "İ", come as they are too.
    """
    names = [name for name, tables in list(_names.items()) if len(tables)]
    return names + [table.name for name in names if not name.isascii() for table in list(_names[name])]


def registered(table: Table) -> FencedTable | None:
    """Return what was registered of this very table; None for a copy, and for a table never asked for."""
    found: FencedTable | None = getattr(table, "info", NO_OPTIONS).get(_FENCED)
    # Annotated tables hash like the original.
    return found if found is not None and (found.table is table or hash(found.table) == hash(table)) else None


def fenced_table(target: object) -> FencedTable | None:
    """Return what is known of a table (or an alias of one), or None if it is not fenced.

    Raises:
        FenceError: if it has a fence, and nothing says which resource guards a row.
    """
    table = target if type(target) is Table else underlying(target)
    fenced: FencedTable | None = getattr(table, "info", NO_OPTIONS).get(_FENCED)
    if fenced is not None and (
        fenced.table is table or hash(fenced.table) == hash(table)  # annotated tables hash like the original
    ):
        return fenced
    if not isinstance(table, Table):
        return None
    fence = table.c.get(FENCE_COLUMN)
    if fence is None or "fencelock" not in fence.info:
        return None
    return register(_copied(table, fenced))


def note_column(column: Column[Any], parent: object) -> None:
    """Make a table known by its name as soon as it has its fence: a listener for all columns.

    Its first write may well be one that is told by the table's name alone, such as text. The rest is found
    out when the table is asked for: not all of its columns are there yet.
    """
    if column.name == FENCE_COLUMN and "fencelock" in column.info and isinstance(parent, Table):
        _note_name(parent)


def _copied(table: Table, original: FencedTable | None) -> FencedTable:
    """Describe a marked table met for the first time: a Core table, or a copy of a known one."""
    check_write_column(table, table.name)
    if original is None:
        return FencedTable(table, template_of(table, table.name, dict(table.c.items())))
    columns = {name: table.c[column.key] for name, column in original.template.columns.items()}
    return FencedTable(table, ResourceTemplate(original.template.text, columns), list(original.of_models))


def check_write_column(table: Table, owner: str) -> None:
    """Refuse a fenced table that has nowhere to note which write it has seen last.

    Raises:
        FenceError: if it is so.
    """
    if WRITE_COLUMN not in table.c:
        raise FenceError(
            f"{owner} is fenced, and its table {table.name!r} has no column {WRITE_COLUMN!r}: add it to the "
            f"Table with write_id_column(), and to the database with a migration, "
            f"op.add_write_id({table.name!r})"
        )


def template_of(
    table: Table, owner: str, attributes: Mapping[str, Column[Any]], said: str | None = None
) -> ResourceTemplate:
    """Return how the resources of a table's rows are named: as its model says, or else its column.

    Args:
        table: has the column.
        owner: the model or table, as errors name it.
        attributes: the columns that the template may name.
        said: what the model says.

    Raises:
        FenceError: if neither says it.
    """
    text = said if said is not None else table.c[FENCE_COLUMN].info.get(RESOURCE_MARK)
    if text is None:
        raise FenceError(
            f"{owner} is fenced and does not say which lease guards a row: write "
            f'__fence_resource__ = "order:{{id}}" in the model, with columns of its table in braces, or '
            f'fence_column(resource="order:{{id}}") in Core; a word without braces stands for the whole table'
        )
    return ResourceTemplate.parse(text, attributes, owner)


def is_strict(name: str) -> bool:
    """Tell whether a fenced table of this name, in lower case, has a strict trigger."""
    found = map(fenced_table, list(_names.get(name, ())))
    return any(fenced is not None and fenced.strict for fenced in found)


def sub_table_of(target: object) -> FencedTable | None:
    """Return the fenced table whose rows this table completes, if it is such a one."""
    found: FencedTable | None = getattr(underlying(target), "info", {}).get(_SUB_TABLE_OF)
    return found


def underlying(target: object) -> Any:
    """Return the table behind aliases."""
    while isinstance(target, AliasedReturnsRows):
        target = target.element
    return target if isinstance(target, FromClause) else None
