"""A signal handler may raise at any line of a lock: nothing stays locked, and answers still match.

What a handler does with locks itself is in `tests/authorities/test_handlers`.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from contextlib import suppress

import pytest

from fencelock import FencedLock, Redlock
from fencelock.errors import LockLostError
from fencelock.lease import held_leases
from proof.servers import Nodes
from tests.redlock.strikes import interrupt_at

#: Takes a lock and its authority; returns the function to interrupt.
Prepare = Callable[[FencedLock[int], Redlock], Callable[[], object]]


def _connect(lock: FencedLock[int], authority: Redlock) -> Callable[[], object]:
    authority.close()
    return lock.acquire


def _nest(lock: FencedLock[int], _: Redlock) -> Callable[[], object]:
    def enter_twice() -> None:
        with lock, lock:
            pass

    return enter_twice


def _of_a_holder(method: str, *arguments: object) -> Prepare:
    def prepare(lock: FencedLock[int], _: Redlock) -> Callable[[], object]:
        lock.acquire()
        return functools.partial(getattr(lock, method), *arguments)

    return prepare


#: What a handler interrupts, at each n-th line, on how many nodes. Connecting has many lines that are alike.
ACTIONS: dict[str, tuple[Prepare, int, int]] = {
    "acquire": (lambda lock, _: lock.acquire, 1, 3),
    "connect": (_connect, 5, 3),
    "blocks within each other": (_nest, 1, 1),
    "release": (_of_a_holder("release"), 1, 3),
    "leave": (_of_a_holder("__exit__", None, None, None), 1, 3),
    "extend": (_of_a_holder("extend"), 1, 3),
    "remint": (_of_a_holder("remint"), 1, 3),
}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("action", ACTIONS)
def test_interruption_at_any_line_leaves_no_lock(nodes: Nodes, action: str) -> None:
    """What was interrupted on its way in is not held; what goes on to be held can be released."""
    prepare, step, count = ACTIONS[action]
    with Redlock(nodes.urls[:count]) as authority, Redlock(nodes.urls[:count]) as rival:
        authority.init(base=0)
        line, interrupted, last = 0, True, 0
        while interrupted:
            line += step
            lock = authority.lock("r", ttl=60)
            interrupted = interrupt_at(line, prepare(lock, authority))
            if lock.leases:
                assert not interrupted or action in {"release", "leave", "extend", "remint"}
                with suppress(LockLostError):
                    lock.release()
            assert lock.leases == ()
            assert held_leases() == ()
            for client in (rival, authority):
                with client.lock("r", timeout=30) as token:  # long before the ttl
                    assert token > last, f"at line {line}"
                    last = token
    assert line > 100
    gc.collect()  # sockets of interrupted connections; elsewhere they would count as a leak
