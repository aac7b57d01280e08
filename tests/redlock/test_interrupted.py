"""Wherever an operator's command stops, or another one comes between, the next one finishes it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from fencelock import Redlock
from fencelock.authority.redlock.admin import NodeState
from fencelock.errors import MembershipError, QuorumError
from fencelock.tokens import epoch_above
from proof.servers import Nodes
from tests.redlock.stage import NODE_KEY, Actor, RealNode, operator

#: The highest fence of a database whose nodes have lost all memory.
HIGH = 5 << 44 | 100


class Fleet:
    """Four blank nodes, and operators of them that are stepped by hand; the first three are the list."""

    def __init__(self, nodes: Nodes) -> None:
        self.servers = nodes[:4]
        self.urls = nodes.urls[:4]
        self.authority = Redlock(self.urls[:3])
        self.stations = [RealNode(url) for url in self.urls]

    def close(self) -> None:
        self.authority.close()
        for station in self.stations:
            station.close()

    def flush(self) -> None:
        for station in self.stations:
            station.client.flushall()

    def init(self, *, above: int = 0, base: int = 0, max_ttl: float = 60.0) -> Actor:
        generator = self.authority._initialising(base, max_ttl, epoch_above(above) if above else 0)
        return Actor(self.stations[:3], generator)

    def is_open(self) -> bool:
        return any(station.client.hexists(NODE_KEY, "e") for station in self.stations)

    def is_closed(self) -> bool:
        return any(station.client.hexists(NODE_KEY, "next") for station in self.stations)

    def take(self, *nodes: int) -> int:
        with (
            Redlock([self.urls[node] for node in nodes or (0, 1, 2)]) as client,
            client.lock("r", ttl=4) as token,
        ):
            return token

    def is_above(self) -> bool:
        tokens = []
        for _ in range(5):
            with self.authority.lock("r", ttl=5.0) as token:
                tokens.append(token)
        return min(tokens) > HIGH

    def is_promised(self) -> bool:
        told = [station.remember() for station in self.stations[:3]]
        highest = max(int(fields["e"]) for fields in told)
        return sum(int(fields["p"]) >= highest for fields in told) >= 2

    def standing(self, *nodes: int) -> set[tuple[NodeState, float | None]]:
        with Redlock([self.urls[node] for node in nodes]) as client:
            return {(status.state, status.max_ttl) for status in client.status()}


@pytest.fixture
def fleet(nodes: Nodes) -> Iterator[Fleet]:
    made = Fleet(nodes)
    yield made
    made.close()


def init_is_finished_by_the_next(fleet: Fleet, stopped: Actor) -> None:
    del stopped
    fleet.init(max_ttl=60.0).finish()
    assert fleet.authority.init(base=0) is False
    assert fleet.take() == 1


def init_after_a_loss_is_finished_by_any(fleet: Fleet, stopped: Actor) -> None:
    """After the first OPEN, a plain one keeps tokens above the fence; one with the fence always does."""
    del stopped
    opened = fleet.is_open()
    fleet.init().finish()
    assert fleet.is_above() or not opened
    fleet.init(above=HIGH).finish()
    assert fleet.is_above()


def plain_init_beside_one_after_a_loss(fleet: Fleet, slow: Actor) -> None:
    fleet.init().finish()
    slow.finish()
    assert fleet.is_above()
    assert fleet.is_promised()


def init_after_a_loss_beside_a_plain_one(fleet: Fleet, slow: Actor) -> None:
    fleet.init(above=HIGH).finish()
    assert fleet.is_above()
    slow.finish()
    assert fleet.is_above()
    assert fleet.is_promised()


def change_is_finished_by_the_next(fleet: Fleet, stopped: Actor) -> None:
    del stopped
    operator(fleet.stations, (0, 1, 3)).finish()
    assert fleet.take(0, 1, 3) > 1
    assert fleet.standing(0, 1, 3) == {(NodeState.ADMITTED, 60.0)}


def change_of_the_longest_lease_is_finished_by_the_next(fleet: Fleet, stopped: Actor) -> None:
    """With the same lease or none; another is refused where a node is closed for this one."""
    del stopped
    closed = fleet.is_closed()
    if closed:
        with pytest.raises(MembershipError, match=r"set --max-ttl 5 |does not vote now"):
            operator(fleet.stations[:3], (0, 1, 2), 7.0).finish()
    operator(fleet.stations[:3], (0, 1, 2), None if closed else 5.0).finish()
    assert fleet.take() > 1
    assert fleet.standing(0, 1, 2) == {(NodeState.ADMITTED, 5.0)}


#: The command that begins, whether there is a list before, and the checks that follow.
Begin = Callable[[Fleet], Actor]
INTERRUPTED: dict[str, tuple[Begin, bool, Callable[[Fleet, Actor], None]]] = {
    "init": (Fleet.init, False, init_is_finished_by_the_next),
    "init after a loss": (partial(Fleet.init, above=HIGH), False, init_after_a_loss_is_finished_by_any),
    "init after a loss, then both": (
        partial(Fleet.init, above=HIGH),
        False,
        plain_init_beside_one_after_a_loss,
    ),
    "init, then both": (Fleet.init, False, init_after_a_loss_beside_a_plain_one),
    "change": (
        lambda fleet: operator(fleet.stations, (0, 1, 3)),
        True,
        change_is_finished_by_the_next,
    ),
    "change of the longest lease": (
        lambda fleet: operator(fleet.stations[:3], (0, 1, 2), 5.0),
        True,
        change_of_the_longest_lease_is_finished_by_the_next,
    ),
}


@pytest.mark.parametrize("name", INTERRUPTED)
def test_command_that_stops_anywhere_is_finished_by_the_next(fleet: Fleet, name: str) -> None:
    begin, has_list, go_on = INTERRUPTED[name]
    steps, is_over = 0, False
    while not is_over:
        steps += 1
        fleet.flush()
        if has_list:
            fleet.init().finish()
            assert fleet.take() == 1
        actor = begin(fleet)
        for _ in range(steps):
            if actor.request is not None:
                actor.step()
        is_over = actor.request is None
        go_on(fleet, actor)
    assert steps > 5


def test_init_with_a_fence_after_a_plain_one(fleet: Fleet) -> None:
    """Nothing is left to be initialised, and the tokens are above; once more changes nothing."""
    assert fleet.authority.init(base=0) is True
    for _ in range(2):
        assert fleet.authority.init(above=HIGH) is False
        assert fleet.is_above()
        assert {status.epoch for status in fleet.authority.status()} <= {0, 6}


def test_several_inits_at_once_make_one_list(fleet: Fleet) -> None:
    """From threads, on real connections: all of them say that it is done, and tokens are above the fence."""

    def work(above: int | None, late: float) -> bool:
        with Redlock(fleet.urls[:3]) as own:
            time.sleep(late)
            return own.init(above=above)

    for number in range(8):
        fleet.flush()
        with ThreadPoolExecutor(4) as pool:
            aboves = ((None, 0.0003 * number), (HIGH, 0.0), (HIGH, 0.001), (None, 0.0))
            assert any(done.result() for done in [pool.submit(work, *each) for each in aboves])
        assert fleet.is_above()


def test_init_says_when_too_few_nodes_vote(fleet: Fleet) -> None:
    fleet.authority.init()
    change = operator(fleet.stations[:3], (0, 1))
    change.until("close")
    change.step()
    assert fleet.is_closed()
    with pytest.raises(QuorumError, match=r"same command again.*`fencelock nodes`"):
        fleet.authority.init(above=HIGH)


def test_init_refuses_a_node_that_restarted_in_between(fleet: Fleet) -> None:
    """Half the list is open, and a node has lost its ticket: it cannot be told from one that has voted."""
    actor = fleet.init()
    while not fleet.is_open():
        actor.step()
    lost = next(at for at, each in enumerate(fleet.stations) if not each.client.hexists(NODE_KEY, "e"))
    fleet.servers[lost].restart(keep_data=False)
    with pytest.raises(MembershipError, match="lost its memory"):
        fleet.authority.init(base=0)


def test_node_that_was_left_closed_is_opened_by_the_next_run(fleet: Fleet) -> None:
    """The new list has a majority already, and one that stays was not reached any more."""
    fleet.authority.init(base=0)
    actor = operator(fleet.stations, (0, 1, 3))
    actor.until("open")
    actor.step()
    actor.step()
    before = fleet.take(0, 1, 3)
    assert operator(fleet.stations, (0, 1, 3)).finish().done is True
    with Redlock([fleet.urls[node] for node in (0, 1, 3)]) as authority:
        assert {(status.state, status.epoch) for status in authority.status()} == {(NodeState.ADMITTED, 2)}
    assert fleet.take(0, 1, 3) > before


def test_new_node_that_forgets_under_way_is_left_to_clients(fleet: Fleet) -> None:
    """The list is closed for one with its ticket: that is finished all the same, and clients admit it."""
    fleet.authority.init(base=0, max_ttl=1.0)
    operator(fleet.stations, (0, 1, 3)).until("promise")
    fleet.stations[3].client.flushall()
    left_out = operator(fleet.stations, (0, 1, 3)).finish().left_out
    assert "clients admit it" in left_out[fleet.urls[3]]
    with Redlock([fleet.urls[node] for node in (0, 1, 3)]) as authority:
        assert authority.recover()
        assert {status.state for status in authority.status()} == {NodeState.ADMITTED}
