"""Who takes part in `benchmarks.guard`, and what they do: models with and without protection, and the cases.

Every model has the same two columns, and what its protection needs besides. Every case takes a session in
which nothing has happened yet, changes or reads so many rows, and returns the seconds that this took; loading
what is to be changed is not counted, unless protection consists in it. Nothing is committed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

from sqlalchemy import BigInteger, Identity, String, and_, delete, select, update
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from fencelock.guard import FencedModel, claim, claim_all
from fencelock.lease import Lease, note_ended, note_held

TOKEN = 7
MOST_ROWS = 1000


class Base(DeclarativeBase):
    """Tables of this benchmark."""


class Row:
    """What every row has."""

    id: Mapped[int] = mapped_column(Identity(), primary_key=True)
    name: Mapped[str] = mapped_column(String(40))
    value: Mapped[int]


class Plain(Row, Base):
    """What an application has without any protection."""

    __tablename__ = "bench_plain"


class Wider(Row, Base):
    """The same with one more column: what the fence costs that nobody looks at."""

    __tablename__ = "bench_wider"
    spare: Mapped[int] = mapped_column(BigInteger, default=TOKEN)


class Guarded(FencedModel, Row, Base):
    """The same with a fence; one resource guards the table."""

    __tablename__ = "bench_guarded"
    __fence_resource__ = "bench"


class GuardedByRow(FencedModel, Row, Base):
    """The same with a resource that is made of a column."""

    __tablename__ = "bench_guarded_by_row"
    __fence_resource__ = "shop:{shop}"
    shop: Mapped[int] = mapped_column(default=1)


class Triggered(FencedModel, Row, Base):
    """The same with strict triggers, which refuse an UPDATE that changes neither column."""

    __tablename__ = "bench_triggered"
    __fence_resource__ = "bench"
    __fence_trigger__ = "strict"


class Versioned(Row, Base):
    """SQLAlchemy's optimistic locking, which users reach for; it lets in a stale writer that reads again."""

    __tablename__ = "bench_versioned"
    version: Mapped[int] = mapped_column()
    __mapper_args__ = {"version_id_col": version}  # noqa: RUF012 - SQLAlchemy's way to declare it


class Checked(Row, Base):
    """A token that the application compares by itself, with the row locked: `SELECT … FOR UPDATE`."""

    __tablename__ = "bench_checked"
    token: Mapped[int] = mapped_column(BigInteger, default=0)


Model = type[Plain | Wider | Guarded | GuardedByRow | Triggered | Versioned | Checked]


@dataclass(frozen=True, slots=True)
class Entrant:
    """One way to keep a row's data right, or not to.

    Attributes:
        name: of it.
        model: with what it takes.
        lease: that is held while it works.
        checks: whether it locks and compares before it writes.
    """

    name: str
    model: Any
    lease: Lease | None = None
    checks: bool = False

    def takes_part(self, case: str) -> bool:
        """Whether it can do that: a list of keys does not say which resource guards the rows."""
        return case != "bulk UPDATE by keys" or self.model is not GuardedByRow

    @property
    def claims(self) -> bool:
        """Whether its rows can be claimed."""
        return self.lease is not None

    @contextmanager
    def holding(self) -> Iterator[None]:
        """Hold its lease, as inside `with fenced_lock(…)`."""
        leases = () if self.lease is None else (self.lease,)
        note_held(*leases)
        yield
        note_ended(*leases)

    def first(self, rows: int) -> Any:
        """Return the criterion for so many rows."""
        return self.model.id <= rows

    def named(self, rows: int) -> Any:
        """Return the same where it has to say which resource guards the rows."""
        first = self.first(rows)
        return and_(first, self.model.shop == 1) if self.model is GuardedByRow else first

    def load(self, session: Session, rows: int, *, lock: bool = False) -> Sequence[Any]:
        """Return the first rows."""
        statement = select(self.model).where(self.first(rows)).order_by(self.model.id)
        return session.scalars(statement.with_for_update() if lock else statement).all()

    def check(self, session: Session, rows: int) -> None:
        """Lock the rows, and see whether somebody newer has been there; nothing for those who do not."""
        if not self.checks:
            return
        fences = select(self.model.token).where(self.first(rows)).with_for_update()
        if any(fence > TOKEN for fence in session.scalars(fences)):
            raise RuntimeError("somebody newer has been there")


