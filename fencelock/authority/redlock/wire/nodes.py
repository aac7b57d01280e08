"""The connections to the N nodes: which nodes may be asked, and how late answers are handled.

It moves no bytes, knows no clock and waits for nothing. Inputs are `ask`, `connected`, `failed`, `receive`
and `broken`; callers pass in the time. Outputs are the calls of a `Transport`, and the bytes in
`Connection.outgoing`. Threads, event loops and the simulator run the same code.

Unwanted locks must be released. A RELEASE follows its ACQUIRE on the same connection. If a RELEASE
finds no connection or a silent node, or is lost with a connection, it is *owed*: it is sent when the node
answers again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from fencelock._backoff import spread
from fencelock.authority.redlock.membership.members import Identity
from fencelock.authority.redlock.protocol.attempts import without_place
from fencelock.authority.redlock.protocol.messages import SUBSCRIBE, Broadcast, Command, Reply, ReplyKind
from fencelock.authority.redlock.protocol.queue import WaitQueue
from fencelock.authority.redlock.wire.codec import Packed, leads_elsewhere
from fencelock.authority.redlock.wire.connection import (
    FORGETFUL,
    NAMING,
    Connection,
    MalformedReplyError,
    PendingBroadcast,
    PendingReply,
)
from fencelock.errors import MembershipError

_SHORTEST_BACKOFF: Final = 0.05
LONGEST_BACKOFF: Final = 2.0
#: The most RELEASEs that are owed to a node. Of more, the oldest are dropped; their locks end with the ttl.
MOST_PENDING: Final = 10_000
_OTHERS_GRACE: Final = 0.05  # seconds to wait, before the first exchange, for connections beyond a majority
#: Seconds for which a node may owe an answer before a new connection is tried: its machine may be gone.
_LOST_AFTER: Final = 10.0
#: Seconds for which a node remembers a client's introduction. A held lease is extended more often.
INTRODUCED_FOR: Final = 3600.0
#: Before these commands a node gets the introduction of this client, if that is due.
_OF_HOLDERS: Final = frozenset({"acquire", "extend"})
_MOST_UNANSWERED: Final = 50_000  # answers that a node may owe before it counts as silent


class Transport(Protocol):
    """Moves the bytes. No call waits."""

    def connect(self, node: int) -> None:
        """Begin to connect to a node, unless this is under way; call `connected` or `failed` at the end."""

    def is_connecting(self, node: int) -> bool:
        """Return whether a connection to a node is being opened."""

    def disconnect(self, node: int) -> None:
        """Close the socket of a node's connection."""


class _Node:
    """One node as it is known: its connection, or why there is none and when to try again."""

    __slots__ = ("connection", "failure", "introduce_at", "pause", "pending_releases", "retry_at")

    def __init__(self) -> None:
        self.connection: Connection | None = None
        self.failure = Reply(ReplyKind.UNREACHABLE, detail="it has not answered yet")
        self.pause = _SHORTEST_BACKOFF
        self.retry_at = -math.inf
        self.introduce_at = -math.inf
        self.pending_releases: dict[str, Command] = {}  # the RELEASEs that are owed to the node, by nonce

    def remember_release(self, release: Command) -> None:
        """Keep a RELEASE until the node answers, without its place in line, which may be gone by then."""
        self.pending_releases[release.nonce] = without_place(release)
        if len(self.pending_releases) > MOST_PENDING:
            del self.pending_releases[next(iter(self.pending_releases))]


