"""Every rule of the protocol and of the guard left out, one at a time, and what notices.

    python -m proof.simulation.mutants                 # look for each again, and show the table
    python -m proof.simulation.mutants --write         # the same, and write proof/simulation/mutants.md
    python -m proof.simulation.mutants "no claim"      # look for some
    python -m proof.simulation.mutants --replay        # only the seeds that stand in the table

The simulation goes first: seeds 0, 1, 2 … with three nodes, then with five, up to `SEEDS` each. What it
does not find in so many, a named schedule does, on real nodes or real databases. A double of a node that
is cut off has neither, but the model in `proof/spec/`. A mutant is a switch that exists only here.
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from fencelock.authority.redlock.membership import change, establish, recover
from fencelock.authority.redlock.membership.members import MembershipView
from fencelock.authority.redlock.membership.reports import NodeReport
from fencelock.authority.redlock.protocol import acquire, holding
from fencelock.authority.redlock.wire import nodes
from fencelock.lock.slots import OneOf, WriterLock
from proof.simulation import weaker
from proof.simulation.client import Habits
from proof.simulation.judge import STUCK
from proof.simulation.lying import Lying
from proof.simulation.node import ModelNode
from proof.simulation.rolling import Rolling
from proof.simulation.run import Kept, Run, play
from proof.simulation.slots import Slots
from proof.simulation.storage import Rules
from proof.simulation.tidy import Tidy

SEEDS = 100
FEW = 25
SIZES = (3, 5)
ROOT = Path(__file__).parents[2]
TABLE = ROOT / "proof" / "simulation" / "mutants.md"
_SCHEDULES = "tests/redlock/test_schedules.py::test_control"
_RECOVERIES = "tests/redlock/test_recovery_schedules.py::test_control"
_MEMBERS = "tests/redlock/test_members.py::test_"
_GUARD = "tests/guard/test_histories.py::test_without_the_guard_a_history_loses_a_write"


@dataclass(frozen=True, slots=True)
class Patch:
    owner: Any
    name: str
    instead: Any


@dataclass(frozen=True, slots=True)
class Mutant:
    """A rule that is left out."""

    name: str  #: the missing rule, as `proof/spec/` and the named schedules say it where they have it
    rule: str
    kept: Kept = Kept()  # noqa: RUF009 - it is a value
    patches: tuple[Patch, ...] = ()  #: replacements in the shipped generators
    control: str = ""  #: a test that shows what breaks without the rule, as pytest names it
    model: str = ""  #: the configuration of `proof/spec/` in which the rule is left out
    #: How many the simulation tries; fewer where several nodes must forget, each at its moment; none where it
    #: cannot leave the rule out.
    seeds: int = SEEDS
    run: type[Run] = Run

    @property
    def searched(self) -> str:
        return f"simulation, {self.run.kind}" if self.run.kind else "simulation"


def _node(name: str, rule: str, node: type[ModelNode], **more: Any) -> Mutant:
    return Mutant(name, rule, Kept(node=node), **more)


def _guard(name: str, rule: str, **left_out: Any) -> Mutant:
    control, model = left_out.pop("control", ""), left_out.pop("model", "")
    return Mutant(name, rule, Kept(guard=Rules(**left_out)), control=control, model=model)


def _habit(name: str, rule: str, **left_out: bool) -> Mutant:
    return Mutant(name, rule, Kept(habits=Habits(**left_out)))


def _recovery(
    name: str, rule: str, node: type[ModelNode] = ModelNode, patch: Patch | None = None, seeds: int = FEW
) -> Mutant:
    """Return one whose control has its name."""
    patches = () if patch is None else (patch,)
    return Mutant(name, rule, Kept(node=node), patches, f"{_RECOVERIES}[{name}]", seeds=seeds)


def _slots(name: str, rule: str, where: tuple[type, str], instead: Any) -> Mutant:
    return Mutant(name, rule, patches=(Patch(*where, instead),), run=Slots, seeds=FEW)


_GRANT = OneOf, "_grant_gen"
_ONE_LOOK = Patch(NodeReport, "still_promises", weaker.still_promises)

MUTANTS = (
    # The lock.
    Mutant(
        "no write-back",
        "a maximum is decided only when a majority stands at it",
        Kept(node=weaker.WithoutCatchingUp),
        (Patch(acquire, "_decide", weaker.maximum_without_write_back),),
        control=_SCHEDULES + "[maximum without write-back]",
    ),
    _node(
        "no ownership test",
        "CONFIRM counts only while the lock is still ours",
        weaker.WithoutOwnership,
        control=_SCHEDULES + "[CONFIRM without ownership]",
    ),
    _node(
        "no g <= T",
        "CONFIRM counts only where the node's own grant was not above T",
        weaker.WithoutComparison,
        control=_SCHEDULES + "[CONFIRM below the node's own grant]",
    ),
    Mutant(
        "mixed epochs",
        "votes of different epochs are never added up",
        patches=(Patch(acquire, "largest_epoch", weaker.mixed_epochs),),
        control=_SCHEDULES + "[votes of two epochs added up]",
    ),
    _habit("one nonce for all", "every attempt has a nonce of its own", new_nonces=False),
    Mutant(
        "restore before completion",
        "what EXTEND has made again vouches for no grant",
        control=_SCHEDULES + "[lock made again with its counter]",
        seeds=0,
    ),
    _node(
        "made again, and counted",
        "a lock that EXTEND has made again is not counted in that round",
        weaker.CountsMadeAgain,
        control=_SCHEDULES + "[lock made again and counted]",
    ),
    _node("RELEASE of anybody's lock", "RELEASE deletes a lock only if it is ours", weaker.ReleasesAnybodys),
    # A node that lost its memory.
    _node(
        "marker on demand",
        "a blank node does not vote",
        weaker.MarkerOnDemand,
        control=_SCHEDULES + "[marker made on demand]",
    ),
    _node(
        "clock instead of memory",
        "… nor does the time make up for what it has forgotten",
        weaker.ClockInsteadOfMemory,
    ),
    _node(
        "any incarnation",
        "a node that restarted does not vote before it is admitted again",
        weaker.AnyProcess,
        control=_SCHEDULES + "[marker without the run_id]",
        seeds=FEW,
    ),
    _node(
        "any memory",
        "a node that has loaded older data while it ran does not vote before it is admitted again",
        weaker.AnyMemory,
        control=_SCHEDULES + "[process without its memory]",
    ),
    _node(
        "no quarantine",
        "a node stays out until the locks that it has forgotten have ended",
        weaker.AdmitsAtOnce,
    ),
    _recovery(
        "no ticket",
        "ADMIT needs the ticket that BEGIN has put on the node",
        node=weaker.AdmitsWithoutTicket,
        seeds=SEEDS,
    ),
    _recovery("ticket not bound", "a ticket is of one server process", node=weaker.TicketOfAnyProcess),
    _recovery(
        "client's ticket", "the node makes the ticket up, never the same twice", node=weaker.TicketOfTheClient
    ),
    _recovery(
        "no epoch",
        "a node is admitted in an epoch in which nobody has voted",
        patch=Patch(recover, "_choose_epoch", weaker.same_epoch),
        seeds=SEEDS,
    ),
    _recovery(
        "RAISE without PROMISE",
        "a majority promises an epoch before anybody votes in it",
        patch=Patch(establish, "promise", weaker.no_promise),
    ),
    _recovery("no p", "what was promised is remembered", node=weaker.ForgetfulPromise, patch=_ONE_LOOK),
    _recovery("one look at promises", "a majority holds the promise at one time", patch=_ONE_LOOK),
    _recovery(
        "read and BEGIN node by node",
        "where all restarted, every node has its ticket before any is read",
        seeds=0,
    ),
    _recovery(
        "ADMIT lowers p",
        "who is admitted keeps what it has promised meanwhile",
        node=weaker.AdmitLowersPromise,
    ),
    _recovery("ticket outside the hash", "the ticket is lost with the promises beside it", seeds=0),
    Mutant(
        "ADMIT before RAISE",
        "a majority is raised before anybody is admitted",
        patches=(Patch(establish, "raise_voters", weaker.no_raise),),
        model="M ADMIT before RAISE",
        seeds=FEW,
    ),
    Mutant(
        "all restarted, no RAISE",
        "whoever votes is raised before restarted nodes are admitted",
        model="M all restarted, no RAISE",
        seeds=0,
    ),
    # A rolling restart of all nodes.
    Mutant(
        "a blank node's list is forgotten",
        "what a node has said about the list stands until it names another",
        patches=(Patch(MembershipView, "note", weaker.forgetful_note),),
        run=Rolling,
    ),
    Mutant(
        "all that forgot are added up",
        "who has just been admitted and who is blank are not added up against a lease",
        patches=(Patch(holding, "_still_extended", weaker.still_extended_all_gone),),
        control=_SCHEDULES + "[all that forgot are added up]",
        run=Rolling,
    ),
    _node(
        "locks on voters only",
        "a node is admitted with the locks of the leases that were extended meanwhile",
        weaker.MakesLocksAsVoter,
        control=_SCHEDULES + "[locks on voters only]",
        run=Rolling,
    ),
    # A client that lies.
    _node(
        "any number",
        "a node counts on from no number that no grants explain, nor for a lock that is not the sender's",
        weaker.Credulous,
        run=Lying,
    ),
    # Connections that break, and nodes that hang.
    Mutant(
        "nothing is owed",
        "a RELEASE that finds no connection, or a silent node, goes out when the node answers again",
        patches=(Patch(nodes._Node, "remember_release", weaker.owe_nothing),),
        run=Tidy,
    ),
    Mutant(
        "given up without RELEASE",
        "an attempt that came to nothing is released wherever it may have locked something",
        patches=(Patch(acquire, "abandon", weaker.abandon_nothing),),
        run=Tidy,
    ),
    # Semaphores, readers and writers.
    _slots(
        "another slot", "the slot that is told is the one that was granted", _GRANT, weaker.names_another_slot
    ),
    _slots(
        "slot of more readers",
        "a reader has one of the slots that a writer takes",
        _GRANT,
        weaker.slot_beyond,
    ),
    _slots(
        "writer without slots",
        "a writer has the resource and all slots",
        (WriterLock, "_grant_gen"),
        weaker.writer_without_slots,
    ),
    _slots(
        "slots given back",
        "a writer keeps each slot while it waits for the next",
        (WriterLock, "_collect_gen"),
        weaker.give_slot_back,
    ),
    _slots(
        "all or nothing",
        "… so that readers who never leave all slots at once do not starve it",
        (WriterLock, "_grant_gen"),
        weaker.all_or_nothing,
    ),
    # The list of nodes.
    _recovery(
        "one closing pass",
        "the nodes are closed still when they are looked at again",
        patch=Patch(change, "_closed_still", weaker.no_second_look),
    ),
    _recovery("no next", "which list comes next is set once", node=weaker.ClosedForAnybody),
    _recovery(
        "recovery reads closed nodes",
        "a closed node votes no more, and takes part in no recovery",
        node=weaker.OpenAllTheTime,
        patch=Patch(NodeReport, "closed", property(lambda _: False)),
    ),
    _recovery(
        "OPEN without PROMISE",
        "a majority of the new nodes promises the epoch before they are opened",
        seeds=0,
    ),
    Mutant(
        "same ids for a new node",
        "a list knows its nodes by the tickets that it was made with",
        control=_RECOVERIES + "[same ids for a new node]",
        seeds=0,
    ),
    Mutant(
        "a list comes again",
        "a fingerprint covers the list before",
        control=_RECOVERIES + "[a list comes again]",
        seeds=0,
    ),
    Mutant(
        "init in any order, with one look",
        "nodes are opened in the order of their ids, after a second look",
        control=_MEMBERS + "clients_that_look_once_and_open_in_any_order_make_two",
        seeds=0,
    ),
    # The storage.
    _guard("no guard", "a write is refused below the row's fence", compares=False, control=_GUARD),
    _guard("no stamp", "a write raises the row's fence", stamps=False),
    _guard("no claim", "the fence is raised before anything is read", claims=False),
    Mutant(
        "not what was loaded",
        "without a claim, an object is written only over the write that it was loaded from",
        control="tests/guard/test_unclaimed_histories.py::test_without_the_write_id_updates_are_lost",
        seeds=0,
    ),
    Mutant(
        "absolute ids",
        "a statement moves the write id that it finds, so that only an object of that version follows",
        control="tests/guard/test_write_id_mutants.py::test_the_mutant_loses_an_update[absolute ids]",
        seeds=0,
    ),
    Mutant(
        "seeded ids",
        "write ids come from the operating system, so that no two processes make the same",
        control="tests/guard/test_write_id_mutants.py::test_the_mutant_loses_an_update[seeded ids]",
        seeds=0,
    ),
    _guard("check, then write", "fence and row are looked at and written at once", at_once=False),
    _guard(
        "a holder writes once", "a write with the token that the fence is at is accepted", allows_again=False
    ),
    _habit(
        "release before COMMIT", "the lease outlives the transaction that wrote under it", commits_first=False
    ),
    _habit(
        "no REMINT in doubt", "after a COMMIT in doubt the next write has a larger token", mints_anew=False
    ),
    _habit("REMINT without claim", "… and claims with it before anything is read", claims_anew=False),
)


@dataclass(frozen=True, slots=True)
class Kill:
    """What noticed that a rule is missing, and where: all smaller seeds have passed."""

    by: str
    promise: str = ""
    size: int = 0
    seed: int = 0
    acquisitions: int = 0


@contextlib.contextmanager
def left_out(mutant: Mutant) -> Iterator[Kept]:
    with contextlib.ExitStack() as stack:
        for patch in mutant.patches:
            stack.callback(setattr, patch.owner, patch.name, patch.owner.__dict__[patch.name])
            setattr(patch.owner, patch.name, patch.instead)
        yield mutant.kept


def hunt(mutant: Mutant, seeds: int) -> Kill | None:
    """Return the first seed that shows that a rule is missing."""
    with left_out(mutant) as kept:
        for size in SIZES:
            acquisitions = 0
            for seed in range(seeds):
                outcome = play(seed, size, kept, run=mutant.run)
                acquisitions += outcome.acquisitions
                if outcome.violation not in {"", STUCK}:  # a run that is stuck does no harm
                    return Kill(mutant.searched, outcome.violation, size, seed, acquisitions)
    return None


def show(mutant: Mutant) -> Kill | None:
    if mutant.control:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", mutant.control]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
        return Kill(mutant.control) if done.returncode == 0 and " passed" in done.stdout else None
    if mutant.model:
        command = [sys.executable, "proof/spec/check.py", "--no-tlc", mutant.model]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=600)
        return Kill(f"proof/spec/ ({mutant.model})") if done.returncode == 0 else None
    return None


def judge(mutant: Mutant, most: int = SEEDS) -> Kill | None:
    """Return what notices that a rule is missing; None where nothing does."""
    return hunt(mutant, min(mutant.seeds, most)) or show(mutant)


def row(mutant: Mutant, kill: Kill | None) -> str:
    if kill is None:
        return f"| {mutant.name} | {mutant.rule} | **nothing** | | | |"
    if not kill.promise:
        by = kill.by.rpartition("::")[2]
        tried = f"none of {mutant.seeds}" if mutant.seeds else ""
        return f"| {mutant.name} | {mutant.rule} | {_kind(kill)} `{by}` | | {tried} | |"
    return (
        f"| {mutant.name} | {mutant.rule} | {kill.by}: {kill.promise} | {kill.size} | {kill.seed} "
        f"| {kill.acquisitions:,} |"
    )


def _kind(kill: Kill) -> str:
    if "::" not in kill.by:
        return "model"
    return "guard machine" if kill.by.startswith("tests/guard") else "named schedule"


def recorded() -> dict[str, list[str]]:
    lines = [line for line in TABLE.read_text().splitlines() if line.startswith("| ")][1:]
    cells = [[cell.strip() for cell in line[1:-1].split("|")] for line in lines]
    return {name: rest for name, *rest in cells}


def replay(mutant: Mutant, cells: Sequence[str]) -> str:
    """Play the seed of the table; return the difference from it, and nothing where all is as it was."""
    _, noticed, size, seed, _ = cells
    with left_out(mutant) as kept:
        found = f"{mutant.searched}: {play(int(seed), int(size), kept, run=mutant.run).violation}"
    if found != noticed:
        return f"{mutant.name}, seed {seed}: {found}, and not {noticed}"
    kept_all = play(int(seed), int(size), run=mutant.run).detail
    return f"{mutant.name}, seed {seed}, with all rules kept: {kept_all}" if kept_all else ""


def replay_all(mutants: Sequence[Mutant]) -> int:
    """Return how many recorded seeds do not notice again, or are not recorded."""
    rows = recorded()
    found = [mutant for mutant in mutants if rows.get(mutant.name, ["", ""])[1].startswith("simulation")]
    problems = [problem for mutant in found if (problem := replay(mutant, rows[mutant.name]))]
    problems += [f"{mutant.name}: no row" for mutant in mutants if mutant.name not in rows]
    sys.stdout.writelines(f"{problem}\n" for problem in problems)
    sys.stdout.write(f"{len(found)} seeds played again, {len(problems)} problems\n")
    return len(problems)


_PAGE = """\
# Every rule left out, and what notices

