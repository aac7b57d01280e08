"""Forked children start over: see `_process.py`."""

from __future__ import annotations

import gc
import os
import runpy
import signal
import sys
import threading
import types
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any
from weakref import ref

import pytest

from fencelock import _process
from tests.programs import printed


def in_child(is_good: Callable[[], bool]) -> bool:
    """Fork, and return what a function returns in the child."""
    child = os.fork()
    if not child:  # pragma: no cover - measured in the parent
        signal.alarm(40)
        code = 1
        try:
            code = 0 if is_good() else 2
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


class Counter:
    """An object that counts the forks before it."""

    def __init__(self, name: str = "") -> None:
        self.name, self.forks = name, 0
        self.mutex = threading.Lock()
        _process.start_over_in_children(self)

    def begin_in_child(self) -> None:
        self.forks += 1
        self.mutex = threading.Lock()


def registered() -> list[Counter]:
    return [each for each in list(_process._objects) if isinstance(each, Counter)]


class Broken(Counter):
    """An object that cannot start over."""

    def begin_in_child(self) -> None:
        super().begin_in_child()
        raise LookupError("it is broken")


def test_children_and_grandchildren_start_over() -> None:
    ours = Counter()

    def grandchild() -> bool:
        return (ours.forks, theirs.forks) == (2, 1)

    def child() -> bool:
        global theirs  # noqa: PLW0603 - the grandchild reads it
        theirs = Counter()
        return ours.forks == 1 and in_child(grandchild)

    assert in_child(child)
    assert ours.forks == 0


theirs: Counter


def test_a_mutex_that_another_thread_holds_is_free_in_the_child() -> None:
    ours, held, over = Counter(), threading.Event(), threading.Event()

    def hold() -> None:
        with ours.mutex:
            held.set()
            over.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    try:
        assert in_child(lambda: ours.mutex.acquire(timeout=20))
    finally:
        over.set()
        thread.join()


def test_an_object_that_is_freed_is_forgotten() -> None:
    ours = Counter()
    its = ref(ours)
    del ours
    gc.collect()
    assert its() is None
    assert registered() == []


def test_one_that_fails_holds_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    counters = [Counter(), Broken(), Counter(), Broken(), Counter()]
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)
    assert in_child(lambda: [each.forks for each in counters] == [1, 2, 1, 2, 1])


def test_one_that_a_signal_handler_interrupts_starts_over_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    class Struck(Counter):
        def begin_in_child(self) -> None:
            first = not self.forks
            super().begin_in_child()
            if first:
                signal.raise_signal(signal.SIGUSR1)
            self.name = "done"

    def strike(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)
    before = signal.signal(signal.SIGUSR1, strike)
    ours = [Struck(), Struck()]
    try:
        assert in_child(lambda: [each.name for each in ours] == ["done"] * 2)
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_fork_while_threads_register() -> None:
    over = threading.Event()

    def register() -> None:
        kept = []
        while not over.is_set():
            kept.append(Counter())
            del kept[:-10]

    threads = [threading.Thread(target=register) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(20):
            assert in_child(
                lambda: all(each.forks == 1 for each in list(_process._objects) if isinstance(each, Counter))
            )
    finally:
        over.set()
        for thread in threads:
            thread.join()


def test_a_system_without_forks_needs_no_hook() -> None:
    room = Path(_process.__file__).read_text()
    code = f"import os; del os.register_at_fork; exec({room!r}); print(_functions)"
    assert printed("-c", code) == "[]\n"


@pytest.mark.parametrize("has_master", [True, False])
def test_uwsgi_calls_its_own_hook(monkeypatch: pytest.MonkeyPatch, *, has_master: bool) -> None:
    """It forks without those of Python. Without a master process, its decorators cannot be imported."""
    server: Any = types.SimpleNamespace(masterpid=lambda: 1, post_fork_hook=None)
    chain: list[Callable[[], object]] = []
    decorators = types.SimpleNamespace(postfork_chain=chain) if has_master else None
    monkeypatch.setitem(sys.modules, "uwsgi", server)
    monkeypatch.setitem(sys.modules, "uwsgidecorators", decorators)
    monkeypatch.delattr(os, "register_at_fork")
    room = runpy.run_path(str(_process.__file__))
    calls: list[str] = []
    room["in_forked_child"](lambda: calls.append("started over"))
    (chain[0] if has_master else server.post_fork_hook)()
    assert calls == ["started over"]
