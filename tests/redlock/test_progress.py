"""No contender waits for ever: contenders that split the votes of 2 to 5 nodes all get through."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Generator, Iterator, Sequence
from typing import Any

import pytest

from fencelock import Redlock
from fencelock.authority.base import Grant
from fencelock.authority.redlock.protocol.acquire import Acquisition, make_attempt, next_pause
from fencelock.authority.redlock.protocol.attempts import Attempt, Failed, QueuePosition
from fencelock.authority.redlock.protocol.messages import Broadcast, Replies, Reply, ReplyKind, Request, Sleep
from fencelock.authority.redlock.protocol.queue import WaitQueue
from proof.servers import Nodes
from tests.authorities.stage import together
from tests.redlock.stage import Bidder, node_set_of

GRANTED = Reply(ReplyKind.GRANTED, 0, (1,))
TAKEN = Reply(ReplyKind.HELD, ttl=30.0)


@pytest.mark.long
@pytest.mark.complaint(
    "node-redlock#168", "two clients with a vote each, or four with two and two, retry for ever"
)
@pytest.mark.parametrize(
    ("count", "contenders", "deaf"),
    [
        (2, 2, True),
        (2, 16, False),
        (3, 4, False),
        (4, 4, True),
        (4, 16, True),
        (4, 16, False),
        (5, 16, False),
    ],
)
def test_contenders_all_get_their_turns(
    nodes: Nodes, count: int, contenders: int, *, deaf: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that start together all get the lock, also if no client hears calls.

    The bounds of connecting are wide, because two cores take a while to open so many connections at once.
    """
    if deaf:
        monkeypatch.setattr(WaitQueue, "listen", lambda *_: None)
    urls = nodes.urls[:count]
    with Redlock(urls) as operator:
        operator.init(base=0)
    barrier = threading.Barrier(contenders)
    tokens: list[int] = []

    def work() -> None:
        with Redlock(urls, connect_timeout=30, outage_grace=30) as authority:
            barrier.wait(30)
            for _ in range(2):
                with authority.lock("r", timeout=60) as token:
                    tokens.append(token)

    together(*[work] * contenders, seconds=100.0)
    assert tokens == sorted(set(tokens))
    assert len(tokens) == 2 * contenders


@pytest.mark.long
@pytest.mark.timed
@pytest.mark.parametrize("count", [2, 4])
def test_nobody_starves(nodes: Nodes, count: int) -> None:
    urls = nodes.urls[:count]
    with Redlock(urls) as operator:
        operator.init(base=0)
    taken = [0] * 8
    barrier = threading.Barrier(8)

    def work(number: int) -> None:
        with Redlock(urls) as authority:
            barrier.wait(20)
            end = time.monotonic() + 3.0
            while time.monotonic() < end:
                with authority.lock("r", timeout=60):
                    taken[number] += 1

    together(*(lambda number=number: work(number) for number in range(8)), seconds=60.0)
    assert min(taken) >= max(3, max(taken) / 5)


def lone_bidder(*answers: tuple[int, Reply]) -> Bidder:
    bidder = Bidder(node_set_of("f", 4), "r", alone=True)
    for node, answer in answers:
        assert list(bidder.request.nodes) == [node]
        bidder.answers = {node: answer}
        bidder.resume()
    return bidder


def test_after_a_split_no_other_node_hears_of_the_attempt_before_the_first_has_granted() -> None:
    assert list(lone_bidder((0, GRANTED)).request.nodes) == [1, 2, 3]


def test_refusal_of_the_first_node_ends_the_attempt() -> None:
    """The holder on the first node is ahead, and the votes of the other nodes stay together."""
    outcome = lone_bidder((0, TAKEN)).outcome
    assert isinstance(outcome, Failed)
    assert (outcome.contended, outcome.split) == (True, True)


@pytest.mark.parametrize(
    "said", [ReplyKind.UNREACHABLE, ReplyKind.SILENT, ReplyKind.AMNESIA, ReplyKind.RESTARTED]
)
def test_next_node_of_the_fixed_order_stands_in_for_one_that_cannot_vote(said: ReplyKind) -> None:
    assert list(lone_bidder((0, Reply(said)), (1, GRANTED)).request.nodes) == [2, 3]


def asked(generator: Generator[Request, Any, Grant], answers: Sequence[Reply]) -> Iterator[list[int]]:
    """Yield which nodes each ACQUIRE goes to; node 0 gives these answers, and node 1 grants each time."""
    request = next(generator)
    for answer in answers:
        while not (isinstance(request, Broadcast) and request.command.script == "acquire"):
            done = (
                0.0 if isinstance(request, Sleep) else Replies(0.0, 0.0, dict.fromkeys(request.nodes, TAKEN))
            )
            request = generator.send(done)
        yield list(request.nodes)
        of_nodes = {0: answer, 1: GRANTED}
        request = generator.send(Replies(0.0, 0.0, {node: of_nodes[node] for node in request.nodes}))


def test_after_a_split_vote_one_node_decides_and_then_all_are_asked_again() -> None:
    """Two clients that each hold one of two nodes would refuse each other for ever otherwise.

    If that one node refuses, it asked in vain: the next attempt goes to all nodes, in one round trip.
    """
    nonces = map(str, itertools.count())
    node_set = node_set_of("", 2)
    generator = Acquisition(("r",), 30.0, lambda: next(nonces)).acquire(
        lambda: node_set, began=0.0, since=0.0, timeout=10.0, grace=1.0, outage=1.0, jitter=lambda: 0.5
    )
    assert list(asked(generator, [TAKEN] * 4)) == [[0, 1], [0], [0, 1], [0]]


def test_grant_that_comes_too_late_for_its_ttl_is_none() -> None:
    node_set = node_set_of("f", 3)
    generator = make_attempt(node_set, Attempt.of(node_set, ("r",), "n", 9.0))
    request = next(generator)
    with pytest.raises(StopIteration) as stop:
        generator.send(Replies(0.0, 9.0, dict.fromkeys(request.nodes, GRANTED)))
    outcome = stop.value.value
    assert isinstance(outcome, Failed)
    assert (outcome.late, outcome.contended, outcome.split) == (True, True, False)


def held(seconds: float, *, place: str = "c.1", split: bool = False, contended: bool = True) -> Failed:
    position = QueuePosition(place) if place else None
    attempt = Attempt.of(node_set_of("f", 3), ("r",), "n", 9.0, position)
    answers = dict.fromkeys(range(3), Reply(ReplyKind.HELD, ttl=seconds))
    if split:
        answers[0] = GRANTED
    return Failed(attempt, answers, 0.0, 0.0, contended=contended, split=split)


def test_time_until_the_next_attempt() -> None:
    """A client that is not called looks by itself about once a second; after a split vote it tries soon."""
    rows = [
        (held(30.0, place=""), 1, 0.0, 0.0),  # the next attempt waits in line
        (held(30.0), 2, 0.253125, 0.421875),  # the nodes call
        (held(30.0), 50, 0.75, 1.25),
        (held(0.1), 50, 0.75, 1.25),  # a claim of a called contender
        (held(0.2), 50, 0.201, 0.211),  # the end of a lease
        (held(30.0, split=True), 1, 0.0075, 0.0225),
        (held(30.0, place="", split=True), 50, 0.05, 0.15),
        (held(30.0, place="", contended=False), 1, 0.0075, 0.0225),
        (held(0.002, split=True), 50, 0.003, 0.013),
    ]
    for outcome, tries, least, most in rows:
        assert next_pause(outcome, tries, 0.0) == pytest.approx(least)
        assert next_pause(outcome, tries, 1.0) == pytest.approx(most)
