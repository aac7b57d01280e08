"""Each Lua script gives its answers, and leaves the right keys on the node, with every server program."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest
import redis

from fencelock.authority.redlock.membership.members import Identity
from fencelock.authority.redlock.protocol.acquire import _acquire_command
from fencelock.authority.redlock.protocol.attempts import (
    Attempt,
    NodeSet,
    QueuePosition,
    in_pairs,
    release_command,
    without_place,
)
from fencelock.authority.redlock.protocol.holding import _extend_command
from fencelock.authority.redlock.protocol.messages import Command, Reply, ReplyKind
from fencelock.authority.redlock.redlock import Redlock
from fencelock.authority.redlock.wire.codec import Packed, read_answer
from fencelock.authority.redlock.wire.connection import Connection, MalformedReplyError, PendingReply
from fencelock.tokens import MAX_COUNTER
from proof.servers import Node
from tests.redlock.stage import NODE_KEY, RealNode, node_set_of, stripe_of

Put = Callable[[Connection, PendingReply, Packed], None]
KEPT, RECREATED, NOT_EXTENDED = (Reply(ReplyKind.EXTENDED, counters=(code,)) for code in (2, 1, 0))


class Scripts:
    """Sends single commands to one node that has been initialised with counters from `base`."""

    def __init__(self, url: str, base: int) -> None:
        with redis.Redis.from_url(url) as client:
            client.flushall()
        with Redlock(url) as authority:
            authority.init(base=base)
        self.real = RealNode(url)
        self.client = self.real.client
        membership = self.real.link.identity.membership
        assert membership is not None
        self.node_set: NodeSet = node_set_of(membership.fingerprint, 1)

    def acquire(self, nonce: str, *resources: str, hint: int = 0, epoch: int = 0, ttl: float = 30.0) -> Reply:
        attempt = Attempt.of(self.node_set, tuple(sorted(resources)), nonce, ttl)
        pairs = in_pairs(attempt.stripes, [hint] * len(resources))
        arguments = (self.node_set.fingerprint, nonce, round(attempt.ttl * 1000), epoch, *pairs)
        return self.real.execute(Command("acquire", nonce, attempt.keys, arguments))

    def queue(self, nonce: str, *resources: str, position: QueuePosition | None) -> Reply:
        attempt = Attempt.of(self.node_set, tuple(sorted(resources)), nonce, 30.0, position)
        return self.real.execute(_acquire_command(attempt, self.node_set))

    def give_up(
        self, nonce: str, *resources: str, position: QueuePosition | None = None, stay: bool = False
    ) -> Reply:
        attempt = Attempt.of(self.node_set, tuple(sorted(resources)), nonce, 30.0, position)
        nothing = [0] * len(resources)
        return self.real.execute(release_command(self.node_set, attempt, 0, nothing, stay=stay))

    def confirm(self, nonce: str, counters: dict[str, int], *, epoch: int = 0) -> Reply:
        attempt = Attempt.of(self.node_set, tuple(sorted(counters)), nonce, 30.0)
        pairs = in_pairs(attempt.stripes, [counters[resource] for resource in attempt.resources])
        return self.real.execute(
            Command("confirm", nonce, attempt.keys, (self.node_set.fingerprint, nonce, epoch, *pairs))
        )

    def release(self, nonce: str, counters: dict[str, int], *, epoch: int = 0) -> Reply:
        attempt = Attempt.of(self.node_set, tuple(sorted(counters)), nonce, 30.0)
        decided = [counters[resource] for resource in attempt.resources]
        return self.real.execute(release_command(self.node_set, attempt, epoch, decided))

    def extend(self, nonce: str, *resources: str, ttl: float = 30.0) -> Reply:
        return self.extend_many([(nonce, resources)], ttl)

    def extend_many(self, grants: Sequence[tuple[str, tuple[str, ...]]], ttl: float) -> Reply:
        attempts = [
            Attempt.of(self.node_set, tuple(sorted(resources)), nonce, ttl) for nonce, resources in grants
        ]
        return self.real.execute(_extend_command(self.node_set, attempts, [0] * len(attempts)))

    def inspect(self, *resources: str) -> Reply:
        keys = (NODE_KEY, *map(key_of, resources))
        return self.real.execute(Command("inspect", "", keys, (self.node_set.fingerprint, "", "0", 200, "")))

    def shown(self, *resources: str) -> dict[str, tuple[str, ...]]:
        facts = self.inspect(*resources).facts[1:]
        return {facts[at]: facts[at + 1 : at + 5] for at in range(0, len(facts), 5)}

    def lock(self, resource: str) -> str | None:
        value = self.client.get(key_of(resource))
        return None if value is None else str(value)

    def counter(self, resource: str) -> int:
        value = self.client.hget(NODE_KEY, f"c{stripe_of(resource)}")
        return int(str(value or self.client.hget(NODE_KEY, "b")))


def key_of(resource: str) -> str:
    return f"{NODE_KEY}:l:{resource}"


@pytest.fixture
def scripts(shared_nodes: list[Node]) -> Iterator[Scripts]:
    shared_nodes[3].resume()
    made = Scripts(shared_nodes[3].url, 0)
    yield made
    made.real.close()


def test_grant_writes_lock_and_counter(scripts: Scripts) -> None:
    assert scripts.acquire("n", "r", ttl=7) == Reply(ReplyKind.GRANTED, 0, (1,))
    assert scripts.lock("r") == "n|0|1"
    assert 6000 < int(str(scripts.client.pttl(key_of("r")))) <= 7000
    assert scripts.counter("r") == 1


def test_held_lock_is_refused_with_its_remaining_time(scripts: Scripts) -> None:
    scripts.acquire("n", "r", ttl=7)
    answer = scripts.acquire("other", "r")
    assert answer.kind is ReplyKind.HELD
    assert 6 < answer.ttl <= 7
    assert scripts.counter("r") == 1


def test_inspect_shows_the_locks_that_are_held(scripts: Scripts) -> None:
    """Value, remaining ms, how many wait, and what the client has told; -1 ms for one without an end."""
    assert scripts.shown("a", "b") == scripts.shown() == {}
    nonce = "f" * 16 + "-of-client"
    scripts.client.set(f"{NODE_KEY}:w:{'f' * 16}", "host 1 program")
    scripts.acquire(nonce, "a", ttl=7)
    scripts.acquire("m", "b", ttl=70)
    found = scripts.shown("c", "b", "a")
    assert list(found) == ["b", "a"]
    value, left, waiters, who = found["a"]
    assert (value, waiters, who) == (f"{nonce}|0|1", "0", "host 1 program")
    assert 6000 < int(left) <= 7000
    assert scripts.shown().keys() == {"a", "b"}
    scripts.client.set(key_of("c"), "of something else")
    digest = hashlib.sha1(b"of something else").hexdigest()  # noqa: S324 - no secret
    assert scripts.shown("c") == {"c": (f"#{digest}", "-1", "0", "")}
    scripts.client.hdel(NODE_KEY, "r")
    assert scripts.inspect("a").kind is ReplyKind.RESTARTED


def test_a_claim_is_not_shown(scripts: Scripts) -> None:
    scripts.client.set(key_of("a"), ">client.1", px=60_000)
    scripts.acquire("n", "b", ttl=7)
    assert scripts.shown("a", "b").keys() == scripts.shown().keys() == {"b"}


def test_several_locks_are_granted_together_or_not_at_all(scripts: Scripts) -> None:
    scripts.acquire("n", "b")
    assert scripts.acquire("other", "a", "b", "c").kind is ReplyKind.HELD
    assert (scripts.lock("a"), scripts.lock("c")) == (None, None)
    assert scripts.counter("a") == scripts.counter("c") == 0
    scripts.release("n", {"b": 1})
    assert scripts.acquire("other", "a", "b", "c").counters == (1, 2, 1)


def test_two_locks_on_one_stripe_get_different_counters(scripts: Scripts) -> None:
    assert stripe_of("a") == stripe_of("b6")
    assert scripts.acquire("n", "a", "b6").counters == (1, 2)
    assert scripts.counter("a") == 2
    assert scripts.acquire("n", "a", "b6").counters == (1, 2)
    assert scripts.confirm("n", {"a": 5, "b6": 4}).kind is ReplyKind.CONFIRMED
    assert scripts.counter("a") == 5


def test_resent_request_mints_only_what_had_expired(scripts: Scripts) -> None:
    scripts.acquire("n", "a", "c")
    scripts.client.delete(key_of("c"))
    assert scripts.acquire("n", "a", "c").counters == (1, 2)


def test_grant_of_an_earlier_epoch_is_minted_anew(scripts: Scripts) -> None:
    scripts.acquire("n", "r")
    scripts.client.hset(NODE_KEY, "e", "1")
    assert scripts.confirm("n", {"r": 1}).kind is ReplyKind.EPOCH
    assert scripts.confirm("n", {"r": 1}, epoch=1).kind is ReplyKind.LOST
    assert scripts.acquire("n", "r") == Reply(ReplyKind.GRANTED, 1, (2,))


def test_hint_raises_the_counter_in_its_own_epoch_only(scripts: Scripts) -> None:
    assert scripts.acquire("n1", "a", hint=50).counters == (50,)
    assert scripts.acquire("n2", "c", hint=50, epoch=1).counters == (1,)
    scripts.release("n1", {"a": 50})
    assert scripts.acquire("n3", "a", hint=7).counters == (51,)


def test_counter_at_the_limit_of_44_bits_is_refused(scripts: Scripts) -> None:
    scripts.real.stand_at("r", MAX_COUNTER - 1)
    assert scripts.acquire("n", "r").counters == (MAX_COUNTER,)
    assert scripts.client.hget(NODE_KEY, f"c{stripe_of('r')}") == str(MAX_COUNTER)
    scripts.release("n", {"r": MAX_COUNTER})
    assert scripts.acquire("n", "a", "r").kind is ReplyKind.FULL
    assert scripts.lock("a") is None
    assert scripts.counter("a") == 0


def test_large_counters_keep_every_digit(scripts: Scripts) -> None:
    scripts.real.stand_at("r", 17_000_000_000_000)
    assert scripts.acquire("n", "r").counters == (17_000_000_000_001,)
    assert scripts.lock("r") == "n|0|17000000000001"
    assert scripts.confirm("n", {"r": 17_000_000_000_009}).kind is ReplyKind.CONFIRMED
    assert scripts.counter("r") == 17_000_000_000_009


def test_confirm_raises_and_never_lowers(scripts: Scripts) -> None:
    scripts.acquire("n", "r")
    assert scripts.confirm("n", {"r": 9}).kind is ReplyKind.CONFIRMED
    assert scripts.confirm("n", {"r": 4}).kind is ReplyKind.CONFIRMED
    assert scripts.counter("r") == 9


@pytest.mark.parametrize("base", [0, 1_000])
def test_catch_up_never_lowers_a_counter(shared_nodes: list[Node], base: int) -> None:
    scripts = Scripts(shared_nodes[3].url, base)
    scripts.acquire("n", "r")
    scripts.release("n", {"r": base + 5})
    assert scripts.counter("r") == base + 5
    scripts.acquire("n", "r")
    scripts.release("n", {"r": 3})
    assert scripts.acquire("m", "r").counters == (base + 7,)
    scripts.real.close()


ODD = (
    b"*2\r\n$6\r\nTICKET\r\n:0\r\n",
    b"*3\r\n$7\r\nGRANTED\r\n$1\r\n0\r\n:1\r\n",
    b"*3\r\n$7\r\nGRANTED\r\n:0\r\n$1\r\n1\r\n",
    b"*2\r\n$7\r\nGRANTED\r\n:0\r\n",
    b"*4\r\n$7\r\nGRANTED\r\n:0\r\n:1\r\n:2\r\n",
    b"*2\r\n$4\r\nHELD\r\n$1\r\n1\r\n",
    b"*0\r\n",
    b"*1\r\n*0\r\n",
)


@pytest.mark.parametrize("put", [Connection.put, Connection.put_alone])
def test_what_no_node_says_is_heard_as_that(put: Put) -> None:
    """Other types than a script's, and counters for more or fewer locks than were asked for."""
    for reply in ODD:
        connection = Connection(0, Identity("run", "", "", None), None, pushes=True)
        command = Command("acquire", "n", ("k", "k:l:a"), ("list", "n", 1000, 0, 1, 0))
        put(connection, PendingReply(None, command, 0.0), Packed(command))
        connection.flush_batch()
        with pytest.raises(MalformedReplyError):
            connection.received(reply, 0.0)


