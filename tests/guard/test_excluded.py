"""`__fence_excluded__`: an UPDATE of these columns alone needs no lease, and stops no holder."""

from __future__ import annotations

import random
from typing import Any, Final

import pytest
import sqlalchemy as sa
from sqlalchemy import Engine, ForeignKey, String, select, text, update
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, aliased, mapped_column, relationship

from fencelock import FencedModel, Lease, StaleReadError, StaleTokenError, UnfencedWriteError
from fencelock.guard import fence_column, tables, triggers, write_id_column
from fencelock.guard.tables import FenceTrigger
from tests.conftest import SEED
from tests.guard.marks import ForAsyncio, on_sqlite_alone, one_driver
from tests.guard.rows import Keyed, awaiting, bypassed, holding, refill, rows_of, turned_away

FENCE, ID = 5, 11
EXCLUDED: Final = {"views", "last_seen", "last_post_id"}


class Base(DeclarativeBase):
    """The models, one for each trigger."""


class Post(Keyed, Base):
    __tablename__ = "ex_posts"


class Topic(FencedModel, Keyed):
    """A row that each view changes."""

    __fence_resource__ = "topic:{id}"
    __fence_excluded__ = EXCLUDED
    title: Mapped[str] = mapped_column(String(20), default="new")
    views: Mapped[int] = mapped_column(default=0)
    last_seen: Mapped[int] = mapped_column(default=0)
    twice: Mapped[int] = mapped_column(sa.Computed("views * 2", persisted=True))
    changed: Mapped[int] = mapped_column(default=0, onupdate=sa.literal(7))
    kind: Mapped[int] = mapped_column(default=0)
    price: Mapped[float] = mapped_column(default=0.0, server_default="1234566.0")
    last_post_id: Mapped[int | None] = mapped_column(ForeignKey(Post.id))


def model(name: str, trigger: FenceTrigger) -> tuple[Any, Any]:
    """Return a model with this trigger, and a sub-class with a table of its own."""
    one = {
        "__tablename__": f"ex_{name}",
        "__fence_trigger__": trigger,
        "__mapper_args__": {"polymorphic_on": "kind", "polymorphic_identity": 0},
        "last_post": relationship(Post),
    }
    base: Any = type(f"Topic{name}", (Topic, Base), one)
    sub = {
        "__tablename__": f"ex_{name}_polls",
        "__mapper_args__": {"polymorphic_identity": 1},
        "__fence_excluded__": {"votes"},
        "id": mapped_column(ForeignKey(base.id), primary_key=True),
        "votes": mapped_column(sa.Integer, default=0),
        "question": mapped_column(String(20), default="?"),
    }
    return base, type(f"Poll{name}", (base,), sub)


