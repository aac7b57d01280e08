"""Without other writers, a fenced model does what a plain one does: a program for each fault that was met.

`proof.twins` makes such programs at random. It runs each on a fenced model and on its plain twin.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import Column, Engine, ForeignKey, Integer, String, Table, insert, join, select, update
from sqlalchemy.exc import InvalidRequestError
from sqlalchemy.orm import DeclarativeBase, Session, column_property

from fencelock import Lease, bypass
from proof import twins
from tests.guard import models
from tests.guard.marks import InMemory, on_sqlite_alone
from tests.guard.rows import core_table, holding, refill
from tests.guard.waiting import listening

A5, B6, NOTE = ("set", 1, "a", 5), ("set", 1, "b", 6), ("set", 1, "b", 7)
PROGRAMS: dict[str, list[twins.Call]] = {
    "a column of a joined table alone": [("set_joined", 3, "s", 5), ("commit",), ("set_joined", 3, "s", 6)],
    "a column of a third table alone": [("set_joined", 4, "t", 5), ("commit",), ("set_joined", 4, "s", 6)],
    "an expired object, flushed and written again": [("get", 1), ("expire", 1), A5, ("flush",), B6],
    "an expired object, read after it was assigned": [("get", 1), ("expire", 1), A5, ("read", 1, "b"), B6],
    "after a COMMIT, flushed by a query": [A5, ("commit",), B6, ("load", 2, "all", "a", False), NOTE],
    "after a COMMIT, inside a savepoint": [A5, ("commit",), ("savepoint",), B6, ("release",), NOTE],
    "after a rollback": [A5, ("flush",), ("rollback",), B6, ("flush",), NOTE],
    "an expired object, flushed and deleted": [
        ("get", 1),
        ("expire", 1),
        A5,
        ("flush",),
        ("delete", 1, True),
    ],
    "a DELETE that a savepoint undoes": [("savepoint",), ("delete", 1, True), ("undo",), A5],
    "a DELETE that is refused, then a mark": [("refer", 2, 1, "parent"), ("flush",), ("delete_or_mark", 1)],
    "a second DELETE of one object": [("get", 1), ("delete_again", 1), ("read", 2, "a")],
    "several columns by key": [("get", 1), ("get", 2), ("update_by_key", [(1, "a", 5), (2, "b", 6)]), NOTE],
    "one key twice": [("get", 3), ("update_by_key", [(3, "a", 5), (3, "b", 6)]), ("set", 3, "b", 7)],
    "by key, in a savepoint that is undone": [
        *(("get", 1), ("savepoint",), ("update_by_key", [(1, "a", 5)]), ("undo",)),
        B6,
    ],
    "an UPDATE of criteria that cannot be evaluated": [
        *(("get", 1), ("expire", 1, "b"), ("update_where", 1, "a", 9)),
        ("read", 1, "b"),
        A5,
    ],
    "one that matches nothing": [
        *(("set", 1, "b", 9), ("commit",), ("get", 1), ("expire", 1, "b"), ("update_where", 1, "a", 9)),
        A5,
    ],
    "a row that is loaded from RETURNING, in a savepoint that is undone": [
        *(("savepoint",), ("update_returning", 1, "a", 5), ("undo",)),
        B6,
    ],
    "post_update, then a second write": [("refer", 1, 2, "favourite"), ("flush",), A5, ("commit",), B6],
    "post_update of a new row": [
        *(("delete", 1, True), ("new", 1, 5, False), ("refer", 1, 2, "favourite"), ("flush",)),
        B6,
    ],
    "a row with post_update is deleted": [("refer", 1, 2, "favourite"), ("commit",), ("delete", 1, True)],
    "a new object for the row of a deleted one": [("switch", 1, 5), ("flush",), B6, ("commit",), A5],
    "a claim in a savepoint that is undone": [("savepoint",), ("claim", 1), ("undo",), A5],
    "a claim of a row that the savepoint deletes": [
        *(("savepoint",), ("claim", 1), ("delete", 1, True), ("undo",)),
        A5,
    ],
    "no row": [("get", 1), ("update", (), "a", 5, "auto"), A5],
    "a refused value in a savepoint": [
        ("mark", 1, 1, False),
        ("flush",),
        ("mark", 2, 1, True),
        ("set", 2, "a", 5),
    ],
    "links, and a key of its own": [("tag", 3, 1), ("flush",), ("tag", 3, 1), ("set_joined", 3, "s", 5)],
}


@pytest.fixture(scope="module")
def twin_engine(shared_url: str) -> Iterator[Engine]:
    engine = twins.engine_of(shared_url)
    yield engine
    engine.dispose()


@on_sqlite_alone
@pytest.mark.parametrize("kind", twins.FENCED)
def test_natural_code_is_written(twin_engine: Engine, kind: str) -> None:
    for program in PROGRAMS.values():
        for expires in (False, True):
            twins.compare(twin_engine, kind, program, leases=True, expires=expires)


@pytest.mark.parametrize("shared_url", ["postgresql", "mariadb"], indirect=True)
def test_natural_code_is_written_on_each_database(twin_engine: Engine) -> None:
    kinds = list(twins.FENCED)
    for turn, program in enumerate(PROGRAMS.values()):
        twins.compare(twin_engine, kinds[turn % len(kinds)], program, leases=True, expires=turn % 2 == 0)


@pytest.fixture
def order(in_memory: InMemory) -> Iterator[tuple[Session, Any]]:
    engine = in_memory(models.Base.metadata)
    refill(engine, models.fenced(models.Order, 1))
    with holding(engine, Lease("order:1", 7)) as session:
        yield session, session.get_one(models.Order, 1)


def test_an_object_that_is_found_again_is_not_said_to_be_refreshed(order: tuple[Session, Any]) -> None:
    session, found = order
    seen = list[object]()
    with listening(models.Order, "refresh", lambda *given: seen.append(given)):
        assert session.scalars(select(models.Order)).all() == [found]
        assert seen == []
        session.refresh(found)
        assert len(seen) == 1


def test_an_update_of_a_list_of_values_is_refused_as_sqlalchemy_does(order: tuple[Session, Any]) -> None:
    session, _ = order
    for values in ([{"total": 5}], [("total", 5)]):
        with pytest.raises(InvalidRequestError, match="takes no list in values"):
            session.execute(update(models.Order).where(models.Order.id == 1).values(values))


def test_a_class_over_a_join_without_the_key_of_one_table_is_written(in_memory: InMemory) -> None:
    class Base(DeclarativeBase): ...

    stock = core_table("al_stock", Column("count", Integer), metadata=Base.metadata, resource="stock:{id}")
    names = Table(
        "al_names",
        Base.metadata,
        Column("number", Integer, primary_key=True),
        Column("stock_id", ForeignKey(stock.c.id)),
        Column("name", String(9)),
    )

    class Named(Base):
        __table__ = join(stock, names)
        __mapper_args__ = {"primary_key": [stock.c.id], "exclude_properties": [names.c.number]}  # noqa: RUF012
        stock_id = column_property(stock.c.id, names.c.stock_id)
        id = column_property(stock.c.id)

    with holding(in_memory(Base.metadata), Lease("stock:1", 7)) as session:
        session.connection().execute(insert(stock), [{"id": 1, "count": 0}])
        with bypass(session):
            session.execute(insert(names), [{"number": 4, "stock_id": 1, "name": "a"}])
        session.get_one(Named, 1).count = 5  # type: ignore[attr-defined]
        session.commit()
        assert session.scalars(select(stock.c.count)).all() == [5]
