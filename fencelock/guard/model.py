"""The mixins that make a model fenced.

There are two mixins because one cannot serve both worlds: on a `MappedAsDataclass` base SQLAlchemy wants the
fields of mixins to be dataclass fields, and a dataclass mixin would turn plain models into dataclasses, which
are unhashable.
"""

from __future__ import annotations

from typing import Any, ClassVar, Final

from sqlalchemy import BigInteger, Column, event, text
from sqlalchemy.orm import Mapped, MappedAsDataclass, Mapper, mapped_column

from fencelock.guard._install import install
from fencelock.guard._mapping import on_any_mapped, on_mapped
from fencelock.guard.tables import (
    FENCE_COLUMN,
    FENCE_MARK,
    RESOURCE_MARK,
    TRIGGER_MARK,
    WRITE_COLUMN,
    WRITE_MARK,
    FenceTrigger,
    check_trigger,
    new_column,
)

_AT_THE_END: Final = 1000


def fence_column(*, resource: str | None = None, trigger: FenceTrigger = False) -> Column[int]:
    """Return the column that makes a Core `Table`, or the table of an imperative mapping, a fenced one.

    It is `last_fencing_token BIGINT NOT NULL DEFAULT 0`, and stands beside `write_id_column()`. Declarative
    models get both from `FencedModel`.

    Args:
        resource: which lease guards a row, such as `"order:{id}"`: see `__fence_resource__`. A model of the
            table may say it instead.
        trigger: which trigger `create_all` gives the table: see `fencelock.guard.triggers`.

    Raises:
        ValueError: if there is no such trigger.
    """
    install()
    marks = {**FENCE_MARK, TRIGGER_MARK: check_trigger(trigger)}
    return new_column(FENCE_COLUMN, marks if resource is None else {**marks, RESOURCE_MARK: resource})


def write_id_column() -> Column[int]:
    """Return the column of a fenced Core `Table` that says which write its row has seen last.

    It is `last_write_id BIGINT NOT NULL DEFAULT 0`. Each guarded write gives the row a new random number.
    """
    return new_column(WRITE_COLUMN, WRITE_MARK)


class FencedModel:
    """Mixin for a model whose rows refuse writers with a stale fencing token.

    It adds the columns `last_fencing_token` and `last_write_id`, each BIGINT NOT NULL DEFAULT 0. From then on
    every UPDATE and DELETE that SQLAlchemy sends for the model's table carries
    `AND last_fencing_token <= :token`, and an UPDATE raises the fence, where the token is that of the lease
    held (`fenced_lock`, `bind`). Without a lease nothing is sent. Each write gives the row a new write id.
    What the unit of work writes, it writes only over the write that the object was loaded from, or raises
    `StaleReadError`. Both columns belong to the guard: what a program assigns to the attributes is replaced.

    `__fence_resource__` says which lease guards a row: a format string over columns of the fenced table,
    which must never change, and whose values the database gives back as they were given to it (no type that
    changes case, say). A word without braces is one resource that guards the whole table.

    `__fence_trigger__ = True` makes a trigger that refuses in the database itself what would lower a fence,
    whoever writes; `"strict"` one that refuses also what carries no token: `create_all` makes it, and
    Alembic's autogenerate finds it missing (see `fencelock.guard.triggers`).

    What it does not promise: that what you read and do not write is still true (see `claim`), and
    that a stale holder cannot INSERT, since a new row has no fence to compare with (see `gate`). What the
    database does by itself goes unseen: foreign keys with ON DELETE CASCADE or SET NULL, triggers, stored
    functions. A link in a many-to-many table is guarded where a relationship of the fenced model changes (or
    one with `back_populates` to it). Changed or deleted with an object of the other model, it is not, and
    neither are the places that an `ordering_list` keeps in the children: fence that model, too.

    Example:
        ```python
        class Order(FencedModel, Base):
            __tablename__ = "orders"
            __fence_resource__ = "order:{id}"
            id: Mapped[int] = mapped_column(primary_key=True)
            status: Mapped[str]
        ```

    Raises:
        FenceError: when the class is mapped, if it has no `__fence_resource__`.
        ValueError: when the class is mapped, if `__fence_resource__` names what is no column of its table, or
            one whose equal values are written in several ways; if the table has no column
            `last_fencing_token` or the model calls it something else; or if there is no such trigger.
        TypeError: beside `MappedAsDataclass`, which takes `FencedDataclassModel`, and beside SQLModel, which
            takes the column alone: see docs/sqlmodel.md.
    """

    __fence_resource__: ClassVar[str]
    __fence_trigger__: ClassVar[FenceTrigger] = False

    def __init_subclass__(cls, **options: Any) -> None:
        if issubclass(cls, MappedAsDataclass):
            raise TypeError(f"{cls.__name__} is a dataclass: use FencedDataclassModel instead of FencedModel")
        if _is_of_pydantic(cls) and not any(
            FENCE_COLUMN in vars(each) for each in cls.__mro__ if not issubclass(FencedModel, each)
        ):
            raise TypeError(
                f"{cls.__name__} is a model of pydantic, which takes no columns of SQLAlchemy from a mixin: "
                f"leave FencedModel away, and write last_fencing_token: int = Field(default=0, "
                f"sa_column=fence_column()) and last_write_id: int = Field(default=0, "
                f"sa_column=write_id_column())"
            )
        super().__init_subclass__(**options)

    last_fencing_token: Mapped[int] = mapped_column(
        FENCE_COLUMN,
        BigInteger,
        nullable=False,
        server_default=text("0"),
        info=FENCE_MARK,
        sort_order=_AT_THE_END,
    )
    last_write_id: Mapped[int] = mapped_column(
        WRITE_COLUMN,
        BigInteger,
        nullable=False,
        server_default=text("0"),
        info=WRITE_MARK,
        sort_order=_AT_THE_END,
    )


class FencedDataclassModel(MappedAsDataclass):
    """`FencedModel` for models that are dataclasses: put it beside `MappedAsDataclass`.

    The fence is no parameter of `__init__`, and takes no part in comparison and `repr`.
    """

    __fence_resource__: ClassVar[str]
    __fence_trigger__: ClassVar[FenceTrigger] = False

    last_fencing_token: Mapped[int] = mapped_column(
        FENCE_COLUMN,
        BigInteger,
        nullable=False,
        server_default=text("0"),
        info=FENCE_MARK,
        sort_order=_AT_THE_END,
        init=False,
        repr=False,
        compare=False,
    )
    last_write_id: Mapped[int] = mapped_column(
        WRITE_COLUMN,
        BigInteger,
        nullable=False,
        server_default=text("0"),
        info=WRITE_MARK,
        sort_order=_AT_THE_END,
        init=False,
        repr=False,
        compare=False,
    )


def _is_of_pydantic(model: type[Any]) -> bool:
    """Tell whether a model is one of SQLModel, without loading what it is made with."""
    return any(each.__module__.partition(".")[0] == "pydantic" for each in model.__mro__)


def _on_mapped(mapper: Mapper[Any], model: type[Any]) -> None:
    install()
    on_mapped(mapper, model)


def _on_any_mapped(mapper: Mapper[Any], model: type[Any]) -> None:
    if getattr(model, "__fence_resource__", None) is not None:
        install()
    on_any_mapped(mapper, model)


for _mixin in (FencedModel, FencedDataclassModel):
    event.listen(_mixin, "after_mapper_constructed", _on_mapped, propagate=True)
event.listen(Mapper, "after_mapper_constructed", _on_any_mapped)
