"""No contender waits for ever: contenders that split the votes of 2 to 5 nodes all get through."""

from __future__ import annotations

import threading
import time

import pytest

from fencelock import Redlock
from fencelock.authority.redlock.protocol.acquire import make_attempt
from fencelock.authority.redlock.protocol.attempts import Attempt, Failed
from fencelock.authority.redlock.protocol.messages import Reply, ReplyKind
from fencelock.authority.redlock.protocol.queue import WaitQueue
from proof.servers import Nodes
from tests.redlock.stage import Bidder, node_set_of

pytestmark = pytest.mark.timed


@pytest.mark.long
@pytest.mark.complaint(
    "node-redlock#168", "two clients with a vote each, or four with two and two, retry for ever"
)
@pytest.mark.parametrize("deaf", [False, True], ids=["called", "looking"])
@pytest.mark.parametrize("count", [2, 3, 4, 5])
@pytest.mark.parametrize("contenders", [2, 4, 16, 64])
def test_contenders_all_get_their_turns(
    nodes: Nodes, count: int, contenders: int, *, deaf: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Contenders that start together all get the lock within a bound, also if no client hears calls.

    The bounds of connecting are wide. On two cores, 64 clients take seconds to open 320 connections at once.
    """
    if deaf and (contenders == 64 or count % 2):
        pytest.skip("looking with even numbers of nodes is the hard case; 64 who look are merely slow")
    if deaf:
        monkeypatch.setattr(WaitQueue, "listen", lambda *_: None)
    urls = nodes.urls[:count]
    turns = 1 if contenders == 64 else 2
    with Redlock(urls) as operator:
        operator.init(base=0)
    barrier = threading.Barrier(contenders)
    tokens: list[int] = []
    failures: list[BaseException] = []

    def work() -> None:
        try:
            with Redlock(urls, connect_timeout=10, outage_grace=10) as authority:
                barrier.wait(20)
                for _ in range(turns):
                    with authority.lock("r", timeout=20) as token:
                        tokens.append(token)
        except BaseException as error:
            failures.append(error)
            raise

    began = time.monotonic()
    threads = [threading.Thread(target=work) for _ in range(contenders)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(40)
    assert not failures
    assert tokens == sorted(set(tokens))
    assert len(tokens) == turns * contenders
    assert time.monotonic() - began < 15


@pytest.mark.long
@pytest.mark.parametrize("count", [2, 4])
def test_nobody_starves(nodes: Nodes, count: int) -> None:
    """Eight contenders take the lock back at once, again and again.

    Each gets it often, and waits but a moment.
    """
    urls = nodes.urls[:count]
    with Redlock(urls) as operator:
        operator.init(base=0)
    taken = [0] * 8
    longest = [0.0] * 8
    barrier = threading.Barrier(8)

    def work(number: int) -> None:
        with Redlock(urls) as authority:
            barrier.wait(20)
            end = time.monotonic() + 3.0
            while (asked := time.monotonic()) < end:
                with authority.lock("r", timeout=20):
                    taken[number] += 1
                    longest[number] = max(longest[number], time.monotonic() - asked)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(40)
    assert max(longest) < 2.5
    assert min(taken) >= max(3, max(taken) / 5)


def test_first_node_of_the_fixed_order_is_asked_alone() -> None:
    """After a split, no other node hears of the attempt before the first node has granted."""
    bidder = Bidder(node_set_of("f", 4), "r", alone=True)
    assert list(bidder.request.nodes) == [0]
    bidder.answers = {0: Reply(ReplyKind.GRANTED, 0, (1,))}
    bidder.resume()
    assert list(bidder.request.nodes) == [1, 2, 3]


def test_refusal_of_the_first_node_ends_the_attempt() -> None:
    """The holder on the first node is ahead, and the votes of the other nodes stay together."""
    bidder = Bidder(node_set_of("f", 4), "r", alone=True)
    bidder.answers = {0: Reply(ReplyKind.HELD, ttl=9.0)}
    bidder.resume()
    assert isinstance(bidder.outcome, Failed)
    assert bidder.outcome.contended


@pytest.mark.parametrize(
    "said", [ReplyKind.UNREACHABLE, ReplyKind.SILENT, ReplyKind.AMNESIA, ReplyKind.RESTARTED]
)
def test_next_node_of_the_fixed_order_stands_in_for_one_that_cannot_vote(said: ReplyKind) -> None:
    """A dead first node does not end the rule, and is not asked again."""
    node_set = node_set_of("f", 4)
    generator = make_attempt(node_set, Attempt.of(node_set, ("r",), "n", 9.0), alone=True)
    assert list(next(generator).nodes) == [0]
    bidder = Bidder(node_set, "r", alone=True)
    bidder.answers = {0: Reply(said)}
    bidder.resume()
    assert list(bidder.request.nodes) == [1]
    bidder.answers = {1: Reply(ReplyKind.GRANTED, 0, (1,))}
    bidder.resume()
    assert list(bidder.request.nodes) == [2, 3]