class NodeConnections:
    """One connection to each node. Two threads must not use it at once."""

    def __init__(
        self,
        names: Sequence[str],
        transport: Transport,
        queue: WaitQueue,  # hears the calls that the nodes publish on the channel
        channel: str,
        *,
        on_identity: Callable[[int, Identity], object],  # called with the server of each opened connection
        on_trouble: Callable[[], None],  # a node has forgotten, restarted, or is in another epoch
        connect_timeout: float,  # seconds that a node may take to accept a connection
        patience: float,  # seconds after which a node that owes an answer is asked no more
        jitter: Callable[[], float],
        introduction: Command | None = None,  # names this process; nodes get it before requests, if it is due
        new_connection: Callable[..., Connection] = Connection,
    ) -> None:
        self.queue = queue
        self.absent: int = len(names)  # how many nodes have no connection
        self._names = names
        self._nodes = [_Node() for _ in names]
        self._transport = transport
        self._on_identity = on_identity
        self._on_trouble = on_trouble
        self._connect_timeout = connect_timeout
        self._patience = patience
        self._jitter = jitter
        self._new_connection = new_connection
        self._epoch: int | None = None
        self._has_asked = False
        self._majority_at: float | None = None
        self._subscribe = Command(SUBSCRIBE, "", (), (channel,))
        self._listens = False
        self._introduction = introduction

    def connection(self, node: int) -> Connection | None:
        """Return the connection to a node, or None; give up one on which answers could be mixed up."""
        connection = self._nodes[node].connection
        if connection is not None and connection.changing:
            self.drop_dirty()
            return None
        return connection

    def open_absent(self, now: float) -> float:
        """Begin to open missing connections; return when to call this again."""
        again = math.inf
        for index, node in enumerate(self._nodes):
            if node.connection is None and not self._transport.is_connecting(index):
                if node.retry_at <= now:
                    self._transport.connect(index)
                else:
                    again = min(again, node.retry_at)
        return again

    def worth_waiting_until(self, began: float, request: Broadcast, now: float) -> float:
        """Return until when connections are worth waiting for before a request is sent.

        This is mostly until there is a majority; before the very first exchange, a moment longer.
        """
        if not self.absent or request.patience <= 0.0:
            return now
        if not any(map(self._transport.is_connecting, range(len(self._nodes)))):
            return now
        deadline = min(began + self._connect_timeout, request.links_until)
        if len(self._nodes) - self.absent >= len(self._nodes) // 2 + 1:
            if self._majority_at is None:
                self._majority_at = now
            deadline = min(deadline, self._majority_at + (0.0 if self._has_asked else _OTHERS_GRACE))
        return deadline

    def ask(
        self, broadcast: PendingBroadcast, request: Broadcast, now: float, *, together: bool = False
    ) -> None:
        """Put a command into the connections of its nodes; for nodes that cannot be asked, answer at once.

        With `together`, the command joins a batch with the commands before and after it, if it can.
        """
        self._has_asked = True
        command, packed = request.command, Packed(request.command)
        pending = PendingReply(broadcast, command, now)
        is_release = command.script == "release"
        introduction = self._introduction if command.script in _OF_HOLDERS else None
        for index in request.nodes:
            node = self._nodes[index]
            connection = node.connection
            if connection is None:
                broadcast.add_reply(index, node.failure)
            elif (
                not connection.unanswered
                or (silence := self._silence(connection, now)) is None
                or (is_release and command.nonce in connection.acquiring)
            ):
                if introduction is not None and now >= node.introduce_at:
                    node.introduce_at = now + INTRODUCED_FOR / 3
                    connection.put_alone(PendingReply(None, introduction, now), Packed(introduction))
                if together:
                    connection.put(pending, packed)
                else:
                    connection.put_alone(pending, packed)
                continue
            else:
                broadcast.add_reply(index, silence)
                if is_lost(connection, now) and node.retry_at <= now:
                    self._transport.connect(index)
            if is_release:
                node.remember_release(command)

    def _silence(self, connection: Connection, now: float) -> Reply | None:
        """Return the answer for a node that owes too many answers, or for too long; None for other nodes."""
        unanswered = connection.unanswered
        owes_for = now - unanswered[0].sent_at
        if owes_for > self._patience:
            return Reply(ReplyKind.SILENT, detail=f"it has not answered for {owes_for:.1f} s")
        if len(unanswered) >= _MOST_UNANSWERED:
            return Reply(ReplyKind.SILENT, detail=f"{len(unanswered)} commands to it are unanswered")
        return None

    def listen(self, now: float) -> bool:
        """Subscribe to the nodes' calls; return whether there may be something to write for this."""
        was_deaf, self._listens = not self._listens, True
        if was_deaf:
            for index, node in enumerate(self._nodes):
                self._put_subscribe(index, node.connection, now)
        return was_deaf

    def _put_subscribe(self, index: int, connection: Connection | None, now: float) -> None:
        """Subscribe to a node's calls, and assume at once that they come; `_deal_with` handles a refusal."""
        if connection is not None and connection.pushes:
            connection.put_alone(PendingReply(None, self._subscribe, now), Packed(self._subscribe))
            self.queue.listen(index)

    def connected(self, index: int, identity: Identity, now: float, *, pushes: bool) -> Connection | None:
        """Use a connection that has been opened; return None if the caller must close it instead."""
        node = self._nodes[index]
        node.pause = _SHORTEST_BACKOFF
        self._on_identity(index, identity)
        if (old := node.connection) is not None:
            if old.identity.run_id == identity.run_id and not is_lost(old, now):
                return None
            self.broken(index, "another connection has taken its place")
        for other, its in enumerate(self._nodes):
            if its.connection is not None and its.connection.identity.run_id == identity.run_id:
                node.failure = Reply(ReplyKind.CONFIG, detail=f"the same server as {self._names[other]}")
                node.retry_at = now + LONGEST_BACKOFF
                return None
        node.connection = connection = self._new_connection(index, identity, self._epoch, pushes=pushes)
        self.absent -= 1
        node.introduce_at = -math.inf
        if self._listens:
            self._put_subscribe(index, connection, now)
        self._send_pending(node, connection, now)
        return connection

    def failed(self, index: int, failure: Reply, now: float) -> None:
        """Note why a node could not be connected to, and put off the next try: mostly longer than before."""
        node = self._nodes[index]
        node.failure = failure
        node.pause = min(LONGEST_BACKOFF, 2 * node.pause)
        node.retry_at = now + spread(node.pause, self._jitter())

    def receive(self, index: int, read: Callable[[], bytes | None], now: float) -> Sequence[str]:
        """Pass on the answers that `read` returns; return the places in line that were called.

        If this is interrupted, `drop_dirty` gives up the connection later.
        """
        node = self._nodes[index]
        if (connection := self.connection(index)) is None:
            return ()
        connection.changing += 1
        try:
            data = read()
            unusual = connection.received(data, now) if data else []
        except OSError as error:
            self.broken(index, f"the connection broke: {error}")
            return ()
        except MalformedReplyError as error:
            self.broken(index, f"it does not speak like a node: {error}", ReplyKind.ERROR)
            return ()
        for pending, answer in unusual:
            self._deal_with(index, connection, pending, answer, now)
        connection.changing -= 1
        if any(leads_elsewhere(answer) for _, answer in unusual):
            self.broken(index, "another server has taken over")
        elif data and node.pending_releases and not unusual:
            # Not after an unusual answer, because a node that refuses a RELEASE would get it for ever.
            self._send_pending(node, connection, now)
        if not connection.published:
            return ()
        published, connection.published = connection.published, []
        return [place for message in published if (place := self.queue.on_call(index, message, now))]

    def _deal_with(
        self, index: int, connection: Connection, pending: PendingReply, answer: Reply, now: float
    ) -> None:
        answer = self._on_reply(index, connection, answer, now)
        broadcast, command, _ = pending
        if answer.kind is ReplyKind.UNREACHABLE and command.script == "release":
            self._nodes[index].remember_release(command)
        if broadcast is not None and not broadcast.over:
            broadcast.add_reply(index, answer)
        elif answer.kind is ReplyKind.ERROR and command == self._subscribe:
            self.queue.go_deaf(index)

    def _on_reply(self, index: int, connection: Connection, answer: Reply, now: float) -> Reply:
        """Note the facts in an answer about its node; return the answer, or an error in its place."""
        said = answer.kind
        if said is ReplyKind.GRANTED:
            if answer.epoch != self._epoch:
                self._note_epoch(answer.epoch)
        elif said in NAMING:
            return self._on_readmitted(index, connection, answer)
        elif said in FORGETFUL:
            self._on_trouble()
            # A server that was replaced may give this answer on this connection for ever.
            node = self._nodes[index]
            if connection.identity.replid and now >= node.retry_at:
                node.retry_at = now + LONGEST_BACKOFF
                self._transport.connect(index)
        return answer

    def _note_epoch(self, epoch: int) -> None:
        if self._epoch is not None:  # some nodes have moved on; others may lag behind
            self._on_trouble()
        self._epoch = epoch
        for node in self._nodes:
            if node.connection is not None:
                node.connection.epoch = epoch

    def _on_readmitted(self, index: int, connection: Connection, answer: Reply) -> Reply:
        node_id, members = answer.facts[:2]
        if not members:
            return answer
        try:
            connection.identity = connection.identity.admitted(node_id, members)
        except MembershipError as error:
            return Reply(ReplyKind.CONFIG, detail=str(error))
        self._on_identity(index, connection.identity)
        return answer

    def _send_pending(self, node: _Node, connection: Connection, now: float) -> None:
        for release in node.pending_releases.values():
            connection.put_alone(PendingReply(None, release, now), Packed(release))
        node.pending_releases.clear()

    def broken(self, index: int, why: str, kind: ReplyKind = ReplyKind.UNREACHABLE) -> None:
        """Give up a node's connection: its pending commands get the failure, and its RELEASEs are owed."""
        node = self._nodes[index]
        node.failure = failure = Reply(kind, detail=why)
        if (connection := node.connection) is None:
            return
        node.connection = None
        self.absent += 1
        self.queue.go_deaf(index)
        self._transport.disconnect(index)
        for broadcast, command, _ in connection.unanswered:
            if command.script == "release":
                node.remember_release(command)
            if broadcast is not None and not broadcast.over:
                broadcast.add_reply(index, failure)

    @property
    def has_pending_releases(self) -> bool:
        return any(node.pending_releases for node in self._nodes)

    def drop_dirty(self) -> None:
        """Give up the connections on which answers could be mixed up."""
        for index, node in enumerate(self._nodes):
            if node.connection is not None and node.connection.changing:
                self.broken(index, "using it was interrupted")

    def close(self) -> None:
        for index in range(len(self._nodes)):
            self.broken(index, "the connection was closed here")


def is_lost(connection: Connection, now: float) -> bool:
    """Return whether a connection has owed an answer for too long, and another one should be tried."""
    return bool(connection.unanswered) and now - connection.unanswered[0].sent_at > _LOST_AFTER
