"""Leases hold on three nodes of MariaDB Galera with default settings, each client at a node of its own."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator

import pymysql
import pytest
from sqlalchemy import create_engine, make_url, text

from fencelock import Database
from proof.servers.galera import Galera
from tests.authorities import test_cancellation, test_leases, test_tokens, test_waiting
from tests.authorities.kinds import Kind
from tests.authorities.race import Habits, assert_exclusive, assert_in_order, assert_unique, race
from tests.authorities.stage import Stage, together
from tests.conftest import galera_with_leases

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def cluster() -> Iterator[Galera]:
    """A cluster that these tests share."""
    with galera_with_leases() as made:
        yield made


@pytest.fixture(params=["pymysql, blocking", "asyncmy, asyncio", "aiomysql, asyncio"])
def stage(request: pytest.FixtureRequest, cluster: Galera) -> Iterator[Stage]:
    """A driver whose clients go to the nodes in turn."""
    driver, world = request.param.split(", ")
    urls = [
        make_url(url).set(drivername=f"mysql+{driver}").render_as_string(hide_password=False)
        for url in cluster.urls
    ]
    turns = itertools.cycle(urls)
    first = create_engine(cluster.urls[0])
    with first.begin() as connection:
        connection.execute(text("DELETE FROM fencelock_leases"))
    first.dispose()
    with Stage(Kind(driver, lambda: Database(next(turns)), urls[0]), world) as made:
        yield made


@pytest.mark.parametrize(
    "check",
    [
        test_tokens.test_tokens_are_unique_and_leases_exclusive,
        test_tokens.test_tokens_follow_real_time,
        test_tokens.test_remint_is_for_all_resources_or_none,
        test_tokens.test_an_expired_lease_is_granted_to_another,
        test_waiting.test_opposite_orders_end_in_no_deadlock,
        test_waiting.test_who_waits_is_granted_what_expires,
        test_leases.test_many_are_extended_at_once_and_each_is_told_its_own,
        test_leases.test_closing_twice_and_going_on,
    ],
)
def test_the_suite_holds_on_galera(stage: Stage, check: Callable[[Stage], None]) -> None:
    check(stage)


@pytest.mark.parametrize("stage", ["asyncmy, asyncio"], indirect=True)
def test_cancellations_hold_on_galera(stage: Stage) -> None:
    test_cancellation.test_a_cancelled_acquisition_leaves_nothing(stage)


@pytest.mark.parametrize("names", [1, 5, 50])
def test_contention_between_nodes_breaks_nothing(stage: Stage, names: int) -> None:
    resources = tuple(f"{names}-{number}" for number in range(names))
    journal = race(stage, Habits(resources=resources, ttl=0.5, abandoned=0.05), seconds=2.0)
    assert_unique(journal)
    assert_exclusive(journal)
    assert_in_order(journal)


def test_tokens_stay_times(cluster: Galera) -> None:
    """Changing nodes at each lease does not use up the range of tokens."""
    authorities = [Database(url) for url in cluster.urls]
    for turn in range(30):
        authority = authorities[turn % 3]
        grant = authority.acquire(("turns",), ttl=5, timeout=5)
        assert abs((grant.tokens[0] >> 10) - time.time() * 1000) < 60_000
        authority.release(grant)
    for authority in authorities:
        authority.close()


_RETURNING = """
INSERT INTO control (name, holder) VALUES ('r', :holder)
ON DUPLICATE KEY UPDATE holder = IF(holder IS NULL, VALUES(holder), holder)
RETURNING holder
"""


def test_what_a_repeated_statement_returns_is_no_grant(cluster: Galera) -> None:
    """The control: RETURNING sends the rows of a try that was rolled back, so two believe to hold."""
    engines = [create_engine(url, isolation_level="AUTOCOMMIT") for url in cluster.urls]
    with engines[0].connect() as connection:
        connection.execute(text("CREATE TABLE control (name VARCHAR(9) PRIMARY KEY, holder INT)"))
    until = time.monotonic() + 20.0
    false_wins: list[int] = []

    def contend(number: int) -> None:
        with engines[number].connect() as connection:
            mine = itertools.count(number + 1, 3)
            while not false_wins and time.monotonic() < until:
                holder = next(mine)
                try:
                    won = connection.execute(text(_RETURNING), {"holder": holder}).first()
                    if won is None or won[0] != holder:
                        continue
                    stands = connection.scalar(text("SELECT holder FROM control"))
                    if stands != holder:
                        false_wins.append(holder)
                    freed = text("UPDATE control SET holder = NULL WHERE holder = :holder")
                    connection.execute(freed, {"holder": holder})
                except Exception as error:
                    if not isinstance(getattr(error, "orig", error), pymysql.Error):
                        raise

    together(*(lambda number=number: contend(number) for number in range(3)))
    for engine in engines:
        engine.dispose()
    assert false_wins
