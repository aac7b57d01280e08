"""Runs the tests of SQLAlchemy's source distribution with the guard in place; those that fail, again without.

    python -m tests.sqlalchemy_suite                      # all of the folders below, half an hour
    python -m tests.sqlalchemy_suite test/orm/test_session.py

A test that fails with the guard and passes without it is the guard's fault, and the exit status 1. What fails
also where listeners do nothing at all (some tests assert that nobody listens) is told apart.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree as ET

import sqlalchemy

ROOT = Path(__file__).parents[2]
FOLDERS = ("test/base", "test/engine", "test/ext", "test/orm", "test/sql")
PLUGIN = "tests.sqlalchemy_suite.active_guard"


def fetch(folder: Path) -> Path:
    """Return the unpacked source distribution of the SQLAlchemy that is installed."""
    version = sqlalchemy.__version__
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", "sqlalchemy"]
    subprocess.run([*pip, "--dest", str(folder), f"sqlalchemy=={version}"], check=True)
    (archive,) = folder.glob("[sS][qQ][lL]*.tar.gz")
    with tarfile.open(archive) as packed:
        packed.extractall(folder, filter="data")
    return next(path for path in folder.iterdir() if path.is_dir())


def failures(source: Path, tests: Sequence[str], mode: str, jobs: int) -> tuple[set[str], int]:
    """Run tests; return those that failed, as pytest names them, and how many ran."""
    report = source / f"{mode}.xml"
    command = [sys.executable, "-m", "pytest", "-o", "addopts=", "-q", "-p", "no:cacheprovider"]
    command += ["--tb=no", f"--junitxml={report}", "-o", "junit_family=xunit1", "-n", str(jobs)]
    if mode != "plain":
        command += ["-p", PLUGIN]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "FENCELOCK_SUITE": mode}
    subprocess.run([*command, *tests], cwd=source, env=environment, check=False)
    found: set[str] = set()
    count = 0
    for case in ET.parse(report).iter("testcase"):  # noqa: S314 - pytest has just written it
        count += 1
        if case.find("failure") is not None or case.find("error") is not None:
            name = case.get("classname", "").removeprefix(case.get("file", "")[:-3].replace("/", "."))
            found.add("::".join(filter(None, (case.get("file"), name.lstrip("."), case.get("name")))))
    return found, count


def main() -> int:
    """Run them, say what came of it, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("tests", nargs="*", default=FOLDERS, help="folders or files of SQLAlchemy's tests")
    parser.add_argument("--jobs", type=int, default=2, help="how many run side by side")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        source = fetch(Path(folder))
        guarded, count = failures(source, given.tests, "guard", given.jobs)
        plain = failures(source, sorted(guarded), "plain", 1)[0] if guarded else set()
        caused = guarded - plain
        listeners = failures(source, sorted(caused), "listeners", 1)[0] if caused else set()
    blamed = caused - listeners
    sys.stdout.writelines(
        [
            f"SQLAlchemy {sqlalchemy.__version__}: {count} tests ran with the guard, {len(guarded)} failed\n",
            f"{len(guarded & plain)} of them fail without it, too\n",
            f"{len(caused & listeners)} fail with any listener, for they assert that nobody listens\n",
            *(f"  {name}\n" for name in sorted(caused & listeners)),
            f"{len(blamed)} fail because of the guard\n",
            *(f"  {name}\n" for name in sorted(blamed)),
        ]
    )
    return 1 if blamed or not count else 0


if __name__ == "__main__":
    sys.exit(main())
