"""Runs `make test` again and again in a fresh clone, beside busy loops, and counts the runs that are red.

    python -m tests.steady --runs 10 --busy 4

It begins no run after `--minutes`, so that a portion fits into a session: the next call goes on in the same
clone while the commit is the same. Each run is a line of runs/steady.jsonl. Status 1 if a run was red.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RUNS = ROOT / "runs"
GIT, MAKE = (shutil.which(name) or name for name in ("git", "make"))


def clone() -> tuple[str, Path]:
    """Return the commit, and a clone of it with its environment; that of the last call, if it fits."""
    said = subprocess.run([GIT, "-C", ROOT, "rev-parse", "--short", "HEAD"], check=True, capture_output=True)
    commit = said.stdout.decode().strip()
    folder = RUNS / f"steady-{commit}"
    if not folder.exists():
        subprocess.run([GIT, "clone", "--quiet", ROOT, folder], check=True)
    subprocess.run([MAKE, "-C", folder, ".venv/installed"], check=True, capture_output=True)
    return commit, folder


@contextmanager
def busy(loops: int) -> Iterator[None]:
    """Keep the processors busy with some loops."""
    started = [subprocess.Popen([sys.executable, "-c", "while 1: pass"]) for _ in range(loops)]
    try:
        yield
    finally:
        for each in started:
            each.kill()
            each.wait()


def run(folder: Path, loops: int) -> dict[str, Any]:
    """Run the tests once; return how it ended."""
    began = time.monotonic()
    with busy(loops):
        command = [MAKE, "-C", str(folder), "test", "PYTEST=-q"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    (RUNS / "steady.txt").write_text(done.stdout + done.stderr)
    return {
        "busy": loops,
        "status": done.returncode,
        "minutes": round((time.monotonic() - began) / 60, 1),
        "passed": sum(map(int, re.findall(r"(\d+) passed", done.stdout))),
        "red": re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE),
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.steady", description="make test, again and again")
    parser.add_argument("--runs", type=int, default=10, help="runs in all (10)")
    parser.add_argument("--busy", type=int, default=4, help="busy loops beside each run (4)")
    parser.add_argument("--minutes", type=float, default=20, help="begin no run after so many minutes (20)")
    options = parser.parse_args()
    began, (commit, folder), kept = time.monotonic(), clone(), RUNS / "steady.jsonl"
    known = list(map(json.loads, kept.read_text().splitlines())) if kept.exists() else []
    known = [each for each in known if (each["commit"], each["busy"]) == (commit, options.busy)]
    while len(known) < options.runs and time.monotonic() < began + 60 * options.minutes:
        known.append({"commit": commit, **run(folder, options.busy)})
        with kept.open("a") as file:
            file.write(f"{json.dumps(known[-1])}\n")
    sys.stdout.write(f"| {commit}, {options.busy} busy loops | minutes | passed | red |\n|---|---|---|---|\n")
    for number, each in enumerate(known, 1):
        names = ", ".join(each["red"]) or ("none" if each["status"] == 0 else f"status {each['status']}")
        sys.stdout.write(f"| {number} | {each['minutes']} | {each['passed']} | {names} |\n")
    red = sum(each["status"] != 0 for each in known)
    sys.stdout.write(f"{red} of {len(known)} runs are red; {options.runs - len(known)} are left.\n")
    return 1 if red else 0


if __name__ == "__main__":
    sys.exit(main())
