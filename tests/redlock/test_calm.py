"""The short way that blocking code takes where nothing is the matter leads to where the long one does."""

from __future__ import annotations

import contextlib
import random
import socket
import time
from collections import deque
from typing import Any

import hiredis
import pytest

from fencelock.authority.redlock.blocking import Channels
from fencelock.authority.redlock.node import Identity, Link, Node, pack, read_answer, read_whole
from fencelock.authority.redlock.protocol import Answer, Broadcast, Command, Round, Said
from fencelock.authority.redlock.seats import Ballot, Seats

NODES = 3
REPLIES = [
    *[b"*3\r\n$7\r\nGRANTED\r\n:0\r\n:%d\r\n" % counter for counter in (7, 7, 7, 8)],
    b"*3\r\n$7\r\nGRANTED\r\n:1\r\n:7\r\n",
    b"*4\r\n$7\r\nGRANTED\r\n:0\r\n:7\r\n:9\r\n",
    *[b"*1\r\n$8\r\nRELEASED\r\n"] * 4,
    b"*2\r\n$4\r\nHELD\r\n:1500\r\n",
    b"*1\r\n$4\r\nLOST\r\n",
    b"*1\r\n$9\r\nRESTARTED\r\n",
    b"*3\r\n$8\r\nEXTENDED\r\n:0\r\n:1\r\n",
    b"*2\r\n$8\r\nSTANDING\r\n$500\r\n" + b"x" * 500 + b"\r\n",
    b"-ERR it does not want to\r\n",
    b"-NOSCRIPT No matching script.\r\n",
    b"-MOVED 1 127.0.0.1:1\r\n",
    b"+what\r\n",
    b"$-1\r\n",
]
COMMANDS = [
    Command("acquire", "wanted", ("{n}", "{n}:l:a"), ("fp", "wanted", 1000, 0, 1, 0)),
    Command("acquire", "given up", ("{n}", "{n}:l:b"), ("fp", "given up", 1000, 0, 1, 0)),
    Command("release", "given up", ("{n}", "{n}:l:b"), ("fp", "given up", 0, 1, 0)),
    Command("extend", "", ("{n}", "{n}:l:a"), ("fp", "", "given up", 1000, 1, "given up|0|restored")),
]


class Clock:
    """The time, which goes on only while nobody has anything to say."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        """Return the time."""
        return self.now


class Feeding:
    """A poll that has the nodes say the next bit whenever everything before has been read."""

    def __init__(self, real: Any, ends: list[socket.socket], bits: list[tuple[int, bytes]]) -> None:
        self.ends = ends
        self.bits = deque(bits)
        self.real = real
        self.clock = Clock()
        self.order: dict[int, int] = {}
        self.register, self.unregister = real.register, real.unregister

    def poll(self, milliseconds: float) -> list[tuple[int, int]]:
        """Return what can be read, or let the time pass."""
        ready = self.real.poll(0)
        while not ready and milliseconds > 0 and self.bits:
            node, bit = self.bits.popleft()
            with contextlib.suppress(OSError):  # it has hung up
                self.ends[node].send(bit)
            ready = self.real.poll(0)
        self.clock.now += 0 if ready else milliseconds / 1000
        return sorted(ready, key=lambda found: self.order[found[0]])


class Calm(Channels):
    """Sockets to nodes that a test plays; what is gone is not opened again."""

    def __init__(self, bits: list[tuple[int, bytes]]) -> None:
        self.troubles = 0
        super().__init__(
            [Node("redis://127.0.0.1:1", 1.0, verify_votes=False) for _ in range(NODES)],
            "{n}",
            on_identity=lambda *_: None,
            is_open=lambda nonce: nonce == "wanted",
            on_trouble=self.note_trouble,
            connect_timeout=1.0,
            patience=1.0,
        )
        pairs = [socket.socketpair() for _ in range(NODES)]
        self.ends = [end for _, end in pairs]
        self.feeding = Feeding(self._poll, self.ends, bits)
        self._poll = self.feeding  # type: ignore[assignment]
        self.feeding.order = {ours.fileno(): index for index, (ours, _) in enumerate(pairs)}
        for index, (ours, _) in enumerate(pairs):
            self._seat(index, self._seats[index], Link(ours, Identity(f"run {index}", "", "", None)))

    def note_trouble(self) -> None:
        """Count what is told to whoever admits nodes again."""
        self.troubles += 1

    def connect(self) -> None:
        """Open nothing."""

    def close(self) -> None:
        """Close also what the nodes have."""
        super().close()
        for end in self.ends:
            end.close()

    def state(self) -> list[object]:
        """Return what of these sockets shows: what went out, is waited for, was noted."""
        links = [seat.link for seat in self._seats]
        sent = []
        for end, link in zip(self.ends, links, strict=True):
            end.settimeout(0.0)
            with contextlib.suppress(BlockingIOError):
                sent.append(b"" if link is None else end.recv(1 << 20))
        return [
            sent,
            [None if link is None else [command for _, command, _ in link.waiting] for link in links],
            [None if link is None else list(link.unsent) for link in links],
            [str(seat.failure) for seat in self._seats],
            [[*seat.owed.values(), *seat.others] for seat in self._seats],
            self.troubles,
            self._epoch,
            self.usable,
        ]


class Long(Calm):
    """The same by the long way only."""

    def _ask(self, ballot: Ballot, request: Broadcast, now: float) -> None:
        Seats._ask(self, ballot, request, now)
        self._flush()

    def _listen(self, ballot: Ballot, least: int, timeout: float) -> float:  # noqa: ARG002 - as the other
        self._read(timeout)
        return self.feeding.clock.now


def play(make: type[Calm], seed: int, monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Return what comes of some broadcasts to nodes that answer as the seed has it."""
    dice = random.Random(seed)
    odd = dice.choice([0.0, 0.05, 0.5])
    requests = []
    for _ in range(dice.randint(1, 8)):
        quorum = dice.randint(1, NODES)
        nodes = range(NODES) if dice.random() < 0.9 else [dice.randrange(NODES)]

        def enough(answers: Any, quorum: int = quorum) -> bool:
            return len(answers) >= quorum

        requests.append(
            Broadcast(dice.choice(COMMANDS), nodes, enough, 0.7, dice.randint(1, min(2, len(nodes))))
        )
    said = [b"" for _ in range(NODES)]
    for request in requests:
        alike = dice.choice(REPLIES[:10])
        for node in request.nodes:
            said[node] += dice.choice(REPLIES) if dice.random() < odd else alike
    bits = []
    while any(said):
        node = dice.choice([node for node in range(NODES) if said[node]])
        whole = said[node].find(b"*", 1)
        size = dice.choice(
            [whole if whole > 0 else len(said[node])] * 8 + [dice.randint(1, 60), dice.randint(1, 200)]
        )
        bits.append((node, said[node][:size]))
        said[node] = said[node][size:]
    channels = make(bits)
    for room in ("blocking", "seats"):
        monkeypatch.setattr(f"fencelock.authority.redlock.{room}.time", channels.feeding.clock)
    seen: list[object] = []
    for request in requests:
        done: Round = channels.broadcast(request)
        seen += [dict(sorted(done.answers.items())), *channels.state()]
    channels.close()
    return seen


