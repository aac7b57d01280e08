"""What happens when a fenced class is mapped, and what listens on whose account."""

from __future__ import annotations

import gc
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import (
    BigInteger,
    Column,
    Engine,
    ForeignKey,
    ForeignKeyConstraint,
    Integer,
    MetaData,
    String,
    Table,
    create_engine,
    event,
    insert,
    select,
    update,
)
from sqlalchemy.ext.declarative import AbstractConcreteBase
from sqlalchemy.orm import (
    DeclarativeBase,
    Mapped,
    MappedAsDataclass,
    Session,
    configure_mappers,
    declared_attr,
    deferred,
    mapped_column,
    registry,
    relationship,
)

from fencelock.errors import StaleTokenError, UnfencedWriteError
from fencelock.guard import FencedDataclassModel, FencedModel, bind, claim, fence_column, write_id_column
from fencelock.guard.conditions import _forms
from fencelock.guard.leases import Writing
from fencelock.lease import Lease
from tests.guard.rows import InMemory


def new_base() -> Any:

    class Base(DeclarativeBase):
        pass

    return Base


def test_the_columns_are_as_promised() -> None:
    """Both BIGINT NOT NULL DEFAULT 0, last in the table."""

    class Order(FencedModel, new_base()):  # type: ignore[misc]
        __tablename__ = "mo_orders"
        __fence_resource__ = "orders"
        id: Mapped[int] = mapped_column(primary_key=True)
        status: Mapped[str]

    *_, fence, write_id = Order.__table__.c
    assert (fence.name, write_id.name) == ("last_fencing_token", "last_write_id")
    for column in (fence, write_id):
        assert isinstance(column.type, BigInteger)
        assert not column.nullable
        assert str(column.server_default.arg) == "0"


@pytest.mark.parametrize(
    ("template", "error", "message"),
    [
        ("order:{nmae}", ValueError, "names 'nmae', but the columns of its fenced table are"),
        ("order:{}", ValueError, "names ''"),
        ("order:{id.real}", ValueError, "names 'id.real'"),
        ("order:{id[0]}", ValueError, r"names 'id\[0\]'"),
        ("order:{items}", ValueError, "names 'items'"),
        ("order:{id", ValueError, "is no format string"),
        ("", ValueError, "empty"),
        (" order", ValueError, "white space"),
        (7, TypeError, "is a str"),
    ],
)
def test_a_wrong_template_is_refused_when_the_class_is_mapped(
    template: Any, error: type[Exception], message: str
) -> None:
    """The error comes at the class statement, and names the columns that there are."""
    base = new_base()
    attributes = {
        "__tablename__": "mo_orders",
        "__fence_resource__": template,
        "id": mapped_column(Integer, primary_key=True),
        "name": mapped_column(String(20)),
        "items": relationship("Item"),
    }
    with pytest.raises(error, match=message):
        type("Order", (FencedModel, base), attributes)
    base.registry.dispose()


def test_mapping_a_class_configures_nothing() -> None:
    """A relationship to a class that comes later in the file is no obstacle."""
    base = new_base()

    class Order(FencedModel, base):  # type: ignore[misc,valid-type]
        __tablename__ = "mo_orders"
        __fence_resource__ = "order:{id}"
        id: Mapped[int] = mapped_column(primary_key=True)
        items: Mapped[list[Any]] = relationship("Item")

    class Item(base):  # type: ignore[misc,valid-type]
        __tablename__ = "mo_items"
        id: Mapped[int] = mapped_column(primary_key=True)
        order_id: Mapped[int] = mapped_column(ForeignKey("mo_orders.id"))

    configure_mappers()
    assert Order.items.property.mapper.class_ is Item


def test_a_mapped_table_without_the_column_is_refused() -> None:
    """An imperative or reflected table that lacks the column says what to do."""

    class Box(FencedModel):
        pass

    table = Table("mo_boxes", MetaData(), Column("id", Integer, primary_key=True))
    with pytest.raises(ValueError, match=r"fence_column\(\).* migration"):
        registry().map_imperatively(Box, table)


def test_two_resources_for_one_table_are_refused() -> None:

    class Order(FencedModel, new_base()):  # type: ignore[misc]
        __tablename__ = "mo_orders"
        __fence_resource__ = "order:{id}"
        id: Mapped[int] = mapped_column(primary_key=True)
        kind: Mapped[str]
        __mapper_args__ = {"polymorphic_on": "kind"}  # noqa: RUF012

    with pytest.raises(ValueError, match="two resources"):

        class Gift(Order):
            __fence_resource__ = "gift:{id}"
            __mapper_args__ = {"polymorphic_identity": "gift"}  # noqa: RUF012


