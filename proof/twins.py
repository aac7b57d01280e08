"""In a session without rivals, a fenced model does the same as its plain twin: random programs run on both.

    python -m proof.twins --programs 10000 --seed 7             # on each database that is there
    python -m proof.twins --database postgresql+psycopg://app@db/test

A program is a list of calls of one session under leases of all its resources. A refusal by the guard, another
result of a call and other rows at the end are faults. Each kind of them is shown once, as its shortest
program. With a git worktree of another commit first in PYTHONPATH (`python -P -m proof.twins`), the same
programs run on that commit's library.
"""

from __future__ import annotations

import argparse
import pickle
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

import sqlalchemy as sa
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from sqlalchemy import (
    Engine,
    ForeignKey,
    ForeignKeyConstraint,
    MetaData,
    String,
    create_engine,
    event,
    select,
)
from sqlalchemy import delete as delete_
from sqlalchemy import update as update_
from sqlalchemy.exc import IntegrityError, InvalidRequestError, NoResultFound, SAWarning
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, defer, load_only, mapped_column, relationship
from sqlalchemy.orm.exc import StaleDataError
from sqlalchemy.pool import StaticPool

from fencelock import (
    FencedModel,
    FenceError,
    Lease,
    StaleReadError,
    bind,
    bypass,
    claim,
    claim_all,
    fence_table,
    gate,
)
from proof.servers import Postgres
from proof.servers.mariadb import mariadb

KEYS: Final = (1, 2, 3, 4)
LEASES: Final = [Lease(resource, 7) for resource in ("all", *(f"doc:{key}" for key in KEYS))]
COLUMNS: Final = ("a", "b", "c")
_MOST_KINDS: Final = 30
Call = tuple[Any, ...]
METADATA: Final = MetaData()


@dataclass(frozen=True)
class Shape:
    """How the tables of a family look."""

    name: str
    is_composite: bool = False
    is_versioned: bool = False
    key_of_sub: str = "id"  # the attribute that is the key of the second table
    key_of_top: str = "id"


class Family(NamedTuple):
    """A model, one that is joined to it, one that is joined to that, and links to tags."""

    shape: Shape
    doc: Any
    sub: Any
    top: Any
    tag: Any

    def of(self, key: int) -> Any:
        return {3: self.sub, 4: self.top}.get(key, self.doc)

    def key(self, key: int) -> Any:
        return (key, 0) if self.shape.is_composite else key


