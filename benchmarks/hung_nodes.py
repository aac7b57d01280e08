"""The case of `benchmarks.locks` in which nodes hang: how long a lock takes that nobody else wants.

A node hangs that is stopped by SIGSTOP: its connections stay open, and it does not answer. Which ones do is
chosen anew in each round, and no resource is used in two turns, for a node that wakes up may carry out what
was asked of it before.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import redis

from benchmarks import contenders
from benchmarks.arena import NODES, NodesArena, median_ratio
from benchmarks.contenders import FENCELOCK, Contender
from benchmarks.report import Bar, Goal, Section, Spread
from benchmarks.worker import Worker, WorkerError
from proof.servers import Nodes

#: Seconds that peers give a node: as much as the description of Redlock suggests at most.
NODE_TIMEOUT = 0.05
#: Seconds that a contender may go on for after the end of its turn before it counts as hung itself.
PATIENCE = 5.0
#: How many nodes hang.
COUNTS = (0, 1, 2)

OURS, OURS_ASYNCIO = contenders.OURS[-1], contenders.OURS_ASYNCIO[-1]


@dataclass(slots=True)
class Latencies:
    """How long one contender takes.

    Attributes:
        contender: who.
        medians: by the number of nodes that hang: the median of the seconds to acquire and release, in each
            round.
        problem: why there are none.
    """

    contender: Contender
    medians: dict[int, list[float]] = field(default_factory=lambda: {count: [] for count in COUNTS})
    problem: str = ""

    def ratio(self, count: int) -> float:
        """Return the median of the ratios to the healthy median of the same round."""
        healthy, ill = self.medians[0], self.medians[count]
        return median_ratio(ill, healthy) if ill and len(ill) == len(healthy) else math.inf

    def cell(self, count: int) -> str:
        """Return milliseconds, or why there are none."""
        medians = self.medians[count]
        return f"{1e3 * statistics.median(medians):,.2f}" if medians else self.problem


def hang(arena: NodesArena) -> None:
    """Measure all of them while none, one and two of the nodes hang, in turns."""
    entered = (
        *(OURS, OURS_ASYNCIO, *contenders.REDLOCKS, *contenders.REDLOCKS_ASYNCIO),
        contenders.NODE_REDLOCK,
    )
    names = (f"hung, {number}" for number in itertools.count())
    with ExitStack() as stack:
        workers = [worker for one in entered for worker in arena.hire(one, stack, node_timeout=NODE_TIMEOUT)]
        results = {worker: Latencies(worker.contender) for worker in workers}
        for worker in workers:
            with arena.leaving_out("hung nodes", worker, results):
                worker.play([next(names)], arena.seconds / 2)
        for _ in arena.count_rounds("hung nodes"):
            # The healthy ones first: who hangs with a node does not come back.
            for count in (0, *random.sample(COUNTS[1:], len(COUNTS) - 1)):
                # Never the last one, which counts the tokens of a peer that wants a place for that.
                with hanging(arena.nodes, random.sample(range(NODES - 1), count)):
                    for worker in random.sample(list(results), len(results)):
                        _take_turn(worker, next(names), arena.seconds, count, results[worker])
    ranked = sorted(results.values(), key=lambda one: (one.ratio(2), one.medians[0]))
    what = f"latency, two of {NODES} nodes hung ÷ none"
    goals = [
        Goal.at_most(f"{what}, {one.contender.style}", 1.3, one.ratio(2))
        for one in ranked
        if one.contender in {OURS, OURS_ASYNCIO}
    ]
    arena.add(_section_of(ranked), goals)


@contextmanager
def hanging(nodes: Nodes, numbers: Sequence[int]) -> Iterator[None]:
    """Have some nodes hang inside the block; after it all of them answer."""
    hung = [nodes[number] for number in numbers]
    for node in hung:
        node.pause()
    try:
        yield
    finally:
        for node in hung:
            node.resume()
        for node in hung:
            with redis.Redis.from_url(node.url) as client:
                client.ping()
        if hung:
            time.sleep(0.3)  # late requests are answered, connections opened again


def _take_turn(worker: Worker, resource: str, seconds: float, count: int, result: Latencies) -> None:
    if worker.is_closed:
        return
    try:
        play = worker.play([resource], seconds, PATIENCE)
    except WorkerError:
        result.problem = "hangs too"
        worker.close()
        return
    if play.error is not None:
        result.problem = play.error.partition(":")[0]
    if play.turns:
        result.medians[count].append(statistics.median(released - asked for asked, _, released in play.turns))


def _section_of(ranked: Sequence[Latencies]) -> Section:
    rows = [
        (
            one.contender.name,
            one.contender.style,
            *(one.cell(count) for count in COUNTS),
            *(f"{one.ratio(count):.2f}" if math.isfinite(one.ratio(count)) else "–" for count in COUNTS[1:]),
        )
        for one in ranked
    ]
    bars = [
        Bar(
            f"{one.contender.name}, {one.contender.style}, {count} hung",
            Spread.of(one.medians[count]).times(1e3),
        )
        for one in ranked
        for count in (0, 2)
        if one.medians[count]
    ]
    return Section(
        f"Nodes that hang, of {NODES}: latency of acquire and release",
        (
            "lock",
            "style",
            "healthy ms",
            "one hung ms",
            "two hung ms",
            "one ÷ healthy",
            "two ÷ healthy",
        ),
        rows,
        f"Peers give a node {1e3 * NODE_TIMEOUT:.0f} ms, where their user sets that; {FENCELOCK} has the "
        "settings it comes with. Hung nodes leave their share of the processor to the others.",
        "median latency in ms",
        bars,
        is_logarithmic=True,
    )
