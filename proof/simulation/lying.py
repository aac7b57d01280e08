"""A fourth kind of run: beside everything that goes wrong, a client lies.

It sends ACQUIRE, CONFIRM, RELEASE and EXTEND for a lock of its own, or for none, and names any number, epoch
and counter, also counters that it shares with the others. Whatever it says, no node comes to the end of a
counter, each of the others gets its lock when all is calm again, and no promise is broken meanwhile.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from fencelock.authority.redlock.protocol.attempts import names_of
from fencelock.authority.redlock.protocol.messages import RESTORED_VALUE, Broadcast, Command, Sleep
from fencelock.tokens import MAX_COUNTER
from proof.simulation.judge import EXHAUSTED, Violated
from proof.simulation.run import Kept, Run
from proof.simulation.world import NODE_KEY, Process, Program, Task

_SCRIPTS = ("acquire", "confirm", "release", "extend")
#: Seconds between two lies, at most.
_PAUSE = 0.1


class Lying(Run):
    """The usual run, with one more process, whose claims no node may trust."""

    kind = "lying"

    def __init__(
        self, seed: int, size: int, kept: Kept | None = None, trace: Callable[[str], None] | None = None
    ) -> None:
        super().__init__(seed, size, kept, trace)
        liar = Process(self.world, "liar", self._members, self.world.new_clock())
        self.world.add(liar)
        self.world.start(Task(liar, "lie", self._lie(liar)))

    def _storm(self) -> None:
        super()._storm()
        for server in self.world.servers:
            if server.node.exhausted:
                raise Violated(EXHAUSTED, f"{server.node.name} had no counters left")

    def _lie(self, liar: Process) -> Program:
        rng = self.world.random
        while not self._faults.over:
            if liar.seats != self._members:
                liar.configure(self._members)
            node_set = liar.current()
            command = _lie(rng, node_set.fingerprint, self.world.weather.resources)
            yield Broadcast(command, node_set.all_nodes, lambda _: False, _PAUSE)
            yield Sleep(_PAUSE * rng.random())


def _lie(rng: random.Random, fingerprint: str, wanted: tuple[str, ...]) -> Command:
    """Return a command whose key is the liar's own, and whose counter may be that of another's lock."""
    script, nonce, epoch = rng.choice(_SCRIPTS), f"lie {rng.randrange(3)}", rng.choice((0, 0, 1, 2, 1000))
    keys = (NODE_KEY, f"{NODE_KEY}:l:lie")
    _, (stripe,) = names_of(NODE_KEY, (rng.choice(wanted),))
    number = rng.choice((1, MAX_COUNTER, rng.randint(1, MAX_COUNTER)))
    if script == "extend":
        return Command(
            script, "", keys, (fingerprint, "", nonce, 1000, 1, f"{nonce}|{epoch}|{RESTORED_VALUE}")
        )
    ttl = (1000,) if script == "acquire" else ()
    return Command(script, nonce, keys, (fingerprint, nonce, *ttl, epoch, stripe, number))
