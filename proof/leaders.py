"""How quickly the next leader is elected, and whether two terms are ever current at once.

    python -m proof.leaders [--rounds 5] [--ttl 2.0] [quorum postgresql sqlite]

Three processes run `leader(…).run`. In each round the leader is killed, told to end, or stopped and woken
after the next election. The control is a leader whose term ignores the clock: it must be current beside the
next one. The status is 1 if a figure is not as it must be.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import combinations
from pathlib import Path
from typing import Final, NamedTuple

from sqlalchemy import create_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

import fencelock
from fencelock import (
    Database,
    FencedModel,
    FencelockError,
    Redlock,
    StaleReadError,
    Term,
    exit_on_signals,
    leader,
)
from proof.servers import Nodes, Postgres

KINDS: Final = ("quorum", "postgresql", "sqlite")
FAULTS: Final = (signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP)
#: Seconds by which an election may take longer than the ttl, and than an orderly end.
_GRACE: Final = 1.0
_PATIENCE: Final = 30.0
_CANDIDATES: Final = 3


class Base(DeclarativeBase):
    """The base of the model."""


class Number(FencedModel, Base):
    """The last number that a leader has written."""

    __tablename__ = "numbers"
    __fence_resource__ = "numbers"
    id: Mapped[int] = mapped_column(primary_key=True)
    last: Mapped[int]


def candidate(authority: str, database: str, log: str, ttl: float, *, ignores_clock: bool) -> None:
    """Lead again and again: note when the term is current, and each number that is written."""
    if ignores_clock:
        Term.is_current = property(lambda _: True)  # type: ignore[assignment,method-assign]
    exit_on_signals()
    fencelock.configure(authority)
    engine = create_engine(database)
    # The leader before may have written meanwhile. The control goes on whatever its writes say.
    passing = FencelockError if ignores_clock else StaleReadError
    with Path(log).open("a", encoding="utf-8", buffering=1) as notes:

        def work(term: Term) -> None:
            while True:
                at = time.monotonic()  # before it is asked: a pause between the two makes a term no longer
                if not term.is_current:
                    return
                notes.write(f"current {term.token} {at}\n")
                with Session(engine) as session, suppress(passing):
                    number = session.get_one(Number, 1)
                    number.last += 1
                    written = number.last
                    session.commit()
                    notes.write(f"wrote {term.token} {written}\n")
                time.sleep(0.01)

        notes.write("campaigns 0 0\n")
        leader("numbers", ttl=ttl).run(work)


class Figures(NamedTuple):
    """What came of some rounds on one authority."""

    failovers: dict[str, list[float]]
    terms: int
    overlaps: int
    written: int
    twice: int

    def faults(self, ttl: float) -> list[str]:
        """Return the results that are not as they must be."""
        limits = {"SIGTERM": _GRACE}
        found = [
            f"{seconds:.2f} s after {name}"
            for name, each in self.failovers.items()
            for seconds in each
            if seconds > limits.get(name, ttl + _GRACE)
        ]
        found += [f"{self.overlaps} overlaps"] if self.overlaps else []
        return found + ([f"{self.twice} numbers written twice"] if self.twice else [])


class Stage:
    """Three candidates, and what they note."""

    def __init__(self, authority: str, database: str, folder: Path, ttl: float, *, control: bool) -> None:
        self._arguments = ["--candidate", authority, "--database", database, "--ttl", str(ttl)]
        self._arguments += ["--ignores-clock"] if control else []
        self._folder = folder
        self.processes: dict[Path, subprocess.Popen[bytes]] = {}
        for _ in range(_CANDIDATES):
            self.start()

    def start(self) -> None:
        """Start another candidate."""
        log = self._folder / f"{len(list(self._folder.glob('*.log')))}.log"
        log.touch()
        command = [sys.executable, "-m", "proof.leaders", *self._arguments, "--log", str(log)]
        self.processes[log] = subprocess.Popen(command)

    def notes(self) -> Iterator[tuple[Path, str, int, float]]:
        """Yield each line of each log; the last one may be half written."""
        for log in self._folder.glob("*.log"):
            for line in log.read_text(encoding="utf-8").splitlines(keepends=True):
                if line.endswith("\n"):
                    word, token, number = line.split()
                    yield log, word, int(token), float(number)

    def latest(self) -> tuple[int, Path, float]:
        """Return the token of the latest term, its candidate's log, and when it began."""
        began: dict[tuple[int, Path], float] = {}
        for log, word, token, at in self.notes():
            if word == "current":
                began.setdefault((token, log), at)
        (token, log), at = max(began.items(), default=((0, Path()), 0.0))
        return token, log, at

    def await_term_above(self, token: int) -> tuple[int, Path, float]:
        """Wait for a term with a larger token."""
        until = time.monotonic() + _PATIENCE
        while time.monotonic() < until:
            if (found := self.latest())[0] > token:
                return found
            time.sleep(0.02)
        raise TimeoutError(f"no leader came after the one with token {token}")

    def fail_over(self, number: signal.Signals) -> float:
        """Send the leader a signal while the others campaign; return the seconds until the next one."""
        until = time.monotonic() + _PATIENCE
        while not self.processes.keys() <= {log for log, word, *_ in self.notes() if word == "campaigns"}:
            if time.monotonic() > until:
                raise TimeoutError("a candidate did not start")
            time.sleep(0.1)
        time.sleep(0.5)
        token, log, _ = self.await_term_above(0)
        sent = time.monotonic()
        self.processes[log].send_signal(number)
        _, _, began = self.await_term_above(token)
        if number is signal.SIGSTOP:
            time.sleep(0.2)
            self.processes[log].send_signal(signal.SIGCONT)
            time.sleep(0.5)  # it is told, and what it writes is refused
        else:
            self.processes.pop(log).wait(_PATIENCE)
            self.start()
        return began - sent

    def figures(self, failovers: dict[str, list[float]]) -> Figures:
        """Judge the notes."""
        current: dict[int, list[float]] = defaultdict(list)
        numbers: Counter[float] = Counter()
        for _, word, token, number in self.notes():
            if word == "current":
                current[token].append(number)
            elif word == "wrote":
                numbers[number] += 1
        terms = [(min(times), max(times)) for times in current.values()]
        overlaps = sum(a[0] <= b[1] and b[0] <= a[1] for a, b in combinations(terms, 2))
        twice = sum(count > 1 for count in numbers.values())
        return Figures(failovers, len(terms), overlaps, numbers.total(), twice)

    def close(self) -> None:
        """End the candidates."""
        for process in self.processes.values():
            process.kill()
            process.wait()


