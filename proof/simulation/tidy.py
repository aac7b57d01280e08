"""A third kind of run: nothing forgets and nothing crashes, but connections break, and nodes hang.

Leases last long enough that none ends meanwhile. When all is calm again and every lock was given back, no
lock is left on any node: none of an attempt that was given up, of a late grant, or of a RELEASE that found no
connection. A lock that is left keeps others out for as long as its ttl.
"""

from __future__ import annotations

import random
from contextlib import suppress
from dataclasses import replace

from fencelock.authority.redlock.protocol.messages import Sleep
from fencelock.errors import FencelockError
from proof.simulation.client import Client
from proof.simulation.judge import LEFT, STUCK, Violated
from proof.simulation.run import CLIENTS, Run
from proof.simulation.weather import MOST, Weather, draw_well
from proof.simulation.world import Process, Program, Task

#: Seconds with faults, and in which clients may bring to an end what they have begun.
_SECONDS = 5.0
_LONGEST = 60.0
#: Seconds in which owed messages arrive.
_PEACE = 3.0


class Tidy(Run):
    """Clients that acquire and give back what they want, over a network that loses messages."""

    kind = "tidy"
    max_ttl = 60.0
    over = False

    def draw(self, rng: random.Random) -> Weather:
        rates = dict.fromkeys(MOST, 0.0) | {"node pause": 2.0 * rng.random(), "partition": 2.0 * rng.random()}
        return replace(
            draw_well(rng),
            rates=rates,
            late=0.0,  # an ACQUIRE that is overtaken by its RELEASE, on a newer connection, ends with its ttl
            lost=rng.choice((0.01, 0.05)),
            ttl=self.max_ttl,
            well=False,
            in_order=True,
        )

    def _enter(self, number: int) -> None:
        """Clients of this run have errands."""

    def _storm(self) -> None:
        world, tasks = self.world, []
        for number in range(CLIENTS):
            process = Process(world, f"c{number}", self._members, world.new_clock())
            world.add(process)
            client = Client(process, self._storage, self.judge, self._kept.habits, self._writes)
            self._clients[process.name] = client
            tasks.append(client.start(self._come_and_go))
        world.run(world.now + _SECONDS)
        self._faults.over = True
        world.run(max(server.frozen_until for server in world.servers))  # in the order of its messages
        self._end_faults()
        self.over = True
        self._await(tasks)
        # A lock on something else has every process be connected to all nodes again.
        self._await([client.start(self._call) for client in self._clients.values()])
        world.run(world.now + _PEACE)
        for server in (world.servers[number] for number in self._members):
            for key in tuple(server.node.locks):
                lock = server.node.lock(key)
                if lock is not None and not lock.nonce.startswith(">"):
                    raise Violated(LEFT, f"{lock.nonce} on {server.node.name}, {key}")

    def _await(self, tasks: list[Task]) -> None:
        end = self.world.now + _LONGEST
        self.world.run(end, lambda: all(task.result is not None for task in tasks))
        for task in tasks:
            if task.result is not True:
                raise Violated(STUCK, f"{task.process.name}: {task.result}")

    def _come_and_go(self, client: Client) -> Program:
        chance = self.world.random.random
        while not self.over:
            resource = self.world.random.choice(self.world.weather.resources)
            timeout = (0.0, 0.05, 0.5)[int(chance() * 3)]
            try:
                hold = yield from client.acquire((resource,), self.world.weather.ttl, timeout)
            except FencelockError:
                yield Sleep(0.05 * chance())
                continue
            yield Sleep(self.world.weather.work * chance())
            yield from client.release(hold)
        return True

    def _call(self, client: Client) -> Program:
        for _ in range(3):
            with suppress(FencelockError):
                hold = yield from client.acquire((f"{client.process.name} calls",), self.max_ttl, 10.0)
                yield from client.release(hold)
            yield Sleep(1.0)
        return True
