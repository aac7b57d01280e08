"""The scripts of the queue keep a free lock for the first waiter for a moment, and call that waiter."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from fencelock.authority.redlock.protocol.attempts import QueuePosition
from fencelock.authority.redlock.protocol.messages import Reply, ReplyKind
from proof.servers import Node
from tests.redlock.stage import NODE_KEY, OF_THE_NODE, Calls
from tests.redlock.test_scripts import NOT_EXTENDED, RECREATED, Scripts, key_of

CLAIM = 0.1
FIRST, SECOND, THIRD = (
    QueuePosition(f"client.{number}", waited=waited, fair=True) for number, waited in enumerate((3, 2, 1))
)


def later(position: QueuePosition) -> QueuePosition:
    return replace(position, waited=position.waited + 0.1)


@pytest.fixture
def scripts(shared_nodes: list[Node]) -> Iterator[Scripts]:
    shared_nodes[3].resume()
    made = Scripts(shared_nodes[3].url, 0)
    made.acquire("holder", "r")
    yield made
    made.real.close()


@pytest.fixture
def calls(scripts: Scripts) -> Iterator[Calls]:
    made = Calls(scripts.client)
    yield made
    made.close()


def queue_of(scripts: Scripts, resource: str = "r") -> list[str]:
    return [str(place) for place in scripts.client.zrange(f"{NODE_KEY}:q:{resource}", 0, -1)]


def test_released_lock_is_kept_for_the_first_in_line(scripts: Scripts, calls: Calls) -> None:
    assert scripts.queue("n2", "r", position=SECOND).kind is ReplyKind.HELD
    assert scripts.queue("n1", "r", position=FIRST).kind is ReplyKind.HELD
    assert scripts.release("holder", {"r": 1}).kind is ReplyKind.RELEASED
    refused = scripts.acquire("newcomer", "r")
    assert refused.kind is ReplyKind.HELD
    assert 0 < refused.ttl <= CLAIM
    scripts.client.pexpire(key_of("r"), 60_000)  # so that a slow machine makes no difference
    for nonce in ("n1", "holder"):  # a claim is no lock
        assert scripts.confirm(nonce, {"r": 1}).kind is ReplyKind.LOST
        assert scripts.release(nonce, {"r": 1}).kind is ReplyKind.LOST
    assert scripts.queue("n2", "r", position=SECOND).kind is ReplyKind.HELD
    assert scripts.queue("n1'", "r", position=later(FIRST)) == Reply(ReplyKind.GRANTED, 0, (2,))
    assert calls.heard() == ["0"]
    assert queue_of(scripts) == [SECOND.place]


def test_extension_makes_a_lock_again_where_a_claim_stands(scripts: Scripts, calls: Calls) -> None:
    """A majority has the lock, so the called client would be refused here.

    Waiters wait on, and are called at its end.
    """
    scripts.queue("n1", "r", position=FIRST)
    scripts.release("holder", {"r": 1})
    assert str(scripts.lock("r")).startswith(">")
    scripts.client.pexpire(key_of("r"), 5000)  # so that a slow machine makes no difference
    assert scripts.extend("elsewhere", "r", ttl=60) == RECREATED
    assert scripts.lock("r") == "elsewhere|0|restored"
    assert int(str(scripts.client.pttl(key_of("r")))) > 59_000
    assert scripts.queue("n1'", "r", position=later(FIRST)).kind is ReplyKind.HELD
    assert queue_of(scripts) == [FIRST.place]
    assert scripts.release("elsewhere", {"r": 2}).kind is ReplyKind.RELEASED
    assert calls.heard() == ["0", "0"]
    assert scripts.queue("n1''", "r", position=later(later(FIRST))) == Reply(ReplyKind.GRANTED, 0, (3,))


def test_extension_leaves_alone_what_only_looks_like_a_claim(scripts: Scripts) -> None:
    """Both values are foreign: another program's value without an end, and a lock granted to a client."""
    scripts.client.set(key_of("r"), ">something")
    assert scripts.extend("elsewhere", "r") == NOT_EXTENDED
    scripts.client.set(key_of("r"), ">n|0|1", px=50)
    assert scripts.extend("elsewhere", "r") == NOT_EXTENDED


