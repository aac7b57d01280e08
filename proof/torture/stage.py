"""What the faults act on, and where they write down what they did."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from fencelock.authority.redlock.admin import NodeState
from fencelock.authority.redlock.redlock import Redlock
from proof.servers import Nodes
from proof.torture.crew import Crew
from proof.torture.history import Fault
from proof.torture.journal import Journal
from proof.torture.settings import Settings

_POLL = 0.05
#: Seconds beyond the longest lease in which nodes must have been admitted again.
_PATIENCE = 60.0


_T = TypeVar("_T")


class FaultError(RuntimeError):
    """A fault could not be made, or was not got over as it must be."""


@dataclass(slots=True)
class Note:
    detail: str = ""


@dataclass(slots=True)
class Stage:
    settings: Settings
    crew: Crew
    journal: Journal
    #: To look at the nodes with; it admits none. None where there are no nodes.
    authority: Redlock | None
    namespace: str
    #: What some of the faults need, and is there if they are to be made.
    tools: Sequence[object]
    over: threading.Event = field(default_factory=threading.Event)
    #: Sentences about faults that could not be made, or were not got over.
    trouble: list[str] = field(default_factory=list)
    #: The faults that were made.
    made: set[str] = field(default_factory=set)
    #: One lock a node, held by the fault that breaks it.
    busy: list[threading.Lock] = field(init=False)

    def __post_init__(self) -> None:
        self.busy = [threading.Lock() for _ in (self.authority.nodes if self.authority is not None else ())]

    def tool(self, kind: type[_T]) -> _T:
        for tool in self.tools:
            if isinstance(tool, kind):
                return tool
        raise FaultError(f"this run has no {kind.__name__} to make such a fault with")

    @property
    def nodes(self) -> Nodes:
        return self.tool(Nodes)

    def sleep(self, seconds: float) -> None:
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
            self.made.add(fault)

    @contextmanager
    def some_nodes(self, rng: random.Random, most: int, fault: str) -> Iterator[tuple[list[int], Note]]:
        """Yield up to `most` nodes that no other fault breaks meanwhile, maybe none, and note their fault."""
        with ExitStack() as stack:
            taken = []
            for node in rng.sample(range(len(self.busy)), rng.randint(1, most)):
                if self.busy[node].acquire(blocking=False):
                    stack.callback(self.busy[node].release)
                    taken.append(node)
            yield taken, stack.enter_context(self.fault(fault, *(f"node {node}" for node in taken)))

    def wait_until_admitted(self) -> int:
        """Wait until all nodes vote, and return the epoch in which they do; -1 if the run ended before."""
        deadline = time.monotonic() + self.settings.ttl + _PATIENCE
        assert self.authority is not None
        while not self.over.is_set():
            found = self.authority.status()
            if all(status.state is NodeState.ADMITTED for status in found):
                return max(status.epoch or 0 for status in found)
            if time.monotonic() > deadline:
                standing = ", ".join(f"{status.address} {status.state.value}" for status in found)
                raise FaultError(f"nodes that had lost their memory were not admitted again: {standing}")
            self.sleep(_POLL)
        return -1
