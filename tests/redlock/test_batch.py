"""Commands that travel together do on a real node the same as each does alone."""

from __future__ import annotations

import asyncio
import gc
import random
import select
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import pytest
import redis

from fencelock import Redlock
from fencelock.authority.redlock.protocol.acquire import _acquire_command
from fencelock.authority.redlock.protocol.attempts import Attempt, QueuePosition, release_command
from fencelock.authority.redlock.protocol.messages import Broadcast, Command, Reply, ReplyKind
from fencelock.authority.redlock.transport.blocking import read_from, write_to
from fencelock.authority.redlock.wire import connection
from fencelock.authority.redlock.wire.codec import SCRIPTS, Packed
from fencelock.authority.redlock.wire.connection import (
    Connection,
    MalformedReplyError,
    PendingBroadcast,
    PendingReply,
)
from fencelock.errors import AuthorityError
from proof.servers import Nodes
from tests.redlock.stage import NODE_KEY, RealNode, node_set_of
from tests.redlock.strikes import InterruptionError, strike_at
from tests.redlock.views import connected, locks_on, soon, take


class Told(PendingBroadcast):
    """Waits for the answer to one command, and notes when it comes."""

    def __init__(self, command: Command, answered: list[tuple[Command, Reply]]) -> None:
        super().__init__(Broadcast(command, [0], lambda _: True, 5.0))
        self._command = command
        self._answered = answered

    def add_reply(self, node: int, answer: Reply) -> None:
        super().add_reply(node, answer)
        self._answered.append((self._command, answer))


class BatchingNode(RealNode):
    def __init__(self, url: str) -> None:
        with Redlock(url) as authority:
            authority.init(base=0)
        super().__init__(url)
        membership = self.link.identity.membership
        assert membership is not None
        self.node_set = node_set_of(membership.fingerprint, 1)

    def _open(self) -> None:
        super()._open()
        self.link = Connection(0, self.link.identity, 0, pushes=True)

    def ask(self, commands: Sequence[Command]) -> list[tuple[Command, Reply]]:
        """Return the commands with their answers, in the order in which these have come."""
        answered: list[tuple[Command, Reply]] = []
        for command in commands:
            self.link.put(PendingReply(Told(command, answered), command, 0.0), Packed(command))
        self.on_trouble()
        return answered

    def on_trouble(self) -> None:
        poll = select.poll()
        poll.register(self.sock.fileno(), select.POLLIN)
        while self.link.unanswered:
            self.link.flush_batch()
            write_to(self.sock, self.link)
            assert poll.poll(5000), "the node does not answer"
            for (waiting, _, _), answer in self.link.received(read_from(self.sock) or b"", 0.0):
                assert waiting is not None
                waiting.add_reply(0, answer)

    def acquire(self, nonce: str, resource: str, position: QueuePosition | None = None) -> Command:
        attempt = Attempt.of(self.node_set, (resource,), nonce, 30.0, position)
        return _acquire_command(attempt, self.node_set)

    def release(self, nonce: str, resource: str, counter: int = 0) -> Command:
        attempt = Attempt.of(self.node_set, (resource,), nonce, 30.0)
        return release_command(self.node_set, attempt, 0, [counter])

    def state(self) -> dict[str, Any]:
        counters = {k: v for k, v in self.remember().items() if k.startswith("c") and k != "cfg"}
        locks = {key: self.client.get(key) for key in self.client.keys(f"{NODE_KEY}:l:*")}
        queues = {key: self.client.zrange(key, 0, -1) for key in self.client.keys(f"{NODE_KEY}:q:*")}
        return {"counters": counters, "locks": locks, "queues": queues}

    def calls(self, command: str = "evalsha") -> int:
        stats: Any = self.client.info("commandstats")
        return int(stats.get(f"cmdstat_{command}", {"calls": 0})["calls"])


@pytest.fixture
def node(nodes: Nodes) -> Any:
    its = BatchingNode(nodes[0].url)
    yield its
    its.close()


