"""A fifth kind of run: clients take slots of a semaphore, and read and write under a lock with readers.

The locks are the shipped ones, `lock/slots.py` and what it stands on, with the shipped renewal. They run on
an authority that runs the shipped protocol. Two things are made here: the clock, and what `inspect` tells,
which is read from the nodes' memory instead of asked for.

Some runs are calm: nothing goes wrong, messages keep their order, and readers come without a pause. No writer
may wait long. (It may where messages overtake each other on one connection, which TCP forbids: an ACQUIRE
that arrives after its own RELEASE stands in line for a client that has gone.)
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from contextvars import Context
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from fencelock import lease as leases
from fencelock._generators import Call, Steps
from fencelock.authority.base import Grant, Wish
from fencelock.authority.redlock.protocol import holding
from fencelock.authority.redlock.protocol.messages import Sleep
from fencelock.errors import FencelockError, LockLostError
from fencelock.holder import LockInfo
from fencelock.lock import base, hold, releasing, renewal, slots, waiting
from fencelock.lock.hold import Block
from fencelock.lock.hold import Hold as LockHold
from fencelock.lock.lock import FencedLock
from fencelock.lock.renewal import BatchRenewer, tell
from proof.simulation.client import Client, Hold
from proof.simulation.judge import BESIDE, STARVED, TWICE, Violated
from proof.simulation.run import Kept, Outcome, Run
from proof.simulation.weather import Weather, draw, draw_well
from proof.simulation.world import NODE_KEY, Process, Program, Task

SLOTS = 2
READERS = 2
NAMES = ("gpu#0", "gpu#1", "row", "row#0", "row#1")
#: Seconds that a writer of a calm run may wait at most.
BOUND = 3.0
_LOOK = 0.005


class Killed(BaseException):
    """Ends the program of a client that has died. No step that it takes because of this is carried out."""


class Clock:
    """The modules `time`, `random` and `os` of the shipped locks: those of the process that runs."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self.process: Process | None = None

    def monotonic(self) -> float:
        process = self.process if threading.get_ident() == self._thread else None
        return time.monotonic() if process is None else process.now

    def choice(self, names: list[str]) -> str:
        assert self.process is not None
        return self.process.world.random.choice(sorted(names))  # they come from a set

    def new_block(self, *arguments: Any) -> Block:
        """Return a block whose owner has a number, because a seed must replay in every process."""
        assert self.process is not None
        block = Block(*arguments)
        block.owner = int(self.process.name[1])
        return block

    @contextmanager
    def instead(self) -> Iterator[None]:
        with ExitStack() as stack:
            for module in (base, hold, leases, releasing, slots, waiting):
                stack.enter_context(patch.object(module, "time", self))
            for logger in (base.logger, renewal.logger):
                stack.enter_context(patch.object(logger, "disabled", True))  # noqa: FBT003 - an attribute
            stack.enter_context(patch.object(slots, "random", self))
            stack.enter_context(patch.object(slots, "os", SimpleNamespace(getpid=lambda: 0)))
            stack.enter_context(patch.object(base, "Block", self.new_block))
            stack.enter_context(patch.object(base, "for_thread", lambda authority: authority.renewer))
            yield

    def run(self, process: Process, renewer: SimulatedRenewer, program: Program) -> Program:
        """Run a program by the clock of its process, in a context of its own."""
        context = Context()

        def resume(step: Callable[..., Any], value: Any) -> Any:
            before, self.process = self.process, process
            try:
                return context.run(step, value)
            finally:
                self.process = before

        answer, error = None, None
        try:
            while True:
                try:
                    request = resume(program.send, answer) if error is None else resume(program.throw, error)
                except StopIteration as stop:
                    return stop.value
                answer = error = None
                try:
                    if type(request) is Call:
                        resume(lambda _, call=request: call.blocking(), None)
                        while renewer.stopped is not None and not renewer.cancel(renewer.stopped):
                            yield Sleep(_LOOK)
                        renewer.stopped = None
                    else:
                        answer = yield request
                except Exception as caught:  # noqa: BLE001 - the program decides what to do about it
                    error = caught
        finally:
            while program.gi_frame is not None:  # type: ignore[attr-defined]
                with suppress(Killed, StopIteration):
                    resume(program.throw, Killed())


