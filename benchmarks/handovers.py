"""The case in which processes all want one resource, over and over.

A *hand-over* is an acquisition by another process than the one before. A lock that its last holder takes
back at once, past everybody who waits, may make many acquisitions and hardly any hand-overs; so both are
counted, with the longest time that anybody had to wait. Nobody works while holding it: only the lock is
measured.
"""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from benchmarks import contenders
from benchmarks.arena import NODES, Arena, median_ratio
from benchmarks.contenders import FENCELOCK, Contender
from benchmarks.report import Bar, Goal, Section, Spread
from benchmarks.worker import Play, Worker, WorkerError

PROCESSES = 8
#: Milliseconds.
LONGEST_WAIT = 100
#: Times the length of other turns: it takes some time until waiting is as it will be.
_LONGER = 2
#: Seconds for the order to begin to reach everybody.
_HEAD_START = 0.05

OURS = contenders.OURS[-1]


@dataclass(slots=True)
class Relay:
    """What the processes that contend for one lock have done.

    Attributes:
        contender: whose lock.
        handovers: how many a second, in each round.
        acquisitions: how many a second, in each round.
        longest: seconds that the one who waited longest waited, in each round.
        costs: seconds of the processes' processors for each acquisition, in each round.
    """

    contender: Contender
    handovers: list[float] = field(default_factory=list)
    acquisitions: list[float] = field(default_factory=list)
    longest: list[float] = field(default_factory=list)
    costs: list[float] = field(default_factory=list)

    def note(self, plays: Sequence[Play]) -> None:
        """Note what came of a round."""
        held = sorted(
            (acquired, acquired - asked, number)
            for number, play in enumerate(plays)
            for asked, acquired, _ in play.turns
        )
        span = held[-1][0] - held[0][0]
        changes = sum(before[2] != after[2] for before, after in itertools.pairwise(held))
        self.handovers.append(changes / span)
        self.acquisitions.append((len(held) - 1) / span)
        self.longest.append(max(waited for _, waited, _ in held))
        self.costs.append(sum(play.cpu for play in plays) / len(held))


def contend(arena: Arena) -> None:
    """Let all of them contend, in turns."""
    entered = (
        *(*contenders.OURS, contenders.REDIS_PY, contenders.REDIS_PY_HASTY, contenders.PYTHON_REDIS_LOCK),
        *(*contenders.REDLOCKS, contenders.NODE_REDLOCK),
    )
    ranked = measure(arena, "hand-overs", entered)
    arena.add(_section_of(ranked), _goals(ranked))


def measure(arena: Arena, name: str, entered: Sequence[Contender]) -> list[Relay]:
    """Let all of them contend, in turns; return the results, the fastest first."""
    with ExitStack() as stack:
        teams = {one: arena.hire(one, stack, count=PROCESSES, waiting=True) for one in entered}
        relays = {one: Relay(one) for one, team in teams.items() if team}
        for contender in list(relays):
            with arena.leaving_out(name, contender, relays):
                for worker in teams[contender]:
                    worker.prepare([contender.key])
                _take_turn(arena, teams[contender])
        for _ in arena.count_rounds(name):
            for contender in random.sample(list(relays), len(relays)):
                with arena.leaving_out(name, contender, relays):
                    relays[contender].note(_take_turn(arena, teams[contender]))
    return sorted(relays.values(), key=lambda one: -statistics.median(one.handovers))


def _take_turn(arena: Arena, team: Sequence[Worker]) -> list[Play]:
    name, key = team[0].contender.name, team[0].contender.key
    seconds = _LONGER * arena.seconds
    begin = time.monotonic() + _HEAD_START
    for worker in team:
        worker.order([key], begin, begin + seconds)
    plays = [worker.answer(_HEAD_START + seconds + contenders.PATIENCE) for worker in team]
    error = next((play.error for play in plays if play.error), None)
    if error is not None:
        arena.note_absence(f"hand-overs: {name} fails now and then: {error}")
    if sum(len(play.turns) for play in plays) < 2:
        raise WorkerError(f"hardly anybody gets the lock of {name}")
    return plays


def _goals(ranked: Sequence[Relay]) -> list[Goal]:
    """Return how our hand-overs compare with those of others, as far as they took part."""
    on_one, on_five = contenders.OURS[0], OURS
    by_contender = {relay.contender: relay for relay in ranked}
    longest = [
        Goal.at_most(
            f"longest wait, {PROCESSES} processes, {ours.nodes} node{'s' * (ours.nodes > 1)}, ms",
            LONGEST_WAIT,
            1e3 * max(by_contender[ours].longest),
        )
        for ours in (on_one, on_five)
        if ours in by_contender
    ]
    return longest + [
        Goal.at_least(
            f"hand-overs, {PROCESSES} processes, {ours.nodes} node{'s' * (ours.nodes > 1)} ÷ {other.name}",
            limit,
            ratio(by_contender[ours], by_contender[other]),
        )
        for ours, other, limit in (
            (on_five, contenders.REDIS_PY, 10),
            (on_five, contenders.PYTHON_REDIS_LOCK, 1),
            (on_one, contenders.PYTHON_REDIS_LOCK, 1),
        )
        if ours in by_contender and other in by_contender
    ]


def _section_of(ranked: Sequence[Relay]) -> Section:
    baseline = next((one for one in ranked if one.contender is OURS), None)
    rows = [
        (
            one.contender.name,
            f"{one.contender.nodes}",
            f"{statistics.median(one.handovers):,.0f}",
            f"{Spread.of(one.handovers)}",
            f"{ratio(baseline, one):.1f}" if baseline else "",
            f"{statistics.median(one.acquisitions):,.0f}",
            f"{1e3 * statistics.median(one.longest):,.0f} (≤ {1e3 * max(one.longest):,.0f})",
            f"{1e6 * statistics.median(one.costs):,.0f}",
        )
        for one in ranked
    ]
    columns = (
        *("lock", "nodes", "hand-overs/s", "slowest … fastest", f"{FENCELOCK} on {NODES} ÷ it"),
        *("acquisitions/s", "longest wait ms", "CPU µs"),
    )
    return Section(
        f"{PROCESSES} processes, one resource, nobody works while holding it",
        columns,
        rows,
        "A hand-over is an acquisition by another process than the one before. CPU: of all clients.",
        "hand-overs per second",
        [Bar(one.contender.label, Spread.of(one.handovers)) for one in ranked],
    )


def ratio(ours: Relay, theirs: Relay) -> float:
    """Return how the hand-overs compare; who made none in a round made one in ten seconds."""
    return median_ratio(ours.handovers, [max(rate, 0.1) for rate in theirs.handovers])
