"""One worker process of `benchmarks.acquisitions`: acquires locks in many ways, and writes down what it got.

What it writes is the evidence, so it is kept simple: the clock is read right outside the call to be
judged, and a line is written for each resource of each attempt. Most holders are quick and well-behaved;
the others are there to make leases end in every way that they can end in.
"""

from __future__ import annotations

import contextvars
import ctypes
import logging
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO, TypeVar

from benchmarks.history import Acquisition, Failure, write_line
from benchmarks.sequential import CountingRedlock
from fencelock import Redlock, fenced_lock
from fencelock.authority.redlock.protocol import Broadcast, Request
from fencelock.errors import AuthorityError, LockLostError, LockTimeoutError

#: Longest lease in seconds; a node that comes back blank is admitted again after so long.
MAX_TTL = 2.0
_T = TypeVar("_T")

#: Shorter than the injected pauses: acquisitions go on without a paused node, which then answers late.
NODE_TIMEOUT = 0.1


@dataclass(frozen=True, slots=True)
class Assignment:
    """What a worker is told.

    Attributes:
        seed: of its own choices, different for each worker.
        urls: the nodes.
        resources: how many there are.
        control: whether to use the foil instead of fencelock.
        log: the file to write.
    """

    seed: str
    urls: Sequence[str]
    resources: int
    control: bool
    log: Path


@dataclass(frozen=True, slots=True)
class Plan:
    """How one holder is going to behave.

    Attributes:
        resources: what to lock, together.
        ttl: seconds.
        timeout: seconds to wait for others.
        work: seconds to hold it; longer than the ttl to overstay.
        vanish: end like a process that crashed, without a release.
    """

    resources: tuple[str, ...]
    ttl: float
    timeout: float = 5.0
    work: float = 0.0
    vanish: bool = False


def choose_plan(rng: random.Random, resources: int, *, several: bool) -> Plan:
    """Return what to do next. Some resources are much more wanted than others."""
    first, second = (f"r{int(resources * rng.random() ** 2)}" for _ in range(2))
    kind = rng.random()
    if kind < 0.005:
        ttl = rng.uniform(0.03, 0.1)
        return Plan((first,), ttl, work=ttl * rng.uniform(1.1, 3.0))
    if kind < 0.010:
        return Plan((first,), rng.uniform(0.03, 0.15), vanish=True)
    if kind < 0.080:  # about as long as a round of votes: it may end before the last vote is there
        return Plan((first,), rng.uniform(0.010, 0.04), timeout=0.5)
    if kind < 0.100 and several and first != second:
        return Plan((first, second), ttl=MAX_TTL)
    return Plan((first,), ttl=MAX_TTL)


class ObservedRedlock(Redlock):
    """Redlock that counts what it asked the nodes for since `asked` and `nonces` were last cleared."""

    def __init__(self, urls: Sequence[str]) -> None:
        self.asked: Counter[str] = Counter()
        self.nonces: set[str] = set()
        super().__init__(urls, node_timeout=NODE_TIMEOUT)

    def _run(self, generator: Generator[Request, Any, _T], *wait: Callable[[float], None]) -> _T:
        return super()._run(self._observe(generator), *wait)

    def _observe(self, generator: Generator[Request, Any, _T]) -> Generator[Request, Any, _T]:
        reply = None
        while True:
            try:
                request = generator.send(reply)
            except StopIteration as stop:
                return stop.value  # type: ignore[no-any-return]
            if isinstance(request, Broadcast):
                self.asked[request.command.script] += 1
                if request.command.script == "acquire":
                    self.nonces.add(request.command.nonce)
            reply = yield request


def work(number: int, assignment: Assignment, done: ctypes.Array[ctypes.c_ulonglong]) -> None:
    """Acquire locks until told to stop.

    Args:
        number: which worker this is; its place in `done`.
        assignment: what to do.
        done: how much each worker has acquired; after these, whether to stop.
    """
    logging.getLogger("fencelock").setLevel(logging.ERROR)  # a paused node is late to release, as intended
    parent = os.getppid()
    rng = random.Random(assignment.seed)
    authority = CountingRedlock(assignment.urls) if assignment.control else ObservedRedlock(assignment.urls)
    with assignment.log.open("w", buffering=1) as log:
        while not done[-1] and os.getppid() == parent:
            plan = choose_plan(rng, assignment.resources, several=not assignment.control)
            # A context of its own, for a holder that vanishes leaves its lease in it.
            done[number] += contextvars.Context().run(hold, plan, authority, log)


def hold(plan: Plan, authority: ObservedRedlock | CountingRedlock, log: TextIO) -> int:
    """Carry out a plan and write down what came of it; return how many resources were acquired."""
    lock = fenced_lock(
        *plan.resources, ttl=plan.ttl, timeout=plan.timeout, renew=False, authority=authority
    )  # to overstay, and to vanish, as a process does that is held up or killed as a whole
    if isinstance(authority, ObservedRedlock):
        authority.asked.clear()
        authority.nonces.clear()
    began = time.monotonic_ns()
    try:
        lock.acquire()
    except (LockTimeoutError, AuthorityError) as error:
        ended = time.monotonic_ns()
        for resource in plan.resources:
            write_line(log, Failure(resource, began, ended, type(error).__name__, str(error)))
        return 0
    completed = time.monotonic_ns()
    bids, confirms = 1, 0
    if isinstance(authority, ObservedRedlock):
        bids, confirms = len(authority.nonces), authority.asked["confirm"]
    leases = [(lease.resource, lease.fencing_token, int(lease.expires_at * 1e9)) for lease in lock.leases]
    if plan.work:
        time.sleep(plan.work)
    worked_until = time.monotonic_ns()
    if not plan.vanish:
        with suppress(LockLostError):
            lock.release()
    for resource, token, valid_until in leases:
        write_line(
            log, Acquisition(resource, began, completed, token, valid_until, worked_until, bids, confirms)
        )
    return len(leases)
