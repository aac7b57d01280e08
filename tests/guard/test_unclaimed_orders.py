"""Every interleaving of two holders who load without a claim: no update is lost but in the open schedule.

An older and a newer holder each load the row, write what they computed from it, and write again, with or
without loading it anew. Each load and each write is a transaction of its own, so an interleaving is an order
of transactions; all orders are tried, on real databases. An update that was acknowledged may be lost in one
schedule only: the older holder's second write, which leaves the fence where the newer one had loaded it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import cast

import pytest
from sqlalchemy import Engine, String, delete, insert, select
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column
from sqlalchemy.orm.exc import StaleDataError

from fencelock.errors import StaleTokenError
from fencelock.guard import FencedModel, bind, claim
from fencelock.lease import Lease


class Base(DeclarativeBase):
    """The models of this file."""


class Page(FencedModel, Base):
    """Its log has a mark of each write that it has seen."""

    __tablename__ = "eo_pages"
    __fence_resource__ = "page:{id}"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    log: Mapped[str] = mapped_column(String(100), default="")


class Counted(FencedModel, Base):
    """With SQLAlchemy's own counter beside the fence."""

    __tablename__ = "eo_counted"
    __fence_resource__ = "page:{id}"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    log: Mapped[str] = mapped_column(String(100), default="")
    version: Mapped[int] = mapped_column()
    __mapper_args__ = {"version_id_col": version}  # noqa: RUF012


Model = type[Page] | type[Counted]
Load = Callable[[Session, Model, int], Page | Counted]
OLDER, NEWER = 1, 2
"""The tokens of the two, who are both sure that they hold the lock."""
PROGRAMS = (("LWW", "LWW"), ("LWLW", "LWW"), ("LWW", "LWLW"))
"""What the older and the newer holder do: load, write."""


@dataclass(frozen=True)
class Written:
    """A write that was acknowledged.

    Attributes:
        mark: which it has added.
        token: which it was made with.
        over: the fence that the row had before.
        loaded: the fence that its object was loaded with, or had after its holder's last write.
        seen: the log that it was computed from.
    """

    mark: str
    token: int
    over: int
    loaded: int
    seen: str


class Holder:
    """Somebody with a token, who keeps the object in memory from one transaction to the next."""

    def __init__(self, engine: Engine, model: Model, token: int, load: Load) -> None:
        self.session = Session(engine, expire_on_commit=False)
        self.token = token
        self._model = model
        self._load = load
        self._page: Page | Counted | None = None
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

    def write(self, mark: str, over: int) -> Written | None:
        """Write what is computed from the object; return None if it was refused, or there is no object."""
        if self._page is None:
            return None
        self._bind()
        page, self._page = self._page, None
        written = Written(mark, self.token, over, page.last_fencing_token, page.log)
        page.log += mark
        try:
            self.session.commit()
        except (StaleTokenError, StaleDataError):
            self.session.rollback()
            return None
        self._page = page
        return written

    def _bind(self) -> None:
        if not self._bound:
            bind(self.session, Lease("page:1", self.token))
            self._bound = True


def lost(acknowledged: list[Written], log: str) -> Iterator[tuple[Written, bool]]:
    """Yield each acknowledged write that is not in the row, and whether it is of the open schedule.

    It is, if it left the fence where it was, below the token of the one who then wrote over it, and that
    one's object had been loaded at this very fence, but before this write.
    """
    for number, write in enumerate(acknowledged):
        if write.mark not in log:
            over = next(later for later in acknowledged[number + 1 :] if write.mark not in later.seen)
            yield write, write.over == write.token == over.loaded < over.token


def orders(older: str, newer: str) -> Iterator[list[tuple[int, str]]]:
    """Yield each interleaving of two programs, as who does what."""
    length = len(older) + len(newer)
    for places in combinations(range(length), len(older)):
        first, second = iter(older), iter(newer)
        yield [(0, next(first)) if at in places else (1, next(second)) for at in range(length)]


def losses(engine: Engine, model: Model, load: Load, *, before: bool = False) -> dict[bool, list[str]]:
    """Carry out all interleavings; return those that lost something, by whether it is the open schedule."""
    Base.metadata.create_all(engine)
    found: dict[bool, list[str]] = {True: [], False: []}
    for programs in PROGRAMS:
        for order in orders(*programs):
            with engine.execution_options(fencelock="bypass").begin() as connection:
                connection.execute(delete(model))
                connection.execute(insert(model), {"id": 1} | ({"version": 1} if model is Counted else {}))
            for write, is_open in lost(*carry_out(engine, model, load, order, before=before)):
                found[is_open].append(f"{order}: {write}")
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
            with engine.connect() as connection:
                fence = connection.scalars(select(model.last_fencing_token)).one()
            written = holders[who].write(f"{number};", fence)
            acknowledged += [written] if written else []
    finally:
        for holder in holders:
            holder.session.close()
    with engine.connect() as connection:
        return acknowledged, connection.scalars(select(model.log)).one()


def unclaimed(session: Session, model: Model, key: int) -> Page | Counted:
    """Load without a claim."""
    return cast("Page | Counted", session.get_one(model, key))


@pytest.mark.parametrize("before", [False, True])
def test_only_the_open_schedule_loses_an_update(shared_engine: Engine, *, before: bool) -> None:
    """Nothing else is lost; and that it is lost there is a fact that the docs have to say."""
    found = losses(shared_engine, Page, unclaimed, before=before)
    assert not found[False]
    assert found[True]


def test_without_the_fence_that_was_loaded_more_is_lost(
    shared_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: where a write only asks that the fence is not above its token."""
    monkeypatch.setattr("fencelock.guard.session.loaded_fence", lambda *_: None)
    assert losses(shared_engine, Page, unclaimed)[False]


def test_version_counter_closes_the_open_schedule(shared_engine: Engine) -> None:
    """SQLAlchemy's `version_id_col` beside the fence, without any claim."""
    assert losses(shared_engine, Counted, unclaimed) == {True: [], False: []}


def test_claim_closes_the_open_schedule(shared_engine: Engine) -> None:
    """Whoever claims what he reads has shut the older holder out before."""
    assert losses(shared_engine, Page, claim) == {True: [], False: []}
