"""What a run is asked for, and the names of the faults."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from proof.torture.history import Manner, Style

#: Every kind of fault, and what it does.
FAULTS: Final = {
    "worker-pause": "SIGSTOP a worker for longer than its leases last",
    "worker-kill": "SIGKILL a worker, and start another in its place",
    "node-pause": "SIGSTOP nodes, fewer than a majority",
    "node-blank": "SIGKILL nodes, fewer than a majority, which come back without their memory",
    "node-rollback": "SIGKILL nodes, fewer than a majority, which come back with an older copy of their data",
    "node-rolling": "SIGKILL every node in its turn, the next when all vote again; they lose their memory",
    "node-replica": "REPLICAOF a server with an older copy, and back, on nodes, fewer than a majority",
    "node-flush": "FLUSHALL on nodes, fewer than a majority, which keep running",
    "clock": "step the wall clock of a node forwards or backwards",
    "partition": "delay, drop and duplicate what workers say to nodes, and what these answer",
    "signal": "have a signal handler raise in a worker's calls, while its connections open and close",
    "line-freeze": "SIGSTOP a worker that may have many places in line",
    "odd-value": "have another program write anything into the keys of a lock, on all nodes",
    "partial-write": "lock so much at once that no socket takes it with one write",
    "lie": "have a client make up texts of hand_over and numbers, about locks that no worker wants",
    "database-kill": "have the database end connections in the middle of a COMMIT",
    "connection-end": "end connections over which a database grants leases",
    "lease-silence": "keep such connections open, and pass nothing on",
}
#: What a cluster of databases is, and the faults that only it has. Each is made once at least.
CLUSTERS: Final = {
    "galera": {
        "galera-kill": "SIGKILL a node, which comes back with its data",
        "galera-leave": "SIGTERM a node, which leaves its group and joins again",
        "galera-blank": "SIGKILL a node, which comes back without its data",
        "galera-pause": "SIGSTOP a node for longer than its group waits for it",
        "galera-minority": "SIGSTOP two nodes, so that the third has no majority",
        "galera-isolate": "cut a node off its group, while clients reach it",
    },
    "patroni": {
        "switchover": "ask Patroni to make another node the primary",
        "primary-kill": "SIGKILL the primary's PostgreSQL, which Patroni starts again",
        "primary-crash": "SIGKILL the primary's PostgreSQL and its Patroni, which come back later",
        "primary-pause": "SIGSTOP the primary's PostgreSQL and its Patroni until another node leads",
        "two-primaries": "SIGSTOP the primary's Patroni until another node leads beside the old primary",
        "etcd-pause": "SIGSTOP two of three members of etcd for longer than Patroni's ttl",
        "silence": "keep connections open and pass nothing on, for all clients and nodes",
        "lag": "SIGSTOP the processes that feed the standbys, then SIGKILL the primary and its Patroni",
    },
}
#: What grants the leases: nodes of Valkey or Redis, the run's database, or one of the stores.
NODES, DATABASE, ETCD, ZOOKEEPER = "nodes", "database", "etcd", "zookeeper"
#: What stores that elect a leader are, and the faults that only they have. Each is made once at least.
STORES: Final = {
    ETCD: {
        "etcd-kill": "SIGKILL members, maybe all, which come back with their data",
        "etcd-leader-kill": "SIGKILL the member that leads, which comes back with its data",
        "etcd-member-pause": "SIGSTOP one or two of the members",
        "etcd-silence": "let members pass nothing on to clients, or byte after byte, on open connections",
        "etcd-isolate": "cut a member off the others, while clients reach it",
        "etcd-restore": "restore all members from a snapshot: what was granted since is lost",
        "etcd-compact": "have all older revisions forgotten",
    },
    ZOOKEEPER: {
        "zookeeper-kill": "SIGKILL the server that leads, which comes back with its data",
        "zookeeper-pause": "SIGSTOP one or two of the servers",
        "zookeeper-silence": "let servers pass nothing on to clients, or byte after byte",
        "zookeeper-restart": "SIGKILL all servers, which come back with their data",
        "zookeeper-wipe": "SIGKILL all servers, which come back without their data",
    },
}
_OWN: Final = {fault: where for where, faults in {**CLUSTERS, **STORES}.items() for fault in faults}
#: Those that break nodes, fewer than a majority at a time.
_OF_NODES: Final = frozenset(
    {"node-pause", "node-blank", "node-rolling", "node-rollback", "node-replica", "node-flush"}
)
#: What only nodes have.
_WITH_NODES: Final = _OF_NODES | {"clock", "partition", "line-freeze", "odd-value", "partial-write"}
#: Faults at the edges: nodes, network and clocks are well, so that more is promised.
GENTLE: Final = frozenset({"signal", "line-freeze", "odd-value", "partial-write", "lie"})
#: What only connections to a database have.
_OF_CONNECTIONS: Final = frozenset({"connection-end", "lease-silence"})
AUTHORITIES: Final = (NODES, DATABASE, *STORES)
#: Styles of writing for which something is promised.
PROMISED: Final = tuple(style for style in Style if style is not Style.CORE)
#: The servers that are started unless others are named.
EMBEDDED: Final = ("postgresql", "sqlite", *CLUSTERS)


def default_faults(authority: str, database: str = "") -> tuple[str, ...]:
    general = (each for each in FAULTS if authority == DATABASE or each not in _OF_CONNECTIONS)
    return (*general, *CLUSTERS.get(database, ()), *STORES.get(authority, ()))


@dataclass(frozen=True, slots=True)
class Settings:
    """What a run is asked for. The options of the command line say what each means."""

    output: Path
    faults: tuple[str, ...] = tuple(FAULTS)
    duration: float | None = 60.0
    acquisitions: int | None = None
    workers: int = 6
    tasks: int = 8
    authority: str = NODES
    nodes: tuple[str, ...] = ()
    nodes_count: int = 5
    database: str = "postgresql"
    resources: int = 20
    ttl: float = 1.0
    pause: float = 2.0
    every: float = 1.0
    writes: float = 0.5
    think: float = 0.01
    seed: int = 0
    styles: tuple[Style, ...] = PROMISED
    manners: tuple[Manner, ...] = tuple(Manner)
    mends: bool = True
    guard: bool = True
    quorum: bool = True
    synchronous: bool = False

    def __post_init__(self) -> None:
        for fault in self.faults:
            if fault not in FAULTS and fault not in _OWN:
                raise ValueError(f"there is no fault {fault!r}; choose from {', '.join((*FAULTS, *_OWN))}")
        self._check_authority()
        if self.duration is None and self.acquisitions is None:
            raise ValueError("when is it enough? Give --duration, --acquisitions, or both")
        for name in ("duration", "acquisitions", "workers", "nodes_count", "resources"):
            _check(name, getattr(self, name), above=0)
        for name in ("tasks", "think", "pause"):
            _check(name, getattr(self, name), above=-1)
        for name in ("ttl", "every"):
            _check(name, getattr(self, name), above=0.0)
        if not 0 <= self.writes <= 1:
            raise ValueError(f"--writes is a share, from 0 to 1, not {self.writes:g}")
        if self.pause <= self.ttl and "worker-pause" in self.faults:
            raise ValueError(
                f"--pause {self.pause:g} is to outlast a lease of --ttl {self.ttl:g}: make it longer"
            )
        if not self.quorum and (self.tasks or self.writes):
            raise ValueError("naive tokens are for workers that block and do not write: --tasks 0 --writes 0")

    def _check_authority(self) -> None:
        if self.authority not in AUTHORITIES:
            raise ValueError(f"--authority is one of {', '.join(AUTHORITIES)}, not {self.authority!r}")
        if self.nodes and not self.on_nodes:
            raise ValueError(
                f"--nodes are for --authority nodes: with --authority {self.authority} there are none"
            )
        if not self.on_nodes and not set(self.manners) - {Manner.FAIR, Manner.LARGE}:
            raise ValueError("--manner fair and large are for --authority nodes")
        if self.synchronous and self.database != "patroni":
            raise ValueError("--synchronous is for --database patroni")

    @property
    def gentle(self) -> bool:
        """Whether nodes, network and clocks are well all the time."""
        return GENTLE.issuperset(self.faults)

    @property
    def on_database(self) -> bool:
        return self.authority == DATABASE

    @property
    def on_nodes(self) -> bool:
        return self.authority == NODES

    @property
    def on_store(self) -> bool:
        return self.authority in STORES

    @property
    def blocking_workers(self) -> list[int]:
        return [number for number in range(self.workers) if not (self.tasks and number % 2)]

    @property
    def minority(self) -> int:
        """Return how many nodes may be without their memory at a time."""
        return (len(self.nodes or range(self.nodes_count)) - 1) // 2

    @property
    def embedded_nodes(self) -> bool:
        return self.on_nodes and not self.nodes

    @property
    def embedded_database(self) -> bool:
        return self.database in EMBEDDED

    def skipped(self) -> dict[str, str]:
        """Return which of the faults cannot be had with these settings, and why."""
        return {fault: why for fault in self.faults if (why := self._reason_against(fault))}

    def _reason_against(self, fault: str) -> str:  # noqa: C901, PLR0911, PLR0912 - a table, in effect
        match fault:
            case str() if (own := _OWN.get(fault)) and own not in {self.database, self.authority}:
                return f"it is for {'--authority' if own in STORES else '--database'} {own}"
            case str() if fault in _WITH_NODES and not self.on_nodes:
                return f"the leases are those of --authority {self.authority}, and there are no nodes"
            case "lie" if not self.quorum:
                return "naive tokens know no hand_over"
            case "signal" if not self.blocking_workers:
                return "each worker runs tasks, and no handler should raise in those"
            case "odd-value" if not _OF_NODES.isdisjoint(self.faults):
                return "it is for runs in which no node is broken, else nobody could put the keys in order"
            case str() if fault in _OF_NODES | {"clock", "odd-value"} and self.nodes:
                return "the nodes were not started by this run"
            case str() if fault in _OF_NODES and not self.minority:
                return "it is for fewer than a majority of the nodes, which takes at least 3"
            case "partition" if not all(map(_can_be_proxied, self.nodes)):
                return "only nodes with plain redis:// URLs can be put behind the proxy"
            case "partition" if self.workers == 1:
                return "somebody is to see the nodes as they are: it takes at least 2 workers"
            case "database-kill" if self.database != "postgresql":
                return "only the embedded PostgreSQL has its connections ended"
            case "database-kill" if not self.writes:
                return "nothing is written"
            case str() if fault in _OF_CONNECTIONS and not self.on_database:
                return "it is for --authority database"
            case str() if fault in _OF_CONNECTIONS and self.database.startswith("sqlite"):
                return "SQLite is a file, to which there are no connections"
            case "lease-silence" if self.database in CLUSTERS:
                return "a cluster has faults of its own"
            case _:
                return ""


def _can_be_proxied(url: str) -> bool:
    return url.startswith("redis://")


def _check(name: str, value: float | None, *, above: float) -> None:
    if value is None:
        return
    if not math.isfinite(value) or value <= above:
        option = "--" + name.replace("_", "-")
        least = "more than 0" if above == 0 else "0 or more"
        raise ValueError(f"{option} is {least}, not {value:g}")
