"""Every way that SQLAlchemy has to write a fenced row. `test_write_table` takes them all."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from sqlalchemy import Column, ForeignKey, Integer, String, Table, bindparam, delete, insert, orm, update
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, aliased, mapped_column, registry, relationship

from fencelock import FencedDataclassModel, FencedModel
from fencelock.tokens import MAX_TOKEN
from tests.guard.marks import Act
from tests.guard.rows import Keyed, bypassed, core_table, empty

FENCE = 5
STALE = 4
FRESH = 6


class Base(DeclarativeBase): ...


class DataclassBase(orm.MappedAsDataclass, DeclarativeBase):
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


class Order(FencedModel, Keyed, Base):
    __tablename__ = "wp_orders"
    __fence_resource__ = "order:{id}"
    status: Mapped[str] = mapped_column(String(20))
    first_item_id: Mapped[int | None] = mapped_column(
        ForeignKey("wp_items.id", use_alter=True, name="wp_first_item")
    )
    tags: Mapped[list[Tag]] = relationship(secondary=labels)
    later_tags: orm.WriteOnlyMapped[Tag] = relationship(secondary=labels, overlaps="tags,tags_by_query")
    tags_by_query: orm.DynamicMapped[Tag] = relationship(secondary=labels, overlaps="tags,later_tags")
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


boxes = core_table("wp_boxes", Column("size", Integer), metadata=Base.metadata)
registry().map_imperatively(Box, boxes)
orders: Table = Order.__table__  # type: ignore[assignment]
employees: Table = Employee.__table__  # type: ignore[assignment]
engineers: Table = Engineer.__table__  # type: ignore[assignment]


def seed(engine: sa.Engine) -> None:
    fence = {"last_fencing_token": FENCE}
    with engine.begin() as connection:
        connection.execute(
            update(orders).values(first_item_id=None), execution_options={"fencing_token": MAX_TOKEN}
        )
        empty(connection, Base.metadata)
    with bypassed(engine) as connection:
        connection.execute(insert(Tag), [{"id": 1}, {"id": 2}])
        connection.execute(insert(Order), {"id": 1, "status": "new", **fence})
        connection.execute(insert(Item), [{"id": 1, "order_id": 1}, {"id": 2, "order_id": None}])
        connection.execute(insert(labels), {"order_id": 1, "tag_id": 1})
        for number, kind in enumerate(["employee", "engineer", "manager"], 1):
            connection.execute(insert(employees), {"id": number, "kind": kind, "name": "new", **fence})
        connection.execute(insert(engineers), {"id": 2, "tool": "new"})
        if connection.dialect.name == "postgresql":
            connection.execute(sa.text("SELECT setval('wp_employees_id_seq', 100)"))
        connection.execute(insert(Place), {"row": 1, "seat": "a", "taken": 0, **fence})
        connection.execute(insert(Point), {"id": 1, "x": 0, **fence})
        connection.execute(insert(boxes), {"id": 1, "size": 0, **fence})


def get(session: Session, model: type[Any], identity: Any = 1) -> Any:
    found = session.get_one(model, identity)
    session.info.setdefault("kept", []).append(found)
    return found


def setting(model: type[Any], attribute: str, value: Any, identity: Any = 1) -> Act:
    return lambda session: setattr(get(session, model, identity), attribute, value)


def deleting(model: type[Any], identity: Any = 1) -> Act:
    return lambda session: session.delete(get(session, model, identity))


def executing(statement: Any, **options: Any) -> Act:
    return lambda session: session.execute(statement, execution_options=options)


def on_connection(statement: Any, *rows: dict[str, Any]) -> Act:
    return lambda session: session.connection().execute(statement, [*rows] or None)


def add(session: Session, *objects: object) -> None:
    session.add_all(objects)
    session.flush()


def switch_row(session: Session) -> None:
    session.delete(get(session, Employee))
    session.add(Employee(id=1, name="switched"))


def bulk_save_objects(session: Session) -> None:
    """Update without the unit of work, by objects that the session is not to flush once more."""
    order = get(session, Order)
    session.expunge(order)
    order.status = "paid"
    session.bulk_save_objects([order])


alias = aliased(Order)
places: Table = Place.__table__  # type: ignore[assignment]
pay = update(Order).where(Order.id == 1).values(status="paid")
has_items = sa.select(Item.id).where(Item.order_id == Order.id).exists()
of_a_place = update(places).where(places.c.row == bindparam("r"), places.c.seat == bindparam("s"))
#: The COMMIT flushes the changes that are still pending behind them.
UPDATES: dict[str, Act] = {
    "unit of work": setting(Order, "status", "paid"),
    "expression": setting(Employee, "name", Employee.name + "!"),
    "composite key": setting(Place, "taken", 1, (1, "a")),
    "dataclass": setting(Point, "x", 1),
    "imperative mapping": setting(Box, "size", 1),
    "joined, base table": setting(Engineer, "name", "old", 2),
    "joined, sub-table only": setting(Engineer, "tool", "old", 2),
    "single-table": setting(Manager, "office", "old", 3),
    "merge": lambda session: session.merge(Order(id=1, status="paid", last_fencing_token=3)),
    "primary key change": setting(Employee, "id", 77),
    "row switch": switch_row,
    "post_update": lambda session: setattr(get(session, Order), "first_item", get(session, Item)),
    "link": lambda session: get(session, Order).tags.append(get(session, Tag, 2)),
    "unlink": lambda session: get(session, Order).tags.clear(),
    "link, write-only": lambda session: get(session, Order).later_tags.add(get(session, Tag, 2)),
    "link, dynamic": lambda session: get(session, Order).tags_by_query.append(get(session, Tag, 2)),
    "collection": lambda session: get(session, Order).items.append(get(session, Item, 2)),
    "collection, by backref": lambda session: setattr(get(session, Item, 2), "order", get(session, Order)),
    "bulk_update_mappings": lambda session: session.bulk_update_mappings(
        Order, [{"id": 1, "status": "paid"}]
    ),
    "bulk_save_objects": bulk_save_objects,
    "session.execute(update)": executing(pay),
    "session.execute(update), more criteria": executing(pay.where(Order.status.in_(["new", "old"]))),
    "session.execute(update), many rows": executing(
        update(Employee).where(Employee.name == "new").values(name="old")
    ),
    "session.execute(update), key list": lambda session: session.execute(
        update(Order), [{"id": 1, "status": "paid"}]
    ),
    "Query.update": lambda session: session.query(Order).filter(Order.id == 1).update({"status": "paid"}),
    "aliased target": executing(
        update(alias).where(alias.id == 1).values(status="paid"), synchronize_session=False
    ),
    "ordered_values": executing(
        update(orders).where(orders.c.id == 1).ordered_values((orders.c.status, "paid"))
    ),
    "UPDATE … FROM": executing(pay.where(Item.order_id == Order.id), synchronize_session=False),
    "UPDATE … WHERE EXISTS": executing(pay.where(has_items), synchronize_session=False),
    "Core": on_connection(update(orders).where(orders.c.id == 1).values(status="paid")),
    "Core executemany": on_connection(
        of_a_place,
        {"r": 1, "s": "a", "taken": 1},
        {"r": 1, "s": "none", "taken": 1},  # is not there
    ),
}

DELETES: dict[str, Act] = {
    "unit of work": deleting(Point),
    "joined": deleting(Engineer, 2),
    "single-table": deleting(Manager, 3),
    "composite key": deleting(Place, (1, "a")),
    "session.execute(delete)": executing(delete(Point).where(Point.id == 1)),
    "session.execute(delete), many rows": executing(delete(Box).where(boxes.c.size == 0)),
    "Query.delete": lambda session: session.query(Place).filter(Place.row == 1).delete(),
    "Core": lambda session: session.connection().execute(delete(boxes).where(boxes.c.id == 1)),
}

INSERTS: dict[str, Act] = {
    "unit of work": lambda session: add(session, Place(row=1, seat="b", taken=0)),
    "unit of work, many": lambda session: add(session, *[Box(id=n, size=0) for n in range(2, 9)]),
    "generated key": lambda session: add(session, Employee(name="new"), Employee(name="new")),
    "dataclass": lambda session: add(session, Point(id=2, x=0)),
    "joined": lambda session: add(session, Engineer(name="new", tool="new")),
    "bulk_insert_mappings": lambda session: session.bulk_insert_mappings(Point, [{"id": 2, "x": 1}]),
    "session.execute(insert)": lambda session: session.execute(insert(Point), [{"id": 2, "x": 1}]),
    "insert().values()": executing(insert(Point).values(id=2, x=1)),
    "Core": on_connection(insert(boxes), {"id": 2}, {"id": 3}),
    "insert().returning()": lambda session: session.execute(
        insert(Employee).returning(Employee), [{"name": "a", "kind": "employee"}] * 3
    ),
}
