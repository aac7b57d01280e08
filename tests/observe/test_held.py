"""An error names the holder of the lock, and `assert_held` raises without the lock."""

from __future__ import annotations

import asyncio
import contextvars
import os
import pickle
import re
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from fencelock import LockLostError, LockTimeoutError, NotHeldError, Redlock, assert_held
from proof.servers import Nodes
from tests.polling import IMPATIENT


@pytest.mark.parametrize("timeout", [0, 0.2])
def test_timeout_says_by_whom(mine: Any, other: Any, timeout: float) -> None:
    """In the sentence and as attributes; another process gets it whole."""
    with mine.lock("order:1", ttl=20), pytest.raises(LockTimeoutError) as caught:
        other.lock("order:0", "order:1").acquire(timeout=timeout)
    error = pickle.loads(pickle.dumps(caught.value))  # noqa: S301 - our own
    assert error.holder.pid == os.getpid()
    assert time.time() - 60 < error.holder.since < time.time() + 1
    assert error.holder_ttl is None or error.holder_ttl < 21
    assert re.search(
        rf"'order:1' is held by .+ \(process {os.getpid()} on .+\) since \d{{4}}-.+ UTC \(this process\)",
        str(error),
    )


def test_timeout_in_a_task_says_by_whom(mine: Any, other: Any) -> None:
    """The same behind `async with`."""

    async def main() -> None:
        try:
            async with other.lock("order:1", timeout=0.2):
                pass
        finally:
            await other.aio.close()

    with mine.lock("order:1"), pytest.raises(LockTimeoutError) as caught:
        asyncio.run(main())
    assert caught.value.holder is not None
    assert caught.value.holder.pid == os.getpid()


def test_a_try_asks_nothing_more(mine: Any, other: Any) -> None:
    """A try returns None, so no reader would see the sentence."""
    other.inspect_gen = mine.inspect_gen = None  # calling it would fail
    with mine.lock("order:1"):
        assert other.lock("order:1").try_acquire() is None


def test_nodes_that_die_meanwhile_leave_the_error_as_it_was(make_nodes: Callable[..., Nodes]) -> None:
    """The timeout is what the caller has to know."""
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


def test_assert_held(authority: Redlock) -> None:
    """Inside the block, and in what it calls; not beside it, behind it, or in another thread."""
    with pytest.raises(NotHeldError, match=r"with fenced_lock\('asserted:1'\)"):
        assert_held("asserted:1")
    with authority.lock("asserted:1") as token:
        assert assert_held("asserted:1").token == token
        with pytest.raises(NotHeldError):
            assert_held("asserted:2")
        found: list[BaseException] = []

        def work() -> None:
            try:
                assert_held("asserted:1")
            except NotHeldError as error:
                found.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert len(found) == 1
    with pytest.raises(NotHeldError, match="its block was left"):
        assert_held("asserted:1")


@pytest.mark.timed
def test_assert_held_of_a_lease_that_has_ended(authority: Redlock) -> None:
    """The work must not go on."""
    with authority.lock("asserted:1", ttl=0.1, renew=False, if_lost="warn"):
        time.sleep(0.15)
        with pytest.raises(LockLostError):
            assert_held("asserted:1")
