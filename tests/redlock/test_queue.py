"""The queue on a node, by its scripts alone: whom a lock is kept for, who is called, what that may cost."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from fencelock.authority.redlock.protocol.acquire import _acquire_command
from fencelock.authority.redlock.protocol.bids import Bid, Turn
from fencelock.authority.redlock.protocol.messages import Answer, Said
from fencelock.authority.redlock.protocol.undo import undoing
from fencelock.embedded import Node
from fencelock.token import MAX_COUNTER
from tests.polling import eventually
from tests.redlock.stage import NODE_KEY, OF_THE_NODE, Calls, stripe_of
from tests.redlock.test_scripts import MADE_AGAIN, NOT_EXTENDED, Scripts, key_of

CLAIM = 0.1
FIRST, SECOND, THIRD = (
    Turn(f"client.{number}", waited=waited, fair=True) for number, waited in enumerate((3, 2, 1))
)


def later(turn: Turn) -> Turn:
    """Return the turn of the next bid, which has waited longer."""
    return replace(turn, waited=turn.waited + 0.1)


@pytest.fixture
def scripts(shared_nodes: list[Node]) -> Iterator[Scripts]:
    """One node with counters from 0, on which `holder` has the lock of r."""
    shared_nodes[3].resume()
    made = Scripts(shared_nodes[3].url, 0)
    made.acquire("holder", "r")
    yield made
    made.real.close()


@pytest.fixture
def calls(scripts: Scripts) -> Iterator[Calls]:
    """What the client of FIRST, SECOND and THIRD hears."""
    made = Calls(scripts.client)
    yield made
    made.close()


def queue_of(scripts: Scripts, resource: str = "r") -> list[str]:
    """Return the places that wait on the node, in order."""
    return [str(place) for place in scripts.client.zrange(f"{NODE_KEY}:q:{resource}", 0, -1)]


def test_released_lock_is_kept_for_the_first_in_line(scripts: Scripts, calls: Calls) -> None:
    """It alone is called; everybody else is refused, for as long as its claim lasts."""
    assert scripts.queue("n2", "r", turn=SECOND).said is Said.HELD
    assert scripts.queue("n1", "r", turn=FIRST).said is Said.HELD
    assert scripts.release("holder", {"r": 1}).said is Said.RELEASED
    refused = scripts.acquire("newcomer", "r")
    assert refused.said is Said.HELD
    assert 0 < refused.ttl <= CLAIM
    assert scripts.queue("n2", "r", turn=SECOND).said is Said.HELD
    assert scripts.queue("n1'", "r", turn=later(FIRST)) == Answer(Said.GRANTED, 0, (2,))
    assert [call for call in calls.heard() if " " not in call] == ["0"]
    assert queue_of(scripts) == [SECOND.place]


def test_claim_never_lasts_longer_than_a_moment(scripts: Scripts, calls: Calls) -> None:
    """One who was called and does not come, for its process is hung: after that anybody may have the lock."""
    scripts.queue("n1", "r", turn=FIRST)
    scripts.release("holder", {"r": 1})
    assert int(str(scripts.client.pttl(key_of("r")))) <= CLAIM * 1000
    assert eventually(lambda: scripts.acquire("newcomer", "r").said is Said.GRANTED)
    assert calls.heard() == ["0"]


def test_claim_is_no_lock(scripts: Scripts, calls: Calls) -> None:
    """Nobody can confirm or release it, not even whom it is for."""
    scripts.queue("n1", "r", turn=FIRST)
    scripts.release("holder", {"r": 1})
    for nonce in ("n1", "holder"):
        assert scripts.confirm(nonce, {"r": 1}).said is Said.LOST
        assert scripts.release(nonce, {"r": 1}).said is Said.LOST
    assert scripts.acquire("newcomer", "r").said is Said.HELD
    assert calls.heard() == ["0"]


def test_extension_makes_a_lock_again_where_a_claim_stands(scripts: Scripts, calls: Calls) -> None:
    """A majority has it, so who was called here would be refused; they wait on, and are called at its end."""
    scripts.queue("n1", "r", turn=FIRST)
    scripts.release("holder", {"r": 1})
    assert str(scripts.lock("r")).startswith(">")
    scripts.client.pexpire(key_of("r"), 5000)  # so that a slow machine makes no difference
    assert scripts.extend("elsewhere", "r", ttl=60) == MADE_AGAIN
    assert scripts.lock("r") == "elsewhere|0|restored"
    assert int(str(scripts.client.pttl(key_of("r")))) > 59_000
    assert scripts.queue("n1'", "r", turn=later(FIRST)).said is Said.HELD
    assert queue_of(scripts) == [FIRST.place]
    assert scripts.release("elsewhere", {"r": 2}).said is Said.RELEASED
    assert calls.heard() == ["0", "0"]
    assert scripts.queue("n1''", "r", turn=later(later(FIRST))) == Answer(Said.GRANTED, 0, (3,))


def test_extension_leaves_alone_what_only_looks_like_a_claim(scripts: Scripts) -> None:
    """Another program's value without an end, and a lock of somebody who was granted it: both are foreign."""
    scripts.client.set(key_of("r"), ">something")
    assert scripts.extend("elsewhere", "r") == NOT_EXTENDED
    scripts.client.set(key_of("r"), ">n|0|1", px=50)
    assert scripts.extend("elsewhere", "r") == NOT_EXTENDED


