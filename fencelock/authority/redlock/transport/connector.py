"""Opens connections to nodes, for threads and event loops, and learns which server process answers.

redis-py blocks while it connects, so mostly a new thread does it. Afterwards the bare socket is used without
redis-py.
"""

from __future__ import annotations

import abc
import re
import secrets
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from redis.exceptions import (
    AskError,
    AuthenticationError,
    ClusterDownError,
    InvalidResponse,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TryAgainError,
)
from redis.exceptions import TimeoutError as RedisTimeoutError

from fencelock import _events, _threads
from fencelock._backoff import chance
from fencelock._events import ConnectionFailed, ConnectionOpened
from fencelock.authority.redlock.membership.members import Identity
from fencelock.authority.redlock.protocol.messages import Reply, ReplyKind
from fencelock.authority.redlock.protocol.queue import WaitQueue
from fencelock.authority.redlock.transport.endpoints import Server, Source, endpoint_of, is_moved
from fencelock.authority.redlock.wire.codec import PASSING_ERRORS, PRELOADED, SCRIPTS
from fencelock.authority.redlock.wire.connection import Connection
from fencelock.authority.redlock.wire.nodes import NodeConnections
from fencelock.errors import MembershipError

#: Some of `PASSING_ERRORS` as redis-py raises them, without their first word.
_PASSING_EXCEPTIONS: Final = (AskError, ClusterDownError, ReadOnlyError, TryAgainError)


class UnusableError(Exception):
    """A node cannot be used; `answer` is to be reported as its answer."""

    def __init__(self, said: ReplyKind, detail: str) -> None:
        super().__init__(detail)
        self.answer: Reply = Reply(said, detail=detail)


@dataclass(frozen=True, slots=True)
class Opened:
    """A connection that has been opened."""

    sock: socket.socket  # the socket; it does not block
    identity: Identity  # the server process that answered
    pushes: bool  # whether it can receive published messages, besides the answers


class Node:
    """Where a node is, and how to open a connection to it.

    With `verify_votes`, every vote proves which process gave it, even if no replica may take over.
    """

    def __init__(self, source: Source, connect_timeout: float, *, verify_votes: bool) -> None:
        self._endpoint = endpoint_of(source, connect_timeout)
        self._verify_votes = verify_votes or bool(self._endpoint.kind)
        self.name: str = self._endpoint.url()
        self.url_to_type: str = self._endpoint.url(to_type=True)  # with a placeholder for the password

    def open(self, node_key: str) -> Opened:
        """Connect, in a cluster to the server that has the keys, and learn which server answers."""
        try:
            servers = list(self._endpoint.servers())
        except RedisError as error:
            raise _why(error) from error
        tried: set[str] = set()
        failures: list[tuple[str, UnusableError]] = []
        while servers:
            server = servers.pop(0)
            if server.address in tried:  # several servers may redirect to one that is gone
                continue
            tried.add(server.address)
            try:
                return _open(server, node_key, verify_votes=self._verify_votes)
            except UnusableError as error:
                failures.append((server.address, error))
            except Exception as error:  # noqa: BLE001 - of a server that is no Redis, or a user's own class
                if (there := self._endpoint.redirected(server, error)) is None:
                    failures.append((server.address, _why(error)))
                else:
                    servers.insert(0, there)
        if len(tried) == len(failures) == 1 and not self._endpoint.kind:
            raise failures[0][1]
        raise _joined(failures)


