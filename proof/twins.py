"""In a session without rivals, a fenced model does the same as its plain twin: random programs run on both.

    python -m proof.twins --seconds 60 --seed 7 --database postgresql+psycopg://app@db/test

A program is a list of calls of one session under leases of all its resources. A refusal by the guard, another
result of a call and other rows at the end are faults, which are shrunk to the shortest program. `--all` has
calls that expire objects, too, after which the guard refuses some writes of objects, rightly or not.
"""

from __future__ import annotations

import argparse
import pickle
import sys
import time
from collections.abc import Sequence
from typing import Any, Final, Literal

from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from sqlalchemy import Engine, ForeignKey, MetaData, String, create_engine, delete, event, select, update
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, defer, load_only, mapped_column, relationship
from sqlalchemy.pool import StaticPool

from fencelock import FencedModel, FenceError, Lease, bind, bypass, claim, claim_all, fence_table, gate

LEASES: Final = [Lease(resource, 7) for resource in ("all", "doc:1", "doc:2", "doc:3")]
KEYS: Final = (1, 2, 3)
COLUMNS: Final = ("a", "b", "c")
Call = tuple[Any, ...]


METADATA: Final = MetaData()


def family(
    prefix: str,
    resource: str = "",
    *,
    lease: Literal["required", "optional"] = "required",
    trigger: Literal[False, True, "strict"] = False,
) -> tuple[type[Any], type[Any]]:
    """Return a model whose rows have parents, and one that is joined to it; fenced if it has a resource."""

    class Base(DeclarativeBase):
        metadata = METADATA

    class Doc(*([FencedModel] if resource else []), Base):  # type: ignore[misc]
        __tablename__ = f"{prefix}_docs"
        if resource:
            __fence_resource__ = resource
            __fence_lease__ = lease
            __fence_trigger__ = trigger
        id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
        kind: Mapped[str] = mapped_column(String(3), default="doc")
        a: Mapped[int] = mapped_column(default=0)
        b: Mapped[int] = mapped_column(default=0)
        c: Mapped[int] = mapped_column(default=0, deferred=True)
        parent_id: Mapped[int | None] = mapped_column(ForeignKey(f"{prefix}_docs.id"))
        __mapper_args__: Any = {"polymorphic_on": "kind", "polymorphic_identity": "doc"}  # noqa: RUF012

    class Sub(Doc):
        __tablename__ = f"{prefix}_subs"
        id: Mapped[int] = mapped_column(ForeignKey(f"{prefix}_docs.id"), primary_key=True)
        s: Mapped[int] = mapped_column(default=0)
        __mapper_args__: Any = {"polymorphic_identity": "sub"}  # noqa: RUF012

    Doc.parent = relationship(Doc, remote_side=Doc.id)
    for model in (Doc, Sub):  # so that pickle finds them
        model.__name__ = model.__qualname__ = f"{prefix}{model.__name__}"
        globals()[model.__name__] = model
    return Doc, Sub


PLAIN: Final = family("plain")
FENCED: Final = {
    "one lease": family("whole", "all"),
    "a lease for each row": family("keyed", "doc:{id}"),
    "optional": family("optional", "all", lease="optional"),
    "a trigger": family("trigger", "doc:{id}", trigger=True),
    "a strict trigger": family("strict", "all", trigger="strict"),
}
fence_table(METADATA)


