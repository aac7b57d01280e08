"""The protocol survives the schedules that break weaker ones, replayed message by message on real nodes.

Each schedule of the table is played twice: the shipped code survives it, and a mutant without the rule in
question does not. The mutants exist only here.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from fencelock.authority.base import Grant
from fencelock.authority.redlock.protocol import acquire, attempts, holding, messages
from fencelock.authority.redlock.protocol.messages import Reply, ReplyKind, Sleep
from fencelock.errors import LockLostError, QuorumError
from proof.servers import Nodes
from proof.simulation.weaker import maximum_without_write_back, mixed_epochs, still_extended_all_gone
from tests.redlock.groups import follow, promote
from tests.redlock.stage import NODE_KEY, Actor, Bidder, Schedule, Stage, recoverer, without

MakeStage = Callable[..., Stage]


def play_three_overlapping_majorities(stage: Stage) -> list[int | None]:
    """A is granted by n0 and n1, B by n1 and n2, C by n2 and n0, one after the other."""
    tokens = []
    for majority in ([0, 1], [1, 2], [2, 0]):
        bidder = stage.bid(*majority)
        stage.release(bidder, *majority)
        tokens.append(bidder.token)
    return tokens


def play_confirm_after_the_lock_changed_hands(stage: Stage) -> tuple[int | None, int | None]:
    """A's CONFIRM reaches n0 when the lock there has expired and gone to B."""
    stage.stand_at(0, 1, 1)
    a, b = stage.bidder(), stage.bidder()
    a.deliver(stage.nodes, 0, 1)
    a.resume()
    stage.nodes[0].expire("r")
    b.deliver(stage.nodes, 0, 2)
    b.resume()
    a.deliver(stage.nodes, 0)
    a.resume()
    return a.token, b.token


def play_confirm_where_the_own_grant_was_higher(stage: Stage) -> tuple[int | None, int | None]:
    """A's T is 2, and n2 has granted 3 to A itself, after B was granted 2 there.

    The larger value is decided instead.
    """
    stage.stand_at(0, 1, 1)
    a, b = stage.bidder(), stage.bidder()
    late = a.request.command
    a.deliver(stage.nodes, 0)
    stage.nodes[0].expire("r")
    a.deliver(stage.nodes, 1)
    a.resume()
    b.deliver(stage.nodes, 0, 2)
    b.resume()
    stage.nodes[2].expire("r")
    assert stage.nodes[2].execute(late).counters == (3,)
    while a.outcome is None:
        a.deliver(stage.nodes, *a.request.nodes)
        a.resume()
    return a.token, b.token


def play_extension_before_completion(stage: Stage) -> tuple[int | None, int | None]:
    """A's lock on n0 expires, B is granted its T there and is gone; A's EXTEND makes the lock again."""
    stage.stand_at(0, 1, 1)
    a, b = stage.bidder(), stage.bidder()
    a.deliver(stage.nodes, 0, 1)
    a.resume()
    stage.nodes[0].expire("r")
    b.deliver(stage.nodes, 0, 2)
    b.resume()
    stage.release(b, 0)
    stage.nodes[0].execute(holding._extend_command(a.node_set, [a.attempt], [0]))
    a.deliver(stage.nodes, 0)
    a.resume()
    return a.token, b.token


def play_extension_after_another_had_the_lock(stage: Stage) -> type:
    """A's locks expire, B is granted the lock and is gone; A's EXTEND makes both locks again."""
    a = stage.bid(0, 1)
    assert isinstance(a.outcome, Grant)
    for node in stage.nodes[:2]:
        node.expire("r")
    stage.release(stage.bid(0, 1), 0, 1)
    actor = Actor(stage.nodes, holding.extend(a.node_set, [(a.outcome, 30.0)]))
    actor.deliver(0, 1)
    actor.resume()
    return type(actor.result[0])


def play_votes_of_two_epochs(stage: Stage) -> tuple[int | None, int | None]:
    """Z is granted 6 in epoch 0; n1 moves to epoch 1; A is granted 6 by n0 in 0 and n1 in 1."""
    stage.stand_at(5, 5, 5)
    z, a = stage.bid(1, 2), stage.bidder()
    stage.release(z, 1, 2)
    stage.nodes[1].client.hset(NODE_KEY, mapping={"e": "1", "p": "1"})
    stage.nodes[1].stand_at("r", 5)
    a.deliver(stage.nodes, 0, 1)
    a.resume()
    return z.token, a.token


Voted = tuple[int | None, int | None, ReplyKind]


