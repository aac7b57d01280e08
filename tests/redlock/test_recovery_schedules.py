"""Recovery and a change of nodes survive, on real nodes, the schedules that break weaker forms of them.

`proof/spec/` found these schedules; each has its name from there. Each is shown twice: the shipped scripts
and generators survive it, and a mutant without the rule in question gives a token twice, or lets two lists
vote.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any

import pytest

from fencelock.authority.redlock.membership import change as changing
from fencelock.authority.redlock.membership import recover as recovery
from fencelock.authority.redlock.membership.initialise import DEFAULT_MAX_TTL, initialise
from fencelock.authority.redlock.membership.members import Membership
from fencelock.authority.redlock.membership.reports import Census, NodeGroup, NodeReport, Reports
from fencelock.authority.redlock.protocol.messages import Command, ReplyKind
from fencelock.errors import MembershipError
from fencelock.tokens import compose, split
from proof.servers import Nodes
from tests.redlock.stage import (
    NODE_KEY,
    Actor,
    Bidder,
    RealNode,
    Stage,
    node_set_of,
    operator,
    recoverer,
    riser,
    without,
)

Scripts = Mapping[str, str]
MakeStage = Callable[..., Stage]
Tokens = tuple[tuple[int, int] | None, tuple[int, int] | None]

FORGETFUL_PROMISE = (
    "if tonumber(ARGV[2]) > tonumber(is.p or 0) then redis.call('HSET', NODE, 'p', ARGV[2]) end"
)


@pytest.fixture
def make_stage(nodes: Nodes) -> Iterator[MakeStage]:
    """A factory of stages on some blank nodes, with mutants of scripts where a test wants them."""
    made = []

    def make(scripts: Scripts | None = None, count: int = 3) -> Stage:
        made.append(Stage(nodes.urls[:count], scripts))
        return made[-1]

    yield make
    for stage in made:
        stage.close()


@pytest.fixture
def one_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the second look at the promises."""
    monkeypatch.setattr(NodeReport, "still_promises", lambda *_: True)


def halves(bidder: Bidder) -> tuple[int, int] | None:
    """Return the epoch and the counter of a contender's token."""
    return None if bidder.token is None else split(bidder.token)


def attempt(
    stage: Stage, *voters: int, fingerprint: str = "", members: Sequence[int] = (0, 1, 2, 3, 4)
) -> Bidder:
    """Let a client attempt. Only the `voters` hear it. Its list is of `members`, or is that of the stage."""
    node_set = node_set_of(fingerprint, len(members)) if fingerprint else stage.node_set
    stations = [stage.nodes[node] for node in members if node < len(stage.nodes)]
    heard = [members.index(node) for node in voters]
    bidder = Bidder(node_set, "r")
    bidder.deliver(stations, *heard)
    while bidder.outcome is None:
        bidder.resume()
        if bidder.outcome is None:
            bidder.deliver(stations, *(node for node in bidder.request.nodes if node in heard))
    return bidder


def forget(stage: Stage, node: int) -> None:
    """Flush a node, whose connections live on."""
    stage.nodes[node].client.flushall()


def free(stage: Stage, *nodes: int) -> None:
    """End the locks on nodes, as their ttl does."""
    for node in nodes:
        stage.nodes[node].expire("r")


# One node loses its memory.


def play_admit_that_comes_again(stage: Stage, *scripts: str) -> Tokens:
    """n2 forgets, is admitted, votes for A and forgets again; old messages arrive once more; B asks n2."""
    forget(stage, 2)
    actor = recoverer(stage.nodes)
    assert actor.finish() is True
    a = attempt(stage, 1, 2)
    forget(stage, 2)
    for script in scripts:
        stage.nodes[2].execute(actor.last(script, 2))
        stage.nodes[2].pass_time(DEFAULT_MAX_TTL)
    return halves(a), halves(attempt(stage, 0, 2))


def test_no_ticket(make_stage: MakeStage) -> None:
    """An ADMIT that is delivered again finds a node without its ticket."""
    assert play_admit_that_comes_again(make_stage(), "admit") == ((1, 1), None)


def test_no_ticket_control(make_stage: MakeStage) -> None:
    """Control: an ADMIT that needs no ticket admits the node again in the epoch that it has forgotten."""
    rule = "if not holds(ARGV[3]) then return {'NO_TICKET'} end\n"
    wait = "local left = ms_out(is.ticket_at, is.ticket_ttl)"
    mutant = without("admit", rule + wait, "mark()\nlocal left = 0")
    assert play_admit_that_comes_again(make_stage(mutant), "admit") == ((1, 1), (1, 1))


