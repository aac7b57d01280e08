"""What goes wrong: each fault is a function that breaks something, and sees it whole again.

Faults of one lane follow each other, those of different lanes happen at once. Those that take nodes' memory
are in one lane, for fewer than a majority may be without it at a time: each waits until the nodes have been
admitted again.
"""

from __future__ import annotations

import os
import random
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import redis
from sqlalchemy.exc import DBAPIError

from proof.servers import Node, Nodes
from proof.torture.clocks import Clocks
from proof.torture.clusters import CLUSTER_FAULTS
from proof.torture.doubt import Doubt
from proof.torture.edges import STRIKE
from proof.torture.lease_connections import LeaseConnections
from proof.torture.lies import tell_lies
from proof.torture.odd_values import write_odd_values
from proof.torture.proxy import FAIR, SILENT, Proxies, Weather
from proof.torture.settings import CLUSTERS
from proof.torture.stage import FaultError, Note, Stage

#: Seconds to wait for a session that is in the middle of a COMMIT.
_COMMIT_SECONDS: Final = 3.0
#: Seconds in which a server has copied a node's data.
_COPY_SECONDS: Final = 30.0
#: Seconds until a node has noticed that its clock was stepped.
_CLOCK_SECONDS: Final = 1.0

Inject = Callable[[Stage, random.Random], None]


def pause_worker(stage: Stage, rng: random.Random) -> None:
    _pause(stage, rng, "worker-pause", _choose_worker(stage, rng))


def _pause(stage: Stage, rng: random.Random, fault: str, number: int) -> None:
    pid = stage.crew.pid(number)
    with stage.fault(fault, f"worker {number}"):
        os.kill(pid, signal.SIGSTOP)
        try:
            stage.sleep(rng.uniform(stage.settings.ttl, stage.settings.pause))
        finally:
            os.kill(pid, signal.SIGCONT)


def kill_worker(stage: Stage, rng: random.Random) -> None:
    number = _choose_worker(stage, rng)
    with stage.fault("worker-kill", f"worker {number}"):
        stage.crew.replace(number)


def _choose_worker(stage: Stage, rng: random.Random) -> int:
    """Return one in the worst moment, which is before a write or its COMMIT; if there is none, anyone."""
    return rng.choice(stage.crew.thinking or range(len(stage.crew)))


def strike_worker(stage: Stage, rng: random.Random) -> None:
    number = rng.choice(stage.settings.blocking_workers)
    pid = stage.crew.pid(number)
    with stage.fault("signal", f"worker {number}") as note:
        count = rng.randint(50, 200)
        for _ in range(count):
            os.kill(pid, STRIKE)
            stage.sleep(rng.uniform(0.0005, 0.01))
        note.detail = f"{count} times"


def freeze_line(stage: Stage, rng: random.Random) -> None:
    """Pause a worker for long, if there is one with many places in line."""
    numbers = range(len(stage.crew))
    number = rng.choice(sorted({*numbers} - {*stage.settings.blocking_workers}) or numbers)
    _pause(stage, rng, "line-freeze", number)


def write_in_parts(stage: Stage, _: random.Random) -> None:
    """Note what the workers do from the first to the last moment."""
    with stage.fault("partial-write", "network"):
        stage.over.wait()


def pause_nodes(stage: Stage, rng: random.Random) -> None:
    with stage.some_nodes(rng, stage.settings.minority, "node-pause") as (victims, _):
        for victim in victims:
            stage.nodes[victim].pause()
        try:
            stage.sleep(rng.uniform(0.2, 1.5) * stage.settings.ttl)
        finally:
            for victim in victims:
                stage.nodes[victim].resume()


def step_clocks(stage: Stage, rng: random.Random) -> None:
    """Step the wall clocks of nodes by some leases, forwards or backwards, and later back again."""
    with stage.some_nodes(rng, len(stage.nodes), "clock") as (victims, note):
        offset = rng.choice((-1, 1)) * rng.uniform(0.5, 10) * stage.settings.ttl
        note.detail = f"{offset:+.1f} s"
        for victim in victims:
            stage.tool(Clocks).step(victim, offset)
        try:
            stage.sleep(_CLOCK_SECONDS + rng.uniform(0.2, 2) * stage.settings.ttl)
        finally:
            for victim in victims:
                stage.tool(Clocks).step(victim, 0.0)


