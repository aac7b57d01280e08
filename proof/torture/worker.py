"""One worker process: takes locks in many ways, writes under some of them, and writes down what it saw.

What it writes down is the evidence, so it is kept simple: the clock is read right outside the call to be
judged. A worker is blocking code, or many tasks of asyncio; what it does under a lock is the same.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import multiprocessing
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakSet

from fencelock import Etcd, ZooKeeper
from fencelock._generators import Call, Steps
from fencelock._locking import fenced_lock
from fencelock.authority.redlock.redlock import Redlock
from fencelock.errors import FencelockError, LockLostError
from fencelock.holder import LockInfo
from fencelock.lease import Lease
from fencelock.lock.lock import FencedLock
from proof.torture.edges import Strikes, Struck, narrow_sockets, weaken
from proof.torture.history import Style
from proof.torture.journal import Journal, Notes
from proof.torture.keeper import Keeper
from proof.torture.naive import NaiveEtcd, NaiveLeases, NaiveRedlock, NaiveZooKeeper
from proof.torture.plan import Plan, choose_plan
from proof.torture.settings import ETCD, Settings
from proof.torture.steps import run, run_in_task, sleep
from proof.torture.storage import Storage
from proof.torture.table import async_engine_on, authority_on, engine_on

_T = TypeVar("_T")

#: Redlock for workers that do not wait for paused nodes for long, which then answer late.
IMPATIENT: dict[str, Any] = {"node_timeout": 0.2, "connect_timeout": 0.5, "outage_grace": 0.5}
_THREADS = 8
#: Of Linux' prctl: have the kernel send a signal when the parent dies.
_PR_SET_PDEATHSIG = 1
#: Threads that share the connections of one in whose calls a handler raises; how often it closes those then.
_CROWD = 4
_SHARE_CLOSED = 0.3
#: Seconds after the longest lease when nothing of it is left.
_LATE = 0.5
#: Seconds to wait after an attempt that failed, so that an outage does not fill the journal.
_BACK_OFF = 0.05


@dataclass(frozen=True, slots=True)
class Places:
    nodes: Sequence[str]
    proxies: Sequence[str]
    namespace: str
    databases: Sequence[str]  #: URLs, for the workers in turn
    leases: Sequence[str]  #: the same of the database or store that grants them, if one does
    folder: Path


@dataclass(frozen=True, slots=True)
class Assignment:
    number: int
    life: int  #: how often there has been a worker of this number before
    settings: Settings
    places: Places
    proxied: (
        bool  #: whether it sees the nodes through proxies; then it admits none, for they have other addresses
    )
    journal: Path
    log: Path
    tasks: int  #: 0 for blocking code

    @property
    def urls(self) -> Sequence[str]:
        return self.places.proxies if self.proxied else self.places.nodes

    @property
    def database(self) -> str:
        return self.places.databases[self.number % len(self.places.databases)]

    @property
    def leases(self) -> str:
        return self.places.leases[self.number % len(self.places.leases)]


@dataclass(frozen=True, slots=True)
class Board:
    """Memory that all processes of a run share."""

    acquired: ctypes.Array[ctypes.c_ulonglong]  #: how many locks each worker has acquired
    thinking: ctypes.Array[ctypes.c_longlong]  #: how many of its holders have read and not yet written
    over: ctypes.Array[ctypes.c_byte]  #: one value: whether to stop


def work(assignment: Assignment, board: Board) -> None:
    _leave_the_terminal(assignment.log)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    threading.Thread(target=_end_with_the_run, daemon=True).start()
    faults = assignment.settings.faults
    if "partial-write" in faults:
        narrow_sockets()
    if not assignment.settings.mends:
        weaken(faults)
    worker = Worker(assignment, board)
    if assignment.tasks:
        asyncio.run(worker.run_tasks())
    else:
        worker.run()


def _leave_the_terminal(log: Path) -> None:
    """Leave Ctrl-C to the parent, and write errors to the log."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.setsid()
    with log.open("ab") as file:
        os.dup2(file.fileno(), sys.stderr.fileno())
    # Nodes that hang are late to release, as intended.
    logging.getLogger("fencelock").setLevel(logging.ERROR)