def test_one_whom_nobody_hears_is_passed_over(scripts: Scripts, calls: Calls) -> None:
    """A process that died costs nothing: the next in line is called in its place."""
    scripts.queue("dead", "r", turn=Turn("another-client.0", waited=9))
    scripts.queue("n2", "r", turn=SECOND)
    scripts.release("holder", {"r": 1})
    assert calls.heard() == ["1"]
    assert scripts.queue("n2'", "r", turn=later(SECOND)).said is Said.GRANTED


def test_order_is_by_the_bidders_clocks_where_they_are_right(scripts: Scripts) -> None:
    """So all nodes have one order, however the bids arrived; a clock that is far off changes nothing."""
    now = time.time()
    for number, since in enumerate((now - 0.1, now - 0.3, now - 0.2, now + 3600, now - 3600)):
        scripts.queue(f"n{number}", "r", turn=Turn(f"client.{number}", waited=0.2, since=since))
    assert queue_of(scripts)[0] == "client.1"
    assert queue_of(scripts)[-1] == "client.0"


def test_lock_that_nobody_waits_for_is_free_at_once(scripts: Scripts, calls: Calls) -> None:
    """And nothing but the marker is left on the node."""
    scripts.release("holder", {"r": 1})
    assert calls.heard() == []
    assert sorted(scripts.client.keys("*")) == OF_THE_NODE


def test_release_of_nothing_calls_nobody(scripts: Scripts, calls: Calls) -> None:
    """Losers would wake losers for ever."""
    scripts.queue("n1", "r", turn=FIRST)
    scripts.release("other", {"r": 0})
    assert calls.heard() == []
    assert queue_of(scripts) == [FIRST.place]


def test_one_who_gives_up_leaves_the_queue(scripts: Scripts, calls: Calls) -> None:
    """It is not called any more; and what was kept for it goes to the next at once."""
    scripts.queue("n1", "r", turn=FIRST)
    scripts.queue("n2", "r", turn=SECOND)
    scripts.queue("n3", "r", turn=THIRD)
    scripts.give_up("n2", "r", turn=SECOND)
    assert queue_of(scripts) == [FIRST.place, THIRD.place]
    scripts.release("holder", {"r": 1})
    scripts.give_up("n1", "r", turn=FIRST)
    assert [call for call in calls.heard() if " " not in call] == ["0", "2"]
    assert scripts.queue("n3'", "r", turn=THIRD).said is Said.GRANTED
    assert queue_of(scripts) == []


def test_one_who_gives_way_stays_in_line(scripts: Scripts, calls: Calls) -> None:
    """Its votes were too few. All nodes call the same next one: whoever has waited longest, be it itself."""
    scripts.queue("n2", "r", turn=SECOND)
    scripts.queue("n3", "r", turn=THIRD)
    scripts.release("holder", {"r": 1})
    assert scripts.queue("n2'", "r", turn=later(SECOND)).said is Said.GRANTED
    scripts.give_up("n2'", "r", turn=later(SECOND), stay=True)
    assert queue_of(scripts) == [THIRD.place]
    assert scripts.queue("n2''", "r", turn=later(later(SECOND))).said is Said.GRANTED
    scripts.queue("n1", "r", turn=FIRST)
    scripts.give_up("n2''", "r", turn=later(later(SECOND)), stay=True)
    assert [call for call in calls.heard() if " " not in call] == ["1", "1", "0"]
    assert queue_of(scripts) == [SECOND.place, THIRD.place]


