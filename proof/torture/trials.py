"""Runs of `python -m proof.torture`, and how each has to end: the long one, and those of each database.

    python -m proof.torture.trials --docs proof/torture    # half an hour; writes long-run.md there
    python -m proof.torture.trials --databases      # five minutes; prints what came of each run
    python -m proof.torture.trials --edges          # seven minutes; the same of faults at the library's edges
    python -m proof.torture.trials --galera         # four minutes; the same of three nodes of Galera
    python -m proof.torture.trials --patroni        # eleven minutes; the same of three nodes of Patroni
    python -m proof.torture.trials --consensus      # seven minutes; the same of etcd and ZooKeeper

PostgreSQL is embedded, SQLite is a file. MariaDB takes part where FENCELOCK_TEST_MARIADB_URL names one or one
answers at its standard port. `--folder` keeps the histories; a run whose history is there already is judged
again instead of made again.
"""

from __future__ import annotations

import argparse
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from proof.servers import zookeeper
from proof.servers.mariadb import mariadb
from proof.torture.checker import Verdict, check_file, describe
from proof.torture.history import Fault, read_records
from proof.torture.service import OUTAGE

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
#: Two workers for each of three servers, one of them with tasks.
CLUSTER = (
    *("--ttl", "1", "--pause", "2", "--every", "3", "--workers", "6", "--tasks", "4"),
    *("--acquisitions", "2000"),
)
#: Workers of etcd and ZooKeeper: sessions last twice as long as leases, so that some pauses outlast them.
STORE = ("--ttl", "1", "--pause", "4", "--resources", "200", "--workers", "6", "--tasks", "8")
#: How each store loses what it has granted.
LOSSES = {"etcd": "etcd-restore", "zookeeper": "zookeeper-wipe"}
#: Faults at the edges: nodes and network are well. Nothing is written, so the database does not matter.
EDGE = ("--writes", "0", "--database", "sqlite", "--workers")
EDGES = {
    # On one node, so that an answer that is taken for another's is not outvoted.
    "signal": (
        *("3", "--tasks", "0", "--resources", "60", "--nodes-count", "1", "--every", "0.02"),
        *("--manner", "quick", "--manner", "fair"),
    ),
    "line-freeze": (
        *("4", "--tasks", "200", "--resources", "2", "--pause", "12", "--every", "0.2", "--manner", "fair"),
    ),
    "odd-value": (
        *("4", "--tasks", "100", "--resources", "300", "--every", "0.1", "--manner", "quick"),
        *("--manner", "fair"),
    ),
    "lie": ("4", "--tasks", "20", "--resources", "40", "--every", "0.05", "--manner", "quick"),
    "partial-write": ("4", "--ttl", "5", "--manner", "quick", "--manner", "large"),
}
#: What has a program see a loopback device that takes no more at a time than Ethernet does.
NARROW = ("unshare", "-rn", "sh", "-c", 'ip link set lo mtu 1500 up && exec "$0" "$@"')
OVER = ("--authority", "database", "--database")


@dataclass(frozen=True, slots=True)
class Trial:
    name: str
    title: str
    options: Sequence[str]
    right: bool = True
    within: Sequence[str] = ()  #: a command in which it runs


CLUSTERS = {
    "galera": (
        Trial("galera", "Galera: all faults", (*OVER, "galera", *CLUSTER)),
        Trial(
            "galera-naive",
            "Galera, control: a naive table",
            (*OVER, "galera", *NAIVE_TABLE, "--duration", "15"),
            right=False,
        ),
    ),
    # What an asynchronous failover loses is lost: there the tokens are judged, and no writes.
    "patroni": (
        Trial("patroni", "Patroni: all faults", (*OVER, "patroni", "--writes", "0", *CLUSTER)),
        Trial(
            "patroni-synchronous",
            "Patroni, synchronous_mode: all faults, and writes",
            (*OVER, "patroni", "--synchronous", *CLUSTER),
        ),
        Trial(
            "patroni-naive",
            "Patroni, control: a naive table",
            (*OVER, "patroni", *NAIVE_TABLE, "--duration", "15"),
            right=False,
        ),
    ),
}


def naive_store(store: str) -> tuple[str, ...]:
    """Return the options of a control: the store's own counter as the token."""
    return (
        *("--authority", store, "--naive-tokens", "--fault", LOSSES[store], "--fault", "worker-pause"),
        *("--resources", "5", "--workers", "4", "--every", "1"),
    )


def stores() -> list[str]:
    """Return the stores that this machine can run."""
    if lacks := zookeeper.missing():
        print(f"left out: ZooKeeper, which needs {lacks}")
    return [store for store in LOSSES if store != "zookeeper" or not lacks]