def test_one_whom_nobody_hears_is_passed_over(scripts: Scripts, calls: Calls) -> None:
    scripts.queue("dead", "r", position=QueuePosition("another-client.0", waited=9))
    scripts.queue("n2", "r", position=SECOND)
    scripts.release("holder", {"r": 1})
    assert calls.heard() == ["1"]
    assert scripts.queue("n2'", "r", position=later(SECOND)).kind is ReplyKind.GRANTED


def test_order_is_by_the_bidders_clocks_where_they_are_right(scripts: Scripts) -> None:
    """So all nodes have one order, however the attempts arrived; a clock that is far off changes nothing."""
    now = time.time()
    for number, since in enumerate((now - 0.1, now - 0.3, now - 0.2, now + 3600, now - 3600)):
        scripts.queue(f"n{number}", "r", position=QueuePosition(f"client.{number}", waited=0.2, since=since))
    assert queue_of(scripts)[0] == "client.1"
    assert queue_of(scripts)[-1] == "client.0"


def test_release_of_nothing_calls_nobody(scripts: Scripts, calls: Calls) -> None:
    scripts.queue("n1", "r", position=FIRST)
    scripts.release("other", {"r": 0})
    assert calls.heard() == []
    assert queue_of(scripts) == [FIRST.place]
    scripts.give_up("n1", "r", position=FIRST)
    scripts.release("holder", {"r": 1})
    assert calls.heard() == []
    assert sorted(scripts.client.keys("*")) == OF_THE_NODE


def test_one_who_gives_up_leaves_the_queue(scripts: Scripts, calls: Calls) -> None:
    scripts.queue("n1", "r", position=FIRST)
    scripts.queue("n2", "r", position=SECOND)
    scripts.queue("n3", "r", position=THIRD)
    scripts.give_up("n2", "r", position=SECOND)
    assert queue_of(scripts) == [FIRST.place, THIRD.place]
    scripts.release("holder", {"r": 1})
    scripts.give_up("n1", "r", position=FIRST)
    assert calls.heard() == ["0", "2"]
    assert scripts.queue("n3'", "r", position=THIRD).kind is ReplyKind.GRANTED
    assert queue_of(scripts) == []


def test_one_who_gives_way_stays_in_line(scripts: Scripts, calls: Calls) -> None:
    """The client's votes were too few.

    All nodes call the client that has waited longest, be it the same one.
    """
    scripts.queue("n2", "r", position=SECOND)
    scripts.queue("n3", "r", position=THIRD)
    scripts.release("holder", {"r": 1})
    assert scripts.queue("n2'", "r", position=later(SECOND)).kind is ReplyKind.GRANTED
    scripts.give_up("n2'", "r", position=later(SECOND), stay=True)
    assert queue_of(scripts) == [THIRD.place]
    assert scripts.queue("n2''", "r", position=later(later(SECOND))).kind is ReplyKind.GRANTED
    scripts.queue("n1", "r", position=FIRST)
    scripts.give_up("n2''", "r", position=later(later(SECOND)), stay=True)
    assert calls.heard() == ["1", "1", "0"]
    assert queue_of(scripts) == [SECOND.place, THIRD.place]


def test_queue_is_bounded_and_ends(scripts: Scripts) -> None:
    """However many wait, a node keeps those that have waited longest, whenever they come.

    So all nodes keep the same. One that is full is kept alive like any other.
    """
    for number in range(1005):
        scripts.queue(f"n{number}", "r", position=QueuePosition(f"client.{number}", waited=number))
    queue = f"{NODE_KEY}:q:r"
    assert len(queue_of(scripts)) == 1000
    assert queue_of(scripts)[0] == "client.1004"
    assert "client.0" not in queue_of(scripts)
    assert 0 < int(str(scripts.client.pttl(queue))) <= 5000
    for number in (0, 1004):
        scripts.client.pexpire(queue, 100)
        scripts.queue(f"n{number}", "r", position=QueuePosition(f"client.{number}"))
        assert int(str(scripts.client.pttl(queue))) > 1000


