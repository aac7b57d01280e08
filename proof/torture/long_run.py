"""The runs of `python -m proof.torture` in docs/long-run.md: two that must end right, and controls.

    python -m proof.torture.long_run --folder runs --docs docs      # half an hour; writes long-run.md

A run whose history is in the folder already is not made again, but judged again.
"""

from __future__ import annotations

import argparse
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from proof.torture.checker import Verdict, check_file, describe

#: Workers that are paused again and again with little to lock.
PAUSED = (
    *("--fault", "worker-pause", "--workers", "4", "--tasks", "0", "--resources", "2", "--writes", "1"),
    *("--ttl", "0.2", "--pause", "2", "--every", "0.1", "--think", "0.02"),
)
_MINUTE = ("--duration", "60")


@dataclass(frozen=True, slots=True)
class Trial:
    """A run, and whether it has to end right."""

    name: str
    title: str
    options: Sequence[str]
    right: bool = True


TRIALS = (
    Trial(
        "million",
        "A million acquisitions while everything breaks",
        (
            *("--acquisitions", "1000000", "--workers", "4", "--tasks", "96"),
            *("--resources", "3000", "--writes", "0.02"),
        ),
    ),
    Trial("guard", "Paused workers, and the guard", (*PAUSED, *_MINUTE)),
    Trial(
        "no-guard",
        "Control: the same without the guard",
        ("--without-guard", *PAUSED, *_MINUTE),
        right=False,
    ),
    Trial(
        "naive",
        "Control: the largest counter of a majority as the token",
        (
            *("--naive-tokens", "--fault", "node-blank", "--fault", "worker-pause"),
            *("--resources", "5", "--duration", "30"),
        ),
        right=False,
    ),
)


class WrongEndError(Exception):
    """A run that must end right did not, or a control did."""


def judge(trial: Trial, folder: Path) -> Verdict:
    """Make a run unless its history is there, and return the verdict.

    Raises:
        WrongEndError: it is not what it must be.
    """
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
        f" Without {', '.join(missing)}, which the machine or the settings do not allow." if missing else ""
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


def document(verdicts: Sequence[tuple[Trial, Verdict]]) -> str:
    about = f"Python {platform.python_version()}, {os.cpu_count()} cores for servers and workers together."
    head = "# Long runs\n\nWritten by `make torture`, not by hand, from the histories of the runs. " + about
    return "\n\n".join([head, *(section(trial, verdict) for trial, verdict in verdicts)]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m proof.torture.long_run", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--folder", type=Path, default=Path("runs"), help="of the histories (%(default)s)")
    parser.add_argument("--docs", type=Path, metavar="FOLDER", help="write long-run.md there")
    options = parser.parse_args()
    verdicts = [(trial, judge(trial, options.folder)) for trial in TRIALS]
    text = document(verdicts)
    print(text)
    if options.docs is not None:
        (options.docs / "long-run.md").write_text(text)


if __name__ == "__main__":
    main()