class Program:
    """The calls; each method is one, and returns its visible result."""

    def __init__(self, session: Session, models: tuple[type[Any], type[Any]], *, leases: bool) -> None:
        self.session = session
        self.doc, self.sub = models
        self.leases = leases
        self.objects: dict[int, Any] = {}
        self.savepoints: list[Any] = []

    def run(self, calls: Sequence[Call]) -> list[object]:
        """Return the results of the calls. After an error of another kind, the transaction is rolled back."""
        seen: list[object] = []
        for name, *arguments in [*calls, ("commit",)]:
            try:
                seen.append(getattr(self, name)(*arguments))
            except FenceError:
                raise
            except Exception as error:  # noqa: BLE001 - whatever the plain twin raises
                seen.append(type(error).__name__)
                self.rollback()
        return seen

    def _object(self, key: int) -> Any:
        known = self.objects.get(key)
        if known is None or known not in self.session or known in self.session.deleted:
            known = self.objects[key] = self.session.get(self.doc, key)
        return known

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
        self.savepoints.clear()

    def rollback(self) -> None:
        self.session.rollback()
        self.savepoints.clear()

    def savepoint(self) -> None:
        if len(self.savepoints) < 3:
            self.savepoints.append(self.session.begin_nested())

    def release(self) -> None:
        if self.savepoints:
            self.savepoints.pop().commit()

    def undo(self) -> None:
        if self.savepoints:
            self.savepoints.pop().rollback()

    def expire(self, key: int, *names: str) -> None:
        if (found := self._object(key)) is not None:
            self.session.flush()
            self.session.expire(found, names or None)

    def expire_all(self) -> None:
        self.session.flush()
        self.session.expire_all()

    def refresh(self, key: int, *names: str) -> None:
        if (found := self._object(key)) is not None:
            self.session.flush()
            self.session.refresh(found, names or None)

    def load(self, key: int, how: str, name: str, fresh: bool) -> object:
        self.session.flush()
        query = select(self.doc).where(self.doc.id == key).execution_options(populate_existing=fresh)
        column = getattr(self.doc, name)
        ways = {"load_only": load_only(column), "defer": defer(column)}
        found = self.session.scalars(query.options(*([ways[how]] if how in ways else []))).all()
        self.objects.update((key, each) for each in found)
        return len(found)

    def update(self, keys: Sequence[int], name: str, value: int, synchronize: Any) -> None:
        column = getattr(self.doc, name)
        statement = update(self.doc).where(self.doc.id.in_(keys)).values({name: column + value})
        self.session.execute(statement, execution_options={"synchronize_session": synchronize or False})
        if not synchronize:
            self.session.expire_all()

    def update_by_key(self, key: int, name: str, value: int) -> None:
        self.session.flush()
        if self._object(key) is not None:
            self.session.execute(update(self.doc), [{"id": key, name: value}])

    def update_core(self, key: int, name: str, value: int) -> object:
        self.session.flush()
        table = self.doc.__table__
        statement = update(table).where(table.c.id == key).values({name: value})
        count = self.session.connection().execute(statement).rowcount
        self.session.expire_all()
        return count

    def update_returning(self, key: int, name: str, value: int) -> object:
        if key == 3 or not self.session.get_bind().dialect.update_returning:
            return None  # SQLAlchemy returns no objects of joined tables
        statement = update(self.doc).where(self.doc.id == key).values({name: value}).returning(self.doc)
        return len(self.session.scalars(statement).all())

    def merge(self, key: int, name: str, value: int) -> None:
        if (found := self._copied(key)) is not None:
            self.session.expunge(found)
            setattr(found, name, value)
            self.objects[key] = self.session.merge(found)

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

    def delete(self, key: int) -> None:
        if (found := self._object(key)) is not None:
            self.session.delete(found)
            self.session.flush()

    def new(self, key: int, value: int) -> None:
        self.session.flush()
        if self._object(key) is None:
            self.session.add((self.sub if key == 3 else self.doc)(id=key, a=value))

    def adopt(self, key: int, parent: int) -> None:
        child, other = self._object(key), self._object(parent)
        if child is not None and other is not None and child is not other:
            child.parent = other

    def set_joined(self, value: int) -> None:
        if isinstance(found := self._object(3), self.sub):
            found.s = value

    def claim(self, key: int) -> None:
        self.session.flush()
        if (found := self._object(key)) is not None:
            if self.leases:
                claim(self.session, self.doc, key)
            else:
                self.session.refresh(found)

    def claim_all(self) -> object:
        self.session.flush()
        query = select(self.doc)
        if self.leases:
            return len(claim_all(self.session, query))
        return len(self.session.scalars(query.execution_options(populate_existing=True)).all())

    def gate(self) -> None:
        if self.leases:
            gate(self.session, "all")


def _call(name: str, *arguments: st.SearchStrategy[Any]) -> st.SearchStrategy[Call]:
    return st.tuples(st.just(name), *arguments)