class Connections(abc.ABC):
    """One connection to each node; `options` are those of `NodeConnections`."""

    def __init__(self, nodes: Sequence[Node], node_key: str, **options: Any) -> None:
        client = secrets.token_hex(8)
        self.queue: WaitQueue = WaitQueue(client, len(nodes), chance)
        self._names = names = [node.name for node in nodes]
        channel = f"{node_key}:w:{client}"
        self._nodes = NodeConnections(names, self, self.queue, channel, jitter=chance, **options)
        self._opens = [node.open for node in nodes]
        self._node_key = node_key
        #: The thread that connects to each node, or has done so last.
        self._connecting: dict[int, threading.Thread] = {}

    def connect(self, node: int) -> None:
        if self.is_connecting(node):
            return
        # Each node has a thread of its own, so that a node that hangs does not delay the others.
        name = f"fencelock-connect-{node}"
        thread = threading.Thread(target=self._open, args=(node,), name=name, daemon=True)
        self._connecting[node] = thread
        try:
            _threads.start(thread)
        except RuntimeError as error:  # too many threads, or the interpreter ends
            detail = f"no thread to connect with: {error}"
            self._nodes.failed(node, Reply(ReplyKind.UNREACHABLE, detail=detail), time.monotonic())

    def is_connecting(self, node: int) -> bool:
        thread = self._connecting.get(node)
        return thread is not None and thread.is_alive()

    def _open(self, node: int) -> None:
        opened: Opened | UnusableError
        event: ConnectionOpened | ConnectionFailed
        try:
            opened = self._opens[node](self._node_key)
            event = ConnectionOpened("Redlock", self._names[node])
        except UnusableError as error:
            opened, event = error, ConnectionFailed("Redlock", self._names[node], str(error.answer))
        if _events.listeners:
            _events.tell(event)
        self._opened(node, opened)

    def _use(self, node: int, opened: Opened | UnusableError) -> tuple[socket.socket, Connection] | None:
        """Use an opened connection, and return it with its socket; None if it failed, or is not needed."""
        now = time.monotonic()
        if isinstance(opened, UnusableError):
            self._nodes.failed(node, opened.answer, now)
            return None
        connection = self._nodes.connected(node, opened.identity, now, pushes=opened.pushes)
        if connection is None:
            opened.sock.close()
            return None
        return opened.sock, connection

    @abc.abstractmethod
    def _opened(self, node: int, opened: Opened | UnusableError) -> None:
        """Take over an opened connection, or its error; the connecting thread calls this."""

    @abc.abstractmethod
    def disconnect(self, node: int) -> None:
        """Close the socket of a node's connection."""


def _open(server: Server, node_key: str, *, verify_votes: bool) -> Opened:
    connection = server.new_connection()
    try:
        connection = _connect(server, connection)
        _send_questions(connection, node_key)
        info = _read_info(connection)
        identity = _identify(connection, info, verify_votes=verify_votes)
        for _ in PRELOADED:
            with suppress(ResponseError):  # without the right, each script is sent when it is first called
                connection.read_response()
        # From here on the socket is ours; the connection object must never touch it again.
        sock: socket.socket = connection._sock  # noqa: SLF001 - redis-py has no public name for it
        connection._sock = None  # noqa: SLF001
        sock.setblocking(False)  # noqa: FBT003 - the standard library's signature
        return Opened(sock, identity, connection.protocol not in {2, "2"})
    finally:
        connection.disconnect()


def _joined(failures: list[tuple[str, UnusableError]]) -> UnusableError:
    """Return the error to report for a node behind Sentinel or in a cluster."""
    if not failures:
        return UnusableError(ReplyKind.UNREACHABLE, "the servers of its cluster redirect to each other")
    passing = [error for _, error in failures if error.answer.kind is not ReplyKind.ERROR]
    said = passing[0].answer.kind if passing else ReplyKind.ERROR
    return UnusableError(said, "; ".join(f"{address}: {error}" for address, error in failures))


def _why(error: Exception) -> UnusableError:
    if isinstance(error, MembershipError):
        return UnusableError(ReplyKind.CONFIG, str(error))
    if isinstance(error, (RedisTimeoutError, TimeoutError)):
        return UnusableError(ReplyKind.SILENT, "it took no connection in time")
    if isinstance(error, AuthenticationError):
        return UnusableError(ReplyKind.ERROR, f"it refused the user or password: {error}")
    if isinstance(error, ResponseError):
        return _why_refused(error)
    if isinstance(error, InvalidResponse) or not isinstance(error, (RedisError, OSError)):
        return UnusableError(ReplyKind.ERROR, f"it does not speak like a node: {error!r}")
    return UnusableError(ReplyKind.UNREACHABLE, str(error))