def _end_with_the_run() -> None:
    """End when the process that makes the run has ended, whatever ended it.

    It takes the server along that forks the workers, and would live for as long as any of them. Then, on
    Linux, the kernel ends those that are paused and cannot see it themselves.
    """
    run = multiprocessing.parent_process()
    assert run is not None
    run.join()
    os.kill(os.getppid(), signal.SIGKILL)
    os._exit(1)


class Worker:
    def __init__(self, assignment: Assignment, board: Board) -> None:
        self._number = assignment.number
        self._settings = assignment.settings
        self._tasks = assignment.tasks
        self._board = board
        board.thinking[assignment.number] = 0  # an earlier process of this worker may have been killed there
        self._rng = random.Random(f"{assignment.settings.seed}/{assignment.number}/{assignment.life}")
        self._notes = Notes(assignment.number, journal := Journal(assignment.journal))
        self._storage = Storage(
            engine_on(assignment.database),
            async_engine_on(assignment.database) if assignment.tasks else None,
            journal,
            assignment.number,
            guard=assignment.settings.guard,
            thinking=self._thinking,
        )
        self._authority = _authority(assignment)
        self._keepers = _keepers(assignment, self._notes, self._over)
        self._lost: WeakSet[Lease] = WeakSet()
        self._strikes = Strikes() if "signal" in assignment.settings.faults else None

    def run(self) -> None:
        for keeper in self._keepers:
            threading.Thread(target=run, args=(keeper.work(),), daemon=True).start()
        crowd = [
            threading.Thread(target=run, args=(self._work(),)) for _ in range(_CROWD if self._strikes else 0)
        ]
        for thread in crowd:
            thread.start()
        run(self._work())
        for thread in crowd:
            thread.join()
        run(self._look_for_left())

    async def run_tasks(self) -> None:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(_THREADS))
        async with asyncio.TaskGroup() as group:
            for keeper in self._keepers:
                group.create_task(run_in_task(keeper.work()))
            for _ in range(self._tasks):
                group.create_task(run_in_task(self._work()))
        await run_in_task(self._look_for_left())

    def _work(self) -> Steps[None]:
        while not self._over():
            plan = choose_plan(self._rng, self._settings)
            lock = self._lock(plan)
            before = yield self._storage.read_before(plan)
            began = time.monotonic_ns()
            try:
                yield Call(self._exposed(lock.acquire), lock.aio.acquire)
            except (Exception, Struck) as error:  # noqa: BLE001 - the checker says which are none of ours
                self._notes.failed(plan.resources, began, error)
                if lock.leases:  # it was struck when it had them
                    lock.release()
                if not isinstance(error, Struck):
                    yield sleep(_BACK_OFF)
                elif self._rng.random() < _SHARE_CLOSED:
                    self._authority.close()
                continue
            self._note_acquisition(lock, plan, began)
            if plan.work:
                yield sleep(plan.work)
            if plan.writes and not (yield self._storage.add(_tokens(lock, plan), plan, before)):
                yield from self._settle(lock, plan)
            yield from self._release(lock, plan)

    def _settle(self, lock: FencedLock[Any], plan: Plan) -> Steps[None]:
        """After a COMMIT in doubt, mint a new token and add with that."""
        old, stopped = _tokens(lock, plan), time.monotonic_ns()
        with suppress(FencelockError):
            yield Call(lock.remint, lock.aio.remint)
            self._note_acquisition(lock, plan, stopped)
            self._notes.released(old, stopped)
            yield self._storage.add(_tokens(lock, plan), _settling(plan), {})

    def _release(self, lock: FencedLock[Any], plan: Plan) -> Steps[None]:
        tokens, worked_until, leases = _tokens(lock, plan), time.monotonic_ns(), lock.leases
        try:
            yield Call(self._exposed(lock.release), lock.aio.release)
        except (Exception, Struck) as error:  # noqa: BLE001 - as above
            self._notes.released(tokens, worked_until, type(error).__name__)
            if lock.leases:  # it was struck before it gave them back
                with suppress(FencelockError):
                    lock.release()
        else:
            # A COMMIT under a lease that was lost had it only logged.
            lost = any(lease._why_lost or lease in self._lost for lease in leases)
            self._notes.released(tokens, worked_until, LockLostError.__name__ if lost else "")

    def _exposed(self, call: Callable[[], _T]) -> Callable[[], _T]:
        return call if self._strikes is None else self._strikes.expose(call)

    def _look_for_left(self) -> Steps[None]:
        """Note what this process still holds, when it has given back all."""
        if not (self._settings.gentle and self._settings.quorum):
            return
        yield sleep(self._settings.ttl + _LATE)
        found: Sequence[LockInfo] = yield Call(self._authority.inspect, self._authority.aio.inspect)
        for lock in found:
            if lock.holder is not None and lock.holder.pid == os.getpid():
                self._notes.left(lock.resource)

    @contextmanager
    def _thinking(self) -> Iterator[None]:
        """Let the others see that this would be a bad moment to be paused."""
        self._board.thinking[self._number] += 1
        try:
            yield
        finally:
            self._board.thinking[self._number] -= 1

    def _over(self) -> bool:
        return bool(self._board.over[0])

    def _lock(self, plan: Plan) -> FencedLock[Any]:
        lock = fenced_lock(*plan.resources, *plan.padding, **plan.lock, authority=self._authority)
        lock.on_lost(self._lost.add)
        return lock

    def _note_acquisition(self, lock: FencedLock[Any], plan: Plan, began: int) -> None:
        leases = lock.leases[: len(plan.resources)]
        self._notes.acquired(leases, began)
        self._board.acquired[self._number] += len(leases)


