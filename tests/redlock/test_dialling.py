"""How connections are opened in the background: once at a time, and with pauses after failures."""

from __future__ import annotations

import threading
import time
from contextlib import closing

import pytest

from fencelock.authority.redlock.dialling import LONGEST_BACKOFF, Dialler
from fencelock.authority.redlock.ears import Ear
from fencelock.authority.redlock.node import Link, Node
from fencelock.authority.redlock.protocol import Answer, Said
from fencelock.embedded import Nodes
from tests.polling import eventually
from tests.redlock.stage import NODE_KEY, SlowDoor
from tests.redlock.views import connections_to


@pytest.fixture
def dialler(nodes: Nodes) -> Dialler:
    """The way to a node that is up."""
    return Dialler(Node(nodes.urls[0], 2.0, verify_votes=False), threading.RLock())


def test_node_that_stays_away_for_hours_is_tried_as_often_as_ever(dialler: Dialler) -> None:
    """The pause doubles up to its longest, and no number of failures is too large to be doubled."""
    pauses = []
    for _ in range(3000):
        dialler.fail(Answer(Said.UNREACHABLE))
        pauses.append(dialler.retry_at - time.monotonic())
    assert pauses[0] <= 0.1
    assert 0.49 * LONGEST_BACKOFF <= min(pauses[10:]) <= max(pauses) <= LONGEST_BACKOFF


def test_user_who_may_not_listen_is_asked_about_rarely(nodes: Nodes) -> None:
    """Rights do not change every two seconds."""
    ear = Ear(0, Node(nodes.urls[0], 2.0, verify_votes=False), threading.RLock())
    ear.fail(Answer(Said.ERROR))
    assert ear.retry_at - time.monotonic() > 10.0


def test_link_is_opened_once_and_belongs_to_who_takes_it(dialler: Dialler, nodes: Nodes) -> None:
    """Asking for it again changes nothing until it has been taken; whoever opened it is told first."""
    announced = threading.Event()
    met: list[Link] = []
    for _ in range(5):
        dialler.dial(NODE_KEY, met.append, announced.set)
    assert announced.wait(5.0)
    dialler.dial(NODE_KEY, met.append, announced.set)
    assert connections_to(nodes) == 1
    link = dialler.take()
    assert [link] == met
    assert dialler.take() is None
    dialler.close()
    assert connections_to(nodes) == 1
    assert link is not None
    link.close()


def test_link_that_is_open_after_the_end_is_closed(nodes: Nodes) -> None:
    """Closed while connecting: nobody will ever take it."""
    with closing(SlowDoor(nodes[0].port)) as door:
        dialler = Dialler(Node(f"redis://127.0.0.1:{door.port}", 30.0, verify_votes=False), threading.RLock())
        announced = threading.Event()
        dialler.dial(NODE_KEY, lambda _: None, announced.set)
        assert dialler.dialling
        dialler.close()
        door.open.set()
        assert announced.wait(10.0)
        assert dialler.take() is None
        assert eventually(lambda: connections_to(nodes) == 0)
        dialler.dial(NODE_KEY, lambda _: None, announced.set)
        assert not dialler.dialling
