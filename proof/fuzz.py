"""What comes from outside, at random: bytes of a node and of etcd, and texts of `hand_over`.

    python -m proof.fuzz --seconds 60

A node may say anything: the connection hands on answers, or says that it is no node. So may etcd: what cannot
be read is an AuthorityError, or the loss of the connection. A text may be anything:
`take_over` raises ValueError, or entering what it makes raises an error of the library.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from fencelock import AuthorityError, Database, FencelockError, take_over
from fencelock.authority.etcd import messages as etcd
from fencelock.authority.etcd.channel import Channel, ChannelError
from fencelock.authority.redlock.membership.members import Identity
from fencelock.authority.redlock.protocol.messages import Broadcast, Command, ReplyKind
from fencelock.authority.redlock.wire.codec import Packed
from fencelock.authority.redlock.wire.connection import (
    Connection,
    MalformedReplyError,
    PendingBroadcast,
    PendingReply,
)
from fencelock.lock.base import HANDED

_EXAMPLES = 500
_NUMBERS = st.one_of(st.integers(-5, 5), st.integers(-(1 << 70), 1 << 70))
_WORDS = st.one_of(st.sampled_from([said.name.encode() for said in ReplyKind]), st.binary(max_size=12))
_LEAVES = st.one_of(
    _NUMBERS.map(lambda number: b":%d\r\n" % number),
    _WORDS.map(lambda word: b"$%d\r\n%b\r\n" % (len(word), word)),
    st.sampled_from(
        [b"+OK\r\n", b"-ERR no\r\n", b"-NOSCRIPT no\r\n", b"-MOVED 1 h:1\r\n", b"$-1\r\n", b"_\r\n"]
    ),
)
REPLIES = st.recursive(
    _LEAVES,
    lambda inner: st.tuples(st.sampled_from([b"*", b">"]), st.lists(inner, max_size=6)).map(
        lambda made: b"%b%d\r\n%b" % (made[0], len(made[1]), b"".join(made[1]))
    ),
    max_leaves=12,
)
BYTES = st.one_of(st.lists(REPLIES, max_size=5).map(b"".join), st.binary(max_size=60))
_KEYS = ("{fencelock}", "{fencelock}:l:a")
COMMANDS = st.lists(
    st.sampled_from(
        [
            Command("acquire", "n", _KEYS, ("list", "n", 1000, 0, 1, 0)),
            Command("release", "n", _KEYS, ("list", "n", 0, 1, 1)),
            Command("confirm", "n", _KEYS, ("list", "n", 0, 1, 1)),
            Command("extend", "", _KEYS, ("list", "", "n", 1000, 1, "n|0|x")),
            Command("inspect", "", _KEYS, ("list", "")),
        ]
    ),
    max_size=6,
)
_JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), _NUMBERS, st.floats(), st.text(max_size=8)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=4), inner, max_size=4)
    ),
    max_leaves=8,
)
#: Fields of protobuf: a number with its type, and a number or some bytes.
_FIELDS_OF_ETCD = st.lists(
    st.one_of(
        st.tuples(st.integers(0, 127), st.integers(0, 127)).map(bytes),
        st.tuples(st.integers(1, 15), st.binary(max_size=9)).map(
            lambda field: bytes([field[0] << 3 | 2, len(field[1])]) + field[1]
        ),
    ),
    max_size=5,
).map(b"".join)
MESSAGES = st.recursive(
    _FIELDS_OF_ETCD,
    lambda inner: st.lists(st.tuples(st.integers(1, 8), inner), max_size=4).map(
        lambda fields: b"".join(bytes([number << 3 | 2, len(its) % 128]) + its for number, its in fields)
    ),
    max_leaves=6,
)
#: Frames of HTTP/2: length, type, flags, stream and content.
FRAMES = st.tuples(
    st.integers(0, 10), st.integers(0, 255), st.sampled_from([0, 1, 3]), st.binary(max_size=30)
).map(
    lambda its: len(its[3]).to_bytes(3, "big") + bytes([its[0], its[1]]) + its[2].to_bytes(4, "big") + its[3]
)
READERS: tuple[Callable[[bytes], object], ...] = (
    *(etcd.lease_and_ttl, etcd.has_ended, etcd.version_of, etcd.auth_token, etcd.found_by),
    lambda message: etcd.Txn.read(message, 1, 2),
)
Put = Callable[[Connection, PendingReply, Packed], None]
_FIELDS = ("resources", "tokens", "ttl", "proof", "by")
CHANGES = st.dictionaries(st.sampled_from(_FIELDS), _JSON, max_size=3)


def hear(commands: list[Command], pieces: list[bytes], put: Put) -> None:
    """Have a connection hear bytes after commands; anything but news or MalformedReplyError is a fault."""
    connection = Connection(0, Identity("run", "", "", None), None, pushes=True)
    broadcast = PendingBroadcast(Broadcast(Command("read", "", (), ()), range(1), lambda _: False, 1.0))
    for command in commands:
        put(connection, PendingReply(broadcast, command, 0.0), Packed(command))
    connection.flush_batch()
    with suppress(MalformedReplyError):
        for piece in pieces:
            connection.received(piece, 0.0)
            for answer in broadcast.answers.values():
                assert {type(answer.epoch), *map(type, answer.counters)} <= {int, type(None)}, answer


def read(message: bytes, received: list[bytes]) -> None:
    """Read a message of etcd, and have a channel receive bytes; other errors than these are faults."""
    for reader in READERS:
        with suppress(AuthorityError):
            reader(message)
    channel = Channel("http", "host:2379")
    channel.start(etcd.status())
    with suppress(ChannelError):
        for piece in received:
            channel.receive(piece)


def enter(authority: Any, its: object) -> None:
    """Take over what a text says; anything but ValueError and the library's errors is a fault."""
    with suppress(ValueError, FencelockError), take_over(json.dumps({HANDED: its}), authority=authority):
        pass


def fuzz(number: int, seconds: float) -> int:
    """Try random inputs, from this seed on; return how many. AssertionError shows the shortest wrong one."""
    until, rounds = time.monotonic() + seconds, 0
    with Database("sqlite://") as authority:
        authority.init()
        lock = authority.lock("a", ttl=3600, max_hold=None)
        lock.acquire()
        genuine = json.loads(lock.hand_over())[HANDED]

        def texts(changes: dict[str, object], without: set[str]) -> None:
            enter(authority, {key: its for key, its in (genuine | changes).items() if key not in without})

        ways: Any = st.sampled_from([Connection.put, Connection.put_alone])
        while time.monotonic() < until:
            _many(given(COMMANDS, st.lists(BYTES, max_size=4), ways)(hear), number + rounds)
            _many(given(CHANGES, st.sets(st.sampled_from(_FIELDS), max_size=1))(texts), number + rounds)
            _many(
                given(MESSAGES, st.lists(st.one_of(FRAMES, st.binary(max_size=40)), max_size=4))(read),
                number + rounds,
            )
            rounds += 1
    return 3 * rounds * _EXAMPLES


def _many(check: Callable[..., None], number: int) -> None:
    checked = settings(
        max_examples=_EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck)
    )
    checked(seed(number)(check))()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m proof.fuzz", description="random bytes and texts")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0, help="the first one")
    options = parser.parse_args()
    count = fuzz(options.seed, options.seconds)
    sys.stdout.write(f"{count:,} inputs: nothing but answers and errors that are promised\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