def _why_refused(error: ResponseError) -> UnusableError:
    if isinstance(error, ClusterDownError) or str(error).startswith("CLUSTERDOWN"):
        return UnusableError(
            ReplyKind.UNREACHABLE, f"its cluster is down, as `redis-cli --cluster check` shows: {error}"
        )
    if is_moved(error):  # not followed, because the node is not named as a cluster
        return UnusableError(
            ReplyKind.ERROR,
            "it is one server of a cluster, and another server has the keys: name the whole cluster as the "
            "node, redis+cluster://host1:6379,host2:6379",
        )
    passing = isinstance(error, _PASSING_EXCEPTIONS) or str(error).startswith(PASSING_ERRORS)
    return UnusableError(ReplyKind.UNREACHABLE if passing else ReplyKind.ERROR, str(error))


def _connect(server: Server, connection: Any) -> Any:
    """Connect, and return the connection; a new one if the server or this user has no RESP3."""
    try:
        connection.connect()
    except ResponseError as error:
        if not re.search(r"(?i)unknown command|noproto|no permissions", str(error)):
            raise
        connection.disconnect()
        connection = server.new_connection(protocol=2)
        connection.connect()
    return connection


def _send_questions(connection: Any, node_key: str) -> None:
    """Ask all questions, and load the everyday scripts, in one round trip; answers come in this order.

    Without the scripts, the first ACQUIRE is answered with NOSCRIPT. If a majority grants before this answer
    is read, the node has no lock until a thread reads again.
    """
    scripts = [("SCRIPT LOAD", SCRIPTS[name]) for name in PRELOADED]
    questions = [("INFO",), ("HMGET", node_key, "id", "members"), *scripts]
    connection.send_packed_command(connection.pack_commands(questions))


def _read_info(connection: Any) -> dict[str, str]:
    info = dict(
        line.split(":", 1)
        for line in connection.read_response().decode(errors="replace").splitlines()
        if ":" in line
    )
    if "sentinel" in {info.get("redis_mode"), info.get("server_mode")}:
        raise UnusableError(
            ReplyKind.ERROR,
            "it is a sentinel: write redis+sentinel://host1:26379,host2:26379/SERVICE with all of them",
        )
    return info


def _identify(connection: Any, info: dict[str, str], *, verify_votes: bool) -> Identity:
    # Read before the role is checked: a replica in a cluster answers by an error with its primary's address,
    # which `Node.open` follows.
    node_id, members = connection.read_response()
    if info.get("role") not in {"master", None}:
        # If a sentinel has named this server, a failover is under way.
        raise UnusableError(
            ReplyKind.UNREACHABLE if verify_votes else ReplyKind.ERROR,
            f"it is a {info['role']}, and only primaries grant locks: name the primary, or the sentinels "
            "that know it, redis+sentinel://host1:26379,host2:26379/SERVICE",
        )
    if "run_id" not in info:
        raise UnusableError(ReplyKind.ERROR, "its INFO has no run_id, so a restart could not be noticed")
    # A restart of a lone primary breaks its TCP connection. If a replica can be promoted in its place, the
    # same run_id may answer on the same socket with older data. A backlog shows that there was a replica,
    # although it may be detached at this moment.
    company = ("connected_slaves", "cluster_enabled", "repl_backlog_active")
    verify = verify_votes or any(info.get(fact, "0") != "0" for fact in company)
    replid = info.get("master_replid", "") if verify else ""
    if verify and not replid:
        raise UnusableError(
            ReplyKind.ERROR, "its INFO has no master_replid, so a failover could not be noticed"
        )
    blank = Identity(info["run_id"], replid, "", None, eviction_of(info))
    return blank.admitted(node_id.decode(), members.decode()) if members else blank


def eviction_of(info: Mapping[str, str]) -> str | None:
    """Return the eviction policy in a server's INFO, as `Identity.eviction`."""
    limit, policy = info.get("maxmemory", ""), info.get("maxmemory_policy", "")
    if limit == "0" or policy == "noeviction":
        return ""
    return policy if limit and policy else None
