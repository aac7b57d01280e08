"""Mapping a fenced class checks it at once, and the first fenced model puts the guard in place."""

from __future__ import annotations

import gc
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import sqlalchemy as sa
import sqlmodel
from sqlalchemy import Column, ForeignKey, Integer, String, Table, orm, update
from sqlalchemy.ext.automap import automap_base
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, registry, relationship

import fencelock
from fencelock import FencedModel, Lease, StaleTokenError, UnfencedWriteError, bind, claim
from fencelock.guard import fence_column, write_id_column
from fencelock.guard.conditions import _forms
from fencelock.guard.leases import TransactionLeases
from tests.guard.marks import InMemory, named
from tests.guard.models import Base, Row
from tests.guard.rows import core_table, holding, turned_away

new_base: Callable[[], Any] = orm.declarative_base


def new_key() -> Any:
    return mapped_column(Integer, primary_key=True)


def make(
    resource: Any = "orders", *, name: str = "Order", bases: tuple[Any, ...] = (), **attributes: Any
) -> Any:
    given = {"__tablename__": f"mo_{name.lower()}", "id": new_key(), "__fence_resource__": resource}
    return type(name, bases or (FencedModel, new_base()), given | attributes)


def test_the_columns_are_as_promised() -> None:
    *_, fence, write_id = make(status=mapped_column(String)).__table__.c
    assert (fence.name, write_id.name) == ("last_fencing_token", "last_write_id")
    for column in (fence, write_id):
        assert isinstance(column.type, sa.BigInteger)
        assert not column.nullable
        assert str(column.server_default.arg) == "0"


def without_the_column() -> None:
    """Map a table imperatively, or as it is reflected."""
    table = Table("mo_boxes", sa.MetaData(), Column("id", Integer, primary_key=True))
    registry().map_imperatively(type("Box", (FencedModel,), {}), table)


def by_another_name() -> None:
    """Call the column something else, which could not be stamped."""
    table = Table("mo_renamed", sa.MetaData(), Column("id", Integer, primary_key=True), fence_column())
    model = type("Renamed", (FencedModel,), {"__fence_resource__": "renamed"})
    registry().map_imperatively(model, table, properties={"fence": table.c.last_fencing_token})


def two_resources() -> None:
    """Have a subclass in the same table guarded by another resource."""
    order = make("order:{id}", kind=mapped_column(String), __mapper_args__={"polymorphic_on": "kind"})
    gift = {"__fence_resource__": "gift:{id}", "__mapper_args__": {"polymorphic_identity": "gift"}}
    type("Gift", (order,), gift)


def a_parent_in_the_same_table() -> None:
    """Have a parent that is not fenced: objects that its queries load would not have their write ids."""
    kinds = {"polymorphic_on": "kind", "polymorphic_identity": "employee"}
    plain = {
        "__tablename__": "mo_staff",
        "id": new_key(),
        "kind": mapped_column(String),
        "__mapper_args__": kinds,
    }
    employee = type("Employee", (new_base(),), plain)
    engineer = {"__fence_resource__": "staff", "__mapper_args__": {"polymorphic_identity": "engineer"}}
    type("Engineer", (FencedModel, employee), engineer)


def with_key(*key: str) -> Callable[[], object]:
    """Give the mapper another key than the table: by it the unit of work names a row."""
    return lambda: make(
        listed=new_key(), place=new_key(), text=mapped_column(String), __mapper_args__={"primary_key": [*key]}
    )


def beside_a_dataclass() -> None:
    """Use the mixin of plain models, at which SQLAlchemy's own error would not name the other one."""

    class Base(orm.MappedAsDataclass, DeclarativeBase): ...

    make(name="Point", bases=(FencedModel, Base), __annotations__={"id": Mapped[int]})


def on_a_table(**given: Any) -> Callable[[], object]:
    """Map a class without the mixin."""

    def mapping() -> None:
        base = new_base()
        table = Table("mo_table", base.metadata, *columns(fence_column()))
        type("Order", (base,), {"__table__": table, **given})

    return mapping


