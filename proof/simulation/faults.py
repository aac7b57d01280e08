"""Everything that goes wrong, other than in the network: processes, nodes, clocks, and changes of nodes.

The protocol's guarantee asks for one thing: of the nodes, fewer than a majority have forgotten at any one
time, and they come back through admission. So much is heeded here. One more thing is, so that the run can go
on without an operator: no node is blank while a majority has restarted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from proof.simulation.node import BLANK, Disk
from proof.simulation.world import Process, Server, World

#: A clock that goes wrong does so by as much as this many leases, or goes this many times as fast.
_JUMP = 3.0
_RATES = (0.5, 2.0)


class Faults:
    """Lets faults happen at the rates of the weather, until it is `over`."""

    def __init__(
        self,
        world: World,
        *,
        members: Callable[[], tuple[int, ...]],
        clients: Callable[[], list[Process]],
        crash: Callable[[Process], None],
        changing: Callable[[], bool],
    ) -> None:
        self._world = world
        self._members = members
        self._clients = clients
        self._crash = crash
        self._changing = changing
        self._random = world.random
        self.over = False
        self.forgot_amid_change = False
        rates = dict(world.weather.rates)
        for kind, rate in rates.items():
            action = getattr(self, kind.replace(" ", "_"), None)
            if rate and action is not None:
                self._plan(kind, rate, action)

    def _plan(self, kind: str, rate: float, action: Callable[[], bool]) -> None:
        self._world.at(self._world.now + self._random.expovariate(rate), self._happen, kind, rate, action)

    def _happen(self, kind: str, rate: float, action: Callable[[], bool]) -> None:
        if self.over:
            return
        if action():
            self._world.count_fault(kind)
        self._plan(kind, rate, action)

    def _tell(self, who: str, what: str) -> None:
        if self._world.trace is not None:
            self._world.tell(who, what)

    # Clients.

    def client_pause(self) -> bool:
        """A process stands still, as after SIGSTOP or while it collects garbage."""
        process = self._random.choice(self._clients())
        seconds = self._random.expovariate(1.0) * self._world.weather.ttl
        process.frozen_until = max(process.frozen_until, self._world.now + seconds)
        self._tell(process.name, f"stands still for {seconds:.3f} s")
        return True

    def client_crash(self) -> bool:
        process = self._random.choice(self._clients())
        self._tell(process.name, "dies")
        self._crash(process)
        return True

    def client_clock(self) -> bool:
        process = self._random.choice(self._clients())
        self._derange(process.name, process.clock)
        return True

    def _derange(self, who: str, clock: Any) -> None:
        if self._random.random() < 0.5:
            jump = self._random.uniform(-_JUMP, _JUMP) * self._world.weather.ttl
            clock.jump(jump)
            self._tell(who, f"has its clock jump by {jump:.3f} s")
        else:
            clock.drift(self._world.now, self._random.uniform(*_RATES))
            self._tell(who, f"has its clock go {clock.rate:.3f} times as fast")

    def partition(self) -> bool:
        process = self._random.choice(self._clients())
        number = self._random.choice(process.seats)
        seconds = self._random.expovariate(1.0)
        self._world.cut.add((process.name, number))
        self._world.at(self._world.now + seconds, self._world.cut.discard, (process.name, number))
        self._tell(process.name, f"cannot reach n{number} for {seconds:.3f} s")
        return True

    # Nodes.

    def _any_server(self) -> Server:
        return self._world.servers[self._random.choice(self._members())]

    def node_pause(self) -> bool:
        server = self._any_server()
        if self._world.weather.in_order and server.frozen_until > self._world.now:
            return False  # what has waited for it would go on behind what comes now
        seconds = self._random.expovariate(2.0)
        server.frozen_until = max(server.frozen_until, self._world.now + seconds)
        self._tell(server.node.name, f"stands still for {seconds:.3f} s")
        return True

    def node_clock(self) -> bool:
        server = self._any_server()
        self._derange(server.node.name, server.clock)
        return True

    def lock_evicted(self) -> bool:
        node = self._any_server().node
        if not node.locks:
            return False
        key = self._random.choice(sorted(node.locks))
        node.expire(key)
        self._tell(node.name, f"loses the lock {key.rpartition(':')[2]}")
        return True

    def snapshot(self) -> bool:
        server = self._any_server()
        server.disk = server.node.remember()
        return True

    def node_restart(self) -> bool:
        server = self._any_server()
        if not self._needs_no_operator(server, blank=False):
            return False
        self._restart(server, None, "restarts with its data")
        return True

    def node_blank(self) -> bool:
        server = self._any_server()
        if not self._may_forget(server, blank=True):
            return False
        self._restart(server, BLANK, "restarts blank")
        server.disk = BLANK
        return True

    def node_rollback(self) -> bool:
        server = self._any_server()
        if not self._may_forget(server, blank="e" not in server.disk.hash):
            return False
        self._restart(server, server.disk, "restarts with older data")
        return True

    def node_follows(self) -> bool:
        server = self._any_server()
        if not self._may_forget(server, blank="e" not in server.disk.hash):
            return False
        server.node.reload(server.disk)
        server.node.out = True
        self._tell(server.node.name, "has older data")
        return True

    def node_flush(self) -> bool:
        server = self._any_server()
        if not self._may_forget(server, blank=True):
            return False
        server.node.flush()
        server.node.out = True
        self._tell(server.node.name, "is flushed")
        return True

    def hash_evicted(self) -> bool:
        server = self._any_server()
        if not self._may_forget(server, blank=True):
            return False
        server.node.hash.clear()
        server.node.out = True
        self._tell(server.node.name, "loses its hash")
        return True

    def _restart(self, server: Server, disk: Disk | None, what: str) -> None:
        server.node.restart(disk)
        if disk is not None:
            server.node.out = True
        server.down = True
        seconds = self._random.expovariate(4.0)
        self._world.at(self._world.now + seconds, self._come_up, server)
        self._tell(server.node.name, f"{what}, in {seconds:.3f} s")

    def _come_up(self, server: Server) -> None:
        server.down = False

    def _may_forget(self, server: Server, *, blank: bool) -> bool:
        """Whether fewer than a majority have forgotten then, and no operator is needed."""
        members = self._members()
        out = {number for number in members if self._world.servers[number].node.out} | {server.number}
        return len(out) <= (self._size - 1) // 2 and self._needs_no_operator(server, blank=blank)

    def _needs_no_operator(self, server: Server, *, blank: bool) -> bool:
        """Whether a majority would still vote without this server, or all others could be read."""
        others = [self._world.servers[number].node for number in self._members() if number != server.number]
        if self._changing():
            self.forgot_amid_change = True
            return True
        if not blank and not any(node.blank for node in others):
            return True
        voters = [node for node in others if node.admitted and "next" not in node.hash]
        return len(voters) >= self._size // 2 + 1

    @property
    def _size(self) -> int:
        return len(self._clients()[0].seats)
