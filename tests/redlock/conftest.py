"""Fixtures that several tests of the quorum lock share."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from fencelock import Redlock
from fencelock.authority.redlock.protocol import acquire, attempts
from proof.servers import Nodes
from tests.authorities.faces import Face
from tests.authorities.kinds import Kind
from tests.authorities.stage import Stage as Clients
from tests.redlock.stage import Stage


@pytest.fixture(params=["blocking", "asyncio"])
def world(request: pytest.FixtureRequest) -> str:
    """Where clients live: one of each driver."""
    return str(request.param)


@pytest.fixture
def blank(world: str, nodes: Nodes, patience: dict[str, Any]) -> Iterator[Clients]:
    """Clients in threads or in a loop: of the five blank `nodes`, or of those that a test names."""
    kind = Kind("five nodes", lambda: Redlock(nodes.urls, **patience), ",".join(nodes.urls))
    with Clients(kind, world) as made:
        yield made


@pytest.fixture
def clients(blank: Clients) -> Clients:
    """Clients of the five `nodes`, which are initialised with counters from 0."""
    with Redlock(blank.kind.url.split(",")) as first:
        first.init(base=0)
    return blank


@pytest.fixture
def mine(clients: Clients) -> Face:
    return clients.new()


@pytest.fixture
def other(clients: Clients) -> Face:
    return clients.new()


@pytest.fixture
def no_noise(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Nothing is left for asyncio to complain about: no task destroyed, no exception never retrieved."""
    yield
    gc.collect()
    assert not [record.getMessage() for record in caplog.records if record.name == "asyncio"]


@pytest.fixture
def never_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """A waiter in line looks after five minutes only: nothing but a call can explain an early success."""
    pause = acquire.next_pause

    def patched(outcome: attempts.Failed, tries: int, random: float) -> float:
        return 300.0 if outcome.waits_for_a_call else pause(outcome, tries, random)

    monkeypatch.setattr(acquire, "next_pause", patched)


@pytest.fixture
def make_stage(nodes: Nodes, make_nodes: Callable[..., Nodes]) -> Iterator[Callable[..., Stage]]:
    """A factory of stages on blank nodes, with mutants of scripts where a test wants them."""
    made = []

    def make(
        scripts: Mapping[str, str] | None = None, *, count: int = 3, beside: int = 0, durable: bool = False
    ) -> Stage:
        every = count + beside
        servers = make_nodes(every, appendfsync="always") if durable else nodes
        made.append(Stage(servers[:count], scripts, beside=servers[count:every]))
        return made[-1]

    yield make
    for stage in made:
        stage.close()
