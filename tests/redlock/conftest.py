"""What several tests of the quorum lock begin with."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator

import pytest

from fencelock import Redlock
from fencelock.authority.redlock import protocol
from fencelock.embedded import Nodes
from tests.redlock.views import Run


@pytest.fixture
def authority(nodes: Nodes) -> Iterator[Redlock]:
    """A Redlock on five initialised nodes, with counters from 0 and little patience."""
    with Redlock(nodes.urls, node_timeout=0.3, connect_timeout=1.0, outage_grace=0.3) as made:
        made.init(base=0)
        yield made


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
    """One who stands in line looks after 20 s only: nothing but a call can explain an early success."""
    pause = protocol._pause

    def patched(outcome: protocol.Failed, tries: int, random: float) -> float:
        return 20.0 if outcome.waits_for_a_call else pause(outcome, tries, random)

    monkeypatch.setattr(protocol, "_pause", patched)