def asked_of_n1_and_n2(stage: Stage, a: Bidder) -> Voted:
    b = stage.bidder()
    said = b.deliver(stage.nodes, 1, 2)
    assert said[2].kind is ReplyKind.GRANTED
    b.resume()
    return a.token, b.token, said[1].kind


def play_a_node_that_loses_its_data(stage: Stage) -> Voted:
    """A is granted by n0 and n1; n1 forgets everything; B asks n1 and n2."""
    a = stage.bid(0, 1)
    stage.forget(1)
    return asked_of_n1_and_n2(stage, a)


def play_a_node_that_comes_back_with_older_data(stage: Stage) -> Voted:
    """A is granted by n0 and n1; n1 restarts from a file that is older than its vote; B asks n1 and n2."""
    a, n1 = stage.bid(0, 1), stage.nodes[1]
    stage.servers[1].restart(keep_data=True)
    fields: Any = n1.client.hkeys(NODE_KEY)
    n1.client.hdel(NODE_KEY, *(name for name in fields if name[1:].isdigit()))
    n1.expire("r")
    n1.reconnect()
    return asked_of_n1_and_n2(stage, a)


def play_a_node_that_follows_another_and_is_promoted_again(stage: Stage) -> Voted:
    """A is granted by n0 and n1; n1 follows a server that has an older copy of its data; B asks n1 and n2.

    Neither the process nor a connection has changed meanwhile.
    """
    copy = stage.servers[3]
    follow(copy, stage.servers[1])
    promote(copy)
    a = stage.bid(0, 1)
    follow(stage.servers[1], copy)
    promote(stage.servers[1])
    return asked_of_n1_and_n2(stage, a)


def forgotten_as_another_is_admitted(stage: Stage) -> Any:
    """A has the lock on n0 and n1; n2, which is admitted only then, misses it; at once n1 forgets."""
    a = stage.bid(0, 1)
    assert isinstance(a.outcome, Grant)
    stage.forget(1)
    return a


def extend_everywhere(stage: Stage, bidder: Any) -> Any:
    (end,) = Actor(stage.nodes, holding.extend(bidder.node_set, [(bidder.outcome, 30.0)])).finish()
    return end


def play_a_node_that_forgets_when_another_is_admitted(stage: Stage) -> tuple[type, object]:
    """Of three nodes one has the lock, one has made it again and one is blank: a second round counts two."""
    bidder = forgotten_as_another_is_admitted(stage)
    end = extend_everywhere(stage, bidder)
    restored = f"{bidder.attempt.nonce}|0|{messages.RESTORED_VALUE}"
    return type(end), stage.nodes[2].client.get(f"{NODE_KEY}:l:r") == restored


def play_bid_for_a_lease_on_a_node_that_was_just_admitted(stage: Stage) -> ReplyKind:
    """A's lease is extended while n2 is blank; n2 is admitted, and before A comes again B asks for it."""
    a, b = stage.bid(0, 1, 2), stage.bidder()
    stage.forget(2)
    assert isinstance(extend_everywhere(stage, a), Grant)
    recoverer(stage.nodes).finish()
    return b.deliver(stage.nodes, 2)[2].kind


_ON_DEMAND = (
    "if redis.call('EXISTS', NODE) == 0 then redis.call('HSET', NODE, 'e', 0, 'b', 0, "
    "'r', SOCKET_RUN_ID, 'cfg', ARGV[1]) redis.call('SETRANGE', NODE .. ':m', 0, '1') end\n"
)
_BEGINNING = "local fields = {'e', 'r', 'cfg', 'next', 'b'}"

