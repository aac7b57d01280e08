"""A stage on which the protocol's generators are stepped by hand, message by message.

The generators are the ones that ship. A `Bidder` or an `Actor` stands between one of them and the nodes: a
test decides which command reaches which node when, and which answer finds its way back. A node is either a
real server, whose scripts a test may replace to show what breaks without a rule, or a model in memory.
"""

from __future__ import annotations

import contextlib
import itertools
import select
import socket
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol

import pytest
import redis

from fencelock.authority.base import Grant
from fencelock.authority.redlock.membership.change import change
from fencelock.authority.redlock.membership.recover import recover, rise
from fencelock.authority.redlock.membership.reports import NodeGroup
from fencelock.authority.redlock.protocol import acquire
from fencelock.authority.redlock.protocol.attempts import (
    Attempt,
    Failed,
    NodeSet,
    QueuePosition,
    release_command,
)
from fencelock.authority.redlock.protocol.messages import (
    Broadcast,
    Command,
    NodeReplies,
    Replies,
    Reply,
    ReplyKind,
    Request,
)
from fencelock.authority.redlock.redlock import Redlock
from fencelock.authority.redlock.transport.blocking import read_from, write_to
from fencelock.authority.redlock.transport.connector import Node
from fencelock.authority.redlock.wire import codec
from fencelock.authority.redlock.wire.connection import Connection, PendingBroadcast, PendingReply
from proof.servers import Node as Server

NODE_KEY = "{fencelock}"
#: All that a node keeps when no client holds a lock or waits.
OF_THE_NODE = [NODE_KEY, f"{NODE_KEY}:m"]
_nonces = itertools.count()


def keys_of(client: Any) -> list[str]:
    """Return the keys of a node, without what clients have told of themselves."""
    names = sorted(key.decode() for key in client.keys("*"))
    return [name for name in names if not name.startswith(f"{NODE_KEY}:w:")]


class Station(Protocol):
    """What executes a command atomically: a node, real or modelled."""

    def execute(self, command: Command) -> Reply:
        """Return the node's answer."""

    def pass_time(self, seconds: float) -> None:
        """Let its clock go on."""


class RealNode:
    """A link to a real server, which executes the shipped scripts or those of a test."""

    def __init__(self, url: str, scripts: Mapping[str, str] | None = None) -> None:
        self.client = redis.Redis.from_url(url, decode_responses=True)
        self.node = Node(url, 2.0, verify_votes=False)
        self.scripts = dict(scripts or {})
        self._open()

    def _open(self) -> None:
        opened = self.node.open(NODE_KEY)
        self.sock = opened.sock
        self.link = Connection(0, opened.identity, None, pushes=opened.pushes)

    def close(self) -> None:
        self.sock.close()
        self.client.close()

    def reconnect(self) -> None:
        self.sock.close()
        self._open()

    def execute(self, command: Command) -> Reply:
        text = self.scripts.get(command.script)
        alone = None if text is None else codec.pack(command, text)
        waiting = PendingBroadcast(Broadcast(command, [0], lambda _: True, 5.0))
        self.link.put_alone(PendingReply(waiting, command, 0.0), codec.Packed(command, alone))
        poll = select.poll()
        poll.register(self.sock.fileno(), select.POLLIN)
        while True:
            write_to(self.sock, self.link)
            assert poll.poll(5000), f"{self.node.name} does not answer"
            for _, answer in self.link.received(read_from(self.sock) or b"", 0.0):
                return answer
            if waiting.complete:
                return waiting.answers[0]

    def remember(self) -> dict[str, str]:
        """Return what stands in the node's hash, as a file on its disk would have it."""
        fields: Any = self.client.hgetall(NODE_KEY)
        return dict(fields)

    def pass_time(self, seconds: float) -> None:
        """Let the node's ticket, if it has one, be older by so many seconds."""
        if self.client.hexists(NODE_KEY, "ticket_at"):
            self.client.hincrby(NODE_KEY, "ticket_at", -round(seconds * 1000))

    def stand_at(self, resource: str, counter: int) -> None:
        self.client.hset(NODE_KEY, f"c{stripe_of(resource)}", str(counter))

    def expire(self, resource: str) -> None:
        self.client.delete(f"{NODE_KEY}:l:{resource}")


def stripe_of(resource: str) -> int:
    return Attempt.of(node_set_of("", 1), (resource,), "n", 1.0).stripes[0]


def node_set_of(fingerprint: str, count: int) -> NodeSet:
    return NodeSet(
        names=tuple(f"n{number}" for number in range(count)),
        node_key=NODE_KEY,
        fingerprint=fingerprint,
        order=tuple(range(count)),
        max_ttl=300.0,
    )