_KEY, _NAME, _VALUE = st.sampled_from(KEYS), st.sampled_from(COLUMNS), st.integers(1, 99)
_WRITE = (_KEY, _NAME, _VALUE)
_KEYS = st.sampled_from([(1,), (2,), (3,), KEYS])
CALM: Final = (
    *(_call(name, *_WRITE) for name in ("set", "set", "add", "merge", "detach")),
    *(_call(name, *_WRITE) for name in ("update_by_key", "update_returning")),
    *(_call(name) for name in ("flush", "claim_all", "gate", "savepoint", "savepoint", "release")),
    *(_call(name, _KEY) for name in ("get", "refresh", "delete", "claim")),
    *(_call(name, _KEY, _NAME) for name in ("read", "refresh")),
    _call("load", _KEY, st.sampled_from(["all", "load_only", "defer"]), _NAME, st.booleans()),
    _call("update", _KEYS, _NAME, _VALUE, st.sampled_from(["auto", "evaluate", "fetch"])),
    _call("new", _KEY, _VALUE),
)
ALL: Final = (
    *CALM,
    *(_call(name, *_WRITE) for name in ("pickle", "update_core")),
    *(_call(name) for name in ("commit", "rollback", "expire_all", "undo", "undo")),
    _call("expire", _KEY),
    _call("expire", _KEY, _NAME),
    _call("update", _KEYS, _NAME, _VALUE, st.just(0)),
    _call("adopt", _KEY, _KEY),
    _call("set_joined", _VALUE),
)


def outcome(
    engine: Engine, models: tuple[type[Any], type[Any]], calls: Sequence[Call], *, leases: bool, expires: bool
) -> tuple[object, ...]:
    """Run a program on three rows; return what it saw and the rows at the end."""
    doc, sub = models
    with Session(engine) as session, bypass(session):
        session.execute(update(doc.__table__).values(parent_id=None))
        session.execute(delete(sub.__table__))
        session.execute(delete(doc.__table__))
        session.add_all([doc(id=1), doc(id=2), sub(id=3)])
        session.commit()
    with Session(engine, expire_on_commit=expires) as session:
        if leases:
            bind(session, *LEASES)
        program = Program(session, models, leases=leases)
        seen: object = program.run(calls)
    with engine.connect() as connection:
        columns = [doc.__table__.c[name] for name in ("id", *COLUMNS, "parent_id")]
        rows = connection.execute(select(*columns).order_by(columns[0])).all()
        return seen, list(map(tuple, rows)), connection.scalars(select(sub.__table__.c.s)).all()


def compare(engine: Engine, kind: str, calls: Sequence[Call], *, leases: bool, expires: bool) -> None:
    """Run a program on a fenced model and on its twin, and assert that both do the same."""
    plain = outcome(engine, PLAIN, calls, leases=False, expires=expires)
    assert outcome(engine, FENCED[kind], calls, leases=leases, expires=expires) == plain


def engine_of(url: str) -> Engine:
    """Return an engine with empty tables; SQLite in memory has one connection for all."""
    if url != "sqlite://":
        made = create_engine(url)
    else:
        made = create_engine(url, poolclass=StaticPool, connect_args={"check_same_thread": False})
        event.listen(made, "begin", lambda connection: connection.exec_driver_sql("BEGIN IMMEDIATE"))
    METADATA.drop_all(made)
    METADATA.create_all(made)
    return made


def fuzz(engine: Engine, number: int, seconds: float, *, calls: Sequence[Any] = CALM) -> int:
    """Compare with random programs, each 200 with the next seed; return how many.

    Raises:
        AssertionError, FenceError: with the shortest program that differs.
    """

    def same(kind: str, program: list[Call], leases: bool, expires: bool) -> None:
        compare(engine, kind, program, leases=leases or kind != "optional", expires=expires)

    programs = st.lists(st.one_of(*calls), min_size=2, max_size=14)
    drawn = given(st.sampled_from(sorted(FENCED)), programs, st.booleans(), st.booleans())
    quiet = settings(max_examples=200, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    until, rounds = time.monotonic() + seconds, 0
    while time.monotonic() < until:
        quiet(seed(number + rounds)(drawn(same)))()
        rounds += 1
    return 200 * rounds


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m proof.twins", description="random programs, on both")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0, help="the first one")
    parser.add_argument("--database", default="sqlite://")
    parser.add_argument("--all", action="store_true", help="with calls that expire objects")
    options = parser.parse_args()
    engine, calls = engine_of(options.database), ALL if options.all else CALM
    count = fuzz(engine, options.seed, options.seconds, calls=calls)
    sys.stdout.write(f"{count:,} programs did the same on a fenced model and on a plain one\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
