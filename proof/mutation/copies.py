"""A copy of a checkout, in which pytest runs while one change stands."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from proof.mutation import plugin
from proof.mutation.changes import Change

_NOT_COPIED = (".git", ".venv*", "runs", "__pycache__", ".*_cache", ".hypothesis", "*.egg-info")
#: Seconds that pytest may need beside its tests: for imports and servers, on a machine that others use.
_STARTING = 90.0


@dataclass(frozen=True, slots=True)
class Run:
    """How a run of pytest has ended.

    Attributes:
        seconds: of each test that passed.
        failed: tests that failed.
        hung: a test that did not end in time, or in which the process ended.
        broken: whether no test could begin, because an import failed.
        output: the end of what pytest said.
    """

    seconds: dict[str, float]
    failed: list[str]
    hung: str
    broken: bool
    output: str


class Copy:
    """A copy of a checkout, whose own virtual environment runs it if it has one.

    A folder of `folder` has it; names are short, because sockets have short ones.
    """

    def __init__(self, tree: Path, folder: Path, *, patience: float = 20.0) -> None:
        self.tree = folder / "tree"
        self._folder, self._patience = folder, patience
        shutil.copytree(tree, self.tree, ignore=shutil.ignore_patterns(*_NOT_COPIED), symlinks=True)
        (folder / "path").mkdir()
        shutil.copy(plugin.__file__, folder / "path" / "mutation_plugin.py")
        python = tree / ".venv" / "bin" / "python"
        self._python = str(python) if python.exists() else sys.executable
        self._changes = 0

    @contextmanager
    def changed(self, change: Change) -> Iterator[None]:
        """Let a change stand inside the block."""
        path = self.tree / change.file
        data, stat = path.read_bytes(), path.stat()
        self._changes += 1
        try:
            path.write_bytes(change.applied(data))
            # Python compares times in whole seconds, and would run the compiled file of a change before.
            os.utime(path, (stat.st_atime, int(stat.st_mtime) + self._changes))
            yield
        finally:
            path.write_bytes(data)
            os.utime(path, (stat.st_atime, stat.st_mtime))

    def run(
        self,
        files: Sequence[str],
        *,
        tests: Mapping[str, float] | None = None,
        all_of_them: bool = False,
        seconds: float = 1800.0,
        lines: tuple[Path, Sequence[str]] | None = None,
    ) -> Run:
        """Run the tests of some files.

        Args:
            files: their paths in the checkout.
            tests: the tests to run, until the first fails, and the seconds that each is known to take;
                without it, all.
            all_of_them: whether to go on after a failure.
            seconds: no test begins later.
            lines: a file for the lines that each test runs in some folders.
        """
        report, job, output = (self._folder / name for name in ("report", "job", "output"))
        report.write_text("")
        work: plugin.Job = {"report": str(report), "patience": self._patience, "seconds": seconds}
        command = [self._python, "-m", "pytest", "-q", "-p", "mutation_plugin", "-p", "no:cacheprovider"]
        command += [f"--basetemp={self._folder / 't'}", "--tb=short"]
        if tests is not None:
            work["tests"] = dict(tests)
            command += [] if all_of_them else ["-x"]
        if lines is not None:
            work["lines"], work["scope"] = str(lines[0]), list(lines[1])
        job.write_text(json.dumps(work))
        path = os.pathsep.join([str(self.tree), str(self._folder / "path")])
        longest = max((tests or {}).values(), default=60.0)
        most = seconds + self._patience + plugin.SLOWER * longest + _STARTING
        with output.open("wb") as file:
            process = subprocess.Popen(
                [*command, *files],
                cwd=self.tree,
                env={**os.environ, "PYTHONPATH": path, "MUTATION_JOB": str(job)},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                process.wait(most)
            except subprocess.TimeoutExpired:
                pass
            finally:
                with suppress(ProcessLookupError):  # the rest of its programs goes, too
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        return _read(report.read_text(), output.read_text(errors="replace"), process.returncode)


def _read(report: str, output: str, status: int) -> Run:
    ended: dict[str, list[str]] = {"passed": [], "skipped": [], "failed": [], "hung": []}
    seconds, running = dict[str, float](), ""
    for facts in map(json.loads, report.splitlines()):
        if "begins" in facts:
            running = facts["begins"]
            continue
        ended[facts["outcome"]].append(running)
        seconds[running], running = facts["seconds"], ""
    return Run(
        seconds={test: seconds[test] for test in ended["passed"]},
        failed=ended["failed"],
        hung=running or next(iter(ended["hung"]), ""),
        broken=not report and status not in {pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED},
        output=output[-2000:],
    )
