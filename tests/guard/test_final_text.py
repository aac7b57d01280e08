"""What reaches the driver is what was guarded, whoever has had the statement or its text in hand."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from sqlalchemy import (
    Delete,
    Engine,
    Insert,
    String,
    Update,
    delete,
    event,
    insert,
    literal,
    select,
    text,
    update,
)
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession
from sqlalchemy.ext.compiler import compiles, deregister
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, with_loader_criteria
from sqlalchemy.schema import ExecutableDDLElement

from fencelock.errors import StaleTokenError, UnfencedWriteError
from fencelock.guard import FencedModel, bind, refusal
from fencelock.guard._shape import carries_condition, defines, inserts_only, target, without_comments
from fencelock.lease import Lease
from tests.guard.rows import empty

STALE, FENCE = 5, 9


class Base(DeclarativeBase):
    """The models of this file."""


class Order(FencedModel, Base):
    """Guarded as a whole table."""

    __tablename__ = "fi_orders"
    __fence_resource__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    status: Mapped[str] = mapped_column(String(40), default="new")


class Note(Base):
    """Not fenced."""

    __tablename__ = "fi_notes"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    note: Mapped[str] = mapped_column(String(80), default="none")


orders: Any = Order.__table__
notes: Any = Note.__table__


@pytest.fixture
def engine(shared_engine: Engine, _tables: None) -> Engine:
    """An engine on an order that somebody newer has written, and one that nobody has."""
    with shared_engine.begin() as connection:
        empty(connection, Base.metadata)
    with shared_engine.execution_options(fencelock="bypass").begin() as connection:
        connection.execute(insert(Order), {"id": 1, "last_fencing_token": FENCE})
        connection.execute(insert(Order), {"id": 2, "last_fencing_token": 0})
    return shared_engine


@pytest.fixture
def session(engine: Engine) -> Iterator[Session]:
    """A session whose lease is older than what has been written to the first order."""
    with Session(engine) as session:
        bind(session, Lease("orders", STALE))
        yield session


def standing(engine: Engine) -> dict[int, tuple[str, int]]:
    """Return status and fence of each order."""
    with Session(engine) as session:
        found = session.execute(select(orders.c.id, orders.c.status, orders.c.last_fencing_token))
        return {number: (status, fence) for number, status, fence in found}


UNTOUCHED = {1: ("new", FENCE), 2: ("new", 0)}


@contextmanager
def compiled_by(kind: type[Any], compile_: Callable[..., str]) -> Iterator[None]:
    """Have a program's own hook compile statements of a kind."""
    compiles(kind)(compile_)
    try:
        yield
    finally:
        deregister(kind)


def overwriting(element: Any, compiler: Any, **options: Any) -> str:
    """Compile an INSERT that writes over rows which are there."""
    if compiler.dialect.name == "sqlite":
        return str(compiler.visit_insert(element.prefix_with("OR REPLACE"), **options))
    plain = str(compiler.visit_insert(element, **options))
    if element.table is notes:
        return plain
    if compiler.dialect.name == "postgresql":
        return (
            f"{plain} ON CONFLICT (id) DO UPDATE SET status = excluded.status, "
            f"last_fencing_token = excluded.last_fencing_token"
        )
    return (
        f"{plain} ON DUPLICATE KEY UPDATE status = VALUES(status), "
        f"last_fencing_token = VALUES(last_fencing_token)"
    )


INSERTS: dict[str, Callable[[Session], object]] = {
    "statement": lambda s: s.execute(insert(Order).values(id=1, status="stale")),
    "core": lambda s: s.connection().execute(insert(orders), {"id": 1, "status": "stale"}),
    "many": lambda s: s.execute(insert(orders), [{"id": n, "status": "stale"} for n in (1, 3)]),
    "batch that returns": lambda s: s.scalars(
        insert(Order).returning(Order.id), [{"id": n, "status": "stale"} for n in (1, 3)]
    ),
    "unit of work": lambda s: s.bulk_save_objects([Order(id=1, status="stale")]),
}


