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

Kind = Literal["killed", "hung", "survived", "not covered"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of a change.

    Attributes:
        kind: `hung` is what did not end in several times the usual time.
        test: the test that failed or hung, twice.
        ran: tests that passed.
        touching: tests that run a line of the change.
        unstable: tests that failed only once.
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
    if not tests:
        return Verdict("not covered")
    ran, unstable = 0, list[str]()
    kind: Kind = "survived"
    killer = ""

    def left() -> float:
        return began + most_seconds - time.monotonic()

    with copy.changed(change):
        for portion in _portions(tests):
            todo = portion
            while todo and not killer and left() > 0:
                run = _run(copy, todo, touched, left())
                ran += len(run.seconds)
                suspect = _suspect(run)
                if not suspect:
                    break
                again = _run(copy, todo if run.broken else [suspect], touched, most_seconds)
                if _suspect(again):
                    kind, killer = ("hung" if again.hung and not again.failed else "killed"), suspect
                else:
                    unstable.append(suspect)
                    done = {suspect, *run.seconds}
                    todo = [test for test in todo if test not in done]
    return Verdict(kind, killer, ran, len(tests), tuple(unstable), round(time.monotonic() - began, 1))


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
