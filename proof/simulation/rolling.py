"""Another kind of run: every node restarts, one after the other, the next when all of them are admitted.

That is what operators are told to do. Beside the clients that come and go, some clients hold a lease all the
time and do nothing else, some wait for it, and some are idle. Not all of them admit nodes. Nothing else goes
wrong, so no client may lose a lease, or be told that the list of nodes is wrong.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from fencelock.authority.redlock.protocol.messages import Sleep
from proof.simulation.client import Client
from proof.simulation.judge import LOST_LEASE, STUCK, Violated
from proof.simulation.node import BLANK
from proof.simulation.run import Run
from proof.simulation.weather import Weather, draw_well
from proof.simulation.world import Process, Program, Task

#: Clients of each sort: holders, waiters and idle ones.
_OF_EACH = 2
#: How long all of it may take; and how long nodes have to be admitted.
_LONGEST = 120.0
_STEP = 0.05


class Rolling(Run):
    """Four clients that come and go, eight that hold, wait or do nothing, and nodes that restart in turn."""

    kind = "rolling"
    errands: tuple[Task, ...] = ()
    over = False

    def draw(self, rng: random.Random) -> Weather:
        return draw_well(rng)

    def _storm(self) -> None:
        world = self.world
        for client in list(self._clients.values())[1:]:  # one client has to admit nodes
            client.process.recovers = world.random.random() < 0.5
        self._begin_errands()
        world.run(world.now + 0.5)
        for number in world.random.sample(self._members, self._size):
            self._restart(number)
            self._run_until(self._all_vote)
            if world.random.random() < 0.5:
                world.run(world.now + world.random.random())
        # A lease that no client extends any more comes to its end.
        world.run(world.now + world.weather.ttl)
        self.over = True
        self._run_until(lambda: all(task.result is not None for task in self.errands))
        for task in self.errands:
            if task.result is not True:
                raise Violated(STUCK, f"{task.process.name}: {task.result}")

    def _begin_errands(self) -> None:
        started = []
        for number in range(_OF_EACH):
            for name, errand in (
                ("hold", self._hold),
                ("wait", self._wait),
                ("idle", self._stay_idle),
                ("some", self._hold_again_and_again),
            ):
                process = Process(self.world, f"{name}{number}", self._members, self.world.new_clock())
                process.recovers = self.world.random.random() < 0.5
                self.world.add(process)
                client = Client(process, self._storage, self.judge, self._kept.habits, self._writes)
                started.append((client, errand(f"held{number}")))
        self.world.run(self.world.now + 0.02)
        self.errands = tuple(client.start(errand) for client, errand in started)

    def _restart(self, number: int) -> None:
        world, server = self.world, self.world.servers[number]
        how = world.random.choice(("blank", "blank", "blank", "with its data", "flushed"))
        world.count_fault(f"rolling restart, {how}")
        world.tell(server.node.name, f"restarts, {how}")
        if how == "flushed":
            server.node.flush()
        else:
            server.node.restart(BLANK if how == "blank" else None)
            server.down = True
            world.run(world.now + world.random.random())
            server.down = False

    def _run_until(self, condition: Callable[[], bool]) -> None:
        end = self.world.now + _LONGEST
        while not condition():
            if self.world.now > end:
                raise Violated(STUCK, "in a rolling restart")
            self.world.run(self.world.now + 0.01)

    def _hold(self, resource: str) -> Callable[[Client], Program]:
        """Hold a lease until all is over, and do nothing else."""

        def errand(client: Client) -> Program:
            hold = yield from client.acquire((resource,), self.world.weather.ttl, None)
            client.keep(hold)
            while not self.over:
                yield Sleep(_STEP)
                if not hold.is_valid():
                    raise Violated(LOST_LEASE, f"by {hold.owner}: it was not extended in time")
            yield from client.release(hold)
            return True

        return errand

    def _hold_again_and_again(self, resource: str) -> Callable[[Client], Program]:
        """Hold leases that are younger than the last restart, too."""

        def errand(client: Client) -> Program:
            while not self.over:
                hold = yield from client.acquire((f"some {resource}",), self.world.weather.ttl, None)
                client.keep(hold)
                yield Sleep(2 * self.world.weather.ttl * self.world.random.random())
                if not hold.is_valid():
                    raise Violated(LOST_LEASE, f"by {hold.owner}: it was not extended in time")
                yield from client.release(hold)
            return True

        return errand

    def _wait(self, resource: str) -> Callable[[Client], Program]:
        """Wait for a lease that another holds all the time."""

        def errand(client: Client) -> Program:
            yield Sleep(0.2)
            hold = yield from client.acquire((resource,), self.world.weather.ttl, None)
            yield from client.release(hold)
            return self.over

        return errand

    def _stay_idle(self, resource: str) -> Callable[[Client], Program]:
        """Be there before and afterwards."""

        def errand(client: Client) -> Program:
            for _ in range(2):
                hold = yield from client.acquire((f"idle {resource}",), self.world.weather.ttl, 5.0)
                yield from client.release(hold)
                while not self.over:
                    yield Sleep(_STEP)
            return True

        return errand