def store_trials() -> Iterator[Trial]:
    for store in stores():
        run = ("--authority", store, *STORE, "--every", "3", "--acquisitions", "10000")
        yield Trial(store, f"{store}: 10,000 acquisitions with all faults", run)
        control = (*naive_store(store), "--duration", "20")
        yield Trial(f"{store}-naive", f"{store}, control: its own counter as the token", control, right=False)


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
    found: dict[str, tuple[str, ...]] = {"PostgreSQL": (*OVER, "postgresql"), "SQLite": (*OVER, "sqlite")}
    if (url := mariadb(stack)) is not None:
        found["MariaDB"] = (*OVER, url.render_as_string(hide_password=False), "--yes")
    return found


def database_trials(stack: ExitStack) -> Iterator[Trial]:
    for name, where in databases(stack).items():
        short = name.lower()
        yield Trial(short, f"{name}: all faults", (*where, *DENSE, "--acquisitions", "2000"))
        naive = (*where, *NAIVE_TABLE, "--duration", "15")
        yield Trial(f"{short}-naive", f"{name}, control: a naive table", naive, right=False)
        no_guard = (*where, "--without-guard", *PAUSED, "--duration", "20")
        yield Trial(f"{short}-no-guard", f"{name}, control: no guard", no_guard, right=False)


def edge_trials() -> Iterator[Trial]:
    for fault, options in EDGES.items():
        run = ("--fault", fault, *EDGE, *options)
        within = NARROW if fault == "partial-write" and _works(*NARROW, "true") else ()
        yield Trial(fault, f"{fault}: 10,000 acquisitions", (*run, "--acquisitions", "10000"), within=within)
        control = (*run, "--without-mends", "--duration", "30")
        title = f"Control: {fault}, without what the library has against it"
        yield Trial(f"{fault}-control", title, control, right=False, within=within)


def _works(*command: str) -> bool:
    if shutil.which(command[0]) is None:
        return False
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


class WrongEndError(Exception):
    """A run that must end right did not, or a control did."""


def judge(trial: Trial, folder: Path) -> Verdict:
    """Make a run unless its history is there, and return the verdict."""
    history = folder / trial.name / "history.jsonl"
    if not history.exists():
        command = [*trial.within, sys.executable, "-m", "proof.torture", *trial.options]
        subprocess.run([*command, "--output", str(history.parent)], check=False)
    verdict = check_file(history)
    if verdict.right is not trial.right:
        raise WrongEndError(f"{trial.title}: {'; '.join(describe(verdict))}")
    return verdict


def section(trial: Trial, verdict: Verdict, outages: Sequence[str]) -> str:
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
            *outages,
            "```",
        ]
    )


def outages_of(history: Path) -> list[str]:
    """Return what each fault of a cluster cost, as it was measured."""
    with history.open(encoding="utf-8") as lines:
        faults = [record for record in read_records(lines) if isinstance(record, Fault)]
    # Of a fault of two nodes there are two records.
    found = {f"  {fault.fault:<16}{fault.detail}": None for fault in faults if OUTAGE in fault.detail}
    return ["outages", *sorted(found)] if found else []


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--databases", action="store_true", help="runs over databases that grant leases")
    parser.add_argument("--edges", action="store_true", help="runs with faults at the library's edges")
    parser.add_argument("--consensus", action="store_true", help="runs over etcd and ZooKeeper")
    for cluster, trials in CLUSTERS.items():
        parser.add_argument(
            f"--{cluster}", dest="trials", action="store_const", const=trials, help="runs over its nodes"
        )
    parser.add_argument("--folder", type=Path, help="where histories are kept; nowhere by default")
    parser.add_argument("--docs", type=Path, metavar="FOLDER", help="write long-run.md there")
    options = parser.parse_args()
    about = f"Python {platform.python_version()}, {os.cpu_count()} cores for servers and workers together."
    page = [
        "# Long runs",
        f"Written by `python -m proof.torture.trials`, not by hand, from the histories of the runs. {about}",
    ]
    with ExitStack() as stack:
        folder = options.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        chosen: Iterable[Trial] = options.trials or LONG
        if options.databases:
            chosen = database_trials(stack)
        elif options.edges:
            chosen = edge_trials()
        elif options.consensus:
            chosen = store_trials()
        for trial in chosen:
            verdict = judge(trial, folder)
            page.append(section(trial, verdict, outages_of(folder / trial.name / "history.jsonl")))
            print(page[-1], end="\n\n", flush=True)
    if options.docs is not None:
        (options.docs / "long-run.md").write_text("\n\n".join(page) + "\n")


if __name__ == "__main__":
    main()
