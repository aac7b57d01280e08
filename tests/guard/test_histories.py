"""Random histories of writers: whatever paths they take, no stale write is accepted and none is lost.

Three workers hold leases of one resource that were granted one after the other, and none knows that its
time is over. Each keeps what it has claimed in memory from one transaction to the next, as a paused process
does, so that late writes of old holders mix with those of new ones. A model in plain Python says what the
database must do with each write. The control runs such histories with the guard switched off, and must lose
a write.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, find, given, settings
from hypothesis import strategies as st
from sqlalchemy import Engine, String, create_engine, delete, insert, select, text, update
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from fencelock.errors import StaleTokenError
from fencelock.guard import FencedModel, bind, claim, execute_fenced, fenced_update, upsert
from fencelock.lease import Lease

SHARED = [HealthCheck.function_scoped_fixture]  # each example empties the database itself
ROWS = (1, 2)
WORKERS = 3


class Base(DeclarativeBase):
    """The models of this file."""


class Entry(FencedModel, Base):
    """A row of a ledger: its log has a mark of each write that it has seen."""

    __tablename__ = "hi_entries"
    __fence_resource__ = "ledger:{ledger}"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    ledger: Mapped[str] = mapped_column(String(10))
    log: Mapped[str] = mapped_column(String(200), default="")


class Worker:
    """A process that works under one lease for ever, and trusts what it has read since its claim."""

    def __init__(self, engine: Engine, token: int, *, guarded: bool) -> None:
        self.token = token
        self.session = Session(engine, expire_on_commit=False)
        self._guarded = guarded
        self._kept: dict[int, Entry] = {}
        self._claimed: set[int] = set()
        bind(self.session, Lease("ledger:main", token))

    def entry(self, row: int) -> Entry:
        """Return the row as it was when this worker claimed it, claiming it the first time."""
        if row not in self._claimed:
            self._kept[row] = (claim if self._guarded else Session.get_one)(self.session, Entry, row)
            self._claimed.add(row)
        return self._kept[row]

    def unit_of_work(self, row: int, mark: str) -> None:
        """Append by an object."""
        self.entry(row).log += mark
        self.session.flush()

    def merge(self, row: int, mark: str) -> None:
        """Append by a detached copy."""
        self.session.merge(Entry(id=row, ledger="main", log=self.entry(row).log + mark))
        self.session.flush()

    def mappings(self, row: int, mark: str) -> None:
        """Append by a bulk operation."""
        entry = self.entry(row)
        self.session.bulk_update_mappings(Entry, [{"id": row, "log": entry.log + mark}])
        self.session.expire(entry)

    def replacement(self, row: int, mark: str) -> None:
        """Delete the row, and insert it with the longer log."""
        entry = self.entry(row)
        longer = entry.log + mark
        self.session.delete(entry)
        self.session.flush()
        self._kept[row] = Entry(id=row, ledger="main", log=longer)
        self.session.add(self._kept[row])
        self.session.flush()

    def statement(self, row: int, mark: str) -> None:
        """Append in the database."""
        which = (Entry.id == row, Entry.ledger == "main")
        self.session.execute(update(Entry).where(*which).values(log=Entry.log.concat(mark)))
        self.session.expire_all()

    def construct(self, row: int, mark: str) -> None:
        """Append in the database, by the fenced construct."""
        if not self._guarded:
            return self.statement(row, mark)  # the construct itself does not work without a token
        which = (Entry.id == row, Entry.ledger == "main")
        execute_fenced(self.session, fenced_update(Entry).where(*which).values(log=Entry.log.concat(mark)))
        return self.session.expire_all()

    def textual(self, row: int, mark: str) -> None:
        """Append in the database, by text that carries the condition."""
        if not self._guarded:
            return self.statement(row, mark)
        mysql = self.session.get_bind().dialect.name in {"mysql", "mariadb"}
        longer = "concat(log, :mark)" if mysql else "log || :mark"
        statement = text(
            f"UPDATE hi_entries SET log = {longer}, last_fencing_token = :fencing_token"  # noqa: S608 - ours
            " WHERE id = :id AND ledger = 'main' AND last_fencing_token <= :fencing_token"
        )
        self.session.execute(statement, {"id": row, "mark": mark, "fencing_token": self.token})
        return self.session.expire_all()

    def upserted(self, row: int, mark: str) -> None:
        """Append by an INSERT that finds the row there."""
        if not self._guarded:
            return self.mappings(row, mark)
        log = self.entry(row).log
        return upsert(self.session, Entry, [{"id": row, "ledger": "main", "log": log + mark}])

    def after_a_savepoint(self, row: int, mark: str) -> None:
        """Append after a savepoint was rolled back, which took a claim and a write along."""
        nested = self.session.begin_nested()
        self.unit_of_work(row, "never seen")
        nested.rollback()
        self._claimed.discard(row)
        self.unit_of_work(row, mark)

    def give_up(self) -> None:
        """Take back what has not been committed, and trust nothing any more."""
        self.session.rollback()
        self.session.expunge_all()
        self._claimed.clear()


PATHS = (
    "unit_of_work",
    "merge",
    "mappings",
    "replacement",
    "statement",
    "construct",
    "textual",
    "upserted",
    "after_a_savepoint",
)
Step = tuple[int, str, int, bool]
"""Who writes, how, which row, and whether the transaction is committed."""
HISTORIES = st.lists(
    st.tuples(
        st.integers(0, WORKERS - 1),
        st.sampled_from(PATHS),
        st.sampled_from(ROWS),
        st.sampled_from([True, True, True, False]),
    ),
    min_size=1,
    max_size=10,
)


@pytest.fixture
def engine(shared_engine: Engine) -> Engine:
    """An engine on a database with the table."""
    Base.metadata.create_all(shared_engine)
    return shared_engine


def run(engine: Engine, history: list[Step], *, guarded: bool) -> None:
    """Carry out a history, checking each step against the model.

    Raises:
        AssertionError: if a step was accepted, refused or kept otherwise than the model says.
    """
    chosen = engine if guarded else engine.execution_options(fencelock="bypass")
    with engine.execution_options(fencelock="bypass").begin() as connection:
        connection.execute(delete(Entry))
        connection.execute(insert(Entry), [{"id": row, "ledger": "main"} for row in ROWS])
    workers = [Worker(chosen, token, guarded=guarded) for token in range(1, WORKERS + 1)]
    expected = dict.fromkeys(ROWS, ("", 0))
    try:
        for number, (who, path, row, commits) in enumerate(history):
            worker = workers[who]
            log, fence = expected[row]
            refusal = attempt(worker, path, row, f"{number};")
            if refusal is not None:
                assert (refusal.token, refusal.current) == (worker.token, fence)
            assert (refusal is not None) == (guarded and worker.token < fence)
            if commits and refusal is None:
                worker.session.commit()
                expected[row] = (f"{log}{number};", worker.token if guarded else 0)
            else:
                worker.give_up()
            with engine.connect() as connection:
                found = connection.execute(select(Entry.id, Entry.log, Entry.last_fencing_token))
                assert {identity: (seen, stamp) for identity, seen, stamp in found} == expected
    finally:
        for worker in workers:
            worker.session.close()


def attempt(worker: Worker, path: str, row: int, mark: str) -> StaleTokenError | None:
    """Let a worker write, and return the refusal if there is one."""
    try:
        getattr(worker, path)(row, mark)
    except StaleTokenError as refusal:
        return refusal
    return None


def test_no_history_loses_a_write_or_accepts_a_stale_one(engine: Engine) -> None:
    """Each write is accepted just where its token is not below the fence, and then never lost."""

    @settings(max_examples=40, deadline=None, derandomize=True, database=None, suppress_health_check=SHARED)
    @given(HISTORIES)
    def check(history: list[Step]) -> None:
        run(engine, history, guarded=True)

    check()


def test_without_the_guard_a_history_loses_a_write() -> None:
    """The control: the same machine finds a lost write, so it can see one."""
    engine = create_engine("sqlite://")
    Base.metadata.create_all(engine)

    def loses(history: list[Step]) -> bool:
        try:
            run(engine, history, guarded=False)
        except AssertionError:
            return True
        return False

    shortest = find(HISTORIES, loses, settings=settings(deadline=None, database=None, derandomize=True))
    assert len({who for who, *_ in shortest}) > 1
    engine.dispose()
