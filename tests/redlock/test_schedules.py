"""The protocol survives the schedules that break weaker ones, replayed message by message on real nodes.

Each schedule is shown twice: the shipped code survives it, and a mutant without the rule in question does
not. The mutants exist only here.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest

from fencelock.authority.base import Grant
from fencelock.authority.redlock.protocol import acquire, attempts, holding, messages
from fencelock.authority.redlock.protocol.messages import Reply, ReplyKind, Sleep
from fencelock.errors import LockLostError, QuorumError
from proof.servers import Nodes
from proof.simulation.weaker import (
    maximum_without_write_back,
    mixed_epochs,
    still_extended_all_gone,
)
from tests.redlock.groups import follow, promote
from tests.redlock.stage import NODE_KEY, Actor, Stage, recoverer, without

MakeStage = Callable[..., Stage]


@pytest.fixture
def make_stage(nodes: Nodes) -> Iterator[MakeStage]:
    """A factory of stages on three blank nodes or more, with mutants of scripts where a test wants them."""
    made = []

    def make(scripts: Mapping[str, str] | None = None, count: int = 3) -> Stage:
        made.append(Stage(nodes.urls[:count], scripts))
        return made[-1]

    yield make
    for stage in made:
        stage.close()


def play_three_overlapping_majorities(stage: Stage) -> list[int | None]:
    """A is granted by n0 and n1, B by n1 and n2, C by n2 and n0, one after the other."""
    tokens = []
    for majority in ([0, 1], [1, 2], [2, 0]):
        bidder = stage.bidder()
        while bidder.outcome is None:
            bidder.deliver(stage.nodes, *(node for node in bidder.request.nodes if node in majority))
            bidder.resume()
        stage.release(bidder, *majority)
        tokens.append(bidder.token)
    return tokens


def test_maximum_of_overlapping_majorities_is_written_back(make_stage: MakeStage) -> None:
    """Three winners in a row get three tokens, although the counters of each pair of nodes disagree."""
    assert play_three_overlapping_majorities(make_stage()) == [1, 2, 3]


def test_maximum_without_write_back_gives_a_token_twice(
    make_stage: MakeStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: without CONFIRM, and without the catch-up of RELEASE, the second token comes again."""
    monkeypatch.setattr(acquire, "_decide", maximum_without_write_back)
    mutant = without("release", "== NONCE then catch_up", "== 0 then catch_up")
    assert play_three_overlapping_majorities(make_stage(mutant)) == [1, 2, 2]


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


def test_confirm_is_refused_where_the_lock_changed_hands(make_stage: MakeStage) -> None:
    """A confirmation that comes too late counts for nothing."""
    assert play_confirm_after_the_lock_changed_hands(make_stage()) == (None, 2)


def test_confirm_without_ownership_gives_a_token_twice(make_stage: MakeStage) -> None:
    """Control: a CONFIRM that does not ask whose the lock is lets both complete with 2."""
    mutant = without("confirm", "nonce ~= NONCE or its_epoch ~= epoch or ")
    assert play_confirm_after_the_lock_changed_hands(make_stage(mutant)) == (2, 2)


def play_confirm_where_the_own_grant_was_higher(stage: Stage) -> tuple[int | None, int | None]:
    """A's T is 2, and n2 has granted 3 to A itself, after B was granted 2 there."""
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


def test_confirm_below_the_nodes_own_grant_decides_again(make_stage: MakeStage) -> None:
    """A node that granted more than T does not confirm T; the larger value is decided instead."""
    assert play_confirm_where_the_own_grant_was_higher(make_stage()) == (3, 2)


def test_confirm_below_the_nodes_own_grant_must_not_count(make_stage: MakeStage) -> None:
    """Control: without `g <= T` both A and B complete with 2."""
    mutant = without("confirm", "then higher = true end", "then higher = false end")
    assert play_confirm_where_the_own_grant_was_higher(make_stage(mutant)) == (2, 2)


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


def test_lock_that_was_made_again_is_not_confirmed(make_stage: MakeStage) -> None:
    """What EXTEND has written vouches for no grant."""
    assert play_extension_before_completion(make_stage()) == (None, 2)


