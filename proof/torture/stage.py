"""What the faults act on, and where they write down what they did."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from fencelock.authority.redlock.admin import NodeState
from fencelock.authority.redlock.redlock import Redlock
from proof.servers import Nodes
from proof.torture.clocks import Clocks
from proof.torture.crew import Crew
from proof.torture.doubt import Doubt
from proof.torture.history import Fault
from proof.torture.journal import Journal
from proof.torture.lease_connections import LeaseConnections
from proof.torture.proxy import Proxies
from proof.torture.settings import Settings

_POLL = 0.05
#: Seconds beyond the longest lease in which nodes must have been admitted again.
_PATIENCE = 60.0


_T = TypeVar("_T")


class FaultError(RuntimeError):
    """A fault could not be made, or was not got over as it must be."""


@dataclass(slots=True)
class Note:
    """What is known about a fault while it lasts."""

    detail: str = ""


@dataclass(frozen=True, slots=True)
class Equipment:
    """What some of the faults need, and is there if they are to be made.

    Attributes:
        nodes: those that are ours.
        proxies: before the nodes.
        clocks: of the nodes.
        doubt: about COMMITs.
        connections: over which a database grants leases.
    """

    nodes: Nodes | None = None
    proxies: Proxies | None = None
    clocks: Clocks | None = None
    doubt: Doubt | None = None
    connections: LeaseConnections | None = None


@dataclass(slots=True)
class Stage:
    """Who and what is there to be broken.

    Attributes:
        settings: of the run.
        crew: the workers.
        journal: where faults are noted.
        authority: to look at the nodes with; it admits none. None where there are no nodes.
        equipment: what some of the faults need.
        over: whether the run is about to end.
        trouble: sentences about faults that could not be made, or were not got over.
        busy: one lock a node, held by who breaks it.
    """

    settings: Settings
    crew: Crew
    journal: Journal
    authority: Redlock | None
    equipment: Equipment
    over: threading.Event = field(default_factory=threading.Event)
    trouble: list[str] = field(default_factory=list)
    busy: list[threading.Lock] = field(init=False)

    def __post_init__(self) -> None:
        self.busy = [threading.Lock() for _ in (self.authority.nodes if self.authority is not None else ())]

    @property
    def nodes(self) -> Nodes:
        """The nodes that are ours."""
        return _there(self.equipment.nodes)

    @property
    def proxies(self) -> Proxies:
        """What stands before the nodes."""
        return _there(self.equipment.proxies)

    @property
    def clocks(self) -> Clocks:
        """The nodes' clocks."""
        return _there(self.equipment.clocks)

    @property
    def doubt(self) -> Doubt:
        """What holds up COMMITs."""
        return _there(self.equipment.doubt)

    @property
    def connections(self) -> LeaseConnections:
        """The connections over which a database grants leases."""
        return _there(self.equipment.connections)

    def sleep(self, seconds: float) -> None:
        """Wait, but not beyond the end of the run."""
        self.over.wait(seconds)

    @contextmanager
    def fault(self, fault: str, *targets: str) -> Iterator[Note]:
        """Note a fault of each target that lasts as long as the block."""
        note = Note()
        began = time.monotonic_ns()
        try:
            yield note
        finally:
            for target in targets:
                self.journal.note(Fault(fault, target, began, time.monotonic_ns(), note.detail))

    @contextmanager
    def some_nodes(self, rng: random.Random, most: int) -> Iterator[list[int]]:
        """Yield nodes, as many as `most` or fewer, that nobody else breaks meanwhile; maybe none."""
        wanted = rng.sample(range(len(self.busy)), rng.randint(1, most))
        with ExitStack() as stack:
            taken = []
            for node in wanted:
                if self.busy[node].acquire(blocking=False):
                    stack.callback(self.busy[node].release)
                    taken.append(node)
            yield taken

    @contextmanager
    def node(self, number: int) -> Iterator[None]:
        """Wait until nobody else breaks a node, and keep it so."""
        with self.busy[number]:
            yield

    def wait_until_admitted(self) -> int:
        """Wait until all nodes vote, and return the epoch in which they do; -1 if the run ended before.

        Raises:
            FaultError: it takes longer than it may.
        """
        deadline = time.monotonic() + self.settings.ttl + _PATIENCE
        while not self.over.is_set():
            found = _there(self.authority).status()
            if all(status.state is NodeState.ADMITTED for status in found):
                return max(status.epoch or 0 for status in found)
            if time.monotonic() > deadline:
                standing = ", ".join(f"{status.address} {status.state.value}" for status in found)
                raise FaultError(f"nodes that had lost their memory were not admitted again: {standing}")
            self.sleep(_POLL)
        return -1


def _there(equipment: _T | None) -> _T:
    if equipment is None:
        raise FaultError("this run has nothing to make such a fault with")
    return equipment