SCHEDULES = {
    "maximum without write-back": Schedule(
        play_three_overlapping_majorities,
        [1, 2, 3],
        [1, 2, 2],
        without("release", "== NONCE then catch_up", "== 0 then catch_up"),
        [(acquire, "_decide", maximum_without_write_back)],
    ),
    "CONFIRM without ownership": Schedule(
        play_confirm_after_the_lock_changed_hands,
        (None, 2),
        (2, 2),
        without("confirm", "nonce ~= NONCE or its_epoch ~= epoch or "),
    ),
    "CONFIRM below the node's own grant": Schedule(
        play_confirm_where_the_own_grant_was_higher,
        (3, 2),
        (2, 2),
        without("confirm", "then higher = true end", "then higher = false end"),
    ),
    "lock made again with its counter": Schedule(
        play_extension_before_completion,
        (None, 2),
        (2, 2),
        without("extend", "ARGV[at + 3], 'PX'", "nonce .. '|0|1', 'PX'"),
    ),
    "lock made again and counted": Schedule(
        play_extension_after_another_had_the_lock,
        LockLostError,
        Grant,
        without("extend", "code = 1", "code = 2"),
    ),
    "votes of two epochs added up": Schedule(
        play_votes_of_two_epochs, (6, None), (6, 6), patches=[(acquire, "largest_epoch", mixed_epochs)]
    ),
    "marker made on demand": Schedule(
        play_a_node_that_loses_its_data,
        (1, None, ReplyKind.AMNESIA),
        (1, 1, ReplyKind.GRANTED),
        without("acquire", _BEGINNING, _ON_DEMAND + _BEGINNING),
    ),
    "marker without the run_id": Schedule(
        play_a_node_that_comes_back_with_older_data,
        (1, None, ReplyKind.RESTARTED),
        (1, 1, ReplyKind.GRANTED),
        without("acquire", " and admitted_run_id == run_id and is_unbroken()"),
        durable=True,
    ),
    "process without its memory": Schedule(
        play_a_node_that_follows_another_and_is_promoted_again,
        (1, None, ReplyKind.RESTARTED),
        (1, 1, ReplyKind.GRANTED),
        without("acquire", "run_id and is_unbroken())", "run_id)"),
        beside=1,
        durable=True,
    ),
    "all that forgot are added up": Schedule(
        play_a_node_that_forgets_when_another_is_admitted,
        (Grant, True),
        (LockLostError, True),
        patches=[(holding, "_still_extended", still_extended_all_gone)],
    ),
    "locks on voters only": Schedule(
        play_bid_for_a_lease_on_a_node_that_was_just_admitted,
        ReplyKind.HELD,
        ReplyKind.GRANTED,
        without("extend", "if refused and refused[1] ~= 'AMNESIA' and not restarted then", "if refused then"),
    ),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_survived(make_stage: MakeStage, name: str) -> None:
    assert SCHEDULES[name].played(make_stage) == SCHEDULES[name].survived


@pytest.mark.parametrize("name", SCHEDULES)
def test_control(make_stage: MakeStage, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert SCHEDULES[name].played_weaker(make_stage, monkeypatch) == SCHEDULES[name].broken


def test_link_of_a_restarted_node_is_broken(make_nodes: Callable[..., Nodes]) -> None:
    """The run_id belongs to the socket: after a restart nothing is answered on the old one."""
    stage = Stage(make_nodes(1, appendfsync="always")[:1])
    stage.servers[0].restart(keep_data=True)
    with pytest.raises(Exception, match="closed by the node"):
        stage.bidder().deliver(stage.nodes, 0)
    stage.close()


def test_resent_acquire_gets_the_same_answer_and_extends_nothing(make_stage: MakeStage) -> None:
    stage = make_stage()
    a = stage.bidder()
    first = a.deliver(stage.nodes, 0)[0]
    stage.nodes[0].client.pexpire(f"{NODE_KEY}:l:r", 5000)
    assert a.deliver(stage.nodes, 0)[0] == first == Reply(ReplyKind.GRANTED, 0, (1,))
    assert stage.nodes[0].client.pttl(f"{NODE_KEY}:l:r") <= 5000


def test_late_acquire_of_a_released_bid_takes_no_token_from_anybody(make_stage: MakeStage) -> None:
    stage = make_stage()
    a = stage.bidder()
    late = a.request.command
    a.deliver(stage.nodes, 0, 1, 2)
    a.resume()
    stage.release(a, 0, 1, 2)
    assert stage.nodes[0].execute(late).counters == (2,)
    assert (a.token, stage.bid(0, 1, 2).token) == (1, 2)


def test_late_release_leaves_another_holder_alone(make_stage: MakeStage) -> None:
    stage = make_stage()
    a = stage.bid(0, 1, 2)
    assert stage.release(a, 0, 1, 2) == [ReplyKind.RELEASED] * 3
    b = stage.bid(0, 1, 2)
    assert stage.release(a, 0, 1, 2) == [ReplyKind.LOST] * 3
    assert all(node.client.get(f"{NODE_KEY}:l:r") == f"{b.attempt.nonce}|0|2" for node in stage.nodes)


def test_late_confirm_after_a_release_raises_no_counter(make_stage: MakeStage) -> None:
    stage = make_stage()
    stage.stand_at(4, 9, 9)
    a = stage.bidder()
    a.deliver(stage.nodes, 0, 1)
    a.resume()
    confirm = a.request.command
    assert confirm.script == "confirm"
    stage.release(a, 0, 1)
    assert stage.nodes[0].execute(confirm).kind is ReplyKind.LOST
    assert stage.nodes[0].execute(stage.bidder().request.command).counters == (6,)


def test_confirm_that_overtakes_the_acquire_is_refused(make_stage: MakeStage) -> None:
    """The node's grant afterwards is not counted twice."""
    stage = make_stage()
    stage.stand_at(0, 5, 0)
    a = stage.bidder()
    acquire = a.request.command
    a.deliver(stage.nodes, 0, 1)
    a.resume()
    assert a.deliver(stage.nodes, 2)[2].kind is ReplyKind.LOST
    assert stage.nodes[2].execute(acquire).counters == (1,)
    a.deliver(stage.nodes, 0)
    a.resume()
    assert a.token == 6


def test_confirm_that_ends_early_refuses_nobody(make_stage: MakeStage) -> None:
    """Where a laggard has granted more than all, the others had no time to answer, and are asked again."""
    stage = make_stage(count=5)
    stage.stand_at(0, 1, 2, 8, 0)
    a = stage.bidder()
    acquire = a.request.command
    a.deliver(stage.nodes, 0, 1, 2)
    a.resume()
    assert stage.nodes[3].execute(acquire).counters == (9,)
    said = a.deliver(stage.nodes, 0, 3)  # what n0 confirms is too low
    assert (said[0].kind, said[3].kind) == (ReplyKind.CONFIRMED, ReplyKind.HIGHER)
    a.resume()
    assert set(a.request.nodes) == {0, 1, 2, 4}
    a.deliver(stage.nodes, 0, 2)
    a.resume()
    assert a.token == 9


def test_release_lets_a_laggard_with_the_lock_catch_up(make_stage: MakeStage) -> None:
    stage = make_stage()
    stage.stand_at(7, 7, 0)
    missed, low = stage.bidder(), stage.bidder()
    for bidder, nodes, said, counter in (
        (missed, (0, 1), ReplyKind.LOST, 1),
        (low, (0, 1, 2), ReplyKind.RELEASED, 10),
    ):
        bidder.deliver(stage.nodes, *nodes)
        bidder.resume()
        assert stage.release(bidder, 2) == [said]
        stage.release(bidder, 0)
        stage.release(bidder, 1)
        another = stage.bidder()
        assert stage.nodes[2].execute(another.request.command).counters == (counter,)
        stage.release(another, 2)


def test_lease_on_two_blank_nodes_of_three_is_not_extended_and_not_lost(make_stage: MakeStage) -> None:
    """One of the nodes may have been admitted meanwhile, with the lock: no other client can have had it."""
    stage = make_stage()
    bidder = forgotten_as_another_is_admitted(stage)
    stage.forget(2)
    assert isinstance(extend_everywhere(stage, bidder), QuorumError)


def test_release_does_not_add_up_nodes_that_forgot_one_after_the_other(make_stage: MakeStage) -> None:
    """No node can tell the holder that its lease had ended; if two voters know nothing of it, it had."""
    stage = make_stage()
    bidder = forgotten_as_another_is_admitted(stage)

    def release() -> object:
        return Actor(stage.nodes, attempts.release(lambda: bidder.node_set, bidder.outcome.proof)).finish()

    assert [release(), release()] == [None, False]


@pytest.mark.parametrize(("forgotten", "is_ours"), [(1, True), (2, False)])
def test_release_tells_whether_a_majority_had_the_lock_still(
    make_stage: MakeStage, forgotten: int, *, is_ours: bool
) -> None:
    stage = make_stage()
    outcome: Any = stage.bid(0, 1, 2).outcome
    for node in range(forgotten):
        stage.forget(node)
    actor = Actor(stage.nodes, attempts.release(lambda: stage.node_set, outcome.proof))
    assert actor.finish() is is_ours


def test_bidder_who_waits_learns_of_a_list_that_comes_meanwhile(make_stage: MakeStage) -> None:
    """The nodes are asked which list they belong to before the contender is told that his is wrong."""
    stage = make_stage()
    stage.bid(0, 1, 2)
    node_sets = [stage.node_set]
    new_attempt = itertools.count()
    acquisition = acquire.Acquisition(("r",), 5.0, lambda: f"bid-{next(new_attempt)}").acquire(
        lambda: node_sets[-1], began=0.0, since=0.0, timeout=30.0, grace=0.0, outage=0.0, jitter=lambda: 0.5
    )
    actor = Actor(stage.nodes, acquisition)
    while not isinstance(actor.request, Sleep):  # it is held by another
        actor.step()
    for node in stage.nodes:
        node.client.hset(NODE_KEY, "cfg", "another list")
        node.expire("r")
    actor.until("read")
    node_sets.append(replace(stage.node_set, fingerprint="another list"))
    assert isinstance(actor.finish(), Grant)