class SimulatedRenewer(BatchRenewer):
    """Extends the leases of a process, in a task of the world."""

    def __init__(self, client: SlotClient) -> None:
        super().__init__()
        self._client = client
        self._phase = client.world.random.random()
        self._runs = False
        self.stopped: LockHold | None = None

    def add(self, hold: LockHold) -> None:
        self.reschedule(hold, self._client.process.now)
        if not self._runs:
            self._runs = True
            self._client.run("renewal", self._work())

    def pop_due(self, now: float) -> list[LockHold]:
        return sorted(super().pop_due(now), key=lambda each: each.grant.resources)  # they come from a set

    def stop(self, hold: LockHold) -> None:
        self.stopped = hold

    async def stop_soon(self, hold: LockHold) -> None:
        raise AssertionError(f"{hold} is of blocking code")

    def _work(self) -> Program:
        process = self._client.process
        while self._due:
            yield Sleep(self._client.weather.ttl / 20)
            if due := self.pop_due(process.now):
                yield from self.renew_due(due, lambda: process.now, tell)
                self._in_flight = frozenset()
        self._runs = False


class SimulatedAuthority:
    """The authority of a process. What it grants, the judge of all runs sees."""

    def __init__(self, client: SlotClient) -> None:
        self._client = client
        self._holds: dict[str, Hold] = {}
        self.renewer = SimulatedRenewer(client)

    def acquire_gen(
        self,
        resources: tuple[str, ...],
        *,
        ttl: float,
        timeout: float | None,
        fair: bool = False,
        go_on: Callable[[], None],
    ) -> Steps[Grant]:
        its: Hold = yield from self._client.acquire(resources, ttl, timeout, fair=fair, go_on=go_on)
        self._holds[its.grant.proof.attempt.nonce] = its
        return its.grant

    def extend_gen(self, wishes: list[Wish]) -> Steps[list[Grant | FencelockError]]:
        outcomes = yield from holding.extend_many(self._client.process.current, wishes)
        for (grant, _), outcome in zip(wishes, outcomes, strict=True):
            its = self._holds.get(grant.proof.attempt.nonce)
            if its is not None and isinstance(outcome, Grant):
                its.grant = outcome
            elif its is not None and isinstance(outcome, LockLostError):
                its.lost = True
        return outcomes

    def release_gen(self, grant: Grant) -> Steps[bool | None]:
        return (yield from self._client.release(self._holds[grant.proof.attempt.nonce]))  # type: ignore[no-any-return]

    def inspect_gen(self, resources: tuple[str, ...]) -> Steps[list[LockInfo]]:
        world, seats = self._client.world, self._client.process.seats
        yield Sleep(2 * world.weather.latency)
        nodes = [world.servers[number].look(world.now) for number in seats]
        found = []
        for name in resources:
            ends = [lock.ends - node.now for node in nodes if (lock := node.lock(f"{NODE_KEY}:l:{name}"))]
            if len(ends) > len(nodes) // 2:
                found.append(LockInfo(name, None, None, max(ends) / 1000, None))
        return found


class Inside:
    """A client that is inside a lock, by the leases that the lock shows."""

    def __init__(self, process: Process, lock: FencedLock[Any], block: Block) -> None:
        self._process = process
        self._block = block
        self.of_row = not isinstance(lock, slots.FencedSemaphore)
        self.writes = isinstance(lock, slots.WriterLock)
        self.names = {name for its in block.holds for name in its.grant.resources}

    def __repr__(self) -> str:
        return f"{self._process.name} with {', '.join(sorted(self.names))}"

    def is_valid(self) -> bool:
        held = [each for its in self._block.holds for each in its.leases]
        alive = self._process.alive and not any(each._over for each in held)
        return alive and self._process.now < min(each.expires_at for each in held)

    def promise_broken_by(self, other: Inside) -> str:
        if not (self.is_valid() and other.is_valid()):
            return ""
        if self.of_row and other.of_row and self.writes | other.writes:
            return BESIDE
        return TWICE if self.names & other.names else ""