@contextmanager
def servers(kind: str, folder: Path) -> Iterator[tuple[str, str]]:
    """Yield the URL of what grants, and of the database that has the numbers."""
    with ExitStack() as stack:
        database = f"sqlite:///{folder / 'numbers.db'}"
        authority = database
        if kind == "quorum":
            nodes = stack.enter_context(Nodes(5))
            with Redlock(nodes.url) as quorum:
                quorum.init()
            authority = nodes.url
        elif kind == "postgresql":
            authority = database = stack.enter_context(Postgres()).create_database()
            with Database(database) as leases:
                leases.init()
        engine = create_engine(database)
        Base.metadata.create_all(engine)
        with Session(engine) as session, fencelock.bypass(session):
            session.add(Number(id=1, last=0))
            session.commit()
        engine.dispose()
        yield authority, database


def measure(kind: str, rounds: int, ttl: float, *, control: bool = False) -> Figures:
    """Play rounds over one authority."""
    with tempfile.TemporaryDirectory() as name, servers(kind, Path(name)) as (authority, database):
        stage = Stage(authority, database, Path(name), ttl, control=control)
        failovers: dict[str, list[float]] = defaultdict(list)
        try:
            for _ in range(rounds):
                for number in (signal.SIGSTOP,) if control else FAULTS:
                    failovers[number.name].append(stage.fail_over(number))
            return stage.figures(failovers)
        finally:
            stage.close()


def report(kind: str, figures: Figures) -> str:
    """Return a line for a person."""
    times = ", ".join(
        f"{name} {min(each):.2f} to {max(each):.2f} s" for name, each in figures.failovers.items()
    )
    return (
        f"{kind}: next leader after {times}; {figures.terms} terms, {figures.overlaps} overlaps; "
        f"{figures.written} numbers, {figures.twice} written twice"
    )


def main() -> int:
    """Measure, print, and judge."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("kinds", nargs="*", default=[], choices=[*KINDS, []])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ttl", type=float, default=2.0)
    for hidden in ("--candidate", "--database", "--log"):
        parser.add_argument(hidden, default="", help=argparse.SUPPRESS)
    parser.add_argument("--ignores-clock", action="store_true", help=argparse.SUPPRESS)
    its = parser.parse_args()
    if its.candidate:
        candidate(its.candidate, its.database, its.log, its.ttl, ignores_clock=its.ignores_clock)
        return 0
    wrong: list[str] = []
    for kind in its.kinds or KINDS:
        figures = measure(kind, its.rounds, its.ttl)
        print(report(kind, figures), flush=True)
        wrong += [f"{kind}: {fault}" for fault in figures.faults(its.ttl)]
    control = measure("sqlite", 1, its.ttl, control=True)
    print(report("control, whose term ignores the clock", control))
    if not control.overlaps:
        wrong.append("the control has no overlap: this would not see one")
    print("\n".join(wrong) or "all as it must be")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