def test_a_fenced_base_fences_every_model(in_memory: InMemory) -> None:

    class Base(FencedModel, DeclarativeBase):
        pass

    class Order(Base):
        __tablename__ = "mo_orders"
        __fence_resource__ = "orders"
        id: Mapped[int] = mapped_column(primary_key=True)

    engine = in_memory(Base.metadata)
    with Session(engine) as session:
        session.add(Order(id=1))
        with pytest.raises(UnfencedWriteError):
            session.flush()


def test_column_and_attribute_names_may_differ(in_memory: InMemory) -> None:
    """__fence_resource__ speaks of attributes; statements speak of columns."""

    class Order(FencedModel, new_base()):  # type: ignore[misc]
        __tablename__ = "mo_orders"
        __fence_resource__ = "order:{number}"
        number: Mapped[int] = mapped_column("order_no", primary_key=True)
        status: Mapped[str] = mapped_column("st", String(10))

    engine = in_memory(Order.metadata)
    with Session(engine) as session:
        bind(session, Lease("order:1", 3))
        session.add(Order(number=1, status="new"))
        session.commit()
        claim(session, Order, {"number": 1}).status = "paid"
        session.commit()
        session.execute(update(Order).where(Order.number == 1).values(status="sent"))
        session.delete(session.get_one(Order, 1))
        session.commit()


def test_concrete_inheritance_has_a_fence_in_each_table(in_memory: InMemory) -> None:

    class Order(FencedModel, new_base()):  # type: ignore[misc]
        __tablename__ = "mo_orders"
        __fence_resource__ = "orders"
        id: Mapped[int] = mapped_column(primary_key=True)

    class Gift(Order):
        __tablename__ = "mo_gifts"
        __fence_resource__ = "gifts"
        id: Mapped[int] = mapped_column(primary_key=True)
        last_fencing_token: Mapped[int] = mapped_column(BigInteger, server_default="0")
        last_write_id: Mapped[int] = mapped_column(BigInteger, server_default="0")
        ribbon: Mapped[str]
        __mapper_args__ = {"concrete": True}  # noqa: RUF012

    engine = in_memory(Order.metadata)
    with Session(engine) as session:
        session.add(Gift(id=1, ribbon="red"))
        with pytest.raises(UnfencedWriteError):
            session.flush()
        session.rollback()
        bind(session, Lease("gifts", 2))
        session.add(Gift(id=1, ribbon="red"))
        session.commit()
        assert session.get_one(Gift, 1).last_fencing_token == 2