def family(
    shape: Shape,
    prefix: str,
    resource: str = "",
    *,
    lease: Literal["required", "optional"] = "required",
    trigger: Literal[False, True, "strict"] = False,
) -> Family:
    """Return models whose rows have parents, favourites and tags; fenced if they have a resource."""

    class Base(DeclarativeBase):
        metadata = METADATA

    def key_of(table: str, attribute: str) -> dict[str, Any]:
        """Return the columns of a joined table that refer to the key of another."""
        names = [attribute, "part"] if shape.is_composite else [attribute]
        columns = {
            name: mapped_column(name, sa.Integer, primary_key=True, autoincrement=False) for name in names
        }
        others = ["id", "part"] if shape.is_composite else [KEY_NAMES[table]]
        return {
            **columns,
            "__table_args__": (ForeignKeyConstraint(names, [f"{table}.{other}" for other in others]),),
        }

    class Doc(*([FencedModel] if resource else []), Base):  # type: ignore[misc]
        __tablename__ = f"{prefix}_docs"
        if resource:
            __fence_resource__ = resource
            __fence_lease__ = lease
            __fence_trigger__ = trigger
        id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
        if shape.is_composite:
            part: Mapped[int] = mapped_column(primary_key=True, autoincrement=False, default=0)
        kind: Mapped[str] = mapped_column(String(3), default="doc")
        a: Mapped[int] = mapped_column(default=0)
        b: Mapped[int] = mapped_column(default=0)
        c: Mapped[int] = mapped_column(default=0, deferred=True)
        mark: Mapped[int | None] = mapped_column(unique=True)
        if shape.is_versioned:
            version: Mapped[int] = mapped_column(default=1)
        if not shape.is_composite:
            parent_id: Mapped[int | None] = mapped_column(ForeignKey(f"{prefix}_docs.id"))
            favourite_id: Mapped[int | None] = mapped_column(ForeignKey(f"{prefix}_docs.id"))
        __mapper_args__: Any = {"polymorphic_on": "kind", "polymorphic_identity": "doc"}  # noqa: RUF012
        if shape.is_versioned:
            __mapper_args__["version_id_col"] = version

    KEY_NAMES[Doc.__tablename__], KEY_NAMES[f"{prefix}_subs"] = "id", shape.key_of_sub
    sub = type(
        "Sub",
        (Doc,),
        {
            "__tablename__": f"{prefix}_subs",
            **key_of(Doc.__tablename__, shape.key_of_sub),
            "s": mapped_column(sa.Integer, default=0),
            "__annotations__": {},
            "__mapper_args__": {"polymorphic_identity": "sub"},
        },
    )
    if shape.is_composite:
        KEY_NAMES[f"{prefix}_subs"] = "id"
    top = type(
        "Top",
        (sub,),
        {
            "__tablename__": f"{prefix}_tops",
            **key_of(f"{prefix}_subs", shape.key_of_top),
            "t": mapped_column(sa.Integer, default=0),
            "__annotations__": {},
            "__mapper_args__": {"polymorphic_identity": "top"},
        },
    )

    class Tag(Base):
        __tablename__ = f"{prefix}_tags"
        id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)

    if not shape.is_composite:
        links = sa.Table(
            f"{prefix}_links",
            METADATA,
            sa.Column("doc", ForeignKey(f"{prefix}_docs.id"), primary_key=True),
            sa.Column("tag", ForeignKey(f"{prefix}_tags.id"), primary_key=True),
        )
        Doc.parent = relationship(
            Doc, remote_side=Doc.id, foreign_keys=[Doc.parent_id], backref=f"{prefix}_kids"
        )
        Doc.favourite = relationship(
            Doc, remote_side=Doc.id, foreign_keys=[Doc.favourite_id], post_update=True
        )
        Doc.tags = relationship(Tag, secondary=links)
    made = Family(shape, Doc, sub, top, Tag)
    for model in made[1:]:  # so that pickle finds them
        model.__name__ = model.__qualname__ = f"{prefix}{model.__name__}"
        globals()[model.__name__] = model
    return made


KEY_NAMES: Final[dict[str, str]] = {}
PLAIN_SHAPE: Final = Shape("plain")
SHAPES: Final = (
    PLAIN_SHAPE,
    Shape("named", key_of_sub="sub_id", key_of_top="top_id"),
    Shape("versioned", is_versioned=True, key_of_top="top_id"),
    Shape("composite", is_composite=True),
)
PLAIN: Final = {shape: family(shape, f"{shape.name}_p") for shape in SHAPES}
FENCED: Final = {
    "one lease": family(PLAIN_SHAPE, "whole", "all"),
    "a lease for each row": family(PLAIN_SHAPE, "keyed", "doc:{id}"),
    "optional": family(PLAIN_SHAPE, "optional", "all", lease="optional"),
    "a trigger": family(PLAIN_SHAPE, "trigger", "doc:{id}", trigger=True),
    "a strict trigger": family(PLAIN_SHAPE, "strict", "all", trigger="strict"),
    "keys with names of their own": family(SHAPES[1], "named", "all", lease="optional"),
    "a version counter": family(SHAPES[2], "versioned", "doc:{id}"),
    "a key of two columns": family(SHAPES[3], "composite", "doc:{id}", trigger=True),
    "a key of two columns, one lease": family(SHAPES[3], "pair", "all", lease="optional", trigger="strict"),
}
fence_table(METADATA)


