"""Every way that SQLAlchemy has to write a fenced row. `test_write_table` takes them all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sqlalchemy import (
    Column,
    Engine,
    ForeignKey,
    Integer,
    String,
    Table,
    bindparam,
    delete,
    insert,
    select,
    text,
    update,
)
from sqlalchemy.orm import (
    DeclarativeBase,
    DynamicMapped,
    Mapped,
    MappedAsDataclass,
    Session,
    WriteOnlyMapped,
    aliased,
    mapped_column,
    registry,
    relationship,
)

from fencelock.guard import (
    FencedDataclassModel,
    FencedModel,
    execute_fenced,
    fence_column,
    fenced_delete,
    fenced_update,
    write_id_column,
)
from fencelock.tokens import MAX_TOKEN
from tests.guard.rows import empty

FENCE = 5
STALE = 4
FRESH = 6


class Base(DeclarativeBase):
    """The models of this file."""


class DataclassBase(MappedAsDataclass, DeclarativeBase):
    metadata = Base.metadata


labels = Table(
    "wp_labels",
    Base.metadata,
    Column("order_id", ForeignKey("wp_orders.id"), primary_key=True),
    Column("tag_id", ForeignKey("wp_tags.id"), primary_key=True),
)


class Tag(Base):
    __tablename__ = "wp_tags"
    id: Mapped[int] = mapped_column(primary_key=True)


class Item(Base):
    __tablename__ = "wp_items"
    id: Mapped[int] = mapped_column(primary_key=True)
    order_id: Mapped[int | None] = mapped_column(ForeignKey("wp_orders.id"))
    order: Mapped[Order | None] = relationship(back_populates="items", foreign_keys=order_id)


class Order(FencedModel, Base):
    __tablename__ = "wp_orders"
    __fence_resource__ = "order:{id}"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    status: Mapped[str] = mapped_column(String(20))
    first_item_id: Mapped[int | None] = mapped_column(
        ForeignKey("wp_items.id", use_alter=True, name="wp_first_item")
    )
    tags: Mapped[list[Tag]] = relationship(secondary=labels)
    later_tags: WriteOnlyMapped[Tag] = relationship(secondary=labels, overlaps="tags,tags_by_query")
    tags_by_query: DynamicMapped[Tag] = relationship(secondary=labels, overlaps="tags,later_tags")
    items: Mapped[list[Item]] = relationship(back_populates="order", foreign_keys=Item.order_id)
    first_item: Mapped[Item | None] = relationship(foreign_keys=first_item_id, post_update=True)


class Employee(FencedModel, Base):
    __tablename__ = "wp_employees"
    __fence_resource__ = "order:1"
    id: Mapped[int] = mapped_column(primary_key=True)
    kind: Mapped[str] = mapped_column(String(20))
    name: Mapped[str] = mapped_column(String(20))
    __mapper_args__ = {"polymorphic_on": "kind", "polymorphic_identity": "employee"}  # noqa: RUF012


class Engineer(Employee):
    __tablename__ = "wp_engineers"
    id: Mapped[int] = mapped_column(ForeignKey("wp_employees.id"), primary_key=True)
    tool: Mapped[str] = mapped_column(String(20))
    __mapper_args__ = {"polymorphic_identity": "engineer"}  # noqa: RUF012


class Manager(Employee):
    office: Mapped[str | None] = mapped_column(String(20))
    __mapper_args__ = {"polymorphic_identity": "manager"}  # noqa: RUF012


class Place(FencedModel, Base):
    __tablename__ = "wp_places"
    __fence_resource__ = "order:{row}"
    row: Mapped[int] = mapped_column(primary_key=True)
    seat: Mapped[str] = mapped_column(String(5), primary_key=True)
    taken: Mapped[int]


class Point(FencedDataclassModel, DataclassBase):
    __tablename__ = "wp_points"
    __fence_resource__ = "order:1"
    id: Mapped[int] = mapped_column(primary_key=True)
    x: Mapped[int]


class Box(FencedModel):
    __fence_resource__ = "order:1"

    def __init__(self, id: int, size: int) -> None:  # noqa: A002  as the column is called
        self.id = id
        self.size = size


boxes = Table(
    "wp_boxes",
    Base.metadata,
    Column("id", Integer, primary_key=True),
    Column("size", Integer),
    fence_column(),
    write_id_column(),
)
registry().map_imperatively(Box, boxes)

orders: Table = Order.__table__  # type: ignore[assignment]
employees: Table = Employee.__table__  # type: ignore[assignment]
engineers: Table = Engineer.__table__  # type: ignore[assignment]


def seed(engine: Engine) -> None:
    fence = {"last_fencing_token": FENCE}
    with engine.begin() as connection:
        execute_fenced(connection, fenced_update(orders).values(first_item_id=None), token=MAX_TOKEN)
        empty(connection, Base.metadata)
    with engine.execution_options(fencelock="bypass").begin() as connection:
        connection.execute(insert(Tag), [{"id": 1}, {"id": 2}])
        connection.execute(insert(Order), {"id": 1, "status": "new", **fence})
        connection.execute(insert(Item), [{"id": 1, "order_id": 1}, {"id": 2, "order_id": None}])
        connection.execute(insert(labels), {"order_id": 1, "tag_id": 1})
        for number, kind in enumerate(["employee", "engineer", "manager"], 1):
            connection.execute(insert(employees), {"id": number, "kind": kind, "name": "new", **fence})
        connection.execute(insert(engineers), {"id": 2, "tool": "new"})
        if connection.dialect.name == "postgresql":
            connection.execute(text("SELECT setval('wp_employees_id_seq', 100)"))
        connection.execute(insert(Place), {"row": 1, "seat": "a", "taken": 0, **fence})
        connection.execute(insert(Point), {"id": 1, "x": 0, **fence})
        connection.execute(insert(boxes), {"id": 1, "size": 0, **fence})


def get(session: Session, model: type[Any], identity: Any = 1) -> Any:
    found = session.get_one(model, identity)
    session.info.setdefault("kept", []).append(found)
    return found


def setting(model: type[Any], attribute: str, value: Any, identity: Any = 1) -> Callable[[Session], object]:

    def write(session: Session) -> None:
        setattr(get(session, model, identity), attribute, value)
        session.flush()

    return write


def deleting(model: type[Any], identity: Any = 1) -> Callable[[Session], object]:

    def write(session: Session) -> None:
        session.delete(get(session, model, identity))
        session.flush()

    return write


def merge(session: Session) -> None:
    session.merge(Order(id=1, status="paid", last_fencing_token=3))
    session.flush()


def change_primary_key(session: Session) -> None:
    get(session, Employee).id = 77
    session.flush()


def switch_row(session: Session) -> None:
    session.delete(get(session, Employee))
    session.add(Employee(id=1, name="switched"))
    session.flush()


def update_after_the_fact(session: Session) -> None:
    get(session, Order).first_item = get(session, Item)
    session.flush()


def link(session: Session) -> None:
    order = get(session, Order)
    order.tags.append(get(session, Tag, 2))
    session.flush()


def unlink(session: Session) -> None:
    order = get(session, Order)
    order.tags.clear()
    session.flush()


def link_unloaded(session: Session) -> None:
    order = get(session, Order)
    order.later_tags.add(get(session, Tag, 2))
    session.flush()


def link_by_query(session: Session) -> None:
    order = get(session, Order)
    order.tags_by_query.append(get(session, Tag, 2))
    session.flush()


def append_to_collection(session: Session) -> None:
    order = get(session, Order)
    order.items.append(get(session, Item, 2))
    session.flush()


def append_from_the_other_side(session: Session) -> None:
    get(session, Item, 2).order = get(session, Order)
    session.flush()


def set_by_expression(session: Session) -> None:
    get(session, Employee).name = Employee.name + "!"
    session.flush()


def bulk_update_mappings(session: Session) -> None:
    session.bulk_update_mappings(Order, [{"id": 1, "status": "paid"}])


def bulk_save_objects(session: Session) -> None:
    order = get(session, Order)
    session.expunge(order)
    order.status = "paid"
    session.bulk_save_objects([order])


def update_where(session: Session) -> None:
    session.execute(update(Order).where(Order.id == 1).values(status="paid"))


def update_with_more_criteria(session: Session) -> None:
    paid = update(Order).where((Order.id == 1) & Order.status.in_(["new", "old"])).values(status="paid")
    session.execute(paid)


def update_many_rows(session: Session) -> None:
    session.execute(update(Employee).where(Employee.name == "new").values(name="old"))


def update_by_key_list(session: Session) -> None:
    session.execute(update(Order), [{"id": 1, "status": "paid"}])


def update_query(session: Session) -> None:
    session.query(Order).filter(Order.id == 1).update({"status": "paid"})


def update_alias(session: Session) -> None:
    other = aliased(Order)
    statement = update(other).where(other.id == 1).values(status="paid")
    session.execute(statement, execution_options={"synchronize_session": False})


def update_in_order(session: Session) -> None:
    session.execute(update(orders).where(orders.c.id == 1).ordered_values((orders.c.status, "paid")))


def update_from(session: Session) -> None:
    statement = update(Order).where(Order.id == 1, Item.order_id == Order.id).values(status="paid")
    session.execute(statement, execution_options={"synchronize_session": False})


def update_from_subquery(session: Session) -> None:
    has_items = select(Item.id).where(Item.order_id == Order.id).exists()
    statement = update(Order).where(Order.id == 1, has_items).values(status="paid")
    session.execute(statement, execution_options={"synchronize_session": False})


def core_update(session: Session) -> None:
    session.connection().execute(update(orders).where(orders.c.id == 1).values(status="paid"))


def core_executemany(session: Session) -> None:
    places: Table = Place.__table__  # type: ignore[assignment]
    statement = update(places).where(places.c.row == bindparam("r"), places.c.seat == bindparam("s"))
    session.connection().execute(
        statement, [{"r": 1, "s": "a", "taken": 1}, {"r": 1, "s": "none", "taken": 1}]
    )


def core_fenced_update(session: Session) -> None:
    execute_fenced(session, fenced_update(Order).where(Order.id == 1).values(status="paid"))


def core_fenced_delete(session: Session) -> None:
    execute_fenced(session.connection(), fenced_delete(boxes).where(boxes.c.id == 1))


def delete_where(session: Session) -> None:
    session.execute(delete(Point).where(Point.id == 1))


def delete_many_rows(session: Session) -> None:
    session.execute(delete(Box).where(boxes.c.size == 0))


def delete_query(session: Session) -> None:
    session.query(Place).filter(Place.row == 1).delete()


UPDATES: dict[str, Callable[[Session], object]] = {
    "unit of work": setting(Order, "status", "paid"),
    "expression": set_by_expression,
    "composite key": setting(Place, "taken", 1, (1, "a")),
    "dataclass": setting(Point, "x", 1),
    "imperative mapping": setting(Box, "size", 1),
    "joined, base table": setting(Engineer, "name", "old", 2),
    "joined, sub-table only": setting(Engineer, "tool", "old", 2),
    "single-table": setting(Manager, "office", "old", 3),
    "merge": merge,
    "primary key change": change_primary_key,
    "row switch": switch_row,
    "post_update": update_after_the_fact,
    "link": link,
    "unlink": unlink,
    "link, write-only": link_unloaded,
    "link, dynamic": link_by_query,
    "collection": append_to_collection,
    "collection, by backref": append_from_the_other_side,
    "bulk_update_mappings": bulk_update_mappings,
    "bulk_save_objects": bulk_save_objects,
    "session.execute(update)": update_where,
    "session.execute(update), more criteria": update_with_more_criteria,
    "session.execute(update), many rows": update_many_rows,
    "session.execute(update), key list": update_by_key_list,
    "Query.update": update_query,
    "aliased target": update_alias,
    "ordered_values": update_in_order,
    "UPDATE … FROM": update_from,
    "UPDATE … WHERE EXISTS": update_from_subquery,
    "Core": core_update,
    "Core executemany": core_executemany,
    "fenced_update": core_fenced_update,
}

DELETES: dict[str, Callable[[Session], object]] = {
    "unit of work": deleting(Point),
    "joined": deleting(Engineer, 2),
    "single-table": deleting(Manager, 3),
    "composite key": deleting(Place, (1, "a")),
    "session.execute(delete)": delete_where,
    "session.execute(delete), many rows": delete_many_rows,
    "Query.delete": delete_query,
    "fenced_delete": core_fenced_delete,
}

INSERTS: dict[str, Callable[[Session], object]] = {
    "unit of work": lambda session: add(session, Place(row=1, seat="b", taken=0)),
    "unit of work, many": lambda session: add(session, *[Box(id=n, size=0) for n in range(2, 9)]),
    "generated key": lambda session: add(session, Employee(name="new"), Employee(name="new")),
    "dataclass": lambda session: add(session, Point(id=2, x=0)),
    "joined": lambda session: add(session, Engineer(name="new", tool="new")),
    "bulk_insert_mappings": lambda session: session.bulk_insert_mappings(Point, [{"id": 2, "x": 1}]),
    "session.execute(insert)": lambda session: session.execute(insert(Point), [{"id": 2, "x": 1}]),
    "insert().values()": lambda session: session.execute(insert(Point).values(id=2, x=1)),
    "Core": lambda session: session.connection().execute(insert(boxes), [{"id": 2}, {"id": 3}]),
    "insert().returning()": lambda session: session.execute(
        insert(Employee).returning(Employee), [{"name": "a", "kind": "employee"}] * 3
    ),
}


def add(session: Session, *objects: object) -> None:
    session.add_all(objects)
    session.flush()
