"""The mixins that make a model fenced.

There are two mixins, because one cannot serve both kinds of models. On a `MappedAsDataclass` base, SQLAlchemy
requires that the fields of mixins are dataclass fields. A dataclass mixin would turn plain models into
dataclasses, which are unhashable.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, ClassVar, Final
from weakref import ref

from sqlalchemy import BigInteger, Column, Join, Table, event, text
from sqlalchemy.orm import Mapped, MappedAsDataclass, Mapper, mapped_column

from fencelock.guard import tables
from fencelock.guard._install import install
from fencelock.guard._sqlalchemy import equal_to_parents
from fencelock.guard.objects import attributes_of, watch_mapper
from fencelock.guard.tables import FENCE_COLUMN

_AT_THE_END: Final = 1000
_ZERO: Final = text("0")


def fence_column(
    *,
    resource: str | None = None,
    trigger: tables.FenceTrigger = False,
    lease: tables.FenceLease = "required",
    excluded: Collection[str] = (),
) -> Column[int]:
    """Return the column that makes a Core `Table`, or the table of an imperative mapping, fenced.

    ```python
    stock = Table(
        "stock",
        Base.metadata,
        Column("id", Integer, primary_key=True),
        Column("count", Integer, nullable=False),
        fence_column(resource="stock:{id}"),
        write_id_column(),
    )
    ```

    It is `last_fencing_token BIGINT NOT NULL DEFAULT 0`. The table also needs `write_id_column()`.
    Declarative models get both from `FencedModel`.

    Args:
        resource: the resource that guards a row, such as `"order:{id}"`: see `__fence_resource__`. A model of
            the table may name it instead.
        trigger: which trigger `create_all` makes for the table: see `fencelock.guard.triggers`.
        lease: `"optional"` allows writes under no lease: see `__fence_lease__`.
        excluded: the keys of columns that need no lease: see `__fence_excluded__`.

    Raises:
        ValueError: `trigger` or `lease` has an unknown value.
        TypeError: `excluded` is no set of names.
    """
    install()
    marks = {**tables.FENCE_MARK, tables.TRIGGER_MARK: tables.check_trigger(trigger)}
    if tables.check_lease(lease) == "optional":
        marks[tables.LEASE_MARK] = lease
    if excluded:
        marks[tables.EXCLUDED_MARK] = tables.check_names(excluded)
    return tables.new_column(
        FENCE_COLUMN, marks if resource is None else {**marks, tables.RESOURCE_MARK: resource}
    )


def write_id_column() -> Column[int]:
    """Return the column of a fenced Core `Table` that identifies the last write of a row.

    It is `last_write_id BIGINT NOT NULL DEFAULT 0`. For the other column, see `fence_column()`. Each guarded
    write gives the row a new random id.
    """
    return tables.new_column(tables.WRITE_COLUMN, tables.WRITE_MARK)


class FencedModel:
    """Mixin for a model whose rows refuse writers with a stale fencing token.

    It adds the columns `last_fencing_token` and `last_write_id`, each BIGINT NOT NULL DEFAULT 0. Every UPDATE
    and DELETE that SQLAlchemy sends for the model's table has the condition
    `AND last_fencing_token <= :token`. The token is the held lease's (`fenced_lock`, `bind`). An UPDATE
    raises the fence to the token. Without a lease, the write is refused. Each write gives the row a new write
    id. The unit of work writes an object only if the row was not written since the object was loaded; else it
    raises `StaleReadError`. Both columns belong to the guard, which replaces or refuses assigned values.

    `__fence_resource__` says which lease guards a row. It is a format string over columns of the fenced
    table. The values of these columns must never change, and the database must return them exactly as they
    were written (not in lower case). Text without braces is one resource for the whole table.

    With `__fence_trigger__ = True`, a trigger refuses UPDATEs that lower a fence, from any program. With
    `"strict"` it also refuses an UPDATE that changes neither column. `create_all` makes the trigger, and
    Alembic's autogenerate adds it if it is missing (see `fencelock.guard.triggers`).

    With `__fence_lease__ = "optional"`, code that holds no lease can write, too. Such a write changes the
    write id, but not the fence. It is refused if the row was written since its object was loaded. A holder
    that has read the row before is refused after it. With `"required"`, the default, only a holder can write.

    `__fence_excluded__ = {"views", "last_seen"}` names columns that need no lease. An UPDATE that changes
    only these has no condition, and changes neither fence nor write id. So it stops no other writer, and
    none stops it. Write `Topic.views + 1`, because `topic.views += 1` may lose a count. Columns with an
    `onupdate` go along. Together with another column they are guarded.

    The guard has gaps: rows that you read and do not write (see `claim`), an INSERT by a stale holder (see
    `gate`), changes that the database itself makes (ON DELETE CASCADE and SET NULL, triggers, stored
    functions), and links and `ordering_list` positions that only the other model's relationship writes. All:
    https://fencelock.github.io/fencelock/correctness/

    Example:
        ```python
        class Order(FencedModel, Base):
            __tablename__ = "orders"
            __fence_resource__ = "order:{id}"
            id: Mapped[int] = mapped_column(primary_key=True)
            status: Mapped[str]
        ```

    Raises:
        FenceError: when the class is mapped, if it has no `__fence_resource__`, or its table no
            `last_write_id`.
        ValueError: when the class is mapped, if `__fence_resource__` is malformed, names no column of its
            table, or one whose equal values can be written in several ways; if the table has no
            `last_fencing_token`, or the model gives it another name or has another primary key; if a setting
            has an unknown value; if another model of the table has another setting; or if
            `__fence_excluded__` names an unknown column, one of the guard, of the key or of the resource.
        TypeError: if `__fence_resource__` is no text; if `__fence_excluded__` is no set; if the class is
            a `MappedAsDataclass`, which needs `FencedDataclassModel`; or a SQLModel without the columns as
            class variables.
    """

    __fence_resource__: ClassVar[str]
    __fence_trigger__: ClassVar[tables.FenceTrigger] = False
    __fence_lease__: ClassVar[tables.FenceLease] = "required"
    __fence_excluded__: ClassVar[Collection[str]] = frozenset()

    def __init_subclass__(cls, **options: Any) -> None:
        if issubclass(cls, MappedAsDataclass):
            raise TypeError(f"{cls.__name__} is a dataclass: use FencedDataclassModel instead of FencedModel")
        is_of_pydantic = any(each.__module__.partition(".")[0] == "pydantic" for each in cls.__mro__)
        if is_of_pydantic and not any(
            FENCE_COLUMN in vars(each) for each in cls.__mro__ if not issubclass(FencedModel, each)
        ):
            raise TypeError(
                f"{cls.__name__} is a model of pydantic, which takes Mapped columns for fields: leave "
                "FencedModel out, and write last_fencing_token: ClassVar[Any] = fence_column() and "
                "last_write_id: ClassVar[Any] = write_id_column()"
            )
        super().__init_subclass__(**options)

    last_fencing_token: Mapped[int] = mapped_column(
        BigInteger, server_default=_ZERO, info=tables.FENCE_MARK, sort_order=_AT_THE_END
    )
    last_write_id: Mapped[int] = mapped_column(
        BigInteger, server_default=_ZERO, info=tables.WRITE_MARK, sort_order=_AT_THE_END
    )


class FencedDataclassModel(MappedAsDataclass):
    """`FencedModel` for models that are dataclasses: put it beside `MappedAsDataclass`.

    ```python
    class Item(FencedDataclassModel, MappedAsDataclass, Base):
        __tablename__ = "items"
        __fence_resource__ = "item:{id}"
        id: Mapped[int] = mapped_column(primary_key=True)
        count: Mapped[int] = mapped_column(default=0)
    ```

    The two columns are no parameters of `__init__`, and are left out of comparisons and of `repr`.
    """

    __fence_resource__: ClassVar[str]
    __fence_trigger__: ClassVar[tables.FenceTrigger] = False
    __fence_lease__: ClassVar[tables.FenceLease] = "required"
    __fence_excluded__: ClassVar[Collection[str]] = frozenset()

    last_fencing_token: Mapped[int] = mapped_column(
        BigInteger,
        server_default=_ZERO,
        info=tables.FENCE_MARK,
        sort_order=_AT_THE_END,
        init=False,
        repr=False,
        compare=False,
    )
    last_write_id: Mapped[int] = mapped_column(
        BigInteger,
        server_default=_ZERO,
        info=tables.WRITE_MARK,
        sort_order=_AT_THE_END,
        init=False,
        repr=False,
        compare=False,
    )


def _on_mapped(mapper: Mapper[Any], model: type[Any]) -> None:
    """Register the tables of a mapped model with the guard, if one of them is fenced or should be.

    A model without the mixin is registered, too, if its `Table` has a `fence_column()`. A model of a query,
    such as an `AbstractConcreteBase`, is not registered, because it has no rows of its own.
    """
    said = getattr(model, "__fence_resource__", None)
    says_so = said is not None or issubclass(model, FencedModel | FencedDataclassModel)
    if says_so:
        install()
    is_fenced = says_so or any(map(tables.fenced_table, mapper.tables))
    if not is_fenced or not isinstance(mapper.persist_selectable, Table | Join):
        return
    base = _base_table(mapper, model)
    _refuse_another_name(mapper, base)
    _refuse_another_key(mapper, model, base)
    if trigger := tables.check_trigger(getattr(model, "__fence_trigger__", False)):
        base.c[FENCE_COLUMN].info[tables.TRIGGER_MARK] = trigger
    _mark_lease(model, base)
    tables.check_write_column(base, model.__name__)
    fenced = tables.registered(base)
    if fenced is None or said is not None:  # else the table or another model of it has named the resource
        template = tables.template_of(base, model.__name__, attributes_of(mapper, base.c), said)
        if fenced is None:
            fenced = tables.register(tables.FencedTable(base, template))
        elif template.text != fenced.template.text:
            raise ValueError(
                f"{model.__name__}.__fence_resource__ differs from that of another model of table "
                f"{base.name!r}; the same rows cannot be guarded by two resources"
            )
    for table in mapper.tables:
        if isinstance(table, Table) and table is not base:
            tables.register_sub_table(table, fenced)
    _exclude(mapper, model, fenced)
    _note_model(mapper, fenced)
    watch_mapper(mapper, fenced)


def _note_model(mapper: Mapper[Any], fenced: tables.FencedTable) -> None:
    """Note the class under which a session knows the objects of a table."""
    while mapper.inherits is not None and not mapper.concrete:
        mapper = mapper.inherits
    if mapper not in fenced.mappers():
        fenced.of_models.append(ref(mapper))


def _mark_lease(model: type[Any], base: Table) -> None:
    mixins = FencedModel, FencedDataclassModel
    said = [
        vars(each)["__fence_lease__"]
        for each in model.__mro__
        if each not in mixins and "__fence_lease__" in vars(each)
    ]
    if not said:
        return
    lease, marks = tables.check_lease(said[0]), base.c[FENCE_COLUMN].info
    if marks.setdefault(tables.LEASE_MARK, lease) != lease:
        raise ValueError(
            f"{model.__name__}.__fence_lease__ differs from that of another model of table {base.name!r}"
        )
    if (fenced := tables.registered(base)) is not None:
        fenced.is_optional = lease == "optional"


def _exclude(mapper: Mapper[Any], model: type[Any], fenced: tables.FencedTable) -> None:
    named = attributes_of(mapper, [column for table in mapper.tables for column in table.c])
    for name in tables.check_names(getattr(model, "__fence_excluded__", ())):
        column = fenced.check_excluded(name, named)
        tables.exclude(column.table, [column.key])
        fenced.excludes = True


def _base_table(mapper: Mapper[Any], model: type[Any]) -> Table:
    for table in mapper.tables:
        if isinstance(table, Table) and FENCE_COLUMN in table.c:
            table.c[FENCE_COLUMN].info.update(tables.FENCE_MARK)
            tables.note_column(table.c[FENCE_COLUMN], table)
            return table
    raise ValueError(
        f"{model.__name__} is to be fenced, but its table {mapper.local_table.description!r} has no column "
        f"{FENCE_COLUMN!r}; add it to the Table with fence_column(), and to the database with a migration"
    )


def _refuse_another_name(mapper: Mapper[Any], base: Table) -> None:
    """Refuse a model if objects of it, or of a parent in the same table, would be loaded without a fence."""
    for each in mapper.iterate_to_root():
        if base not in each.tables or FENCE_COLUMN in each.columns:
            continue
        name = each.class_.__name__
        if each is not mapper:
            raise ValueError(
                f"{mapper.class_.__name__} is to be fenced, but its base class {name}, which has the table "
                f"{base.name!r}, has no {FENCE_COLUMN}: let {name} inherit FencedModel, or give {name} the "
                "column by fence_column(), because a fence guards all rows of a table"
            )
        raise ValueError(
            f"{name} maps the column {FENCE_COLUMN!r} under another name, or not at all; the guard needs an "
            "attribute with exactly this name"
        )


def _refuse_another_key(mapper: Mapper[Any], model: type[Any], base: Table) -> None:
    of_table, of_model = list(base.primary_key), list(mapper.primary_key)
    for each in reversed(list(mapper.iterate_to_root())):  # a joined mapper has the key of its parent's table
        equal = dict(equal_to_parents(each))
        of_model = [column if column.table is base else equal.get(column, column) for column in of_model]
    if of_model != of_table:
        raise ValueError(
            f"{model.__name__} names its rows by {[column.key for column in mapper.primary_key]!r}, and the "
            f"primary key of its fenced table {base.name!r} is {[each.key for each in base.primary_key]!r}; "
            "the guard finds loaded objects by their key, so make both the same, in the same order (see "
            "primary_key in __mapper_args__)"
        )


event.listen(Mapper, "after_mapper_constructed", _on_mapped)
