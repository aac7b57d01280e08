"""The short way that blocking code takes where nothing is the matter leads to where the long one does."""

from __future__ import annotations

import contextlib
import random
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import hiredis
import pytest

from fencelock.authority.redlock.blocking import Channels
from fencelock.authority.redlock.node import Identity, Link, Node, pack, read_answer, read_whole
from fencelock.authority.redlock.protocol import Answer, Answers, Broadcast, Command, Round, Said
from fencelock.authority.redlock.seats import Ballot, Seats

NODES = 3
REPLIES = [
    *[b"*3\r\n$7\r\nGRANTED\r\n:0\r\n:%d\r\n" % counter for counter in (7, 7, 7, 8)],
    b"*3\r\n$7\r\nGRANTED\r\n:1\r\n:7\r\n",
    b"*4\r\n$7\r\nGRANTED\r\n:0\r\n:7\r\n:9\r\n",
    *[b"*1\r\n$8\r\nRELEASED\r\n"] * 4,
    b"*2\r\n$4\r\nHELD\r\n:1500\r\n",
    b"*1\r\n$4\r\nLOST\r\n",
    b"*2\r\n$9\r\nRESTARTED\r\n:-1\r\n",
    b"*3\r\n$8\r\nEXTENDED\r\n:0\r\n:1\r\n",
    b"*2\r\n$8\r\nSTANDING\r\n$500\r\n" + b"x" * 500 + b"\r\n",
    b"-ERR it does not want to\r\n",
    b"-NOSCRIPT No matching script.\r\n",
    b"-MOVED 1 127.0.0.1:1\r\n",
    b"+what\r\n",
    b"$-1\r\n",
]
GRANTED = Answer(Said.GRANTED, 0, (7,))
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

    def connect(self, request: Broadcast) -> None:
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

    def _listen(self, ballot: Ballot, timeout: float) -> float:  # noqa: ARG002 - as the other
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

        least = dice.randint(1, min(2, len(nodes)))
        hoped = dice.choice([None, Said.GRANTED, Said.RELEASED])
        requests.append(Broadcast(dice.choice(COMMANDS), nodes, enough, 0.7, least, hoped))
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
        seen += [dict(sorted(done.answers.items())), done.alike, *channels.state()]
    channels.close()
    return seen


@pytest.mark.parametrize("block", range(10))
def test_short_way_leads_where_the_long_one_does(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever nodes say, cut up anyhow: the same rounds, the same on the wire, the same links left."""
    for seed in range(block * 40, block * 40 + 40):
        assert play(Calm, seed, monkeypatch) == play(Long, seed, monkeypatch), seed


MakeCalm = Callable[[list[tuple[int, bytes]]], Calm]


@pytest.fixture
def make_calm(monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeCalm]:
    """Return what makes sockets that have just been used, in epoch 0."""
    monkeypatch.setattr("fencelock.authority.redlock.blocking.FRESH", 10.0)
    with contextlib.ExitStack() as stack:

        def make(bits: list[tuple[int, bytes]]) -> Calm:
            channels = stack.enter_context(contextlib.closing(Calm(bits)))
            channels._epoch = 0
            channels._last_used = time.monotonic()
            return channels

        yield make


def ask(channels: Calm, command: Command, nodes: Sequence[int], count: int) -> Answers:
    """Send a command, and return the answers when there are so many."""
    return channels.broadcast(Broadcast(command, nodes, lambda new: len(new) == count, 1.0)).answers


def test_most_of_what_is_alike_is_read_once(make_calm: MakeCalm, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where all answer alike, the long way is taken by none, nor by those who come late."""
    channels = make_calm([(node, reply) for reply in (REPLIES[0], REPLIES[6]) for node in range(NODES)])
    monkeypatch.setattr(Channels, "_take", None)
    assert ask(channels, COMMANDS[0], range(NODES), 2) == {0: GRANTED, 1: GRANTED, 2: Answer(Said.SILENT)}
    released = ask(channels, COMMANDS[2], range(NODES), NODES)
    assert released == dict.fromkeys(range(NODES), Answer(Said.RELEASED))


@pytest.mark.parametrize(("command", "reply"), [(COMMANDS[1], REPLIES[0]), (COMMANDS[3], REPLIES[13])])
def test_what_is_granted_late_and_known_is_released_at_once(
    make_calm: MakeCalm, command: Command, reply: bytes
) -> None:
    """A late answer in bytes that are known is no reason to forget that it makes a lock."""
    channels = make_calm([*((node, reply) for node in range(NODES)), (2, REPLIES[6])])
    ask(channels, command, range(NODES), 2)
    late = channels.ends[2]
    late.recv(1 << 16)
    ask(channels, COMMANDS[0], [2], 1)
    assert b"given up" in late.recv(1 << 16).partition(b"\r\nwanted")[2]


def test_what_is_owed_goes_out_while_answers_come_in(make_calm: MakeCalm) -> None:
    """Also where all that nodes say is known: after a long absence there is more than goes out at once."""
    channels = make_calm([(node, REPLIES[0]) for node in range(NODES)])
    channels._seats[1].owe([COMMANDS[2]])
    ask(channels, COMMANDS[0], range(NODES), NODES)
    assert b"given up" in channels.ends[1].recv(1 << 16)
    assert not channels._seats[1].owed


def test_what_a_full_socket_left_goes_out_as_late_answers_come_in(make_calm: MakeCalm) -> None:
    """A node that answers has read: the rest of what it was sent is written, though nobody waits for it."""
    channels = make_calm([(0, REPLIES[6]), (1, REPLIES[6]), (0, REPLIES[6])])
    ask(channels, COMMANDS[2], range(2), 1)
    link = channels._seats[1].link
    assert link is not None
    link.unsent.append(b"the rest")
    ask(channels, COMMANDS[2], [0], 1)
    assert channels.ends[1].recv(1 << 16).endswith(b"the rest")


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
