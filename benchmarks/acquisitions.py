"""Do tokens stay unique and in order while nodes die and come back without their memory?

Several processes acquire many locks of few resources, over real nodes, of which less than a majority are
killed at random moments and come back blank. Leases expire while their holders work, holders vanish,
processes and nodes are paused. Each worker writes down what it got and when; afterwards the log is
judged, not by the library: every token of a resource must be unique, and larger than those that had been
given before its acquisition began. The blank nodes must not have voted before they were admitted again.

    python -m benchmarks.acquisitions --count 100000
    python -m benchmarks.acquisitions --count 5000 --control

With `--control`, the token is the largest of the counters of a majority, the obvious way: then the
judge must find violations, or it would be worth nothing. Exit status 1 if the claim does not hold.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.acquisition_faults import Faults
from benchmarks.acquisition_worker import MAX_TTL, Assignment, work
from benchmarks.history import Acquisition, Failure, Verdict, judge, read_log
from fencelock import Redlock
from fencelock.embedded import Nodes

STALLED_AFTER = 30.0
_TICK = 0.02
_REPORT_EVERY = 5.0


@dataclass(frozen=True, slots=True)
class Settings:
    """What to run; the options of the command line."""

    count: int
    processes: int
    resources: int
    nodes: int
    seed: int
    pauses: float
    control: bool


@dataclass(slots=True)
class Outcome:
    """What a run came to.

    Attributes:
        settings: what was run.
        seconds: how long the workers worked.
        acquisitions: all that the workers wrote down.
        failures: attempts that ended in an error.
        verdict: of the judge.
        faults: what was injected, and what the blank nodes did.
        broken: what else went wrong: a worker that crashed or hung.
    """

    settings: Settings
    seconds: float
    acquisitions: list[Acquisition]
    failures: list[Failure]
    verdict: Verdict
    faults: Faults
    broken: list[str]

    @property
    def problems(self) -> list[str]:
        """What contradicts the claim, as sentences."""
        found = [str(violation) for violation in self.verdict.violations]
        if not self.settings.control:
            found += sorted(self.faults.voted)
        return found + self.broken

    @property
    def as_claimed(self) -> bool:
        """Whether nothing was violated; of the control, whether violations were noticed."""
        if self.settings.control:
            return bool(self.verdict.violations) and not self.broken
        return not self.problems


def run(settings: Settings, console: Console) -> Outcome:
    """Run the workers and the faults, and judge the log."""
    with Nodes(settings.nodes) as nodes, tempfile.TemporaryDirectory(prefix="fencelock-") as folder:
        if not settings.control:
            with Redlock(nodes.urls) as authority:
                authority.init(max_ttl=MAX_TTL)
        crew = Crew(settings, nodes.urls, Path(folder))
        try:
            faults = Faults(
                nodes, crew.pids, random.Random(f"{settings.seed}/faults"), pauses=settings.pauses
            )
            began = time.monotonic()
            supervise(crew, faults, settings.count, console)
            seconds = time.monotonic() - began
        finally:
            crew.stop()
        faults.finish()
        records = [record for log in crew.logs for record in read_log(log)]
    acquisitions = [record for record in records if isinstance(record, Acquisition)]
    failures = [record for record in records if isinstance(record, Failure)]
    return Outcome(settings, seconds, acquisitions, failures, judge(acquisitions), faults, crew.broken)


class Crew:
    """The worker processes, from their start to their end.

    Attributes:
        logs: the file that each of them writes.
        broken: what went wrong with them.
    """

    def __init__(self, settings: Settings, urls: Sequence[str], folder: Path) -> None:
        # Not fork: threads of this process may hold locks. Not spawn: each would import everything anew.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([work.__module__])
        self._done = context.Array("Q", settings.processes + 1, lock=False)
        self.logs = [folder / f"{number}.log" for number in range(settings.processes)]
        self.broken: list[str] = []
        self._workers: list[BaseProcess] = []
        for number, log in enumerate(self.logs):
            seed = f"{settings.seed}/{number}"
            assignment = Assignment(seed, urls, settings.resources, settings.control, log)
            worker = context.Process(target=work, args=(number, assignment, self._done), daemon=True)
            worker.start()
            self._workers.append(worker)

    @property
    def pids(self) -> list[int]:
        """The workers' process ids."""
        return [worker.pid for worker in self._workers if worker.pid is not None]

    @property
    def done(self) -> int:
        """How many resources have been acquired so far."""
        return sum(self._done[:-1])

    def check(self) -> bool:
        """Whether all workers live."""
        ended = [worker for worker in self._workers if worker.exitcode is not None]
        self.broken += [f"{worker.name} ended with status {worker.exitcode}" for worker in ended]
        return not ended

    def stop(self) -> None:
        """Tell the workers to stop, and end those that do not."""
        self._done[-1] = 1
        for worker in self._workers:
            worker.join(STALLED_AFTER)
            if worker.exitcode is None:
                self.broken.append(f"{worker.name} hung and had to be killed")
                worker.kill()
                worker.join()


