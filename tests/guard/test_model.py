"""Mapping a fenced class checks it at once, and the first fenced model puts the guard in place."""

from __future__ import annotations

import gc
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy import BigInteger, Column, ForeignKey, Integer, MetaData, String, Table, event, orm, update
from sqlalchemy.ext.declarative import AbstractConcreteBase
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, deferred, mapped_column, registry, relationship

import fencelock
from fencelock import FencedModel, Lease, StaleTokenError, UnfencedWriteError, bind, claim
from fencelock.guard import fence_column, write_id_column
from fencelock.guard.conditions import _forms
from fencelock.guard.leases import _LEASES, TransactionLeases
from tests.guard.rows import InMemory, core_table, holding, turned_away

new_base: Callable[[], Any] = orm.declarative_base


def new_key() -> Any:
    return mapped_column(Integer, primary_key=True)


def make(
    resource: Any = "orders", *, name: str = "Order", bases: tuple[Any, ...] = (), **attributes: Any
) -> Any:
    given = {"__tablename__": f"mo_{name.lower()}", "id": new_key(), "__fence_resource__": resource}
    return type(name, bases or (FencedModel, new_base()), given | attributes)


def test_the_columns_are_as_promised() -> None:
    """Both BIGINT NOT NULL DEFAULT 0, last in the table."""
    *_, fence, write_id = make(status=mapped_column(String)).__table__.c
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
    with pytest.raises(error, match=message):
        make(template, bases=(FencedModel, base), status=mapped_column(String), items=relationship("Item"))
    base.registry.dispose()


def without_the_column() -> None:
    """Map a table imperatively, or as it is reflected."""
    table = Table("mo_boxes", MetaData(), Column("id", Integer, primary_key=True))
    registry().map_imperatively(type("Box", (FencedModel,), {}), table)


def by_another_name() -> None:
    """Call the column something else, which could not be stamped."""
    table = Table("mo_renamed", MetaData(), Column("id", Integer, primary_key=True), fence_column())
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


MISTAKES: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
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


@pytest.mark.parametrize(("mistake", "error", "match"), MISTAKES.values(), ids=MISTAKES)
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
    """A relationship to a class that comes later in the file is no obstacle."""
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
    """__fence_resource__ speaks of attributes; statements speak of columns."""
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


def test_concrete_inheritance_has_a_fence_in_each_table(in_memory: InMemory) -> None:
    order = make()

    class Gift(order):  # type: ignore[misc,valid-type]
        __tablename__ = "mo_gifts"
        __fence_resource__ = "gifts"
        id: Mapped[int] = mapped_column(primary_key=True)
        last_fencing_token: Mapped[int] = mapped_column(BigInteger, server_default="0")
        last_write_id: Mapped[int] = mapped_column(BigInteger, server_default="0")
        ribbon: Mapped[str]
        __mapper_args__ = {"concrete": True}  # noqa: RUF012

    with Session(in_memory(order.metadata)) as session:
        session.add(Gift(id=1, ribbon="red"))
        with turned_away(session, UnfencedWriteError):
            session.flush()
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

    with holding(in_memory(Animal.metadata), Lease("dogs", 2)) as session:
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

    class Plain: ...

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

    orm.configure_mappers()
    with holding(in_memory(Employee.metadata), Lease("staff", 3)) as session:
        session.add_all([Manager(id=1, name="a"), Engineer(id=2, name="b")])
        session.commit()
        for employee in session.scalars(sa.select(Employee)):
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

        @orm.declared_attr.directive
        def __tablename__(cls) -> str:  # noqa: N805  SQLAlchemy's way
            return "mo_named"

    class Order(Named, new_base()):  # type: ignore[misc]
        id: Mapped[int] = mapped_column(primary_key=True)
        blob: Mapped[str] = deferred(mapped_column(String, default=""))

    with holding(in_memory(Order.metadata), Lease("o", 4)) as session:
        session.add(Order(id=1))
        session.commit()
        session.get_one(Order, 1).blob = "x"
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
    copy = make("order:{id}", status=mapped_column(String)).__table__.to_metadata(MetaData())
    with in_memory(copy.metadata).connect() as connection:
        with turned_away(connection, UnfencedWriteError):
            connection.execute(sa.insert(copy), {"id": 1})
        bind(connection, Lease("order:1", 3))
        connection.execute(sa.insert(copy), {"id": 1, "status": "new"})
        connection.execute(update(copy).where(copy.c.id == 1).values(status="x"))
        with pytest.raises(UnfencedWriteError, match="'order:2'"):
            connection.execute(update(copy).where(copy.c.id == 2).values(status="x"))


