"""`python -m proof.torture --authority etcd` and `zookeeper`: each loses what it granted, and tokens rise.

`proof.torture.trials --consensus` has all faults. Here are the worst ones and the controls.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

import fencelock
from fencelock import _generators
from fencelock._generators import Steps
from fencelock.authority.base import Grant
from fencelock.authority.etcd import messages
from fencelock.authority.etcd.asking import Watching
from fencelock.authority.line.entries import SHIFT, Exchange
from fencelock.errors import LockLostError
from proof.servers import ZooKeeper, zookeeper
from proof.torture.checker import Rule
from proof.torture.run import Result, run
from proof.torture.settings import Settings
from proof.torture.trials import LOSSES

NEEDS_JAVA = pytest.mark.skipif(bool(zookeeper.missing()), reason=f"no ZooKeeper: {zookeeper.missing()}")
KINDS: dict[str, Any] = {"etcd": fencelock.Etcd, "zookeeper": fencelock.ZooKeeper}
STORES = ["etcd", pytest.param("zookeeper", marks=NEEDS_JAVA)]
pytestmark = pytest.mark.timed


def torture(store: str, folder: Path, **settings: Any) -> Result:
    """Make a run in which the store loses what it has granted, and workers are paused."""
    faults = (LOSSES[store], "worker-pause", "worker-kill")
    usual: dict[str, Any] = {
        "duration": 12.0,
        "workers": 4,
        "resources": 5,
        "pause": 3.0,
        "database": "sqlite",
    }
    return run(Settings(folder, faults, authority=store, **{**usual, **settings}))


@pytest.mark.long
@pytest.mark.parametrize("store", STORES)
def test_tokens_rise_over_what_is_lost(store: str, tmp_path: Path) -> None:
    """No promise is broken, though each loss had grants that the store no longer knew."""
    result = torture(store, tmp_path)
    assert (result.trouble, result.verdict.violations) == ((), ())
    assert result.verdict.faults[LOSSES[store]] >= 3
    assert result.verdict.acquisitions > 0


@pytest.mark.long
@pytest.mark.parametrize("store", STORES)
def test_the_counters_of_the_stores_begin_again(store: str, tmp_path: Path) -> None:
    """The control: a revision, or the number of a transaction, as the token."""
    result = torture(store, tmp_path, quorum=False, tasks=0, writes=0.0, duration=20.0)
    assert result.verdict.broken[Rule.ORDERED_TOKENS] > 0


def test_a_client_comes_back_to_a_wiped_zookeeper(zookeeper_server: ZooKeeper) -> None:
    """It has seen more than the servers have, which refuse such clients; kazoo would try forever."""
    with fencelock.ZooKeeper(f"{zookeeper_server.url}/wiped", session_timeout=4.0) as authority:
        for _ in range(20):
            before = authority.acquire(("r",), ttl=1.0, timeout=5.0)
            authority.release(before)
        zookeeper_server.wipe()
        after = authority.acquire(("r",), ttl=1.0, timeout=20.0)
    assert after.tokens > before.tokens


def test_a_watch_that_cannot_begin_is_no_error(etcd_url: str) -> None:
    """The connection is lost between the look at the line and the watch: the acquisition looks again."""
    with fencelock.Etcd(etcd_url) as authority:
        holder = authority.acquire(("r",), ttl=30.0, timeout=0)
        lost: list[object] = []

        def do(step: object) -> object:
            if isinstance(step, Watching) and not lost:
                lost.append(step)
                raise ConnectionRefusedError
            return authority.do(step)

        threading.Timer(0.5, authority.release, (holder,)).start()
        grant = _generators.run(authority.acquire_gen(("r",), ttl=2.0, timeout=5.0), do)
    assert lost
    assert grant.tokens > holder.tokens


def test_a_lease_that_ends_before_its_entry_is_made_anew(etcd_url: str) -> None:
    """A process that was paused between both, or a restored store, has no reason to fail."""
    with fencelock.Etcd(etcd_url) as authority:
        ended: list[int] = []

        def do(step: object) -> object:
            answer = authority.do(step)
            if isinstance(step, Exchange) and step.requests[0].path.endswith(b"LeaseGrant") and not ended:
                ended.append(messages.lease_and_ttl(authority.checked(*answer))[0])
                authority.do(Exchange([messages.revoke(ended[0])], 2.0))
            return answer

        began = int(time.time() * 1000)
        grant = _generators.run(authority.acquire_gen(("r",), ttl=2.0, timeout=5.0), do)
    assert ended
    assert grant.tokens[0] >> SHIFT >= began


@pytest.mark.parametrize("store", STORES)
def test_an_answer_after_the_end_of_a_lease_extends_nothing(
    store: str, request: pytest.FixtureRequest
) -> None:
    """A thread may have given the lease back when the answer comes; else there were two holders."""
    authority = KINDS[store](request.getfixturevalue(f"{store}_url"))
    with authority:

        def do_late(step: object) -> object:
            answer = authority.do(step)
            time.sleep(0.7)
            return answer

        for extend in (
            lambda grant: authority.remint_gen(grant, 5.0),
            lambda grant: extending(authority, grant),
        ):
            grant = authority.acquire(("r",), ttl=0.5, timeout=5.0)
            with pytest.raises(LockLostError):
                _generators.run(extend(grant), do_late)
            authority.release(authority.acquire(("r",), ttl=2.0, timeout=2.0))


def extending(authority: Any, grant: Grant) -> Steps[None]:
    """Extend a lease, and raise its error."""
    (outcome,) = yield from authority.extend_gen([(grant, 5.0)])
    if isinstance(outcome, Exception):
        raise outcome