@pytest.mark.parametrize("seed", range(3))
def test_commands_do_together_what_they_do_alone(nodes: Nodes, seed: int) -> None:
    """Random histories: two nodes execute the same commands in the same order, one of them in batches."""
    chance = random.Random(seed)
    together, alone = (BatchingNode(nodes[number].url) for number in (0, 1))
    resources = ["a", "b", "c", "d"]
    nonces = [(f"n{number}", resource) for number in range(3) for resource in resources]
    granted: dict[tuple[str, str], int] = {}

    def draw(its: BatchingNode, kind: str, nonce: str, resource: str) -> Command:
        if kind == "release":
            return its.release(nonce, resource, granted.get((nonce, resource), 0))
        if kind == "lag":
            return its.release(nonce, resource, granted.get((nonce, resource), 0) + 2)
        position = QueuePosition("c.1", 0.1, 0.0, fair=True) if kind == "queue" else None
        return its.acquire(nonce, resource, position)

    said: set[ReplyKind] = set()
    for _ in range(60):
        drawn = [
            (
                chance.choice(("acquire", "acquire", "release", "release", "queue", "lag")),
                *chance.choice(nonces),
            )
            for _ in range(chance.randint(2, 8))
        ]
        commands = [draw(together, *each) for each in drawn]
        same = {id(command): draw(alone, *each) for command, each in zip(commands, drawn, strict=True)}
        answers = together.ask(commands)
        for command, answer in answers:
            ((_, expected),) = alone.ask([same[id(command)]])
            assert answer._replace(ttl=0.0) == expected._replace(ttl=0.0), command
            said.add(answer.kind)
            if answer.kind is ReplyKind.GRANTED:
                granted[command.nonce, command.keys[1].rpartition(":")[2]] = answer.counters[0]
        assert together.state() == alone.state()
        if chance.random() < 0.3:  # the claim of a contender that was called ends with its ttl
            for its in (together, alone):
                its.client.delete(*(f"{NODE_KEY}:l:{resource}" for resource in resources))
    assert said >= {ReplyKind.GRANTED, ReplyKind.HELD, ReplyKind.RELEASED, ReplyKind.LOST}
    for its in (together, alone):
        its.close()


def _spoil(its: BatchingNode, how: str) -> None:
    client = its.client
    if how == "blank":
        client.delete(NODE_KEY, f"{NODE_KEY}:m")
    elif how == "loaded from a file":
        client.set(f"{NODE_KEY}:m", "1")
    else:
        field, _, value = how.partition("=")
        client.hset(NODE_KEY, field, value)


@pytest.mark.parametrize(
    "how",
    ["blank", "loaded from a file", "r=another", "cfg=another", "next=another", "e=1", "b=17592186044415"],
)
def test_node_that_does_not_vote_says_so_to_each(nodes: Nodes, how: str) -> None:
    together, alone = (BatchingNode(nodes[number].url) for number in (0, 1))
    heard: list[list[tuple[str, Reply]]] = []
    for its in (together, alone):
        its.ask([its.acquire("n0", "a"), its.acquire("n1", "b")])
        _spoil(its, how)
        commands = [
            its.acquire("n2", "c"),
            its.release("n0", "a", 1),
            its.acquire("n3", "d"),
            its.release("n4", "e"),
        ]
        groups = [commands] if its is together else [[command] for command in commands]
        answers = [(command.nonce, answer) for group in groups for command, answer in its.ask(group)]
        heard.append(sorted(answers))
    assert heard[0] == heard[1]
    assert together.state() == alone.state()
    for its in (together, alone):
        its.close()


def test_node_takes_many_commands_in_one_call(node: BatchingNode) -> None:
    """A hundred locks need one call to acquire them and one to release them; one more needs another."""
    names = [f"r{number}" for number in range(connection._LARGEST_BATCH)]
    before = node.calls()
    answers = node.ask([node.acquire(name, name) for name in names])
    assert {answer.kind for _, answer in answers} == {ReplyKind.GRANTED}
    node.ask([node.release(name, name) for name in names])
    assert node.calls() == before + 2
    node.ask([node.acquire(name, name) for name in [*names, "one more"]])
    assert node.calls() == before + 4


