"""Measures what the tests see, in portions: the next call goes on where the last one stopped."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import TypeVar

from proof.mutation.changes import Change, changes_of, drawn
from proof.mutation.copies import Copy
from proof.mutation.results import Results
from proof.mutation.touched import Touched
from proof.mutation.verdicts import judge

ROOT = Path(__file__).parents[2]
SCOPE = (
    "fencelock/guard",
    "fencelock/authority/database",
    "fencelock/authority/redlock/protocol",
    "fencelock/lock",
)
_Task = TypeVar("_Task")


class Portion:
    """As much of the work as fits into some minutes."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._end = time.monotonic() + 60 * options.minutes
        self.tree: Path = options.tree.resolve()
        self.runs: Path = (options.runs or self.tree / "runs" / "mutation").resolve()
        self.changes = drawn(changes_of(self.tree, options.scope), options.count, options.seed)
        self._data = {change.file: (self.tree / change.file).read_bytes() for change in self.changes}
        self._touched = Touched(self.tree, self.runs / "lines", options.scope)
        self._results = Results(self.runs / "verdicts.jsonl")
        self._commit = _commit(self.tree)

    def measure(self) -> int:
        """Measure the lines of files of tests; return how many files are left."""
        self._each(self._touched.missing(self._options.tests), self._measure)
        return len(self._touched.missing(self._options.tests))

    def _measure(self, file: str, copy: Copy) -> None:
        began = time.monotonic()
        known = self._touched.measure(file, copy)
        _say(f"{time.monotonic() - began:7.1f} s {len(known['seconds']):5} tests {file}")
        for name in ("failed", "unknown"):
            if tests := known[name]:
                _say(f"    {name}: {' '.join(tests)}")

    def judge(self) -> None:
        """Judge changes, and write the page."""
        self._touched.load(self._options.tests)
        self._each(self._results.todo(self.changes, again=self._options.again), self._judge)
        about = {
            "commit": self._commit,
            "seed": self._options.seed,
            "changes": f"{len(self.changes)} drawn of {len(changes_of(self.tree, self._options.scope))}",
            "tests": f"{len(self._touched.seconds)} in {', '.join(self._options.tests)}",
            "time for one change": f"{self._options.most_seconds:g} s at most",
        }
        ours = ROOT / "proof" / "mutation" / "results.md"
        page: Path = self._options.results or (ours if self.tree == ROOT else self.runs / "results.md")
        page.write_text(self._results.page(self.changes, self._options.scope, about))
        _say(f"wrote {page}")

    def _judge(self, change: Change, copy: Copy) -> None:
        verdict = judge(change, self._touched, copy, self._options.most_seconds)
        self._results.add(change, self.diff(change), verdict, self._commit)
        ran = f"{verdict.ran}/{verdict.touching} tests"
        _say(f"{verdict.seconds:7.1f} s {verdict.kind:11} {change.file}:{change.line} {ran} {verdict.test}")

    def diff(self, change: Change) -> str:
        """Return what a change changes."""
        return change.diff(self._data[change.file])

    def _copy(self, folder: Path) -> Copy:
        return Copy(self.tree, folder, patience=self._options.patience)

    def _each(self, tasks: Iterable[_Task], work: Callable[[_Task, Copy], None]) -> None:
        """Do some tasks side by side, each in a copy of its own; after the end begin no more."""
        todo, jobs = deque(tasks), self._options.jobs

        def take(copy: Copy) -> None:
            while time.monotonic() < self._end:
                try:
                    task = todo.popleft()
                except IndexError:
                    return
                work(task, copy)

        if not todo:
            return
        with ExitStack() as stack:
            # Below /tmp, because the name of a socket may have a hundred letters and no more.
            folders = [stack.enter_context(tempfile.TemporaryDirectory(prefix="mut")) for _ in range(jobs)]
            with ThreadPoolExecutor(jobs) as threads:
                list(threads.map(take, [self._copy(Path(folder)) for folder in folders]))


def main(arguments: Sequence[str] | None = None) -> int:
    """Do one portion."""
    options = _parser().parse_args(arguments)
    portion = Portion(options)
    if options.list:
        for change in portion.changes:
            _say(f"{change.identity} {change.kind} {change.file}:{change.line}\n{portion.diff(change)}")
        return 0
    portion.runs.mkdir(parents=True, exist_ok=True)
    if left := portion.measure():
        _say(f"{left} files of tests are not measured yet: run this again, then changes are judged")
    elif not options.measure:
        portion.judge()
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m proof.mutation", description=__doc__)
    parser.add_argument("--minutes", type=float, default=20, help="begin nothing after so many minutes (20)")
    parser.add_argument("--jobs", type=int, default=1, choices=(1, 2), help="work side by side (1)")
    parser.add_argument("--count", type=int, default=300, help="changes to draw (300)")
    parser.add_argument("--seed", type=int, default=0, help="of the draw (0)")
    parser.add_argument("--most-seconds", type=float, default=180, help="for one change (180)")
    parser.add_argument(
        "--patience", type=float, default=20, help="seconds for one test, and more if slow (20)"
    )
    parser.add_argument("--again", action="store_true", help="judge once more what no test has seen")
    parser.add_argument("--measure", action="store_true", help="only measure which tests run which lines")
    parser.add_argument("--list", action="store_true", help="only show the draw")
    parser.add_argument("--tests", nargs="+", default=["tests"], help="files or folders of tests (tests)")
    parser.add_argument("--scope", nargs="+", default=SCOPE, help="folders that change")
    parser.add_argument("--tree", type=Path, default=ROOT, help="another checkout; its .venv has coverage")
    parser.add_argument("--runs", type=Path, help="a folder for what is known (TREE/runs/mutation)")
    parser.add_argument("--results", type=Path, help="the page (proof/mutation/results.md)")
    return parser


def _commit(tree: Path) -> str:
    """Return the commit of a checkout, with `+` if its files differ from it."""
    command = ["git", "-C", str(tree), "describe", "--always", "--dirty=+", "--exclude=*"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "none"


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