@pytest.mark.parametrize("block", range(10))
def test_short_way_leads_where_the_long_one_does(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever nodes say, cut up anyhow: the same rounds, the same on the wire, the same links left."""
    for seed in range(block * 40, block * 40 + 40):
        assert play(Calm, seed, monkeypatch) == play(Long, seed, monkeypatch), seed


def test_most_of_what_is_alike_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where all answer alike, the long way is taken by none."""
    monkeypatch.setattr("fencelock.authority.redlock.blocking.FRESH", 10.0)
    channels = Calm([(node, REPLIES[0]) for node in range(NODES)])
    channels._epoch = 0
    channels._last_used = time.monotonic()
    monkeypatch.setattr(Channels, "_take", None)
    done = channels.broadcast(Broadcast(COMMANDS[0], range(NODES), lambda new: len(new) == NODES, 1.0))
    assert done.answers == dict.fromkeys(range(NODES), Answer(Said.GRANTED, 0, (7,)))
    channels.close()


def test_whole_answer_is_told_from_a_part_and_from_more() -> None:
    """Only exactly one answer is one."""
    for reply in REPLIES:
        if reply[:1] == b"*":
            reader = hiredis.Reader()
            reader.feed(reply)
            assert read_whole(reply) == read_answer(reader.gets())
            for cut in range(len(reply)):
                assert read_whole(reply[:cut]) is None
                assert read_whole(reply + reply[: cut + 1]) is None
        else:
            assert read_whole(reply) is None
    for more in (
        b"*",
        b"$0\r\n",
        b"$12\r\n",
        b"+",
        b"*1\r\n",
        b"*0\r\n",
        b"*-1\r\n",
        b"+that was all\r\n",
        b"\r\n",
    ):
        assert read_whole(REPLIES[0] + more) is None


def test_a_command_is_packed_as_the_client_library_does() -> None:
    """With the words that the socket adds counted in, and missing."""
    for command in COMMANDS:
        packed = pack(command)
        words = (*command.keys, *command.arguments)
        assert packed.startswith(b"*%d\r\n$7\r\nEVALSHA\r\n" % (3 + len(words) + 2))
        rest: bytes = hiredis.pack_command(words)  # type: ignore[arg-type]
        assert packed.endswith(rest[rest.index(b"\n") + 1 :])
