"""Random histories of writers who never claim: what the fence that they have read protects, and what not.

Three workers hold leases of one resource that were granted one after the other, and none knows that its time
is over. Each reads rows before its lease or under it, keeps the objects for as long as it likes, and writes
back what it makes of them. A model in plain Python says which write is accepted. Of those that are, one may
overwrite only what was written with the very token that its object's fence shows: a second write of that
older holder, which leaves the fence where it was. With SQLAlchemy's own version counter beside the fence,
that is refused as well.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, find, given, settings
from hypothesis import strategies as st
from sqlalchemy import Engine, String, create_engine, delete, insert, select
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column
from sqlalchemy.orm.exc import StaleDataError

from fencelock.errors import StaleReadError, StaleTokenError
from fencelock.guard import FencedModel, bind, claim
from fencelock.guard._write import GuardedWrite
from fencelock.lease import Lease

TOKENS = (1, 2, 3)


class Base(DeclarativeBase):
    """The models of this file."""


class Log(FencedModel, Base):
    """A row whose text has a mark of each write that it has seen."""

    __tablename__ = "uh_logs"
    __fence_resource__ = "log"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    text: Mapped[str] = mapped_column(String(200), default="")


class Counted(FencedModel, Base):
    """The same with SQLAlchemy's version counter."""

    __tablename__ = "uh_counted"
    __fence_resource__ = "log"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    text: Mapped[str] = mapped_column(String(200), default="")
    version: Mapped[int] = mapped_column()
    __mapper_args__ = {"version_id_col": version}  # noqa: RUF012  SQLAlchemy's declaration


Step = tuple[int, str]
"""Who does something, and what."""
HISTORIES = st.lists(
    st.tuples(
        st.integers(0, len(TOKENS) - 1),
        st.sampled_from(["read", "read early", "claim", "add", "add", "merge", "merge"]),
    ),
    min_size=10,
    max_size=24,
)
QUIET = settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


class OverwrittenError(AssertionError):
    """An accepted write has overwritten what it did not have to."""


class Holder:
    """A process under one lease for ever, which trusts what it has read."""

    def __init__(self, engine: Engine, model: Any, token: int) -> None:
        self.token = token
        self.kept: Any = None
        self.seen = ""
        self.fence = 0
        self._engine = engine
        self._model = model

    def session(self, *, early: bool = False) -> Session:
        """Return a session, under the lease or as before it."""
        made = Session(self._engine, expire_on_commit=False)
        bind(made, *([] if early else [Lease("log", self.token)]))
        return made

    def read(self, *, early: bool = False, claims: bool = False) -> None:
        """Load the row, and keep it."""
        with self.session(early=early) as session:
            kept = claim(session, self._model, 1) if claims else session.get_one(self._model, 1)
            session.commit()
            session.expunge(kept)
        self.kept, self.seen, self.fence = kept, kept.text, kept.last_fencing_token

    def write(self, mark: str, how: str) -> None:
        """Write back the text that was read, with a mark more."""
        with self.session() as session:
            self.kept.text = self.seen + mark
            if how == "merge":
                self.kept = session.merge(self.kept)
            else:
                session.add(self.kept)
            session.commit()
            session.expunge(self.kept)
        self.seen += mark
        self.fence = self.token


def refusal_of(holder: Holder, mark: str, how: str) -> Exception | None:
    """Let a holder write, and return the refusal if there is one."""
    try:
        holder.write(mark, how)
    except (StaleTokenError, StaleDataError) as refusal:
        return refusal
    return None


