"""Connections are opened in the background, one attempt at a time, with pauses after failures."""

from __future__ import annotations

import random
import threading
from contextlib import closing

import pytest

from fencelock import Redlock
from fencelock.authority.redlock.protocol.messages import Reply, ReplyKind
from fencelock.authority.redlock.protocol.queue import WaitQueue
from fencelock.authority.redlock.wire.nodes import LONGEST_BACKOFF, NodeConnections
from proof.servers import Nodes
from tests.polling import eventually
from tests.redlock.stage import SlowDoor
from tests.redlock.views import connections_to


class Nowhere:
    """A transport that notes which nodes are to be connected to."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def connect(self, node: int) -> None:
        self.asked.append(node)

    def is_connecting(self, node: int) -> bool:  # noqa: ARG002 - as the protocol has it
        return False

    def disconnect(self, node: int) -> None:
        """Do nothing."""


def test_node_that_stays_away_for_hours_is_tried_as_often_as_ever() -> None:
    """The pause doubles up to its longest, and no number of failures is too large to be doubled."""
    transport = Nowhere()
    nodes = NodeConnections(
        ["redis://node"],
        transport,
        WaitQueue("client", 1, random.random),
        "channel",
        on_identity=lambda *_: None,
        on_trouble=lambda: None,
        connect_timeout=2.0,
        patience=1.0,
        jitter=random.random,
    )
    pauses = []
    for _ in range(3000):
        nodes.failed(0, Reply(ReplyKind.UNREACHABLE), 100.0)
        pauses.append(nodes.open_absent(100.0) - 100.0)
    assert not transport.asked
    assert pauses[0] <= 0.1
    assert 0.49 * LONGEST_BACKOFF <= min(pauses[10:]) <= max(pauses) <= LONGEST_BACKOFF
    nodes.open_absent(100.0 + LONGEST_BACKOFF)
    assert transport.asked == [0]


def test_connection_is_opened_once(nodes: Nodes) -> None:
    """Asking for it again while that is going on changes nothing."""
    with closing(SlowDoor(nodes[0].port)) as door:
        client = Redlock(f"redis://127.0.0.1:{door.port}", connect_timeout=30.0)
        connections = client._connections
        for _ in range(5):
            connections.connect(0)
        opening = {thread for thread in threading.enumerate() if thread.name.startswith("fencelock-connect")}
        assert len(opening) == 1
        door.open.set()
        assert eventually(lambda: connections._nodes.connection(0) is not None)
        assert eventually(lambda: not connections.is_connecting(0))
        assert connections_to(nodes) == 1
        client.close()


@pytest.mark.usefixtures("authority")
def test_connection_that_is_open_after_the_end_is_closed(nodes: Nodes) -> None:
    """Closed while connecting: it is taken into use by nothing."""
    with closing(SlowDoor(nodes[0].port)) as door:
        before = connections_to(nodes)
        client = Redlock(f"redis://127.0.0.1:{door.port}", connect_timeout=30.0)
        connections = client._connections
        connections._nodes.open_absent(0.0)
        assert connections.is_connecting(0)
        client.close()
        door.open.set()
        assert eventually(lambda: not connections.is_connecting(0))
        assert eventually(lambda: connections_to(nodes) == before)
