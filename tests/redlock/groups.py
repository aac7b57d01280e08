"""Servers that stand in for one another, as real processes: behind Sentinel, and in a Redis Cluster."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import redis
from redis.backoff import NoBackoff
from redis.crc import key_slot
from redis.retry import Retry

from fencelock import Redlock
from fencelock.errors import LockTimeoutError, QuorumError
from proof.servers.nodes import LOOPBACK, Node, Nodes, reserve_port, valkey_executable
from proof.servers.workspace import Workspace
from tests.polling import eventually
from tests.redlock.stage import NODE_KEY

_SLOTS = 16384

#: Seconds for which a server that took over stays out, and the longest lease.
MAX_TTL = 1.0
#: Settings of a `Redlock` that soon notices what happens to its nodes.
PATIENT: dict[str, Any] = {"node_timeout": 0.5, "connect_timeout": 1.5, "outage_grace": 0.5}


def token_within(authority: Redlock, seconds: float = 60.0) -> int:
    """Acquire and release as soon as there are locks; return the token."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            with authority.lock("r", ttl=MAX_TTL, renew=False, timeout=1.0) as token:
                return token
        except (LockTimeoutError, QuorumError):
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def follow(node: Node, master: Node) -> None:
    """Have a server become a replica of another, with its data; return when it is up to date."""
    ask(master, "CONFIG", "SET", "repl-diskless-sync-delay", 0)
    ask(node, "REPLICAOF", master.host, master.port)

    def is_there() -> bool:
        told = ask(node, "INFO", "replication").decode()
        return "master_link_status:up" in told and "master_sync_in_progress:0" in told

    assert eventually(is_there, 30.0)


def promote(node: Node) -> None:
    ask(node, "REPLICAOF", "NO", "ONE")


def is_refused(authority: Redlock) -> bool:
    """Whether the server that took over refuses to vote, once it has been found."""

    def has_been_found() -> bool:
        try:
            authority.lock("r", ttl=MAX_TTL, timeout=0, renew=False).acquire()
        except QuorumError as error:
            return "must not vote" in str(error)
        raise AssertionError("it has voted")

    return eventually(has_been_found)


def ask(node: Node, *words: str | int) -> Any:
    retry = Retry(NoBackoff(), 3)  # a sentinel cuts off all clients of a server that it demotes
    with redis.Redis.from_url(node.url, socket_timeout=5, protocol=2) as client:
        return retry.call_with_retry(lambda: _ask(client, words), lambda _: None)


def _ask(client: redis.Redis, words: Sequence[str | int]) -> Any:
    connection: Any = client.connection_pool.make_connection()
    try:
        connection.send_command(*words)
        return connection.read_response()
    finally:
        connection.disconnect()


def fact(node: Node, name: str) -> str:
    answer: bytes = ask(node, "INFO")
    facts = dict(line.split(":", 1) for line in answer.decode().splitlines() if ":" in line)
    return facts.get(name, "")


class _Servers:
    def __init__(self) -> None:
        self.stack = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stack.close()


