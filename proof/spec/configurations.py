"""The checks: every configuration that must hold, and for every rule the one that fails without it."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass


@dataclass(frozen=True, slots=True)
class Run:
    """One configuration."""

    name: str
    _: KW_ONLY
    lists: str = "012"  #: of servers by digit; the first is the one in force at the start
    acqs: int = 2  #: how many acquisitions of one resource
    recs: int = 0  #: how many recoverers
    ops: int = 0  #: how many operators
    maxg: int = 2  #: largest counter looked at
    maxe: int = 0  #: largest epoch
    lose: int = 0  #: how often a server is blanked
    roll: int = 0  #: how often one comes back older
    restart: int = 0  #: how often one comes back unharmed
    feature: str = ""  #: optional parts that take part
    mutant: str = ""  #: the rule that is left out (or rules); the run must then find a violation
    walk: int = 0  #: random walks of so many steps together, instead of looking at every state
    depth: int = 80  #: length of each walk
    seed: int = 1
    minutes: float = 0  #: for what cannot be finished: schedules of 1, 2, 3 … steps, as far as the time goes
    tlc: bool = False  #: small enough for TLC
    long: bool = False

    @property
    def servers(self) -> list[str]:
        """All servers by digit: those of the lists; and one more where a server can have a double."""
        listed = sorted(set(self.lists) - {","})
        return [*listed, str(len(listed))] if "double" in self.feature else listed

    @property
    def bounds(self) -> str:
        """How far is looked, in words."""
        counts = (
            (len(set(self.lists) - {","}), "node"),
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
    Run("lock core, 2 counters", tlc=True),
    Run("lock core", maxg=3),
    Run("lock core, 4 counters", maxg=4, long=True),
    Run("lock core, N=5", lists=FIVE),
    Run("hints and restored keys", maxg=3, feature="hint,restore"),
    Run("EXTEND restores a released key", acqs=3, feature="restore"),
    Run("EXTEND restores, 1 loss", recs=1, maxe=1, lose=1, feature="restore"),
    Run("REMINT", feature="remint", tlc=True),
    Run("REMINT again and again, resent", acqs=3, maxg=3, feature="remint,restore"),
    Run("REMINT, 1 loss", recs=1, maxe=1, lose=1, feature="remint"),
    Run("guard with claim", acqs=3, maxg=3, feature="guard", long=True),
    Run("guard with claim, 2", feature="guard", tlc=True),
    Run("guard without claims", feature="guard,unclaimed", tlc=True),
    Run("guard without claims, 3 holders", acqs=3, maxg=3, feature="guard,unclaimed", long=True),
    Run("COMMIT in doubt", feature="guard,unclaimed,doubt", tlc=True),
    Run("COMMIT in doubt, REMINT", feature="guard,unclaimed,doubt,remint", tlc=True),
    Run("init, 2 losses", ops=1, lose=2, feature="init"),
    Run("init, FLUSHALL while two initialise", ops=2, lose=2, maxg=1, feature="init,only_outcome"),
    Run("init, the other order", ops=2, lose=2, maxg=1, feature="init,only_outcome,descending"),
    Run(
        "init, two initialise, recovery",
        recs=1,
        ops=2,
        maxg=1,
        maxe=1,
        lose=1,
        feature="init,only_outcome,descending",
        minutes=5,
        long=True,
    ),
    Run("recovery, 1 acquisition", acqs=1, recs=1, maxe=1, lose=1, tlc=True),
    Run("recovery, 2 losses", recs=1, maxe=1, lose=2),
    Run("recovery, 1 rollback", recs=1, maxe=1, roll=1, long=True),
    Run("older data in the same process", acqs=1, recs=1, maxe=1, roll=1, feature="reload"),
    Run("older data in the same process, epochs", acqs=0, recs=2, maxe=2, roll=2, feature="reload"),
    Run("recovery, 2 recoverers", recs=2, maxe=2, lose=1, long=True),
    Run("epochs, N=3, 3 losses", acqs=0, recs=2, maxe=3, lose=3),
    Run("epochs, N=5, 3 losses", lists=FIVE, acqs=0, recs=2, maxe=3, lose=3),
    Run("epochs, N=5, 3 recoverers", lists=FIVE, acqs=0, recs=3, maxe=3, lose=2, long=True),
    Run("epochs, N=5, 2 rollbacks", lists=FIVE, acqs=0, recs=2, maxe=2, roll=2, long=True),
    Run("all restarted, 2 losses", acqs=0, recs=2, maxe=3, lose=2, restart=3, feature="all_restarted"),
    Run(
        "all restarted, 1 rollback",
        acqs=0,
        recs=2,
        maxe=3,
        roll=1,
        restart=3,
        feature="all_restarted",
        long=True,
    ),
    Run("a double, cut off", recs=1, maxg=1, maxe=1, lose=1, restart=1, feature="double"),
    Run("a double, N=5", lists=FIVE, recs=1, maxg=1, maxe=1, lose=1, feature="double"),
    Run("a double, all restarted", recs=1, maxg=1, maxe=2, restart=2, feature="double,all_restarted"),
    Run("a double, 1 acquisition", acqs=1, recs=1, maxg=1, maxe=1, lose=1, feature="double", tlc=True),
    Run("rise to the storage's epoch", acqs=0, recs=2, maxe=3, lose=3, feature="rise"),
    Run("rise, N=5", lists=FIVE, acqs=0, recs=2, maxe=2, lose=2, feature="rise"),
    Run("rise, 1 recoverer", acqs=0, recs=1, maxe=2, lose=1, feature="rise", tlc=True),
    Run("rise, 3 recoverers", acqs=0, recs=3, maxe=2, lose=2, feature="rise"),
    Run("finish a change", lists=REPLACE, acqs=0, recs=2, ops=1, maxe=2, lose=1, feature="finish,once"),
    Run(
        "finish a change, no loss",
        lists=REPLACE,
        acqs=0,
        recs=1,
        ops=1,
        maxe=2,
        feature="finish,once",
        tlc=True,
    ),
    Run("change, one operator", lists=REPLACE, acqs=1, ops=1, maxg=1, maxe=1, tlc=True),
    Run("init, one operator", acqs=1, ops=1, lose=1, maxg=1, feature="init", tlc=True),
    Run("change, two lists wanted", lists="012,013,014", acqs=0, ops=2, maxe=2),
    Run("change and back", lists="01,012", acqs=0, ops=2, maxe=3),
    Run("change and back, 1 loss", lists="01,012", acqs=0, recs=1, ops=2, maxe=3, lose=1),
    Run("change, 1 loss", lists=REPLACE, acqs=0, recs=1, ops=2, maxe=2, lose=1),
    Run("change, 2 losses", lists=REPLACE, acqs=0, recs=1, ops=2, maxe=3, lose=2, feature="stray", long=True),
    Run("change, all new", lists="012,345", acqs=0, recs=1, ops=2, maxe=2, lose=1, feature="once"),
    Run("change, with clients", lists=REPLACE, recs=1, ops=1, maxe=2, lose=1, long=True),
    Run("recovery, N=5, 2 acquisitions", lists=FIVE, recs=2, maxe=2, lose=2, minutes=20, long=True),
    Run(
        "walks, N=5, recovery",
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
        "walks, N=5, everything",
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
    Run("M no write-back", maxg=3, mutant="no_write_back", tlc=True),
    Run("M no ownership test", maxg=3, mutant="no_ownership"),
    Run("M no g <= T", maxg=3, mutant="no_own_limit"),
    Run("M any incarnation", roll=1, mutant="any_incarnation", tlc=True),
    Run("M any memory", roll=1, mutant="any_memory", feature="reload"),
    Run("M mixed epochs", recs=1, maxe=1, lose=1, mutant="mixed_epochs", feature="unpromised"),
    Run("M restore before completion", maxg=3, mutant="restore_early", feature="restore"),
    Run("M no ticket", recs=1, maxe=1, lose=2, mutant="no_ticket", feature="unpromised"),
    Run("M ticket not bound", recs=1, maxe=1, roll=2, mutant="ticket_unbound", feature="unpromised"),
    Run("M client's ticket", recs=1, maxe=1, lose=2, mutant="client_ticket", feature="only_outcome"),
    Run("M client's ticket, init", ops=1, lose=1, mutant="client_ticket", feature="init,only_outcome"),
    Run("M ADMIT before PROMISE", recs=1, maxe=2, lose=2, mutant="admit_first", tlc=True),
    Run(
        "M RAISE without PROMISE, N=5",
        lists=FIVE,
        acqs=0,
        recs=2,
        maxe=2,
        lose=2,
        mutant="raise_first",
        feature="unpromised",
    ),
    Run(
        "M one look at promises", acqs=0, recs=3, maxe=2, lose=2, mutant="one_look", feature="rise,unpromised"
    ),
    Run(
        "M rise without PROMISE",
        acqs=0,
        recs=2,
        maxe=2,
        lose=2,
        mutant="raise_first",
        feature="rise,unpromised",
    ),
    Run("M ADMIT before RAISE", recs=1, maxg=1, maxe=1, lose=1, mutant="admit_unraised", feature="double"),
    Run(
        "M all restarted, no RAISE",
        recs=1,
        maxg=1,
        maxe=1,
        restart=2,
        mutant="all_unraised",
        feature="double,all_restarted",
    ),
    Run("M RAISE of a double", recs=1, maxg=1, maxe=1, lose=1, mutant="raise_double", feature="double"),
    Run(
        "M finish without PROMISE",
        lists=REPLACE,
        acqs=0,
        recs=2,
        ops=1,
        maxe=2,
        lose=1,
        mutant="finish_unpromised",
        feature="finish,unpromised,once",
    ),
    Run("M no epoch", recs=1, maxe=1, lose=1, mutant="no_epoch", feature="only_outcome"),
    Run(
        "M BEGIN after reading, N=5",
        lists=FIVE,
        acqs=0,
        recs=2,
        maxe=2,
        lose=3,
        mutant="read_begin",
        feature="unpromised",
    ),
    Run(
        "M read and BEGIN node by node",
        acqs=0,
        recs=2,
        maxe=2,
        roll=1,
        restart=3,
        mutant="read_begin",
        feature="unpromised,all_restarted",
    ),
    Run(
        "M no p",
        acqs=0,
        recs=2,
        maxe=2,
        roll=1,
        restart=3,
        mutant="no_promise_field",
        feature="unpromised,all_restarted",
    ),
    Run(
        "M ADMIT lowers p",
        acqs=0,
        recs=2,
        maxe=3,
        restart=1,
        mutant="admit_lowers_p",
        feature="all_restarted",
        tlc=True,
    ),
    Run(
        "M one closing pass",
        lists=REPLACE,
        acqs=0,
        recs=1,
        ops=1,
        maxe=2,
        lose=1,
        mutant="one_pass",
        tlc=True,
    ),
    Run("M no next", lists="012,013,014", acqs=0, ops=2, maxe=2, mutant="no_next", feature="unpromised"),
    Run(
        "M recovery reads closed nodes",
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
        "M OPEN without PROMISE",
        lists=REPLACE,
        acqs=0,
        recs=1,
        ops=2,
        maxe=2,
        lose=1,
        mutant="open_unpromised,one_look",
        feature="stray,unpromised,once",
    ),
    Run(
        "M ticket outside the hash",
        lists=REPLACE,
        acqs=0,
        recs=1,
        ops=2,
        maxe=2,
        lose=2,
        mutant="ticket_apart,one_look",
        feature="stray,unpromised,once",
    ),
    Run("M init in any order", ops=2, lose=1, maxg=1, mutant="init_unordered", feature="init,only_outcome"),
    Run(
        "M init without a second look",
        ops=2,
        lose=2,
        maxg=1,
        mutant="init_one_look",
        feature="init,only_outcome,descending",
    ),
    Run(
        "M same ids for a new node",
        lists=REPLACE,
        acqs=0,
        ops=2,
        maxe=2,
        lose=1,
        mutant="fixed_ids",
        feature="once",
    ),
    Run("M a list comes again", lists="01,012", acqs=0, ops=2, maxe=3, mutant="no_past", tlc=True),
    Run("M no claim", mutant="no_claim", feature="guard", tlc=True),
    Run("M no guard", mutant="no_guard", feature="guard", tlc=True),
    Run("M not what was loaded", mutant="no_loaded", feature="guard,unclaimed", tlc=True),
    Run("M no row lock", mutant="no_row_lock", feature="guard,unclaimed,doubt", tlc=True),
)