def play(engine: Engine, model: Any, history: list[Step]) -> Counter[str]:
    """Carry out a history; return what happened how often.

    Raises:
        OverwrittenError: if a write was accepted that has overwritten what the promise covers.
        AssertionError: if a write was accepted or refused otherwise than the model says.
    """
    with engine.execution_options(fencelock="bypass").begin() as connection:
        connection.execute(delete(model))
        more = {"version": 1} if model is Counted else {}
        connection.execute(insert(model), {"id": 1, "text": "", **more})
    holders = [Holder(engine, model, token) for token in TOKENS]
    text, fence, happened = "", 0, Counter[str]()
    token_of: dict[str, int] = {}
    for number, (who, what) in enumerate(history):
        holder, mark = holders[who], f"{number};"
        if what in {"read", "read early", "claim"}:
            try:
                holder.read(early=what == "read early", claims=what == "claim")
            except StaleTokenError:
                assert fence > holder.token
                continue
            fence = holder.token if what == "claim" else fence
            assert (holder.seen, holder.fence) == (text, fence)
            continue
        if holder.kept is None:
            continue
        loaded = holder.fence
        lost = [each for each in text.split(";")[:-1] if f"{each};" not in holder.seen]
        refusal = refusal_of(holder, mark, what)
        if refusal is not None:
            happened[type(refusal).__name__] += 1
            by_counter = model is Counted and isinstance(refusal, StaleReadError | StaleDataError)
            assert by_counter or loaded > holder.token or fence not in {loaded, holder.token}
            holder.kept = None
            continue
        if any(token_of[each] != loaded for each in lost):
            raise OverwrittenError(history)
        happened["a second write overwritten" if lost else "written"] += 1
        text, fence = holder.seen, holder.token
        token_of[mark[:-1]] = holder.token
        with engine.connect() as connection:
            found = connection.execute(select(model.text, model.last_fencing_token)).one()
        assert tuple(found) == (text, fence)
    return happened


@pytest.fixture
def engine(shared_engine: Engine) -> Engine:
    """An engine on a database with the tables."""
    Base.metadata.create_all(shared_engine)
    return shared_engine


def played(engine: Engine, model: Any) -> Counter[str]:
    """Play many histories, and return what happened how often."""
    happened: Counter[str] = Counter()

    @QUIET
    @given(HISTORIES)
    def check(history: list[Step]) -> None:
        happened.update(play(engine, model, history))

    check()
    return happened


def test_only_a_second_write_of_an_older_holder_is_overwritten(engine: Engine) -> None:
    """The one schedule that the fence cannot tell is there, and no other."""
    happened = played(engine, Log)
    assert min(happened[each] for each in ("written", "StaleReadError", "StaleTokenError")) > 5, happened
    assert happened["a second write overwritten"] > 0


def test_a_version_counter_beside_the_fence_closes_that_one_too(engine: Engine) -> None:
    """Without claims, for what the unit of work writes."""
    happened = played(engine, Counted)
    assert happened["StaleReadError"] > 0
    assert happened["a second write overwritten"] == 0


def test_without_what_was_loaded_others_are_overwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant: the condition asks only that the fence is not above the token."""
    monkeypatch.setattr(GuardedWrite, "_add_loaded", lambda *_: None)
    engine = create_engine("sqlite://")
    Base.metadata.create_all(engine)

    def overwrites(history: list[Step]) -> bool:
        try:
            play(engine, Log, history)
        except OverwrittenError:
            return True
        return False

    quiet = settings(deadline=None, database=None, derandomize=True)
    shortest = find(HISTORIES, overwrites, settings=quiet)
    assert len({who for who, _ in shortest}) > 1
    engine.dispose()


def second_write(engine: Engine, model: Any, read: Callable[[Holder], None]) -> Holder:
    """Have an older holder write twice, the second time after a newer one has read; return the newer one."""
    with engine.execution_options(fencelock="bypass").begin() as connection:
        connection.execute(delete(model))
        connection.execute(insert(model), {"id": 1, **({"version": 1} if model is Counted else {})})
    older, newer = Holder(engine, model, 1), Holder(engine, model, 2)
    older.read()
    older.write("first;", "add")
    read(newer)
    older.write("second;", "add")
    return newer


def test_the_schedule_that_stays_open(engine: Engine) -> None:
    """The older holder's second write leaves the fence as the newer one has read it."""
    newer = second_write(engine, Log, Holder.read)
    newer.write("mine;", "add")
    with engine.connect() as connection:
        assert connection.scalar(select(Log.text)) == "first;mine;"


def test_a_claim_closes_it(engine: Engine) -> None:
    """The older holder's second write is refused."""
    with pytest.raises(StaleTokenError) as caught:
        second_write(engine, Log, lambda newer: newer.read(claims=True))
    assert not isinstance(caught.value, StaleReadError)


def test_a_version_counter_closes_it(engine: Engine) -> None:
    """The newer holder's write is refused: its row is there, and was not matched."""
    newer = second_write(engine, Counted, Holder.read)
    with pytest.raises(StaleReadError):
        newer.write("mine;", "add")
