"""Runs of `python -m proof.torture`, and how each has to end: those of `make torture` and of each database.

    python -m proof.torture.trials --docs docs      # half an hour; writes docs/long-run.md
    python -m proof.torture.trials --databases      # five minutes; prints what came of each run

PostgreSQL is embedded, SQLite is a file. MariaDB takes part where FENCELOCK_TEST_MARIADB_URL names one or one
answers at its standard port. `--folder` keeps the histories; a run whose history is there already is judged
again instead of made again.
"""

from __future__ import annotations

import argparse
import os
import platform
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from benchmarks.guard import mariadb
from proof.torture.checker import Verdict, check_file, describe

#: Workers that are paused again and again with little to lock.
PAUSED = (
    *("--fault", "worker-pause", "--workers", "4", "--tasks", "0", "--resources", "2", "--writes", "1"),
    *("--ttl", "0.2", "--pause", "2", "--every", "0.1", "--think", "0.02"),
)
#: Tokens that are minted the obvious way, on nodes and in a database.
NAIVE = ("--naive-tokens", "--fault", "node-blank", "--fault", "worker-pause", "--resources", "5")
NAIVE_TABLE = (
    *("--naive-tokens", "--fault", "worker-pause", "--resources", "3", "--workers", "4"),
    *("--ttl", "0.2", "--pause", "1", "--every", "0.1"),
)
#: Writers that read without a claim, and write by statements that know no object.
CORE = ("--style", "core", *PAUSED, "--resources", "1", "--pause", "0.5", "--every", "0.05")
#: Short leases, and faults that follow each other closely.
DENSE = ("--ttl", "0.5", "--pause", "1.5", "--every", "0.3", "--workers", "4", "--tasks", "8")


@dataclass(frozen=True, slots=True)
class Trial:
    name: str
    title: str
    options: Sequence[str]
    right: bool = True


LONG = (
    Trial(
        "million",
        "A million acquisitions while everything breaks",
        (
            *("--acquisitions", "1000000", "--workers", "4", "--tasks", "96"),
            *("--resources", "3000", "--writes", "0.02"),
        ),
    ),
    Trial("guard", "Paused workers, and the guard", (*PAUSED, "--duration", "60")),
    Trial(
        "no-guard",
        "Control: the same without the guard",
        ("--without-guard", *PAUSED, "--duration", "60"),
        right=False,
    ),
    Trial(
        "naive",
        "Control: the largest counter of a majority as the token",
        (*NAIVE, "--duration", "30"),
        right=False,
    ),
)


def databases(stack: ExitStack) -> dict[str, tuple[str, ...]]:
    over = ("--authority", "database", "--database")
    found: dict[str, tuple[str, ...]] = {"PostgreSQL": (*over, "postgresql"), "SQLite": (*over, "sqlite")}
    if (url := mariadb(stack)) is not None:
        found["MariaDB"] = (*over, url.render_as_string(hide_password=False), "--yes")
    return found


def database_trials(stack: ExitStack) -> Iterator[Trial]:
    for name, where in databases(stack).items():
        short = name.lower()
        yield Trial(short, f"{name}: all faults", (*where, *DENSE, "--acquisitions", "2000"))
        naive = (*where, *NAIVE_TABLE, "--duration", "15")
        yield Trial(f"{short}-naive", f"{name}, control: a naive table", naive, right=False)
        no_guard = (*where, "--without-guard", *PAUSED, "--duration", "20")
        yield Trial(f"{short}-no-guard", f"{name}, control: no guard", no_guard, right=False)


class WrongEndError(Exception):
    """A run that must end right did not, or a control did."""


def judge(trial: Trial, folder: Path) -> Verdict:
    """Make a run unless its history is there, and return the verdict."""
    history = folder / trial.name / "history.jsonl"
    if not history.exists():
        command = [sys.executable, "-m", "proof.torture", *trial.options]
        subprocess.run([*command, "--output", str(history.parent)], check=False)
    verdict = check_file(history)
    if verdict.right is not trial.right:
        raise WrongEndError(f"{trial.title}: {'; '.join(describe(verdict))}")
    return verdict


def section(trial: Trial, verdict: Verdict) -> str:
    servers = ", ".join(sorted(verdict.run.servers.values()))
    missing = [fault for fault in verdict.run.settings["faults"] if fault not in verdict.faults]
    without = (
        f" Without {', '.join(missing)}: the machine or the settings do not allow it." if missing else ""
    )
    return "\n".join(
        [
            f"## {trial.title}",
            "",
            "```sh",
            shlex.join(["python", "-m", "proof.torture", *trial.options]),
            "```",
            "",
            f"{verdict.run.started[:10]}, fencelock {verdict.run.fencelock}, {servers}.{without}",
            "",
            "```text",
            *describe(verdict),
            "```",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--databases", action="store_true", help="runs over databases that grant leases")
    parser.add_argument("--folder", type=Path, help="where histories are kept; nowhere by default")
    parser.add_argument("--docs", type=Path, metavar="FOLDER", help="write long-run.md there")
    options = parser.parse_args()
    about = f"Python {platform.python_version()}, {os.cpu_count()} cores for servers and workers together."
    page = ["# Long runs", f"Written by `make torture`, not by hand, from the histories of the runs. {about}"]
    with ExitStack() as stack:
        folder = options.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for trial in database_trials(stack) if options.databases else LONG:
            page.append(section(trial, judge(trial, folder)))
            print(page[-1], end="\n\n", flush=True)
    if options.docs is not None:
        (options.docs / "long-run.md").write_text("\n\n".join(page) + "\n")


if __name__ == "__main__":
    main()