def test_lock_made_again_with_its_counter_gives_a_token_twice(make_stage: MakeStage) -> None:
    """Control: an EXTEND that writes what ACQUIRE had written lets A complete with B's token."""
    mutant = without("extend", "ARGV[at + 3], 'PX'", "nonce .. '|0|1', 'PX'")
    assert play_extension_before_completion(make_stage(mutant)) == (2, 2)


def play_extension_after_another_had_the_lock(stage: Stage) -> Any:
    """A's locks expire, B is granted the lock and is gone; A's EXTEND makes both locks again."""
    a, b = stage.bidder(), stage.bidder()
    a.deliver(stage.nodes, 0, 1)
    a.resume()
    assert isinstance(a.outcome, Grant)
    for node in stage.nodes[:2]:
        node.expire("r")
    b.deliver(stage.nodes, 0, 1)
    b.resume()
    stage.release(b, 0, 1)
    actor = Actor(stage.nodes, holding.extend(a.node_set, [(a.outcome, 30.0)]))
    actor.deliver(0, 1)
    actor.resume()
    return actor.result[0]


def test_lock_that_was_made_again_does_not_extend_the_lease(make_stage: MakeStage) -> None:
    """A holder that finds its locks gone on a majority has lost the lease, though it has made them again."""
    assert isinstance(play_extension_after_another_had_the_lock(make_stage()), LockLostError)


def test_lock_made_again_and_counted_extends_a_lease_that_had_ended(make_stage: MakeStage) -> None:
    """Control: counted at once, it lets A believe that he has held the lock all the time."""
    mutant = without("extend", "code = 1", "code = 2")
    assert isinstance(play_extension_after_another_had_the_lock(make_stage(mutant)), Grant)


def play_votes_of_two_epochs(stage: Stage) -> tuple[int | None, int | None]:
    """Z is granted 6 in epoch 0; n1 moves to epoch 1; A is granted 6 by n0 in 0 and n1 in 1."""
    stage.stand_at(5, 5, 5)
    z, a = stage.bidder(), stage.bidder()
    z.deliver(stage.nodes, 1, 2)
    z.resume()
    stage.release(z, 1, 2)
    stage.nodes[1].client.hset(NODE_KEY, mapping={"e": "1", "p": "1"})
    stage.nodes[1].stand_at("r", 5)
    a.deliver(stage.nodes, 0, 1)
    a.resume()
    return z.token, a.token


def test_votes_of_two_epochs_are_not_added_up(make_stage: MakeStage) -> None:
    """One vote of each epoch is no majority of either."""
    assert play_votes_of_two_epochs(make_stage()) == (6, None)


