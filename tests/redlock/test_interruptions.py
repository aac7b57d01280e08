"""A signal handler may raise at any line of a lock: nothing stays locked, and answers still match."""

from __future__ import annotations

import functools
import gc
import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress

import pytest

from fencelock import FencedLock, Redlock
from fencelock.errors import LockLostError, LockTimeoutError
from fencelock.lease import held_leases
from proof.servers import Nodes
from tests.polling import eventually
from tests.redlock.strikes import interrupt_at
from tests.redlock.views import is_held_everywhere, locks_on

pytestmark = pytest.mark.timed

#: Takes a lock and its authority; returns the function to interrupt.
Prepare = Callable[[FencedLock[int], Redlock], Callable[[], object]]


def take(authority: Redlock, resource: str = "r", timeout: float = 10.0) -> int:
    """Acquire and release once; return the token."""
    with authority.lock(resource, timeout=timeout) as token:
        return token


def _acquire(lock: FencedLock[int], _: Redlock) -> Callable[[], object]:
    return lock.acquire


def _connect(lock: FencedLock[int], authority: Redlock) -> Callable[[], object]:
    authority.close()
    return lock.acquire


def _nest(lock: FencedLock[int], _: Redlock) -> Callable[[], object]:
    def enter_twice() -> None:
        with lock, lock:
            pass

    return enter_twice


def _of_a_holder(
    method: str, *arguments: object
) -> Callable[[FencedLock[int], Redlock], Callable[[], object]]:
    def prepare(lock: FencedLock[int], _: Redlock) -> Callable[[], object]:
        lock.acquire()
        return functools.partial(getattr(lock, method), *arguments)

    return prepare


#: What a handler interrupts, at each n-th line, on how many nodes. Connecting has many lines that are alike.
ACTIONS = {
    "acquire": (_acquire, 1, 3),
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
                token = take(client, timeout=5)
                assert token > last, f"at line {line}"
                last = token
    assert line > 100
    gc.collect()  # sockets of interrupted connections; elsewhere they would count as a leak


@pytest.mark.parametrize("handler_does", ["lock", "close"])
def test_handler_that_uses_the_authority_that_it_interrupts_gets_a_sentence(
    authority: Redlock, rival: Redlock, handler_does: str
) -> None:
    """The wait goes on as if nothing had been asked for."""
    sentences = []

    def handle(*_: object) -> None:
        try:
            take(authority, "of the handler", timeout=5) if handler_does == "lock" else authority.close()
        except RuntimeError as error:
            sentences.append(str(error))

    before = signal.signal(signal.SIGUSR1, handle)
    try:
        with rival.lock("r"):
            timer = threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGUSR1))
            timer.start()
            with pytest.raises(LockTimeoutError):
                take(authority, timeout=0.6)
            timer.join()
    finally:
        signal.signal(signal.SIGUSR1, before)
    (sentence,) = sentences
    assert "has interrupted a lock call" in sentence
    assert take(authority, timeout=5) > 0


def test_keyboard_interrupt_while_waiting_leaves_no_lock(
    authority: Redlock, rival: Redlock, nodes: Nodes
) -> None:
    """Ctrl-C during the wait for another holder."""
    with authority.lock("r"):
        timer = threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            take(rival, timeout=5)
        timer.join()
        assert is_held_everywhere(nodes.urls)
    assert eventually(lambda: locks_on(nodes) == [])
    assert take(authority, timeout=0) > 0