@pytest.mark.parametrize("work", [pytest.param(work, id=name) for name, work in INSERTS.items()])
def test_insert_that_a_hook_makes_an_upsert_is_refused(
    session: Session, engine: Engine, work: Callable[[Session], object]
) -> None:
    """`@compiles(Insert)` cannot have a stale holder overwrite a row and lower its fence."""
    with compiled_by(Insert, overwriting):
        with pytest.raises(UnfencedWriteError, match="@compiles"):
            work(session)
        session.rollback()
        session.execute(insert(notes), {"id": 1})  # a plain table's are the program's own business
        session.commit()
    assert standing(engine) == UNTOUCHED


def _or_true(visit: str) -> Callable[..., str]:
    return lambda element, compiler, **options: f"{getattr(compiler, visit)(element, **options)} OR 1 = 1"


@pytest.mark.parametrize(("kind", "visit"), [(Update, "visit_update"), (Delete, "visit_delete")])
def test_write_that_a_hook_takes_the_condition_from_is_refused(
    session: Session, engine: Engine, kind: type[Any], visit: str
) -> None:
    """What is compiled after the condition would go around it."""
    statement: Any = update(orders).values(status="stale") if kind is Update else delete(orders)
    with compiled_by(kind, _or_true(visit)), pytest.raises(UnfencedWriteError, match="@compiles"):
        session.execute(statement.where(orders.c.id == 2))
    session.rollback()
    assert standing(engine) == UNTOUCHED


def test_criteria_that_the_orm_adds_stay_inside(session: Session, engine: Engine) -> None:
    """with_loader_criteria comes after the guard: what would go around the condition is refused."""
    statement = update(Order).where(Order.id == 2).values(status="stale")
    outside = with_loader_criteria(Order, literal(1).op("OR", precedence=10)(0))
    with pytest.raises(UnfencedWriteError, match="with_loader_criteria"):
        session.execute(statement.options(outside), execution_options={"synchronize_session": False})
    session.rollback()
    assert standing(engine) == UNTOUCHED
    session.execute(statement.options(with_loader_criteria(Order, Order.status != "x")))
    session.commit()
    assert standing(engine)[2] == ("stale", STALE)


class Backfill(ExecutableDDLElement):
    """A program's own statement, whatever it compiles to."""

    def __init__(self, sql: str) -> None:
        self.sql = sql


@compiles(Backfill)
def _compile_backfill(element: Backfill, _compiler: object, **_options: object) -> str:
    return element.sql


def test_ddl_elements_of_a_program_are_judged_by_what_they_say(engine: Engine) -> None:
    """One that writes rows is refused; one that defines something is not, whatever it mentions."""
    with engine.connect() as connection:
        for sql in ("UPDATE fi_orders SET status = 'x'", "  /* ... */ DELETE FROM fi_orders"):
            with pytest.raises(UnfencedWriteError, match="fi_orders"):
                connection.execute(Backfill(sql))
            connection.rollback()
    assert standing(engine) == UNTOUCHED
    with engine.begin() as connection:
        connection.execute(Backfill("CREATE VIEW fi_view AS SELECT id, 'delete' AS word FROM fi_orders"))
        connection.execute(Backfill("DROP VIEW fi_view"))


REPLACED = {
    "another write": lambda _: "UPDATE fi_orders SET status = 'stale'",
    "an OR": "{} OR 1 = 1".format,
    "a second statement": "{}; DELETE FROM fi_orders".format,
}


@pytest.mark.parametrize("change", [pytest.param(change, id=name) for name, change in REPLACED.items()])
@pytest.mark.parametrize("of_text", [False, True], ids=["core", "text"])
def test_text_that_a_listener_changes_is_judged_again(
    session: Session, engine: Engine, change: Callable[[str], str], *, of_text: bool
) -> None:
    """Also where the statement itself has been executed before, and so is known."""
    statement: Any = update(orders).where(orders.c.id == 2).values(status="x")
    if of_text:
        pytest.importorskip("sqlglot")
        statement = text(
            "UPDATE fi_orders SET status = 'x', last_fencing_token = :fencing_token "
            "WHERE id = 2 AND last_fencing_token <= :fencing_token"
        )
    session.execute(statement)
    session.rollback()

    def replace(_c: object, _cursor: object, sql: str, values: Any, _ctx: object, _many: object) -> Any:
        return (change(sql) if sql.startswith("UPDATE") else sql), values

    event.listen(engine, "before_cursor_execute", replace, retval=True)
    session.connection()
    with pytest.raises(UnfencedWriteError):
        session.execute(statement)
    session.rollback()
    event.remove(engine, "before_cursor_execute", replace)
    assert standing(engine) == UNTOUCHED