def test_a_client_that_was_called_and_does_not_come_keeps_its_places_and_holds_up_none(
    scripts: Scripts, calls: Calls
) -> None:
    """It hears, and stands still. What comes after it is called, until it is heard of again."""
    still = Calls(scripts.client, "still")
    frozen = [QueuePosition(f"still.{number}", waited=10 - number, fair=True) for number in range(3)]
    for number, position in enumerate([*frozen, FIRST, SECOND]):
        scripts.queue(f"n{number}", "r", position=position)
    scripts.release("holder", {"r": 1})
    assert (still.heard(), calls.heard()) == (["0"], [])
    scripts.client.delete(key_of("r"))  # the claim ends
    assert scripts.queue("n4'", "r", position=later(SECOND)).kind is ReplyKind.HELD
    assert (still.heard(), calls.heard()) == ([], ["0"])
    assert scripts.queue("n3'", "r", position=later(FIRST)).kind is ReplyKind.GRANTED
    assert scripts.queue("n1'", "r", position=later(frozen[1])).kind is ReplyKind.HELD
    assert queue_of(scripts) == ["still.1", "still.2", "client.1"]
    scripts.release("n3'", {"r": 2})
    assert still.heard() == ["1"]
    still.close()


def test_a_lock_is_free_where_only_those_wait_who_do_not_come(scripts: Scripts, calls: Calls) -> None:
    """One more call of theirs would keep it from newcomers for nothing."""
    scripts.queue("n1", "r", position=FIRST)
    scripts.queue("n2", "r", position=SECOND)
    scripts.release("holder", {"r": 1})
    scripts.client.delete(key_of("r"))  # the claim ends
    assert scripts.acquire("newcomer", "r").kind is ReplyKind.GRANTED
    scripts.release("newcomer", {"r": 2})
    assert calls.heard() == ["0"]
    assert scripts.acquire("another", "r").kind is ReplyKind.GRANTED
    assert queue_of(scripts) == ["client.1"]


def test_free_lock_goes_to_who_has_waited_longest(scripts: Scripts, calls: Calls) -> None:
    """The holder's lease has run out, and no client was called.

    A waiter that comes early calls the first in line.
    """
    scripts.queue("n1", "r", position=FIRST)
    scripts.queue("n2", "r", position=SECOND)
    scripts.client.delete(key_of("r"))
    assert scripts.queue("n2'", "r", position=later(SECOND)).kind is ReplyKind.HELD
    assert calls.heard() == ["0"]
    assert scripts.queue("n1'", "r", position=later(FIRST)).kind is ReplyKind.GRANTED


def test_fair_newcomer_leaves_a_free_lock_to_those_who_wait(scripts: Scripts, calls: Calls) -> None:
    """So does a fair newcomer that is not going to wait. Any other newcomer takes the lock."""
    scripts.queue("n1", "r", position=FIRST)
    scripts.client.delete(key_of("r"))
    assert scripts.queue("fair", "r", position=QueuePosition(fair=True)).kind is ReplyKind.HELD
    assert calls.heard() == ["0"]
    scripts.queue("n2", "r", position=SECOND)
    scripts.client.delete(key_of("r"))
    assert scripts.acquire("newcomer", "r").kind is ReplyKind.GRANTED


def test_one_who_cannot_have_all_keeps_nothing_from_others(scripts: Scripts, calls: Calls) -> None:
    """It was called for one of two locks, and the other is held: the next for the first one is called."""
    scripts.acquire("other", "s")
    scripts.queue("n1", "r", "s", position=FIRST)
    scripts.queue("n2", "r", position=SECOND)
    scripts.release("holder", {"r": 1})
    assert scripts.queue("n1'", "r", "s", position=FIRST).kind is ReplyKind.HELD
    assert calls.heard() == ["0", "1"]
    assert queue_of(scripts, "s") == [FIRST.place]
    assert scripts.queue("n2'", "r", position=later(SECOND)).kind is ReplyKind.GRANTED


def test_user_who_may_not_publish_releases_all_the_same(scripts: Scripts, calls: Calls) -> None:
    scripts.queue("n1", "r", position=FIRST)
    scripts.client.acl_setuser("mute", enabled=True, nopass=True, keys=["*"], commands=["+@all"], reset=True)
    try:
        port = scripts.client.connection_pool.connection_kwargs["port"]
        mute = Scripts.__new__(Scripts)
        mute.node_set = scripts.node_set
        mute.real = type(scripts.real)(f"redis://mute:any@127.0.0.1:{port}")
        assert mute.release("holder", {"r": 1}).kind is ReplyKind.RELEASED
        mute.real.close()
    finally:
        scripts.client.acl_deluser("mute")
    assert calls.heard() == []
    assert scripts.lock("r") is None
