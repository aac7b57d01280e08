"""A model with the column and without the mixin is guarded: its `__fence_resource__` counts as with one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import sqlalchemy as sa
import sqlmodel
from sqlalchemy import BigInteger, Column, Engine, ForeignKey, MetaData, String, Table, orm, text, update
from sqlalchemy.ext.automap import automap_base
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, registry, relationship

from fencelock import FencedModel, Lease, StaleTokenError, UnfencedWriteError, bind, claim
from fencelock.guard import fence_column, write_id_column
from tests.guard.rows import InMemory, holding, turned_away


def columns(fence: Column[int]) -> list[Column[Any]]:
    key = Column("id", sa.Integer, primary_key=True, autoincrement=False)
    return [key, Column("status", String(10)), fence, write_id_column()]


def own_column() -> Column[int]:
    return Column("last_fencing_token", BigInteger, nullable=False, server_default="0")


def with_table(fence: Column[int]) -> tuple[MetaData, Any]:
    class Base(DeclarativeBase): ...

    class Order(Base):
        __table__ = Table("orders", Base.metadata, *columns(fence))
        __fence_resource__ = "order:{id}"

    return Base.metadata, Order


def imperative(fence: Column[int]) -> tuple[MetaData, Any]:
    mappers = registry()

    class Order:
        __fence_resource__ = "order:{id}"

        def __init__(self, **values: Any) -> None:
            for name, value in values.items():
                setattr(self, name, value)

    mappers.map_imperatively(Order, Table("orders", mappers.metadata, *columns(fence)))
    return mappers.metadata, Order


def on_a_base_class(fence: Column[int]) -> tuple[MetaData, Any]:
    """Return a model that gets the column from a class of the project."""

    class Base(DeclarativeBase): ...

    class Fenced:
        __fence_resource__ = "order:{id}"
        last_fencing_token: Mapped[int] = mapped_column(BigInteger, server_default="0")
        last_write_id: Mapped[int] = mapped_column(BigInteger, server_default="0")

    class Order(Fenced, Base):
        __tablename__ = "orders"
        id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
        status: Mapped[str | None]

    assert fence.name in Order.__table__.c
    return Base.metadata, Order


@pytest.mark.parametrize("make", [with_table, imperative, on_a_base_class])
@pytest.mark.parametrize("fence", [fence_column, own_column])
def test_the_resource_counts(
    make: Callable[[Column[int]], tuple[MetaData, Any]], fence: Callable[[], Column[int]], in_memory: InMemory
) -> None:
    """Of a Core table, a class mapped imperatively, and one whose column comes from a base class."""
    metadata, order = make(fence())
    check(in_memory(metadata), order)


def test_a_reflected_table(in_memory: InMemory) -> None:
    metadata, _ = with_table(fence_column())
    engine = in_memory(metadata)
    base: Any = automap_base()

    class Order(base):  # type: ignore[misc]  # automap's classes are not known to type checkers
        __tablename__ = "orders"
        __fence_resource__ = "order:{id}"

    base.prepare(autoload_with=engine)
    check(engine, Order)


def check(engine: Engine, order: Any) -> None:
    with holding(engine, Lease("order:1", 5)) as session:
        session.add(order(id=1, status="new"))
        session.commit()
        session.get_one(order, 1).status = "paid"
        bind(session, Lease("order:2", 50))
        with pytest.raises(UnfencedWriteError, match="order:1"):
            session.commit()


def test_links_are_guarded(in_memory: InMemory) -> None:
    """A change of a link alone is refused to a holder whose lease is over.

    A writer without a lease may make it.
    """

    class Base(DeclarativeBase): ...

    link = Table(
        "links",
        Base.metadata,
        Column("order_id", ForeignKey("orders.id"), primary_key=True),
        Column("tag_id", ForeignKey("tags.id"), primary_key=True),
    )

    class Tag(Base):
        __tablename__ = "tags"
        id: Mapped[int] = mapped_column(primary_key=True)

    class Order(Base):
        __table__ = Table("orders", Base.metadata, *columns(fence_column()))
        __fence_resource__ = "order:{id}"
        tags: Mapped[list[Tag]] = relationship(secondary=link)

    engine = in_memory(Base.metadata)
    with holding(engine, Lease("order:1", 5)) as session:
        session.add(Order(id=1))
        session.commit()
        order = session.get_one(Order, 1)
        order.tags.append(Tag(id=1))
        bind(session, Lease("order:1", 4))
        with turned_away(session, StaleTokenError):
            session.commit()
        order.tags.append(Tag(id=2))
        bind(session, Lease("order:2", 50))
        session.commit()
        assert session.scalar(text("SELECT last_fencing_token FROM orders")) == 5


def test_mistakes_are_told_when_the_class_is_mapped() -> None:
    """A template that cannot be rendered is a mistake.

    A resource without the column is one, because it asks for a fence.
    """
    base, resource = orm.declarative_base(), {"__fence_resource__": "order:{no_such}"}
    table = Table("orders", base.metadata, *columns(fence_column()))
    with pytest.raises(ValueError, match=r"Order\.__fence_resource__"):
        type("Order", (base,), {"__table__": table, **resource})
    plain = {"__tablename__": "plain", "id": mapped_column(sa.Integer, primary_key=True)}
    with pytest.raises(ValueError, match=r"fence_column\(\)"):
        type("Plain", (base,), {**plain, "__fence_resource__": "order:{id}"})


def test_a_model_of_sqlmodel_has_the_column_alone(in_memory: InMemory) -> None:
    """As the error says that the mixin raises there; its rows are guarded as any other's."""
    with pytest.raises(TypeError, match=r"ClassVar\[Any\] = fence_column\(\)"):

        class Mixed(FencedModel, sqlmodel.SQLModel, table=True):
            id: int | None = sqlmodel.Field(default=None, primary_key=True)

    class Fenced(sqlmodel.SQLModel):
        last_fencing_token: ClassVar[Any] = fence_column()
        last_write_id: ClassVar[Any] = write_id_column()

    class Hero(Fenced, table=True):
        __tablename__ = "wm_heroes"
        __fence_resource__ = "hero:{id}"
        id: int | None = sqlmodel.Field(default=None, primary_key=True)
        name: str = ""

    class Villain(Fenced, table=True):
        __tablename__ = "wm_villains"
        __fence_resource__ = "villain:{id}"
        __fence_lease__ = "optional"
        id: int | None = sqlmodel.Field(default=None, primary_key=True)
        name: str = ""

    with sqlmodel.Session(in_memory(Hero.metadata)) as session:
        bind(session, Lease("hero:1", 5))
        session.add(Hero(id=1, name="a"))
        session.commit()
        claim(session, Hero, 1).name = "b"
        session.commit()
        for lease, error in ((Lease("hero:1", 4), StaleTokenError), (Lease("hero:2", 9), UnfencedWriteError)):
            bind(session, lease)
            session.get_one(Hero, 1).name = "c"
            with turned_away(session, error, match="'hero:1'|token 4 is stale"):
                session.commit()
        hero = session.exec(sqlmodel.select(Hero)).one()
        assert (hero.name, hero.last_fencing_token) == ("b", 5)
        assert hero.model_dump() == {"id": 1, "name": "b"}
        bind(session)
        for name in "abc":
            session.merge(Villain(id=1, name=name))
            session.commit()