def test_a_message_that_is_no_text_is_heard_as_that() -> None:
    connection = Connection(0, Identity("run", "", "", None), None, pushes=True)
    with pytest.raises(MalformedReplyError):
        connection.received(b">3\r\n$7\r\nmessage\r\n$1\r\nx\r\n:5\r\n", 0.0)


@pytest.mark.parametrize("token", [MAX_COUNTER, 1 << 33])
def test_a_number_that_no_grants_explain_moves_no_counter(scripts: Scripts, token: int) -> None:
    """From its holder, from another, decided, given back or hinted at: other names of the stripe go on."""
    scripts.acquire("n", "r")
    assert scripts.confirm("n", {"r": token}).kind is ReplyKind.LOST
    assert scripts.confirm("another", {"r": 1}).kind is ReplyKind.LOST
    scripts.release("n", {"r": token})
    scripts.release("another", {"r": token})
    assert scripts.counter("r") == 1
    assert scripts.acquire("m", "r", hint=token).counters == (2,)


def test_release_in_another_epoch_or_list_changes_no_counter(scripts: Scripts) -> None:
    scripts.acquire("n", "r")
    assert scripts.release("n", {"r": 90}, epoch=3).kind is ReplyKind.RELEASED
    assert scripts.counter("r") == 1
    attempt = Attempt.of(node_set_of("another list", 1), ("r",), "n", 1.0)
    scripts.real.execute(release_command(node_set_of("another list", 1), attempt, 0, [90]))
    assert scripts.counter("r") == 1


