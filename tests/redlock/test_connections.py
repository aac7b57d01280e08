"""Which nodes are asked, how late answers are handled, which RELEASEs are owed: step by step, no sockets."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from fencelock.authority.redlock.membership.members import Identity, Membership
from fencelock.authority.redlock.protocol.messages import (
    INTRODUCE,
    SUBSCRIBE,
    Broadcast,
    Command,
    Reply,
    ReplyKind,
)
from fencelock.authority.redlock.protocol.queue import WaitQueue
from fencelock.authority.redlock.wire import nodes as wire_nodes
from fencelock.authority.redlock.wire.connection import PendingBroadcast
from fencelock.authority.redlock.wire.nodes import INTRODUCED_FOR, LONGEST_BACKOFF, NodeConnections
from tests.redlock.stage import NODE_KEY

GRANTED = b"*3\r\n$7\r\nGRANTED\r\n:0\r\n:1\r\n"
RELEASED = b"*1\r\n$8\r\nRELEASED\r\n"
SUBSCRIBED = b">3\r\n$9\r\nsubscribe\r\n$1\r\nc\r\n:1\r\n"


def busy(word: str = "BUSY") -> bytes:
    return f"-{word} of the node\r\n".encode()


class Wires:
    """The connections of a client to three nodes, which say what a test has them say."""

    def __init__(
        self, names: Sequence[str] = ("n0", "n1", "n2"), introduction: Command | None = None
    ) -> None:
        self.now = 100.0
        self.connecting: list[int] = []
        self.closed: list[int] = []
        self.trouble = 0
        self.identities: list[tuple[int, Identity]] = []
        self.queue = WaitQueue("c", len(names), lambda: 0.5)
        self.nodes = NodeConnections(
            names,
            self,
            self.queue,
            "c",
            on_identity=lambda *said: self.identities.append(said),
            on_trouble=self._on_trouble,
            connect_timeout=2.0,
            patience=1.0,
            jitter=random.random,
            introduction=introduction,
        )

    def _on_trouble(self) -> None:
        self.trouble += 1

    def hears(self) -> bool:
        return self.queue.hears

    def connect(self, node: int) -> None:
        self.connecting.append(node)

    def is_connecting(self, node: int) -> bool:
        return node in self.connecting

    def disconnect(self, node: int) -> None:
        self.closed.append(node)

    def opened(self, *nodes: int, run: str = "run", replid: str = "") -> bool:
        """Let connections come up; return whether the last one is used."""
        for node in nodes:
            self.connecting = [other for other in self.connecting if other != node]
            identity = Identity(f"{run}{node}", replid, "", None)
            used = self.nodes.connected(node, identity, self.now, pushes=True)
        return used is not None

    def ask(self, script: str, nonce: str = "n", *nodes: int) -> PendingBroadcast:
        arguments = ("f", nonce, 1000, 0, 1, 0) if script == "acquire" else ("f", nonce, 0, 1, 1)
        command = Command(script, nonce, (NODE_KEY, f"{NODE_KEY}:l:r"), arguments)
        request = Broadcast(command, nodes or (0,), lambda _: False, 1.0)
        pending = PendingBroadcast(request)
        self.nodes.ask(pending, request, self.now)
        return pending

    def told(self, node: int = 0) -> list[tuple[str, str]]:
        connection = self.nodes.connection(node)
        assert connection is not None
        return [(each.command.script, each.command.nonce) for each in connection.unanswered]

    def says(self, *answers: bytes, node: int = 0) -> list[str]:
        return list(self.nodes.receive(node, lambda: b"".join(answers), self.now))


@pytest.fixture
def wires() -> Wires:
    """One of three nodes is connected, and has granted something in epoch 0."""
    made = Wires()
    made.opened(0)
    made.ask("acquire")
    made.says(GRANTED)
    return made


def test_node_that_stays_away_for_hours_is_tried_as_often_as_ever() -> None:
    """The pause doubles up to its longest, and no number of failures is too large to be doubled."""
    wires = Wires(["n0"])
    pauses = []
    for _ in range(3000):
        wires.nodes.failed(0, Reply(ReplyKind.UNREACHABLE), 100.0)
        pauses.append(wires.nodes.open_absent(100.0) - 100.0)
    assert not wires.connecting
    assert pauses[0] <= 0.1
    assert 0.49 * LONGEST_BACKOFF <= min(pauses[10:]) <= max(pauses) <= LONGEST_BACKOFF
    wires.nodes.open_absent(100.0 + LONGEST_BACKOFF)
    assert wires.connecting == [0]
    wires.opened(0)
    wires.nodes.broken(0, "gone")
    wires.nodes.failed(0, Reply(ReplyKind.UNREACHABLE), 100.0)
    assert wires.nodes.open_absent(100.0) <= 100.1


def test_connections_are_waited_for_while_one_is_being_opened_and_there_is_no_majority() -> None:
    wires = Wires()
    request = Broadcast(Command("acquire", "n", (), ()), (0, 1, 2), lambda _: False, 1.0, links_until=101.0)

    def until(began: float = 100.0, **other: Any) -> float:
        return wires.nodes.worth_waiting_until(began, request._replace(**other), wires.now)

    assert until() == wires.now  # no connection is being opened
    assert wires.nodes.open_absent(wires.now) == float("inf")
    assert wires.connecting == [0, 1, 2]
    assert until() == 101.0
    assert until(links_until=110.0) == 102.0
    assert until(patience=0.0) == wires.now
    wires.opened(0, 1)
    assert until() == wires.now + wire_nodes._OTHERS_GRACE
    wires.now += 1.0
    assert until(links_until=110.0) == 100.0 + wire_nodes._OTHERS_GRACE
    wires.ask("acquire")
    assert until(links_until=110.0) == 100.0
    wires.opened(2)
    assert until() == wires.now


@pytest.mark.parametrize("too_many", [False, True])
def test_node_that_owes_an_answer_is_asked_again_when_it_has_come(
    wires: Wires, monkeypatch: pytest.MonkeyPatch, *, too_many: bool
) -> None:
    """No caller waits for it: that it is silent is said at once."""
    wires.ask("acquire", "n0")
    if too_many:
        monkeypatch.setattr(wire_nodes, "_MOST_UNANSWERED", 1)
    else:
        wires.now += 1.0
        assert not wires.ask("acquire", "n1").answers
        wires.now += 0.1
    assert wires.ask("acquire", "n2").answers[0].kind is ReplyKind.SILENT
    assert ("acquire", "n2") not in wires.told()
    wires.says(*[GRANTED] * len(wires.told()))
    assert not wires.ask("acquire", "n3").answers
    assert wires.told() == [("acquire", "n3")]


def test_release_is_owed_to_a_silent_node_unless_it_is_still_to_grant(wires: Wires) -> None:
    """The owed RELEASE is sent when the node answers something."""
    wires.ask("acquire", "mine")
    wires.now += 2.0
    wires.ask("release", "mine")
    assert wires.told() == [("acquire", "mine"), ("release", "mine")]
    assert wires.ask("release", "older").answers[0].kind is ReplyKind.SILENT
    assert len(wires.told()) == 2
    assert wires.nodes.has_pending_releases
    wires.says(GRANTED)
    assert wires.told() == [("release", "mine"), ("release", "older")]
    assert not wires.nodes.has_pending_releases


def test_releases_are_owed_where_there_is_no_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """But not more than so many; an acquisition is not sent to a connection that comes later."""
    monkeypatch.setattr(wire_nodes, "MOST_PENDING", 3)
    wires = Wires()
    for number in range(5):
        assert wires.ask("release", f"n{number}").answers[0].kind is ReplyKind.UNREACHABLE
    wires.ask("acquire", "n5")
    wires.opened(0)
    assert wires.told() == [("release", f"n{number}") for number in (2, 3, 4)]


def test_connection_that_breaks_loses_no_release_and_repeats_no_acquisition(wires: Wires) -> None:
    acquiring, releasing = wires.ask("acquire", "n0"), wires.ask("release", "n1")
    wires.nodes.broken(0, "gone")
    assert wires.closed == [0]
    for pending in (acquiring, releasing, wires.ask("acquire", "n2")):
        assert pending.answers[0] == Reply(ReplyKind.UNREACHABLE, detail="gone")
    assert wires.nodes.absent == 3
    wires.opened(0)
    assert wires.told() == [("release", "n1")]


def test_release_that_a_busy_node_refuses_is_sent_again_when_it_answers_something_else(wires: Wires) -> None:
    """Not at once: it would get it for ever."""
    wires.ask("release", "n0")
    wires.says(busy())
    assert wires.told() == []
    assert wires.nodes.has_pending_releases
    wires.ask("acquire", "n1")
    wires.says(GRANTED.replace(b":0", b":7"))  # of another epoch: unusual, too
    wires.ask("acquire", "n2")
    wires.says(GRANTED.replace(b":0", b":7"))
    assert wires.told() == [("release", "n0")]


@pytest.mark.parametrize("same_server", [True, False])
def test_connection_that_owes_an_answer_for_too_long_is_replaced(wires: Wires, *, same_server: bool) -> None:
    """Its machine may be gone, and the network never said so. Before that, a second one is not used."""
    assert not wires.opened(0)
    wires.ask("acquire", "n0")
    wires.now += wire_nodes._LOST_AFTER
    wires.ask("acquire", "n1")
    assert not wires.connecting
    wires.now += 0.1
    wires.ask("acquire", "n2")
    assert wires.connecting == [0]
    assert wires.opened(0, run="run" if same_server else "another")
    assert wires.closed == [0]
    assert wires.told() == []


def test_second_name_of_a_server_gets_no_vote(wires: Wires) -> None:
    wires.nodes.connected(1, Identity("run0", "", "", None), wires.now, pushes=True)
    assert wires.nodes.connection(1) is None
    answer = wires.ask("acquire", "n", 1).answers[1]
    assert (answer.kind, answer.detail) == (ReplyKind.CONFIG, "the same server as n0")
    wires.nodes.open_absent(wires.now + LONGEST_BACKOFF - 0.01)
    assert wires.connecting == [2]
    wires.nodes.open_absent(wires.now + LONGEST_BACKOFF)
    assert 1 in wires.connecting


def test_what_does_not_speak_like_a_node_is_given_up(wires: Wires) -> None:
    pending = wires.ask("acquire")
    wires.says(b"*1\r\n$3\r\nWEB\r\n")
    assert pending.answers[0].kind is ReplyKind.ERROR
    assert wires.closed == [0]


def test_connection_on_which_a_change_was_interrupted_is_given_up(wires: Wires) -> None:
    """Its answers could be mixed up."""
    wires.opened(1)
    pending = wires.ask("acquire", "n", 0, 1)

    def interrupt() -> bytes:
        raise InterruptedError

    def strike() -> bytes:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        wires.nodes.receive(0, strike, wires.now)
    assert wires.nodes.connection(0) is None
    assert wires.nodes.connection(1) is not None
    assert pending.answers[0].detail == "using it was interrupted"
    wires.nodes.receive(1, interrupt, wires.now)  # an error of the socket
    assert wires.nodes.connection(1) is None


def test_calls_of_the_nodes_that_it_listens_to_are_heard(wires: Wires) -> None:
    assert wires.nodes.listen(wires.now)
    assert not wires.nodes.listen(wires.now)
    assert not wires.hears()
    wires.opened(1)
    assert wires.hears()
    assert [each for node in (0, 1) for each in wires.told(node)] == [(SUBSCRIBE, "")] * 2
    place = wires.queue.expect("")
    assert wires.says(SUBSCRIBED, b">3\r\n$7\r\nmessage\r\n$1\r\nc\r\n$1\r\n1\r\n") == [place]
    assert wires.says(b">3\r\n$7\r\nmessage\r\n$1\r\nc\r\n$1\r\n2\r\n") == []
    wires.says(busy("NOPERM"), node=1)
    assert not wires.hears()
    wires.opened(2)
    assert wires.hears()
    wires.nodes.broken(2, "gone")
    assert not wires.hears()


def test_nodes_learn_who_the_client_is_before_it_holds_something() -> None:
    """Again when that may be forgotten soon, and on each new connection; a release needs no introduction."""
    wires = Wires(introduction=Command(INTRODUCE, "", (), ("key", "who", "px", 1)))
    wires.opened(0)

    def introduced(script: str) -> bool:
        wires.ask(script)
        scripts = [script for script, _ in wires.told()]
        wires.says(*(b"+OK\r\n" if each == INTRODUCE else GRANTED for each in scripts))
        return scripts[0] == INTRODUCE

    assert introduced("acquire")
    assert not introduced("acquire")
    wires.now += INTRODUCED_FOR / 3 - 1.0
    assert not introduced("acquire")
    wires.now += 2.0
    assert introduced("acquire")
    wires.nodes.broken(0, "gone")
    wires.opened(0)
    wires.ask("release")
    assert wires.told() == [("release", "n")]


def test_news_of_nodes_are_passed_on(wires: Wires) -> None:
    """Another epoch, and lost memory; a server that may have been replaced is connected to again."""
    wires.opened(1, replid="replica")
    for epoch in (b":0", b":0", b":1"):
        wires.ask("acquire")
        wires.says(GRANTED.replace(b":0", epoch))
    assert wires.trouble == 1
    for node in (0, 1, 1):
        wires.ask("acquire", "n", node)
        wires.says(b"*1\r\n$7\r\nAMNESIA\r\n", node=node)
    assert wires.trouble == 4
    assert wires.connecting == [1]
    listed = Membership((("id", "n0"), ("other", "n1")), 60.0)
    before = len(wires.identities)
    for members in (listed.to_json(), "", "nonsense"):
        pending = wires.ask("read")
        words = (b"STANDING", b"id", members.encode())
        wires.says(b"*3\r\n" + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in words))
    assert pending.answers[0].kind is ReplyKind.CONFIG
    ((node, identity),) = wires.identities[before:]
    assert (node, identity.node_id, identity.membership) == (0, "id", listed)


def test_server_that_leads_elsewhere_is_given_up(wires: Wires) -> None:
    pending = wires.ask("acquire")
    wires.says(b"-MOVED 1 other:6379\r\n")
    assert pending.answers[0].kind is not ReplyKind.GRANTED
    assert wires.closed == [0]