def test_a_copy_of_a_table_with_its_own_columns_is_plain_as_well(in_memory: InMemory) -> None:
    metadata = MetaData()
    numbers = [Column(name, BigInteger, nullable=False) for name in ("last_fencing_token", "last_write_id")]
    orders = Table("orders", metadata, Column("id", sa.Integer, primary_key=True), *numbers)
    making = {"__table__": orders, "__fence_resource__": "order:{id}"}
    model = type("Order", (FencedModel, type("Base", (DeclarativeBase,), {"metadata": metadata})), making)
    copied = orders.to_metadata(metadata, name="orders_history")
    with Session(in_memory(metadata)) as session:
        session.execute(sa.insert(copied), {column.name: 1 for column in copied.c})
        session.execute(update(copied).values(id=2))
        with pytest.raises(UnfencedWriteError):
            session.execute(update(model).values(id=2))


@pytest.mark.parametrize("way", ["to_metadata", "columns", "Column._copy"])
def test_a_copy_under_another_name_is_a_plain_table(in_memory: InMemory, way: str) -> None:
    """The copy is a history or an archive. Any program may write its rows, but not those of the original."""

    class Base(DeclarativeBase): ...

    class Order(FencedModel, Base):
        __tablename__ = "orders"
        __fence_resource__ = "order:{id}"
        __mapper_args__ = {"polymorphic_on": "kind", "polymorphic_identity": "order"}  # noqa: RUF012
        id: Mapped[int] = mapped_column(primary_key=True)
        kind: Mapped[str] = mapped_column(String(9))

    class Rush(Order):
        __tablename__ = "rushes"
        __mapper_args__ = {"polymorphic_identity": "rush"}  # noqa: RUF012
        id: Mapped[int] = mapped_column(ForeignKey("orders.id"), primary_key=True)

    copies: dict[str, Callable[[Any, str], Any]] = {
        "to_metadata": lambda table, name: table.to_metadata(Base.metadata, name=name),
        "columns": lambda table, name: Table(
            name, Base.metadata, *(Column(each.name, each.type, info=each.info) for each in table.c)
        ),
        "Column._copy": lambda table, name: Table(name, Base.metadata, *(each._copy() for each in table.c)),
    }
    for table in (Base.metadata.tables["orders"], Base.metadata.tables["rushes"]):
        name = f"{table.name}_history"
        copied = copies[way](table, name)
        arguments = {"primary_key": [copied.c.id]}
        history: Any = type(name, (Base,), {"__table__": copied, "__mapper_args__": arguments})
        engine = in_memory(Base.metadata)
        given = {column.name: 1 for column in copied.c}
        with Session(engine) as session:
            session.execute(sa.insert(copied), given)
            session.execute(update(copied).values(id=2))
            session.execute(text(f"UPDATE {name} SET id = 3"))  # noqa: S608
            session.get_one(history, 3).id = 4
            session.commit()
            with pytest.raises(UnfencedWriteError):
                session.execute(update(table).values(id=2))