class Program:
    """The calls; each method is one, and returns its visible result."""

    def __init__(self, session: Session, models: Family, *, leases: bool) -> None:
        self.session = session
        self.models = models
        self.doc = models.doc
        self.leases = leases
        self.objects: dict[int, Any] = {}
        self.savepoints: list[Any] = []
        self.has_written = False  # whether a statement has written inside a savepoint
        self.refusals: list[str] = []

    def run(self, calls: Sequence[Call]) -> list[object]:
        """Return the results of the calls. After an error of another kind, the transaction is rolled back."""
        seen: list[object] = []
        for name, *arguments in [*calls, ("commit",)]:
            try:
                seen.append(getattr(self, name)(*arguments))
            except StaleReadError as error:  # the plain twin may have raised its own
                seen.append(StaleDataError.__name__)
                self.refusals.append(str(error))
                self.rollback()
            except FenceError:
                raise
            except Exception as error:  # noqa: BLE001 - whatever the plain twin raises
                seen.append(type(error).__name__)
                self.rollback()
        return seen

    def _object(self, key: int) -> Any:
        known = self.objects.get(key)
        if known is None or known not in self.session or known in self.session.deleted:
            known = self.objects[key] = self.session.get(self.doc, self.models.key(key))
        return known

    def _note_write(self) -> None:
        self.has_written = self.has_written or bool(self.savepoints)

    def get(self, key: int) -> object:
        return self._object(key) is not None

    def set(self, key: int, name: str, value: int) -> None:
        if (found := self._object(key)) is not None:
            setattr(found, name, value)

    def add(self, key: int, name: str, value: int) -> None:
        if (found := self._object(key)) is not None:
            setattr(found, name, getattr(found, name) + value)

    def read(self, key: int, name: str) -> object:
        return (found := self._object(key)) is not None and getattr(found, name)

    def flush(self) -> None:
        self.session.flush()

    def commit(self) -> None:
        self.session.commit()
        self._end()

    def rollback(self) -> None:
        self.session.rollback()
        self._end()

    def _end(self) -> None:
        self.savepoints.clear()
        self.has_written = False

    def savepoint(self) -> None:
        if len(self.savepoints) < 3:
            self.savepoints.append(self.session.begin_nested())

    def release(self) -> None:
        if self.savepoints:
            self.savepoints.pop().commit()

    def undo(self) -> None:
        """Roll back to a savepoint, and expire what a plain session still shows of undone statements."""
        if self.savepoints:
            self.savepoints.pop().rollback()
            if self.has_written:
                self.session.expire_all()

    def expire(self, key: int, *names: str) -> None:
        if (found := self._object(key)) is not None:
            self.session.flush()
            self.session.expire(found, names or None)

    def expire_all(self) -> None:
        self.session.flush()
        self.session.expire_all()

    def expunge_all(self) -> None:
        self.session.flush()
        self.session.expunge_all()

    def refresh(self, key: int, *names: str) -> None:
        if (found := self._object(key)) is not None:
            self.session.flush()
            self.session.refresh(found, names or None)

    def load(self, key: int, how: str, name: str, fresh: bool) -> object:
        self.session.flush()
        query = select(self.doc).where(self.doc.id == key).execution_options(populate_existing=fresh)
        column = getattr(self.doc, name)
        ways = {"load_only": load_only(column), "defer": defer(column)}
        query = query.with_for_update() if how == "lock" else query
        found = self.session.scalars(query.options(*([ways[how]] if how in ways else []))).all()
        self.objects.update((key, each) for each in found)
        return len(found)

    def update(self, keys: Sequence[int], name: str, value: int, synchronize: Any) -> None:
        column = getattr(self.doc, name)
        statement = update_(self.doc).where(self.doc.id.in_(keys)).values({name: column + value})
        self._note_write()
        self.session.execute(statement, execution_options={"synchronize_session": synchronize or False})
        if not synchronize:
            self.session.expire_all()

    def update_where(self, key: int, name: str, value: int) -> None:
        """Update by a criterion that the session may be unable to evaluate."""
        statement = update_(self.doc).where(self.doc.id == key, self.doc.b < value)
        self._note_write()
        self.session.execute(
            statement.ordered_values((getattr(self.doc, name), value), (self.doc.mark, None))
        )

    def update_by_key(self, rows: Sequence[tuple[int, str, int]]) -> None:
        self.session.flush()
        named = [self._key_values(key) | {name: value} for key, name, value in rows if self._object(key)]
        if named and not self.models.shape.is_versioned:
            self._note_write()
            self.session.execute(update_(self.doc), named)

    def update_mappings(self, key: int, name: str, value: int) -> None:
        self.session.flush()
        if (found := self._object(key)) is not None and not self.models.shape.is_versioned:
            self._note_write()
            self.session.bulk_update_mappings(self.doc, [self._key_values(key) | {name: value}])
            self.session.expire(found)

    def _key_values(self, key: int) -> dict[str, int]:
        return {"id": key, "part": 0} if self.models.shape.is_composite else {"id": key}

    def update_core(self, key: int, name: str, value: int) -> object:
        self.session.flush()
        table = self.doc.__table__
        statement = update_(table).where(table.c.id == key).values({name: value})
        self._note_write()
        count = self.session.connection().execute(statement).rowcount
        self.session.expire_all()
        return count

    def update_returning(self, key: int, name: str, value: int) -> object:
        if key > 2 or not self.session.get_bind().dialect.update_returning:
            return None  # SQLAlchemy returns no objects of joined tables
        statement = update_(self.doc).where(self.doc.id == key).values({name: value}).returning(self.doc)
        self._note_write()
        return len(self.session.scalars(statement).all())

    def delete_where(self, key: int, synchronize: str) -> None:
        self.session.flush()
        if key < 3:
            self._note_write()
            statement = delete_(self.doc).where(self.doc.id == key)
            self.session.execute(statement, execution_options={"synchronize_session": synchronize})

    def merge(self, key: int, name: str, value: int, loads: bool) -> None:
        if (found := self._copied(key)) is not None:
            self.session.expunge(found)
            if loads:
                setattr(found, name, value)
            self.objects[key] = self.session.merge(found, load=loads)

    def detach(self, key: int, name: str, value: int) -> None:
        if (found := self._copied(key)) is not None:
            self.session.expunge(found)
            setattr(found, name, value)
            self.session.add(found)

    def pickle(self, key: int, name: str, value: int) -> None:
        if (found := self._copied(key)) is not None:
            copy = pickle.loads(pickle.dumps(found))  # noqa: S301 - our own
            self.session.expunge(found)
            self.session.add(copy)
            setattr(copy, name, value)
            self.objects[key] = copy

    def _copied(self, key: int) -> Any:
        """Return an object with all its columns, for that it may leave the session."""
        self.session.flush()
        found = self._object(key)
        return found if found is None or [getattr(found, name) for name in COLUMNS] else None

    def delete(self, key: int, flushed: bool) -> None:
        if (found := self._object(key)) is not None:
            self.session.delete(found)
            if flushed:
                self.session.flush()

    def delete_again(self, key: int) -> None:
        if (found := self._object(key)) is not None:
            self.session.delete(found)
            self.session.flush()
            self.session.delete(found)

    def delete_or_mark(self, key: int) -> None:
        """Delete an object; if another row refers to it, mark it."""
        if (found := self._object(key)) is not None:
            try:
                with self.session.begin_nested():
                    self.session.delete(found)
            except IntegrityError:
                found.a = 77

    def new(self, key: int, value: int, flushed: bool) -> None:
        if flushed:
            self.session.flush()
        if self._object(key) is None:
            self.session.add(self._made(key, a=value))

    def _made(self, key: int, **values: int) -> Any:
        return self.models.of(key)(**self._key_values(key), **values)

    def switch(self, key: int, value: int) -> None:
        """Put a new object in the place of a deleted one, in one flush.

        Where rows refer to each other, SQLAlchemy may then delete the row. The new object gets each value, as
        SQLAlchemy applies no UPDATE to an object that lacks a value of the criteria.
        """
        if (found := self._object(key)) is not None and self.models.shape.is_composite:
            self.session.delete(found)
            self.objects[key] = self._made(key, a=value, b=0, c=0)
            self.session.add(self.objects[key])

    def mark(self, key: int, value: int, guarded: bool) -> None:
        """Set a value that only one row may have, inside a savepoint that then undoes it, or without one."""
        if (found := self._object(key)) is None:
            return
        if not guarded:
            found.mark = value
            return
        with suppress(IntegrityError), self.session.begin_nested():
            found.mark = value

    def refer(self, key: int, other: int, name: str) -> None:
        child, target = self._object(key), self._object(other)
        is_there = child is not None and target is not None and child is not target
        if is_there and not self.models.shape.is_composite:
            setattr(child, name, target)

    def forget(self, key: int, name: str) -> None:
        if (found := self._object(key)) is not None and not self.models.shape.is_composite:
            setattr(found, name, None)

    def tag(self, key: int, tag: int) -> None:
        if (found := self._object(key)) is None or self.models.shape.is_composite:
            return
        known = self.session.get(self.models.tag, tag)
        if known in found.tags:
            found.tags.remove(known)
        else:
            found.tags.append(known)

    def set_joined(self, key: int, name: str, value: int) -> None:
        if (found := self._object(key)) is not None and hasattr(type(found), name):
            setattr(found, name, value)

    def claim(self, key: int) -> None:
        self.session.flush()
        if (found := self._object(key)) is not None:
            self._note_write()
            with suppress(NoResultFound, InvalidRequestError):  # a row that a cycle of objects has deleted
                if self.leases:
                    claim(self.session, self.doc, self.models.key(key))
                else:
                    self.session.refresh(found)

    def claim_all(self) -> object:
        self.session.flush()
        self._note_write()
        query = select(self.doc)
        if self.leases:
            return len(claim_all(self.session, query))
        return len(self.session.scalars(query.execution_options(populate_existing=True)).all())

    def gate(self) -> None:
        self.session.flush()
        if self.leases:
            gate(self.session, "all")