class Watched(_Servers):
    """Services, each a primary with replicas, and the three sentinels that watch them all.

    Args:
        services: how many.
        replicas: of each.
        executable: the server program; by default the wheel's Valkey.
        password: of the servers.
        sentinel_password: of the sentinels.

    Attributes:
        services: the servers of each, as they stood at first: the primary, then its replicas.
    """

    def __init__(
        self,
        services: int = 1,
        *,
        replicas: int = 1,
        executable: str | os.PathLike[str] | None = None,
        password: str | None = None,
        sentinel_password: str | None = None,
    ) -> None:
        super().__init__()
        self._program = valkey_executable(executable)
        self._password = password
        self._sentinel_password = sentinel_password
        settings = {"repl-diskless-sync-delay": "0"}
        if password is not None:
            settings["masterauth"] = password
        self.services: list[Nodes] = [
            self.stack.enter_context(
                Nodes(1 + replicas, executable=executable, password=password, settings=settings)
            )
            for _ in range(services)
        ]
        self._workspace = Workspace(Path(tempfile.gettempdir()), [self._program])
        self.stack.callback(self._workspace.close)
        self.sentinels: list[tuple[int, subprocess.Popen[bytes]]] = []

    def start(self) -> Self:
        """Attach the replicas, then start the sentinels; return when they know of all and of one another."""
        for primary, *others in self.services:
            for replica in others:
                ask(replica, "REPLICAOF", LOOPBACK, primary.port)
        for primary, *others in self.services:
            assert eventually(lambda p=primary, o=others: fact(p, "connected_slaves") == str(len(o)))  # type: ignore[misc]
            assert all(eventually(lambda r=r: fact(r, "master_link_status") == "up") for r in others)  # type: ignore[misc]
        for number in range(3):
            self.sentinels.append(self._start_sentinel(number))
        assert eventually(lambda: all(self._is_complete(number) for number in range(3)), 30.0)
        for number in range(3):
            with suppress(redis.ResponseError):  # older ones take their time, before they demote a server
                self.ask_sentinel(number, "DEBUG", "INFO-PERIOD", "500", "PUBLISH-PERIOD", "300")
        return self

    def name(self, number: int = 0) -> str:
        return f"service-{number}"

    def url(self, number: int = 0, *, login: str = "", query: str = "") -> str:
        hosts = ",".join(f"{LOOPBACK}:{port}" for port, _ in self.sentinels)
        return f"redis+sentinel://{login}{hosts}/{self.name(number)}{query}"

    @property
    def sentinel_addresses(self) -> list[tuple[str, int]]:
        return [(LOOPBACK, port) for port, _ in self.sentinels]

    def primary(self, number: int = 0) -> Node:
        _, port = self.ask_sentinel(0, "GET-MASTER-ADDR-BY-NAME", self.name(number))
        return next(node for node in self.services[number] if node.port == int(port))

    def replica(self, number: int = 0) -> Node:
        primary = self.primary(number)
        return next(node for node in self.services[number] if node is not primary)

    def fail_over(self, number: int = 0, *, kill: bool) -> None:
        """Have a replica promoted: after the primary's death, or by order; then that one is a replica too."""
        before = self.primary(number)
        if kill:
            before.kill()
        else:
            assert eventually(lambda: self._order_failover(number))
        assert eventually(lambda: self.agree(number) and self.primary(number) is not before, 30.0)
        assert eventually(lambda: fact(self.primary(number), "role") == "master")
        assert kill or eventually(lambda: fact(before, "role") == "slave", 30.0)

    def _order_failover(self, number: int) -> bool:
        try:
            self.ask_sentinel(0, "FAILOVER", self.name(number))
        except redis.ResponseError:  # it has not yet heard from the replica
            return False
        return True

    def agree(self, number: int = 0) -> bool:
        named = set()
        for sentinel in range(3):
            with suppress(redis.ConnectionError, redis.TimeoutError):  # it is gone
                named.add(tuple(self.ask_sentinel(sentinel, "GET-MASTER-ADDR-BY-NAME", self.name(number))))
        return len(named) == 1

    def ask_sentinel(self, sentinel: int, *words: str) -> Any:
        with redis.Redis(
            port=self.sentinels[sentinel][0], password=self._sentinel_password, protocol=2, socket_timeout=1
        ) as client:
            return _ask(client, ("SENTINEL", *words))

    def kill_sentinel(self, sentinel: int) -> None:
        process = self.sentinels[sentinel][1]
        process.kill()
        process.wait()

    def _start_sentinel(self, number: int) -> tuple[int, subprocess.Popen[bytes]]:
        folder = self._workspace.folder / f"sentinel{number}"
        folder.mkdir()
        reservation = reserve_port()
        self._workspace.keep(reservation)
        port: int = reservation.getsockname()[1]
        lines = [f"port {port}", f"bind {LOOPBACK}"]
        if self._sentinel_password is not None:
            lines += [
                f"requirepass {self._sentinel_password}",
                f"sentinel sentinel-pass {self._sentinel_password}",
            ]
        for each, (primary, *_) in enumerate(self.services):
            name = self.name(each)
            lines += [
                f"sentinel monitor {name} {LOOPBACK} {primary.port} 2",
                f"sentinel down-after-milliseconds {name} 700",
                f"sentinel failover-timeout {name} 3000",
            ]
            if self._password is not None:
                lines.append(f"sentinel auth-pass {name} {self._password}")
        configuration = folder / "sentinel.conf"
        configuration.write_text("\n".join(lines) + "\n")
        process = self._workspace.spawn(
            [self._program, configuration.name, "--sentinel"], folder=folder, log=folder / "sentinel.log"
        )
        return port, process

    def _is_complete(self, sentinel: int) -> bool:
        try:
            for number, servers in enumerate(self.services):
                flat: Sequence[bytes] = self.ask_sentinel(sentinel, "MASTER", self.name(number))
                facts = dict(zip(flat[::2], flat[1::2], strict=True))
                if facts[b"num-slaves"] != b"%d" % (len(servers) - 1):
                    return False
                if facts[b"num-other-sentinels"] != b"2":
                    return False
        except redis.RedisError:
            return False
        return True