def test_a_fenced_model_below_others_that_are_not(in_memory: InMemory) -> None:
    """A flush that only comes to it over a relationship, after another of its hierarchy, is guarded too."""

    class Animal(new_base()):  # type: ignore[misc]
        __tablename__ = "mo_animals"
        id: Mapped[int] = mapped_column(primary_key=True)
        name: Mapped[str] = mapped_column(String, default="")
        friend_id: Mapped[int | None] = mapped_column(ForeignKey("mo_animals.id"))
        friend: Mapped[Any] = relationship("Animal", remote_side="Animal.id")
        dogs: Mapped[list[Any]] = relationship("Dog", foreign_keys="Dog.keeper_id")

    class Dog(FencedModel, Animal):
        __tablename__ = "mo_dogs"
        __fence_resource__ = "dogs"
        id: Mapped[int] = mapped_column(primary_key=True)
        keeper_id: Mapped[int | None] = mapped_column(ForeignKey("mo_animals.id"))
        cat_id: Mapped[int | None] = mapped_column(ForeignKey("mo_cats.id"))
        __mapper_args__ = {"concrete": True}  # noqa: RUF012

    class Cat(Animal):
        __tablename__ = "mo_cats"
        id: Mapped[int] = mapped_column(primary_key=True)
        dogs: Mapped[list[Any]] = relationship("Dog", foreign_keys=Dog.cat_id)
        __mapper_args__ = {"concrete": True}  # noqa: RUF012

    engine = in_memory(Animal.metadata)
    with Session(engine) as session:
        bind(session, Lease("dogs", 2))
        session.add_all([Animal(id=1), Dog(id=1), Cat(id=1)])
        session.commit()
        for token, keeper in enumerate((Animal, Cat), 3):
            bind(session, Lease("dogs", token))
            session.get_one(keeper, 1).dogs = [session.get_one(Dog, 1)]
            session.commit()
            assert session.get_one(Dog, 1).last_fencing_token == token


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("above", [False, True], ids=["one fenced", "all fenced"])
def test_models_below_an_abstract_concrete_base(in_memory: InMemory, *, strict: bool, above: bool) -> None:
    """A base that is only a query over its models' tables has no rows; those of the models are guarded."""

    class Plain:
        pass

    class Fenced(FencedModel):
        __fence_resource__ = "staff"

    class Employee(Fenced if above else Plain, AbstractConcreteBase, new_base()):  # type: ignore[misc]
        strict_attrs = strict
        name: Mapped[str]

    class Manager(Plain if above else Fenced, Employee):  # type: ignore[misc]
        __tablename__ = "mo_managers"
        id: Mapped[int] = mapped_column(primary_key=True)
        name: Mapped[str]
        __mapper_args__ = {"polymorphic_identity": "manager", "concrete": True}  # noqa: RUF012

    class Engineer(Employee):
        __tablename__ = "mo_engineers"
        id: Mapped[int] = mapped_column(primary_key=True)
        name: Mapped[str]
        __mapper_args__ = {"polymorphic_identity": "engineer", "concrete": True}  # noqa: RUF012

    configure_mappers()
    engine = in_memory(Employee.metadata)
    with Session(engine) as session:
        bind(session, Lease("staff", 3))
        session.add_all([Manager(id=1, name="a"), Engineer(id=2, name="b")])
        session.commit()
        for employee in session.scalars(select(Employee)):
            employee.name += "z"
        session.commit()
        assert session.get_one(Manager, 1).last_fencing_token == 3
        assert session.get_one(Engineer, 2).name == "bz"
        bind(session, Lease("staff", 2))
        with pytest.raises(StaleTokenError):
            session.execute(update(Manager).values(name="c"))


def test_an_abstract_mixin_chain(in_memory: InMemory) -> None:

    class Named(FencedModel):
        __fence_resource__ = "o"

        @declared_attr.directive
        def __tablename__(cls) -> str:  # noqa: N805  SQLAlchemy's way
            return "mo_named"

    class Order(Named, new_base()):  # type: ignore[misc]
        id: Mapped[int] = mapped_column(primary_key=True)
        blob: Mapped[str] = deferred(mapped_column(String, default=""))

    engine = in_memory(Order.metadata)
    with Session(engine) as session:
        bind(session, Lease("o", 4))
        session.add(Order(id=1))
        session.commit()
        session.get_one(Order, 1).blob = "x"
        session.commit()


def test_plain_models_stay_hashable_and_dataclasses_stay_dataclasses() -> None:

    class Base(MappedAsDataclass, DeclarativeBase):
        pass

    class Point(FencedDataclassModel, Base):
        __tablename__ = "mo_points"
        __fence_resource__ = "points"
        id: Mapped[int] = mapped_column(primary_key=True)
        x: Mapped[int] = mapped_column(default=7)

    class Order(FencedModel, new_base()):  # type: ignore[misc]
        __tablename__ = "mo_orders"
        __fence_resource__ = "orders"
        id: Mapped[int] = mapped_column(primary_key=True)

    assert Point(id=1) == Point(id=1, x=7)
    assert repr(Point(id=1)).endswith("Point(id=1, x=7)")
    assert len({Order(id=1), Order(id=1)}) == 2


def test_mixin_of_plain_models_beside_dataclasses_names_the_other_one() -> None:
    """SQLAlchemy's own error would not."""

    class Base(MappedAsDataclass, DeclarativeBase):
        pass

    with pytest.raises(TypeError, match="Point is a dataclass: use FencedDataclassModel"):

        class Point(FencedModel, Base):
            __tablename__ = "mo_points"
            __fence_resource__ = "points"
            id: Mapped[int] = mapped_column(primary_key=True)


def test_a_copied_table_is_guarded_like_the_original(in_memory: InMemory) -> None:

    class Order(FencedModel, new_base()):  # type: ignore[misc]
        __tablename__ = "mo_orders"
        __fence_resource__ = "order:{id}"
        id: Mapped[int] = mapped_column(primary_key=True)
        status: Mapped[str] = mapped_column(default="new")

    copy = Order.__table__.to_metadata(MetaData())
    engine = in_memory(copy.metadata)
    with engine.connect() as connection:
        with pytest.raises(UnfencedWriteError):
            connection.execute(insert(copy), {"id": 1})
        connection.rollback()
        bind(connection, Lease("order:1", 3))
        connection.execute(insert(copy), {"id": 1, "status": "new"})
        connection.execute(update(copy).where(copy.c.id == 1).values(status="x"))
        with pytest.raises(UnfencedWriteError, match="'order:2'"):
            connection.execute(update(copy).where(copy.c.id == 2).values(status="x"))