@pytest.mark.parametrize("form", ["/* trace='{0}' */ {1}", "{1} /* trace='{0}' */", "{1} -- trace {0}\n"])
def test_comments_that_a_listener_adds_change_nothing(session: Session, engine: Engine, form: str) -> None:
    """As tools for tracing do, to each statement another; what they leave behind is bounded."""
    count = 0

    def comment(_c: object, _cursor: object, sql: str, values: Any, _ctx: object, _many: object) -> Any:
        nonlocal count
        count += 1
        return form.format(count, sql), values

    event.listen(engine, "before_cursor_execute", comment, retval=True)
    session.add_all([Order(id=3), Order(id=4)])
    session.commit()
    session.get_one(Order, 2).status = "paid"
    session.commit()
    for number in range(20):
        session.execute(update(orders).where(orders.c.id.in_(range(2, number + 3))).values(status="open"))
        session.execute(insert(notes), {"id": number, "note": "fi_orders"})
    session.commit()
    with pytest.raises(StaleTokenError):
        session.execute(update(orders).where(orders.c.id == 1).values(status="stale"))
    session.rollback()
    assert standing(engine) == {1: ("new", FENCE), 2: ("open", 5), 3: ("open", 5), 4: ("open", 5)}


def test_texts_that_were_judged_are_bounded(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Statements whose text is another one each time do not fill the memory."""
    monkeypatch.setattr(refusal, "_JUDGED_TEXTS", 10)
    with engine.begin() as connection:
        connection.execute(insert(notes), {"id": 1})
        for number in range(30):
            connection.execute(update(notes).where(notes.c.id.in_(range(number + 2))).values(note="x"))
            assert len(refusal._Judged.texts) <= 10
        connection.execute(update(notes).where(notes.c.id.in_(range(9000))).values(note="x"))
        assert max(map(len, refusal._Judged.texts)) < 10_000


def test_drivers_for_asyncio_are_no_way_around(
    engine: Engine, for_asyncio: Callable[[Engine], AsyncEngine]
) -> None:
    """Hooks and statements of a program's own are judged there alike, also where results are streamed."""

    async def main() -> None:
        async_engine = for_asyncio(engine)
        async with AsyncSession(async_engine) as session:
            bind(session, Lease("orders", STALE))
            with compiled_by(Insert, overwriting), pytest.raises(UnfencedWriteError, match="@compiles"):
                await session.execute(insert(Order).values(id=1, status="stale"))
            await session.rollback()
            with pytest.raises(UnfencedWriteError):
                await session.execute(Backfill("UPDATE fi_orders SET status = 'x'"))
            await session.rollback()
            with pytest.raises(UnfencedWriteError):
                await session.stream(text("UPDATE fi_orders SET status = 'x'"))
        await async_engine.dispose()

    asyncio.run(main())
    assert standing(engine) == UNTOUCHED


GUARDED = [
    "UPDATE o SET last_fencing_token=%(t)s WHERE o.id = %(i)s AND o.last_fencing_token <= %(t)s::BIGINT",
    "UPDATE o SET last_fencing_token=? WHERE id = ? AND last_fencing_token IN (?, ?) RETURNING a OR b",
    "UPDATE o SET last_fencing_token=? WHERE a = ? AND (last_fencing_token = ? OR last_fencing_token = ?)",
    "DELETE FROM o WHERE (o.last_fencing_token = $1 OR o.last_fencing_token <= CAST($2 AS BIGINT))",
    "UPDATE o SET x='OR -- ;', last_fencing_token=? WHERE (a OR (b)) AND last_fencing_token <= ? /* ; OR */",
    'DELETE FROM "my ""or"" table" WHERE id = $1 AND last_fencing_token <= $2::BIGINT',
    "WITH a AS (SELECT 1), b AS (SELECT 2) DELETE FROM o WHERE x BETWEEN 1 AND 2 AND last_fencing_token <= ?",
    "UPDATE o SET last_fencing_token=? FROM p JOIN q ON p.a = q.a WHERE o.last_fencing_token <= ?",
]
NOT_GUARDED = [
    "UPDATE o SET last_fencing_token=? WHERE id = ? AND last_fencing_token <= ? OR 1 = 1",
    "UPDATE o SET last_fencing_token=? WHERE id = ? -- AND last_fencing_token <= ?",
    "UPDATE o SET last_fencing_token=? WHERE (id = ? OR last_fencing_token <= ?)",
    "UPDATE o SET last_fencing_token=? WHERE (last_fencing_token = ? OR last_fencing_token = ? OR 1 = 1)",
    "DELETE FROM o WHERE (last_fencing_token = ? OR last_fencing_token = last_fencing_token)",
    "UPDATE o SET last_fencing_token=? WHERE last_fencing_token = ? OR last_fencing_token = ?",
    "UPDATE o SET last_fencing_token=? WHERE id IN (SELECT id FROM o WHERE last_fencing_token <= ?)",
    "UPDATE OR REPLACE o SET last_fencing_token=? WHERE last_fencing_token <= ?",
    "UPDATE o SET a = ? WHERE last_fencing_token <= ?",
    "UPDATE o SET last_fencing_token=? WHERE last_fencing_token <= ?; DELETE FROM o",
    "UPDATE o SET last_fencing_token=? WHERE 'AND last_fencing_token <= ?' = a",
    "UPDATE o SET last_fencing_token=?",
    "INSERT INTO o (last_fencing_token) VALUES (?)",
]


@pytest.mark.parametrize("dialect", ["sqlite", "postgresql", "mysql"])
def test_outline_tells_the_condition(dialect: str) -> None:
    """Whether it holds for every row that is written, whatever is in strings, comments and parentheses."""
    assert [sql for sql in GUARDED if not carries_condition(sql, dialect)] == []
    assert [sql for sql in NOT_GUARDED if carries_condition(sql, dialect)] == []


def test_outline_is_read_as_each_database_does() -> None:
    """MariaDB executes some comments, has two more kinds of OR, and backslashes in strings."""
    condition = "DELETE FROM o WHERE {} AND last_fencing_token <= ?"
    for where in ("a || b", "a XOR b", "a /*! OR b */", "a /*M! OR b */", r"a = '\' OR 1 OR a = '\'"):
        assert not carries_condition(condition.format(where), "mysql"), where
    assert carries_condition(condition.format("a || b = 'x'"), "postgresql")
    assert carries_condition(condition.format("a = 'it''s'"), "mysql")
    assert not carries_condition(condition.format("a = $$'$$ OR b = $$'$$"), "postgresql")
    assert not carries_condition("UPDATE o SET last_fencing_token=? # WHERE last_fencing_token <= ?", "mysql")


def test_outline_tells_plain_inserts() -> None:
    """And the table that a statement writes, and what only defines something."""
    assert inserts_only("INSERT INTO o (a) SELECT p::INT FROM (VALUES (1)) AS i(p) RETURNING a", "postgresql")
    assert inserts_only("/* x */ INSERT INTO o (a) VALUES ('on conflict')", "sqlite")
    for sql in (
        "INSERT OR REPLACE INTO o (a) VALUES (1)",
        "REPLACE INTO o (a) VALUES (1)",
        "INSERT IGNORE INTO o (a) VALUES (1)",
        "INSERT INTO o (a) VALUES (1) ON/**/CONFLICT DO NOTHING",
        "INSERT INTO o (a) VALUES (1) /*! ON DUPLICATE KEY UPDATE a = 2 */",
        "INSERT INTO o (a) VALUES (1); UPDATE o SET a = 1",
    ):
        assert not inserts_only(sql, "mysql"), sql
    for sql in (
        "INSERT OR IGNORE INTO s.o (a) VALUES (1)",
        'UPDATE "s"."o" SET a = 1',
        "/* x */ DELETE FROM o WHERE a",
        "REPLACE INTO `o` VALUES (1)",
    ):
        assert target(sql, "sqlite") == "o", sql
    assert target("SELECT 1", "sqlite") is None
    assert without_comments("a  /* b */ -- c\n 'd -- e'", "sqlite") == "a 'd -- e'"
    assert defines("CREATE TRIGGER t BEFORE UPDATE ON o BEGIN SELECT 1; END", "sqlite")
    assert defines("CREATE FUNCTION f() AS $$ BEGIN DELETE FROM o; END $$", "postgresql")
    assert not defines("CREATE TABLE t (a INT); UPDATE o SET a = 1", "postgresql")
    assert not defines("UPDATE o SET a = 1", "mysql")