class Bidder:
    """One client: its generator rests at a request until `resume`, while messages come and go.

    Attributes:
        request: what it asks for at the moment.
        answers: what has come back to that request.
        outcome: what the attempt came to, once it is over.
    """

    def __init__(
        self,
        node_set: NodeSet,
        *resources: str,
        ttl: float = 30.0,
        alone: bool = False,
        nonce: str = "",
        position: QueuePosition | None = None,
    ) -> None:
        self.node_set = node_set
        self.attempt = Attempt.of(
            node_set, tuple(sorted(resources)), nonce or f"nonce-{next(_nonces)}", ttl, position
        )
        self._generator = acquire.make_attempt(node_set, self.attempt, alone=alone)
        self.outcome: Grant | Failed | None = None
        self.answers: dict[int, Reply] = {}
        self.request: Broadcast = next(self._generator)

    def deliver(self, stations: Sequence[Station], *nodes: int) -> NodeReplies:
        """Have nodes execute the present command, and bring the answers back; return them."""
        for node in nodes:
            self.answers[node] = stations[node].execute(self.request.command)
        return {node: self.answers[node] for node in nodes}

    def resume(self, now: float = 0.0) -> None:
        """Let the generator go on with what has come back; the rest has been silent."""
        silent = Reply(ReplyKind.SILENT)
        answers = {node: self.answers.get(node, silent) for node in self.request.nodes}
        self.answers = {}
        try:
            self.request = self._generator.send(Replies(now, now, answers))
        except StopIteration as stop:
            self.outcome = stop.value

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.outcome.tokens if isinstance(self.outcome, Grant) else ()

    @property
    def token(self) -> int | None:
        return self.tokens[0] if self.tokens else None

    def undo(self) -> Command:
        """Return the RELEASE that follows: with the decided values, or without."""
        if isinstance(self.outcome, Grant):
            proof = self.outcome.proof
            return release_command(self.node_set, self.attempt, proof.epoch, proof.counters)
        return release_command(self.node_set, self.attempt, 0, (0,) * len(self.attempt.resources))


class Stage:
    """Real nodes, initialised with counters at 0, blank ones beside them, and contenders on them."""

    def __init__(
        self,
        servers: Sequence[Server],
        scripts: Mapping[str, str] | None = None,
        *,
        beside: Sequence[Server] = (),
    ) -> None:
        urls = [server.url for server in servers]
        with Redlock(urls) as authority:
            authority.init(base=0)
        self.servers = [*servers, *beside]
        self.nodes = [RealNode(server.url, scripts) for server in self.servers]
        membership = self.nodes[0].link.identity.membership
        assert membership is not None
        self.node_set = node_set_of(membership.fingerprint, len(urls))

    def close(self) -> None:
        for node in self.nodes:
            node.close()

    def bidder(self, *resources: str, position: QueuePosition | None = None) -> Bidder:
        return Bidder(self.node_set, *(resources or ("r",)), position=position)

    def stand_at(self, *counters: int, resource: str = "r") -> None:
        for node, counter in zip(self.nodes, counters, strict=True):
            node.stand_at(resource, counter)

    def release(self, bidder: Bidder, *nodes: int) -> list[ReplyKind]:
        return [self.nodes[node].execute(bidder.undo()).kind for node in nodes]

    def bid(self, *voters: int) -> Bidder:
        bidder = self.bidder()
        while bidder.outcome is None:
            bidder.deliver(self.nodes, *(node for node in bidder.request.nodes if node in voters))
            bidder.resume()
        return bidder

    def forget(self, node: int) -> None:
        self.nodes[node].client.flushall()

    def come_back(self, node: int, remembered: Mapping[str, str] | None = None) -> None:
        """Restart a server with what it remembered at some time, or blank, and open a new link."""
        self.servers[node].restart(keep_data=False)
        if remembered:
            items = [word for field in remembered.items() for word in field]
            self.nodes[node].client.hset(NODE_KEY, items=items)
        self.nodes[node].reconnect()


