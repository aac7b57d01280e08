"""Faults of clusters of databases, and of stores: each breaks something, and sees it whole again.

A fault is over when the cluster is healthy and all clients of `service.py` have been served again. These
measure the outage, where databases grant the leases.
"""

from __future__ import annotations

import random
import signal
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Final

import psutil
import psycopg

from proof.servers import Etcd, ZooKeeper
from proof.servers.galera import Galera
from proof.servers.members import Members
from proof.servers.patroni import TTL, Patroni
from proof.torture.proxy import DRIPPING, FAIR, SILENT, Proxies
from proof.torture.service import Service
from proof.torture.stage import FaultError, Note, Stage

#: Seconds in which a cluster is healthy again, and a leader is found.
_PATIENCE: Final = 120.0
#: Seconds for which a node of Galera is paused; its group gives it up after five.
_PAUSED: Final = 12.0
#: Seconds for which members of a store are away, at least and at most.
_AWAY: Final = (0.5, 5.0)
#: Seconds for which two primaries stand beside each other.
_BESIDE: Final = 6.0
_END_ALL: Final = (
    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
    " WHERE datname = current_database() AND pid <> pg_backend_pid()"
)


def _await(stage: Stage, ready: Callable[[], bool], failure: str) -> None:
    """Wait until it is ready, or the run is over."""
    deadline = time.monotonic() + _PATIENCE
    while not ready() and not stage.over.is_set():
        if time.monotonic() > deadline:
            raise FaultError(failure)
        stage.sleep(0.1)


@contextmanager
def _broken(
    stage: Stage, fault: str, cluster: Galera | Patroni | Members, nodes: Collection[int]
) -> Iterator[Note]:
    """Break nodes in the block, and see the cluster whole behind it."""
    kind = stage.settings.authority if isinstance(cluster, Members) else "database"
    with stage.fault(fault, *(f"{kind} {node}" for node in nodes)) as note:
        began = time.monotonic()
        yield note
        _await(stage, cluster.is_healthy, f"after {fault} the cluster did not become healthy")
        healthy = time.monotonic()
        with suppress(FaultError):  # a run of naive locks has none, nor has one over a store
            service = stage.tool(Service)
            _await(stage, lambda: service.is_back(healthy), f"after {fault} not all clients were served")
            note.detail = str(service.outage(began, nodes if isinstance(cluster, Galera) else ()))


@contextmanager
def _paused(processes: Iterable[psutil.Process]) -> Iterator[None]:
    stopped = []
    try:
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.suspend()
                stopped.append(process)
        yield
    finally:
        for process in stopped:
            with suppress(psutil.NoSuchProcess):
                process.resume()


