"""A thread that starts when it is needed and ends when it is idle: see `_workers.py`."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

import pytest

from fencelock import _threads
from fencelock._workers import Worker
from tests.polling import eventually

NAME = "fencelock-test"


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == NAME]


class Work:
    """Work for a worker: the names of the tasks, each with its time."""

    def __init__(self, idle: float = 0.0) -> None:
        self.planned: dict[str, float] = {}
        self.done: list[str] = []
        self.turns = self.at_once = self.most_at_once = 0
        self.hold_up: Callable[[], object] = lambda: None
        self.worker = Worker(NAME, self.turn, idle)

    def plan(self, name: str, after: float = 0.0) -> None:
        """Note the work, and then wake the worker if it comes too late by itself."""
        at = self.planned[name] = time.monotonic() + after
        if at < self.worker.wakes_at:
            self.worker.wake()

    def turn(self) -> float:
        self.turns += 1
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        for name, at in list(self.planned.items()):
            if at <= time.monotonic():
                self.done.append(name)
                del self.planned[name]
        self.hold_up()
        self.at_once -= 1
        return min(self.planned.values(), default=math.inf)


def test_many_callers_at_once_start_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[threading.Thread] = []
    start = _threads.start

    def start_slowly(thread: threading.Thread) -> None:
        started.append(thread)
        time.sleep(0.1)
        start(thread)

    monkeypatch.setattr(_threads, "start", start_slowly)
    work = Work(idle=1.0)
    callers = [threading.Thread(target=work.plan, args=(str(each),)) for each in range(8)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert eventually(lambda: sorted(work.done) == [str(each) for each in range(8)])
    assert len([each for each in started if each.name == NAME]) == 1


def test_work_that_is_noted_while_the_thread_looks_or_ends_is_done() -> None:
    work = Work()
    for each in range(2000):
        work.plan(str(each))
        if each % 3:
            time.sleep(each % 7 * 1e-5)
    assert eventually(lambda: len(work.done) == 2000)
    assert work.most_at_once == 1
    assert eventually(lambda: not threads())


def test_work_that_is_noted_in_the_last_turn_is_done() -> None:
    work = Work()

    def note() -> None:
        work.hold_up = lambda: None
        threading.Thread(target=work.plan, args=("late",)).start()
        time.sleep(0.1)

    work.hold_up = note
    work.plan("first")
    assert eventually(lambda: work.done == ["first", "late"])


@pytest.mark.timed
def test_a_thread_with_a_plan_does_not_end_when_it_is_idle() -> None:
    """It stays asleep until its time, or until it is woken for an earlier one."""
    work = Work(idle=0.05)
    work.plan("late", 0.5)
    (thread,) = threads()
    work.plan("early", 0.2)
    assert eventually(lambda: work.done == ["early", "late"])
    assert work.turns <= 5
    assert eventually(lambda: not thread.is_alive())
    work.plan("again")
    assert eventually(lambda: work.done[-1] == "again")


def test_the_next_work_starts_the_thread_if_there_were_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_thread: object) -> None:
        raise RuntimeError("can't start new thread")

    work = Work()
    with monkeypatch.context() as patched:
        patched.setattr(_threads, "start", refuse)
        with pytest.raises(RuntimeError):
            work.plan("first")
    work.plan("second")
    assert eventually(lambda: work.done == ["first", "second"])


def test_the_next_work_starts_a_thread_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    work = Work()

    def fail() -> None:
        work.hold_up = lambda: None
        raise LookupError

    work.hold_up = fail
    work.plan("first")
    assert eventually(lambda: not threads())
    work.plan("second")
    assert eventually(lambda: work.done == ["first", "second"])


@contextmanager
def handling(handle: Callable[[], object]) -> Iterator[None]:
    """Call a function when SIGUSR1 arrives."""

    def call(_number: int, _frame: FrameType | None) -> None:
        handle()

    before = signal.signal(signal.SIGUSR1, call)
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("raises", [True, False])
@pytest.mark.parametrize("is_started", [True, False])
def test_a_signal_handler_in_the_midst_of_a_start(
    monkeypatch: pytest.MonkeyPatch, *, raises: bool, is_started: bool
) -> None:
    work = Work(idle=5.0)
    work.hold_up = lambda: time.sleep(0.05)
    start = threading.Thread.start
    struck: list[int] = []

    def strike(self: threading.Thread) -> None:
        if is_started:
            start(self)
        if not struck:
            struck.append(1)
            signal.raise_signal(signal.SIGUSR1)
        if not is_started:
            start(self)

    def handle() -> None:
        if raises:
            raise KeyboardInterrupt
        work.plan("of the handler")

    with monkeypatch.context() as patched, handling(handle):
        patched.setattr(threading.Thread, "start", strike)
        with suppress(KeyboardInterrupt):
            work.plan("first")
        for each in range(5):
            work.plan(f"{each}")
            time.sleep(0.02)
    assert eventually(lambda: not work.planned)
    assert work.most_at_once == 1
    assert {"first", *"01234"} <= set(work.done)
    assert work.worker.close(30)
    assert eventually(lambda: not threads())


def test_a_thread_that_was_replaced_in_its_turn_makes_no_other() -> None:
    work, inside, over = Work(idle=5.0), threading.Event(), threading.Event()

    def wait() -> None:
        work.hold_up = lambda: None
        inside.set()
        over.wait(30)

    work.hold_up = wait
    work.plan("first")
    (first,) = threads()
    inside.wait()
    work.worker._thread = None
    work.plan("second")
    assert len(threads()) == 2
    time.sleep(0.1)
    assert work.done == ["first"]
    over.set()
    assert eventually(lambda: work.done == ["first", "second"])
    assert eventually(lambda: not first.is_alive())
    work.plan("third", 0.1)
    assert eventually(lambda: work.done[-1] == "third")
    assert (work.most_at_once, len(threads())) == (1, 1)
    work.worker.close(30)


def test_close_waits_for_the_turn_and_a_later_wake_starts_again() -> None:
    """The first one gives up, because the turn takes too long."""
    work, over = Work(idle=5.0), threading.Event()
    work.hold_up = lambda: over.wait(30)
    work.plan("first")
    assert eventually(lambda: work.done == ["first"])
    assert not work.worker.close(0.05)
    over.set()
    assert work.worker.close(30)
    assert eventually(lambda: not threads())
    work.plan("second")
    assert eventually(lambda: work.done == ["first", "second"])
    assert work.worker.close(30)


def test_only_its_own_turn_is_the_caller() -> None:
    said: list[bool] = []
    work = Work()
    work.hold_up = lambda: said.append(work.worker.is_caller)
    work.plan("first")
    assert eventually(lambda: said == [True])
    assert not work.worker.is_caller


@pytest.mark.parametrize("held", ["_mutex", "_turns"])
def test_a_child_has_no_thread_and_starts_its_own(held: str) -> None:
    work, inside, over = Work(idle=5.0), threading.Event(), threading.Event()
    work.plan("of the parent")
    assert eventually(lambda: work.done == ["of the parent"] and work.worker.wakes_at < math.inf)

    def hold() -> None:
        mutex: Any = getattr(work.worker, held)
        with mutex:
            inside.set()
            over.wait(30)

    holder = threading.Thread(target=hold)
    holder.start()
    inside.wait()
    child = os.fork()
    if not child:  # pragma: no cover - measured in the parent
        signal.alarm(40)
        code = 1
        with suppress(BaseException):
            work.plan("of the child")
            code = 0 if eventually(lambda: work.done[-1] == "of the child") else 2
        os._exit(code)
    over.set()
    holder.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    work.plan("again")
    assert eventually(lambda: work.done == ["of the parent", "again"])
    work.worker.close(30)