class Actor:
    """A recoverer or operator: its generator goes on step by step, in a time of its own.

    Attributes:
        request: what it asks for at the moment.
        sent: all that it has sent: to which node, and what.
        result: what the generator returned; None until it did.
    """

    def __init__(self, stations: Sequence[Station], generator: Generator[Request, Any, Any]) -> None:
        self.stations = stations
        self.now = 0.0
        self.sent: list[tuple[int, Command]] = []
        self.result: Any = None
        self._generator = generator
        self._answers: dict[int, Reply] = {}
        self.request: Request | None = next(generator)

    @property
    def command(self) -> Command:
        assert isinstance(self.request, Broadcast)
        return self.request.command

    @property
    def script(self) -> str:
        return self.request.command.script if isinstance(self.request, Broadcast) else ""

    def wants(self, node: int) -> bool:
        return isinstance(self.request, Broadcast) and node in self.request.nodes

    def deliver(self, *nodes: int) -> None:
        """Have nodes execute the present command, and bring the answers back."""
        assert isinstance(self.request, Broadcast)
        for node in nodes:
            self._answers[node] = self.stations[node].execute(self.request.command)
            self.sent.append((node, self.request.command))

    def resume(self) -> None:
        """Let the generator go on with what has come back; the rest has been silent."""
        assert self.request is not None
        if isinstance(self.request, Broadcast):
            began = self.now
            answers = {n: self._answers.get(n, Reply(ReplyKind.SILENT)) for n in self.request.nodes}
            if len(self._answers) < len(answers):
                self.now += self.request.patience
            said: Replies | float = Replies(began, self.now, answers)
        else:
            self.now += self.request.seconds
            for station in self.stations:
                station.pass_time(self.request.seconds)
            said = self.now
        self._answers = {}
        try:
            self.request = self._generator.send(said)
        except StopIteration as stop:
            self.request, self.result = None, stop.value

    def step(self) -> None:
        if isinstance(self.request, Broadcast):
            self.deliver(*(node for node in self.request.nodes if node not in self._answers))
        self.resume()

    def until(self, script: str) -> None:
        """Go on until the generator wants a script to be run that is named so."""
        while self.script != script:
            assert self.request is not None, f"it came to its end without {script}"
            self.step()

    def finish(self) -> Any:
        while self.request is not None:
            self.step()
        return self.result

    def last(self, script: str, node: int) -> Command:
        return next(sent for to, sent in reversed(self.sent) if (to, sent.script) == (node, script))


def recoverer(stations: Sequence[RealNode]) -> Actor:
    return Actor(stations, recover(_group(stations)))


def riser(stations: Sequence[RealNode], seen: int) -> Actor:
    """Return a client that brings the nodes above a token that a storage has seen."""
    return Actor(stations, rise(_group(stations), seen))


def _group(stations: Sequence[RealNode]) -> NodeGroup:
    names = tuple(station.node.name for station in stations)
    return NodeGroup(names, NODE_KEY, 1.0, lambda: "word", lambda: 0.0)


def operator(stations: Sequence[RealNode], wanted: Sequence[int], max_ttl: float | None = None) -> Actor:
    return Actor(stations, change(_group(stations), wanted, lambda _: None, max_ttl))


def without(script: str, line: str, instead: str = "") -> dict[str, str]:
    """Return a mutant of a shipped script, in which one piece of text is gone."""
    text = codec.SCRIPTS[script]
    assert text.count(line) == 1, f"{line!r} stands {text.count(line)} times in {script}"
    return {script: text.replace(line, instead)}


@dataclass(frozen=True)
class Schedule:
    """A schedule that the protocol survives, and that breaks a weaker one.

    Attributes:
        play: plays it on a stage; returns what came of it.
        survived: that, with the shipped code.
        broken: that, without the rule in question.
        scripts: the scripts without the rule.
        patches: the same for code of the library.
        count: how many nodes are in the list.
        beside: how many blank ones there are.
        durable: whether they have their data after a restart.
    """

    play: Callable[[Stage], object]
    survived: object
    broken: object
    scripts: Mapping[str, str] = field(default_factory=dict)
    patches: Sequence[tuple[object, str, object]] = ()
    count: int = 3
    beside: int = 0
    durable: bool = False

    def played(self, make: Callable[..., Stage], scripts: Mapping[str, str] | None = None) -> object:
        return self.play(make(scripts, count=self.count, beside=self.beside, durable=self.durable))

    def played_weaker(self, make: Callable[..., Stage], monkeypatch: pytest.MonkeyPatch) -> object:
        """Play it without the rule."""
        for patch in self.patches:
            monkeypatch.setattr(*patch)
        return self.played(make, self.scripts)


class Calls:
    def __init__(self, client: redis.Redis, name: str = "client") -> None:
        self._listener = client.pubsub(ignore_subscribe_messages=True)  # type: ignore[no-untyped-call]
        self._listener.subscribe(f"{NODE_KEY}:w:{name}")
        self._listener.get_message(timeout=1)

    def heard(self) -> list[str]:
        heard = []
        while (message := self._listener.get_message(timeout=0.1)) is not None:
            heard.append(str(message["data"]))
        return heard

    def close(self) -> None:
        self._listener.close()


class SlowDoor:
    """Passes connections on to a port, each only after `open` has been set."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._generation = 0
        self.open = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._threads = ThreadPoolExecutor(32)
        self._threads.submit(self._serve)

    def _serve(self) -> None:
        while True:
            inside, _ = self._listener.accept()
            self.open.wait()
            outside = socket.create_connection(("127.0.0.1", self._target))
            for pair in ((inside, outside), (outside, inside)):
                self._threads.submit(self._pump, *pair, self._generation)

    def lead_to(self, port: int) -> None:
        self._target = port

    def forget(self) -> None:
        self._generation += 1

    def _pump(self, source: socket.socket, sink: socket.socket, generation: int) -> None:
        with source, contextlib.suppress(OSError):
            try:
                while data := source.recv(65536):
                    if generation == self._generation:
                        sink.sendall(data)
            finally:  # also if the closing side had not read everything
                sink.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._threads.shutdown(wait=False)