def _call(name: str, *arguments: st.SearchStrategy[Any]) -> st.SearchStrategy[Call]:
    return st.tuples(st.just(name), *arguments)


_KEY, _NAME, _VALUE = st.sampled_from(KEYS), st.sampled_from(COLUMNS), st.integers(1, 99)
_WRITE = (_KEY, _NAME, _VALUE)
_KEYS, _FLAG = st.sampled_from([(), (1,), (2,), (3,), (4,), KEYS]), st.booleans()
_RELATION = st.sampled_from(["parent", "favourite", "favourite"])
CALLS: Final = (
    *(_call(name, *_WRITE) for name in ("set", "set", "add", "detach", "pickle", "update_core")),
    *(_call(name, *_WRITE) for name in ("update_mappings", "update_returning", "update_where")),
    *(
        _call(name)
        for name in ("flush", "claim_all", "gate", "savepoint", "savepoint", "release", "undo", "undo")
    ),
    *(_call(name) for name in ("commit", "rollback", "expire_all", "expunge_all")),
    *(_call(name, _KEY) for name in ("get", "refresh", "claim", "expire", "delete_again", "delete_or_mark")),
    *(_call(name, _KEY, _NAME) for name in ("read", "refresh", "expire")),
    _call("update_by_key", st.lists(st.tuples(*_WRITE), min_size=1, max_size=3)),
    _call("load", _KEY, st.sampled_from(["all", "load_only", "defer", "lock"]), _NAME, _FLAG),
    _call("update", _KEYS, _NAME, _VALUE, st.sampled_from(["auto", "evaluate", "fetch", 0])),
    _call("merge", *_WRITE, _FLAG),
    _call("delete", _KEY, _FLAG),
    _call("delete_where", _KEY, st.sampled_from(["auto", "fetch"])),
    _call("new", _KEY, _VALUE, _FLAG),
    _call("switch", _KEY, _VALUE),
    _call("mark", _KEY, st.integers(1, 2), _FLAG),
    _call("refer", _KEY, _KEY, _RELATION),
    _call("forget", _KEY, _RELATION),
    _call("tag", _KEY, st.integers(1, 2)),
    _call("set_joined", st.sampled_from([3, 4, 4]), st.sampled_from("st"), _VALUE),
)