def _authority(assignment: Assignment) -> Any:
    """Return an `Authority`; not the naive ones can be closed and inspected."""
    settings = assignment.settings
    if settings.on_database:
        if not settings.quorum:
            return NaiveLeases(assignment.leases)
        return authority_on(assignment.leases, for_tasks=bool(assignment.tasks))
    if settings.on_store:
        return store_on(assignment.leases, settings)
    if not settings.quorum:
        return NaiveRedlock(assignment.urls)
    patience = {} if settings.gentle else IMPATIENT
    return Redlock(
        assignment.urls, namespace=assignment.places.namespace, recover=not assignment.proxied, **patience
    )


def store_on(url: str, settings: Settings) -> Any:
    if settings.authority == ETCD:
        return Etcd(url) if settings.quorum else NaiveEtcd(url)
    # The servers round it; a lease lasts two thirds of it.
    seconds = 2 * settings.ttl
    return ZooKeeper(url, session_timeout=seconds) if settings.quorum else NaiveZooKeeper(url, seconds)


def _keepers(assignment: Assignment, notes: Notes, over: Callable[[], bool]) -> list[Keeper]:
    """Return the keeper of the worker's lease, and the waiter for that of the next worker."""
    settings = assignment.settings
    if not settings.quorum or not settings.on_nodes or "node-rolling" not in settings.faults:
        return []
    ours = assignment.number

    def keeper(kept: int) -> Keeper:
        # Each has nodes of his own: he hears of them only by what he does himself.
        authority = Redlock(
            assignment.urls, namespace=assignment.places.namespace, recover=False, **IMPATIENT
        )
        return Keeper(kept, settings.ttl, authority, notes, over)

    return [keeper(kept) for kept in sorted({ours, (ours + 1) % settings.workers})]


def _settling(plan: Plan) -> Plan:
    """Return how to add again after a COMMIT in doubt: what the lost transaction had written is claimed."""
    return plan if plan.style is Style.GATE else replace(plan, style=Style.CLAIM)


def _tokens(lock: FencedLock[Any], plan: Plan) -> dict[str, int]:
    """Return the tokens of the resources that are written to and noted, which are the first."""
    return {lease.resource: lease.token for lease in lock.leases[: len(plan.resources)]}