MISTAKES: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "no such column": (
        on_a_table(__fence_resource__="order:{no_such}"),
        ValueError,
        r"Order\.__fence_resource__",
    ),
    "a resource without a column": (
        lambda: make(bases=(new_base(),), name="Plain"),
        ValueError,
        r"fence_column\(\)",
    ),
    "no column": (without_the_column, ValueError, r"fence_column\(\).* migration"),
    "another name": (by_another_name, ValueError, "under another name"),
    "two resources": (two_resources, ValueError, "two resources"),
    "a plain parent": (
        a_parent_in_the_same_table,
        ValueError,
        r"base class Employee, which has the table 'mo_staff'.* inherit FencedModel",
    ),
    "a key in another order": (with_key("place", "listed", "id"), ValueError, "primary key"),
    "a key of its own": (with_key("text"), ValueError, "primary key"),
    "a dataclass": (beside_a_dataclass, TypeError, "Point is a dataclass: use FencedDataclassModel"),
}


@pytest.mark.parametrize(("mistake", "error", "match"), **named(MISTAKES))
def test_a_mapping_that_cannot_be_guarded_is_refused_at_once(
    mistake: Callable[[], object], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        mistake()


def test_a_key_in_another_order_than_the_parent_s_is_refused() -> None:
    """The rows (1, 2) and (2, 1) would be taken for each other."""
    base = new_base()

    class Document(base):  # type: ignore[misc, valid-type]
        __tablename__ = "mo_documents"
        a: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
        b: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)

    def child(*columns: str) -> None:
        table = Table(
            "_".join(("mo", *columns)),
            base.metadata,
            *(Column(name, Integer, primary_key=True, autoincrement=False) for name in columns),
            sa.ForeignKeyConstraint(["in_a", "in_b"], ["mo_documents.a", "mo_documents.b"]),
            fence_column(resource="rows"),
            write_id_column(),
        )
        type(f"Invoice{''.join(columns)}", (Document,), {"__table__": table})

    child("in_a", "in_b")
    with pytest.raises(ValueError, match=r"\['a', 'b'\].* is \['in_b', 'in_a'\].*same order"):
        child("in_b", "in_a")


def test_mapping_a_class_configures_nothing() -> None:
    base = new_base()
    order = make(bases=(FencedModel, base), items=relationship("Item"))
    order_id = mapped_column(ForeignKey("mo_order.id"))
    item = type("Item", (base,), {"__tablename__": "mo_items", "id": new_key(), "order_id": order_id})
    orm.configure_mappers()
    assert order.items.property.mapper.class_ is item


def test_a_fenced_base_fences_every_model(in_memory: InMemory) -> None:
    class Base(FencedModel, DeclarativeBase): ...

    order = make(bases=(Base,))
    with Session(in_memory(Base.metadata)) as session:
        session.add(order(id=1))
        with pytest.raises(UnfencedWriteError):
            session.flush()


def test_column_and_attribute_names_may_differ(in_memory: InMemory) -> None:
    number = mapped_column("order_no", Integer, primary_key=True)
    order = make("order:{id}", id=number, status=mapped_column("st", String(10)))
    with holding(in_memory(order.metadata), Lease("order:1", 3)) as session:
        session.add(order(id=1, status="new"))
        session.commit()
        claim(session, order, {"id": 1}).status = "paid"
        session.commit()
        session.execute(update(order).where(order.id == 1).values(status="sent"))
        session.delete(session.get_one(order, 1))
        session.commit()


def test_plain_models_stay_hashable_and_dataclasses_stay_dataclasses() -> None:
    class Base(orm.MappedAsDataclass, DeclarativeBase): ...

    class Point(fencelock.FencedDataclassModel, Base):
        __tablename__ = "mo_points"
        __fence_resource__ = "points"
        id: Mapped[int] = mapped_column(primary_key=True)
        x: Mapped[int] = mapped_column(default=7)

    assert Point(id=1) == Point(id=1, x=7)
    assert repr(Point(id=1)).endswith("Point(id=1, x=7)")
    order = make()
    assert len({order(id=1), order(id=1)}) == 2


def test_a_copied_table_is_guarded_like_the_original(in_memory: InMemory) -> None:
    copy = make("order:{id}", status=mapped_column(String)).__table__.to_metadata(sa.MetaData())
    with in_memory(copy.metadata).connect() as connection:
        with turned_away(connection, UnfencedWriteError):
            connection.execute(sa.insert(copy), {"id": 1})
        bind(connection, Lease("order:1", 3))
        connection.execute(sa.insert(copy), {"id": 1, "status": "new"})
        connection.execute(update(copy).where(copy.c.id == 1).values(status="x"))
        with pytest.raises(UnfencedWriteError, match="'order:2'"):
            connection.execute(update(copy).where(copy.c.id == 2).values(status="x"))


