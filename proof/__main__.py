"""Every proof in short, in a quarter of an hour on two cores; `--long` makes those of a release, in hours.

    python -m proof
    python -m proof torture model      # those whose name contains one of these words
    python -m proof --long

A proof is a command, the status with which it has to end, and words that it has to print. A control has to
fail. Controls come last, two at a time: a machine that is busy does not make them right.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from proof.torture.run import skipped_faults
from proof.torture.settings import DATABASE, NODES, Settings, default_faults
from proof.torture.trials import (
    CORE,
    DENSE,
    EDGE,
    EDGES,
    NAIVE,
    NAIVE_TABLE,
    PAUSED,
    STORE,
    databases,
    naive_store,
    stores,
)

ROOT = Path(__file__).parents[1]
#: Configurations of the model that are explored within seconds; those with an M leave a rule out.
MODEL = (
    *("lock core", "lock core, N=5", "REMINT", "guard with claim, 2", "guard without claims"),
    *("COMMIT in doubt", "COMMIT in doubt, REMINT", "recovery, 1 acquisition", "epochs, N=5, 3 losses"),
    *("init, 2 losses", "finish a change", "change and back", "rise, N=5", "a double, N=5"),
    *(
        "M no write-back",
        "M no epoch",
        "M ADMIT before PROMISE",
        "M ADMIT before RAISE",
        "M rise without PROMISE",
    ),
    *("M one closing pass", "M no next", "M recovery reads closed nodes", "M a list comes again"),
    *("M no claim", "M no guard", "M not what was loaded", "M no row lock"),
)
#: What each fault at the edges breaks where the library has nothing against it.
_BREAKS = {
    "signal": "P1",
    "line-freeze": "line",
    "odd-value": "error",
    "lie": "error",
    "partial-write": "error",
}
#: Seconds after which a proof in short is said to hang.
_PATIENCE = 600


@dataclass(frozen=True, slots=True)
class Proof:
    name: str
    command: Sequence[str]
    status: int = 0
    says: Sequence[str] = ()

    @property
    def is_control(self) -> bool:
        return self.status != 0

    def problem(self, patience: float | None) -> str:
        """Run the command of this part; return the problem, and nothing where all is as it must be."""
        try:
            done = subprocess.run(
                self.command, capture_output=True, text=True, check=False, cwd=ROOT, timeout=patience
            )
        except subprocess.TimeoutExpired as error:
            return f"it did not end within {error.timeout:g} s"
        problems = [f"it did not print {word!r}" for word in self.says if word not in done.stdout]
        if done.returncode != self.status:
            problems.append(f"it ended with status {done.returncode}, and not {self.status}")
        if problems:
            problems += done.stdout.splitlines()[-20:] + done.stderr.splitlines()[-20:]
        return "\n".join(problems)


def _python(*arguments: str) -> list[str]:
    return [sys.executable, "-m", *arguments]


#: The tools of the proofs have tests of their own.
TOOLS = _python("pytest", "-n", "2", "--dist", "loadfile", "-q", "proof/tests")


def _torture(name: str, folder: Path, *options: str, breaks: str = "", says: Sequence[str] = ()) -> Proof:
    """Return a run of the torture that has to end RIGHT, or as a control to break a rule."""
    command = _python("proof.torture", *options, "--output", str(folder / name.replace(" ", "-")))
    if breaks:
        return Proof(f"torture, control: {name}", command, 1, ["WRONG: ", f" {breaks}"])
    return Proof(f"torture: {name}", command, 0, ["RIGHT: ", *says])


def _faults(authority: str, database: str) -> list[str]:
    """Return the faults that such a run can have on this machine."""
    settings = Settings(Path(), default_faults(authority), authority=authority, database=database)
    return [f" {fault}" for fault in settings.faults if fault not in skipped_faults(settings)]


def short(folder: Path, stack: ExitStack) -> Iterator[Proof]:
    if shutil.which(os.environ.get("CXX", "g++")):
        check = [sys.executable, str(ROOT / "proof" / "spec" / "check.py"), "--no-tlc", "--jobs", "2"]
        yield Proof("model, and some of its rules left out", [*check, *MODEL])
    else:
        print("left out: the model, which needs g++ or another compiler in CXX")
    yield Proof("tests of the tools", [*TOOLS, "-m", "not long"])
    yield Proof("simulation", _python("proof.simulation", "--seeds", "25", "--jobs", "2"))
    yield Proof("mutants: each recorded seed notices again", _python("proof.simulation.mutants", "--replay"))
    yield Proof("tokens of databases, and three controls", _python("proof.minting", "--seeds", "600"))
    yield Proof("the line of etcd and ZooKeeper, and controls", _python("proof.line", "--seeds", "1000"))
    yield Proof("the line of callers that want several names, and a control", _python("proof.several"))
    yield Proof("bytes and texts at random", _python("proof.fuzz", "--seconds", "20"))
    yield Proof("fenced models beside their twins", _python("proof.twins", "--programs", "1000"))
    faults = _faults(NODES, "postgresql")
    yield _torture("all faults", folder, *DENSE, "--duration", "60", says=faults)
    yield _torture("paused workers", folder, *PAUSED, "--duration", "12", says=[" worker-pause"])
    no_guard = ("--without-guard", *PAUSED, "--duration", "12")
    yield _torture("no guard", folder, *no_guard, breaks="lost update")
    yield _torture("naive tokens", folder, *NAIVE, "--duration", "12", breaks="P1")
    yield _torture("statements without a claim", folder, *CORE, "--duration", "12", breaks="lost update")
    for fault, options in EDGES.items():
        edge = ("--fault", fault, *EDGE, *options)
        yield _torture(fault, folder, *edge, "--duration", "8", says=[f" {fault}"])
        control = (*edge, "--duration", "15", "--without-mends")
        yield _torture(f"{fault} without mends", folder, *control, breaks=_BREAKS[fault])
    yield Proof("leaders, and a control", _python("proof.leaders", "--rounds", "1"))
    yield Proof("slots, readers and writers, and controls", _python("proof.slots", "--seconds", "5"))
    yield Proof("receipts, and a control", _python("proof.receipts", "--runs", "40"))
    yield Proof("retries, and a control", _python("proof.retries", "--seconds", "30"))
    # After those, because they drop the same database of MariaDB when they end.
    for name, where in databases(stack).items():
        faults = _faults(DATABASE, where[3])
        yield _torture(f"{name} grants leases", folder, *where, *DENSE, "--duration", "12", says=faults)
        naive = (*where, *NAIVE_TABLE, "--duration", "10")
        yield _torture(f"a naive table in {name}", folder, *naive, breaks="P1")
    for store in stores():
        faults = _faults(store, "postgresql")
        run = ("--authority", store, *STORE, "--every", "1", "--duration", "40")
        yield _torture(f"{store} grants leases", folder, *run, says=faults)
        yield _torture(
            f"naive tokens of {store}", folder, *naive_store(store), "--duration", "15", breaks="P2"
        )


LONG = (
    Proof("tests of the tools", TOOLS),
    Proof("model", [sys.executable, str(ROOT / "proof" / "spec" / "check.py"), "--jobs", "2"]),
    Proof("simulation", _python("proof.simulation", "--seeds", "2000", "--jobs", "2")),
    Proof("tokens of databases, and three controls", _python("proof.minting", "--seeds", "20000")),
    Proof("the line of etcd and ZooKeeper, and controls", _python("proof.line", "--seeds", "40000")),
    Proof("mutants: searched for from the first seed", _python("proof.simulation.mutants", "--jobs", "2")),
    Proof("bytes and texts at random", _python("proof.fuzz", "--seconds", "600")),
    Proof("fenced models beside their twins", _python("proof.twins", "--programs", "10000")),
    Proof(
        "SQLAlchemy's own tests on fenced tables", _python("proof.sqlalchemy_suite", "--fenced", "test/orm")
    ),
    Proof("torture", _python("proof.torture.trials", "--folder", "runs", "--docs", "proof/torture")),
    Proof("torture of databases", _python("proof.torture.trials", "--databases")),
    Proof("torture at the edges", _python("proof.torture.trials", "--edges")),
    Proof("torture of etcd and ZooKeeper", _python("proof.torture.trials", "--consensus")),
    Proof("leaders", _python("proof.leaders", "--rounds", "20")),
    Proof("slots, readers and writers", _python("proof.slots", "--seconds", "600")),
    Proof("receipts", _python("proof.receipts")),
    Proof("retries", _python("proof.retries", "--seconds", "600")),
)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m proof", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("words", nargs="*", help="only proofs whose name contains one of these")
    parser.add_argument("--long", action="store_true", help="what a release runs, in hours")
    options = parser.parse_args()
    patience = None if options.long else _PATIENCE
    began = time.monotonic()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        controls, results = [], []
        for proof in LONG if options.long else short(folder, stack):
            if options.words and not any(word in proof.name for word in options.words):
                continue
            if proof.is_control:
                controls.append(proof)
            else:
                results.append(succeeds(proof, patience))
        with ThreadPoolExecutor(2) as pool:
            results += pool.map(lambda control: succeeds(control, patience), controls)
    failed = results.count(False)
    minutes = (time.monotonic() - began) / 60
    print(f"{failed or 'none'} of them failed, in {minutes:.1f} minutes")
    return 1 if failed else 0


def succeeds(proof: Proof, patience: float | None) -> bool:
    """Make a proof and print how it ended; return whether that is as it must be."""
    start = time.monotonic()
    problem = proof.problem(patience)
    lines = [f"{'NOT ok' if problem else 'ok':<6} {time.monotonic() - start:7.1f} s  {proof.name}"]
    lines += [f"        {line}" for line in problem.splitlines()]
    print("\n".join(lines), flush=True)
    return not problem


if __name__ == "__main__":
    sys.exit(main())