def test_blank_node_stays_blank(scripts: Scripts) -> None:
    """No script leaves anything on a node that has lost its marker, save EXTEND the lock of its lease."""
    scripts.client.flushall()
    waiting = QueuePosition("client.0", waited=3, fair=True)
    assert scripts.acquire("n", "r").kind is ReplyKind.AMNESIA
    assert scripts.queue("n", "r", position=waiting).kind is ReplyKind.AMNESIA
    scripts.give_up("n", "r", position=waiting, stay=True)
    assert scripts.confirm("n", {"r": 4}).kind is ReplyKind.AMNESIA
    assert scripts.release("n", {"r": 4}).kind is ReplyKind.AMNESIA
    assert scripts.client.keys("*") == []
    assert scripts.extend("n", "r").kind is ReplyKind.AMNESIA
    assert scripts.client.keys("*") == [key_of("r")]
    assert scripts.lock("r") == "n|0|restored"
    assert scripts.release("n", {"r": 4}).kind is ReplyKind.RELEASED
    assert scripts.client.keys("*") == []


def test_extension_never_shortens(scripts: Scripts) -> None:
    scripts.acquire("n", "r", ttl=20)
    assert scripts.extend("n", "r", ttl=5) == KEPT
    assert int(str(scripts.client.pttl(key_of("r")))) > 19_000
    assert scripts.extend("n", "r", ttl=60) == KEPT
    assert int(str(scripts.client.pttl(key_of("r")))) > 59_000


