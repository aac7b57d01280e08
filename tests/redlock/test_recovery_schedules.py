"""Recovery and a change of nodes survive, on real nodes, the schedules that break weaker forms of them.

`proof/spec/` found these schedules; each has its name from there. Each is played twice: the shipped scripts
and generators survive it, and a mutant without the rule in question gives a token twice, or lets two lists
vote.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Generator, Sequence
from functools import partial
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
from proof.simulation import weaker
from tests.redlock.stage import (
    NODE_KEY,
    Actor,
    Bidder,
    Schedule,
    Stage,
    node_set_of,
    operator,
    recoverer,
    riser,
    without,
)

MakeStage = Callable[..., Stage]
Tokens = tuple[tuple[int, int] | None, tuple[int, int] | None]


def halves(bidder: Bidder) -> tuple[int, int] | None:
    return None if bidder.token is None else split(bidder.token)


def attempt(
    stage: Stage, *voters: int, fingerprint: str = "", members: Sequence[int] = (0, 1, 2, 3, 4)
) -> tuple[int, int] | None:
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
    return halves(bidder)


def tell(stage: Stage, node: int, script: str, *arguments: str | int) -> Any:
    return stage.nodes[node].execute(Command(script, "", (NODE_KEY,), arguments))


def restarted(stage: Stage, *nodes: int) -> None:
    for node in nodes:
        stage.nodes[node].client.hset(NODE_KEY, "r", "0" * 40)


# One node loses its memory.


def play_admit_that_comes_again(stage: Stage, *scripts: str) -> Tokens:
    """n2 forgets, is admitted, votes for A and forgets again; old messages arrive once more; B asks n2."""
    stage.forget(2)
    actor = recoverer(stage.nodes[:3])
    assert actor.finish() is True
    a = attempt(stage, 1, 2)
    stage.forget(2)
    for script in scripts:
        stage.nodes[2].execute(actor.last(script, 2))
        stage.nodes[2].pass_time(DEFAULT_MAX_TTL)
    return a, attempt(stage, 0, 2)


def play_init_that_comes_again(stage: Stage) -> Tokens:
    """n0 is opened, votes for A and forgets; BEGIN and OPEN arrive once more; B asks n0."""
    old = stage.nodes[0].remember()
    begin = partial(tell, stage, 0, "begin", "", "word", 1000, "")
    stage.forget(0)
    opening = partial(tell, stage, 0, "open", old["cfg"], 0, begin().facts[0], 0, old["members"])
    assert opening().kind is ReplyKind.OPENED
    a = attempt(stage, 0, 1)
    stage.forget(0)
    begin()
    opening()
    return a, attempt(stage, 0, 2)


def play_ticket_that_survives_a_rollback(stage: Stage) -> Tokens:
    """n0 is admitted, votes for A, and falls back to when it had the ticket; ADMIT is sent again."""
    stage.come_back(0, stage.nodes[0].remember())
    actor = recoverer(stage.nodes)
    actor.until("admit")
    on_disk = stage.nodes[0].remember()
    actor.finish()
    a = attempt(stage, 0, 1)
    stage.come_back(0, on_disk)
    stage.nodes[0].execute(actor.last("admit", 0))
    return a, attempt(stage, 0, 2)


def play_grant_in_flight_across_the_recovery(stage: Stage) -> Tokens:
    """A is granted by n2, which forgets; a recoverer reads; A is granted by n1; n2 is admitted; B asks it."""
    a = stage.bidder()
    a.deliver(stage.nodes, 2)
    stage.forget(2)
    actor = recoverer(stage.nodes)
    actor.until("promise")
    a.deliver(stage.nodes, 1)
    a.resume()
    actor.finish()
    return halves(a), attempt(stage, 0, 2)


def play_raise_that_reached_one_node(stage: Stage) -> Tokens:
    """Five nodes: n4 forgets; RAISE reaches n0 alone, which votes for A and forgets; a second recoverer.

    That one learns of the epoch from the nodes that have promised it.
    """
    stage.forget(4)
    first = recoverer(stage.nodes)
    first.until("raise")
    first.deliver(0)
    a = stage.bidder()
    a.deliver(stage.nodes, 0)
    stage.forget(0)
    second = recoverer(stage.nodes)
    second.until("begin")
    second.step()
    stage.nodes[0].pass_time(DEFAULT_MAX_TTL)  # n4 has waited for as long already
    assert recoverer(stage.nodes).finish() is True
    a.deliver(stage.nodes, 1, 2)
    a.resume()
    return halves(a), attempt(stage, 0, 3, 4)


def play_promise_that_is_forgotten_before_all_have_made_it(stage: Stage) -> Tokens:
    """A client that has seen a token of epoch 1 has 2 promised: by n2, which forgets, then by n0.

    In between a recoverer of n2 has read n0 and n1: it admits n2 in epoch 1. RAISE to 2 reaches n0 alone,
    which votes for A and forgets; another recoverer.
    """
    client = riser(stage.nodes, compose(1, 1))
    client.until("promise")
    client.deliver(2)
    stage.forget(2)
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
    stage.forget(0)
    assert recoverer(stage.nodes).finish() is True
    a.deliver(stage.nodes, 1)
    a.resume()
    return halves(a), attempt(stage, 0, 2)


# More than a minority restarts.


def play_all_restarted_and_one_rolls_back(stage: Stage) -> Tokens:
    """All restart; n0 alone is admitted, votes for A, rolls back; all are recovered once more."""
    for number, node in enumerate(stage.nodes):
        stage.come_back(number, node.remember())
    first = recoverer(stage.nodes)
    first.until("admit")
    on_disk = stage.nodes[0].remember() | {"p": "0"}
    first.deliver(0)
    a = stage.bidder()
    a.deliver(stage.nodes, 0)
    stage.come_back(0, on_disk)
    assert recoverer(stage.nodes).finish() is True
    a.deliver(stage.nodes, 1)
    a.resume()
    return halves(a), attempt(stage, 0, 2)


def play_one_rolls_back_between_two_readings(stage: Stage) -> Tokens:
    """A slow recoverer has read n1 and n2; another admits all; n0 votes for A and rolls back; it is read.

    It has another ticket by then, and the reading is void.
    """
    for number, node in enumerate(stage.nodes):
        stage.come_back(number, node.remember())
    on_disk = stage.nodes[0].remember()
    slow = recoverer(stage.nodes)
    while slow.now == 0.0:  # it sleeps for the longest lease, once it has its tickets
        slow.step()
    slow.until("begin")
    slow.until("read")
    if slow.wants(0):
        slow.deliver(1, 2)
    else:  # the mutant reads node by node
        while not (slow.script == "begin" and slow.wants(0)):
            slow.step()
    assert recoverer(stage.nodes).finish() is True
    a = attempt(stage, 0, 1)
    stage.come_back(0, on_disk)
    slow.until("admit")
    stage.nodes[0].pass_time(DEFAULT_MAX_TTL)
    slow.finish()
    for node in stage.nodes:
        node.expire("r")
    return a, attempt(stage, 0, 2)


def node_by_node(
    group: NodeGroup, census: Census, tickets: dict[int, str]
) -> Generator[Any, Any, tuple[int, Reports]]:
    """Get each ticket just before the node is read: instead of `recover._choose_epoch`."""
    found: Reports = {}
    for node in (1, 2, 0):
        begin = (census.membership.fingerprint, "word", 1000, census.waiting[node])
        answers = yield from group.ask("begin", [node], *begin)
        if answers[node].kind is ReplyKind.TICKET:
            tickets[node] = answers[node].facts[0]
        found |= (yield from group.read([node]))[0]
    return max(report.highest for report in found.values()) + 1, found


def play_two_recoverers_share_a_ticket(stage: Stage) -> Tokens:
    """One recoverer is slow, in epoch 1. The other reads all because nodes restarted, and chooses epoch 2.

    n0 promises 2 to the other, and is then admitted by the slow one, in 1. The other goes on with n1, which
    is raised to 2, votes for A and forgets.
    """
    restarted(stage, 0)
    slow = recoverer(stage.nodes)
    slow.until("admit")
    fingerprint = stage.node_set.fingerprint
    for node in (1, 2):
        stage.nodes[node].client.hset(NODE_KEY, "e", "0")  # RAISE is still under way
    ticket = stage.nodes[0].execute(slow.last("begin", 0)).facts[0]
    assert tell(stage, 0, "promise", fingerprint, 2, ticket, "").kind is ReplyKind.PROMISED
    slow.deliver(0)
    tell(stage, 1, "promise", fingerprint, 2, "", "")
    tell(stage, 1, "raise", fingerprint, 2)
    a = stage.bidder()
    a.deliver(stage.nodes, 1)
    stage.forget(1)
    assert recoverer(stage.nodes).finish() is True
    a.deliver(stage.nodes, 0)
    a.resume()
    return halves(a), attempt(stage, 1, 2)


# Two operators open the same list in different epochs.


def play_two_operators_open_the_same_list(
    stage: Stage, interlude: Callable[[Stage], object] = lambda _: None
) -> Tokens:
    """The first opens n0 in 2 and dies; the second opens the others in 1; n0 votes for A and forgets."""
    tickets = []
    for node in range(3):
        stage.forget(node)
        tickets.append(tell(stage, node, "begin", "", f"word{node}", 1000, "").facts[0])
    names = (station.node.name for station in stage.nodes)
    listed = Membership(tuple(sorted(zip(tickets, names, strict=True))), 1.0)
    stage.node_set = node_set_of(listed.fingerprint, 3)

    def promise(node: int, epoch: int) -> None:
        tell(stage, node, "promise", listed.fingerprint, epoch, tickets[node], "change")

    def open_node(node: int, epoch: int) -> None:
        tell(stage, node, "open", listed.fingerprint, epoch, tickets[node], 0, listed.to_json())

    for node in (0, 1):
        promise(node, 2)
    open_node(0, 2)
    for node in (1, 2):
        promise(node, 1)
    interlude(stage)
    open_node(1, 1)
    open_node(2, 1)
    a = stage.bidder()
    a.deliver(stage.nodes, 0)
    stage.forget(0)
    recoverer(stage.nodes).finish()
    a.deliver(stage.nodes, 1)
    a.resume()
    return halves(a), attempt(stage, 0, 2)


def play_eviction_before_the_second_opens(stage: Stage) -> Tokens:
    """The same, and n1 loses its hash alone, as a server does that is short of memory."""
    return play_two_operators_open_the_same_list(stage, lambda it: it.nodes[1].client.delete(NODE_KEY))


def ticket_in_a_key_of_its_own() -> dict[str, str]:
    apart = (
        "local apart = redis.call('HMGET', NODE .. ':t', 'ticket', 'ticket_of', 'ticket_at', 'ticket_ttl')\n"
        "is.ticket, is.ticket_of = apart[1] or nil, apart[2] or nil\n"
        "is.ticket_at, is.ticket_ttl = apart[3] or nil, apart[4] or nil\n"
    )
    mutants = {}
    for script in ("begin", "promise", "admit", "open"):
        place = "local function is_admitted()"
        text = without(script, place, apart + place)[script]
        mutants[script] = text.replace(
            "redis.call('HSET', NODE, 'ticket'", "redis.call('HSET', NODE .. ':t', 'ticket'"
        )
    return mutants


# A change of nodes.


def play_one_forgets_between_two_closings(stage: Stage) -> Tokens:
    """n0 is closed, forgets, and is recovered by n1 and n2, which are open; then n1 is closed.

    Returns a token of the new list, and one that the old list gives out afterwards.
    """
    actor = operator(stage.nodes, (0, 1, 3))
    actor.until("close")
    actor.deliver(0)
    stage.forget(0)
    assert recoverer(stage.nodes[:3]).finish() is True
    actor.deliver(1)
    actor.resume()
    actor.until("open")
    fingerprint, epoch, _, _, listed = actor.command.arguments
    for node in (3, 1):
        tell(stage, node, "open", fingerprint, epoch, _id_of(stage, node, actor), 0, listed)
    new = attempt(stage, 1, 3, fingerprint=str(fingerprint), members=(0, 1, 3))
    return new, attempt(stage, 0, 2)


def _id_of(stage: Stage, node: int, actor: Actor) -> str:
    seats = Membership.from_json(str(actor.command.arguments[4])).seats
    return next(node_id for node_id, address in seats if address == stage.nodes[node].node.name)


def play_two_operators_want_different_lists(stage: Stage) -> list[list[ReplyKind]]:
    """Both get their tickets; the first closes; the second closes what it can reach."""
    actors = [operator(stage.nodes, wanted) for wanted in ((0, 1, 3), (0, 1, 4))]
    for actor in actors:
        actor.until("close")
    return [[stage.nodes[node].execute(actor.command).kind for node in (0, 1)] for actor in actors]


def play_recovery_of_a_list_that_is_closed(stage: Stage) -> Tokens:
    """n0 and n1 are closed, n3 is open in the new list. n0 forgets, and a client recovers the old list.

    Of that only n2 is open, which is no majority.
    """
    actor = operator(stage.nodes, (0, 1, 3))
    actor.until("close")
    actor.deliver(0, 1)
    actor.resume()
    actor.until("open")
    fingerprint, epoch, _, *rest = actor.command.arguments
    actor.deliver(3)
    stage.forget(0)
    recoverer(stage.nodes[:3]).finish()
    tell(stage, 1, "open", fingerprint, epoch, _id_of(stage, 1, actor), *rest)
    new = attempt(stage, 1, 3, fingerprint=str(fingerprint), members=(0, 1, 3))
    return new, attempt(stage, 0, 2)


def play_return_to_an_earlier_list(stage: Stage) -> Tokens:
    """From {n0, n1} to {n0, n1, n2} and back; then messages of the first change arrive once more.

    Returns a token of the larger list, and one that it gives out when it should be gone.
    """
    there = operator(stage.nodes, (0, 1, 2))
    assert there.finish().done is True
    larger = partial(attempt, stage, 0, 1, fingerprint=stage.nodes[0].remember()["cfg"], members=(0, 1, 2))
    a = larger()
    assert operator(stage.nodes, (0, 1)).finish().done is True
    for node in stage.nodes:
        node.expire("r")
    for number in (0, 1):
        for script in ("close", "open"):
            stage.nodes[number].execute(there.last(script, number))
    return a, larger()


def of_ids_alone(listed: Membership) -> str:
    """Leave the list before out: instead of `Membership.fingerprint`."""
    return hashlib.sha256(json.dumps(listed.ids).encode()).hexdigest()[:32]


_FORGETFUL = without(
    "promise",
    "if tonumber(ARGV[2]) > tonumber(is.p or 0) then redis.call('HSET', NODE, 'p', ARGV[2]) end",
)
_TICKET_OF_THE_CLIENT = without(
    "begin", "string.sub(redis.sha1hex(table.concat(seed, '|')), 1, 32)", "ARGV[2]"
)
_ONE_LOOK = [(NodeReport, "still_promises", weaker.still_promises)]

SCHEDULES = {
    "no ticket": Schedule(
        lambda stage: play_admit_that_comes_again(stage, "admit"),
        ((1, 1), None),
        ((1, 1), (1, 1)),
        without(
            "admit",
            "if not holds(ARGV[3]) then return {'NO_TICKET'} end\n"
            "local left = ms_out(is.ticket_at, is.ticket_ttl)",
            "mark()\nlocal left = 0",
        ),
    ),
    "client's ticket": Schedule(
        lambda stage: play_admit_that_comes_again(stage, "begin", "admit"),
        ((1, 1), None),
        ((1, 1), (1, 1)),
        _TICKET_OF_THE_CLIENT,
    ),
    "client's ticket in init": Schedule(
        play_init_that_comes_again, ((0, 1), None), ((0, 1), (0, 1)), _TICKET_OF_THE_CLIENT
    ),
    "same ids for a new node": Schedule(
        play_init_that_comes_again,
        ((0, 1), None),
        ((0, 1), (0, 1)),
        without("open", "not holds(ARGV[3])", "not is.ticket"),
    ),
    "ticket not bound": Schedule(
        play_ticket_that_survives_a_rollback,
        ((1, 1), None),
        ((1, 1), (1, 1)),
        without("admit", "if not holds(ARGV[3]) then", "mark() if ARGV[3] ~= is.ticket then"),
    ),
    "no epoch": Schedule(
        play_grant_in_flight_across_the_recovery,
        ((0, 1), (1, 1)),
        ((0, 1), (0, 1)),
        patches=[(recovery, "_choose_epoch", weaker.same_epoch)],
    ),
    "RAISE without PROMISE": Schedule(
        play_raise_that_reached_one_node, (None, (2, 1)), ((1, 1), (1, 1)), _FORGETFUL, _ONE_LOOK, count=5
    ),
    "one look at promises": Schedule(
        play_promise_that_is_forgotten_before_all_have_made_it,
        (None, (2, 1)),
        ((2, 1), (2, 1)),
        patches=_ONE_LOOK,
    ),
    "no p": Schedule(
        play_all_restarted_and_one_rolls_back, (None, (2, 1)), ((1, 1), (1, 1)), _FORGETFUL, _ONE_LOOK
    ),
    "read and BEGIN node by node": Schedule(
        play_one_rolls_back_between_two_readings,
        ((1, 1), (2, 1)),
        ((1, 1), (1, 1)),
        patches=[*_ONE_LOOK, (recovery, "_choose_epoch", node_by_node)],
    ),
    "ADMIT lowers p": Schedule(
        play_two_recoverers_share_a_ticket,
        (None, (3, 1)),
        ((2, 1), (2, 1)),
        without("admit", "math.max(tonumber(is.p or 0), tonumber(epoch))", "tonumber(epoch)"),
    ),
    "OPEN without PROMISE": Schedule(
        play_two_operators_open_the_same_list, (None, (3, 1)), ((2, 1), (2, 1)), _FORGETFUL, _ONE_LOOK
    ),
    "ticket outside the hash": Schedule(
        play_eviction_before_the_second_opens, (None, None), ((2, 1), (2, 1)), ticket_in_a_key_of_its_own()
    ),
    "one closing pass": Schedule(
        play_one_forgets_between_two_closings,
        ((2, 1), None),
        ((2, 1), (1, 1)),
        patches=[(changing, "_closed_still", weaker.no_second_look)],
        beside=2,
    ),
    "no next": Schedule(
        play_two_operators_want_different_lists,
        [[ReplyKind.SHUT] * 2, [ReplyKind.CLOSED] * 2],
        [[ReplyKind.SHUT] * 2, [ReplyKind.SHUT] * 2],
        without("close", "is.next and is.next ~= ARGV[2]", "nil"),
        beside=2,
    ),
    "recovery reads closed nodes": Schedule(
        play_recovery_of_a_list_that_is_closed,
        ((1, 1), None),
        ((1, 1), (2, 1)),
        {
            **without("promise", "(is.cfg == ARGV[1] and not is.next)", "is.cfg == ARGV[1]"),
            **without("raise", "refusal(is.e, is.r, is.cfg, is.next)", "refusal(is.e, is.r, is.cfg)"),
        },
        [(NodeReport, "closed", property(lambda _: False))],
        beside=2,
    ),
    "a list comes again": Schedule(
        play_return_to_an_earlier_list,
        ((1, 1), None),
        ((1, 1), (1, 1)),
        patches=[(Membership, "fingerprint", property(of_ids_alone))],
        count=2,
        beside=1,
    ),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_survived(make_stage: MakeStage, name: str) -> None:
    assert SCHEDULES[name].played(make_stage) == SCHEDULES[name].survived


@pytest.mark.parametrize("name", SCHEDULES)
def test_control(make_stage: MakeStage, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert SCHEDULES[name].played_weaker(make_stage, monkeypatch) == SCHEDULES[name].broken


def begun(stage: Stage) -> Command:
    stage.forget(2)
    actor = recoverer(stage.nodes)
    actor.until("begin")
    actor.step()
    return actor.last("begin", 2)


def test_node_measures_how_long_it_stays_out(make_stage: MakeStage) -> None:
    """ADMIT is refused until the ticket is as old as the longest lease, and says how long that takes."""
    stage = make_stage()
    begin = begun(stage)
    ticket, ttl_ms, left_ms = stage.nodes[2].execute(begin).facts
    assert 0 <= int(ttl_ms) - int(left_ms) < 5000
    listed = stage.nodes[0].link.identity.membership
    assert listed is not None
    admit = partial(
        tell, stage, 2, "admit", listed.fingerprint, 1, ticket, str(begin.arguments[3]), listed.to_json()
    )
    early = admit()
    assert early.kind is ReplyKind.EARLY
    assert 0 <= int(ttl_ms) / 1000 - early.ttl < 5
    stage.nodes[2].pass_time(int(ttl_ms) / 1000)
    assert stage.nodes[2].execute(begin).facts == (ticket, ttl_ms, "0")
    assert admit().kind is ReplyKind.ADMITTED


def test_wait_begins_anew_where_the_clock_was_set_back(make_stage: MakeStage) -> None:
    """A ticket of the future would keep the node out for as long as the clock was wrong."""
    stage = make_stage()
    begin = begun(stage)
    ticket, ttl_ms, _ = stage.nodes[2].execute(begin).facts
    stage.nodes[2].pass_time(-7200)
    again = stage.nodes[2].execute(begin).facts
    assert again[0] == ticket
    assert int(ttl_ms) - 5000 < int(again[2]) <= int(ttl_ms)
    stage.nodes[2].pass_time(int(ttl_ms) / 1000)
    assert stage.nodes[2].execute(begin).facts[2] == "0"


def test_ticket_is_never_made_twice(make_stage: MakeStage) -> None:
    """A hundred BEGINs with the same word, each after a flush: a hundred tickets, also on different nodes."""
    stage = make_stage()
    tickets = set()
    for _ in range(50):
        for node in (0, 1):
            stage.forget(node)
            tickets.add(tell(stage, node, "begin", "", "word", 1000, "").facts[0])
    assert len(tickets) == 100
    assert tell(stage, 0, "begin", "", "word", 1000, "").facts[0] in tickets


def test_majority_is_raised_before_anybody_is_admitted(make_stage: MakeStage) -> None:
    """A server that has taken over an address must not leave the former one with voters of its epoch."""
    stage = make_stage(count=5)
    stage.forget(4)
    actor = recoverer(stage.nodes)
    actor.until("raise")
    actor.deliver(0, 1)
    actor.resume()
    actor.finish()
    scripts = [(node, sent.script) for node, sent in actor.sent]
    before = scripts[: next(at for at, (_, script) in enumerate(scripts) if script == "admit")]
    assert len({node for node, script in before if script == "raise"}) >= 3
    assert actor.result is True


def test_voter_is_raised_before_restarted_nodes_are_admitted(make_stage: MakeStage) -> None:
    """Too few nodes vote to ask them alone."""
    stage = make_stage()
    restarted(stage, 0, 1)
    actor = recoverer(stage.nodes)
    actor.until("raise")
    actor.resume()  # n2 is silent
    actor.until("read")
    actor.until("raise")
    assert all(sent.script != "admit" for _, sent in actor.sent)
    actor.finish()
    assert actor.result is True


def test_init_after_a_loss_promises_before_it_opens(make_stage: MakeStage) -> None:
    stage = make_stage()
    for node in range(3):
        stage.forget(node)
    names = tuple(server.url for server in stage.servers)
    group = NodeGroup(names, NODE_KEY, 1.0, lambda: "word", lambda: 0.0)
    actor = Actor(stage.nodes, initialise(group, base=0, max_ttl=1.0, epoch=7))
    actor.until("open")
    assert [station.remember()["p"] for station in stage.nodes] == ["7"] * 3
    actor.finish()
    assert {station.remember()["e"] for station in stage.nodes} == {"7"}


def test_second_operator_is_told_what_the_first_wants(make_stage: MakeStage) -> None:
    """He stops before anything is closed for him, and names the list that is to be finished first."""
    stage = make_stage(beside=2)
    first, second = (operator(stage.nodes, wanted) for wanted in ((0, 1, 3), (0, 1, 4)))
    second.until("close")
    first.until("promise")
    with pytest.raises(MembershipError, match=stage.nodes[3].node.name):
        second.finish()
    assert first.finish().done is True
