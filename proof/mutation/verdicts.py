"""What the tests say to one change."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, Literal

from proof.mutation.changes import Change
from proof.mutation.copies import Copy, Run
from proof.mutation.touched import Touched

#: The tests run in portions, which end at these ranks: to begin with, few files are imported.
_PORTIONS = (20, 100, 400)
#: No test begins later, where a few run again.
_CONFIRMING = 600.0

Kind = Literal["killed", "hung", "survived", "not covered"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of a change.

    Attributes:
        kind: `hung` is what did not end in several times the usual time.
        test: the test that failed or hung twice, and passed without the change.
        ran: tests that passed.
        touching: tests that run a line of the change.
        unstable: tests that failed only once, or without the change, too.
        seconds: how long all that took.
    """

    kind: Kind
    test: str = ""
    ran: int = 0
    touching: int = 0
    unstable: tuple[str, ...] = ()
    seconds: float = 0.0

    def facts(self) -> dict[str, Any]:
        """Return all of it, for JSON."""
        return asdict(self)


def judge(change: Change, touched: Touched, copy: Copy, most_seconds: float) -> Verdict:
    """Run the tests that touch a change until one fails, for so many seconds at most."""
    began, tests = time.monotonic(), touched.tests_of(change)
    ran, unstable = 0, list[str]()

    def verdict(kind: Kind, test: str = "") -> Verdict:
        seconds = round(time.monotonic() - began, 1)
        return Verdict(kind, test, ran, len(tests), tuple(unstable), seconds)

    if not tests:
        return verdict("not covered")
    for portion in _portions(tests):
        todo = portion
        while todo and (left := began + most_seconds - time.monotonic()) > 0:
            with copy.changed(change):
                run = _run(copy, todo, touched, left)
            ran += len(run.seconds)
            suspect = _suspect(run)
            if not suspect:
                break
            if kind := _confirmed(change, todo if run.broken else [suspect], touched, copy):
                return verdict(kind, suspect)
            unstable.append(suspect)
            done = {suspect, *run.seconds}
            todo = [test for test in todo if test not in done]
    return verdict("survived")


def _confirmed(change: Change, tests: Sequence[str], touched: Touched, copy: Copy) -> Kind | None:
    """Return what tests see when they fail again with the change and pass without it; None if they do not.

    Raises:
        RuntimeError: the tests cannot be run without the change either.
    """
    with copy.changed(change):
        again = _run(copy, tests, touched, _CONFIRMING)
    if not _suspect(again):
        return None
    clean = _run(copy, tests, touched, 0 if again.broken else _CONFIRMING)
    if clean.broken:
        raise RuntimeError(f"the tests of {change.file} cannot be run at all:\n{clean.output}")
    if _suspect(clean):
        return None
    return "hung" if again.hung else "killed"


def _portions(tests: Sequence[str]) -> Iterator[Sequence[str]]:
    bounds = [0, *_PORTIONS, len(tests)]
    for start, end in pairwise(bounds):
        yield tests[start:end]


def _run(copy: Copy, tests: Sequence[str], touched: Touched, seconds: float) -> Run:
    files = list(dict.fromkeys(test.partition("::")[0] for test in tests))
    return copy.run(files, tests={test: touched.seconds[test] for test in tests}, seconds=seconds)


def _suspect(run: Run) -> str:
    """Return the test that failed or did not end, or what else shows the change."""
    if run.broken:
        return "(import)"
    return next(iter(run.failed), run.hung)