def executions(engine: sa.Engine) -> list[tuple[str, bool]]:
    seen: list[tuple[str, bool]] = []

    def note(_c: object, _cursor: object, sql: str, _p: object, _x: object, many: bool) -> None:
        if not sql.startswith(("SELECT", "PRAGMA", "CREATE")):
            seen.append((sql, many))

    sa.event.listen(engine, "before_cursor_execute", note)
    return seen


def test_engines_with_options_do_not_guard_twice(in_memory: InMemory) -> None:
    engine = in_memory(Base.metadata).execution_options(a=1).execution_options(b=2)
    seen = executions(engine)
    with holding(engine, Lease("rows", 1)) as session:
        session.add(Row(id=1))
        session.flush()
        session.execute(update(Row).values(value=1))
    assert seen[-1][0].count("<=") == 1


def test_executemany_is_kept(in_memory: InMemory) -> None:
    engine = in_memory(Base.metadata)
    seen = executions(engine)
    with holding(engine, Lease("rows", 1)) as session:
        rows = [Row(id=number) for number in range(1, 1001)]
        session.add_all(rows)
        session.flush()
        inserts = len(seen)
        assert inserts <= 2
        for row in rows:
            row.value = 1
        session.flush()
        assert [many for _, many in seen[inserts:]] == [True]


def test_the_compiled_cache_is_kept(in_memory: InMemory) -> None:
    engine = in_memory(Base.metadata)
    with holding(engine, Lease("rows", 1)) as session:
        session.add(Row(id=1))
        session.commit()
        sizes = []
        for token in range(2, 12):
            bind(session, Lease("rows", token))
            session.get_one(Row, 1).value = token
            session.commit()
            session.execute(update(Row).where(Row.id == 1).values(value=-token))
            assert claim(session, Row, 1).last_fencing_token == token
            session.commit()
            assert engine._compiled_cache is not None
            sizes.append(len(engine._compiled_cache) + len(Row.__mapper__._compiled_cache))
        bind(session, Lease("rows", 9))
        with pytest.raises(StaleTokenError):
            session.execute(update(Row).where(Row.id == 1).values(value=0))
    assert len(set(sizes[1:])) == 1


PROGRAM = """
import fencelock.guard, sqlalchemy as sa
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
engine = sa.create_engine("sqlite://")
untouched = sa.Update._execute_on_connection
class Base(DeclarativeBase): pass
class Row({mixin}Base):
    __tablename__ = "rows"
    __fence_resource__ = "rows"
    id: Mapped[int] = mapped_column(primary_key=True)
    {columns}
assert sa.Update._execute_on_connection is not untouched
assert not engine._has_events
try:
    with engine.begin() as connection:
        Base.metadata.create_all(connection)
        connection.execute(sa.delete(Row.__table__))
except fencelock.errors.UnfencedWriteError:
    print("refused")
"""
COLUMN = "Mapped[int] = mapped_column(sa.BigInteger, server_default='0')"


@pytest.mark.parametrize(
    ("mixin", "columns"),
    [("fencelock.guard.FencedModel, ", ""), ("", f"last_fencing_token: {COLUMN}; last_write_id: {COLUMN}")],
    ids=["mixin", "resource alone"],
)
def test_the_first_fenced_model_puts_the_guard_in_place(mixin: str, columns: str) -> None:
    """Importing the package leaves SQLAlchemy as it is; the first fenced model puts the guard in place.

    It has no events of `Engine`: with one, all engines of the process would be slower.
    """
    program = PROGRAM.format(mixin=mixin, columns=columns)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.stdout, done.stderr) == ("refused\n", "")


def test_what_the_guard_remembers_dies_with_its_owner(in_memory: InMemory) -> None:
    engine = in_memory(Base.metadata)
    stores: list[Callable[[], int]] = [
        lambda: len(_forms),
        lambda: sum(isinstance(each, TransactionLeases) for each in gc.get_objects()),
    ]

    def work(tokens: range) -> list[int]:
        for token in tokens:
            with holding(engine, Lease("rows", token)) as session:
                session.add(Row(id=token))
                session.flush()
                session.execute(update(Row).values(value=token))
                session.commit()
                bind(session, Lease("rows", token - 1))
                with pytest.raises(StaleTokenError):
                    session.execute(update(Row).values(value=-1))
        del session
        gc.collect()
        return [count() for count in stores]

    some, many = work(range(2, 12)), work(range(12, 60))
    assert sum(many) < sum(some) + 20, "compiled statements are cached, 48 rounds' worth of them is a leak"