def _refill(session: Session, models: Family) -> None:
    doc, sub, top, tag = models[1:]
    if not models.shape.is_composite:
        session.execute(update_(doc.__table__).values(parent_id=None, favourite_id=None))
        session.execute(delete_(doc.tags.property.secondary))
    for model in (top, sub, doc, tag):
        session.execute(delete_(model.__table__))
    program = Program(session, models, leases=False)
    session.add_all([*map(program._made, KEYS), *(tag(id=number) for number in (1, 2))])
    session.commit()


def outcome(
    engine: Engine, models: Family, calls: Sequence[Call], *, leases: bool, expires: bool
) -> tuple[object, list[str]]:
    """Run a program on four rows; return what it saw with the rows at the end, and what was refused."""
    doc, sub, top, _ = models[1:]
    with Session(engine) as session, bypass(session):
        _refill(session, models)
    with Session(engine, expire_on_commit=expires) as session:
        if leases:
            bind(session, *LEASES)
        program = Program(session, models, leases=leases)
        seen: object = program.run(calls)
    names = ["id", *COLUMNS, "mark"]  # no version counter: a change of a collection writes a fenced row, too
    tables = [(doc, names), (sub, ["s"]), (top, ["t"])]
    if not models.shape.is_composite:
        tables[0][1].extend(["parent_id", "favourite_id"])
    with engine.connect() as connection:
        rows: list[Any] = []
        for model, wanted in tables:
            query = select(*[model.__table__.c[name] for name in wanted]).order_by(
                *model.__table__.primary_key
            )
            rows.append(connection.execute(query).all())
        if not models.shape.is_composite:
            links = doc.tags.property.secondary
            rows.append(connection.execute(select(links).order_by(*links.c)).all())
        return (seen, [list(map(tuple, each)) for each in rows]), program.refusals