class Base(DeclarativeBase):
    """For what follows."""


class Row(FencedModel, Base):
    __tablename__ = "mo_rows"
    __fence_resource__ = "rows"
    id: Mapped[int] = mapped_column(primary_key=True)
    value: Mapped[int] = mapped_column(default=0)


def executions(engine: Engine) -> list[tuple[str, bool]]:
    """Note what reaches the cursor: the SQL, and whether it is an executemany."""
    seen: list[tuple[str, bool]] = []

    def note(_c: object, _cursor: object, sql: str, _p: object, _x: object, many: bool) -> None:
        if not sql.startswith(("SELECT", "PRAGMA", "CREATE")):
            seen.append((sql, many))

    event.listen(engine, "before_cursor_execute", note)
    return seen


def test_facades_do_not_guard_twice(in_memory: InMemory) -> None:
    """An engine made by execution_options() adds the condition once."""
    engine = in_memory(Base.metadata).execution_options(a=1).execution_options(b=2)
    seen = executions(engine)
    with Session(engine) as session:
        bind(session, Lease("rows", 1))
        session.add(Row(id=1))
        session.flush()
        session.execute(update(Row).values(value=1))
    assert seen[-1][0].count("<=") == 1


def test_executemany_is_kept(in_memory: InMemory) -> None:
    """A thousand dirty objects are one executemany, and new ones are inserted many at a time."""
    engine = in_memory(Base.metadata)
    seen = executions(engine)
    with Session(engine) as session:
        bind(session, Lease("rows", 1))
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
    """Other tokens and other values compile nothing again, and each is sent."""
    engine = in_memory(Base.metadata)
    with Session(engine) as session:
        bind(session, Lease("rows", 1))
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


