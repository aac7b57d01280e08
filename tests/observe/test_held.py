"""An error names the holder of the lock, and `assert_held` raises without the lock."""

from __future__ import annotations

import asyncio
import contextvars
import os
import pickle
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from fencelock import Lease, LockLostError, LockTimeoutError, NotHeldError, Redlock, assert_held
from fencelock.lease import holding
from proof.servers import Nodes
from tests.observe.conftest import NAMES
from tests.polling import IMPATIENT


@pytest.mark.parametrize(
    ("kind", "way"),
    [*((kind, 0.2) for kind in NAMES), ("quorum", 0), ("sqlite", "task"), ("sqlite", "try")],
    indirect=["kind"],
)
def test_a_timeout_says_by_whom_the_lock_is_held(mine: Any, other: Any, way: float | str) -> None:
    async def wait_in_a_task() -> None:
        try:
            await other.lock("order:1").aio.acquire(timeout=0.2)
        finally:
            await other.aio.close()

    def wait() -> None:
        if way == "task":
            asyncio.run(wait_in_a_task())
        else:
            other.lock("order:0", "order:1").acquire(timeout=way)

    with mine.lock("order:1", ttl=60):
        if way == "try":
            other.inspect_gen = None  # calling it would fail
            assert other.lock("order:1").try_acquire() is None
            return
        with pytest.raises(LockTimeoutError) as caught:
            wait()
    error = pickle.loads(pickle.dumps(caught.value))  # noqa: S301 - our own
    assert error.holder.pid == os.getpid()
    assert time.time() - 60 < error.holder.since < time.time() + 1
    assert error.holder_ttl is None or error.holder_ttl < 61
    assert re.search(
        rf"'order:1' is held by .+ \(process {os.getpid()} on .+\) since \d{{4}}-.+ UTC \(this process\)",
        str(error),
    )


def test_assert_held_raises_beside_and_behind_the_block_and_where_the_lease_has_ended() -> None:
    with pytest.raises(NotHeldError, match=r"with fenced_lock\('asserted:1'\)"):
        assert_held("asserted:1")
    with holding([Lease("asserted:1", 7)]), ThreadPoolExecutor(1) as pool:
        assert assert_held("asserted:1").token == 7
        with pytest.raises(NotHeldError):
            assert_held("asserted:2")
        with pytest.raises(NotHeldError):
            pool.submit(assert_held, "asserted:1").result()
    with holding([Lease("asserted:1", 7, expires_at=0.0)]), pytest.raises(LockLostError):
        assert_held("asserted:1")


def test_assert_held_says_that_the_block_was_left(authority: Redlock) -> None:
    with authority.lock("asserted:1"):
        pass
    with pytest.raises(NotHeldError, match="a block of it was left"):
        assert_held("asserted:1")


def test_nodes_that_die_meanwhile_leave_the_error_as_it_was(make_nodes: Callable[..., Nodes]) -> None:
    nodes = make_nodes(1)
    with Redlock(nodes.urls, **IMPATIENT) as mine, Redlock(nodes.urls, **IMPATIENT) as other:
        mine.init()
        contextvars.copy_context().run(mine.lock("order:1").acquire)
        lock, seen = other.lock("order:1"), other.inspect_gen

        def inspect_gen(resources: tuple[str, ...]) -> Any:
            nodes[0].kill()
            return seen(resources)

        other.inspect_gen = inspect_gen  # type: ignore[method-assign]
        with pytest.raises(LockTimeoutError, match="held by another") as caught:
            lock.acquire(timeout=0.1)
    assert caught.value.holder is None