def blank_nodes(stage: Stage, rng: random.Random) -> None:
    def blank(victims: Sequence[int]) -> None:
        for victim in victims:
            stage.nodes[victim].kill()
        stage.sleep(rng.uniform(0, 0.5) * stage.settings.ttl)
        for victim in victims:
            stage.nodes[victim].restart(keep_data=False)

    _take_memory(stage, rng, "node-blank", blank)


def restart_all_nodes(stage: Stage, rng: random.Random) -> None:
    """SIGKILL every node, and start it again with nothing; each when all of them vote again."""
    for victim in rng.sample(range(len(stage.nodes)), len(stage.nodes)):
        with stage.busy[victim], stage.fault("node-rolling", f"node {victim}") as note:
            if stage.over.is_set():
                return
            stage.nodes[victim].kill()
            stage.sleep(rng.uniform(0, 0.5) * stage.settings.ttl)
            stage.nodes[victim].restart(keep_data=False)
            _await_admission(stage, note)


def roll_nodes_back(stage: Stage, rng: random.Random) -> None:
    def roll_back(victims: Sequence[int]) -> None:
        with tempfile.TemporaryDirectory(prefix="fencelock-") as folder:
            copies = {victim: Path(folder) / str(victim) for victim in victims}
            for victim, copy in copies.items():
                stage.nodes[victim].copy_data(copy)
            stage.sleep(rng.uniform(0.1, 1) * stage.settings.ttl)
            for victim, copy in copies.items():
                stage.nodes[victim].roll_back(copy)

    _take_memory(stage, rng, "node-rollback", roll_back)


def follow_copies(stage: Stage, rng: random.Random) -> None:
    """Have nodes follow servers with older copies of their data, or a fellow; promote them while they run.

    The fellow is one of the victims: with its first replica it looks as if it had restarted.
    """

    def go_back(victims: Sequence[int]) -> None:
        if len(victims) > 1 and rng.random() < 1 / 2:
            fellow, *others = victims
            for other in others:
                copy_of(stage.nodes[fellow], stage.nodes[other])
            return
        with Nodes(len(victims)) as copies:
            for victim, copy in zip(victims, copies, strict=True):
                copy_of(stage.nodes[victim], copy)
            stage.sleep(rng.uniform(0.1, 1) * stage.settings.ttl)
            for victim, copy in zip(victims, copies, strict=True):
                copy_of(copy, stage.nodes[victim])

    _take_memory(stage, rng, "node-replica", go_back)


def copy_of(source: Node, target: Node) -> None:
    """Give a server the data that another has, by following it for a moment."""
    with redis.Redis.from_url(source.url) as master, redis.Redis.from_url(target.url) as replica:
        master.config_set("repl-diskless-sync-delay", 0)
        replica.replicaof(source.host, source.port)
        try:
            deadline = time.monotonic() + _COPY_SECONDS
            while replica.info("replication")["master_link_status"] != "up":
                if time.monotonic() > deadline:
                    raise FaultError("a server did not copy a node's data in time")
                time.sleep(0.01)
        finally:
            replica.replicaof("NO", "ONE")


def flush_nodes(stage: Stage, rng: random.Random) -> None:
    def flush(victims: Sequence[int]) -> None:
        for victim in victims:
            with redis.Redis.from_url(stage.nodes[victim].url, socket_timeout=10) as client:
                client.flushall()

    _take_memory(stage, rng, "node-flush", flush)


def _take_memory(stage: Stage, rng: random.Random, fault: str, take: Callable[[Sequence[int]], None]) -> None:
    """Take the memory of nodes, fewer than a majority, and wait until they vote again."""
    with stage.some_nodes(rng, stage.settings.minority, fault) as (victims, note):
        if victims:
            take(victims)
            _await_admission(stage, note)


def _await_admission(stage: Stage, note: Note) -> None:
    if stage.settings.quorum:
        epoch = stage.wait_until_admitted()
        note.detail = f"votes again in epoch {epoch}" if epoch >= 0 else "until the end of the run"


