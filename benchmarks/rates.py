"""The cases of `benchmarks.locks` in which nobody waits for anybody: how many locks a second, at what cost.

One thread; the tasks of one loop; the threads of one process. Each takes and gives back a resource of its
own, over and over.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from benchmarks import contenders
from benchmarks.arena import NODES, Arena, median_ratio
from benchmarks.bare_sockets import BareSockets
from benchmarks.contenders import FENCELOCK, Contender
from benchmarks.report import Bar, Goal, Section, Spread
from benchmarks.worker import Play, Worker, WorkerError

TASKS = (1, 10, 100, 1000)
#: How many commands a node is sent at once when it is asked in bulk; at most 1,024, the stripes.
BULKS = (1, 10, 100, 1000)
THREADS = 8
#: Seconds that a contender may go on for after the end of its turn.
PATIENCE = 20.0

OURS, OURS_ASYNCIO = contenders.OURS[-1], contenders.OURS_ASYNCIO[-1]


@dataclass(slots=True)
class Rates:
    """What one contender has done in one case.

    Attributes:
        contender: who.
        rates: how many times a second it got and gave back its locks, in each round.
        costs: seconds of its processor for each time, in each round.
    """

    contender: Contender
    rates: list[float] = field(default_factory=list)
    costs: list[float] = field(default_factory=list)

    def note(self, play: Play) -> None:
        """Note what came of a round."""
        self.rates.append(play.rate)
        self.costs.append(play.cost)


def measure(
    arena: Arena, name: str, entered: Sequence[Contender], *, width: int = 1, seconds: float
) -> list[Rates]:
    """Let all of them take so many resources at once, in turns; return the results, the fastest first.

    Who fails is left out, and a line says so.
    """
    with ExitStack() as stack:
        workers = [worker for one in entered for worker in arena.hire(one, stack, tasks=width)]
        results = {worker: Rates(worker.contender) for worker in workers}
        for worker in workers:
            with arena.leaving_out(name, worker, results):
                _take_turn(worker, name, width, seconds / 2)  # connections opened, scripts cached
        for _ in arena.count_rounds(name):
            for worker in random.sample(list(results), len(results)):
                with arena.leaving_out(name, worker, results):
                    results[worker].note(_take_turn(worker, name, width, seconds))
    return sorted(results.values(), key=lambda one: -statistics.median(one.rates))


def _take_turn(worker: Worker, name: str, width: int, seconds: float) -> Play:
    play = worker.play(
        [f"{name}, {worker.contender.key}, {number}" for number in range(width)], seconds, PATIENCE
    )
    if play.failures or not play.turns:
        raise WorkerError(f"{worker.contender.name} fails: {play.error}")
    return play


def section_of(title: str, results: Sequence[Rates], ours: Contender) -> Section:
    """Return rates as a table."""
    baseline = _result_of(results, ours)
    rows = [
        (
            one.contender.name,
            f"{one.contender.nodes}",
            f"{statistics.median(one.rates):,.0f}",
            f"{Spread.of(one.rates)}",
            f"{median_ratio(baseline.rates, one.rates):.2f}" if baseline else "",
            f"{1e6 * statistics.median(one.costs):,.0f}",
        )
        for one in results
    ]
    return Section(
        title,
        ("lock", "nodes", "per second", "slowest … fastest", f"{FENCELOCK} on {NODES} ÷ it", "CPU µs"),
        rows,
        "Acquired and released, per second. CPU: of the client alone, each time.",
        "acquired and released per second",
        [Bar(one.contender.label, Spread.of(one.rates)) for one in results],
    )


def _result_of(results: Sequence[Rates], contender: Contender) -> Rates | None:
    return next((one for one in results if one.contender is contender), None)


def _fastest_redlock(results: Sequence[Rates]) -> Rates | None:
    """Return the fastest Redlock for Python that is not ours."""
    return next((one for one in results if one.contender.is_redlock), None)


def _goals(what: str, ours: Rates | None, others: Sequence[tuple[Rates | None, str, float]]) -> list[Goal]:
    """Return how our rate compares with those of others, as far as they took part."""
    return [
        Goal.at_least(
            f"{what} ÷ {name or other.contender.name}", limit, median_ratio(ours.rates, other.rates)
        )
        for other, name, limit in others
        if ours is not None and other is not None
    ]


def one_thread(arena: Arena) -> None:
    """One thread, one resource."""
    entered = (
        *(*contenders.OURS, contenders.ANEW, contenders.REDIS_PY, contenders.REDIS_PY_SINGLE),
        *(contenders.PYTHON_REDIS_LOCK, *contenders.REDLOCKS, contenders.NODE_REDLOCK),
        *(contenders.SEQUENTIAL, contenders.FLOOR),
    )
    results = measure(arena, "one thread", entered, seconds=arena.seconds)
    fastest = _fastest_redlock(results)
    others = (
        (_result_of(results, contenders.FLOOR), "bare sockets", 0.6),
        (fastest, f"fastest other Python Redlock ({_name_of(fastest)})", 2.5),
        (_result_of(results, contenders.REDIS_PY), "redis-py Lock on 1 node", 0.5),
    )
    goals = _goals(f"rate, blocking, {NODES} nodes", _result_of(results, OURS), others)
    arena.add(section_of("One thread, no contention", results, OURS), goals)


def many_tasks(arena: Arena) -> None:
    """Tasks of one loop, a resource each."""
    entered = (
        *(*contenders.OURS_ASYNCIO, contenders.BARE_AUTHORITY, contenders.REDIS_ASYNCIO),
        *(*contenders.REDLOCKS_ASYNCIO, contenders.NODE_REDLOCK),
    )
    for width in TASKS:
        name = f"{width} task{'s' * (width > 1)}"
        # Long enough for each of a thousand tasks to have its turn.
        seconds = arena.seconds * (2 if width >= 1000 else 1)
        results = measure(arena, name, entered, width=width, seconds=seconds)
        fastest = _fastest_redlock(results)
        others = (
            (fastest, f"fastest other asyncio Redlock ({_name_of(fastest)})", 10),
            (_result_of(results, contenders.REDIS_ASYNCIO), "redis.asyncio Lock on 1 node", 2),
        )
        goals = _goals(f"rate, asyncio, {name}, {NODES} nodes", _result_of(results, OURS_ASYNCIO), others)
        title = f"asyncio, {name}, a resource each"
        arena.add(section_of(title, results, OURS_ASYNCIO), goals if width == 100 else ())


def _name_of(result: Rates | None) -> str:
    return "" if result is None else result.contender.name


def many_threads(arena: Arena) -> None:
    """Threads of one process, a resource each."""
    entered = (
        *(*contenders.OURS, contenders.REDIS_PY, contenders.PYTHON_REDIS_LOCK),
        *(*contenders.REDLOCKS, contenders.FLOOR),
    )
    results = measure(arena, f"{THREADS} threads", entered, width=THREADS, seconds=arena.seconds)
    arena.add(section_of(f"{THREADS} threads, a resource each", results, OURS))


def in_bulk(arena: Arena) -> None:
    """How fast the nodes are, whoever asks: bare sockets, many commands in one piece."""
    fleets = {count: arena.urls[:count] for count in (1, 3, NODES)}
    rates: dict[tuple[int, int], list[float]] = {(count, width): [] for count in fleets for width in BULKS}
    for _ in arena.count_rounds("in bulk"):
        for count, width in random.sample(list(rates), len(rates)):
            rates[count, width].append(_bulk_rate(fleets[count], width, arena.seconds))
    rows = [
        (f"{width:,}", *(f"{statistics.median(rates[count, width]):,.0f}" for count in fleets))
        for width in BULKS
    ]
    columns = ("at once", *(f"{count} node{'s' * (count > 1)}" for count in fleets))
    note = (
        "Acquired and released, per second, by bare sockets that wait for all nodes, all commands in one"
        " piece. The last column is the most that these scripts make of the nodes and of this machine, where"
        " the client does next to nothing."
    )
    arena.add(Section("The ceiling: the same scripts in bulk", columns, rows, note))


def _bulk_rate(urls: Sequence[str], width: int, seconds: float) -> float:
    resources = [f"in bulk, {number}" for number in range(width)]
    bare = BareSockets(urls, contenders.namespace_of(len(urls)), *resources, awaited=len(urls))
    turns = 0
    began = time.perf_counter()
    while time.perf_counter() - began < seconds:
        with bare:
            turns += width
    took = time.perf_counter() - began
    bare.close()
    return turns / took