def test_no_fenced_table_no_guard() -> None:
    """Importing the package leaves SQLAlchemy as it is; the first fenced model puts the guard in place.

    It has no events of `Engine`: with one, all engines of the process would be slower.
    """
    script = """
import fencelock.guard, sqlalchemy as sa
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
engine = sa.create_engine("sqlite://")
untouched = sa.Update._execute_on_connection
class Base(DeclarativeBase): pass
class Row(fencelock.guard.FencedModel, Base):
    __tablename__ = "rows"
    __fence_resource__ = "rows"
    id: Mapped[int] = mapped_column(primary_key=True)
assert sa.Update._execute_on_connection is not untouched
assert not engine._has_events
try:
    with engine.begin() as connection:
        Base.metadata.create_all(connection)
        connection.execute(sa.delete(Row.__table__))
except fencelock.errors.UnfencedWriteError:
    print("refused")
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.stdout, done.stderr) == ("refused\n", "")


def test_what_the_guard_remembers_dies_with_its_owner(in_memory: InMemory) -> None:
    """Transactions, sessions and statements that are gone leave nothing behind."""
    engine = in_memory(Base.metadata)
    stores: list[Callable[[], int]] = [
        lambda: len(_forms),
        lambda: sum(isinstance(each, Writing) for each in gc.get_objects()),
    ]

    def work(tokens: range) -> list[int]:
        for token in tokens:
            with Session(engine) as session:
                bind(session, Lease("rows", token))
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

    some, many = work(range(2, 12)), work(range(12, 100))
    assert sum(many) < sum(some) + 20, "compiled statements are cached, 88 rounds' worth of them is a leak"


def test_a_plain_table_leaves_nothing_behind(in_memory: InMemory) -> None:
    """Sessions that have nothing to do with a fence are remembered neither while they last nor afterwards."""

    class Base(DeclarativeBase):
        pass

    class Plain(Base):
        __tablename__ = "mo_passing"
        id: Mapped[int] = mapped_column(primary_key=True)
        value: Mapped[int] = mapped_column(default=0)

    engine = in_memory(Base.metadata)
    with Session(engine) as session:
        session.add(Plain(id=1))
        session.flush()
        session.execute(update(Plain).values(value=1))
        assert not hasattr(session.connection(), "_fencelock_writing")


def test_a_class_without_the_mixin_is_guarded_by_its_table(tmp_path: Path) -> None:
    """Whoever maps a Table with a fence_column() has links and joined sub-tables guarded too."""

    class Base(DeclarativeBase):
        pass

    boxes = Table(
        "mo_plain_boxes", Base.metadata, Column("id", Integer, primary_key=True), Column("kind", String(9)),
        fence_column(resource="boxes"),
        write_id_column(),
    )  # fmt: skip

    class Box(Base):
        __table__ = boxes
        __mapper_args__ = {"polymorphic_on": boxes.c.kind, "polymorphic_identity": "box"}  # noqa: RUF012

    class Crate(Box):
        __tablename__ = "mo_plain_crates"
        id: Mapped[int] = mapped_column(ForeignKey("mo_plain_boxes.id"), primary_key=True)
        width: Mapped[int] = mapped_column(default=0)
        __mapper_args__ = {"polymorphic_identity": "crate"}  # noqa: RUF012

    engine = create_engine(f"sqlite:///{tmp_path / 'plain.sqlite'}")
    Base.metadata.create_all(engine)
    with Session(engine) as session:
        bind(session, Lease("boxes", 5))
        session.add(Crate(id=1))
        session.commit()
        crate = session.get_one(Crate, 1)
        bind(session, Lease("boxes", 4))
        crate.width = 7
        with pytest.raises(StaleTokenError):
            session.commit()
        session.rollback()
        with pytest.raises(UnfencedWriteError):
            session.connection().execute(update(Crate.__table__).values(width=3))
    engine.dispose()


def test_the_fence_keeps_its_name() -> None:
    """A mapping that calls the column something else could not be stamped, so it is refused at once."""
    table = Table(
        "mo_renamed", MetaData(), Column("id", Integer, primary_key=True), fence_column()
    )  # fmt: skip

    class Renamed(FencedModel):
        __fence_resource__ = "renamed"

    with pytest.raises(ValueError, match="under another name"):
        registry().map_imperatively(Renamed, table, properties={"fence": table.c.last_fencing_token})


def test_a_parent_in_the_same_table_has_the_fence_too() -> None:
    """Objects that a query of the parent loads would not have theirs, and nothing would be compared."""

    class Employee(new_base()):  # type: ignore[misc]
        __tablename__ = "mo_staff"
        id: Mapped[int] = mapped_column(primary_key=True)
        kind: Mapped[str]
        __mapper_args__ = {"polymorphic_on": "kind", "polymorphic_identity": "employee"}  # noqa: RUF012

    with pytest.raises(ValueError, match=r"shares the table 'mo_staff' with Employee.* inherit FencedModel"):

        class Engineer(FencedModel, Employee):
            __fence_resource__ = "staff"
            __mapper_args__ = {"polymorphic_identity": "engineer"}  # noqa: RUF012


def test_metadata_with_a_fenced_table_cannot_be_pickled() -> None:
    """A process that loads it may have no guard, so the error says to import the models."""
    core = Table(
        "mo_core", MetaData(), Column("id", Integer, primary_key=True), fence_column(resource="core")
    )
    for metadata in (core.metadata, Base.metadata):
        with pytest.raises(TypeError, match="import the models there"):
            pickle.dumps(metadata)
    assert pickle.loads(pickle.dumps(Row(id=1, value=7))).value == 7  # noqa: S301  our own


@pytest.mark.parametrize("key", [["place", "listed"], ["text"]], ids=["in another order", "of its own"])
def test_the_key_of_a_model_is_that_of_its_table(key: list[str]) -> None:
    """By it the unit of work names a row, whose object is looked up."""
    with pytest.raises(ValueError, match="primary key"):

        class Line(FencedModel, new_base()):  # type: ignore[misc]
            __tablename__ = "mo_lines"
            __fence_resource__ = "lines"
            listed: Mapped[int] = mapped_column(primary_key=True)
            place: Mapped[int] = mapped_column(primary_key=True)
            text: Mapped[str]
            __mapper_args__ = {"primary_key": key}  # noqa: RUF012  SQLAlchemy's declaration


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
            ForeignKeyConstraint(["in_a", "in_b"], ["mo_documents.a", "mo_documents.b"]),
            fence_column(resource="rows"),
            write_id_column(),
        )
        type(f"Invoice{''.join(columns)}", (Document,), {"__table__": table})

    child("in_a", "in_b")
    with pytest.raises(ValueError, match=r"\['a', 'b'\].* is \['in_b', 'in_a'\].*same order"):
        child("in_b", "in_a")
