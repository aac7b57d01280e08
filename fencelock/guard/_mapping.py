"""What happens when SQLAlchemy maps a class to a fenced table, by a mixin or without one.

Apart from `model` because classes without the mixin count too: whoever maps a `Table` with a `fence_column()`
has collections, links and joined sub-tables guarded, too.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from weakref import WeakSet

from sqlalchemy import Join, Table
from sqlalchemy.orm import Mapper

from fencelock.guard._sqlalchemy import equal_to_parents
from fencelock.guard.objects import watch_loads, watch_mapper
from fencelock.guard.tables import (
    FENCE_COLUMN,
    FENCE_MARK,
    TRIGGER_MARK,
    FencedTable,
    ResourceTemplate,
    check_trigger,
    check_write_column,
    fenced_table,
    register,
    register_sub_table,
    registered,
    template_of,
)

_mapped: WeakSet[Mapper[Any]] = WeakSet()
"""Those that are known to the guard; each is told of by whatever base class it has."""


def on_any_mapped(mapper: Mapper[Any], model: type[Any]) -> None:
    """Make the tables of a model without the mixin known, if one of them is fenced, or is said to be."""
    says_so = getattr(model, "__fence_resource__", None) is not None
    if says_so or any(map(fenced_table, mapper.tables)):
        on_mapped(mapper, model)


def on_mapped(mapper: Mapper[Any], model: type[Any]) -> None:
    """Make the tables of a freshly mapped model known to the guard.

    One that is mapped to a query, as an `AbstractConcreteBase` is, has no rows of its own: where it writes,
    the statements are guarded like any others.
    """
    if mapper in _mapped or not isinstance(mapper.persist_selectable, Table | Join):
        return
    _mapped.add(mapper)
    base = _base_table(mapper, model)
    _refuse_another_name(mapper, base)
    _refuse_another_key(mapper, model, base)
    if trigger := check_trigger(getattr(model, "__fence_trigger__", False)):
        base.c[FENCE_COLUMN].info[TRIGGER_MARK] = trigger
    check_write_column(base, model.__name__)
    template = _template(mapper, model, base)
    fenced = registered(base)
    if fenced is None:
        fenced = register(FencedTable(base, template))
    elif template.text != fenced.template.text:
        raise ValueError(
            f"{model.__name__}.__fence_resource__ differs from that of another model of table "
            f"{base.name!r}; the same rows cannot be guarded by two resources"
        )
    for table in mapper.tables:
        if isinstance(table, Table) and table is not base:
            register_sub_table(table, fenced)
    if mapper.base_mapper not in fenced.mappers():
        fenced.note_mapper(mapper.base_mapper)
    watch_mapper(mapper, fenced)
    watch_loads(mapper)


def _base_table(mapper: Mapper[Any], model: type[Any]) -> Table:
    for table in mapper.tables:
        if isinstance(table, Table) and FENCE_COLUMN in table.c:
            table.c[FENCE_COLUMN].info.update(FENCE_MARK)
            return table
    raise ValueError(
        f"{model.__name__} is to be fenced, but its table {mapper.local_table.description!r} has no column "
        f"{FENCE_COLUMN!r}; add it to the Table with fence_column(), and to the database with a migration"
    )


def _refuse_another_name(mapper: Mapper[Any], base: Table) -> None:
    """Refuse a model, or a parent in the same table, whose objects would be loaded without their fence."""
    for each in mapper.iterate_to_root():
        if base not in each.tables or FENCE_COLUMN in each.columns:
            continue
        name = each.class_.__name__
        if each is not mapper:
            raise ValueError(
                f"{mapper.class_.__name__} is to be fenced, and shares the table {base.name!r} with {name}, "
                f"which it inherits from and which has no {FENCE_COLUMN}: have {name} inherit FencedModel, "
                f"or give it the column by fence_column(), for what guards a table guards all its rows"
            )
        raise ValueError(
            f"{name} maps the column {FENCE_COLUMN!r} under another name, or not at all; the guard "
            f"stamps objects through the attribute of this very name"
        )


def _refuse_another_key(mapper: Mapper[Any], model: type[Any], base: Table) -> None:
    """Refuse a model that names its rows by another key than its table."""
    of_table, of_model = list(base.primary_key), list(mapper.primary_key)
    for each in reversed(list(mapper.iterate_to_root())):  # a joined one's are its parent's, equal to its own
        equal = dict(equal_to_parents(each))
        of_model = [column if column.table is base else equal.get(column, column) for column in of_model]
    if of_model != of_table:
        raise ValueError(
            f"{model.__name__} names its rows by {[column.key for column in mapper.primary_key]!r}, and the "
            f"primary key of its fenced table {base.name!r} is {[each.key for each in base.primary_key]!r}; "
            f"by it the guard knows what was loaded of a row, so have both be the same, in the same order "
            f"(see primary_key in __mapper_args__)"
        )


def _template(mapper: Mapper[Any], model: type[Any], base: Table) -> ResourceTemplate:
    said = getattr(model, "__fence_resource__", None)
    known = registered(base)
    if said is None and known is not None:  # another model of the same table has said it
        return known.template
    columns: Iterable[tuple[str, Any]] = mapper.columns.items()  # column_attrs would configure the mappers
    attributes = {name: column for name, column in columns if getattr(column, "table", None) is base}
    return template_of(base, model.__name__, attributes, said)