def test_extension_is_of_all_locks_or_of_none(scripts: Scripts) -> None:
    scripts.acquire("n", "a", "c", ttl=20)
    scripts.client.delete(key_of("c"))
    scripts.acquire("m", "c", ttl=20)
    assert scripts.extend("n", "a", "c", "d", ttl=60) == NOT_EXTENDED
    assert scripts.lock("d") is None
    assert int(str(scripts.client.pttl(key_of("a")))) <= 20_000


def test_extension_makes_a_missing_lock_again_and_says_so(scripts: Scripts) -> None:
    """With a mark that no CONFIRM accepts; the next EXTEND finds it, and RELEASE deletes it."""
    scripts.acquire("n", "a", "c", ttl=20)
    scripts.client.delete(key_of("c"))
    assert scripts.extend("n", "a", "c", ttl=60) == RECREATED
    assert scripts.lock("c") == "n|0|restored"
    assert int(str(scripts.client.pttl(key_of("a")))) > 59_000
    assert int(str(scripts.client.pttl(key_of("c")))) > 59_000
    assert scripts.counter("c") == 1
    assert scripts.confirm("n", {"c": 9}).kind is ReplyKind.LOST
    assert scripts.acquire("n", "c").kind is ReplyKind.HELD
    assert scripts.acquire("m", "c").kind is ReplyKind.HELD
    assert scripts.extend("n", "a", "c", ttl=60) == KEPT
    assert scripts.release("n", {"a": 1, "c": 1}).kind is ReplyKind.RELEASED
    assert scripts.lock("c") is None