def test_command_that_is_not_so_simple_travels_alone(node: BatchingNode) -> None:
    """A lock that is held, and a place in line: the others' answers come at once, the order stays."""
    node.ask([node.acquire("n0", "held")])
    place = QueuePosition("c.1", 0.1, 0.0)
    commands = [
        node.acquire("n1", "held"),
        node.acquire("n2", "free"),
        node.acquire("n3", "held", place),
        node.acquire("n4", "free too"),
        node.acquire("n5", "free as well"),
    ]
    heard = [(command.nonce, answer.kind) for command, answer in node.ask(commands)]
    assert heard == [
        ("n2", ReplyKind.GRANTED),
        ("n3", ReplyKind.HELD),
        ("n4", ReplyKind.GRANTED),
        ("n5", ReplyKind.GRANTED),
        ("n1", ReplyKind.HELD),
    ]


def test_acquire_that_nothing_waits_for_is_not_put_again(node: BatchingNode) -> None:
    """Its RELEASE may have gone before: then nothing would release what it gets."""
    node.ask([node.acquire("n0", "r")])
    answered: list[tuple[Command, Reply]] = []
    late, other = node.acquire("late", "r"), node.acquire("n2", "other")
    for command in (late, other):
        told = Told(command, answered)
        node.link.put(PendingReply(told, command, 0.0), Packed(command))
        told.over = command is late
    for command in (node.release("n0", "r"), node.release("late", "r")):
        node.link.flush_batch()
        write_to(node.sock, node.link)
        node.link.put(PendingReply(None, command, 0.0), Packed(command))
    node.on_trouble()
    assert [command.nonce for command, _ in answered] == ["n2"]
    assert node.client.get(f"{NODE_KEY}:l:r") is None
    assert "late" not in node.link.acquiring


def test_node_that_has_forgotten_its_scripts_is_told_them_again(node: BatchingNode) -> None:
    node.ask([node.acquire("n0", "a"), node.acquire("n1", "b")])
    node.client.script_flush()
    commands = [node.release("n0", "a"), node.acquire("n2", "c"), node.release("n1", "b")]
    heard = {command.nonce: answer.kind for command, answer in node.ask(commands)}
    assert heard == {"n0": ReplyKind.RELEASED, "n2": ReplyKind.GRANTED, "n1": ReplyKind.RELEASED}


def test_error_in_the_midst_of_a_call_loses_no_release(node: BatchingNode) -> None:
    """A node whose memory is full grants nothing, but executes each release."""
    node.ask([node.acquire("n0", "a"), node.acquire("n1", "b")])
    node.client.config_set("maxmemory", 1)
    commands = [node.acquire("n2", "c"), node.release("n0", "a"), node.release("n1", "b")]
    heard = {command.nonce: answer.kind for command, answer in node.ask(commands)}
    node.client.config_set("maxmemory", 0)
    assert heard["n2"] is ReplyKind.ERROR
    assert node.client.keys(f"{NODE_KEY}:l:*") == []


def test_other_number_of_answers_is_no_node(node: BatchingNode) -> None:
    for nonce in ("n0", "n1"):
        command = node.acquire(nonce, nonce)
        node.link.put(PendingReply(None, command, 0.0), Packed(command))
    node.link.flush_batch()
    with pytest.raises(MalformedReplyError, match="1 answers to 2 commands"):
        node.link.received(b"*3\r\n$5\r\nBATCH\r\n:0\r\n:1\r\n", 0.0)


def test_node_without_the_script_is_told_each_command(node: BatchingNode) -> None:
    """Until the next connection, which brings the scripts along."""
    node.ask([node.acquire("n0", "a"), node.acquire("n1", "b")])
    node.client.script_flush()
    node.ask([node.release("n0", "a"), node.release("n1", "b")])
    node.client.config_resetstat()
    node.ask([node.acquire("n2", "a"), node.acquire("n3", "b")])
    assert node.calls("eval") == 2  # it is told their script
    node.ask([node.release("n2", "a"), node.release("n3", "b")])
    assert node.calls() == 4
    node.reconnect()
    node.ask([node.acquire("n4", "a"), node.acquire("n5", "b")])
    assert node.calls() == 5