def _kill(processes: Iterable[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()


def _end_node(
    fault: str, farewell: signal.Signals, stage: Stage, rng: random.Random, *, blank: bool = False
) -> None:
    cluster, node = stage.tool(Galera), rng.randrange(3)
    with _broken(stage, fault, cluster, [node]):
        cluster.end_node(node, farewell)
        stage.sleep(rng.uniform(1.0, 3.0))
        cluster.come_back(node, blank=blank)


def _pause_nodes(fault: str, count: int, stage: Stage, rng: random.Random) -> None:
    cluster, nodes = stage.tool(Galera), rng.sample(range(3), count)
    with _broken(stage, fault, cluster, nodes), _paused(map(cluster.process, nodes)):
        stage.sleep(_PAUSED)


def _isolate(stage: Stage, rng: random.Random) -> None:
    cluster, node = stage.tool(Galera), rng.randrange(3)
    with _broken(stage, "galera-isolate", cluster, [node]), cluster.isolated(node):
        stage.sleep(_PAUSED)


@contextmanager
def _primary(stage: Stage, fault: str) -> Iterator[tuple[Patroni, int]]:
    cluster = stage.tool(Patroni)
    if (leader := cluster.leader()) is None:
        raise FaultError("no node leads")
    with _broken(stage, fault, cluster, [leader]):
        yield cluster, leader


def _await_other(stage: Stage, cluster: Patroni, leader: int) -> None:
    _await(stage, lambda: cluster.leader(other_than=leader) is not None, "no other node led")


def _switch_over(stage: Stage, _: random.Random) -> None:
    with _primary(stage, "switchover") as (cluster, leader):
        if cluster.ask(leader, "switchover", {"leader": f"n{leader}"}, seconds=_PATIENCE) is None:
            raise FaultError("Patroni did not switch over")


def _kill_primary(stage: Stage, _: random.Random) -> None:
    with _primary(stage, "primary-kill") as (cluster, leader):
        _kill(cluster.postgres(leader))
        stage.sleep(1.0)


def _crash_primary(stage: Stage, _: random.Random) -> None:
    with _primary(stage, "primary-crash") as (cluster, leader):
        _crash(stage, cluster, leader)


def _crash(stage: Stage, cluster: Patroni, leader: int) -> None:
    _kill([cluster.patroni(leader), *cluster.postgres(leader)])
    _await_other(stage, cluster, leader)
    cluster.come_back(leader)


def _pause_primary(stage: Stage, _: random.Random) -> None:
    with _primary(stage, "primary-pause") as (cluster, leader):
        processes = [*cluster.postgres(leader), cluster.patroni(leader)]
        with _paused(processes):
            _await_other(stage, cluster, leader)
            stage.sleep(4.0)


def _make_two_primaries(stage: Stage, _: random.Random) -> None:
    with _primary(stage, "two-primaries") as (cluster, leader), _paused([cluster.patroni(leader)]):
        _await_other(stage, cluster, leader)
        # A client that connects again takes the first primary in its URL.
        with psycopg.connect(cluster.dsn(leader), autocommit=True) as connection:
            connection.execute(_END_ALL)
        stage.sleep(_BESIDE)


def _pause_etcd(stage: Stage, _: random.Random) -> None:
    with _primary(stage, "etcd-pause") as (cluster, _leader), _paused(cluster.etcd()[:2]):
        stage.sleep(TTL + 5.0)


def _be_silent(stage: Stage, _: random.Random) -> None:
    proxies = stage.tool(Proxies)
    with _primary(stage, "silence"):
        for node in range(3):
            proxies.change(node, SILENT)
        stage.sleep(float(TTL))
        for node in range(3):
            proxies.change(node, FAIR)


def _lag(stage: Stage, _: random.Random) -> None:
    with _primary(stage, "lag") as (cluster, leader):
        feeders = [each for each in cluster.postgres(leader) if "walsender" in " ".join(each.cmdline())]
        with _paused(feeders):
            stage.sleep(3.0)
            _crash(stage, cluster, leader)


def _kill_members(
    fault: str, kind: type[Etcd | ZooKeeper], least: int, stage: Stage, rng: random.Random
) -> None:
    members = stage.tool(kind)
    victims = rng.sample(range(members.count), rng.randint(least, members.count))
    with _broken(stage, fault, members, victims):
        _kill_and_come_back(stage, rng, members, victims)


def _kill_leader(fault: str, kind: type[Etcd | ZooKeeper], stage: Stage, rng: random.Random) -> None:
    members = stage.tool(kind)
    victims = [members.leader()]
    with _broken(stage, fault, members, victims):
        _kill_and_come_back(stage, rng, members, victims)


def _kill_and_come_back(
    stage: Stage, rng: random.Random, members: Etcd | ZooKeeper, victims: Collection[int]
) -> None:
    for member in victims:
        members.kill(member)
    stage.sleep(rng.uniform(*_AWAY))
    for member in victims:
        members.come_back(member)


def _pause_members(fault: str, kind: type[Etcd | ZooKeeper], stage: Stage, rng: random.Random) -> None:
    members = stage.tool(kind)
    victims = rng.sample(range(members.count), rng.randint(1, 2))
    with _broken(stage, fault, members, victims), _paused(map(members.process, victims)):
        stage.sleep(rng.uniform(*_AWAY))


def _silence_members(fault: str, kind: type[Etcd | ZooKeeper], stage: Stage, rng: random.Random) -> None:
    members, proxies = stage.tool(kind), stage.tool(Proxies)
    victims = rng.sample(range(members.count), rng.randint(1, members.count))
    with _broken(stage, fault, members, victims):
        for victim in victims:
            proxies.change(victim, rng.choice((SILENT, DRIPPING)))
        stage.sleep(rng.uniform(*_AWAY))
        for victim in victims:
            proxies.change(victim, FAIR)


def _isolate_member(stage: Stage, rng: random.Random) -> None:
    members = stage.tool(Etcd)
    victim = rng.choice((members.leader(), rng.randrange(members.count)))
    with _broken(stage, "etcd-isolate", members, [victim]), members.isolated(victim):
        stage.sleep(rng.uniform(*_AWAY))


def _restore(stage: Stage, rng: random.Random) -> None:
    members = stage.tool(Etcd)
    with tempfile.TemporaryDirectory(prefix="fencelock-") as folder:
        snapshot = Path(folder) / "snapshot"
        members.snapshot(snapshot)
        stage.sleep(rng.uniform(*_AWAY))
        with _broken(stage, "etcd-restore", members, range(members.count)):
            members.restore(snapshot)


def _compact(stage: Stage, _: random.Random) -> None:
    members = stage.tool(Etcd)
    with _broken(stage, "etcd-compact", members, range(members.count)):
        members.compact()


def _wipe(stage: Stage, _: random.Random) -> None:
    members = stage.tool(ZooKeeper)
    with _broken(stage, "zookeeper-wipe", members, range(members.count)):
        members.wipe()


CLUSTER_FAULTS: Final[Mapping[str, Callable[[Stage, random.Random], None]]] = {
    "galera-kill": partial(_end_node, "galera-kill", signal.SIGKILL),
    "galera-leave": partial(_end_node, "galera-leave", signal.SIGTERM),
    "galera-blank": partial(_end_node, "galera-blank", signal.SIGKILL, blank=True),
    "galera-pause": partial(_pause_nodes, "galera-pause", 1),
    "galera-minority": partial(_pause_nodes, "galera-minority", 2),
    "galera-isolate": _isolate,
    "switchover": _switch_over,
    "primary-kill": _kill_primary,
    "primary-crash": _crash_primary,
    "primary-pause": _pause_primary,
    "two-primaries": _make_two_primaries,
    "etcd-pause": _pause_etcd,
    "silence": _be_silent,
    "lag": _lag,
    "etcd-kill": partial(_kill_members, "etcd-kill", Etcd, 1),
    "etcd-leader-kill": partial(_kill_leader, "etcd-leader-kill", Etcd),
    "etcd-member-pause": partial(_pause_members, "etcd-member-pause", Etcd),
    "etcd-silence": partial(_silence_members, "etcd-silence", Etcd),
    "etcd-isolate": _isolate_member,
    "etcd-restore": _restore,
    "etcd-compact": _compact,
    "zookeeper-kill": partial(_kill_leader, "zookeeper-kill", ZooKeeper),
    "zookeeper-pause": partial(_pause_members, "zookeeper-pause", ZooKeeper),
    "zookeeper-silence": partial(_silence_members, "zookeeper-silence", ZooKeeper),
    "zookeeper-restart": partial(_kill_members, "zookeeper-restart", ZooKeeper, 3),
    "zookeeper-wipe": _wipe,
}