def test_second_in_line_is_told_when_to_look(scripts: Scripts, calls: Calls) -> None:
    """Should the first never come. Where it has not waited for long, that call is spared."""
    scripts.queue("n1", "r", turn=FIRST)
    scripts.queue("n2", "r", turn=SECOND)
    scripts.release("holder", {"r": 1})
    assert calls.heard() == ["0", f"1 {round(CLAIM * 1000)}"]
    scripts.client.delete(key_of("r"), f"{NODE_KEY}:q:r")
    scripts.acquire("holder", "r")
    scripts.queue("n1", "r", turn=FIRST)
    scripts.queue("n2", "r", turn=Turn(SECOND.place, waited=0.0))
    scripts.release("holder", {"r": 1})
    assert calls.heard() == ["0"]


def test_queue_is_bounded_and_ends(scripts: Scripts) -> None:
    """However many wait, a node keeps the first 128, and not for longer than anybody waits unheard."""
    for number in range(140):
        scripts.queue(f"n{number}", "r", turn=Turn(f"client.{number}"))
    assert len(queue_of(scripts)) == 128
    assert 0 < int(str(scripts.client.pttl(f"{NODE_KEY}:q:r"))) <= 5000


def test_free_lock_goes_to_who_has_waited_longest(scripts: Scripts, calls: Calls) -> None:
    """The holder's lease has run out, nobody was called: one in line who comes early calls the first."""
    scripts.queue("n1", "r", turn=FIRST)
    scripts.queue("n2", "r", turn=SECOND)
    scripts.client.delete(key_of("r"))
    assert scripts.queue("n2'", "r", turn=later(SECOND)).said is Said.HELD
    assert [call for call in calls.heard() if " " not in call] == ["0"]
    assert scripts.queue("n1'", "r", turn=later(FIRST)).said is Said.GRANTED


def test_fair_newcomer_leaves_a_free_lock_to_those_who_wait(scripts: Scripts, calls: Calls) -> None:
    """Also one who is not going to wait; any other newcomer takes it."""
    scripts.queue("n1", "r", turn=FIRST)
    scripts.client.delete(key_of("r"))
    assert scripts.queue("fair", "r", turn=Turn(fair=True)).said is Said.HELD
    assert calls.heard() == ["0"]
    time.sleep(CLAIM * 1.2)
    scripts.queue("n2", "r", turn=SECOND)
    scripts.client.delete(key_of("r"))
    assert scripts.acquire("newcomer", "r").said is Said.GRANTED


def test_first_in_line_takes_a_free_lock_at_once(scripts: Scripts, calls: Calls) -> None:
    """Nobody needs to call the one that is here."""
    scripts.queue("n1", "r", turn=FIRST)
    scripts.queue("n2", "r", turn=SECOND)
    scripts.client.delete(key_of("r"))
    assert scripts.queue("n1'", "r", turn=later(FIRST)).said is Said.GRANTED
    assert calls.heard() == []
    assert queue_of(scripts) == [SECOND.place]


def test_one_who_cannot_have_all_keeps_nothing_from_others(scripts: Scripts, calls: Calls) -> None:
    """It was called for one of two locks, and the other is held: the next for the first one is called."""
    scripts.acquire("other", "s")
    scripts.queue("n1", "r", "s", turn=FIRST)
    scripts.queue("n2", "r", turn=SECOND)
    scripts.release("holder", {"r": 1})
    assert scripts.queue("n1'", "r", "s", turn=FIRST).said is Said.HELD
    assert [call for call in calls.heard() if " " not in call] == ["0", "1"]
    assert queue_of(scripts, "s") == [FIRST.place]
    assert scripts.queue("n2'", "r", turn=later(SECOND)).said is Said.GRANTED


def test_user_who_may_not_publish_releases_all_the_same(scripts: Scripts, calls: Calls) -> None:
    """Nobody hears it, so nothing is kept for anybody."""
    scripts.queue("n1", "r", turn=FIRST)
    scripts.client.acl_setuser("mute", enabled=True, nopass=True, keys=["*"], commands=["+@all"], reset=True)
    try:
        port = scripts.client.connection_pool.connection_kwargs["port"]
        mute = Scripts.__new__(Scripts)
        mute.fleet = scripts.fleet
        mute.real = type(scripts.real)(f"redis://mute:any@127.0.0.1:{port}")
        assert mute.release("holder", {"r": 1}).said is Said.RELEASED
        mute.real.close()
    finally:
        scripts.client.acl_deluser("mute")
    assert calls.heard() == []
    assert scripts.lock("r") is None


