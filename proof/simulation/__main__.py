"""Runs seeds of the simulation until stopped, or a number of them; replays one.

python -m proof.simulation                          # until Ctrl-C, on all cores
python -m proof.simulation --seeds 1000 --start 5000 --jobs 1
python -m proof.simulation --replay 62 --nodes 3    # everything that happens, line by line
python -m proof.simulation --rolling                # only rolling restarts; also with --replay
python -m proof.simulation --tidy                   # only broken connections and hung nodes; the same
python -m proof.simulation --slots                  # only semaphores, readers and writers; the same

Each seed is played with three nodes and with five: once with everything going wrong, once with a rolling
restart of all nodes, in which no holder may lose a lease, and once with connections that break, after which
no lock may be left. The exit status is 1 if a promise was broken.
"""

from __future__ import annotations

import argparse
import itertools
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from multiprocessing import get_context

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from proof.simulation.lying import Lying
from proof.simulation.rolling import Rolling
from proof.simulation.run import Kept, Outcome, Run, play
from proof.simulation.slots import Slots
from proof.simulation.tidy import Tidy

KINDS = (Run, Rolling, Tidy, Lying, Slots)
SIZES = (3, 5)
#: How many runs are handed out to each process beforehand.
_AHEAD = 4


@dataclass
class Tally:
    began: float
    runs: int = 0
    acquisitions: int = 0
    writes: int = 0
    refused: int = 0
    events: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    failed: list[Outcome] = field(default_factory=list)

    def add(self, outcome: Outcome) -> None:
        self.runs += 1
        self.acquisitions += outcome.acquisitions
        self.writes += outcome.writes
        self.refused += outcome.refused
        self.events += outcome.events
        self.faults.update(outcome.faults)
        if outcome.violation:
            self.failed.append(outcome)

    def table(self) -> Group:
        seconds = max(1e-9, time.monotonic() - self.began)
        counts = Table.grid(padding=(0, 2))
        for name, count in (
            ("runs", self.runs),
            ("acquisitions", self.acquisitions),
            ("writes", self.writes),
            ("stale writes refused", self.refused),
            ("events", self.events),
        ):
            counts.add_row(name, f"{count:,}", f"{count / seconds:,.1f}/s")
        kinds = Table.grid(padding=(0, 2))
        for kind, count in sorted(self.faults.items()):
            kinds.add_row(kind, f"{count:,}")
        verdict = f"{len(self.failed)} runs broke a promise" if self.failed else "no promise was broken"
        return Group(counts, Text(), Text("faults:"), kinds, Text(), Text(verdict))


def replay_command(outcome: Outcome) -> str:
    kind = f" --{outcome.kind}" if outcome.kind else ""
    return f"python -m proof.simulation --replay {outcome.seed} --nodes {outcome.size}{kind}"


def work(
    start: int, seeds: int | None, sizes: Sequence[int], kinds: Sequence[type[Run]]
) -> Iterator[tuple[int, int, Kept, None, type[Run]]]:
    numbers = itertools.count(start) if seeds is None else range(start, start + seeds)
    return ((seed, size, Kept(), None, kind) for seed in numbers for size in sizes for kind in kinds)


def play_all(
    runs: Iterator[tuple[int, int, Kept, None, type[Run]]], jobs: int
) -> Generator[Outcome, None, None]:
    """Start so many processes, and play runs there; return what comes of each, in whatever order that is."""
    pool = ProcessPoolExecutor(jobs, mp_context=get_context("spawn"))  # the caller may have threads

    def submit(count: int) -> set[Future[Outcome]]:
        return {pool.submit(play, *run) for run in itertools.islice(runs, count)}

    def outcomes(pending: set[Future[Outcome]]) -> Generator[Outcome, None, None]:
        try:
            while pending:
                done, pending = wait(pending, return_when=FIRST_COMPLETED)
                pending |= submit(jobs * _AHEAD - len(pending))
                for future in done:
                    yield future.result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    # The processes are started for the first runs. An interrupt is not theirs to hear, and they inherit that.
    heard = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        return outcomes(submit(jobs * _AHEAD))
    finally:
        signal.signal(signal.SIGINT, heard)


def simulate(options: argparse.Namespace) -> int:
    console = Console(highlight=False)
    tally = Tally(time.monotonic())
    sizes, kinds = [options.nodes] if options.nodes else SIZES, [options.kind] if options.kind else KINDS
    runs = work(options.start, options.seeds, sizes, kinds)
    outcomes = play_all(runs, options.jobs)
    try:
        console.print(f"seeds from {options.start} on{'; Ctrl-C ends it' if options.seeds is None else ''}")
        with Live(console=console, refresh_per_second=4, get_renderable=tally.table, transient=True):
            for outcome in outcomes:
                tally.add(outcome)
                if outcome.violation:
                    console.print(f"{outcome.detail}\n  {replay_command(outcome)}", soft_wrap=True)
    except KeyboardInterrupt:
        console.print("stopped")
    finally:
        outcomes.close()
    console.print(tally.table())
    return 1 if tally.failed else 0


def _print(line: str) -> None:
    sys.stdout.write(f"{line}\n")


def replay(seed: int, size: int, kind: type[Run]) -> int:
    outcome = play(seed, size, trace=_print, run=kind)
    _print(outcome.detail or "no promise was broken")
    return 1 if outcome.violation else 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m proof.simulation",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seeds", type=int, help="how many seeds; until stopped where none is given")
    parser.add_argument("--start", type=int, default=0, help="the first seed")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--nodes", type=int, choices=SIZES, help="only with so many nodes")
    others = {
        Rolling: "rolling restarts of all nodes",
        Tidy: "broken connections, hung nodes",
        Lying: "a client that lies, beside all faults",
        Slots: "semaphores, readers and writers, with all faults or with none",
    }
    for kind, what in others.items():
        parser.add_argument(
            f"--{kind.kind}", action="store_const", dest="kind", const=kind, help=f"only {what}"
        )
    parser.add_argument("--replay", type=int, metavar="SEED", help="print all that happens in one run")
    options = parser.parse_args(arguments)
    if options.replay is not None:
        return replay(options.replay, options.nodes or SIZES[0], options.kind or Run)
    return simulate(options)


if __name__ == "__main__":
    sys.exit(main())
