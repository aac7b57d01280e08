"""Runs of `python -m proof.torture` over each database that grants leases, and controls that must fail.

    python -m proof.torture.database_runs          # some minutes; prints what came of each run

PostgreSQL is embedded, SQLite is a file. MariaDB takes part where FENCELOCK_TEST_MARIADB_URL names one or one
answers at its standard port. `--folder` keeps the histories; a run whose history is there already is judged
again instead of made again.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from benchmarks.guard import mariadb
from proof.torture.long_run import PAUSED, Trial, judge, section

_OVER_DATABASE = ("--authority", "database", "--database")
_ALL_FAULTS = (
    *("--acquisitions", "2000", "--ttl", "0.5", "--pause", "1.5", "--every", "0.3"),
    *("--workers", "4", "--tasks", "8"),
)
_NAIVE = (
    *("--naive-tokens", "--fault", "worker-pause", "--resources", "3", "--workers", "4"),
    *("--ttl", "0.2", "--pause", "1", "--every", "0.1", "--duration", "15"),
)


def trials(stack: ExitStack) -> Iterator[Trial]:
    """Yield the runs; databases that they need go with the stack."""
    databases: dict[str, tuple[str, ...]] = {"PostgreSQL": ("postgresql",), "SQLite": ("sqlite",)}
    if (url := mariadb(stack)) is None:
        print("MariaDB does not take part: no server answers")
    else:
        databases["MariaDB"] = (url.render_as_string(hide_password=False), "--yes")
    for name, database in databases.items():
        where = (*_OVER_DATABASE, *database)
        short = name.lower()
        yield Trial(short, f"{name}: all faults", (*where, *_ALL_FAULTS))
        yield Trial(f"{short}-naive", f"{name}, control: a naive table", (*where, *_NAIVE), right=False)
        yield Trial(
            f"{short}-no-guard",
            f"{name}, control: no guard",
            (*where, "--without-guard", *PAUSED, "--duration", "20"),
            right=False,
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m proof.torture.database_runs", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--folder", type=Path, help="where histories are kept; nowhere by default")
    options = parser.parse_args()
    with ExitStack() as stack:
        folder = options.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for trial in trials(stack):
            print(section(trial, judge(trial, folder)), end="\n\n", flush=True)


if __name__ == "__main__":
    main()