def partition(stage: Stage, rng: random.Random) -> None:
    """Have bad weather between some workers and some nodes, maybe all of them."""
    name = rng.choice(list(_WEATHERS))
    with stage.some_nodes(rng, len(stage.busy), "partition") as (victims, note):
        note.detail = name
        for victim in victims:
            stage.tool(Proxies).change(victim, _WEATHERS[name](stage.settings.ttl))
        try:
            stage.sleep(rng.uniform(0.5, 2) * stage.settings.ttl)
        finally:
            for victim in victims:
                stage.tool(Proxies).change(victim, FAIR)


_WEATHERS: Final[Mapping[str, Callable[[float], Weather]]] = {
    "delays": lambda ttl: Weather(delay=ttl / 2),
    "drops requests": lambda _: Weather(requests_pass=False),
    "drops answers": lambda _: Weather(answers_pass=False),
    "duplicates": lambda ttl: Weather(duplicates=0.5, lateness=1.5 * ttl),
    "delays and duplicates": lambda ttl: Weather(delay=ttl / 10, duplicates=0.5, lateness=ttl / 10),
}


def end_commits(stage: Stage, rng: random.Random) -> None:
    with stage.fault("database-kill", "database") as note:
        if rng.random() < 1 / 2:
            ended = stage.tool(Doubt).end_before(stage.over.is_set, _COMMIT_SECONDS)
            note.detail = f"{ended} connections that had not committed yet"
        else:
            ended = stage.tool(Doubt).end_after(stage.over.is_set, _COMMIT_SECONDS)
            note.detail = f"{ended} connections that had committed"


def end_connections(stage: Stage, rng: random.Random) -> None:
    with stage.fault("connection-end", "database") as note:
        try:
            note.detail = stage.tool(LeaseConnections).end(stage.crew.pids, rng, stage.over.is_set)
        except DBAPIError:
            if stage.settings.database not in CLUSTERS:  # where it may be broken at this moment
                raise


def silence_leases(stage: Stage, rng: random.Random) -> None:
    with stage.fault("lease-silence", "database"):
        stage.tool(Proxies).change(0, SILENT)
        stage.sleep(rng.uniform(0.5, 3) * stage.settings.ttl)
        stage.tool(Proxies).change(0, FAIR)


#: Faults of one lane follow each other; those of different lanes happen at once.
LANES: Final[Sequence[Mapping[str, Inject]]] = (
    {
        "worker-pause": pause_worker,
        "worker-kill": kill_worker,
        "signal": strike_worker,
        "line-freeze": freeze_line,
    },
    {"node-pause": pause_nodes, "clock": step_clocks},
    {
        "node-blank": blank_nodes,
        "node-rolling": restart_all_nodes,
        "node-rollback": roll_nodes_back,
        "node-replica": follow_copies,
        "node-flush": flush_nodes,
    },
    {"partition": partition},
    {"odd-value": write_odd_values},
    {"lie": tell_lies},
    {"partial-write": write_in_parts},
    {"database-kill": end_commits, "connection-end": end_connections},
    {"lease-silence": silence_leases},
    CLUSTER_FAULTS,
)


def start_lanes(stage: Stage, faults: Sequence[str]) -> list[threading.Thread]:
    threads = []
    for lane in LANES:
        if chosen := {fault: inject for fault, inject in lane.items() if fault in faults}:
            name = next(iter(lane))
            rng = random.Random(f"{stage.settings.seed}/{name}")
            threads.append(threading.Thread(target=_drive, args=(stage, chosen, rng), name=name))
            threads[-1].start()
    return threads


def _drive(stage: Stage, faults: Mapping[str, Inject], rng: random.Random) -> None:
    """Make one fault after the other, each as often as any other."""
    while not stage.over.is_set():
        for fault in rng.sample(list(faults), len(faults)):
            stage.sleep(rng.expovariate(1 / stage.settings.every))
            if stage.over.is_set():
                return
            try:
                faults[fault](stage, rng)
            except Exception as error:  # noqa: BLE001 - whatever it was, the run must end and say so
                stage.trouble.append(f"{fault}: {type(error).__name__}: {error}")
                return