def test_clients_ticket(make_stage: MakeStage) -> None:
    """BEGIN and ADMIT are delivered again: the node has made up another ticket."""
    assert play_admit_that_comes_again(make_stage(), "begin", "admit") == ((1, 1), None)


def test_clients_ticket_control(make_stage: MakeStage) -> None:
    """Control: a ticket that the client makes up is there again."""
    mutant = without("begin", "string.sub(redis.sha1hex(table.concat(seed, '|')), 1, 32)", "ARGV[2]")
    assert play_admit_that_comes_again(make_stage(mutant), "begin", "admit") == ((1, 1), (1, 1))


def test_node_measures_how_long_it_stays_out(make_stage: MakeStage) -> None:
    """ADMIT is refused until the ticket is as old as the longest lease, and says how long that takes."""
    stage = make_stage()
    forget(stage, 2)
    actor = recoverer(stage.nodes)
    actor.until("begin")
    actor.step()
    begin = actor.last("begin", 2)
    ticket, ttl_ms, left_ms = stage.nodes[2].execute(begin).facts
    assert 0 <= int(ttl_ms) - int(left_ms) < 5000
    membership = stage.nodes[0].link.identity.membership
    assert membership is not None
    seat = str(begin.arguments[3])
    admit = Command("admit", "", (NODE_KEY,), (membership.fingerprint, 1, ticket, seat, membership.to_json()))
    early = stage.nodes[2].execute(admit)
    assert early.kind is ReplyKind.EARLY
    assert 0 <= int(ttl_ms) / 1000 - early.ttl < 5
    stage.nodes[2].pass_time(int(ttl_ms) / 1000)
    assert stage.nodes[2].execute(begin).facts == (ticket, ttl_ms, "0")
    assert stage.nodes[2].execute(admit).kind is ReplyKind.ADMITTED


def test_wait_begins_anew_where_the_clock_was_set_back(make_stage: MakeStage) -> None:
    """A ticket of the future would keep the node out for as long as the clock was wrong."""
    stage = make_stage()
    forget(stage, 2)
    actor = recoverer(stage.nodes)
    actor.until("begin")
    actor.step()
    begin = actor.last("begin", 2)
    ticket, ttl_ms, _ = stage.nodes[2].execute(begin).facts
    stage.nodes[2].pass_time(-7200)
    again = stage.nodes[2].execute(begin).facts
    assert (again[0], int(again[2]) <= int(ttl_ms)) == (ticket, True)
    assert int(again[2]) > int(ttl_ms) - 5000
    stage.nodes[2].pass_time(int(ttl_ms) / 1000)
    assert stage.nodes[2].execute(begin).facts[2] == "0"


def test_ticket_is_never_made_twice(make_stage: MakeStage) -> None:
    """A hundred BEGINs with the same word, each after a flush: a hundred tickets, also on different nodes."""
    stage = make_stage()
    begin = Command("begin", "", (NODE_KEY,), ("", "word", 1000, ""))
    tickets = set()
    for _ in range(50):
        for node in (0, 1):
            forget(stage, node)
            tickets.add(stage.nodes[node].execute(begin).facts[0])
    assert len(tickets) == 100
    assert stage.nodes[0].execute(begin).facts[0] == stage.nodes[0].execute(begin).facts[0]


def play_init_that_comes_again(stage: Stage) -> Tokens:
    """n0 is opened, votes for A and forgets; BEGIN and OPEN arrive once more; B asks n0."""
    old = stage.nodes[0].remember()
    begin = Command("begin", "", (NODE_KEY,), ("", "word", 1000, ""))
    forget(stage, 0)
    ticket = stage.nodes[0].execute(begin).facts[0]
    opening = Command("open", "", (NODE_KEY,), (old["cfg"], 0, ticket, 0, old["members"]))
    assert stage.nodes[0].execute(opening).kind is ReplyKind.OPENED
    a = attempt(stage, 0, 1)
    forget(stage, 0)
    stage.nodes[0].execute(begin)
    stage.nodes[0].execute(opening)
    return halves(a), halves(attempt(stage, 0, 2))


def test_clients_ticket_in_init(make_stage: MakeStage) -> None:
    """The same for OPEN: initialising alone would be enough for a token to be given twice."""
    assert play_init_that_comes_again(make_stage()) == ((0, 1), None)