Written by `python -m proof.simulation.mutants --write`. Each row leaves one rule out of the shipped
protocol or of the guard, by a switch that exists only in the tests. The [simulation](README.md)
plays the seeds 0, 1, 2 … with three nodes and then with five, {seeds} of each at most, and stops at the
first broken promise; "rolling" ones are restarts of all nodes, one after the other, and in "tidy" ones only
connections break and nodes hang; in "slots" ones there are
semaphores, readers and writers. "None of 25" says that
so many of each have shown nothing: where several nodes must forget, each at its moment, random search has
little power, and fewer are tried. Then a named schedule on real nodes shows it, or the exhaustive
[model](../spec/README.md), which alone has doubles of nodes.
Seeds and acquisitions are the same on every machine.

| left out | the rule | noticed by | nodes | seed | acquisitions until then |
|---|---|---|---|---|---|
{rows}
"""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m proof.simulation.mutants", description=__doc__)
    parser.add_argument("names", nargs="*", help="mutants to look for; all where none is named")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="seeds to try with each number of nodes")
    parser.add_argument("--jobs", type=int, default=1, help="how many to judge side by side")
    parser.add_argument("--write", action="store_true", help="write proof/simulation/mutants.md")
    parser.add_argument("--replay", action="store_true", help="play only the seeds that stand in the table")
    options = parser.parse_args(arguments)
    mutants = [mutant for mutant in MUTANTS if not options.names or mutant.name in options.names]
    if options.replay:
        return replay_all(mutants)
    names = [mutant.name for mutant in mutants]
    rows, survivors = [], []
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        kills = pool.map(partial(_judge_by_name, most=options.seeds), names)
        for mutant, kill in zip(mutants, kills, strict=True):
            rows.append(row(mutant, kill))
            sys.stdout.write(f"{rows[-1]}\n")
            sys.stdout.flush()
            if kill is None:
                survivors.append(mutant.name)
    if options.write:
        TABLE.write_text(_PAGE.format(seeds=SEEDS, rows="\n".join(rows)))
    if survivors:
        sys.stderr.write(f"nothing notices: {', '.join(survivors)}\n")
    return len(survivors)


def _judge_by_name(name: str, most: int) -> Kill | None:
    """Judge a mutant in a process of its own, which knows it by name."""
    return judge(next(mutant for mutant in MUTANTS if mutant.name == name), most)


if __name__ == "__main__":
    sys.exit(main())
