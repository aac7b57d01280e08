"""In random histories with and without claims, a write replaces only the version that its object is of.

Three workers hold leases of one resource that were granted one after the other, and none knows that its time
is over. Each reads rows before its lease or under it, keeps the objects for as long as it likes, and writes
back what it makes of them. A model in plain Python says exactly which write is accepted: one whose token is
not below the fence, and whose object is of the row's last write.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, find, given, settings
from hypothesis import strategies as st
from sqlalchemy import Engine, create_engine, delete, insert, select
from sqlalchemy.orm import Session
from sqlalchemy.orm.exc import StaleDataError

from fencelock import Lease, StaleReadError, StaleTokenError, bind, claim
from tests.guard.models import Base, Counted, Log
from tests.guard.rows import bypassed, rows_of, tables_of

TOKENS = (1, 2, 3)


Step = tuple[int, str]
"""The worker, and its act."""
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


class Holder:
    """A process under one lease for ever, which trusts what it has read."""

    def __init__(self, engine: Engine, model: Any, token: int) -> None:
        self.token = token
        self.kept: Any = None
        self.seen = ""
        self.claims = 0  # of all holders, when it read
        self._engine = engine
        self._model = model

    def session(self, *, early: bool = False) -> Session:
        made = Session(self._engine, expire_on_commit=False)
        bind(made, *([] if early else [Lease("log", self.token)]))
        return made

    def read(self, *, early: bool = False, claims: bool = False) -> None:
        with self.session(early=early) as session:
            kept = claim(session, self._model, 1) if claims else session.get_one(self._model, 1)
            session.commit()
            session.expunge(kept)
        self.kept, self.seen = kept, kept.text

    def write(self, mark: str, how: str) -> None:
        with self.session() as session:
            self.kept.text = self.seen + mark
            if how == "merge":
                self.kept = session.merge(self.kept)
            else:
                session.add(self.kept)
            session.commit()
            session.expunge(self.kept)
        self.seen += mark


def refusal_of(holder: Holder, mark: str, how: str) -> Exception | None:
    try:
        holder.write(mark, how)
    except (StaleTokenError, StaleDataError) as refusal:
        return refusal
    return None


def play(engine: Engine, model: Any, history: list[Step]) -> Counter[str]:
    """Carry out a history; return what happened how often.

    Raises:
        AssertionError: if a write was accepted or refused otherwise than the model says.
    """
    with bypassed(engine) as connection:
        connection.execute(delete(model))
        more = {"version": 1} if model is Counted else {}
        connection.execute(insert(model), {"id": 1, "text": "", **more})
    holders = [Holder(engine, model, token) for token in TOKENS]
    text, fence, happened = "", 0, Counter[str]()
    claims = 0
    for number, (who, what) in enumerate(history):
        holder, mark = holders[who], f"{number};"
        if what in {"read", "read early", "claim"}:
            try:
                holder.read(early=what == "read early", claims=what == "claim")
            except StaleTokenError:
                assert what == "claim"
                assert fence > holder.token
                continue
            if what == "claim":
                fence, claims = holder.token, claims + 1
            holder.claims = claims
            assert holder.seen == text
            continue
        if holder.kept is None:
            continue
        is_old = (holder.seen, holder.claims) != (text, claims)
        expected = StaleTokenError if fence > holder.token else StaleReadError if is_old else None
        refusal = refusal_of(holder, mark, what)
        by_counter = model is Counted and expected is not None and isinstance(refusal, StaleDataError)
        assert by_counter or (None if refusal is None else type(refusal)) is expected, history
        happened["written" if refusal is None else type(refusal).__name__] += 1
        if refusal is not None:
            holder.kept = None
            continue
        text, fence = holder.seen, holder.token
        (found,) = rows_of(engine, select(model.text, model.last_fencing_token))
        assert tuple(found) == (text, fence)
    return happened


ROWS: dict[Any, Any] = {Log: [], Counted: []}  # each history starts from the beginning


def played(engine: Engine, model: Any) -> Counter[str]:
    happened: Counter[str] = Counter()

    @QUIET
    @given(HISTORIES)
    def check(history: list[Step]) -> None:
        happened.update(play(engine, model, history))

    check()
    return happened


@pytest.mark.long
@pytest.mark.parametrize("model", [Log, Counted])
def test_no_update_is_lost_and_none_refused_without_need(engine: Engine, model: Any) -> None:
    happened = played(engine, model)
    by_id = "StaleReadError" if model is Log else "StaleDataError"
    assert min(happened[each] for each in ("written", by_id, "StaleTokenError")) > 5, happened


@pytest.mark.long
@pytest.mark.usefixtures("without_write_ids")
def test_without_the_write_id_updates_are_lost() -> None:
    engine = create_engine("sqlite://")
    Base.metadata.create_all(engine, tables_of(ROWS))

    def overwrites(history: list[Step]) -> bool:
        try:
            play(engine, Log, history)
        except AssertionError:
            return True
        return False

    quiet = settings(deadline=None, database=None, derandomize=True)
    shortest = find(HISTORIES, overwrites, settings=quiet)
    assert len({who for who, _ in shortest}) > 1
    engine.dispose()
