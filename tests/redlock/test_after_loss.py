"""After all memory is lost, an `init` that names the highest fence of the database gives larger tokens."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import redis

from fencelock import Redlock
from fencelock.errors import QuorumError
from fencelock.tokens import epoch_above
from proof.servers import Nodes
from tests.redlock.stage import NODE_KEY, Actor, RealNode, operator

pytestmark = pytest.mark.timed

#: The highest fence of the database.
HIGH = 5 << 44 | 100
MAX_TTL = 1.0


@pytest.fixture
def stations(nodes: Nodes) -> Iterator[list[RealNode]]:
    """Connections to three blank nodes."""
    made = [RealNode(url) for url in nodes.urls[:3]]
    yield made
    for station in made:
        station.close()


@pytest.fixture
def authority(nodes: Nodes) -> Iterator[Redlock]:
    """A client of the same nodes."""
    with Redlock(nodes.urls[:3]) as made:
        yield made


def initialiser(authority: Redlock, stations: list[RealNode], above: int = 0) -> Actor:
    """Return a client that initialises, step by step."""
    return Actor(stations, authority._initialising(0, MAX_TTL, epoch_above(above)))


def steps_of(actor: Actor, count: int) -> None:
    """Go on so many steps, or to the end."""
    for _ in range(count):
        if actor.request is not None:
            actor.step()


def are_above(authority: Redlock) -> bool:
    """Whether the next tokens are all above the fence, whichever nodes grant them."""
    tokens = []
    for _ in range(10):
        with authority.lock("r", ttl=0.5) as token:
            tokens.append(token)
    return min(tokens) > HIGH


def test_plain_init_finishes_what_one_after_a_loss_began(
    authority: Redlock, stations: list[RealNode]
) -> None:
    """It died after its first OPEN."""
    first = initialiser(authority, stations, HIGH)
    first.until("open")
    first.step()
    assert authority.init(max_ttl=MAX_TTL) is True
    assert {int(station.remember()["e"]) for station in stations} == {6}
    assert are_above(authority)


@pytest.mark.parametrize("steps", range(23))
def test_init_after_a_loss_that_dies_anywhere_is_finished_by_another(
    authority: Redlock, stations: list[RealNode], steps: int
) -> None:
    """After the first OPEN, a plain `init` keeps tokens above the fence.

    An `init` that names the fence always does.
    """
    steps_of(initialiser(authority, stations, HIGH), steps)
    opened = any("e" in station.remember() for station in stations)
    authority.init(max_ttl=MAX_TTL)
    assert are_above(authority) or not opened
    authority.init(max_ttl=MAX_TTL, above=HIGH)
    assert are_above(authority)


@pytest.mark.parametrize("steps", range(23))
def test_plain_init_beside_one_after_a_loss(authority: Redlock, stations: list[RealNode], steps: int) -> None:
    """Wherever the one that names the fence is when the other comes from the beginning to its end."""
    slow = initialiser(authority, stations, HIGH)
    steps_of(slow, steps)
    initialiser(authority, stations).finish()
    slow.finish()
    assert are_above(authority)
    assert_promised(stations)


@pytest.mark.parametrize("steps", range(14))
def test_init_after_a_loss_beside_a_plain_one(
    authority: Redlock, stations: list[RealNode], steps: int
) -> None:
    """And wherever the other is when this one comes."""
    slow = initialiser(authority, stations)
    steps_of(slow, steps)
    initialiser(authority, stations, HIGH).finish()
    assert are_above(authority)
    slow.finish()
    assert are_above(authority)
    assert_promised(stations)


def assert_promised(stations: list[RealNode]) -> None:
    """Check that a majority has promised the epoch of every voter."""
    told = [station.remember() for station in stations]
    highest = max(int(fields["e"]) for fields in told)
    assert sum(int(fields["p"]) >= highest for fields in told) >= 2


def test_init_with_a_fence_after_a_plain_one(authority: Redlock) -> None:
    """Nothing is left to be initialised, and the tokens are above; once more changes nothing."""
    assert authority.init(base=0, max_ttl=MAX_TTL) is True
    for _ in range(2):
        assert authority.init(max_ttl=MAX_TTL, above=HIGH) is False
        assert are_above(authority)
        assert {status.epoch for status in authority.status()} <= {0, 6}


def test_both_at_once(nodes: Nodes, authority: Redlock) -> None:
    """From threads, on real connections; all of them say that it is done."""
    for number in range(15):
        for node in nodes[:3]:
            with redis.Redis.from_url(node.url) as client:
                client.flushall()

        def work(above: int | None, late: float) -> None:
            with Redlock(nodes.urls[:3]) as own:
                time.sleep(late)
                own.init(max_ttl=MAX_TTL, above=above)

        with ThreadPoolExecutor(3) as pool:
            aboves = ((None, 0.0003 * number), (HIGH, 0.0), (HIGH, 0.001))
            for done in [pool.submit(work, *each) for each in aboves]:
                done.result()
        assert are_above(authority)


def test_init_says_when_too_few_nodes_vote(authority: Redlock, stations: list[RealNode]) -> None:
    """Their list gives way to another, and they have been closed for it."""
    authority.init(max_ttl=MAX_TTL)
    change = operator(stations, (0, 1))
    change.until("close")
    change.step()
    assert stations[0].client.hexists(NODE_KEY, "next")
    with pytest.raises(QuorumError, match=r"same command again.*`fencelock nodes`"):
        authority.init(max_ttl=MAX_TTL, above=HIGH)
