"""A command that is too large for one write goes out in parts, when the socket takes more."""

from __future__ import annotations

import asyncio
import socket
import threading
from typing import Any

import pytest
import redis

from fencelock import Redlock, fenced_lock
from fencelock.authority.redlock.transport import connector
from proof.servers import Nodes
from tests.polling import eventually
from tests.redlock.stage import NODE_KEY
from tests.redlock.views import all_wait

NAMES = [f"order:{number}:".ljust(100, "x") for number in range(1500)]


@pytest.fixture
def patience() -> dict[str, Any]:
    """One that waits for answers to what was not sent does so for longer than a test may take."""
    return {"node_timeout": 200.0}


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch, authority: Redlock) -> Redlock:
    """An authority whose sockets take some kilobytes at a time, as across a network."""
    really_open = connector._open

    def open_narrowly(*arguments: Any, **options: Any) -> connector.Opened:
        opened = really_open(*arguments, **options)
        opened.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2048)
        return opened

    monkeypatch.setattr(connector, "_open", open_narrowly)
    authority.close()  # so that they are opened again
    with authority.lock("warm"):
        return authority


def locks_of(nodes: Nodes) -> list[int]:
    counts = []
    for node in nodes:
        with redis.Redis.from_url(node.url) as client:
            counts.append(len(client.keys(f"{NODE_KEY}:l:*")))
    return counts


@pytest.mark.parametrize("another_reads", [False, True])
def test_a_large_lock_is_acquired_at_the_first_try(
    narrow: Redlock, rival: Redlock, nodes: Nodes, *, another_reads: bool
) -> None:
    """And given back on all nodes. A thread that reads for all does not know that there is more to write."""

    def wait() -> None:
        with narrow.lock("held", timeout=None):
            pass

    waiting = threading.Thread(target=wait)
    with rival.lock("held"):
        if another_reads:
            waiting.start()
            assert eventually(lambda: all_wait(nodes, 1, "held"))
        with narrow.lock(*NAMES, timeout=0):
            assert min(locks_of(nodes)) >= len(NAMES)
    if another_reads:
        waiting.join(30)
    else:
        assert not any(locks_of(nodes))  # no call is left that could write the rest
    assert eventually(lambda: not any(locks_of(nodes)))


def test_no_answer_leaves_nothing(narrow: Redlock, rival: Redlock, nodes: Nodes) -> None:
    """One name is held, so all are refused; the RELEASE of the rest goes out, too."""
    with rival.lock(NAMES[7]), narrow.lock("warm"):
        for _ in range(3):
            assert narrow.lock(*NAMES).try_acquire() is None
        assert eventually(lambda: max(locks_of(nodes)) <= 2)


def test_coroutines_write_the_rest_too(narrow: Redlock) -> None:
    async def main() -> None:
        async with narrow.lock("warm"), narrow.lock(*NAMES, timeout=0):
            pass

    asyncio.run(main())


def test_one_name_more_than_the_most_is_refused_with_a_sentence() -> None:
    names = [f"n{number}" for number in range(5001)]
    fenced_lock(*names[:5000])
    with pytest.raises(ValueError, match=r"at most 5000 .* 5001"):
        fenced_lock(*names)