_STRUCK_ROOMS = ("/redlock/wire/", "/transport/aio")


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("count", [1, 3])
def test_handler_that_raises_in_the_midst_of_a_batch(nodes: Nodes, count: int) -> None:
    """At lines all over the connections of a loop: no token comes twice, no lock is left."""
    urls = nodes.urls[:count]
    with Redlock(urls, node_timeout=0.5, outage_grace=0.3) as authority:
        authority.init(base=0)
        lines = asyncio.run(_strike_everywhere(authority, nodes[:count], step=31 * count))
    assert lines > 800 * count
    gc.collect()  # sockets of interrupted connections; elsewhere they would count as a leak


async def _strike_everywhere(authority: Redlock, nodes: Sequence[Any], step: int) -> int:
    """Have tasks lock, and strike once, at a later line each time; return the number of lines."""
    asyncio.get_running_loop().set_exception_handler(lambda *_: None)
    clients = [redis.Redis.from_url(node.url, decode_responses=True) for node in nodes]
    last: dict[str, int] = {}
    line = 1
    while True:
        await _connect_again(authority)
        names = ("r0", "r1", "r2", "r3", "r0", "r1", "r4", "r5", "r6")  # some are contended for
        working = [_lock_twice(authority, name, last, clients) for name in names]
        strike_at(line, _STRUCK_ROOMS)
        outcomes = await asyncio.gather(*working, return_exceptions=True)
        came = sys.gettrace() is None
        sys.settrace(None)
        wrong = [
            each for each in outcomes if each and not isinstance(each, (InterruptionError, AuthorityError))
        ]
        assert not wrong, f"at line {line}: {wrong}"
        await _connect_again(authority)
        assert await soon(lambda: not locks_on(nodes)), f"at line {line}: {locks_on(nodes)}"
        if not came:
            break
        line += step
    for client in clients:
        client.close()
    return line


async def _lock_twice(authority: Redlock, name: str, last: dict[str, int], clients: Sequence[Any]) -> None:
    for _ in range(2):
        grant = await authority.aio.acquire((name,), ttl=60, timeout=3)
        try:
            assert grant.tokens[0] > last.get(name, 0)
            last[name] = grant.tokens[0]
            found = [client.get(f"{NODE_KEY}:l:{name}") or "" for client in clients]
            ours = [value for value in found if value.startswith(f"{grant.proof.attempt.nonce}|")]
            assert len(ours) > len(clients) // 2, f"{found} for {grant}"
        finally:
            try:
                await authority.aio.release(grant)
            except InterruptionError:
                await authority.aio.release(grant)


async def _connect_again(authority: Redlock) -> None:
    for _ in range(100):
        with suppress(AuthorityError):
            await take(authority, "warm", timeout=1.0)
        if not authority.aio.here()._nodes.absent:
            return
        await asyncio.sleep(0.02)
    raise AssertionError("there is no connection")


def test_scripts_share_the_text_of_their_shortcuts() -> None:
    """So that a batch cannot differ from what its commands do alone."""
    shortcut = SCRIPTS["batch"].partition("local function grant(")[2].partition("-- BATCH")[0]
    assert len(shortcut) > 500
    assert all(shortcut in SCRIPTS[name] for name in ("acquire", "release"))


def test_tasks_share_calls(authority: Redlock, nodes: Nodes) -> None:
    """Two hundred locks of a hundred tasks: some calls, where two for each lock would be 400."""

    async def main() -> int:
        await connected(authority)
        with redis.Redis.from_url(nodes[0].url) as client:
            client.config_resetstat()
            for _ in range(2):
                await asyncio.gather(*(take(authority, f"r{number}") for number in range(100)))
            assert await soon(lambda: not locks_on(nodes))
            stats: Any = client.info("commandstats")
        return int(stats["cmdstat_evalsha"]["calls"])

    assert asyncio.run(main()) < 100