def compare(engine: Engine, kind: str, calls: Sequence[Call], *, leases: bool, expires: bool) -> None:
    """Run a program on a fenced model and on its twin, and assert that both do the same."""
    models = FENCED[kind]
    plain, _ = outcome(engine, PLAIN[models.shape], calls, leases=False, expires=expires)
    found, refusals = outcome(engine, models, calls, leases=leases, expires=expires)
    if found != plain:
        raise AssertionError(" ".join(refusals) or "another result")


def engine_of(url: str) -> Engine:
    """Return an engine with empty tables; SQLite in memory has one connection for all."""
    if url != "sqlite://":
        made = create_engine(url)
    else:
        made = create_engine(url, poolclass=StaticPool, connect_args={"check_same_thread": False})
    if made.dialect.name == "sqlite":
        event.listen(made, "connect", lambda driver, _: driver.execute("PRAGMA foreign_keys = ON"))
    METADATA.drop_all(made)
    METADATA.create_all(made)
    return made


class Found(NamedTuple):
    """What a run has found: how many programs it has run, and the shortest one of each kind of fault."""

    programs: int
    kinds: dict[tuple[str, ...], str]


def fuzz(engine: Engine, number: int, *, seconds: float = 1e9, programs: int = 10**9) -> Found:
    """Compare random programs, each 200 with the next seed, until a limit is reached."""
    last: list[Any] = []
    kinds: dict[tuple[str, ...], str] = {}
    count = 0

    def same(kind: str, program: list[Call], leases: bool, expires: bool) -> None:
        nonlocal count
        names = {name for name, *_ in program}
        if any(names.issuperset(known) for known in kinds):  # it may show the same once more
            return
        count += 1
        last[:] = kind, program, expires
        is_optional = FENCED[kind].doc.__fence_lease__ == "optional"
        compare(engine, kind, program, leases=leases or not is_optional, expires=expires)

    drawn = given(
        st.sampled_from(sorted(FENCED)), st.lists(st.one_of(*CALLS), min_size=2, max_size=14), _FLAG, _FLAG
    )
    quiet = settings(
        max_examples=200,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
    )
    until = time.monotonic() + seconds
    while time.monotonic() < until and count < programs and len(kinds) < _MOST_KINDS:
        try:
            with warnings.catch_warnings(category=SAWarning, action="ignore"):
                quiet(seed(number)(drawn(same)))()
        except (AssertionError, FenceError) as error:
            kind, program, expires = last
            shown = f"{kind}, expire_on_commit={expires}: {program}: {str(error)[:200]}"
            kinds[tuple(name for name, *_ in program)] = shown
        number += 1
    return Found(count, kinds)


def _servers(stack: ExitStack) -> Iterator[str]:
    yield stack.enter_context(Postgres()).create_database()
    if (url := mariadb(stack)) is not None:
        yield url.render_as_string(hide_password=False)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m proof.twins", description="random programs, on both")
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--programs", type=int, default=10**9)
    parser.add_argument("--seed", type=int, default=0, help="the first one")
    parser.add_argument("--database", help="a URL; its tables of these names are dropped")
    options = parser.parse_args()
    kinds = 0
    with ExitStack() as stack:
        urls = [options.database] if options.database else ["sqlite://", *_servers(stack)]
        for url in urls:
            engine = engine_of(url)
            found = fuzz(engine, options.seed, seconds=options.seconds, programs=options.programs)
            engine.dispose()
            kinds += len(found.kinds)
            said = f"{found.programs:,} programs, {len(found.kinds)} kinds of differences"
            print(f"{engine.dialect.name}: {said}", *found.kinds.values(), sep="\n", flush=True)
    return 1 if kinds else 0


if __name__ == "__main__":
    sys.exit(main())
