"""The rules of the line, each of which a control leaves out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

#: Milliseconds that a restore takes at least. Clocks differ by less.
OUTAGE: Final = 1000
#: A mark older than this may be pruned. It is an hour in truth.
OLD: Final = 3 * OUTAGE


@dataclass(frozen=True, slots=True)
class Rules:
    """The rules of the protocol; the defaults are the shipped ones.

    Attributes:
        source: what a token is made from.
        compares_value: etcd: the mark has to be lower than the token; else its revision is compared.
        reads_in_line: ZooKeeper: the mark is read while the own entry stands; else it may be older.
        compares_base: a mint is refused where the base is another than the one remembered.
        enters_at_once: the lines of all resources in one transaction.
        entry: what a mint asks of the own entry; revision: that it is the one seen at the head.
        keeps_entries: etcd: an entry that is there is not put again by a late request to enter.
        moves_by_lease: etcd: an entry moves to a new lease only from the one that it is under.
        keeps_both: etcd: while it is not known whether an entry has moved, both leases are renewed.
        counts_from_first: etcd: "the lease exists" counts from the first request for it.
        forgets_base: ZooKeeper: the base is forgotten with the session.
        retires: ZooKeeper: a session that was cut off is closed once nothing is held under it: what was
            restored has entries of it that its process knows nothing of.
        all_anew: ZooKeeper: where one entry is missing, all are made again.
        part: ZooKeeper: how much of a session's timeout is valid after an answer.
        forgets_known: ZooKeeper: versions of marks are forgotten with the connection.
        prune_raises: ZooKeeper: prune raises the version of the base, which says that lines begin again.
        compares_mark: ZooKeeper: a client that minted while it entered looks whether another has minted
            since.
        spares_kept: ZooKeeper: prune leaves a mark alone that says how long its lock is kept.
    """

    source: Literal["clock", "place", "own + 1"] = "clock"
    compares_value: bool = True
    reads_in_line: bool = True
    compares_base: bool = True
    enters_at_once: bool = True
    entry: Literal["revision", "exists", "none"] = "revision"
    keeps_entries: bool = True
    moves_by_lease: bool = True
    keeps_both: bool = True
    counts_from_first: bool = True
    forgets_base: bool = True
    retires: bool = True
    all_anew: bool = True
    part: float = 2 / 3
    forgets_known: bool = True
    prune_raises: bool = True
    compares_mark: bool = True
    spares_kept: bool = True

    def mint(self, mark: int, base: int, now: int, place: int) -> int:
        """Return a token above a mark; `place` is the revision of the place in line."""
        if self.source == "place":
            return place
        if self.source == "own + 1":
            return mark + 1
        return max((mark >> 10) + 1, base + now) << 10


ETCD: Final = "etcd"
ZOOKEEPER: Final = "ZooKeeper"
SHIPPED: Final = Rules()