class Base(DeclarativeBase): ...


class Row(FencedModel, Base):
    __tablename__ = "mo_rows"
    __fence_resource__ = "rows"
    id: Mapped[int] = mapped_column(primary_key=True)
    value: Mapped[int] = mapped_column(default=0)


def executions(engine: sa.Engine) -> list[tuple[str, bool]]:
    """Note what reaches the cursor: the SQL, and whether it is an executemany."""
    seen: list[tuple[str, bool]] = []

    def note(_c: object, _cursor: object, sql: str, _p: object, _x: object, many: bool) -> None:
        if not sql.startswith(("SELECT", "PRAGMA", "CREATE")):
            seen.append((sql, many))

    event.listen(engine, "before_cursor_execute", note)
    return seen


def test_facades_do_not_guard_twice(in_memory: InMemory) -> None:
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
def test_no_fenced_table_no_guard(mixin: str, columns: str) -> None:
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

    some, many = work(range(2, 12)), work(range(12, 100))
    assert sum(many) < sum(some) + 20, "compiled statements are cached, 88 rounds' worth of them is a leak"


def test_a_plain_table_leaves_nothing_behind(in_memory: InMemory) -> None:
    """Sessions that have nothing to do with a fence are remembered neither while they last nor afterwards."""

    class Base(DeclarativeBase): ...

    class Plain(Base):
        __tablename__ = "mo_passing"
        id: Mapped[int] = mapped_column(primary_key=True)
        value: Mapped[int] = mapped_column(default=0)

    with Session(in_memory(Base.metadata)) as session:
        session.add(Plain(id=1))
        session.flush()
        session.execute(update(Plain).values(value=1))
        assert not hasattr(session.connection(), _LEASES)


def test_a_class_without_the_mixin_is_guarded_by_its_table(in_memory: InMemory) -> None:
    """A class that maps a Table with a fence_column() has its joined sub-tables guarded too."""
    base = new_base()
    boxes = core_table("mo_boxes", Column("kind", String(9)), metadata=base.metadata, resource="boxes")
    kinds = {"polymorphic_on": boxes.c.kind, "polymorphic_identity": "box"}
    box = type("Box", (base,), {"__table__": boxes, "__mapper_args__": kinds})
    id_, width = mapped_column(ForeignKey("mo_boxes.id"), primary_key=True), mapped_column(Integer, default=0)
    named = {"__tablename__": "mo_crates", "__mapper_args__": {"polymorphic_identity": "crate"}}
    crate_class: Any = type("Crate", (box,), {**named, "id": id_, "width": width})
    with holding(in_memory(base.metadata), Lease("boxes", 5)) as session:
        session.add(crate_class(id=1))
        session.commit()
        crate = session.get_one(crate_class, 1)
        bind(session, Lease("boxes", 4))
        crate.width = 7
        with turned_away(session, StaleTokenError):
            session.commit()
        with pytest.raises(UnfencedWriteError):
            session.connection().execute(update(crate_class.__table__).values(width=3))


def test_metadata_with_a_fenced_table_cannot_be_pickled() -> None:
    """A process that loads it may have no guard, so the error says to import the models."""
    for metadata in (core_table("mo_core", resource="core").metadata, Base.metadata):
        with pytest.raises(TypeError, match="import the models there"):
            pickle.dumps(metadata)
    assert pickle.loads(pickle.dumps(Row(id=1, value=7))).value == 7  # noqa: S301  our own
