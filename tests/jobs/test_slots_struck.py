"""A signal handler may strike semaphores, readers and writers at any line: nothing stays locked."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fencelock import Database, fenced_lock, fenced_semaphore
from fencelock.lock import slots
from fencelock.lock.hold import Hold, everything_held
from fencelock.lock.renewal import ThreadRenewer
from tests.polling import eventually
from tests.redlock.strikes import InterruptionError, strike_at

ROOM = ("/fencelock/lock/",)
#: For each line, because a slot is chosen by chance.
TRIES = 4


def strike(line: int, lock: Any) -> bool:
    strike_at(line, ROOM)
    try:
        with lock:
            pass
    except InterruptionError:
        return True
    finally:
        sys.settrace(None)
    return False


def use_a_slot(line: int, mine: Any, other: Any) -> bool:
    """One of two slots is held, so that half of the tries look for the other one."""
    with fenced_semaphore("gpu", 2, authority=other):
        return strike(line, fenced_semaphore("gpu", 2, authority=mine, timeout=5))


def wait_for_a_slot(line: int, mine: Any, other: Any) -> bool:
    """Both are held until one is waited for."""
    first, second = (fenced_semaphore("gpu", 2, authority=other, reentrant=False) for _ in range(2))
    first.acquire()
    second.acquire()
    leaves = threading.Timer(0.03, first.release)
    leaves.start()
    try:
        return strike(line, fenced_semaphore("gpu", 2, authority=mine, timeout=5))
    finally:
        leaves.join()
        second.release()


def write(line: int, mine: Any, other: Any) -> bool:
    reader = fenced_lock("order:1", shared=True, readers=2, authority=other)
    reader.acquire()
    ended = threading.Event()

    def leave() -> None:
        while not ended.wait(0.005) and other.inspect("order:1") is None:
            pass
        reader.release()

    leaves = threading.Thread(target=leave)
    leaves.start()
    try:
        return strike(line, fenced_lock("order:1", readers=2, authority=mine, timeout=5))
    finally:
        ended.set()
        leaves.join()


@pytest.mark.long
@pytest.mark.timed
@pytest.mark.parametrize("use", [use_a_slot, wait_for_a_slot, write])
def test_nothing_is_left_of_what_was_struck(tmp_path: Path, use: Callable[[int, Any, Any], bool]) -> None:
    url, left, line = f"sqlite:///{tmp_path}/app.db", [], 0
    with Database(url) as mine, Database(url) as other:
        struck = [True]
        while any(struck):
            line, struck = line + 1, []
            for _ in range(TRIES):
                struck.append(use(line, mine, other))
                if not eventually(lambda: mine.inspect() == [], 0.3):
                    left += [(line, each.resource) for each in mine.inspect()]
                    for each in mine.inspect():
                        mine.force_release(each.resource)
                left += [(line, hold.name) for hold in everything_held()]
    assert left == []
    assert line > 50


def test_granted_slot_is_given_back_where_its_wait_is_noted(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/app.db"
    with Database(url) as mine, Database(url) as other:
        held = fenced_semaphore("gpu", 1, authority=other)
        held.acquire()
        leaves = threading.Timer(0.05, held.release)
        leaves.start()

        class Struck(dict[str, float]):
            def __setitem__(self, name: str, value: float) -> None:
                raise InterruptionError

        slots._full_at[mine] = Struck()
        with pytest.raises(InterruptionError):
            fenced_semaphore("gpu", 1, authority=mine, timeout=5).acquire()
        leaves.join()
        assert eventually(lambda: mine.inspect() == [], 1.0)


def test_a_part_is_given_back_where_it_was_collected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add, struck = ThreadRenewer.add, list[str]()

    def struck_once(self: ThreadRenewer, hold: Hold) -> None:
        if hold.name == "'order:1'" and not struck:
            struck.append(hold.name)
            raise InterruptionError
        add(self, hold)

    monkeypatch.setattr(ThreadRenewer, "add", struck_once)
    url = f"sqlite:///{tmp_path}/app.db"
    with Database(url) as mine, Database(url) as other:
        with (
            fenced_lock("order:1", shared=True, readers=2, authority=other),
            pytest.raises(InterruptionError),
        ):
            fenced_lock("order:1", readers=2, authority=mine, timeout=5).acquire()
        assert struck
        assert eventually(lambda: mine.inspect() == [], 1.0)
        assert everything_held() == []