class Cluster(_Servers):
    """A Redis Cluster of primaries, among which the slots are divided; and a replica of each, if wanted.

    Args:
        primaries: how many.
        replicas: whether each has one.
        executable: the server program; by default the wheel's Valkey.
        covered: whether any primary has the slots.
        settings: further ones of each server.
    """

    def __init__(
        self,
        primaries: int = 3,
        *,
        replicas: bool = False,
        executable: str | os.PathLike[str] | None = None,
        covered: bool = True,
        settings: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__()
        self._count = primaries
        self._settings = settings or {}
        self._covered = covered
        self.nodes = self._start(primaries * (2 if replicas else 1), executable)
        self._form()

    def _start(self, count: int, executable: str | os.PathLike[str] | None) -> Nodes:
        settings = {
            "cluster-enabled": "yes",
            "cluster-node-timeout": "1500",
            "repl-diskless-sync-delay": "0",
            "cluster-replica-validity-factor": "0",
            **self._settings,
        }
        return self.stack.enter_context(Nodes(count, executable=executable, settings=settings))

    def _form(self) -> None:
        primaries, replicas = self.nodes[: self._count], self.nodes[self._count :]
        for epoch, node in enumerate(self.nodes, 1):
            ask(node, "CLUSTER", "SET-CONFIG-EPOCH", epoch)
            if node is not primaries[0]:
                ask(node, "CLUSTER", "MEET", LOOPBACK, primaries[0].port)
        share = -(-_SLOTS // self._count)
        if self._covered:
            for number, node in enumerate(primaries):
                slots = range(number * share, min(_SLOTS, (number + 1) * share))
                ask(node, "CLUSTER", "ADDSLOTS", *slots)
        everybody = str(len(self.nodes)).encode()
        assert eventually(
            lambda: all(b"cluster_known_nodes:" + everybody in ask(n, "CLUSTER", "INFO") for n in self.nodes)
        )
        for primary, replica in zip(primaries, replicas, strict=False):
            ask(replica, "CLUSTER", "REPLICATE", self.id_of(primary))
        if self._covered:
            assert eventually(self.is_whole, 30.0)
        for replica in replicas:
            assert eventually(lambda r=replica: fact(r, "master_link_status") == "up", 30.0)  # type: ignore[misc]

    def is_whole(self) -> bool:
        running = [node for node in self.nodes if node.is_running]
        return all(b"cluster_state:ok" in ask(node, "CLUSTER", "INFO") for node in running)

    @staticmethod
    def id_of(node: Node) -> str:
        name: bytes = ask(node, "CLUSTER", "MYID")
        return name.decode()

    def primary(self, key: str = NODE_KEY) -> Node:
        slot = key_slot(key.encode())
        named = {self._owner(node, slot) for node in self.nodes if node.is_running}
        assert len(named) == 1, named
        port = named.pop()
        return next(node for node in self.nodes if node.port == port)

    @staticmethod
    def _owner(node: Node, slot: int) -> int:
        for first, last, (_, port, *_), *_ in ask(node, "CLUSTER", "SLOTS"):
            if first <= slot <= last:
                return int(port)
        return 0

    def others(self) -> list[Node]:
        primary = self.primary()
        return [node for node in self.nodes if node.is_running and node is not primary]

    def fail_over(self, *, kill: bool) -> None:
        """Have the replica of the namespace's primary promoted: after its death, or by order."""
        before = self.primary()
        replica = self._replica_of(before)
        if kill:
            before.kill()
        for _ in range(3):
            if not kill:
                ask(replica, "CLUSTER", "FAILOVER")  # lapses after five seconds without enough votes
            if eventually(lambda: fact(replica, "role") == "master", 10.0):
                break
        assert fact(replica, "role") == "master"
        assert eventually(lambda: self.is_whole() and self._all_name(replica), 30.0)

    def _replica_of(self, primary: Node) -> Node:
        asked = (primary, "CLUSTER", "REPLICAS", self.id_of(primary))
        assert eventually(lambda: bool(ask(*asked)), 10)  # the servers tell one another of replicas
        lines: list[bytes] = ask(*asked)
        address = lines[0].decode().split()[1].partition("@")[0]
        return next(node for node in self.nodes if address.endswith(f":{node.port}"))

    def _all_name(self, node: Node) -> bool:
        slot = key_slot(NODE_KEY.encode())
        return {self._owner(each, slot) for each in self.nodes if each.is_running} == {node.port}

    def move_slot(self, target: Node) -> None:
        """Give the namespace's slot, with its keys, to another primary, as resharding does."""
        source, slot = self.primary(), key_slot(NODE_KEY.encode())
        self.begin_to_move_slot(target)
        while keys := ask(source, "CLUSTER", "GETKEYSINSLOT", slot, 100):
            ask(
                source, "MIGRATE", LOOPBACK, target.port, "", 0, 5000, "KEYS", *(key.decode() for key in keys)
            )
        others = [
            node for node in self.nodes if node not in {source, target} and fact(node, "role") == "master"
        ]
        for node in (target, source, *others):
            ask(node, "CLUSTER", "SETSLOT", slot, "NODE", self.id_of(target))
        assert eventually(lambda: self._all_name(target))

    def begin_to_move_slot(self, target: Node) -> None:
        source, slot = self.primary(), key_slot(NODE_KEY.encode())
        ask(target, "CLUSTER", "SETSLOT", slot, "IMPORTING", self.id_of(source))
        ask(source, "CLUSTER", "SETSLOT", slot, "MIGRATING", self.id_of(target))

    def url(self, *nodes: Node) -> str:
        """Return the URL of the cluster, by these of its servers; by all where none is named."""
        return "redis+cluster://" + ",".join(f"{LOOPBACK}:{node.port}" for node in nodes or self.nodes)