TRIGGER: Final[tuple[FenceTrigger, ...]] = (False, True, "strict")
MODELS = {trigger: model(str(trigger).lower(), trigger) for trigger in TRIGGER}
core = sa.Table(
    "ex_core",
    Base.metadata,
    sa.Column("id", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("title", String(20), server_default="new"),
    sa.Column("views", sa.Integer, server_default="0"),
    fence_column(resource="core:{id}", trigger="strict", excluded={"views"}),
    write_id_column(),
)
ITS = {"last_fencing_token": FENCE, "last_write_id": ID}
ROWS: dict[Any, Any] = {Post: {"id": 1}, core: {"id": 1, **ITS}}
for topic, poll in MODELS.values():
    ROWS[topic] = [{"id": 1, "kind": 0, **ITS}, {"id": 2, "kind": 1, **ITS}]
    ROWS[poll] = {"id": 2}

TRIGGERS = pytest.mark.parametrize("trigger", TRIGGER)


def by_object(session: Session, topic: Any, _poll: Any) -> None:
    session.get_one(topic, 1).views += 1


def by_expression(session: Session, topic: Any, _poll: Any) -> None:
    session.get_one(topic, 1).views = topic.views + 1


def by_alias(session: Session, topic: Any, _poll: Any) -> None:
    its = aliased(topic)
    adding = update(its).where(its.id == 1).values(views=its.views + 1)
    session.execute(adding, execution_options={"synchronize_session": False})


def by_relationship(session: Session, topic: Any, _poll: Any) -> None:
    one = session.get_one(topic, 1)
    one.last_post, one.views = session.get_one(Post, 1), 1


def by_sub_class(session: Session, _topic: Any, poll: Any) -> None:
    one = session.get_one(poll, 2)
    one.votes, one.views = 1, 1


WAYS: Final[dict[str, Any]] = {
    "an object": by_object,
    "an expression": by_expression,
    "an alias": by_alias,
    "a relationship": by_relationship,
    "a sub-class": by_sub_class,
    "a sub-table": lambda s, _, poll: s.execute(update(poll.__table__).values(votes=1)),
    "a text of a sub-table": lambda s, _, poll: s.execute(
        text(f"UPDATE {poll.__tablename__} SET votes = 1")  # noqa: S608
    ),
    "update()": lambda s, topic, _: s.execute(
        update(topic).where(topic.id == 1).values(views=topic.views + 1)
    ),
    "update() of all": lambda s, topic, _: s.execute(update(topic).values(views=1, last_seen=2)),
    "Core": lambda s, topic, _: s.execute(update(topic.__table__).values(views=1)),
    "many rows": lambda s, topic, _: s.connection().execute(
        update(topic.__table__).where(topic.__table__.c.id == sa.bindparam("its")),
        [{"its": 1, "views": 1}, {"its": 2, "views": 1}],
    ),
    "keys in a list": lambda s, topic, _: s.execute(update(topic), [{"id": 1, "views": 1}]),
    "bulk": lambda s, topic, _: s.bulk_update_mappings(topic.__mapper__, [{"id": 1, "views": 1}]),
    "Query.update": lambda s, topic, _: s.query(topic).filter_by(id=1).update({"views": topic.views + 1}),
    "a text": lambda s, topic, _: s.execute(
        text(f"UPDATE {topic.__tablename__} SET views = views + :n, last_seen = (2) WHERE id = 1"),  # noqa: S608
        {"n": 1},
    ),
    "a text with an alias": lambda s, topic, _: s.execute(
        text(f"update {topic.__tablename__} AS t set views = t.views + 1 where t.title <> ', title = 1'")  # noqa: S608
    ),
}


def facts(engine: Engine, topic: Any, poll: Any) -> list[tuple[Any, ...]]:
    its, others = topic.__table__, poll.__table__.c
    columns = (its.c[name] for name in ("title", "views", "last_fencing_token", "last_write_id"))
    query = select(*columns, its.c.last_seen, others.votes).outerjoin_from(its, poll.__table__)
    return rows_of(engine, query.order_by(its.c.id))


@TRIGGERS
@pytest.mark.parametrize("way", WAYS)
def test_an_excluded_column_needs_no_lease_and_stops_no_holder(
    engine: Engine, way: str, trigger: FenceTrigger
) -> None:
    """The holder writes with the version that it has loaded before."""
    topic, poll = MODELS[trigger]
    before = facts(engine, topic, poll)
    with holding(engine, Lease("topic:1", FENCE), expire_on_commit=False) as holder:
        one = holder.get_one(topic, 1)
        holder.commit()
        with Session(engine) as session:
            WAYS[way](session, topic, poll)
            session.commit()
        after = facts(engine, topic, poll)
        assert after != before
        assert {row[2:4] for row in after} == {(FENCE, ID)}
        one.title = "paid"
        holder.commit()
        assert (one.title, one.views) == ("paid", 0)
    assert facts(engine, topic, poll)[0][:2] == ("paid", after[0][1])


def test_the_guard_notices_any_other_column(engine: Engine) -> None:
    """The control."""
    topic, _ = MODELS[False]
    with holding(engine, Lease("topic:1", FENCE), expire_on_commit=False) as holder:
        one = holder.get_one(topic, 1)
        holder.commit()
        with bypassed(engine) as connection:
            connection.execute(update(topic.__table__).values(title="other"))
        one.title = "paid"
        with turned_away(holder, StaleReadError):
            holder.commit()


OTHERS: Final[dict[str, Any]] = {
    "an object": lambda s, topic: [s.get_one(topic, 1).__setattr__(name, 1) for name in ("views", "kind")],
    "update()": lambda s, topic: s.execute(update(topic).values(views=1, title="x").where(topic.id == 1)),
    "a column that follows": lambda s, topic: s.execute(update(topic).values(changed=1)),
    "text as a value": lambda s, topic: s.execute(update(topic).values(views=text("1, title = 'x'"))),
    "a literal": lambda s, topic: s.execute(update(topic).values(views=sa.literal_column("1, title = 2"))),
    "no column": lambda s, topic: s.execute(update(topic).where(topic.id == 1).values(title="x")),
    "a WITH": lambda s, topic: s.execute(
        update(topic.__table__)
        .values(views=1)
        .add_cte(update(topic.__table__).values(title="x").cte("others"))
    ),
    "an INSERT with an UPDATE": lambda s, topic: s.connection().execute(
        sa.insert(topic.__table__).add_cte(update(topic.__table__).values(views=1, title="x").cte("others")),
        {"id": 7, "title": "x"},
    ),
    "a prefix": lambda s, topic: s.execute(update(topic).values(views=1).prefix_with("/* */")),
    **{
        sql: lambda s, topic, sql=sql: s.execute(text(sql.format(topic.__tablename__)))
        for sql in (
            "UPDATE {} SET views = 1, title = 'x'",
            "UPDATE {} SET title = 'x'",
            "UPDATE {} SET views = 1 IS DISTINCT FROM 2, title = 'x'",
            "UPDATE {} SET views = (1), title = ('x') WHERE id = 1",
            "UPDATE {} SET (views, title) = (1, 'x')",
            'UPDATE {} SET views = "views", title = 1',
            "UPDATE {0} SET views = 1; UPDATE {0} SET title = 'x'",
            "UPDATE {} SET views = 1 /* */, title = 'x'",
            "UPDATE {} SET views = CASE WHEN id = 1 THEN 2 ELSE 3 END, title = 'x'",
            "UPDATE {} SET viewsx = 1",
            "UPDATE ex_false.ex_others SET views = 1",
            "DELETE FROM {} WHERE views = 1",
        )
    },
}


@TRIGGERS
@pytest.mark.parametrize("way", OTHERS)
def test_together_with_another_column_it_is_guarded(engine: Engine, way: str, trigger: FenceTrigger) -> None:
    topic, poll = MODELS[trigger]
    before = facts(engine, topic, poll)
    with Session(engine) as session, turned_away(session, UnfencedWriteError):
        OTHERS[way](session, topic)
        session.flush()
    assert facts(engine, topic, poll) == before


def test_a_statement_with_its_token_is_guarded(engine: Engine) -> None:
    topic, poll = MODELS[False]
    stale = {"fencing_token": FENCE - 1}
    with Session(engine) as session, turned_away(session, StaleTokenError):
        session.execute(update(topic).where(topic.id == 1).values(views=1), execution_options=stale)
    with Session(engine) as session:
        new = {"fencing_token": FENCE + 1}
        session.execute(update(topic).where(topic.id == 1).values(views=1), execution_options=new)
        session.commit()
    assert facts(engine, topic, poll)[0][2] == FENCE + 1


def test_a_new_object_in_place_of_a_deleted_one_is_guarded(engine: Engine) -> None:
    """SQLAlchemy updates the row, perhaps in excluded columns alone."""
    topic, _ = MODELS[False]

    def replace(session: Session) -> Any:
        session.delete(session.get_one(topic, 1))
        session.add(new := topic(id=1, views=5))
        session.flush()
        return new

    stale = holding(engine, Lease("topic:1", FENCE - 1))
    with stale, turned_away(stale, StaleTokenError):
        replace(stale)
    with holding(engine, Lease("topic:1", FENCE + 1), expire_on_commit=False) as holder:
        new = replace(holder)
        new.title = "again"
        holder.commit()


def test_a_table_of_another_schema_is_another_table(engine: Engine) -> None:
    """Which may be called like a fenced one that excludes more."""
    with Session(engine) as session, turned_away(session, UnfencedWriteError):
        session.execute(text("UPDATE ex_false.ex_core SET last_seen = 1"))


def test_numbers_with_many_digits_are_other_numbers(engine: Engine) -> None:
    """For a trigger: MariaDB shows six digits of a FLOAT."""
    topic, _ = MODELS["strict"]
    for number in (1234567.0, 1234568.0):
        sql = f"UPDATE {topic.__tablename__} SET price = {number} WHERE id = 1"  # noqa: S608
        with pytest.raises((DBAPIError, UnfencedWriteError)), bypassed(engine) as connection:
            connection.exec_driver_sql(sql)


def test_in_core(engine: Engine) -> None:
    with engine.begin() as connection:
        connection.execute(update(core).values(views=core.c.views + 1))
        connection.execute(text("UPDATE ex_core SET views = views + 1"))
    columns = core.c.views, core.c.last_fencing_token, core.c.last_write_id
    assert rows_of(engine, select(*columns)) == [(2, FENCE, ID)]
    with engine.connect() as connection, turned_away(connection, UnfencedWriteError):
        connection.execute(update(core).values(views=1, title="x").where(core.c.id == 1))


@one_driver
def test_in_asyncio(engine: Engine, for_asyncio: ForAsyncio) -> None:
    topic, poll = MODELS["strict"]

    async def view(session: AsyncSession) -> None:
        (await session.get_one(topic, 1)).views += 1
        await session.commit()

    awaiting(for_asyncio(engine), view)
    assert facts(engine, topic, poll)[0][1:4] == (1, FENCE, ID)


COLUMNS: Final = {"title": "x", "views": 1, "last_seen": 1, "changed": 1, "last_post_id": 1, "kind": 0}


def complaint(engine: Engine, way: str, trigger: FenceTrigger, names: set[str], free: set[str]) -> str:
    """Write these columns of a row without a lease; complain if not exactly the `free` ones need none."""
    topic, _ = MODELS[trigger]
    before, values = one_row(engine, topic), {name: COLUMNS[name] for name in sorted(names)}
    changed = {name for name in names if before[name] != COLUMNS[name]}
    assigned = ", ".join(f"{name} = {value!r}" for name, value in values.items())
    sql = f"UPDATE {topic.__tablename__} SET {assigned} WHERE id = 1"  # noqa: S608
    try:
        if way == "an object":
            with Session(engine) as session:
                one = session.get_one(topic, 1)
                for name, value in values.items():
                    setattr(one, name, value)
                session.commit()
        elif way == "another program":
            with bypassed(engine) as connection:
                connection.exec_driver_sql(sql)
        else:
            with engine.begin() as connection:
                its = topic.__table__
                statement = update(its).values(values).where(its.c.id == 1)
                connection.execute(text(sql) if way == "a text" else statement)
        passed = True
    except UnfencedWriteError:
        passed = False
    moved = one_row(engine, topic)["last_write_id"] != ID
    is_free = (changed if way in {"an object", "another program"} else names) <= free
    wanted = (True, False) if is_free else (False, False)
    if way == "another program" and not changed <= free | {"changed"}:
        wanted = {False: (True, False), True: (True, True), "strict": (False, False)}[trigger]
    elif way == "another program":
        wanted = True, False
    return "" if (passed, moved) == wanted else f"{sql} by {way} under {trigger}: {passed}, {moved}"


def one_row(engine: Engine, topic: Any) -> dict[str, Any]:
    with engine.connect() as connection:
        query = select(topic.__table__).where(topic.__table__.c.id == 1)
        return dict(connection.execute(query).one()._mapping)


def complaints(engine: Engine, free: set[str]) -> list[str]:
    """Try combinations of columns, ways and triggers that a generator has chosen."""
    chance, found = random.Random(SEED), []
    for _ in range(80):
        names = set(chance.sample(sorted(COLUMNS), chance.randint(1, 4)))
        way = chance.choice(["an object", "a statement", "a text", "another program"])
        refill(engine, ROWS)
        found.append(complaint(engine, way, chance.choice(TRIGGER), names, free))
    return [*filter(None, found)]


def test_exactly_the_excluded_columns_are_free(engine: Engine) -> None:
    assert complaints(engine, EXCLUDED) == []


@on_sqlite_alone
def test_a_column_too_many_is_noticed(engine: Engine) -> None:
    """The control of the test before."""
    assert complaints(engine, EXCLUDED | {"title"})
    assert complaints(engine, EXCLUDED - {"views"})


@pytest.mark.parametrize(
    ("excluded", "error", "said"),
    [
        ({"nothing"}, ValueError, "names 'nothing', but the columns of .* are called"),
        ({"id"}, ValueError, "which tells the guard which row"),
        ({"last_write_id"}, ValueError, "which tells the guard which row"),
        ({"last_fencing_token"}, ValueError, "which tells the guard which row"),
        ({"tenant"}, ValueError, "which tells the guard which row"),
        ("views", TypeError, "is a set of names"),
        (7, TypeError, "is a set of names"),
    ],
)
def test_what_cannot_be_excluded(excluded: Any, error: type[Exception], said: str) -> None:
    class Alone(DeclarativeBase):
        """Of this test."""

    made = {
        "__tablename__": "ex_alone",
        "__fence_resource__": "alone:{tenant}",
        "__fence_excluded__": excluded,
        "tenant": mapped_column(sa.Integer),
        "views": mapped_column(sa.Integer),
    }
    with pytest.raises(error, match=said):
        type("Alone", (FencedModel, Keyed, Alone), made)

    def in_core() -> None:
        fence = fence_column(resource="alone:{tenant}", excluded=excluded)
        names = {"id": True, "tenant": False, "views": False}
        plain = [sa.Column(name, sa.Integer, primary_key=is_key) for name, is_key in names.items()]
        tables.known(sa.Table("ex_alone", sa.MetaData(), *plain, fence, write_id_column()))

    with pytest.raises(error, match=said):
        in_core()


@TRIGGERS
def test_a_trigger_with_other_columns_counts_as_none(
    engine: Engine, trigger: FenceTrigger, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic, _ = MODELS[trigger]
    table = topic.__table__
    with engine.connect() as connection:
        assert triggers.installed(connection, topic) == triggers.installed(connection, table.name) == trigger
        for excluded in (EXCLUDED - {"views"}, EXCLUDED | {"title"}, set()):
            marks = table.c.last_fencing_token.info
            monkeypatch.setitem(marks, tables.EXCLUDED_MARK, frozenset(excluded))
            assert triggers.installed(connection, topic) is False