def supervise(crew: Crew, faults: Faults, count: int, console: Console) -> None:
    """Inject faults and report progress until enough has been acquired, or something is wrong."""
    began = last_progress = last_report = time.monotonic()
    before = 0
    while crew.check():
        done, now = crew.done, time.monotonic()
        for event in faults.advance(done / count):
            console.print(f"{now - began:6.1f} s  {done:9,} acquired  [bold]{event}[/]")
        if now - last_report >= _REPORT_EVERY:
            last_report = now
            console.print(f"{now - began:6.1f} s  {done:9,} acquired")
            faults.inspect()
        if done >= count:
            return
        if done > before:
            before, last_progress = done, now
        elif now - last_progress > STALLED_AFTER:
            crew.broken.append(f"nothing was acquired for {STALLED_AFTER:g} s, at {done:,}")
            return
        time.sleep(_TICK)


def summary(outcome: Outcome) -> Table:
    """Return what happened as a table."""
    table = Table(title="naive tokens" if outcome.settings.control else "fencelock", show_header=False)
    table.add_column(style="bold")
    table.add_column()
    _add_locks(table, outcome)
    _add_faults(table, outcome)
    verdict = outcome.verdict
    table.add_row("tokens given twice", f"{len(verdict.duplicates):,}")
    table.add_row("tokens too small", f"{len(verdict.regressions):,}")
    return table


def _add_locks(table: Table, outcome: Outcome) -> None:
    settings, acquired = outcome.settings, outcome.acquisitions
    total = max(len(acquired), 1)
    table.add_row(
        "acquisitions",
        f"{len(acquired):,} of {settings.resources} resources by {settings.processes} processes over "
        f"{settings.nodes} nodes in {outcome.seconds:.1f} s: {total / outcome.seconds:,.0f}/s",
    )
    waits = sorted((one.completed - one.began) / 1e6 for one in acquired) or [0.0]
    table.add_row(
        "waited",
        f"median {waits[len(waits) // 2]:.1f} ms, 99% {waits[len(waits) * 99 // 100]:.0f} ms, "
        f"longest {waits[-1]:.0f} ms",
    )
    if not settings.control:
        at_once = sum(one.bids == 1 for one in acquired)
        one_round = sum(one.bids == 1 and not one.confirms for one in acquired)
        confirmed = sum(one.confirms > 0 for one in acquired)
        table.add_row(
            "rounds",
            f"{at_once / total:.1%} with their first bid, {one_round / total:.1%} in one round trip; votes "
            f"disagreed and were confirmed in {confirmed / total:.1%}",
        )
    errors = Counter(failure.error for failure in outcome.failures)
    table.add_row("gave up", ", ".join(f"{count:,} with {name}" for name, count in errors.items()) or "never")


def _add_faults(table: Table, outcome: Outcome) -> None:
    verdict, faults = outcome.verdict, outcome.faults
    overstayed = sum(one.worked_until > one.valid_until for one in outcome.acquisitions)
    table.add_row("overstayed", f"{overstayed:,} holders worked longer than their lease")
    table.add_row(
        "overlaps",
        f"{verdict.overlaps:,} began while another still worked (no violation); "
        f"{verdict.valid_overlaps:,} of them while both were within their leases",
    )
    table.add_row(
        "faults",
        f"{faults.kills} kills of {faults.victims} nodes, which came back blank; {faults.pauses} pauses of "
        "workers and nodes",
    )
    if not outcome.settings.control:
        table.add_row(
            "blank nodes",
            f"were sent {faults.scripts:,} scripts; hold {len(faults.voted)} traces of a vote; "
            f"{faults.admissions} were admitted again",
        )


def report(outcome: Outcome, console: Console) -> int:
    """Print what happened, the first few problems and the verdict; return the exit status."""
    console.print(summary(outcome))
    for problem in outcome.problems[:10]:
        console.print(f"  {problem}", style="red", highlight=False)
    claim = (
        "the judge notices broken tokens" if outcome.settings.control else "every token unique and in order"
    )
    seed = f"(seed {outcome.settings.seed})"
    if outcome.as_claimed:
        console.print(f"[bold green]PASS[/]: {claim} {seed}")
        return 0
    console.print(f"[bold red]FAIL[/], the claim was: {claim} {seed}")
    return 1


def parse(arguments: Sequence[str] | None) -> Settings:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.acquisitions", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--count", type=int, default=100_000, help="acquisitions (%(default)s)")
    parser.add_argument("--processes", type=int, default=8, help="worker processes (%(default)s)")
    parser.add_argument("--resources", type=int, default=50, help="how many there are (%(default)s)")
    parser.add_argument("--nodes", type=int, default=5, help="real nodes (%(default)s)")
    parser.add_argument("--pauses", type=float, default=2.0, help="pauses a second (%(default)s)")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1_000_000), help="random")
    parser.add_argument("--control", action="store_true", help="use naive tokens; the judge must object")
    return Settings(**vars(parser.parse_args(arguments)))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print, and return the exit status."""
    console = Console()
    return report(run(parse(arguments), console), console)


if __name__ == "__main__":
    sys.exit(main())
