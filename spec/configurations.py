# ruff: noqa: INP001 - it stands beside the script that imports it
"""What is checked: every configuration that must hold, and for every rule the one that fails without it."""

from __future__ import annotations

from dataclasses import dataclass


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
        walk: random walks of so many steps together, instead of looking at every state; `depth` is the length
            of each, and `seed` decides them all.
        minutes: for what is too large to be finished: schedules of 1, 2, 3 … steps, as far as the time goes.
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
    seed: int = 1
    minutes: float = 0
    tlc: bool = False
    long: bool = False

    @property
    def servers(self) -> int:
        """How many servers there are in all lists."""
        return len(set(self.lists) - {","})

    @property
    def bounds(self) -> str:
        """How far is looked, in words."""
        counts = (
            (self.servers, "node"),
            (self.lists.count(",") and self.lists.count(",") + 1, "list"),
            (self.acqs, "acquisition"),
            (self.recs, "recoverer"),
            (self.ops, "operator"),
            (self.lose, "loss"),
            (self.roll, "rollback"),
            (self.restart, "restart"),
        )
        words = [f"{n} {word}{'' if n == 1 else 'es' if word[-1] == 's' else 's'}" for n, word in counts if n]
        words += [f"counters to {self.maxg}"] if self.acqs else []
        words += [f"epochs to {self.maxe}"] if self.maxe else []
        return ", ".join(words + self.feature.replace("_", " ").split(",")).rstrip(", ")


