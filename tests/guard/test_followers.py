"""A later part of an object, from a follower that is behind, is refused if it is older than the rest.

The write id comes with every part. Where it differs from that of the object, the object is of two versions,
and no row has such a one.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, select
from sqlalchemy.orm import Session, joinedload, load_only, selectin_polymorphic, undefer

from fencelock import Lease, StaleReadError, bind
from tests.guard.rows import Routing
from tests.guard.write_ids import MINE, Account, Entry, Joined, Load, Row, Step, change, fill, get, query


@pytest.fixture
def leader(tmp_path: Path) -> Iterator[Engine]:
    engine = create_engine(f"sqlite:///{tmp_path}/leader.sqlite")
    Row.metadata.create_all(engine)
    yield fill(engine)
    engine.dispose()


@pytest.fixture
def follower(leader: Engine, tmp_path: Path) -> Iterator[Engine]:
    """A copy, which hears of nothing that is written later."""
    leader.dispose()
    shutil.copy(tmp_path / "leader.sqlite", tmp_path / "follower.sqlite")
    engine = create_engine(f"sqlite:///{tmp_path}/follower.sqlite")
    yield engine
    engine.dispose()


def expire_and_load(name: str) -> Step:

    def load(session: Session, row: Any) -> None:
        session.expire(row, [name])
        getattr(row, name)

    return load


def ask(name: str) -> Step:
    return lambda _session, row: getattr(row, name)


def find(statement: Any) -> Step:
    return lambda session, _row: session.scalars(statement).unique().all()


def expire_and_find(session: Session, row: Any) -> None:
    """Have a query fill in what was loaded before, and expired."""
    session.expire(row, ["balance"])
    find(select(Row))(session, row)


def refresh(*names: str) -> Step:
    return lambda session, row: session.refresh(row, names)


by_the_base = query(select(Account).where(Account.id == 2))
#: How an object is loaded, how a part of it is loaded later, and which attribute is written then.
PARTS: dict[str, tuple[type[Any], Load, Step, str]] = {
    "deferred column": (Row, get(), ask("note"), "note"),
    "deferred column of a sub-table": (Joined, get(Account, 2), ask("deep_extra"), "deep_extra"),
    "columns of a sub-table": (Joined, by_the_base, ask("extra"), "extra"),
    "refresh": (Row, get(), refresh("balance"), "balance"),
    "refresh of a sub-table": (Joined, get(Joined, 2), refresh("extra"), "extra"),
    "refresh of a collection, then a column": (Account, get(Account), refresh("entries"), "balance"),
    "expire": (Row, get(), expire_and_load("balance"), "balance"),
    "expire of a sub-table": (Joined, get(Joined, 2), expire_and_load("extra"), "extra"),
    "populate_existing": (
        Row,
        get(),
        find(select(Row).options(load_only(Row.balance)).execution_options(populate_existing=True)),
        "balance",
    ),
    "a query that fills in": (Row, get(), find(select(Row).options(undefer(Row.note))), "note"),
    "a query that fills in after expire": (Row, get(), expire_and_find, "balance"),
    "a relationship that fills in": (
        Account,
        get(Account),
        find(select(Entry).options(joinedload(Entry.account).undefer(Account.z))),
        "z",
    ),
}


def play(first: Engine, later: Engine, leader: Engine, part: str) -> None:
    _, load, step, name = PARTS[part]
    with Routing(expire_on_commit=False) as session:
        session.leader, session.reads = leader, [first]
        bind(session, Lease("rows", MINE))
        row = load(session)
        session.reads = [later]
        step(session, row)
        old = getattr(row, name)
        setattr(row, name, old - 30 if isinstance(old, int) else f"{old}A")
        session.commit()


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("order", ["older", "newer"])
def test_a_part_of_another_version_is_refused(
    leader: Engine, follower: Engine, part: str, order: str
) -> None:
    model, *_ = PARTS[part]
    key = 2 if model is Joined else 1
    change(leader, model, key)
    first, later = (leader, follower) if order == "older" else (follower, leader)
    with pytest.raises(StaleReadError, match="has parts of two versions"):
        play(first, later, leader, part)


@pytest.mark.parametrize("part", PARTS)
def test_a_part_of_the_same_version_is_accepted(leader: Engine, follower: Engine, part: str) -> None:
    play(leader, follower, leader, part)


@pytest.mark.parametrize("is_behind", [True, False])
def test_a_sub_table_from_a_follower_that_is_behind_is_refused(
    leader: Engine, follower: Engine, *, is_behind: bool
) -> None:
    if is_behind:
        change(leader, Joined, 2)
    with Routing() as session:
        session.leader, session.reads = leader, [leader, follower]
        bind(session, Lease("rows", MINE))
        of_both = select(Account).where(Account.id == 2).options(selectin_polymorphic(Account, [Joined]))
        row = session.scalars(of_both).one()
        assert session.reads == [follower]
        assert isinstance(row, Joined)
        row.extra -= 30
        if is_behind:
            with pytest.raises(StaleReadError, match="has parts of two versions"):
                session.commit()
        else:
            session.commit()


def test_a_part_from_before_ones_own_commit_is_refused(leader: Engine, follower: Engine) -> None:
    with Routing(expire_on_commit=False) as session:
        session.leader, session.reads = leader, [leader]
        bind(session, Lease("rows", MINE))
        row = session.get_one(Row, 1)
        row.balance -= 30
        session.commit()
        session.reads = [follower]
        row.note += "A"
        with pytest.raises(StaleReadError, match="has parts of two versions"):
            session.commit()


def test_an_object_that_is_found_again_and_not_filled_stays_of_its_version(
    leader: Engine, follower: Engine
) -> None:
    change(leader)
    with Routing() as session:
        session.leader, session.reads = leader, [leader]
        bind(session, Lease("rows", MINE))
        row = session.get_one(Row, 1)
        session.reads = [follower]
        assert session.scalars(select(Row)).all()[0] is row
        row.balance -= 30
        session.commit()
