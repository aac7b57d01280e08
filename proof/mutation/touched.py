"""Which tests run a line: measured once for each file of tests, and kept."""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import TypedDict

from proof.mutation.changes import Change
from proof.mutation.copies import Copy

#: Tests of the text of the code, and of seeds that are recorded: any change fails them, right or wrong.
_LEFT_OUT = {
    "test_architecture.py",
    "test_simulation_mutants.py",
    "test_mutation.py",
    "test_path.py",
    "test_prose.py",
}


class Measured(TypedDict):
    """The known facts about a file of tests.

    Attributes:
        of: a digest of the tests and of the code whose lines were counted.
        seconds: of each test that passed, while lines were counted.
        failed: tests that failed while lines were counted, and once more without.
        unknown: tests that only failed while lines were counted, or did not end; their lines may be missing.
    """

    of: str
    seconds: dict[str, float]
    failed: list[str]
    unknown: list[str]


class Touched:
    """Which tests run which lines of some folders, kept in a folder: two files for each file of tests."""

    def __init__(self, tree: Path, folder: Path, scope: Sequence[str]) -> None:
        self._tree, self._folder, self._scope = tree, folder, scope
        folder.mkdir(parents=True, exist_ok=True)
        sources = [path for part in scope for path in sorted((tree / part).rglob("*.py"))]
        self._sources = b"".join(path.read_bytes() for path in sources)
        self.seconds: dict[str, float] = {}
        self._size = Counter[str]()
        self._bits: dict[str, dict[str, int]] = {}

    def missing(self, only: Sequence[str]) -> list[str]:
        """Return the files of tests that were not measured since they, or the code, last changed."""
        return [file for file in self._files(only) if self._known(file) is None]

    def measure(self, file: str, copy: Copy) -> Measured:
        """Run a file of tests and keep the lines of each test; RuntimeError if it cannot be run."""
        lines = self._path(file, "lines")
        lines.unlink(missing_ok=True)
        run = copy.run([file], lines=(lines, self._scope))
        if run.broken:
            raise RuntimeError(f"{file} cannot be run:\n{run.output}")
        failed, unknown = run.failed, [run.hung] if run.hung else []
        if failed:
            again = copy.run([file], tests=dict.fromkeys(failed, 60.0), all_of_them=True)
            failed, unknown = again.failed, [*unknown, *again.seconds]
            run.seconds.update(again.seconds)
        measured: Measured = {
            "of": self._digest(file),
            "seconds": run.seconds,
            "failed": failed,
            "unknown": unknown,
        }
        self._path(file, "json").write_text(json.dumps(measured, indent=1))
        return measured

    def load(self, only: Sequence[str]) -> None:
        """Read the stored facts about files of tests."""
        for file in self._files(only):
            known, lines = self._known(file), self._path(file, "lines")
            if known is None or not lines.exists():
                continue
            self.seconds |= known["seconds"]
            for test, path, bits in _rows(lines):
                if test in known["seconds"]:
                    self._bits.setdefault(path, {})[test] = bits
                    self._size[test] += bits.bit_count()

    def tests_of(self, change: Change) -> list[str]:
        """Return the tests that run a line of a change, the most promising first.

        Quick tests that run few lines go first, because they were written for what they run. The second test
        of a parametrised function waits until each function has had one.
        """
        mask = sum(1 << line for line in change.lines)
        tests = [test for test, bits in self._bits.get(change.file, {}).items() if bits & mask]
        tests.sort(key=lambda test: ((self.seconds[test] + 0.05) * self._size[test], test))
        turns: list[tuple[int, str]] = []
        had = Counter[str]()
        for test in tests:
            function = test.partition("[")[0]
            had[function] += 1
            turns.append((had[function], test))
        return [test for _, test in sorted(turns, key=lambda turn: turn[0])]

    def _files(self, only: Sequence[str]) -> list[str]:
        paths = [path for part in only for path in _test_files(self._tree / part)]
        return [path.relative_to(self._tree).as_posix() for path in paths if path.name not in _LEFT_OUT]

    def _known(self, file: str) -> Measured | None:
        path = self._path(file, "json")
        if not path.exists():
            return None
        measured: Measured = json.loads(path.read_text())
        return measured if measured["of"] == self._digest(file) else None

    def _path(self, file: str, kind: str) -> Path:
        return self._folder / f"{file.replace('/', '.')}.{kind}"

    def _digest(self, file: str) -> str:
        return hashlib.sha256((self._tree / file).read_bytes() + self._sources).hexdigest()


def _test_files(path: Path) -> Iterable[Path]:
    return [path] if path.is_file() else sorted(path.rglob("test_*.py"))


def _rows(lines: Path) -> Iterator[tuple[str, str, int]]:
    """Yield test, file and lines, as the bits of a number; coverage.py documents the tables."""
    with closing(sqlite3.connect(lines)) as database:
        for test, path, bits in database.execute(
            "SELECT context.context, file.path, numbits FROM line_bits "
            "JOIN context ON context.id = context_id JOIN file ON file.id = file_id"
        ):
            yield test, path, int.from_bytes(bits, "little")