@pytest.mark.parametrize(
    "mutant",
    [
        ("begin", "string.sub(redis.sha1hex(table.concat(seed, '|')), 1, 32)", "ARGV[2]"),
        ("open", "not holds(ARGV[3])", "not is.ticket"),
    ],
    ids=["client's ticket", "same id for a new node that lost its ticket"],
)
def test_clients_ticket_in_init_control(make_stage: MakeStage, mutant: tuple[str, str, str]) -> None:
    """Control: the client makes the ticket; or the list does not ask for the ticket that it was made with."""
    assert play_init_that_comes_again(make_stage(without(*mutant))) == ((0, 1), (0, 1))


def play_ticket_that_survives_a_rollback(stage: Stage, nodes: Nodes) -> Tokens:
    """n0 is admitted, votes for A, and falls back to when it had the ticket; ADMIT is sent again."""
    stage.nodes[0].come_back(nodes[0], stage.nodes[0].remember())
    actor = recoverer(stage.nodes)
    actor.until("admit")
    on_disk = stage.nodes[0].remember()
    actor.finish()
    a = attempt(stage, 0, 1)
    stage.nodes[0].come_back(nodes[0], on_disk)
    stage.nodes[0].execute(actor.last("admit", 0))
    return halves(a), halves(attempt(stage, 0, 2))


def test_ticket_not_bound(make_stage: MakeStage, nodes: Nodes) -> None:
    """A ticket is of one server process."""
    assert play_ticket_that_survives_a_rollback(make_stage(), nodes) == ((1, 1), None)


def test_ticket_not_bound_control(make_stage: MakeStage, nodes: Nodes) -> None:
    """Control: bound to nothing, it admits the node again."""
    mutant = without("admit", "if not holds(ARGV[3]) then", "mark() if ARGV[3] ~= is.ticket then")
    assert play_ticket_that_survives_a_rollback(make_stage(mutant), nodes) == ((1, 1), (1, 1))


def play_grant_in_flight_across_the_recovery(stage: Stage) -> Tokens:
    """A is granted by n2, which forgets; a recoverer reads; A is granted by n1; n2 is admitted; B asks it."""
    a = stage.bidder()
    a.deliver(stage.nodes, 2)
    forget(stage, 2)
    actor = recoverer(stage.nodes)
    actor.until("promise")
    a.deliver(stage.nodes, 1)
    a.resume()
    actor.finish()
    return halves(a), halves(attempt(stage, 0, 2))


def test_no_epoch(make_stage: MakeStage) -> None:
    """A grant in flight across a recovery is of another epoch."""
    assert play_grant_in_flight_across_the_recovery(make_stage()) == ((0, 1), (1, 1))