def test_many_grants_are_extended_in_one_call_each_for_itself(scripts: Scripts) -> None:
    scripts.acquire("n1", "a", "c", ttl=20)
    scripts.acquire("n3", "e", ttl=20)
    answer = scripts.extend_many([("n1", ("a", "c")), ("n2", ("d",)), ("n4", ("e",)), ("n1", ("c",))], 60)
    assert answer == Reply(ReplyKind.EXTENDED, counters=(2, 1, 0, 2))
    assert [scripts.lock(name) for name in "acde"] == ["n1|0|1", "n1|0|1", "n2|0|restored", "n3|0|1"]
    assert int(str(scripts.client.pttl(key_of("e")))) <= 20_000


def test_release_that_is_owed_gives_no_place_in_line(scripts: Scripts) -> None:
    """By the time that it arrives, its contender may wait there no more."""
    attempt = Attempt.of(scripts.node_set, ("a", "c"), "n1", 30.0, QueuePosition("client.1", waited=2.0))
    plain = release_command(scripts.node_set, replace(attempt, position=None), 0, (1, 2))
    for stay in (True, False):
        assert without_place(release_command(scripts.node_set, attempt, 0, (1, 2), stay=stay)) == plain
    assert without_place(plain) == plain


def test_foreign_value_under_a_lock_key_is_somebody_elses(scripts: Scripts) -> None:
    scripts.client.set(key_of("r"), "without an end")
    assert scripts.acquire("n2", "r").ttl == math.inf
    for value in ("", "n", "n|0", "n|0|1|2", "|0|1", "n|x|1"):
        scripts.client.set(key_of("r"), value, px=60_000)
        assert scripts.acquire("n2", "r").kind is ReplyKind.HELD, value
        assert scripts.confirm("n2", {"r": 9}).kind is ReplyKind.LOST, value
        assert scripts.extend("n2", "r") == NOT_EXTENDED, value
        assert scripts.release("n2", {"r": 9}).kind is ReplyKind.LOST, value
        assert scripts.lock("r") == value


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"r": "0" * 40}, ReplyKind.RESTARTED),
        ({"cfg": "another"}, ReplyKind.CONFIG),
        ({"next": "x"}, ReplyKind.CLOSED),
    ],
    ids=["restarted", "config", "closed"],
)
def test_node_that_must_not_vote_says_why(scripts: Scripts, change: dict[str, str], said: ReplyKind) -> None:
    """Every voting script refuses, and changes nothing; save that one that restarted keeps locks."""
    scripts.acquire("n", "r", ttl=20)
    scripts.client.hset(NODE_KEY, mapping=change)  # type: ignore[arg-type]
    before = scripts.client.hgetall(NODE_KEY)
    assert scripts.acquire("m", "other").kind is said
    assert scripts.confirm("n", {"r": 50}).kind is said
    assert scripts.extend("n", "r", ttl=60).kind is said
    assert scripts.client.hgetall(NODE_KEY) == before
    assert (int(str(scripts.client.pttl(key_of("r")))) > 20_000) is (said is ReplyKind.RESTARTED)


def test_every_vote_proves_the_server_where_the_socket_cannot(any_server: Node) -> None:
    """With `verify="vote"` the scripts ask the server itself, and notice a new replication id."""
    with redis.Redis.from_url(any_server.url) as client, Redlock(any_server.url, verify="vote") as authority:
        authority.init(base=0)
        with authority.lock("r") as token:
            assert token == 1
        client.hset(NODE_KEY, "m", "f" * 40)
        with pytest.raises(Exception, match="restarted since it was admitted"):
            authority.lock("r", timeout=0).acquire()


def test_reply_that_no_script_gives_is_an_error() -> None:
    replies: list[object] = [b"+OK", [b"NONSENSE"], [], 7, None, [[b"GRANTED"]]]
    for reply in replies:
        with pytest.raises((LookupError, TypeError, ValueError)):
            read_answer(reply)