PLAIN = Entrant("plain", Plain)
WIDER = Entrant("one more column", Wider)
GUARDED = Entrant("fencelock", Guarded, Lease("bench", TOKEN))
ENTRANTS = (
    PLAIN,
    GUARDED,
    Entrant("fencelock, by row", GuardedByRow, Lease("shop:1", TOKEN)),
    Entrant("fencelock, strict triggers", Triggered, Lease("bench", TOKEN)),
    WIDER,
    Entrant("version_id_col", Versioned),
    Entrant("FOR UPDATE and check", Checked, checks=True),
)


class Taken(NamedTuple):
    """The seconds that something took, and those of them that this process computed."""

    elapsed: float
    cpu: float


class Stopwatch:
    """Measures a block."""

    taken: Taken

    def __enter__(self) -> Self:
        self._began = Taken(time.perf_counter(), time.process_time())
        return self

    def __exit__(self, *details: object) -> None:
        cpu = time.process_time()
        self.taken = Taken(time.perf_counter() - self._began.elapsed, cpu - self._began.cpu)


def flush_updates(entrant: Entrant, rows: int, session: Session) -> Taken:
    """Change loaded objects, and flush."""
    for item in entrant.load(session, rows):
        item.value += 1
        if entrant.checks:
            item.token = TOKEN
    with Stopwatch() as watch:
        with session.no_autoflush:
            entrant.check(session, rows)
        session.flush()
    return watch.taken


def flush_inserts(entrant: Entrant, rows: int, session: Session) -> Taken:
    """Add new objects, and flush."""
    session.add_all(entrant.model(name=f"name {number}", value=number) for number in range(rows))
    with Stopwatch() as watch:
        session.flush()
    return watch.taken


def flush_deletes(entrant: Entrant, rows: int, session: Session) -> Taken:
    """Delete loaded objects, and flush."""
    for item in entrant.load(session, rows):
        session.delete(item)
    with Stopwatch() as watch:
        with session.no_autoflush:
            entrant.check(session, rows)
        session.flush()
    return watch.taken


def update_by_keys(entrant: Entrant, rows: int, session: Session) -> Taken:
    """ORM bulk UPDATE by primary key: a list of dictionaries."""
    common = {"value": 5}
    if entrant.checks:
        common["token"] = TOKEN
    if entrant.model is Versioned:
        common["version"] = 1
    changes = [{"id": key, **common} for key in range(1, rows + 1)]
    with Stopwatch() as watch:
        entrant.check(session, rows)
        session.execute(update(entrant.model), changes)
    return watch.taken


def update_where(entrant: Entrant, rows: int, session: Session) -> Taken:
    """One UPDATE for all rows that match."""
    change: dict[str, Any] = {"value": entrant.model.value + 1}
    if entrant.checks:
        change["token"] = TOKEN
    statement = update(entrant.model).where(entrant.named(rows)).values(change)
    with Stopwatch() as watch:
        entrant.check(session, rows)
        session.execute(statement, execution_options={"synchronize_session": False})
    return watch.taken


def delete_where(entrant: Entrant, rows: int, session: Session) -> Taken:
    """One DELETE for all rows that match."""
    statement = delete(entrant.model).where(entrant.named(rows))
    with Stopwatch() as watch:
        entrant.check(session, rows)
        session.execute(statement, execution_options={"synchronize_session": False})
    return watch.taken


def load(entrant: Entrant, rows: int, session: Session) -> Taken:
    """Load objects, under a lease where there is one."""
    with Stopwatch() as watch:
        entrant.load(session, rows)
    return watch.taken


def claim_rows(entrant: Entrant, rows: int, session: Session) -> Taken:
    """Claim rows; who cannot locks them: a SELECT … FOR UPDATE, which keeps nobody off after COMMIT."""
    with Stopwatch() as watch:
        if not entrant.claims:
            entrant.load(session, rows, lock=True)
        elif rows == 1:
            claim(session, entrant.model, 1)
        else:
            claim_all(session, select(entrant.model).where(entrant.first(rows)))
    return watch.taken


Case = Callable[[Entrant, int, Session], Taken]
CASES: dict[str, Case] = {
    "flush of updates": flush_updates,
    "flush of inserts": flush_inserts,
    "flush of deletes": flush_deletes,
    "bulk UPDATE by keys": update_by_keys,
    "UPDATE … WHERE": update_where,
    "DELETE … WHERE": delete_where,
    "SELECT": load,
    "claim": claim_rows,
}


def perform(case: Case, entrant: Entrant, rows: int, session: Session) -> Taken:
    """Do what a case is about, in a session that may."""
    with entrant.holding():
        return case(entrant, rows, session)


def fill(entrant: Entrant, session: Session) -> None:
    """Add the rows of a model."""
    session.add_all(entrant.model(name=f"name {number}", value=number) for number in range(MOST_ROWS))
    with entrant.holding():
        session.flush()
