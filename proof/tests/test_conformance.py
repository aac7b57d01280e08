"""The node in memory answers each command, in any order, as the scripts do on a real server.

The scripts are the shipped ones, but for the time: a key says what the clock shows, and what would expire by
itself is deleted when the model's clock says so. Without that, whether the two agree would depend on how fast
this machine is. The lengths of time themselves are compared by `test_lengths_of_time_are_the_same`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from fencelock.authority.redlock.protocol.attempts import Attempt
from fencelock.authority.redlock.protocol.messages import Command, Reply, ReplyKind
from fencelock.authority.redlock.wire.codec import SCRIPTS
from fencelock.tokens import MAX_COUNTER
from proof.servers import Node
from proof.simulation import node as model_module
from proof.simulation.node import Lock, ModelNode
from tests.redlock.stage import NODE_KEY, RealNode, Station, node_set_of

#: The first two share a stripe.
RESOURCES = ("a", "b6", "c")
NONCES = ("n1", "n2", "n3")
LISTS = ("list0", "list1", "list2")
#: Only places of client `a` are heard when they are called.
PLACES = ("", "", "a.1", "a.2", "b.1")
CLOCK = "clock"
_FOREVER = "3600000"
_SHORT, _LONG = 600_000, 900_000


@dataclass(frozen=True)
class LockCommand:
    """A command about locks, with all that can be said in one."""

    script: str
    resources: tuple[str, ...]
    nonce: str
    fingerprint: str
    epoch: int
    numbers: tuple[int, ...]
    place: str
    waited: int
    ago: int
    flag: bool

    def command(self, now: int) -> Command:
        """Return it as it goes to a node whose clock says so."""
        keys = (NODE_KEY, *(f"{NODE_KEY}:l:{resource}" for resource in self.resources))
        stripes = Attempt.of(node_set_of("", 1), self.resources, "n", 1.0).stripes
        pairs = [number for pair in zip(stripes, self.numbers, strict=False) for number in pair]
        since = now - self.ago
        arguments: list[str | int] = [self.fingerprint, self.nonce]
        if self.script in {"acquire", "remint"}:
            arguments += [_LONG if self.flag else _SHORT, self.epoch, *pairs]
            if self.script == "remint":
                arguments += ["", 0, 0, 0, NONCES[(NONCES.index(self.nonce) + 1) % len(NONCES)]]
            elif self.place or self.flag:
                arguments += [self.place, self.waited, since, int(self.flag)]
        elif self.script == "extend":
            return self._extend()
        else:
            arguments += [self.epoch, *pairs]
            if self.script == "release" and self.place:
                arguments += [self.place] if self.flag else [self.place, self.waited, since]
        script = "acquire" if self.script == "remint" else self.script
        return Command(script, self.nonce, keys, tuple(arguments))

    def _extend(self) -> Command:
        """Extend all the resources under one nonce, then each under another."""
        grants = [
            (self.nonce, self.resources),
            *zip(NONCES, [(name,) for name in self.resources], strict=False),
        ]
        keys = [f"{NODE_KEY}:l:{name}" for _, names in grants for name in names]
        parts: list[str | int] = []
        for nonce, names in grants:
            ttl = -_SHORT if self.flag else _LONG  # below zero: exactly
            parts += [nonce, ttl, len(names), f"{nonce}|{self.epoch}|restored"]
        return Command("extend", "", (NODE_KEY, *keys), (self.fingerprint, "", *parts))


@dataclass(frozen=True)
class MemberCommand:
    """A command about members; `ticket` counts back from the last ticket that was made."""

    script: str
    which: int
    epoch: int
    ticket: int
    flag: bool

    def command(self, tickets: list[str]) -> Command:
        """Return it, with a ticket as one of the two nodes knows it."""
        cfg, members = LISTS[self.which], f"members{self.which}"
        ticket = tickets[-1 - self.ticket % len(tickets)]
        seat = tickets[-1 - self.epoch % len(tickets)] if self.flag else ""
        choices: dict[str, tuple[str | int, ...]] = {
            "begin": (cfg, "word", 1000, seat),
            "read": (cfg,),
            "promise": (cfg, self.epoch, ticket, "change" if self.flag else ""),
            "raise": (cfg, self.epoch),
            "admit": (cfg, self.epoch, ticket, ticket, members),
            "close": (cfg, LISTS[self.epoch % 3], f"members{self.epoch % 3}"),
            "open": (cfg, self.epoch, ticket, 0, members),
        }
        return Command(self.script, "", (NODE_KEY,), choices[self.script])


@dataclass(frozen=True)
class Event:
    """Something that happens to a node."""

    kind: str
    number: int


def take(resource: str, nonce: str, place: str = "") -> LockCommand:
    """Acquire one lock."""
    return LockCommand("acquire", (resource,), nonce, LISTS[0], 0, (0,), place, 0, 0, flag=False)


def give(resource: str, nonce: str, decided: int = 0) -> LockCommand:
    """Release one lock."""
    return LockCommand("release", (resource,), nonce, LISTS[0], 0, (decided,), "", 0, 0, flag=False)


#: Two locks are taken and given back.
TAKEN = (take("a", "n1"), take("c", "n2"))
GIVEN = (give("a", "n1", 1), give("c", "n2", 1))

lock_commands = st.builds(
    LockCommand,
    script=st.sampled_from(
        ["acquire"] * 5 + ["remint", "confirm", "confirm", "release", "release", "extend"]
    ),
    resources=st.lists(st.sampled_from(RESOURCES), min_size=1, max_size=3, unique=True).map(
        lambda names: tuple(sorted(names))
    ),
    nonce=st.sampled_from(NONCES),
    fingerprint=st.sampled_from([LISTS[0]] * 9 + [LISTS[1]]),
    epoch=st.integers(0, 2),
    numbers=st.tuples(*[st.one_of(st.integers(0, 12), st.integers(MAX_COUNTER - 3, MAX_COUNTER))] * 3),
    place=st.sampled_from(PLACES),
    waited=st.sampled_from([0, 5, 400]),
    ago=st.sampled_from([0, 100, 5_000]),
    flag=st.booleans(),
)
#: Releases are mostly of what stands on the node: its epoch is mostly 0, and its counters begin low.
everyday_commands = st.builds(
    LockCommand,
    script=st.sampled_from(["acquire", "release"]),
    resources=st.sampled_from([(resource,) for resource in RESOURCES]),
    nonce=st.sampled_from(NONCES),
    fingerprint=st.sampled_from([LISTS[0]] * 9 + [LISTS[1]]),
    epoch=st.sampled_from([0, 0, 0, 1]),
    numbers=st.tuples(st.sampled_from([0, 0, 1, 3, 7])),
    place=st.just(""),
    waited=st.just(0),
    ago=st.just(0),
    flag=st.just(value=False),
).map(lambda command: command if command.script == "release" else replace(command, numbers=(0,)))
member_commands = st.builds(
    MemberCommand,
    script=st.sampled_from(
        ["begin"] * 4 + ["promise", "admit", "open"] * 3 + ["read", "read", "raise", "close"]
    ),
    which=st.sampled_from([0, 0, 0, 1]),
    epoch=st.integers(0, 3),
    ticket=st.integers(0, 3),
    flag=st.booleans(),
)
events = st.builds(
    Event,
    kind=st.sampled_from(["time", "time", "expire", "restart", "reload", "flush", "evict"]),
    number=st.integers(0, 4),
)
#: Mostly about locks; mostly about members; and everything mixed.
HISTORIES = st.one_of(
    st.lists(st.one_of(lock_commands, lock_commands, lock_commands, events), min_size=1, max_size=25),
    st.lists(st.one_of(member_commands, member_commands, events), min_size=1, max_size=25),
    st.lists(st.one_of(lock_commands, member_commands, events), min_size=1, max_size=25),
    st.lists(st.one_of(everyday_commands, everyday_commands, lock_commands, events), min_size=1, max_size=25),
)


def with_a_still_clock() -> dict[str, str]:
    """Return the shipped scripts, with the time in a key, and nothing that expires by itself."""
    changes = {
        "local time = redis.call('TIME')\n  return time[1] * 1000 + math.floor(time[2] / 1000)": (
            f"return tonumber(redis.call('GET', '{CLOCK}'))"
        ),
        "'PX', CLAIM_MS)": f"'PX', {_FOREVER})",
        "'PEXPIRE', queue, QUEUE_MS)": f"'PEXPIRE', queue, {_FOREVER})",
    }
    scripts = {}
    for name, script in SCRIPTS.items():
        text = script
        for shipped, instead in changes.items():
            text = text.replace(shipped, instead)
        scripts[name] = text
    return scripts


class Pair:
    """A real node and a model, to which the same is done.

    Attributes:
        tickets: those that the real node has made, and the model's in the same order.
    """

    def __init__(self, real: RealNode) -> None:
        self.real = real
        self.model = ModelNode()
        self.heard: list[str] = []
        self.model.publish = self._publish
        self.tickets: tuple[list[str], list[str]] = ([""], [""])
        self.real.client.flushall()
        self.pass_time(1_000_000)
        self.pubsub: Any = real.client.pubsub(ignore_subscribe_messages=True)  # type: ignore[no-untyped-call]
        self.pubsub.subscribe(f"{NODE_KEY}:w:a")
        self.pubsub.get_message(timeout=5.0)

    def _publish(self, client: str, message: str) -> bool:
        if client == "a":
            self.heard.append(message)
        return client == "a"

    def open(self, base: int) -> None:
        """Have both initialised."""
        self.run(MemberCommand("begin", 0, 0, 0, flag=False))
        stations: tuple[Station, Station] = (self.real, self.model)
        for station, tickets in zip(stations, self.tickets, strict=True):
            arguments = (LISTS[0], 0, tickets[-1], base, "members0")
            assert station.execute(Command("open", "", (NODE_KEY,), arguments)).kind is ReplyKind.OPENED

    def run(self, step: LockCommand | MemberCommand | Event) -> None:
        """Do one thing to both, and compare what they say."""
        if isinstance(step, Event):
            getattr(self, step.kind)(step.number)
            return
        if isinstance(step, LockCommand):
            command = step.command(int(self.model.now))
            told, expected = self.real.execute(command), self.model.execute(command)
        else:
            theirs, ours = self.tickets
            told = self.real.execute(step.command(theirs))
            expected = self.model.execute(step.command(ours))
            if (
                told.kind is ReplyKind.TICKET
                and expected.kind is ReplyKind.TICKET
                and told.facts[0] not in theirs
            ):
                theirs.append(told.facts[0])
                ours.append(expected.facts[0])
        assert self.translated(told) == expected._replace(ttl=0.0), step

    def translated(self, answer: Reply) -> Reply:
        """Return an answer of the real node with the model's tickets, and without what only time decides."""
        return answer._replace(ttl=0.0, facts=tuple(map(self.ticket, answer.facts)))

    def ticket(self, word: str) -> str:
        """Return what the model says instead of a word of the real node's."""
        theirs, ours = self.tickets
        return ours[theirs.index(word)] if word in theirs else word

    # Events.

    def time(self, number: int) -> None:
        """Let time pass."""
        self.pass_time((1, 40, 120, 1_100, 5_100)[number])

    def pass_time(self, ms: int) -> None:
        """Let so many milliseconds pass, and what ends then be gone."""
        model = self.model
        model.now += ms
        self.real.client.set(CLOCK, int(model.now))
        gone = [key for key in list(model.locks) if model.lock(key) is None]
        gone += [
            f"{NODE_KEY}:q{key[len(NODE_KEY) + 2 :]}"
            for key, q in model.queues.items()
            if q.ends <= model.now
        ]
        if gone:
            self.real.client.delete(*gone)

    def expire(self, number: int) -> None:
        """End a lock."""
        resource = RESOURCES[number % 3]
        self.real.expire(resource)
        self.model.expire(f"{NODE_KEY}:l:{resource}")

    def restart(self, _: int) -> None:
        """Have both believe that another process had admitted them, and put the ticket there."""
        self.model.restart()
        fields = self.real.remember()
        if "e" in fields:
            self.real.client.hset(NODE_KEY, "r", "0" * 40)
        self.real.client.set(f"{NODE_KEY}:m", "1")
        if "ticket" in fields:
            self.real.client.hset(NODE_KEY, "ticket_of", "another process")

    def reload(self, _: int) -> None:
        """Have both load what they keep; a server has a short string of its file in a way of its own."""
        self.model.reload(self.model.remember())
        self.real.client.set(f"{NODE_KEY}:m", "1")

    def flush(self, _: int) -> None:
        """Have both forget everything."""
        self.model.flush()
        self.real.client.flushall()
        self.pass_time(0)

    def evict(self, _: int) -> None:
        """Have both forget their hash."""
        self.model.hash.clear()
        self.real.client.delete(NODE_KEY)

    # What they keep.

    def compare(self) -> None:
        """Compare all that both keep, and all that they have published."""
        fields = {name: self.ticket(value) for name, value in self.real.remember().items()}
        own = {"r", "m", "ticket_of"}
        expected = {
            f"c{name}" if isinstance(name, int) else name: str(value)
            for name, value in self.model.hash.items()
        }
        assert {name: value for name, value in fields.items() if name not in own} == {
            name: value for name, value in expected.items() if name not in own
        }
        assert self._locks() == {
            key: lock[:3] for key, lock in self.model.locks.items() if self.model.lock(key)
        }
        model = self.model
        queues = {key: q.since for key, q in model.queues.items() if q.since and q.ends > model.now}
        assert self._queues() == queues
        self.real.client.publish(f"{NODE_KEY}:w:a", "end")
        assert list(iter(self._message, "end")) == self.heard

    def _message(self) -> str:
        message: Any = self.pubsub.get_message(timeout=5.0)
        return str(message["data"])

    def _locks(self) -> dict[str, tuple[str, int | None, int | None]]:
        found: dict[str, tuple[str, int | None, int | None]] = {}
        for key in map(str, self.real.client.keys(f"{NODE_KEY}:l:*")):
            nonce, *rest = str(self.real.client.get(key)).split("|")
            epoch = int(rest[0]) if rest else None
            found[key] = (nonce, epoch, int(rest[1]) if rest and rest[1].isdigit() else None)
        return found

    def _queues(self) -> dict[str, dict[str, int]]:
        found = {}
        for key in map(str, self.real.client.keys(f"{NODE_KEY}:q:*")):
            members: Any = self.real.client.zrange(key, 0, -1, withscores=True)
            found[f"{NODE_KEY}:l:{key[len(NODE_KEY) + 3 :]}"] = {
                place: int(since) for place, since in members
            }
        return found


