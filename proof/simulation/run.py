"""One run: a seed, everything that follows from it, and what came of it."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fencelock.authority.redlock.membership.change import Change, change
from fencelock.authority.redlock.membership.initialise import initialise
from fencelock.authority.redlock.membership.recover import recover
from fencelock.authority.redlock.membership.reports import NodeGroup
from proof.simulation.client import Client, Habits
from proof.simulation.faults import Faults
from proof.simulation.judge import AGAIN, STUCK, Judge, Violated
from proof.simulation.node import BLANK, ModelNode
from proof.simulation.storage import Rules, Storage
from proof.simulation.weather import Weather, draw
from proof.simulation.world import NODE_KEY, PATIENCE, Process, Program, Task, World

CLIENTS = 4
SPARES = 2
#: Simulated seconds with faults; and how long the survivors have after that.
SECONDS = 15.0
PEACE = 120.0


@dataclass(frozen=True, slots=True)
class Kept:
    """The rules that are kept; all of them, unless a mutant leaves one out."""

    node: type[ModelNode] = ModelNode
    guard: Rules = field(default_factory=Rules)
    habits: Habits = field(default_factory=Habits)


@dataclass(frozen=True, slots=True)
class Outcome:
    seed: int
    size: int
    violation: str
    detail: str
    acquisitions: int
    reminted: int
    writes: int
    refused: int
    faults: dict[str, int]
    events: int
    seconds: float
    kind: str = ""


class Run:
    """Four clients, N nodes and two spare ones, an operator, a storage; and everything going wrong."""

    #: What the command and the table of mutants call this kind of run; nothing for the usual one.
    kind = ""
    client: type[Client] = Client
    #: The longest lease that the nodes are initialised for.
    max_ttl = 2.0

    def __init__(
        self, seed: int, size: int, kept: Kept | None = None, trace: Callable[[str], None] | None = None
    ) -> None:
        kept = kept or Kept()
        self._seed, self._size, self._kept = seed, size, kept
        rng = random.Random(f"{seed}/{size}/{self.kind}" if self.kind else f"{seed}/{size}")
        weather = self.draw(rng)
        self.world = World(rng, weather, size + SPARES, kept.node, trace)
        self.judge = Judge(exclusion=weather.sane_clocks, well=weather.well)
        self._storage = Storage(kept.guard, self.judge.committed)
        self._writes = itertools.count(1)
        self._lives = [0] * CLIENTS
        self._members = tuple(range(size))
        self._wanted: tuple[int, ...] = self._members
        self._plans = 0
        self._clients: dict[str, Client] = {}
        self._operator = Process(self.world, "op", range(size + SPARES), self.world.new_clock())
        self.world.add(self._operator)
        self._initialise()
        for number in range(CLIENTS):
            self._enter(number)
        self._faults = Faults(
            self.world,
            members=lambda: tuple(sorted({*self._members, *self._wanted})),
            clients=lambda: [client.process for client in self._clients.values()],
            crash=self._crash,
            changing=self._is_changing,
        )
        if weather.changes:
            self._plan_change()

    def draw(self, rng: random.Random) -> Weather:
        return draw(rng)

    def play(self) -> Outcome:
        violation = detail = ""
        try:
            self._storm()
            self._calm()
        except Violated as found:
            violation, detail = found.promise, str(found)
            self.world.tell("!!", str(found))
        judge, world = self.judge, self.world
        return Outcome(
            self._seed,
            self._size,
            violation,
            detail,
            judge.acquisitions,
            judge.reminted,
            judge.writes,
            judge.refused,
            world.faults,
            world.events,
            world.now,
            self.kind,
        )

    def _storm(self) -> None:
        end = self.world.now + SECONDS
        while self.world.now < end:
            self.world.run(min(end, self.world.now + 0.05))
            for server in self.world.servers:
                if server.node.again:
                    raise Violated(AGAIN, server.node.name)

    # Nodes and clients.

    def _initialise(self) -> None:
        world = self.world
        names = tuple(f"redis://n{number}:6379" for number in self._members)
        for server in (world.servers[number] for number in self._members):
            server.node.flush()
            server.down, server.frozen_until, server.node.out, server.disk = False, 0.0, False, BLANK
        stations = [world.servers[number].look(world.now) for number in self._members]
        group = NodeGroup(names, NODE_KEY, PATIENCE, world.new_word, world.random.random)
        drive(stations, initialise(group, base=0, max_ttl=self.max_ttl))
        world.tell("op", f"initialised {', '.join(names)}")

    def _enter(self, number: int) -> None:
        self._lives[number] += 1
        name = f"c{number}" + "'" * (self._lives[number] - 1)
        process = Process(self.world, name, self._members, self.world.new_clock())
        self.world.add(process)
        client = self.client(process, self._storage, self.judge, self._kept.habits, self._writes)
        self._clients[name] = client
        self.world.at(self.world.now + 0.02, self._begin, client)

    def _begin(self, client: Client) -> None:
        if client.process.alive:
            client.start()

    def _crash(self, process: Process) -> None:
        self.world.kill(process)
        client = self._clients.pop(process.name)
        client.leave_to_database()
        self._enter(int(process.name[1]))

    # Changes of nodes.

    def _plan(self, seconds: float) -> None:
        """Have the operator begin or go on after so many seconds; he has no other plans."""
        self._plans += 1
        self.world.at(self.world.now + seconds, self._begin_change, self._plans)

    def _plan_change(self) -> None:
        self._plan(self.world.random.expovariate(self.world.weather.changes))

    def _begin_change(self, plan: int) -> None:
        world = self.world
        if self._faults.over or plan != self._plans:
            return
        if self._wanted == self._members and self._all_vote():
            spares = [server for server in world.servers if server.number not in self._members]
            new, old = world.random.choice(spares), world.random.choice(self._members)
            new.node.flush()  # its former list has been replaced by now
            new.down, new.frozen_until, new.node.out, new.disk = False, 0.0, False, BLANK
            self._wanted = tuple(sorted({*self._members, new.number} - {old}))
            world.count_fault("change of nodes")
        self._change()
        if world.random.random() < 0.2:
            world.at(world.now + world.random.random(), self._operator_dies, plan)

    def _is_changing(self) -> bool:
        servers = self.world.servers
        left_out = any("next" in servers[number].node.hash for number in self._members)
        return left_out or self._wanted != self._members

    def _change(self) -> None:
        world = self.world
        world.tell("op", f"wants {', '.join(f'n{number}' for number in self._wanted)}")
        program = change(self._operator.group(), self._wanted, lambda _: None)
        world.start(Task(self._operator, "change", program, self._changed))

    def _operator_dies(self, plan: int) -> None:
        if plan == self._plans and not self._faults.over:
            self.world.tell("op", "dies")
            self._replace_operator()
            self._plan(0.5)

    def _replace_operator(self) -> None:
        world = self.world
        world.kill(self._operator)
        self._operator = Process(world, "op", range(len(world.servers)), world.new_clock())
        world.add(self._operator)

    def _changed(self, result: Any) -> None:
        world = self.world
        if isinstance(result, Change):
            self._members = self._wanted
            for client in self._clients.values():
                delay = world.random.expovariate(5.0)
                world.at(world.now + delay, self._reconfigure, client.process)
        if isinstance(result, Change) and not result.left_out:
            self._plan_change()
        else:
            self._plan(0.3)

    def _reconfigure(self, process: Process) -> None:
        if process.alive and process.seats != self._members:
            process.configure(self._members)

    # The end.

    def _end_faults(self) -> None:
        world = self.world
        self._faults.over = True
        world.late = world.lost = world.doubled = world.cutting = 0.0
        world.cut.clear()
        for server in world.servers:
            server.down, server.frozen_until = False, 0.0
            server.clock.drift(world.now, 1.0)
        world.tell("**", "all faults have ended")

    def _calm(self) -> None:
        world = self.world
        self._end_faults()
        for client in list(self._clients.values()):
            world.kill(client.process)
            client.leave_to_database()
        self._clients.clear()
        self._replace_operator()
        end = world.now + PEACE
        self._mend(end)
        for number in range(CLIENTS if self._all_vote() else 0):
            self._visit(number, end)
        if any(server.node.again for server in world.servers):
            raise Violated(AGAIN, "at the end")

    def _mend(self, end: float) -> None:
        """Bring a change of nodes to its end, and admit all nodes again."""
        world = self.world
        while world.now < end and not (self._wanted == self._members and self._all_vote()):
            self._recover()
            if self._wanted != self._members:
                self._change()
                world.run(min(end, world.now + 3.0), lambda: self._wanted == self._members)
        if not self._all_vote() and not self._needs_operator():
            standing = {number: world.servers[number].node.hash for number in self._members}
            raise Violated(STUCK, f"not all nodes vote: {standing}")

    def _needs_operator(self) -> bool:
        """Whether a node forgot amid a change, or has come back with data from before one."""
        nodes = [self.world.servers[number].node for number in self._members]
        lists = {node.hash["cfg"] for node in nodes if not node.blank}
        return self._faults.forgot_amid_change or len(lists) > 1

    def _recover(self) -> None:
        """Let a client recover the present list. The operator has flushed its nodes that are still closed."""
        world = self.world
        for number in self._members:
            node = world.servers[number].node
            if self._wanted == self._members and "next" in node.hash:
                node.flush()
        process = Process(world, f"m{world.events}", self._members, world.new_clock())
        world.add(process)
        task = Task(process, "recovery", recover(process.group()))
        world.at(world.now + 0.05, world.start, task)
        world.run(world.now + 10.0, lambda: task.result is not None)
        world.kill(process)

    def _all_vote(self) -> bool:
        nodes = [self.world.servers[number].node for number in self._members]
        return len({node.hash.get("cfg") for node in nodes}) == 1 and all(
            node.votes_in(str(node.hash.get("cfg"))) for node in nodes
        )

    def _visit(self, number: int, end: float) -> None:
        world = self.world
        process = Process(world, f"v{number}", self._members, world.new_clock())
        world.add(process)
        client = self.client(process, self._storage, self.judge, self._kept.habits, self._writes)
        world.run(world.now + 0.05)

        def errand(client: Client) -> Program:
            for resource in world.weather.resources:
                hold = yield from client.acquire((resource,), 1.0, PEACE / 4)
                yield from client.release(hold)
            return True

        task = client.start(errand)
        world.run(end, lambda: task.result is not None)
        if task.result is not True:
            raise Violated(STUCK, f"a lock could not be had: {task.result}")
        world.kill(process)


def drive(stations: list[ModelNode], program: Program) -> Any:
    from tests.redlock.stage import Actor  # noqa: PLC0415 - it brings redis along

    return Actor(stations, program).finish()


def play(
    seed: int,
    size: int,
    kept: Kept | None = None,
    trace: Callable[[str], None] | None = None,
    run: type[Run] = Run,
) -> Outcome:
    return run(seed, size, kept, trace).play()
