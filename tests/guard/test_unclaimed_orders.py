"""In every interleaving of two holders that load without a claim, no acknowledged update is lost.

An older and a newer holder each load the row, write what they computed from it, and write again, with or
without loading it again. Each load and each write is a transaction of its own, so an interleaving is an order
of transactions; all orders are tried, on real databases.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import combinations
from typing import NamedTuple, cast

import pytest
from sqlalchemy import Engine, delete, insert, select
from sqlalchemy.orm import Session
from sqlalchemy.orm.exc import StaleDataError

from fencelock import Lease, StaleTokenError, bind, claim
from tests.guard.marks import on_sqlite_alone
from tests.guard.models import Base, Counted, Log
from tests.guard.rows import bypassed, tables_of

Model = type[Log] | type[Counted]
Load = Callable[[Session, Model, int], Log | Counted]
OLDER, NEWER = 1, 2
"""The tokens of the two holders. Both are sure that they hold the lock."""
PROGRAMS = (("LWW", "LWW"), ("LWLW", "LWW"), ("LWW", "LWLW"))
"""What the older and the newer holder do: load, write."""


class Written(NamedTuple):
    """A write that was acknowledged: which mark it has added to which log, with which token."""

    mark: str
    token: int
    seen: str


class Holder:
    """A holder with a token, which keeps the object in memory from one transaction to the next."""

    def __init__(self, engine: Engine, model: Model, token: int, load: Load) -> None:
        self.session = Session(engine, expire_on_commit=False)
        self.token = token
        self._model = model
        self._load = load
        self._page: Log | Counted | None = None
        self._bound = False

    def load(self, *, before: bool) -> None:
        """Load the row; `before` the lock is taken, or under it."""
        self.session.expunge_all()
        self._page = None
        if not before:
            self._bind()
        try:
            self._page = self._load(self.session, self._model, 1)
            self.session.commit()
        except StaleTokenError:
            self.session.rollback()

    def write(self, mark: str) -> Written | None:
        if self._page is None:
            return None
        self._bind()
        page, self._page = self._page, None
        written = Written(mark, self.token, page.text)
        page.text += mark
        try:
            self.session.commit()
        except (StaleTokenError, StaleDataError):
            self.session.rollback()
            return None
        self._page = page
        return written

    def _bind(self) -> None:
        if not self._bound:
            bind(self.session, Lease("log", self.token))
            self._bound = True


def orders(older: str, newer: str) -> Iterator[list[tuple[int, str]]]:
    length = len(older) + len(newer)
    for places in combinations(range(length), len(older)):
        first, second = iter(older), iter(newer)
        yield [(0, next(first)) if at in places else (1, next(second)) for at in range(length)]


def losses(engine: Engine, model: Model, load: Load, *, before: bool = False) -> list[str]:
    """Carry out all interleavings; return those whose row lacks the mark of an acknowledged write."""
    Base.metadata.create_all(engine, tables_of([Log, Counted]))
    found: list[str] = []
    for programs in PROGRAMS:
        for order in orders(*programs):
            with bypassed(engine) as connection:
                connection.execute(delete(model))
                connection.execute(insert(model), {"id": 1} | ({"version": 1} if model is Counted else {}))
            acknowledged, log = carry_out(engine, model, load, order, before=before)
            found += [f"{order}: {write}" for write in acknowledged if write.mark not in log]
    return found


def carry_out(
    engine: Engine, model: Model, load: Load, order: list[tuple[int, str]], *, before: bool
) -> tuple[list[Written], str]:
    """Carry out one interleaving; return what was acknowledged, and the log at the end."""
    holders = [Holder(engine, model, token, load) for token in (OLDER, NEWER)]
    acknowledged = []
    try:
        for number, (who, what) in enumerate(order):
            if what == "L":
                holders[who].load(before=before and not number)
                continue
            written = holders[who].write(f"{number};")
            acknowledged += [written] if written else []
    finally:
        for holder in holders:
            holder.session.close()
    with engine.connect() as connection:
        return acknowledged, connection.scalars(select(model.text)).one()


def unclaimed(session: Session, model: Model, key: int) -> Log | Counted:
    return cast("Log | Counted", session.get_one(model, key))


@pytest.mark.long
@pytest.mark.parametrize(("load", "before"), [(unclaimed, False), (unclaimed, True), (claim, False)])
def test_no_order_loses_an_update(shared_engine: Engine, load: Load, *, before: bool) -> None:
    """Whether the row is loaded before the lock is taken or under it, with and without a claim."""
    assert losses(shared_engine, Log, load, before=before) == []


def test_version_counter_beside_it(shared_engine: Engine) -> None:
    assert losses(shared_engine, Counted, unclaimed) == []


@on_sqlite_alone
@pytest.mark.usefixtures("without_write_ids")
def test_without_the_write_id_updates_are_lost(shared_engine: Engine) -> None:
    """The control: where a write only asks that the fence is not above its token."""
    assert losses(shared_engine, Log, unclaimed)