def test_blank_node_keeps_no_queue(scripts: Scripts) -> None:
    """It stays blank, whoever bids there or gives way."""
    scripts.client.flushall()
    assert scripts.queue("n1", "r", turn=FIRST).said is Said.AMNESIA
    scripts.give_up("n1", "r", turn=FIRST, stay=True)
    scripts.give_up("n1", "r", turn=FIRST)
    assert scripts.client.keys("*") == []


FRESH = Turn("client.7", waited=1)


def test_fresh_bid_is_granted_by_the_release(scripts: Scripts, calls: Calls) -> None:
    """Its ACQUIRE is executed as if it had arrived just then: lock, ttl and counter are those of a grant."""
    assert scripts.queue("n7", "r", turn=FRESH).said is Said.HELD
    assert scripts.release("holder", {"r": 5}).said is Said.RELEASED
    assert calls.heard() == ["7 = 0 6 n7"]
    assert scripts.lock("r") == "n7|0|6"
    assert scripts.counter("r") == 6
    assert 29_000 < int(str(scripts.client.pttl(key_of("r")))) <= 30_000
    assert scripts.queue("n7", "r", turn=FRESH) == Answer(Said.GRANTED, 0, (6,))
    assert scripts.confirm("n7", {"r": 6}).said is Said.CONFIRMED
    assert scripts.give_up("n7", "r", turn=FRESH).said is Said.RELEASED
    assert eventually(lambda: sorted(scripts.client.keys("*")) == OF_THE_NODE, 2.0)


@pytest.mark.parametrize("fair", [False, True])
def test_bid_that_comes_after_its_own_release_is_nobodys(
    scripts: Scripts, calls: Calls, *, fair: bool
) -> None:
    """They went over two connections: it gets neither lock nor place, whether the lock is held or free."""
    turn = Turn("client.7", waited=1, fair=fair)
    scripts.give_up("n7", "r", turn=turn)
    assert scripts.queue("n7", "r", turn=turn).said is Said.HELD
    assert queue_of(scripts) == []
    scripts.release("holder", {"r": 1})
    assert scripts.queue("n7", "r", turn=turn).said is Said.HELD
    assert scripts.lock("r") is None
    assert calls.heard() == []


def test_bid_that_comes_after_a_later_one_is_nobodys(scripts: Scripts, calls: Calls) -> None:
    """The bidder gave way and bids again: only the new bid may be granted."""
    scripts.give_up("n7", "r", turn=Turn("client.7", waited=1.0), stay=True)
    assert scripts.queue("n8", "r", turn=Turn("client.7", waited=1.5)).said is Said.HELD
    assert scripts.queue("n7", "r", turn=Turn("client.7", waited=1.0)).said is Said.HELD
    scripts.release("holder", {"r": 1})
    assert scripts.lock("r") == "n8|0|2"
    assert calls.heard() == ["7 = 0 2 n8"]


def test_bid_that_is_not_fresh_is_called_only(scripts: Scripts, calls: Calls) -> None:
    """Its bidder may be hung by now: the lock is kept for the moment of a claim, not for a ttl."""
    scripts.queue("n7", "r", turn=FRESH)
    time.sleep(0.08)
    scripts.release("holder", {"r": 1})
    assert scripts.lock("r") in {f">{FRESH.place}", None}
    assert calls.heard() == ["7"]
    assert scripts.counter("r") == 1


def test_bid_is_not_granted_where_nobody_hears(scripts: Scripts) -> None:
    """Its bidder is dead: the lock is free at once."""
    scripts.queue("n7", "r", turn=FRESH)
    scripts.release("holder", {"r": 1})
    assert scripts.lock("r") is None


def test_bid_of_one_who_gave_way_is_not_granted(scripts: Scripts, calls: Calls) -> None:
    """It has been released, and must not come to life again; its place is called in its turn."""
    scripts.queue("n7", "r", turn=FRESH)
    scripts.give_up("n7", "r", turn=FRESH, stay=True)
    scripts.release("holder", {"r": 1})
    assert scripts.lock("r") == f">{FRESH.place}"
    assert calls.heard() == ["7"]


