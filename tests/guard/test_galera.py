"""The guard refuses late claims on a cluster whose nodes lag, and a COMMIT without an answer is in doubt.

A node has a row's lock for itself. The others hear of a transaction when it commits, and only of what it has
changed.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, delete, func, insert, select, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Mapped, Session

import fencelock
from fencelock import Database, FencelockError, Lease, claim, gate
from proof.servers.galera import Galera
from tests.guard.marks import Act
from tests.guard.models import Account, Base, Free, fences
from tests.guard.rows import Keyed, holding, tables_of
from tests.polling import eventually

pytestmark = [pytest.mark.timed, pytest.mark.long]
OLD, NEW = Lease("account:1", 5), Lease("account:1", 7)


class Ballast(Keyed, Base):
    """So many rows that the other nodes take a while to apply a change of all."""

    __tablename__ = "galera_ballast"
    number: Mapped[int]


TABLES = tables_of([Account, Free, Ballast, fences])


@pytest.fixture(scope="module")
def _tables(galera: Galera) -> None:
    engine = create_engine(galera.urls[0])
    Base.metadata.create_all(engine, TABLES)
    with engine.begin() as connection:
        connection.execute(text("INSERT INTO galera_ballast SELECT seq, 0 FROM seq_1_to_150000"))
    engine.dispose()


@pytest.fixture
def nodes(galera: Galera, _tables: None) -> Iterator[list[Engine]]:
    """An engine for each node; all nodes are level, with thirty accounts and no orders."""
    made = [create_engine(url) for url in galera.urls]
    with made[0].execution_options(fencelock="bypass").begin() as connection:
        for table in (Account, Free, fences):
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
    statement = text("UPDATE g_accounts SET last_fencing_token = 5 WHERE id = 1 AND last_fencing_token <= 5")
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
        session.add(Free(id=seen))


@pytest.mark.parametrize("prepare", [lambda session: claim(session, Account, 1), gate], ids=["claim", "gate"])
def test_a_second_claim_or_gate_is_refused_at_a_node_that_lags(nodes: list[Engine], prepare: Act) -> None:
    """It changes the row, so that the cluster finds the conflict when it commits."""
    with pytest.raises(DBAPIError) as caught:
        decide_again(nodes, prepare)
    assert caught.value.orig is not None
    assert caught.value.orig.args[0] == 1213
    assert eventually(lambda: number_of(nodes[0], Free) == 0)


def test_what_changes_nothing_is_noticed_by_nobody(nodes: list[Engine]) -> None:
    """The control: the old holder decides on a state that has changed."""
    decide_again(nodes, raise_it)
    assert number_of(nodes[0], Free) == 1


def pay_until_a_node_leaves(galera: Galera, engine: Engine, authority: Database) -> list[BaseException]:
    """Have thirty threads pay at a node, each under its lock, and cut the node off; return their errors."""
    errors: list[BaseException] = []
    paid: set[int] = set()

    def pay(number: int) -> None:
        options: Any = {"gate": False, "authority": authority, "ttl": 60, "timeout": 5}
        try:
            while True:
                with fencelock.fenced_transaction(engine, f"account:{number}", **options) as session:
                    session.get_one(Account, number).balance += 1
                paid.add(number)
        except (DBAPIError, FencelockError) as error:
            errors.append(error)

    threads = [threading.Thread(target=pay, args=(number,)) for number in range(1, 31)]
    for thread in threads:
        thread.start()
    assert eventually(lambda: len(paid) == len(threads), seconds=60.0)
    with galera.isolated(1):
        for thread in threads:
            thread.join(60.0)
    assert eventually(galera.is_healthy, seconds=60.0)
    return errors


def test_a_commit_that_a_leaving_node_does_not_answer_is_in_doubt(
    galera: Galera, nodes: list[Engine]
) -> None:
    """Each round has many commits under way when the node leaves; one of them sees no answer in the end."""
    with Database(galera.urls[0]) as authority:
        for _ in range(10):
            errors = pay_until_a_node_leaves(galera, nodes[1], authority)
            assert not [each for each in errors if isinstance(each, DBAPIError) and "1180" in str(each)]
            doubts = [each for each in errors if isinstance(each, fencelock.CommitInDoubtError)]
            if any("1180" in str(each) for each in doubts):
                return
    pytest.fail("no COMMIT was under way in any round")
