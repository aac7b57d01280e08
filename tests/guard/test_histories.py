"""In random histories of writers on every path, no stale write is accepted and no acknowledged write is lost.

Three workers hold leases of two resources that were granted one after the other, and no worker knows that its
time is over. Each worker keeps its claimed rows in memory from one transaction to the next, as a paused
process does, so that late writes of old holders mix with those of new ones.

In one kind of history each transaction ends before the next begins, and a model in plain Python says what the
database must do with each write. In the other kind, transactions with savepoints are open at the same time.
No worker waits there: a worker that finds a row locked gives up, as after a lock timeout. The check is about
the outcome: the marks of the rows are those of the acknowledged writes, in an order in which tokens never go
down.

The controls run such histories with the guard switched off, and must find a violation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any, Final

import pytest
import sqlalchemy as sa
from hypothesis import HealthCheck, Phase, find, given, settings
from hypothesis import strategies as st
from sqlalchemy import Engine, String, Table, bindparam, create_engine, delete, insert, select, update
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, SessionTransaction, mapped_column

import fencelock
from fencelock import FencedModel, Lease, StaleTokenError, bind, claim, fenced_text, upsert
from tests.guard.rows import Keyed, bypassed, rows_of

SHARED = [HealthCheck.function_scoped_fixture]  # each example empties the database itself
LEDGERS = {1: "main", 2: "main", 3: "side"}
"""The rows, and the ledger that each is of."""
TOKENS = ({"main": 1, "side": 3}, {"main": 2, "side": 1}, {"main": 3, "side": 2})
"""The leases of each worker: the oldest holder of one ledger is the newest of the other."""


class Base(DeclarativeBase): ...


class Entry(FencedModel, Keyed, Base):
    """A row of a ledger: its log has a mark of each write that it has seen."""

    __tablename__ = "hi_entries"
    __fence_resource__ = "ledger:{ledger}"
    ledger: Mapped[str] = mapped_column(String(10))
    log: Mapped[str] = mapped_column(String(200), default="")


class Worker:
    """A process that works under one lease of each ledger for ever, and trusts what it has claimed.

    Attributes:
        tokens: of its leases, by ledger.
        session: which it writes with.
        written: the rows and marks that its open transaction has written.
    """

    def __init__(self, engine: Engine, tokens: Mapping[str, int], *, guarded: bool) -> None:
        self.tokens = tokens
        self.session = Session(engine, expire_on_commit=False)
        self.written: list[tuple[int, str]] = []
        self._guarded = guarded
        self._kept: dict[int, Entry] = {}
        self._claimed: set[int] = set()
        self._savepoints: list[tuple[SessionTransaction, int]] = []
        bind(self.session, *[Lease(f"ledger:{ledger}", token) for ledger, token in tokens.items()])

    def entry(self, row: int) -> Entry:
        """Return the row as it was when this worker claimed it, claiming it the first time."""
        if row not in self._claimed:
            self._kept[row] = (claim if self._guarded else Session.get_one)(self.session, Entry, row)
            self._claimed.add(row)
        return self._kept[row]

    def unit_of_work(self, row: int, mark: str) -> None:
        self.entry(row).log += mark
        self.session.flush()

    def merge(self, row: int, mark: str) -> None:
        self.session.merge(Entry(id=row, ledger=LEDGERS[row], log=self.entry(row).log + mark))
        self.session.flush()

    def mappings(self, row: int, mark: str) -> None:
        entry = self.entry(row)
        longer = {"id": row, "ledger": LEDGERS[row], "log": entry.log + mark}
        self.session.bulk_update_mappings(Entry, [{name: longer[name] for name in ("id", "log")}])
        self.session.expire(entry)

    def bulk_objects(self, row: int, mark: str) -> None:
        entry = self.entry(row)
        entry.log += mark
        self.session.bulk_save_objects([entry])
        self.session.expire(entry)

    def key_list(self, row: int, mark: str) -> None:
        longer = {"id": row, "log": self.entry(row).log + mark}
        self.session.execute(update(Entry), [longer])
        self.session.expire_all()

    def replacement(self, row: int, mark: str) -> None:
        entry = self.entry(row)
        longer = entry.log + mark
        self.session.delete(entry)
        self.session.flush()
        self._kept[row] = Entry(id=row, ledger=LEDGERS[row], log=longer)
        self.session.add(self._kept[row])
        self.session.flush()

    def statement(self, row: int, mark: str) -> None:
        self.session.execute(update(Entry).where(*which(row)).values(log=Entry.log.concat(mark)))
        self.session.expire_all()

    def query(self, row: int, mark: str) -> None:
        self.session.query(Entry).filter(*which(row)).update({"log": Entry.log.concat(mark)})
        self.session.expire_all()

    def core(self, row: int, mark: str) -> None:
        table: Table = Entry.__table__  # type: ignore[assignment]
        pinned = (table.c.id == bindparam("row"), table.c.ledger == bindparam("of"))
        longer = table.c.log.concat(bindparam("mark"))
        statement = update(table).where(*pinned).values(log=longer)
        self.session.connection().execute(statement, [{"row": row, "of": LEDGERS[row], "mark": mark}])
        self.session.expire_all()

    def construct(self, row: int, mark: str) -> None:
        if not self._guarded:
            return self.statement(row, mark)  # the construct itself does not work without a token
        longer = update(Entry).where(*which(row)).values(log=Entry.log.concat(mark))
        self.session.execute(longer)
        return self.session.expire_all()

    def textual(self, row: int, mark: str) -> None:
        if not self._guarded:
            return self.statement(row, mark)
        mysql = self.session.get_bind().dialect.name in {"mysql", "mariadb"}
        longer = "concat(log, :mark)" if mysql else "log || :mark"
        statement = fenced_text(
            f"UPDATE hi_entries SET log = {longer}, last_fencing_token = :fencing_token,"  # noqa: S608 - ours
            " last_write_id = :fencing_write_id"
            " WHERE id = :id AND ledger = :ledger AND last_fencing_token <= :fencing_token",
            Entry,
        )
        self.session.execute(statement, {"id": row, "ledger": LEDGERS[row], "mark": mark})
        return self.session.expire_all()

    def bare_cursor(self, row: int, mark: str) -> None:
        """Append by a cursor of the driver, with the statement that is made for it."""
        entry = self.entry(row)
        if not self._guarded:
            return self.mappings(row, mark)
        dialect, token = self.session.get_bind().dialect, self.tokens[LEDGERS[row]]
        style: Any = dialect.paramstyle
        made = fencelock.conditional_update(
            "hi_entries", {"log": entry.log + mark}, {"id": row}, token, style, dialect=dialect.name
        )
        cursor = self.session.connection().connection.cursor()
        try:
            cursor.execute(*made)
        except dialect.loaded_dbapi.OperationalError as error:
            raise OperationalError(None, None, error) from error
        if cursor.rowcount != 1:
            raise StaleTokenError("hi_entries", (row,), token, None)
        return self.session.expire(entry)

    def upserted(self, row: int, mark: str) -> None:
        if not self._guarded:
            return self.mappings(row, mark)
        longer = {"id": row, "ledger": LEDGERS[row], "log": self.entry(row).log + mark}
        return upsert(self.session, Entry, [longer])

    def after_a_savepoint(self, row: int, mark: str) -> None:
        """Append after a savepoint was rolled back, which took a claim and a write along."""
        nested = self.session.begin_nested()
        self.unit_of_work(row, "never seen")
        nested.rollback()
        self._claimed.discard(row)
        self.unit_of_work(row, mark)

    def save(self) -> None:
        self._savepoints.append((self.session.begin_nested(), len(self.written)))

    def take_back(self) -> None:
        if self._savepoints:
            savepoint, kept = self._savepoints.pop()
            savepoint.rollback()
            del self.written[kept:]
            self._claimed.clear()

    def commit(self) -> None:
        self.session.commit()
        self._savepoints.clear()
        self.written.clear()

    def give_up(self) -> None:
        self.session.rollback()
        self.session.expunge_all()
        self._claimed.clear()
        self._savepoints.clear()
        self.written.clear()


def which(row: int) -> tuple[sa.ColumnElement[bool], ...]:
    return Entry.id == row, Entry.ledger == LEDGERS[row]


PATHS = (
    "unit_of_work",
    "merge",
    "mappings",
    "bulk_objects",
    "key_list",
    "replacement",
    "statement",
    "query",
    "core",
    "construct",
    "textual",
    "bare_cursor",
    "upserted",
    "after_a_savepoint",
)
Step = tuple[int, str, int, bool]
"""The worker, its way to write, the row, and whether the transaction is committed."""
HISTORIES = st.lists(
    st.tuples(
        st.integers(0, len(TOKENS) - 1),
        st.sampled_from(PATHS),
        st.sampled_from([*LEDGERS]),
        st.sampled_from([True, True, True, False]),
    ),
    min_size=1,
    max_size=10,
)
ROWS: dict[Any, Any] = {}  # each history starts from the beginning


def run(engine: Engine, history: list[Step], *, guarded: bool) -> None:
    """Carry out a history, checking each step against the model.

    Raises:
        AssertionError: if a step was accepted, refused or kept otherwise than the model says.
    """
    chosen = engine if guarded else engine.execution_options(fencelock="bypass")
    begin_anew(engine)
    workers = [Worker(chosen, tokens, guarded=guarded) for tokens in TOKENS]
    expected = dict.fromkeys(LEDGERS, ("", 0))
    try:
        for number, (who, path, row, commits) in enumerate(history):
            worker = workers[who]
            token = worker.tokens[LEDGERS[row]]
            log, fence = expected[row]
            refusal = attempt(worker, path, row, f"{number};")
            if refusal is not None:
                assert (refusal.token, refusal.current or fence) == (token, fence)
            assert (refusal is not None) == (guarded and token < fence)
            if commits and refusal is None:
                worker.session.commit()
                expected[row] = (f"{log}{number};", token if guarded else 0)
            else:
                worker.give_up()
            with engine.connect() as connection:
                found = connection.execute(select(Entry.id, Entry.log, Entry.last_fencing_token))
                assert {identity: (seen, stamp) for identity, seen, stamp in found} == expected
    finally:
        for worker in workers:
            worker.session.close()


def begin_anew(engine: Engine) -> None:
    with bypassed(engine) as connection:
        connection.execute(delete(Entry))
        connection.execute(insert(Entry), [{"id": row, "ledger": of} for row, of in LEDGERS.items()])


def attempt(worker: Worker, path: str, row: int, mark: str) -> StaleTokenError | None:
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


@pytest.mark.long
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


Act = tuple[int, str, int, str]
"""The worker, its act, the row, and how the worker goes on with its transaction."""
INTERLEAVED = st.lists(
    st.tuples(
        st.integers(0, len(TOKENS) - 1),
        st.one_of(st.just("entry"), st.sampled_from(PATHS), st.sampled_from(PATHS)),
        st.sampled_from([*LEDGERS]),
        st.sampled_from(["commit", "commit", "commit", "stay", "stay", "save", "take_back", "give_up"]),
    ),
    min_size=10,
    max_size=30,
)
UNSHRUNK: Final = settings(
    max_examples=80,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate],
    report_multiple_bugs=False,
    suppress_health_check=SHARED,
)
"""As many histories with the guard as without; what fails is shown as it is: shrinking takes minutes."""
IMPATIENT: Final[Mapping[str, dict[str, Any]]] = {
    "sqlite": {"timeout": 0},
    "postgresql": {"options": "-c lock_timeout=20ms"},
    "mysql": {"init_command": "SET innodb_lock_wait_timeout = 0"},
}
"""By dialect, arguments of a connection that does not wait for rows that others have locked."""


@pytest.fixture
def impatient(engine: Engine) -> Iterator[Engine]:
    """An engine on the same database whose connections do not wait."""
    made = create_engine(engine.url, connect_args=IMPATIENT[engine.dialect.name])
    yield made
    made.dispose()


class Outcome:
    """The outcome of a history, as a reader sees it.

    Attributes:
        acknowledged: the writes whose COMMIT has returned: row, mark and token of each.
    """

    def __init__(self, engine: Engine) -> None:
        self.acknowledged: list[tuple[int, str, int]] = []
        self._engine = engine
        self._fences = dict.fromkeys(LEDGERS, 0)

    def check(self) -> None:
        """Check the committed rows.

        Raises:
            AssertionError: if a fence went down, or a write was lost or accepted though it was stale.
        """
        found = rows_of(self._engine, select(Entry.id, Entry.log, Entry.last_fencing_token))
        token_of = {mark: token for _, mark, token in self.acknowledged}
        for row, log, fence in found:
            marks = [f"{mark};" for mark in log.split(";")[:-1]]
            assert sorted(marks) == sorted(mark for at, mark, _ in self.acknowledged if at == row)
            tokens = [token_of[mark] for mark in marks]
            assert all(earlier <= later for earlier, later in pairwise([*tokens, fence]))
            assert fence >= self._fences[row]
            self._fences[row] = fence
        assert len(found) == len(LEDGERS)


def interleave(engine: Engine, history: list[Act], *, guarded: bool) -> Counter[str]:
    """Carry out a history of transactions that are open at the same time; return what happened how often.

    Raises:
        AssertionError: as `Outcome.check` does.
    """
    begin_anew(engine)
    chosen = engine if guarded else engine.execution_options(fencelock="bypass")
    workers = [Worker(chosen, tokens, guarded=guarded) for tokens in TOKENS]
    outcome = Outcome(engine)
    happened: Counter[str] = Counter()
    try:
        for number, (who, what, row, then) in enumerate(history):
            happened[act(workers[who], what, row, f"{number};")] += 1
            end(workers[who], then, outcome)
        for worker in workers:
            end(worker, "commit", outcome)
    finally:
        for worker in workers:
            worker.session.close()
    return happened


def act(worker: Worker, what: str, row: int, mark: str) -> str:
    try:
        if what == "entry":
            worker.entry(row)
            return "read"
        getattr(worker, what)(row, mark)
    except StaleTokenError:
        worker.give_up()
        return "stale"
    except OperationalError:
        worker.give_up()
        return "locked"
    worker.written.append((row, mark))
    return "written"


def end(worker: Worker, then: str, outcome: Outcome) -> None:
    if then == "commit":
        acknowledged = [(row, mark, worker.tokens[LEDGERS[row]]) for row, mark in worker.written]
        try:
            worker.commit()
        except OperationalError:
            worker.give_up()
        else:
            outcome.acknowledged += acknowledged
            outcome.check()
    elif then != "stay":
        getattr(worker, then)()


@pytest.mark.long
def test_no_interleaving_loses_a_write_or_accepts_a_stale_one(impatient: Engine) -> None:
    happened: Counter[str] = Counter()

    @UNSHRUNK
    @given(INTERLEAVED)
    def check(history: list[Act]) -> None:
        happened.update(interleave(impatient, history, guarded=True))

    check()
    assert min(happened[each] for each in ("written", "stale", "locked", "read")) > 30, happened


def test_without_the_guard_an_interleaving_is_found_out(impatient: Engine) -> None:
    """The control: the same machine, with as many histories, finds a violation on each database."""

    @UNSHRUNK
    @given(INTERLEAVED)
    def check(history: list[Act]) -> None:
        interleave(impatient, history, guarded=False)

    with pytest.raises(AssertionError):
        check()