def undo(scripts: Scripts, nonce: str, resource: str, turn: Turn) -> Answer:
    """Give up a bid whose answer will never come, over a new connection."""
    bid = Bid.of(scripts.fleet, (resource,), nonce, 30.0, turn)
    (command,) = undoing(_acquire_command(bid, scripts.fleet), None)
    return scripts.real.execute(command)


def test_bid_that_is_undone_is_not_granted(scripts: Scripts, calls: Calls) -> None:
    """It was on the node when the connection broke: only its place is called, whose bidder may go on."""
    scripts.queue("n7", "r", turn=FRESH)
    assert undo(scripts, "n7", "r", FRESH).said is Said.LOST
    scripts.release("holder", {"r": 1})
    assert scripts.lock("r") == f">{FRESH.place}"
    assert calls.heard() == ["7"]


def test_bid_that_comes_after_it_was_undone_is_nobodys(scripts: Scripts, calls: Calls) -> None:
    """It was under way on the connection that broke; nor did the undoing give it a place."""
    undo(scripts, "n7", "r", FRESH)
    assert queue_of(scripts) == []
    assert scripts.queue("n7", "r", turn=FRESH).said is Said.HELD
    assert queue_of(scripts) == []
    scripts.release("holder", {"r": 1})
    assert scripts.lock("r") is None
    assert calls.heard() == []


@pytest.mark.parametrize("by", ["undo", "release"])
def test_bid_that_is_over_leaves_a_later_one_alone(scripts: Scripts, calls: Calls, by: str) -> None:
    """The bidder bids again meanwhile: what comes late about the bid before does not count."""
    scripts.queue("n7", "r", turn=FRESH)
    assert scripts.queue("n8", "r", turn=later(FRESH)).said is Said.HELD
    if by == "undo":
        undo(scripts, "n7", "r", FRESH)
    else:
        scripts.give_up("n7", "r", turn=FRESH, stay=True)
    scripts.release("holder", {"r": 1})
    assert scripts.lock("r") == "n8|0|2"
    assert calls.heard() == ["7 = 0 2 n8"]


@pytest.mark.parametrize("turn", [Turn("client.7", fair=True), Turn("client.7")], ids=["fair", "short"])
def test_fair_and_short_bids_are_called_only(scripts: Scripts, calls: Calls, turn: Turn) -> None:
    """A fair queue must lose no more than a claim on one that hangs; a short ttl would be used up."""
    ttl = 30.0 if turn.fair else 0.5
    bid = Bid.of(scripts.fleet, ("r",), "n7", ttl, turn)
    scripts.real.execute(_acquire_command(bid, scripts.fleet))
    scripts.release("holder", {"r": 1})
    assert scripts.lock("r") == ">client.7"
    assert calls.heard() == ["7"]


def test_node_that_fell_back_to_an_older_state_grants_no_parked_bid(scripts: Scripts, calls: Calls) -> None:
    """Marker, lock, queue and bid come back together, and name the server process of then: P1 broke here."""
    scripts.queue("n7", "r", turn=FRESH)
    then = "0" * 40
    scripts.client.hset(NODE_KEY, "r", then)
    parked = f"{NODE_KEY}:p:{FRESH.place}"
    bid = str(scripts.client.get(parked))
    run_id = scripts.real.link.identity.run_id
    assert run_id in bid
    scripts.client.set(parked, bid.replace(run_id, then), keepttl=True)
    before = scripts.counter("r")
    assert scripts.give_up("holder", "r").said is Said.RELEASED
    assert scripts.lock("r") == f">{FRESH.place}"
    assert calls.heard() == ["7"]
    assert scripts.counter("r") == before


@pytest.mark.parametrize(
    "change",
    [{"r": "another-run"}, {"cfg": "another"}, {"next": "new"}, {f"c{stripe_of('r')}": str(MAX_COUNTER)}],
    ids=["restarted", "other list", "closed", "full"],
)
def test_node_that_would_not_vote_grants_no_parked_bid(
    scripts: Scripts, calls: Calls, change: dict[str, str]
) -> None:
    """What ACQUIRE would refuse is refused here too: then it is a call and nothing more."""
    scripts.queue("n7", "r", turn=FRESH)
    for name, value in change.items():
        scripts.client.hset(NODE_KEY, name, value)
    before = scripts.counter("r")
    scripts.give_up("holder", "r")
    assert scripts.lock("r") == f">{FRESH.place}"
    assert calls.heard() == ["7"]
    assert scripts.counter("r") == before
