"""A command that is too large for one write goes out in parts, when the socket takes more."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from typing import Any

import pytest

from fencelock import Redlock, fenced_lock
from fencelock.authority.redlock.transport import connector
from proof.servers import Nodes
from tests.redlock.views import locks_on

pytestmark = pytest.mark.timed

NAMES = [f"order:{number}:".ljust(100, "x") for number in range(1500)]


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


def test_a_large_lock_is_acquired_at_the_first_try(narrow: Redlock, nodes: Nodes) -> None:
    """And given back on all nodes."""
    began = time.monotonic()
    with narrow.lock(*NAMES, timeout=0):
        assert time.monotonic() - began < 0.9, "it has waited for answers to what was not sent"
        assert [len(locks_on([node])) for node in nodes] == [len(NAMES)] * len(nodes)
    assert not locks_on(nodes)


def test_another_thread_reads_for_all_meanwhile(narrow: Redlock, nodes: Nodes) -> None:
    """It waits for a lock, and does not know that one of its sockets has more to say."""

    def wait() -> None:
        with narrow.lock("held", timeout=20):
            pass

    with narrow.lock("held"):
        waiting = threading.Thread(target=wait)
        waiting.start()
        time.sleep(0.3)
        began = time.monotonic()
        with narrow.lock(*NAMES, timeout=0):
            assert time.monotonic() - began < 0.9
    waiting.join(20)
    assert not locks_on(nodes)


def test_no_answer_leaves_nothing(narrow: Redlock, nodes: Nodes) -> None:
    """One name is held, so all are refused; the RELEASE of the rest goes out, too."""
    with Redlock(nodes.urls) as other, other.lock(NAMES[7]), narrow.lock("warm"):
        for _ in range(3):
            assert narrow.lock(*NAMES).try_acquire() is None
        assert all(len(locks_on([node])) == 2 for node in nodes)


def test_coroutines_write_the_rest_too(narrow: Redlock) -> None:
    """The loop says when the socket takes more."""

    async def main() -> float:
        async with narrow.lock("warm"):
            began = time.monotonic()
            async with narrow.lock(*NAMES, timeout=0):
                return time.monotonic() - began

    assert asyncio.run(main()) < 0.9


def test_the_largest_lock() -> None:
    """One more is refused with a sentence, before anything is asked."""
    names = [f"n{number}" for number in range(5001)]
    fenced_lock(*names[:5000])
    with pytest.raises(ValueError, match=r"at most 5000 .* 5001"):
        fenced_lock(*names)
