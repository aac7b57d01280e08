"""If two clients split the votes of an even number of nodes, the next attempt decides between them."""

from __future__ import annotations

import itertools
from collections.abc import Generator, Iterator
from typing import Any

from fencelock.authority.base import Grant
from fencelock.authority.redlock.protocol.acquire import Acquisition
from fencelock.authority.redlock.protocol.messages import Broadcast, Replies, Reply, ReplyKind, Request, Sleep
from tests.redlock.stage import node_set_of

NODES = node_set_of("", 2)
TAKEN = Reply(ReplyKind.HELD, ttl=30.0)


def asked(generator: Generator[Request, Any, Grant], answers: list[Reply]) -> Iterator[list[int]]:
    """Yield which nodes each ACQUIRE goes to; node 0 gives these answers, and node 1 grants each time."""
    request = next(generator)
    for answer in answers:
        while not (isinstance(request, Broadcast) and request.command.script == "acquire"):
            done = (
                0.0 if isinstance(request, Sleep) else Replies(0.0, 0.0, dict.fromkeys(request.nodes, TAKEN))
            )
            request = generator.send(done)
        yield list(request.nodes)
        of_nodes = {0: answer, 1: Reply(ReplyKind.GRANTED, 1, (1,))}
        request = generator.send(Replies(0.0, 0.0, {node: of_nodes[node] for node in request.nodes}))


def test_after_a_split_vote_one_node_decides_and_then_all_are_asked_again() -> None:
    """Two clients that each hold one of two nodes would refuse each other for ever otherwise.

    If that one node refuses, it asked in vain: the next attempt goes to all nodes, in one round trip.
    """
    nonces = map(str, itertools.count())
    generator = Acquisition(("r",), 30.0, lambda: next(nonces)).acquire(
        lambda: NODES,
        began=0.0,
        since=0.0,
        timeout=10.0,
        grace=1.0,
        outage=1.0,
        jitter=lambda: 0.5,
    )
    assert list(asked(generator, [TAKEN] * 4)) == [[0, 1], [0], [0, 1], [0]]
