"""Where cases take place: servers, workers for the contenders, and the report."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import track

from benchmarks.contenders import Contender, Setting, namespace_of
from benchmarks.peers import Homes, NotInstalledError
from benchmarks.report import Goal, Report, Section
from benchmarks.worker import Worker, WorkerError
from fencelock import Redlock
from proof.servers import Nodes

NODES = 5

_Key = TypeVar("_Key")
PREAMBLE = """\
Written by `make bench`, not by hand. All locks of a table used the same nodes in the same run and took turns
in short rounds of random order, each in processes of its own. Medians of the rounds are shown, with the
slowest and the fastest round; ratios are medians of the ratios of each round. Nodes and clients share the
machine: nodes on machines of their own would leave more of it to the clients, and answer later."""


@dataclass(slots=True)
class Arena:
    """Where it takes place.

    Attributes:
        urls: of the servers.
        console: where progress is shown.
        rounds: how many there are of each case.
        seconds: that the turn of a contender lasts.
        homes: where peers live.
        report: what has been found so far.
    """

    urls: Sequence[str]
    console: Console
    rounds: int
    seconds: float
    homes: Homes
    report: Report = field(default_factory=lambda: Report("Measured: locks", PREAMBLE))

    def hire(
        self,
        contender: Contender,
        stack: ExitStack,
        *,
        count: int = 1,
        waiting: bool = False,
        node_timeout: float | None = None,
        tasks: int = 1,
    ) -> list[Worker]:
        """Start workers, which end with the stack; none, and a line about it, where it is not installed."""
        setting = Setting(self.urls[: contender.nodes], waiting, node_timeout, tasks)
        try:
            program = self.homes.program(contender)
        except NotInstalledError as error:
            self.note_absence(f"{contender.name} does not take part: {error}")
            return []
        workers = []
        for _ in range(count):
            workers.append(Worker(contender, setting, program))
            stack.callback(workers[-1].close)
        return workers

    def note_absence(self, sentence: str) -> None:
        """Note once that somebody does not take part, or not to the end."""
        if sentence not in self.report.absent:
            self.report.absent.append(sentence)
            self.console.print(sentence)

    @contextmanager
    def leaving_out(self, name: str, key: _Key, entered: dict[_Key, Any]) -> Iterator[None]:
        """Leave somebody out of a case who fails inside the block, and say so."""
        try:
            yield
        except WorkerError as error:
            self.note_absence(f"{name}: {error}")
            del entered[key]

    def count_rounds(self, name: str) -> Iterable[int]:
        """Count the rounds, for all to see."""
        return track(range(self.rounds), description=name, console=self.console, transient=True)

    def add(self, section: Section, goals: Iterable[Goal] = ()) -> None:
        """Show a table, and keep it for the report, with the goals that it decides."""
        self.report.sections.append(section)
        self.report.goals += goals
        self.console.print(section.table())


@dataclass(slots=True)
class NodesArena(Arena):
    """Where the cases of `benchmarks.locks` take place.

    Attributes:
        nodes: whose URLs the others are.
    """

    nodes: Nodes = field(kw_only=True)

    def initialise(self) -> None:
        """Initialise the nodes, for those who use one, three or all of them."""
        for count in (1, 3, NODES):
            with Redlock(self.nodes.urls[:count], namespace=namespace_of(count)) as authority:
                authority.init()


def ratios(ones: Sequence[float], others: Sequence[float]) -> list[float]:
    """Return the ratio of each round."""
    return [one / other for one, other in zip(ones, others, strict=True)]


def median_ratio(ones: Sequence[float], others: Sequence[float]) -> float:
    """Return the median of the ratios of each round, so that a slow moment of the machine cancels out."""
    return statistics.median(ratios(ones, others))