@pytest.fixture(scope="module")
def real(shared_nodes: list[Node]) -> Iterator[RealNode]:
    node = shared_nodes[4]
    if not node.is_running:
        node.restart(keep_data=False)
    node.resume()
    made = RealNode(node.url, with_a_still_clock())
    yield made
    made.client.flushall()
    made.close()


def test_two_of_the_resources_share_a_stripe() -> None:
    """The conformance test is to meet two locks of one command on one counter."""
    stripes = Attempt.of(node_set_of("", 1), RESOURCES, "n", 1.0).stripes
    assert stripes[0] == stripes[1] != stripes[2]


@pytest.mark.parametrize("name", ["CLAIM_MS", "LONGEST_QUEUE", "QUEUE_MS"])
def test_lengths_of_time_are_the_same(name: str) -> None:
    """What the tests take away from the scripts is the same in the model."""
    found = re.search(rf"^local {name} = (\d+)", SCRIPTS["release"], re.MULTILINE)
    assert found is not None
    assert int(found[1]) == getattr(model_module, name)


@example(
    base=0,
    history=[
        LockCommand("acquire", ("a",), "n1", "list0", 0, (0, 0, 0), "", 0, 0, flag=False),
        LockCommand("release", ("a",), "n1", "list1", 0, (2, 0, 0), "", 0, 0, flag=False),
    ],
)
@example(base=0, history=[*TAKEN, give("a", "n1", 7), give("c", "n2", 1), *TAKEN])
@example(base=0, history=[*TAKEN, take("a", "n3", "a.1"), *GIVEN, *TAKEN])
@example(base=0, history=[*TAKEN, Event("restart", 0), *TAKEN, *GIVEN, *TAKEN])
@example(base=0, history=[*TAKEN, Event("reload", 0), *TAKEN, *GIVEN, *TAKEN])
@example(base=0, history=[*TAKEN, Event("evict", 0), *TAKEN, *GIVEN, *TAKEN])
@example(base=0, history=[*TAKEN, MemberCommand("close", 0, 1, 0, flag=False), *TAKEN, *GIVEN, *TAKEN])
@example(base=MAX_COUNTER - 2, history=[take("a", "n1"), take("b6", "n2"), take("c", "n1")])
@example(base=MAX_COUNTER - 1, history=[*TAKEN, *GIVEN, *TAKEN, take("b6", "n1"), take("c", "n3")])
@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(base=st.sampled_from([0, 5, MAX_COUNTER - 2]), history=HISTORIES)
def test_model_answers_as_the_scripts_do(
    real: RealNode, base: int, history: list[LockCommand | MemberCommand | Event]
) -> None:
    """Same steps, same answers; and in the end the same hash, locks, queues and calls."""
    pair = Pair(real)
    try:
        pair.open(base)
        for step in history:
            pair.run(step)
        pair.compare()
    finally:
        pair.pubsub.close()


class Careless(ModelNode):
    """A model that compares nothing when it confirms."""

    def is_higher(self, counters: Any, decided: Any) -> bool:  # noqa: ARG002 - the mutation
        return False


def test_a_model_that_differs_is_noticed(real: RealNode) -> None:
    """Control: one rule less in the model, and a short history shows it."""
    pair = Pair(real)
    pair.model.__class__ = Careless
    pair.open(0)
    pair.run(LockCommand("acquire", ("a",), "n1", "list0", 0, (0, 0, 0), "", 0, 0, flag=False))
    with pytest.raises(AssertionError):
        pair.run(LockCommand("confirm", ("a",), "n1", "list0", 0, (0, 0, 0), "", 0, 0, flag=False))
    pair.pubsub.close()


def test_locks_of_the_model_end_by_its_clock() -> None:
    """A lock is there until its ttl has passed, and not at that moment."""
    node = ModelNode()
    node.locks["k"] = Lock("n", 0, 1, 10.0)
    node.now = 9.0
    assert node.lock("k") is not None
    node.now = 10.0
    assert node.lock("k") is None
