"""The mixins that make a model fenced, and what happens when SQLAlchemy maps such a class.

There are two mixins because one cannot serve both worlds: on a `MappedAsDataclass` base SQLAlchemy wants the
fields of mixins to be dataclass fields, and a dataclass mixin would turn plain models into dataclasses, which
are unhashable.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar, Final
from weakref import ref

from sqlalchemy import BigInteger, Column, Table, event, text
from sqlalchemy.orm import Mapped, MappedAsDataclass, Mapper, mapped_column

from fencelock.guard._install import install
from fencelock.guard._tables import (
    FENCE_COLUMN,
    FENCE_MARK,
    FencedTable,
    ResourceTemplate,
    fenced_table,
    register,
    register_sub_table,
)
from fencelock.guard.session import watch_mapper

_AT_THE_END: Final = 1000


def fence_column() -> Column[int]:
    """Return the column that makes a Core `Table`, or the table of an imperative mapping, a fenced one.

    It is `last_fencing_token BIGINT NOT NULL DEFAULT 0`. Declarative models get it from `FencedModel`.
    """
    install()
    return Column(FENCE_COLUMN, BigInteger, nullable=False, server_default=text("0"), info=dict(FENCE_MARK))


class FencedModel:
    """Mixin for a model whose rows refuse writers with a stale fencing token.

    It adds the column `last_fencing_token BIGINT NOT NULL DEFAULT 0`. From then on every UPDATE and DELETE
    that SQLAlchemy sends for the model's table carries `AND last_fencing_token <= :token` and an UPDATE
    raises the fence, where the token is that of the lease held (`fenced_lock`, `bind`). Without a lease
    nothing is sent. The column belongs to the guard: what a program assigns to the attribute is replaced
    by the lease's token when it is written.

    Set `__fence_resource__` to say which lease guards a row: a format string over columns of the fenced
    table, which must never change. Without it, one and the same resource guards the whole table.

    What it does not promise: that a value read before the row was claimed is still true (see `claim`), and
    that a stale holder cannot INSERT, since a new row has no fence to compare with (see `gate`).

    Example:
        ```python
        class Order(FencedModel, Base):
            __tablename__ = "orders"
            __fence_resource__ = "order:{id}"
            id: Mapped[int] = mapped_column(primary_key=True)
            status: Mapped[str]
        ```

    Raises:
        ValueError: when the class is mapped, if `__fence_resource__` names what is no column of its table,
            or the table has no column `last_fencing_token`.
    """

    __fence_resource__: ClassVar[str | None] = None

    last_fencing_token: Mapped[int] = mapped_column(
        FENCE_COLUMN,
        BigInteger,
        nullable=False,
        server_default=text("0"),
        info=dict(FENCE_MARK),
        sort_order=_AT_THE_END,
    )


class FencedDataclassModel(MappedAsDataclass):
    """`FencedModel` for models that are dataclasses: put it beside `MappedAsDataclass`.

    The fence is no parameter of `__init__`, and takes no part in comparison and `repr`.
    """

    __fence_resource__: ClassVar[str | None] = None

    last_fencing_token: Mapped[int] = mapped_column(
        FENCE_COLUMN,
        BigInteger,
        nullable=False,
        server_default=text("0"),
        info=dict(FENCE_MARK),
        sort_order=_AT_THE_END,
        init=False,
        repr=False,
        compare=False,
    )


def _on_mapped(mapper: Mapper[Any], model: type[Any]) -> None:
    """Make the tables of a freshly mapped model known to the guard."""
    base = _base_table(mapper, model)
    fenced = fenced_table(base)
    template = _template(mapper, model, base)
    if fenced is None or fenced.mapper is None:
        fenced = register(FencedTable(base, template, ref(mapper.base_mapper)))
    elif (template and template.text) != (fenced.template and fenced.template.text):
        raise ValueError(
            f"{model.__name__}.__fence_resource__ differs from that of another model of table "
            f"{base.name!r}; the same rows cannot be guarded by two resources"
        )
    for table in mapper.tables:
        if isinstance(table, Table) and table is not base:
            register_sub_table(table, fenced)
    install()
    watch_mapper(mapper, fenced)


def _base_table(mapper: Mapper[Any], model: type[Any]) -> Table:
    for table in mapper.tables:
        if isinstance(table, Table) and FENCE_COLUMN in table.c:
            table.c[FENCE_COLUMN].info.update(FENCE_MARK)
            return table
    raise ValueError(
        f"{model.__name__} is a FencedModel, but its table {mapper.local_table.description!r} has no column "
        f"{FENCE_COLUMN!r}; add it with a migration (op.add_fence) and to the Table (fence_column())"
    )


def _template(mapper: Mapper[Any], model: type[Any], base: Table) -> ResourceTemplate | None:
    template = model.__fence_resource__
    if template is None:
        return None
    columns: Iterable[tuple[str, Any]] = mapper.columns.items()  # column_attrs would configure the mappers
    attributes = {name: column for name, column in columns if getattr(column, "table", None) is base}
    return ResourceTemplate.parse(template, attributes, model.__name__)


for _mixin in (FencedModel, FencedDataclassModel):
    event.listen(_mixin, "after_mapper_constructed", _on_mapped, propagate=True)