class SlotClient(Client):
    clock: Clock
    inside: list[Inside]
    calm = False

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._programs: list[Program] = []
        self.authority: Any = SimulatedAuthority(self)

    def run(self, name: str, program: Program) -> Task:
        program = self.clock.run(self.process, self.authority.renewer, program)
        self._programs.append(program)
        task = Task(self.process, name, program)
        self.world.start(task)
        return task

    def start(self, errand: Callable[[Client], Program] | None = None) -> Task:
        return self.run("work", self._work() if errand is None else errand(self))

    def leave_to_database(self) -> None:
        """End what a client does that has died."""
        for program in self._programs:
            program.close()
        for its in [its for its in hold.everything_held() if its.authority is self.authority]:
            hold.remove(its)

    def _lock(self) -> FencedLock[Any]:
        chance = self._random.random
        timeout = None if self.calm else (0.0, 0.5, 5.0, None)[int(chance() * 4)]
        settings: dict[str, Any] = {"ttl": self.weather.ttl, "timeout": timeout}
        if not self.calm and chance() < 0.4:
            return slots.FencedSemaphore("gpu", SLOTS, lambda: self.authority, **settings)
        shared = self.process.name[1] != "0" if self.calm else chance() < 0.6
        return slots.make_lock(("row",), lambda: self.authority, shared=shared, readers=READERS, **settings)

    def _work(self) -> Program:
        weather, chance, world = self.weather, self._random.random, self.world
        while True:
            lock = self._lock()
            writes = isinstance(lock, slots.WriterLock)
            if writes or not self.calm:
                yield Sleep(weather.think * 2 * chance())
            block, waits = lock._new_block(), [self.calm and writes]
            world.at(world.now + BOUND, self._find_starved, waits)
            try:
                try:
                    yield from lock._acquire_gen(block)
                except BaseException:
                    yield from lock._leave_gen(block)
                    raise
            except FencelockError:
                yield Sleep(0.05 * (0.5 + chance()))
                continue
            waits.clear()
            self.completed += 1
            its = Inside(self.process, lock, block)
            world.tell(self.process.name, f"is inside {lock!r}")
            for other in self.inside if weather.sane_clocks else ():
                if broken := its.promise_broken_by(other):
                    raise Violated(broken, f"{its}; {other}")
            self.inside.append(its)
            is_long = chance() < 0.05 and not self.calm  # perhaps longer than the lease
            yield Sleep((3 * weather.ttl if is_long else 2 * weather.work) * chance())
            self.inside.remove(its)
            with suppress(FencelockError):
                yield from lock._leave_gen(block)

    def _find_starved(self, waits: list[bool]) -> None:
        if any(waits) and self.process.alive:
            raise Violated(STARVED, f"{self.process.name} for {BOUND:g} s")


class Slots(Run):
    """The usual run, and calm ones, with locks of several holders."""

    kind = "slots"

    def __init__(
        self, seed: int, size: int, kept: Kept | None = None, trace: Callable[[str], None] | None = None
    ) -> None:
        self.clock = Clock()
        self.calm = random.Random(f"{seed}/calm").random() < 0.3
        facts = {"clock": self.clock, "calm": self.calm, "inside": []}
        self.client = type("SlotClient", (SlotClient,), facts)
        super().__init__(seed, size, kept, trace)

    def draw(self, rng: random.Random) -> Weather:
        weather = draw_well(rng) if self.calm else draw(rng)
        return replace(weather, resources=NAMES, in_order=self.calm)

    def play(self) -> Outcome:
        with self.clock.instead():
            try:
                return super().play()
            finally:
                for client in self._clients.values():
                    client.leave_to_database()
