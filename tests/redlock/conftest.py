"""Fixtures that several tests of the quorum lock share."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from typing import Any

import pytest

from fencelock import Redlock
from fencelock.authority.redlock.protocol import acquire, attempts
from proof.servers import Nodes
from tests.authorities.faces import Face
from tests.authorities.kinds import Kind
from tests.authorities.stage import Stage
from tests.polling import IMPATIENT
from tests.redlock.views import Run


@pytest.fixture
def patience() -> dict[str, Any]:
    """Little: nodes hang in many of these tests."""
    return IMPATIENT


@pytest.fixture(params=["blocking", "asyncio", "uvloop"])
def world(request: pytest.FixtureRequest) -> str:
    """Where clients live; a file or a test may have fewer worlds."""
    return str(request.param)


@pytest.fixture
def blank(world: str, nodes: Nodes, patience: dict[str, Any]) -> Iterator[Stage]:
    """Clients in threads or in a loop: of the five blank `nodes`, or of those that a test names."""
    kind = Kind("five nodes", lambda: Redlock(nodes.urls, **patience), ",".join(nodes.urls))
    with Stage(kind, world) as made:
        yield made


@pytest.fixture
def clients(blank: Stage) -> Stage:
    """Clients of the five `nodes`, which are initialised with counters from 0."""
    with Redlock(blank.kind.url.split(",")) as first:
        first.init(base=0)
    return blank


@pytest.fixture
def mine(clients: Stage) -> Face:
    """A client of the five nodes."""
    return clients.new()


@pytest.fixture
def other(clients: Stage) -> Face:
    return clients.new()


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Run:
    """How to run a coroutine in a new loop, of each kind there is."""
    if request.param == "uvloop":
        uvloop = pytest.importorskip("uvloop")
        return uvloop.run  # type: ignore[no-any-return]
    return asyncio.run


@pytest.fixture
def no_noise(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Nothing is left for asyncio to complain about: no task destroyed, no exception never retrieved."""
    yield
    gc.collect()
    assert not [record.getMessage() for record in caplog.records if record.name == "asyncio"]


@pytest.fixture
def never_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """A waiter in line looks after 20 s only: nothing but a call can explain an early success."""
    pause = acquire.next_pause

    def patched(outcome: attempts.Failed, tries: int, random: float) -> float:
        return 20.0 if outcome.waits_for_a_call else pause(outcome, tries, random)

    monkeypatch.setattr(acquire, "next_pause", patched)
