"""Runs the tests of SQLAlchemy's source distribution with the guard in place; those that fail, again without.

    python -m proof.sqlalchemy_suite                      # all of the folders below, a quarter of an hour
    python -m proof.sqlalchemy_suite test/orm/test_session.py
    python -m proof.sqlalchemy_suite --fenced test/orm    # on fenced tables, under one lease for all

A test that fails with the guard and passes without it is the guard's fault, and the exit status 1. With
`--fenced`, a test is not judged if it fails on tables that only have the two columns more, or if it compares
SQL text, which the guard changes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import sqlalchemy

ROOT = Path(__file__).parents[2]
FOLDERS = ("test/base", "test/engine", "test/ext", "test/orm", "test/sql")
PLUGIN = "proof.sqlalchemy_suite.active_guard"


def fetch(folder: Path) -> Path:
    """Return the unpacked source distribution of the SQLAlchemy that is installed."""
    version = sqlalchemy.__version__
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", "sqlalchemy"]
    subprocess.run([*pip, "--dest", str(folder), f"sqlalchemy=={version}"], check=True)
    (archive,) = folder.glob("[sS][qQ][lL]*.tar.gz")
    with tarfile.open(archive) as packed:
        packed.extractall(folder, filter="data")
    return next(path for path in folder.iterdir() if path.is_dir())


@dataclass(frozen=True, slots=True)
class Outcome:
    """Which tests passed and which failed, as pytest names them."""

    passed: frozenset[str]
    failed: frozenset[str]
    skipped: frozenset[str]
    reasons: dict[str, str]  # why a test that failed is not judged; empty if it is


def run(source: Path, tests: Sequence[str], mode: str, jobs: int) -> Outcome:
    """Run tests in a mode of `active_guard`.

    Raises:
        RuntimeError: if pytest has not run them to the end, or has run none.
    """
    report = source / f"{mode}.json"
    command = [sys.executable, "-m", "pytest", "-o", "addopts=", "-q", "-p", "no:cacheprovider", "-p", PLUGIN]
    command += ["--tb=short", "-n", str(jobs), "--max-worker-restart=0"]
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "FENCELOCK_SUITE": mode,
        "FENCELOCK_SUITE_REPORT": str(report),
    }
    ended = subprocess.run([*command, *tests], cwd=source, env=environment, check=False)
    found = json.loads(report.read_text()) if report.exists() else {}
    if ended.returncode not in {0, 1} or not any(found.values()):
        raise RuntimeError(f"pytest has ended with status {ended.returncode} and told of {len(found)} tests")
    failed = frozenset(found["failed"])
    return Outcome(frozenset(found["passed"]) - failed, failed, frozenset(found["skipped"]), found["reasons"])


def rerun(source: Path, tests: frozenset[str], mode: str, jobs: int = 0) -> frozenset[str]:
    """Return which of these tests fail, or are skipped, in that mode, from runs of their whole files.

    Raises:
        RuntimeError: if one of them has not run.
    """
    if not tests:
        return frozenset()
    outcome = run(source, sorted({name.partition("::")[0] for name in tests}), mode, jobs)
    if missing := tests - outcome.passed - outcome.failed - outcome.skipped:
        raise RuntimeError(f"these tests have not run again: {', '.join(sorted(missing))}")
    return (outcome.failed | outcome.skipped) & tests


def main() -> int:
    """Run them, say what came of it, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("tests", nargs="*", default=FOLDERS, help="folders or files of SQLAlchemy's tests")
    parser.add_argument("--jobs", type=int, default=2, help="how many run side by side")
    parser.add_argument("--fenced", action="store_true", help="fence each table that can be fenced")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        source = fetch(Path(folder))
        guarded = run(source, given.tests, "fenced" if given.fenced else "guard", given.jobs)
        plain = rerun(source, guarded.failed, *(("columns", given.jobs) if given.fenced else ("plain",)))
    judged = guarded.reasons if given.fenced else {}
    left_out = Counter(filter(None, map(judged.get, guarded.failed - plain)))
    blamed = {name for name in guarded.failed - plain if not judged.get(name)}
    sys.stdout.writelines(
        [
            f"SQLAlchemy {sqlalchemy.__version__}\n",
            f"{len(guarded.passed)} tests pass with the guard, {len(guarded.failed)} fail\n",
            f"{len(plain)} of them fail without it, too\n",
            *(f"  {name}\n" for name in sorted(plain) if not given.fenced),
            *(f"{count} are not judged: {why}\n" for why, count in left_out.items()),
            f"{len(blamed)} fail because of the guard\n",
            *(f"  {name}\n" for name in sorted(blamed)),
        ]
    )
    return 1 if blamed else 0


if __name__ == "__main__":
    sys.exit(main())