def test_no_epoch_control(make_stage: MakeStage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: with the counters of a majority copied into the same epoch, nothing tells the two apart."""
    shipped = recovery._choose_epoch

    def same_epoch(*arguments: Any) -> Generator[Any, Any, Any]:
        chosen = yield from shipped(*arguments)
        assert chosen is not None
        return chosen[0] - 1, chosen[1]

    monkeypatch.setattr(recovery, "_choose_epoch", same_epoch)
    assert play_grant_in_flight_across_the_recovery(make_stage()) == ((0, 1), (0, 1))


def test_majority_is_raised_before_anybody_is_admitted(make_stage: MakeStage) -> None:
    """A server that has taken over an address must not leave the former one with voters of its epoch."""
    stage = make_stage(count=5)
    forget(stage, 4)
    actor = recoverer(stage.nodes)
    actor.until("raise")
    actor.deliver(0, 1)
    actor.resume()
    actor.finish()
    assert all(sent.script != "admit" for _, sent in actor.sent[: _raises_before_admit(actor)])
    assert actor.result is True


def test_voter_is_raised_before_restarted_nodes_are_admitted(make_stage: MakeStage) -> None:
    """Too few nodes vote to ask them alone. So the voter is raised before any node is admitted."""
    stage = make_stage()
    for node in stage.nodes[:2]:
        node.client.hset(NODE_KEY, "r", "0" * 40)  # as after a restart with all data
    actor = recoverer(stage.nodes)
    actor.until("raise")
    actor.resume()  # n2 is silent
    actor.until("read")
    actor.until("raise")
    assert all(sent.script != "admit" for _, sent in actor.sent)
    actor.finish()
    assert actor.result is True


def _raises_before_admit(actor: Actor) -> int:
    """Return after how many messages three nodes had been told of an epoch."""
    told: dict[int, set[int]] = {}
    for count, (node, sent) in enumerate(actor.sent):
        if sent.script == "raise":
            told.setdefault(int(sent.arguments[1]), set()).add(node)
            if len(told[int(sent.arguments[1])]) >= 3:
                return count
    raise AssertionError("no epoch was brought to three nodes")


def play_raise_that_reached_one_node(stage: Stage) -> Tokens:
    """Five nodes: n4 forgets; RAISE reaches n0 alone, which votes for A and forgets; a second recoverer."""
    forget(stage, 4)
    first = recoverer(stage.nodes)
    first.until("raise")
    first.deliver(0)
    a = stage.bidder()
    a.deliver(stage.nodes, 0)
    forget(stage, 0)
    second = recoverer(stage.nodes)
    second.until("begin")
    second.step()
    stage.nodes[0].pass_time(DEFAULT_MAX_TTL)  # n4 has waited for as long already
    assert recoverer(stage.nodes).finish() is True
    a.deliver(stage.nodes, 1, 2)
    a.resume()
    return halves(a), halves(attempt(stage, 0, 3, 4))


def test_raise_without_promise(make_stage: MakeStage) -> None:
    """The second recoverer learns of the epoch from the nodes that have promised it."""
    assert play_raise_that_reached_one_node(make_stage(count=5)) == (None, (2, 1))


@pytest.mark.usefixtures("one_look")
def test_raise_without_promise_control(make_stage: MakeStage) -> None:
    """Control: no node remembers the promise, and the epoch is used again. It takes five nodes."""
    mutant = without("promise", FORGETFUL_PROMISE)
    assert play_raise_that_reached_one_node(make_stage(mutant, count=5)) == ((1, 1), (1, 1))


def play_promise_that_is_forgotten_before_all_have_made_it(stage: Stage) -> Tokens:
    """A client that has seen a token of epoch 1 has 2 promised: by n2, which forgets, then by n0.

    In between a recoverer of n2 has read n0 and n1: it admits n2 in epoch 1. RAISE to 2 reaches n0 alone,
    which votes for A and forgets; another recoverer.
    """
    client = riser(stage.nodes, compose(1, 1))
    client.until("promise")
    client.deliver(2)
    forget(stage, 2)
    first = recoverer(stage.nodes)
    first.until("promise")
    client.deliver(0)
    client.resume()
    assert first.finish() is True
    while client.request is not None and client.script != "raise":
        client.step()
    if client.request is not None:
        client.deliver(0)
    a = stage.bidder()
    a.deliver(stage.nodes, 0)
    forget(stage, 0)
    second = recoverer(stage.nodes)
    assert second.finish() is True
    a.deliver(stage.nodes, 1)
    a.resume()
    return halves(a), halves(attempt(stage, 0, 2))


def test_one_look_at_promises(make_stage: MakeStage) -> None:
    """The second look finds that n2 has forgotten its promise: no node votes in epoch 2 yet."""
    assert play_promise_that_is_forgotten_before_all_have_made_it(make_stage()) == (None, (2, 1))


@pytest.mark.usefixtures("one_look")
def test_one_look_at_promises_control(make_stage: MakeStage) -> None:
    """Control: promises that were not held at the same time let epoch 2 come twice."""
    played = play_promise_that_is_forgotten_before_all_have_made_it(make_stage())
    assert played == ((2, 1), (2, 1))


# More than a minority restarts.


def play_all_restarted_and_one_rolls_back(stage: Stage, nodes: Nodes) -> Tokens:
    """All restart; n0 alone is admitted, votes for A, rolls back; all are recovered once more."""
    for number, node in enumerate(stage.nodes):
        node.come_back(nodes[number], node.remember())
    first = recoverer(stage.nodes)
    first.until("admit")
    on_disk = stage.nodes[0].remember() | {"p": "0"}
    first.deliver(0)
    a = stage.bidder()
    a.deliver(stage.nodes, 0)
    stage.nodes[0].come_back(nodes[0], on_disk)
    assert recoverer(stage.nodes).finish() is True
    a.deliver(stage.nodes, 1)
    a.resume()
    return halves(a), halves(attempt(stage, 0, 2))


def test_no_p(make_stage: MakeStage, nodes: Nodes) -> None:
    """The nodes that were not admitted yet remember what they have promised."""
    assert play_all_restarted_and_one_rolls_back(make_stage(), nodes) == (None, (2, 1))


@pytest.mark.usefixtures("one_look")
def test_no_p_control(make_stage: MakeStage, nodes: Nodes) -> None:
    """Control: without `p`, all of them say 0, and epoch 1 comes again."""
    mutant = without("promise", FORGETFUL_PROMISE)
    assert play_all_restarted_and_one_rolls_back(make_stage(mutant), nodes) == ((1, 1), (1, 1))


def play_one_rolls_back_between_two_readings(
    stage: Stage, nodes: Nodes, read_all_but_n0: Callable[[Actor], None]
) -> Tokens:
    """A slow recoverer has read n1 and n2; another admits all; n0 votes for A and rolls back; it is read."""
    for number, node in enumerate(stage.nodes):
        node.come_back(nodes[number], node.remember())
    on_disk = stage.nodes[0].remember()
    slow = recoverer(stage.nodes)
    while slow.now == 0.0:  # it sleeps for the longest lease, once it has its tickets
        slow.step()
    slow.until("begin")
    slow.until("read")
    read_all_but_n0(slow)
    assert recoverer(stage.nodes).finish() is True
    a = attempt(stage, 0, 1)
    stage.nodes[0].come_back(nodes[0], on_disk)
    slow.until("admit")
    stage.nodes[0].pass_time(DEFAULT_MAX_TTL)
    slow.finish()
    free(stage, 0, 1, 2)
    return halves(a), halves(attempt(stage, 0, 2))


def test_read_and_begin_node_by_node(make_stage: MakeStage, nodes: Nodes) -> None:
    """Tickets first: n0 has another one when it is read, and the reading is void."""
    stage = make_stage()
    told = play_one_rolls_back_between_two_readings(stage, nodes, lambda slow: slow.deliver(1, 2))
    assert told == ((1, 1), (2, 1))


@pytest.mark.usefixtures("one_look")
def test_read_and_begin_node_by_node_control(
    make_stage: MakeStage, nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: a recoverer that gets each ticket just before it reads the node uses epoch 1 again."""

    def node_by_node(
        group: NodeGroup, census: Census, tickets: dict[int, str]
    ) -> Generator[Any, Any, tuple[int, Reports]]:
        found: Reports = {}
        for node in (1, 2, 0):
            begin = (census.membership.fingerprint, "word", 1000, census.waiting[node])
            answers = yield from group.ask("begin", [node], *begin)
            tickets[node] = (
                answers[node].facts[0] if answers[node].kind is ReplyKind.TICKET else tickets[node]
            )
            found |= (yield from group.read([node]))[0]
        return max(report.highest for report in found.values()) + 1, found

    def until_n0_gets_its_ticket(slow: Actor) -> None:
        while not (slow.script == "begin" and slow.wants(0)):
            slow.step()

    stage = make_stage()
    monkeypatch.setattr(recovery, "_choose_epoch", node_by_node)
    told = play_one_rolls_back_between_two_readings(stage, nodes, until_n0_gets_its_ticket)
    assert told == ((1, 1), (1, 1))


def play_two_recoverers_share_a_ticket(stage: Stage) -> Tokens:
    """One recoverer is slow, in epoch 1. The other reads all because nodes restarted, and chooses epoch 2.

    n0 promises 2 to the other, and is then admitted by the slow one, in 1. The other goes on with n1, which
    is raised to 2, votes for A and forgets.
    """
    stage.nodes[0].client.hset(NODE_KEY, "r", "0" * 40)  # as after a restart with all data
    slow = recoverer(stage.nodes)
    slow.until("admit")
    fingerprint = stage.node_set.fingerprint
    for node in (1, 2):
        stage.nodes[node].client.hset(NODE_KEY, "e", "0")  # RAISE is still under way
    ticket = slow.last("begin", 0)
    ticket_of_n0 = stage.nodes[0].execute(ticket).facts[0]
    promise = (fingerprint, 2, ticket_of_n0, "")
    assert stage.nodes[0].execute(Command("promise", "", (NODE_KEY,), promise)).kind is ReplyKind.PROMISED
    slow.deliver(0)
    stage.nodes[1].execute(Command("promise", "", (NODE_KEY,), (fingerprint, 2, "", "")))
    stage.nodes[1].execute(Command("raise", "", (NODE_KEY,), (fingerprint, 2)))
    a = stage.bidder()
    a.deliver(stage.nodes, 1)
    forget(stage, 1)
    assert recoverer(stage.nodes).finish() is True
    a.deliver(stage.nodes, 0)
    a.resume()
    return halves(a), halves(attempt(stage, 1, 2))


def test_admit_lowers_p(make_stage: MakeStage) -> None:
    """n0 keeps what it has promised when it is admitted in a lower epoch."""
    assert play_two_recoverers_share_a_ticket(make_stage()) == (None, (3, 1))


def test_admit_lowers_p_control(make_stage: MakeStage) -> None:
    """Control: n0 forgets the promise, no other node holds it, and epoch 2 comes again."""
    mutant = without("admit", "math.max(tonumber(is.p or 0), tonumber(epoch))", "tonumber(epoch)")
    assert play_two_recoverers_share_a_ticket(make_stage(mutant)) == ((2, 1), (2, 1))


# Two operators open the same list in different epochs.


class Opening:
    """A list of three blank nodes that operators open, each in an epoch of his own."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.tickets = []
        for node in range(3):
            forget(stage, node)
            begin = Command("begin", "", (NODE_KEY,), ("", f"word{node}", 1000, ""))
            self.tickets.append(stage.nodes[node].execute(begin).facts[0])
        names = (station.node.name for station in stage.nodes)
        self.list = Membership(tuple(sorted(zip(self.tickets, names, strict=True))), 1.0)
        stage.node_set = node_set_of(self.list.fingerprint, 3)

    def promise(self, node: int, epoch: int) -> ReplyKind:
        arguments = (self.list.fingerprint, epoch, self.tickets[node], "change")
        return self.stage.nodes[node].execute(Command("promise", "", (NODE_KEY,), arguments)).kind

    def open(self, node: int, epoch: int) -> ReplyKind:
        arguments = (self.list.fingerprint, epoch, self.tickets[node], 0, self.list.to_json())
        return self.stage.nodes[node].execute(Command("open", "", (NODE_KEY,), arguments)).kind


def evict_hash_of_n1(stage: Stage) -> None:
    """Lose the node's hash alone, as a server does that is short of memory."""
    stage.nodes[1].client.delete(NODE_KEY)


def play_two_operators_open_the_same_list(
    stage: Stage, interlude: Callable[[Stage], None] | None = None
) -> Tokens:
    """The first opens n0 in 2 and dies; the second opens the others in 1; n0 votes for A and forgets."""
    opening = Opening(stage)
    for node in (0, 1):
        opening.promise(node, 2)
    opening.open(0, 2)
    for node in (1, 2):
        opening.promise(node, 1)
    if interlude is not None:
        interlude(stage)
    opening.open(1, 1)
    opening.open(2, 1)
    a = stage.bidder()
    a.deliver(stage.nodes, 0)
    forget(stage, 0)
    recoverer(stage.nodes).finish()
    a.deliver(stage.nodes, 1)
    a.resume()
    return halves(a), halves(attempt(stage, 0, 2))


def test_open_without_promise(make_stage: MakeStage) -> None:
    """The second operator's nodes remember what the first had promised."""
    assert play_two_operators_open_the_same_list(make_stage()) == (None, (3, 1))


@pytest.mark.usefixtures("one_look")
def test_open_without_promise_control(make_stage: MakeStage) -> None:
    """Control: epoch 2 is used again."""
    mutant = without("promise", FORGETFUL_PROMISE)
    assert play_two_operators_open_the_same_list(make_stage(mutant)) == ((2, 1), (2, 1))


def test_init_after_a_loss_promises_before_it_opens(make_nodes: Callable[..., Nodes]) -> None:
    """The generator keeps to it: three nodes have promised the epoch before the first is opened."""
    servers = make_nodes(3)
    names = tuple(server.url for server in servers)
    stations = [RealNode(server.url) for server in servers]
    actor = Actor(
        stations,
        initialise(
            NodeGroup(names, NODE_KEY, 1.0, lambda: "word", lambda: 0.0), base=0, max_ttl=1.0, epoch=7
        ),
    )
    actor.until("open")
    assert [station.remember()["p"] for station in stations] == ["7"] * 3
    actor.finish()
    assert {station.remember()["e"] for station in stations} == {"7"}
    for station in stations:
        station.close()


def ticket_in_a_key_of_its_own() -> dict[str, str]:
    """Return mutants of the scripts that keep the ticket beside the hash."""
    apart = (
        "local apart = redis.call('HMGET', NODE .. ':t', 'ticket', 'ticket_of', 'ticket_at', 'ticket_ttl')\n"
    )
    apart += "is.ticket, is.ticket_of = apart[1] or nil, apart[2] or nil\n"
    apart += "is.ticket_at, is.ticket_ttl = apart[3] or nil, apart[4] or nil\n"
    mutants = {}
    for script in ("begin", "promise", "admit", "open"):
        place = "local function is_admitted()"
        text = without(script, place, apart + place)[script]
        mutants[script] = text.replace(
            "redis.call('HSET', NODE, 'ticket'", "redis.call('HSET', NODE .. ':t', 'ticket'"
        )
    return mutants


def test_ticket_outside_the_hash(make_stage: MakeStage) -> None:
    """The hash alone is evicted. The ticket goes with it, and no operator opens n1."""
    stage = make_stage()
    assert play_two_operators_open_the_same_list(stage, evict_hash_of_n1) == (None, None)


def test_ticket_outside_the_hash_control(make_stage: MakeStage) -> None:
    """Control: the ticket in a key of its own opens n1 without what it had promised."""
    stage = make_stage(ticket_in_a_key_of_its_own())
    assert play_two_operators_open_the_same_list(stage, evict_hash_of_n1) == ((2, 1), (2, 1))


# A change of nodes.


@pytest.fixture
def make_wider_stage(make_stage: MakeStage, nodes: Nodes) -> Iterator[MakeStage]:
    """A factory of stages with three nodes in a list, and two blank ones beside."""
    more: list[RealNode] = []

    def make(scripts: Scripts | None = None) -> Stage:
        stage = make_stage(scripts)
        more.extend(RealNode(url, scripts) for url in nodes.urls[3:])
        stage.nodes.extend(more)
        return stage

    yield make
    for node in more:
        node.close()


def fingerprint_on(stage: Stage, node: int) -> str:
    """Return the fingerprint of the list that a node belongs to."""
    return stage.nodes[node].remember()["cfg"]


def play_one_forgets_between_two_closings(stage: Stage) -> Tokens:
    """n0 is closed, forgets, and is recovered by n1 and n2, which are open; then n1 is closed.

    Returns a token of the new list, and one that the old list gives out afterwards.
    """
    actor = operator(stage.nodes, (0, 1, 3))
    actor.until("close")
    actor.deliver(0)
    forget(stage, 0)
    assert recoverer(stage.nodes[:3]).finish() is True
    actor.deliver(1)
    actor.resume()
    actor.until("open")
    for node in (3, 1):
        arguments = (*actor.command.arguments[:2], _id_of(stage, node, actor), 0)
        text = actor.command.arguments[4]
        stage.nodes[node].execute(Command("open", "", (NODE_KEY,), (*arguments, text)))
    b = attempt(stage, 1, 3, fingerprint=str(actor.command.arguments[0]), members=(0, 1, 3))
    return halves(b), halves(attempt(stage, 0, 2))


def _id_of(stage: Stage, node: int, actor: Actor) -> str:
    seats = Membership.from_json(str(actor.command.arguments[4])).seats
    return next(node_id for node_id, address in seats if address == stage.nodes[node].node.name)


def test_one_closing_pass(make_wider_stage: MakeStage) -> None:
    """The second look finds n0 open: all is closed again, and the old list gives out nothing any more."""
    new, old = play_one_forgets_between_two_closings(make_wider_stage())
    assert (new, old) == ((2, 1), None)


def test_one_closing_pass_control(make_wider_stage: MakeStage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: without the second look, the old list gives out a token below one that was complete before."""

    def no_second_look(group: NodeGroup, shut: set[int], *_: Any) -> Generator[Any, Any, Reports]:
        return (yield from group.read(shut))[0]

    monkeypatch.setattr(changing, "_closed_still", no_second_look)
    new, old = play_one_forgets_between_two_closings(make_wider_stage())
    assert (new, old) == ((2, 1), (1, 1))


def play_two_operators_want_different_lists(stage: Stage) -> list[list[ReplyKind]]:
    """Both get their tickets; the first closes; the second closes what it can reach."""
    actors = [operator(stage.nodes, wanted) for wanted in ((0, 1, 3), (0, 1, 4))]
    for actor in actors:
        actor.until("close")
    told = []
    for actor in actors:
        command = actor.command
        told.append([stage.nodes[node].execute(command).kind for node in (0, 1)])
    return told


def test_no_next(make_wider_stage: MakeStage) -> None:
    """Which list comes next is set once."""
    told = play_two_operators_want_different_lists(make_wider_stage())
    assert told == [[ReplyKind.SHUT, ReplyKind.SHUT], [ReplyKind.CLOSED, ReplyKind.CLOSED]]


def test_no_next_control(make_wider_stage: MakeStage) -> None:
    """Control: otherwise both believe that a majority is theirs."""
    mutant = without("close", "is.next and is.next ~= ARGV[2]", "nil")
    told = play_two_operators_want_different_lists(make_wider_stage(mutant))
    assert told == [[ReplyKind.SHUT, ReplyKind.SHUT], [ReplyKind.SHUT, ReplyKind.SHUT]]


def test_second_operator_is_told_what_the_first_wants(make_wider_stage: MakeStage) -> None:
    """He stops before anything is closed for him, and names the list that is to be finished first."""
    stage = make_wider_stage()
    first, second = (operator(stage.nodes, wanted) for wanted in ((0, 1, 3), (0, 1, 4)))
    second.until("close")
    first.until("promise")
    with pytest.raises(MembershipError, match=stage.nodes[3].node.name):
        second.finish()
    assert first.finish().done is True


def play_recovery_of_a_list_that_is_closed(stage: Stage) -> Tokens:
    """n0 and n1 are closed, n3 is open in the new list. n0 forgets, and a client recovers the old list."""
    actor = operator(stage.nodes, (0, 1, 3))
    actor.until("close")
    actor.deliver(0, 1)
    actor.resume()
    actor.until("open")
    command = actor.command
    actor.deliver(3)
    forget(stage, 0)
    recoverer(stage.nodes[:3]).finish()
    stage.nodes[1].execute(
        Command(
            "open", "", (NODE_KEY,), (*command.arguments[:2], _id_of(stage, 1, actor), *command.arguments[3:])
        )
    )
    b = attempt(stage, 1, 3, fingerprint=str(command.arguments[0]), members=(0, 1, 3))
    return halves(b), halves(attempt(stage, 0, 2))


def test_recovery_reads_closed_nodes(make_wider_stage: MakeStage) -> None:
    """Of the old list only n2 is open, which is no majority. So no node is admitted to it."""
    assert play_recovery_of_a_list_that_is_closed(make_wider_stage()) == ((1, 1), None)


def test_recovery_reads_closed_nodes_control(
    make_wider_stage: MakeStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: asking closed nodes too, it brings the old list back beside the new one."""
    mutants = {
        **without("promise", "(is.cfg == ARGV[1] and not is.next)", "is.cfg == ARGV[1]"),
        **without("raise", "refusal(is.e, is.r, is.cfg, is.next)", "refusal(is.e, is.r, is.cfg)"),
    }
    stage = make_wider_stage(mutants)
    monkeypatch.setattr(NodeReport, "closed", property(lambda _: False))
    new, old = play_recovery_of_a_list_that_is_closed(stage)
    assert new is not None
    assert old is not None


def play_return_to_an_earlier_list(stage: Stage) -> Tokens:
    """From {n0, n1} to {n0, n1, n2} and back; then messages of the first change arrive once more.

    Returns a token of the larger list, and one that it gives out when it should be gone.
    """
    pair, three = stage.nodes[:2], stage.nodes
    there = operator(three, (0, 1, 2))
    assert there.finish().done is True
    larger = fingerprint_on(stage, 0)
    a = attempt(stage, 0, 1, fingerprint=larger, members=(0, 1, 2))
    back = operator(three, (0, 1))
    assert back.finish().done is True
    free(stage, 0, 1, 2)
    for node in range(len(pair)):
        for script in ("close", "open"):
            stage.nodes[node].execute(there.last(script, node))
    return halves(a), halves(attempt(stage, 0, 1, fingerprint=larger, members=(0, 1, 2)))


@pytest.fixture
def make_pair(nodes: Nodes) -> Iterator[MakeStage]:
    """A factory of stages with two nodes in a list, and a blank one beside."""
    made = []

    def make() -> Stage:
        made.append(Stage(nodes.urls[:2]))
        made[-1].nodes.append(RealNode(nodes.urls[2]))
        return made[-1]

    yield make
    for stage in made:
        stage.close()


def test_return_to_an_earlier_list(make_pair: MakeStage) -> None:
    """The nodes are the same as at first, the list is not: late messages mean nothing to it."""
    assert play_return_to_an_earlier_list(make_pair()) == ((1, 1), None)


def test_return_to_an_earlier_list_control(make_pair: MakeStage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: a fingerprint of ids alone lets a late CLOSE and OPEN bring back a list that has voted."""

    def of_ids_alone(self: Membership) -> str:
        return hashlib.sha256(json.dumps(self.ids).encode()).hexdigest()[:32]

    monkeypatch.setattr(Membership, "fingerprint", property(of_ids_alone))
    assert play_return_to_an_earlier_list(make_pair()) == ((1, 1), (1, 1))
