"""The guard refuses late claims on a cluster whose nodes lag, and a COMMIT without an answer is in doubt.

A node has a row's lock for itself. The others hear of a transaction when it commits, and only of what it has
changed.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, delete, func, insert, select, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

import fencelock
from fencelock import Database, FencedModel, FencelockError, Lease, claim, fence_table, gate
from proof.servers.galera import Galera
from tests.guard.marks import Act
from tests.guard.rows import Keyed, holding
from tests.polling import eventually

pytestmark = [pytest.mark.timed, pytest.mark.long]
OLD, NEW = Lease("account:1", 5), Lease("account:1", 7)


class Base(DeclarativeBase): ...


class Account(FencedModel, Keyed, Base):
    __tablename__ = "galera_accounts"
    __fence_resource__ = "account:{id}"
    balance: Mapped[int]


class Order(Base):
    __tablename__ = "galera_orders"
    id: Mapped[int] = mapped_column(primary_key=True)
    seen: Mapped[int]


class Ballast(Keyed, Base):
    """So many rows that the other nodes take a while to apply a change of all."""

    __tablename__ = "galera_ballast"
    number: Mapped[int]


fences = fence_table(Base.metadata)


@pytest.fixture(scope="module")
def _tables(galera: Galera) -> None:
    engine = create_engine(galera.urls[0])
    Base.metadata.create_all(engine)
    with engine.begin() as connection:
        connection.execute(text("INSERT INTO galera_ballast SELECT seq, 0 FROM seq_1_to_150000"))
    engine.dispose()


@pytest.fixture
def nodes(galera: Galera, _tables: None) -> Iterator[list[Engine]]:
    """An engine for each node; all nodes are level, with thirty accounts and no orders."""
    made = [create_engine(url) for url in galera.urls]
    with made[0].execution_options(fencelock="bypass").begin() as connection:
        for table in (Account, Order, fences):
            connection.execute(delete(table))
        connection.execute(insert(Account), [{"id": number, "balance": 100} for number in range(1, 31)])
    assert eventually(lambda: all(number_of(engine, Account) == 30 for engine in made))
    yield made
    for engine in made:
        engine.dispose()


def number_of(engine: Engine, model: type[Any]) -> int:
    with Session(engine) as session:
        return session.scalar(select(func.count()).select_from(model)) or 0


def raise_it(session: Session) -> None:
    """The control: raise the fence, and change nothing where it has that height already."""
    statement = text(
        "UPDATE galera_accounts SET last_fencing_token = 5 WHERE id = 1 AND last_fencing_token <= 5"
    )
    session.connection().execution_options(fencelock="bypass").execute(statement)


def decide_again(nodes: list[Engine], prepare: Act) -> None:
    """Prepare a decision for the second time under one token, after a newer holder at another node."""
    first, second = nodes[:2]
    with holding(first, OLD) as session, session.begin():
        prepare(session)
    with second.begin() as connection:
        connection.execute(text("UPDATE galera_ballast SET number = number + 1"))
    with holding(second, NEW) as session, session.begin():
        gate(session)
        claim(session, Account, 1).balance = 0
    with holding(first, OLD) as session, session.begin():
        prepare(session)
        seen = session.scalar(select(Account.balance).where(Account.id == 1))
        assert seen == 100, "this node is not behind"
        session.add(Order(seen=seen))


@pytest.mark.parametrize("prepare", [lambda session: claim(session, Account, 1), gate], ids=["claim", "gate"])
def test_a_second_claim_or_gate_is_refused_at_a_node_that_lags(nodes: list[Engine], prepare: Act) -> None:
    """It changes the row, so that the cluster finds the conflict when it commits."""
    with pytest.raises(DBAPIError) as caught:
        decide_again(nodes, prepare)
    assert caught.value.orig is not None
    assert caught.value.orig.args[0] == 1213
    assert eventually(lambda: number_of(nodes[0], Order) == 0)


def test_what_changes_nothing_is_noticed_by_nobody(nodes: list[Engine]) -> None:
    """The control: the old holder decides on a state that has changed."""
    decide_again(nodes, raise_it)
    assert number_of(nodes[0], Order) == 1


def test_a_commit_that_a_leaving_node_does_not_answer_is_in_doubt(
    galera: Galera, nodes: list[Engine]
) -> None:
    wanted = count(1)
    errors: list[BaseException] = []
    with Database(galera.urls[0]) as authority:

        def pay() -> None:
            number = next(wanted)
            try:
                while True:
                    paying = fencelock.fenced_transaction(
                        nodes[1], f"account:{number}", gate=False, authority=authority, ttl=60, timeout=5
                    )
                    with paying as session:
                        session.get_one(Account, number).balance += 1
            except (DBAPIError, FencelockError) as error:
                errors.append(error)

        threads = [threading.Thread(target=pay) for _ in range(30)]
        for thread in threads:
            thread.start()
        assert eventually(lambda: number_of(nodes[0], Account) == 30)
        with galera.isolated(1):
            for thread in threads:
                thread.join(30.0)
        assert eventually(galera.is_healthy, seconds=30.0)
    doubts = [error for error in errors if isinstance(error, fencelock.CommitInDoubtError)]
    assert any("1180" in str(error) for error in doubts)
    assert not [error for error in errors if isinstance(error, DBAPIError) and "1180" in str(error)]