def test_votes_of_two_epochs_added_up_give_a_token_twice(
    make_stage: MakeStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: a client that adds them up completes with a token that was given before."""
    monkeypatch.setattr(acquire, "largest_epoch", mixed_epochs)
    assert play_votes_of_two_epochs(make_stage()) == (6, 6)


def play_a_node_that_loses_its_data(stage: Stage) -> tuple[int | None, int | None, dict[int, ReplyKind]]:
    """A is granted by n0 and n1; n1 forgets everything; B asks n1 and n2."""
    a, b = stage.bidder(), stage.bidder()
    a.deliver(stage.nodes, 0, 1)
    a.resume()
    stage.nodes[1].client.flushall()
    said = {node: answer.kind for node, answer in b.deliver(stage.nodes, 1, 2).items()}
    b.resume()
    return a.token, b.token, said


def test_node_that_lost_its_data_does_not_vote(make_stage: MakeStage) -> None:
    """A blank node says so, and is not counted."""
    a, b, said = play_a_node_that_loses_its_data(make_stage())
    assert (a, b) == (1, None)
    assert said == {1: ReplyKind.AMNESIA, 2: ReplyKind.GRANTED}


def test_marker_made_on_demand_gives_a_token_twice(make_stage: MakeStage) -> None:
    """Control: a node that makes its marker when it misses it counts from the beginning again."""
    on_demand = "if redis.call('EXISTS', NODE) == 0 then redis.call('HSET', NODE, 'e', 0, 'b', 0, "
    on_demand += "'r', SOCKET_RUN_ID, 'cfg', ARGV[1]) redis.call('SETRANGE', NODE .. ':m', 0, '1') end\n"
    start = "local fields = {'e', 'r', 'cfg', 'next', 'b'}"
    mutant = without("acquire", start, on_demand + start)
    a, b, _ = play_a_node_that_loses_its_data(make_stage(mutant))
    assert (a, b) == (1, 1)


def play_a_node_that_comes_back_with_older_data(
    make_nodes: Callable[..., Nodes], scripts: Mapping[str, str]
) -> tuple[int | None, int | None, ReplyKind]:
    """A is granted by n0 and n1; n1 restarts from a file that is older than its vote; B asks n1 and n2."""
    servers = make_nodes(3, appendfsync="always")
    stage = Stage(servers.urls, scripts)
    try:
        a, b = stage.bidder(), stage.bidder()
        a.deliver(stage.nodes, 0, 1)
        a.resume()
        servers[1].restart(keep_data=True)
        stage.nodes[1].client.hdel(NODE_KEY, *_counters(stage))
        stage.nodes[1].expire("r")
        stage.nodes[1].reconnect()
        said = b.deliver(stage.nodes, 1, 2)[1].kind
        b.resume()
        return a.token, b.token, said
    finally:
        stage.close()


def _counters(stage: Stage) -> list[str]:
    fields: Any = stage.nodes[1].client.hkeys(NODE_KEY)
    return [field for field in fields if field[1:].isdigit()]


def test_node_that_restarted_with_its_data_does_not_vote(make_nodes: Callable[..., Nodes]) -> None:
    """A marker that survived a restart proves nothing about the counters beside it."""
    assert play_a_node_that_comes_back_with_older_data(make_nodes, {}) == (1, None, ReplyKind.RESTARTED)


def test_marker_without_the_run_id_gives_a_token_twice(make_nodes: Callable[..., Nodes]) -> None:
    """Control: a node that is known by its marker alone grants what it had granted before."""
    mutant = without("acquire", " and admitted_run_id == run_id and is_unbroken()")
    assert play_a_node_that_comes_back_with_older_data(make_nodes, mutant) == (1, 1, ReplyKind.GRANTED)


def play_a_node_that_follows_another_and_is_promoted_again(
    make_nodes: Callable[..., Nodes], scripts: Mapping[str, str]
) -> tuple[int | None, int | None, ReplyKind]:
    """A is granted by n0 and n1; n1 follows a server that has an older copy of its data; B asks n1 and n2.

    Neither the process nor a connection has changed meanwhile.
    """
    *servers, other = make_nodes(4)
    stage = Stage([server.url for server in servers], scripts)
    try:
        follow(other, servers[1])
        promote(other)
        a, b = stage.bidder(), stage.bidder()
        a.deliver(stage.nodes, 0, 1)
        a.resume()
        follow(servers[1], other)
        promote(servers[1])
        said = b.deliver(stage.nodes, 1, 2)[1].kind
        b.resume()
        return a.token, b.token, said
    finally:
        stage.close()


def test_node_that_has_loaded_older_data_does_not_vote(make_nodes: Callable[..., Nodes]) -> None:
    """The process is the one that was admitted, but its memory is not."""
    played = play_a_node_that_follows_another_and_is_promoted_again(make_nodes, {})
    assert played == (1, None, ReplyKind.RESTARTED)


def test_process_alone_gives_a_token_twice_after_older_data_were_loaded(
    make_nodes: Callable[..., Nodes],
) -> None:
    """Control: a node that is known by its process alone grants what it had granted before."""
    mutant = without("acquire", "run_id and is_unbroken())", "run_id)")
    played = play_a_node_that_follows_another_and_is_promoted_again(make_nodes, mutant)
    assert played == (1, 1, ReplyKind.GRANTED)


def test_link_of_a_restarted_node_is_broken(make_nodes: Callable[..., Nodes]) -> None:
    """The run_id belongs to the socket: after a restart nothing is answered on the old one."""
    servers = make_nodes(1, appendfsync="always")
    stage = Stage(servers.urls)
    servers[0].restart(keep_data=True)
    bidder = stage.bidder()
    with pytest.raises(Exception, match="closed by the node"):
        bidder.deliver(stage.nodes, 0)
    stage.close()


def test_resent_acquire_gets_the_same_answer(make_stage: MakeStage) -> None:
    """A duplicate of an ACQUIRE neither mints nor extends."""
    stage = make_stage()
    a = stage.bidder()
    first = a.deliver(stage.nodes, 0)[0]
    stage.nodes[0].client.pexpire(f"{NODE_KEY}:l:r", 5000)
    assert a.deliver(stage.nodes, 0)[0] == first == Reply(ReplyKind.GRANTED, 0, (1,))
    assert stage.nodes[0].client.pttl(f"{NODE_KEY}:l:r") <= 5000


def test_late_acquire_of_a_released_bid_takes_no_token_from_anybody(make_stage: MakeStage) -> None:
    """A late duplicate locks one node for no client, and tokens still grow past it."""
    stage = make_stage()
    a, b = stage.bidder(), stage.bidder()
    late = a.request.command
    a.deliver(stage.nodes, 0, 1, 2)
    a.resume()
    stage.release(a, 0, 1, 2)
    assert stage.nodes[0].execute(late).counters == (2,)
    b.deliver(stage.nodes, 0, 1, 2)
    b.resume()
    assert (a.token, b.token) == (1, 2)


def test_late_release_leaves_another_holder_alone(make_stage: MakeStage) -> None:
    """A RELEASE that comes twice, or after another client got the lock, deletes nothing of that client."""
    stage = make_stage()
    a, b = stage.bidder(), stage.bidder()
    a.deliver(stage.nodes, 0, 1, 2)
    a.resume()
    assert stage.release(a, 0, 1, 2) == [ReplyKind.RELEASED] * 3
    b.deliver(stage.nodes, 0, 1, 2)
    b.resume()
    assert stage.release(a, 0, 1, 2) == [ReplyKind.LOST] * 3
    assert all(node.client.get(f"{NODE_KEY}:l:r") == f"{b.attempt.nonce}|0|2" for node in stage.nodes)


def test_late_confirm_after_release_is_refused(make_stage: MakeStage) -> None:
    """A CONFIRM that comes after the RELEASE raises no counter."""
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


def test_confirm_overtaking_the_acquire_is_refused(make_stage: MakeStage) -> None:
    """A node that has not seen the ACQUIRE yet cannot confirm; its grant afterwards is not counted twice."""
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
    assert a.deliver(stage.nodes, 3)[3].kind is ReplyKind.HIGHER
    a.resume()
    assert set(a.request.nodes) == {0, 1, 2, 4}
    a.deliver(stage.nodes, 0, 2)
    a.resume()
    assert a.token == 9


def test_release_lets_a_laggard_catch_up(make_stage: MakeStage) -> None:
    """The node that has granted less learns the token from the release; one without the lock does not."""
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


def play_node_that_forgets_when_another_is_admitted(stage: Stage) -> Any:
    """A has the lock on n0 and n1; n2, which is admitted only then, misses it; at once n1 forgets."""
    a = stage.bidder()
    a.deliver(stage.nodes, 0, 1)
    a.resume()
    assert isinstance(a.outcome, Grant)
    stage.nodes[1].client.flushall()
    return a


def extend_everywhere(stage: Stage, bidder: Any) -> Any:
    """Return what an extension comes to that all nodes hear of."""
    actor = Actor(stage.nodes, holding.extend(bidder.node_set, [(bidder.outcome, 30.0)]))
    (end,) = actor.finish()
    return end


def test_lease_goes_on_where_a_node_forgets_as_soon_as_another_is_admitted(make_stage: MakeStage) -> None:
    """Of three nodes one has the lock, one has made it again and one is blank: a second round counts two."""
    stage = make_stage()
    bidder = play_node_that_forgets_when_another_is_admitted(stage)
    assert isinstance(extend_everywhere(stage, bidder), Grant)
    assert (
        stage.nodes[2].client.get(f"{NODE_KEY}:l:r") == f"{bidder.attempt.nonce}|0|{messages.RESTORED_VALUE}"
    )


def test_lease_on_two_blank_nodes_of_three_is_not_extended_and_not_lost(make_stage: MakeStage) -> None:
    """One of the nodes may have been admitted meanwhile, with the lock.

    No other client can have had the lock there.
    """
    stage = make_stage()
    bidder = play_node_that_forgets_when_another_is_admitted(stage)
    stage.nodes[2].client.flushall()
    assert isinstance(extend_everywhere(stage, bidder), QuorumError)


def test_nodes_that_forgot_one_after_the_other_are_not_added_up(
    make_stage: MakeStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: added up, one that was admitted a moment ago and one that is blank cost a healthy lease."""
    stage = make_stage()
    bidder = play_node_that_forgets_when_another_is_admitted(stage)
    monkeypatch.setattr(holding, "_still_extended", still_extended_all_gone)
    assert isinstance(extend_everywhere(stage, bidder), LockLostError)


def test_release_does_not_add_up_nodes_that_forgot_one_after_the_other(make_stage: MakeStage) -> None:
    """No node can tell the holder that its lease had ended.

    If two voters know nothing of the lease, it had.
    """
    stage = make_stage()
    bidder = play_node_that_forgets_when_another_is_admitted(stage)
    actor = Actor(stage.nodes, attempts.release(lambda: bidder.node_set, bidder.outcome.proof))
    assert actor.finish() is None
    again = Actor(stage.nodes, attempts.release(lambda: bidder.node_set, bidder.outcome.proof))
    assert again.finish() is False


def test_bidder_who_waits_learns_of_a_list_that_comes_meanwhile(make_stage: MakeStage) -> None:
    """The nodes are asked which list they belong to before the contender is told that his is wrong."""
    stage = make_stage()
    holder = stage.bidder()
    holder.deliver(stage.nodes, 0, 1, 2)
    node_sets = [stage.node_set]
    new_attempt = itertools.count()
    actor = Actor(
        stage.nodes,
        acquire.Acquisition(("r",), 5.0, lambda: f"bid-{next(new_attempt)}").acquire(
            lambda: node_sets[-1],
            began=0.0,
            since=0.0,
            timeout=30.0,
            grace=0.0,
            outage=0.0,
            jitter=lambda: 0.5,
        ),
    )
    while not isinstance(actor.request, Sleep):  # it is held by another
        actor.step()
    for node in stage.nodes:
        node.client.hset(NODE_KEY, "cfg", "another list")
        node.expire("r")
    actor.until("read")
    node_sets.append(replace(stage.node_set, fingerprint="another list"))
    assert isinstance(actor.finish(), Grant)


def play_bid_for_a_lease_on_a_node_that_was_just_admitted(stage: Stage) -> ReplyKind:
    """A's lease is extended while n2 is blank; n2 is admitted, and before A comes again B asks for it."""
    a, b = stage.bidder(), stage.bidder()
    a.deliver(stage.nodes, 0, 1, 2)
    a.resume()
    stage.nodes[2].client.flushall()
    assert isinstance(extend_everywhere(stage, a), Grant)
    recoverer(stage.nodes).finish()
    return b.deliver(stage.nodes, 2)[2].kind


def test_node_is_admitted_with_the_locks_of_leases_that_are_extended(make_stage: MakeStage) -> None:
    """No waiter has the lock there. If another node forgets now, the lease still has a majority."""
    assert play_bid_for_a_lease_on_a_node_that_was_just_admitted(make_stage()) is ReplyKind.HELD


def test_node_without_the_locks_of_leases_gives_them_to_who_waits(make_stage: MakeStage) -> None:
    """Control: where only voters make locks again, the holder may find his lock taken for long."""
    mutant = without(
        "extend", "if refused and refused[1] ~= 'AMNESIA' and not restarted then", "if refused then"
    )
    assert play_bid_for_a_lease_on_a_node_that_was_just_admitted(make_stage(mutant)) is ReplyKind.GRANTED