FIVE = "01234"
REPLACE = "012,013"  # server 3 takes the place of server 2
RUNS = (
    Run(name="lock core, 2 counters", maxg=2, tlc=True),
    Run(name="lock core", maxg=3),
    Run(name="lock core, 4 counters", maxg=4, long=True),
    Run(name="lock core, N=5", lists=FIVE, maxg=2),
    Run(name="hints and restored keys", maxg=3, feature="hint,restore"),
    Run(name="EXTEND restores a released key", acqs=3, feature="restore"),
    Run(name="EXTEND restores, 1 loss", recs=1, maxe=1, lose=1, feature="restore"),
    Run(name="REMINT", feature="remint", tlc=True),
    Run(name="REMINT again and again, resent", acqs=3, maxg=3, feature="remint,restore"),
    Run(name="REMINT, 1 loss", recs=1, maxe=1, lose=1, feature="remint"),
    Run(name="guard with claim", acqs=3, maxg=3, feature="guard", long=True),
    Run(name="guard with claim, 2", maxg=2, feature="guard", tlc=True),
    Run(name="sealed, every node forgets", lose=3, long=True, feature="sealed"),
    Run(name="sealed, a majority forgets", lose=2, feature="sealed"),
    Run(name="init, 2 losses", ops=1, lose=2, feature="init"),
    Run(name="init, FLUSHALL while two initialise", ops=2, lose=2, maxg=1, feature="init,only_outcome"),
    Run(name="init, the other order", ops=2, lose=2, maxg=1, feature="init,only_outcome,descending"),
    Run(
        name="init, two initialise, recovery",
        recs=1,
        ops=2,
        maxg=1,
        maxe=1,
        lose=1,
        feature="init,only_outcome,descending",
        minutes=5,
        long=True,
    ),
    Run(name="recovery, 1 acquisition", acqs=1, recs=1, maxe=1, lose=1, tlc=True),
    Run(name="recovery, 2 losses", recs=1, maxe=1, lose=2),
    Run(name="recovery, 1 rollback", recs=1, maxe=1, roll=1, long=True),
    Run(name="recovery, 2 recoverers", recs=2, maxg=2, maxe=2, lose=1, long=True),
    Run(name="epochs, N=3, 3 losses", acqs=0, recs=2, maxe=3, lose=3),
    Run(name="epochs, N=5, 3 losses", lists=FIVE, acqs=0, recs=2, maxe=3, lose=3),
    Run(name="epochs, N=5, 3 recoverers", lists=FIVE, acqs=0, recs=3, maxe=3, lose=2, long=True),
    Run(name="epochs, N=5, 2 rollbacks", lists=FIVE, acqs=0, recs=2, maxe=2, roll=2, long=True),
    Run(name="all restarted, 2 losses", acqs=0, recs=2, maxe=3, lose=2, restart=3, feature="all_restarted"),
    Run(
        name="all restarted, 1 rollback",
        acqs=0,
        recs=2,
        maxe=3,
        roll=1,
        restart=3,
        feature="all_restarted",
        long=True,
    ),
    Run(name="change, one operator", lists=REPLACE, acqs=1, ops=1, maxg=1, maxe=1, tlc=True),
    Run(name="init, one operator", acqs=1, ops=1, lose=1, maxg=1, feature="init", tlc=True),
    Run(name="change, two lists wanted", lists="012,013,014", acqs=0, ops=2, maxe=2),
    Run(name="change and back", lists="01,012", acqs=0, ops=2, maxe=3),
    Run(name="change and back, 1 loss", lists="01,012", acqs=0, recs=1, ops=2, maxe=3, lose=1),
    Run(name="change, 1 loss", lists=REPLACE, acqs=0, recs=1, ops=2, maxe=2, lose=1),
    Run(
        name="change, 2 losses",
        lists=REPLACE,
        acqs=0,
        recs=1,
        ops=2,
        maxe=3,
        lose=2,
        feature="stray",
        long=True,
    ),
    Run(name="change, all new", lists="012,345", acqs=0, recs=1, ops=2, maxe=2, lose=1, feature="once"),
    Run(name="change, with clients", lists=REPLACE, recs=1, ops=1, maxg=2, maxe=2, lose=1, long=True),
    Run(
        name="recovery, N=5, 2 acquisitions",
        lists=FIVE,
        recs=2,
        maxe=2,
        lose=2,
        minutes=20,
        long=True,
    ),
    Run(
        name="walks, N=5, recovery",
        lists=FIVE,
        acqs=3,
        recs=3,
        maxg=6,
        maxe=3,
        lose=3,
        roll=1,
        restart=5,
        feature="restore,remint,all_restarted",
        walk=12_000_000,
        depth=150,
        long=True,
    ),
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
        walk=3_000_000,
        depth=150,
    ),
    Run(name="M no write-back", acqs=2, maxg=3, mutant="no_write_back", tlc=True),
    Run(name="M no ownership test", acqs=2, maxg=3, mutant="no_ownership"),
    Run(name="M no g <= T", acqs=2, maxg=3, mutant="no_own_limit"),
    Run(name="M any incarnation", roll=1, mutant="any_incarnation", tlc=True),
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
        name="M BEGIN after reading, N=5",
        lists=FIVE,
        acqs=0,
        recs=2,
        maxe=2,
        lose=3,
        mutant="read_begin",
        feature="unpromised",
    ),
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
        feature="stray,unpromised,once",
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
        feature="stray,unpromised,once",
    ),
    Run(
        name="M init in any order",
        ops=2,
        lose=1,
        maxg=1,
        mutant="init_unordered",
        feature="init,only_outcome",
    ),
    Run(
        name="M init without a second look",
        ops=2,
        lose=2,
        maxg=1,
        mutant="init_one_look",
        feature="init,only_outcome,descending",
    ),
    Run(
        name="M same ids for a new node",
        lists=REPLACE,
        acqs=0,
        ops=2,
        maxe=2,
        lose=1,
        mutant="fixed_ids",
        feature="once",
    ),
    Run(name="M a list comes again", lists="01,012", acqs=0, ops=2, maxe=3, mutant="no_past", tlc=True),
    Run(name="M seal with <=", lose=2, mutant="seal_le", feature="sealed", tlc=True),
    Run(name="M no claim", mutant="no_claim", feature="guard", tlc=True),
    Run(name="M no guard", mutant="no_guard", feature="guard", tlc=True),
)