def test_metadata_with_a_fenced_table_cannot_be_pickled() -> None:
    for metadata in (core_table("mo_core", resource="core").metadata, Base.metadata):
        with pytest.raises(TypeError, match="import the models there"):
            pickle.dumps(metadata)
    assert pickle.loads(pickle.dumps(Row(id=1, value=7))).value == 7  # noqa: S301  our own


def columns(fence: Column[int]) -> list[Column[Any]]:
    key = Column("id", sa.Integer, primary_key=True, autoincrement=False)
    return [key, Column("status", String(10)), fence, write_id_column()]


def own_column() -> Column[int]:
    return Column("last_fencing_token", sa.BigInteger, nullable=False, server_default="0")


def with_table(fence: Column[int]) -> tuple[sa.MetaData, Any]:
    class Base(DeclarativeBase): ...

    class Order(Base):
        __table__ = Table("orders", Base.metadata, *columns(fence))
        __fence_resource__ = "order:{id}"

    return Base.metadata, Order


def imperative(fence: Column[int]) -> tuple[sa.MetaData, Any]:
    mappers = registry()

    class Order:
        __fence_resource__ = "order:{id}"

        def __init__(self, **values: Any) -> None:
            for name, value in values.items():
                setattr(self, name, value)

    mappers.map_imperatively(Order, Table("orders", mappers.metadata, *columns(fence)))
    return mappers.metadata, Order


def on_a_base_class(fence: Column[int]) -> tuple[sa.MetaData, Any]:
    """Return a model that gets the column from a class of the project."""

    class Base(DeclarativeBase): ...

    class Fenced:
        __fence_resource__ = "order:{id}"
        last_fencing_token: Mapped[int] = mapped_column(sa.BigInteger, server_default="0")
        last_write_id: Mapped[int] = mapped_column(sa.BigInteger, server_default="0")

    class Order(Fenced, Base):
        __tablename__ = "orders"
        id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
        status: Mapped[str | None]

    assert fence.name in Order.__table__.c
    return Base.metadata, Order


@pytest.mark.parametrize("make", [with_table, imperative, on_a_base_class])
@pytest.mark.parametrize("fence", [fence_column, own_column])
def test_the_resource_of_a_model_without_the_mixin_counts(
    make: Callable[[Column[int]], tuple[sa.MetaData, Any]],
    fence: Callable[[], Column[int]],
    in_memory: InMemory,
) -> None:
    metadata, order = make(fence())
    check(in_memory(metadata), order)


def test_a_model_of_a_reflected_table_is_guarded(in_memory: InMemory) -> None:
    metadata, _ = with_table(fence_column())
    engine = in_memory(metadata)
    base: Any = automap_base()

    class Order(base):  # type: ignore[misc]  # automap's classes are not known to type checkers
        __tablename__ = "orders"
        __fence_resource__ = "order:{id}"

    base.prepare(autoload_with=engine)
    check(engine, Order)


def check(engine: sa.Engine, order: Any) -> None:
    with holding(engine, Lease("order:1", 5)) as session:
        session.add(order(id=1, status="new"))
        session.commit()
        session.get_one(order, 1).status = "paid"
        bind(session, Lease("order:2", 50))
        with pytest.raises(UnfencedWriteError, match="order:1"):
            session.commit()


def test_a_link_alone_is_refused_to_a_holder_whose_lease_is_over(in_memory: InMemory) -> None:
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
        assert session.scalar(sa.text("SELECT last_fencing_token FROM orders")) == 5


def test_a_model_of_sqlmodel_has_the_column_alone(in_memory: InMemory) -> None:
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
    metadata = sa.MetaData()
    numbers = [
        Column(name, sa.BigInteger, nullable=False) for name in ("last_fencing_token", "last_write_id")
    ]
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
            session.execute(sa.text(f"UPDATE {name} SET id = 3"))  # noqa: S608
            session.get_one(history, 3).id = 4
            session.commit()
            with pytest.raises(UnfencedWriteError):
                session.execute(update(table).values(id=2))
