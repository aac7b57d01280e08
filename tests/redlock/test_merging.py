"""Commands of many tasks merged into one: who hears what, and what happens where a node does not do all.

That the script does as the others do one after the other is held by `tests/simulation/test_conformance.py`.
"""

from __future__ import annotations

import asyncio
import math
import time
from typing import Any

import pytest
import redis
from hypothesis import given
from hypothesis import strategies as st

from fencelock import Redlock
from fencelock.authority.base import Grant
from fencelock.authority.redlock.merging import MOST, Batch, Gathering, may_be_merged
from fencelock.authority.redlock.node import Link, Node
from fencelock.authority.redlock.protocol import (
    Answer,
    Bid,
    Broadcast,
    Command,
    Said,
    Turn,
    _acquire_command,
    _enough_granted,
    _is_clear,
    _release_command,
)
from fencelock.authority.redlock.seats import Ballot
from fencelock.embedded import Nodes
from fencelock.errors import QuorumError
from tests.polling import eventually
from tests.redlock.stage import NODE_KEY, RealNode, fleet_of
from tests.redlock.views import Run, becomes_free, connected, soon, take

FLEET = fleet_of("list", 5)
SILENT = Answer(Said.SILENT)
GONE = Answer(Said.UNREACHABLE, detail="gone")
RELEASED = Answer(Said.RELEASED)

pytestmark = pytest.mark.usefixtures("no_noise", "one_tick")


def request_for(resource: str, *, release: bool = False, nonce: str = "n", **options: Any) -> Broadcast:
    """Return the request to acquire or release one lock on all five nodes."""
    bid = Bid.of(FLEET, (resource,), nonce, 30.0, **options)
    if release:
        return Broadcast(
            _release_command(FLEET, bid, 0, (0,)), FLEET.everybody, _is_clear(FLEET, Said.RELEASED), 1.0, 3
        )
    return Broadcast(_acquire_command(bid, FLEET), FLEET.everybody, _enough_granted(FLEET, {}), 1.0, 3)


class Ears:
    """Hears what a batch does not tell its parts."""

    def __init__(self) -> None:
        self.late: list[tuple[int, Command]] = []
        self.single: list[tuple[int, Ballot]] = []

    def note_late(self, node: int, commands: Any) -> None:
        """Note commands whose grants nobody waits for."""
        self.late += [(node, command) for command in commands]

    def note_single(self, node: int, parts: Any, answer: Answer) -> None:
        """Note parts that the node has not done; where it is gone, tell them, as the driver does."""
        if answer is GONE:
            for ballot, _ in parts:
                if not ballot.over:
                    ballot.hear(node, answer)
        else:
            self.single += [(node, ballot) for ballot, _ in parts]


#: What a node may say of three parts, the second of which is a release.
told = st.one_of(
    st.just(Answer(Said.MERGED, 0, (5, 1, 6))),
    st.just(Answer(Said.MERGED, 0, (5, 1, 6))),
    st.builds(
        lambda epoch, *codes: Answer(Said.MERGED, epoch, codes),
        st.integers(0, 1),
        st.integers(0, 2),
        st.integers(0, 1),
        st.integers(0, 2),
    ),
    st.sampled_from([GONE, Answer(Said.SINGLY), Answer(Said.ERROR, detail="no memory")]),
)


def singly(answer: Answer, index: int) -> Answer | None:
    """Return what the node said of one part; None where it has not done it."""
    if answer is GONE:
        return GONE
    if answer.said is not Said.MERGED or not answer.counters[index]:
        return None
    return RELEASED if index == 1 else Answer(Said.GRANTED, answer.epoch, (answer.counters[index],))


@given(
    answers=st.lists(told, min_size=1, max_size=5),
    order=st.permutations(range(5)),
    over=st.tuples(*[st.booleans()] * 3),
    told_at=st.integers(0, 5),
)
def test_every_part_hears_what_each_node_said_of_it(
    answers: list[Answer], order: list[int], over: tuple[bool, ...], told_at: int
) -> None:
    """However alike the answers are and whoever has gone meanwhile; and nobody hears it later than needed."""
    requests = [request_for("a"), request_for("b", release=True), request_for("c")]
    ballots, expected = [Ballot(request) for request in requests], [Ballot(request) for request in requests]
    for ballot, its_over in zip(ballots, over, strict=True):
        ballot.over = its_over
    ears = Ears()
    gathering = Gathering()
    assert all(map(gathering.add, ballots, requests))
    batch = Batch(gathering, len(answers), FLEET.quorum, ears.note_late, ears.note_single)
    late, undone = [], []
    for step, (node, answer) in enumerate(zip(order, answers, strict=False)):
        if step == told_at:
            batch.tell_held()
        batch.hear(node, answer)
        for index, ballot in enumerate(ballots):
            single = singly(answer, index)
            if single is None:
                undone.append((node, ballot))
            elif not ballot.over:
                expected[index].hear(node, single)
            elif single.said is Said.GRANTED:
                late.append((node, requests[index].command))
        assert [ballot.complete for ballot in ballots] == [ballot.complete for ballot in expected]
    batch.tell_held()
    assert [ballot.answers for ballot in ballots] == [ballot.answers for ballot in expected]
    by_node = {"key": lambda pair: (pair[0], id(pair[1]))}
    assert sorted(ears.late, **by_node) == sorted(late, **by_node)  # type: ignore[call-overload]
    assert sorted(ears.single, **by_node) == sorted(undone, **by_node)  # type: ignore[call-overload]


def test_everyday_requests_may_be_merged_and_no_others() -> None:
    """One lock, every node, no hint, no place in line, nothing minted anew."""
    assert may_be_merged(request_for("a"), 5)
    assert may_be_merged(request_for("a", release=True), 5)
    waiting = Turn("client.1", 0.5, 100.0)
    assert not may_be_merged(request_for("a", turn=waiting), 5)
    assert not may_be_merged(request_for("a", turn=waiting, release=True), 5)
    assert not may_be_merged(request_for("a", turn=Turn(fair=True)), 5)
    assert not may_be_merged(request_for("a")._replace(nodes=[0]), 5)
    bid = Bid.of(FLEET, ("a",), "n", 30.0)
    for other in (
        Bid.of(FLEET, ("a", "b"), "n", 30.0),
        bid.not_below(0, (7,)),
        bid.anew(type("Granted", (), {"bid": bid, "epoch": 0, "counters": (3,)})()),
    ):
        assert not may_be_merged(request_for("a")._replace(command=_acquire_command(other, FLEET)), 5)


def test_a_gathering_takes_no_lock_twice_and_no_two_lists() -> None:
    """What would have to be executed in an order goes out one after the other; and no call is too large."""
    gathering = Gathering()

    def add(request: Broadcast) -> bool:
        return gathering.add(Ballot(request), request)

    assert add(request_for("a"))
    assert not add(request_for("a", release=True))
    assert add(request_for("b", release=True, nonce="m"))
    assert gathering.releasing == {"m"}
    other = request_for("c")
    command = other.command
    assert not add(other._replace(command=command._replace(arguments=("other", *command.arguments[1:]))))
    assert all(add(request_for(f"r{number}")) for number in range(MOST - 2))
    assert not add(request_for("one too many"))
    assert len(gathering.command().keys) == 1 + MOST


def calls_of_scripts(nodes: Nodes) -> list[int]:
    """Return how many scripts each node has been called for."""
    counts = []
    for node in nodes:
        with redis.Redis.from_url(node.url) as client:
            facts: Any = client.info("commandstats")
            counts.append(
                sum(facts.get(f"cmdstat_{verb}", {"calls": 0})["calls"] for verb in ("evalsha", "eval"))
            )
    return counts


async def take_all(authority: Redlock, count: int = 60, prefix: str = "r") -> list[int]:
    """Acquire and release so many locks at the same time; return the tokens."""
    return await asyncio.gather(*(take(authority, f"{prefix}{number}") for number in range(count)))


def test_what_tasks_ask_for_at_the_same_time_is_one_call(authority: Redlock, nodes: Nodes, run: Run) -> None:
    """Sixty tasks acquire and release on each node in a few calls; each has a token of its own."""

    async def main() -> None:
        await connected(authority)
        before = calls_of_scripts(nodes)
        assert len(await take_all(authority)) == 60
        assert await becomes_free(nodes)
        calls = [now - then for then, now in zip(before, calls_of_scripts(nodes), strict=True)]
        assert max(calls) < 60, calls

    run(main())


def test_nodes_begin_while_tasks_still_ask(authority: Redlock, nodes: Nodes, run: Run) -> None:
    """A call that is full goes out at once: here the loop does not come round before the nodes have it."""

    async def main() -> None:
        await connected(authority)
        before = calls_of_scripts(nodes)

        def calls() -> list[int]:
            return [now - then for then, now in zip(before, calls_of_scripts(nodes), strict=True)]

        acquisitions = [
            authority.aio.acquire((f"r{number}",), ttl=30, timeout=0) for number in range(MOST + 1)
        ]
        for acquisition in acquisitions[: MOST - 1]:
            acquisition.send(None)
        time.sleep(0.1)  # noqa: ASYNC251 - for the loop not to come round
        assert calls() == [0] * 5
        for acquisition in acquisitions[MOST - 1 :]:
            acquisition.send(None)
        deadline = time.monotonic() + 10
        while calls() != [1] * 5:
            assert time.monotonic() < deadline, calls()
            time.sleep(0.01)  # noqa: ASYNC251 - the same
        for acquisition in acquisitions:
            acquisition.close()
        assert await becomes_free(nodes)

    run(main())


def test_every_node_has_all_locks_in_the_end(authority: Redlock, nodes: Nodes, run: Run) -> None:
    """Also those whose answers came after the majority's."""

    def count(url: str) -> int:
        with redis.Redis.from_url(url) as client:
            keys: Any = client.keys(f"{NODE_KEY}:l:r*")
            return len(keys)

    async def main() -> None:
        await connected(authority)
        grants: list[Grant] = await asyncio.gather(
            *(authority.aio.acquire((f"r{number}",), ttl=30, timeout=0) for number in range(40))
        )
        assert await soon(lambda: [count(node.url) for node in nodes] == [40] * 5)
        assert all(await asyncio.gather(*map(authority.aio.release, grants)))
        assert await becomes_free(nodes)

    run(main())


def test_locks_that_others_hold_are_refused_and_the_rest_granted(
    authority: Redlock, rival: Redlock, nodes: Nodes, run: Run
) -> None:
    """In one call, each by itself: who is refused waits, and gets the lock when it is free."""
    held = [rival.acquire((f"r{number}",), ttl=30, timeout=0) for number in range(0, 20, 3)]

    async def main() -> None:
        await take(authority)
        tasks = [asyncio.create_task(take(authority, f"r{number}")) for number in range(20)]
        free = [task for number, task in enumerate(tasks) if number % 3]
        await asyncio.wait_for(asyncio.gather(*free), 10)
        waiting = [task for number, task in enumerate(tasks) if number % 3 == 0]
        assert not any(task.done() for task in waiting)
        for grant in held:
            assert await asyncio.to_thread(rival.release, grant)
        tokens = await asyncio.wait_for(asyncio.gather(*waiting), 10)
        assert all(token > grant.tokens[0] for token, grant in zip(tokens, held, strict=True))
        assert await becomes_free(nodes)

    run(main())


def test_same_lock_of_several_tasks_goes_from_one_to_the_next(
    authority: Redlock, nodes: Nodes, run: Run
) -> None:
    """Asked for in one tick, together with others: the tokens of that lock are as different as ever."""

    async def main() -> None:
        await take(authority)
        same = (take(authority, "same") for _ in range(8))
        tokens, _ = await asyncio.gather(asyncio.gather(*same), take_all(authority, 30))
        assert len(set(tokens)) == 8
        assert await becomes_free(nodes)

    run(main())


@pytest.mark.parametrize("number", [0, 4])
def test_node_that_lost_its_memory_takes_no_part(
    authority: Redlock, nodes: Nodes, run: Run, number: int
) -> None:
    """It says so of every lock, also of those that were merged, and stays blank."""

    async def main() -> None:
        await take(authority)
        with redis.Redis.from_url(nodes[number].url) as client:
            client.flushall()
            assert len(await take_all(authority)) == 60
            keys: Any = client.keys(f"{NODE_KEY}:*")
            assert keys == []

    with Redlock(authority.nodes, recover=False) as authority:  # noqa: PLR1704 - one that does not mend it
        run(main())


def test_node_that_forgot_its_scripts_is_brought_them(authority: Redlock, nodes: Nodes, run: Run) -> None:
    """A merged command goes out again with its text, on the same socket."""

    async def main() -> None:
        await take_all(authority)
        for node in nodes:
            with redis.Redis.from_url(node.url) as client:
                client.script_flush()
        tokens = await take_all(authority)
        assert min(tokens) >= 2
        assert await becomes_free(nodes)

    run(main())


def test_user_who_may_not_execute_merged_commands_gets_on_without(nodes: Nodes, run: Run) -> None:
    """MGET is asked for by no other script: it costs a round trip once, and no answer is lost."""
    for node in nodes:
        with redis.Redis.from_url(node.url) as client:
            client.acl_setuser(
                "worker",
                enabled=True,
                nopass=True,
                keys=["*"],
                channels=["*"],
                categories=["+@all"],
                commands=["-mget"],
            )
    urls = [url.replace("redis://", "redis://worker:x@") for url in nodes.urls]
    with Redlock(nodes.urls) as authority:
        authority.init(base=0)
    with Redlock(urls) as authority:

        async def main() -> None:
            for _ in range(3):
                assert len(await take_all(authority)) == 60
            links = [seat.link for seat in authority.aio._lines_here()._seats]
            assert [link is not None and link.merges for link in links] == [False] * 5
            assert await becomes_free(nodes)

        try:
            run(main())
        finally:
            for node in nodes:
                with redis.Redis.from_url(node.url) as client:
                    client.acl_deluser("worker")


def test_node_without_room_grants_nothing_and_still_releases(
    authority: Redlock, nodes: Nodes, run: Run
) -> None:
    """Merged with ACQUIREs that it refuses, a RELEASE is executed all the same."""

    async def main() -> None:
        await take(authority)
        held: list[Grant] = await asyncio.gather(
            *(authority.aio.acquire((f"held{number}",), ttl=60, timeout=0) for number in range(10))
        )
        with redis.Redis.from_url(nodes[0].url) as client:
            before = client.config_get("maxmemory")["maxmemory"]
            client.config_set("maxmemory", 1)
            try:
                released, tokens = await asyncio.gather(
                    asyncio.gather(*map(authority.aio.release, held)), take_all(authority, 30)
                )
                assert all(released)
                assert len(tokens) == 30
                assert await becomes_free(nodes)
            finally:
                client.config_set("maxmemory", before)
        assert len(await take_all(authority, 30)) == 30

    run(main())


def test_cancelled_tasks_leave_no_lock_on_a_node_that_answers_late(
    authority: Redlock, nodes: Nodes, run: Run
) -> None:
    """What it grants afterwards, of a merged command whose tasks have gone, is released."""

    async def main() -> None:
        await connected(authority)
        for node in nodes[:2]:
            node.pause()
        tasks = [asyncio.create_task(authority.aio.acquire((f"r{n}",), ttl=60, timeout=9)) for n in range(40)]
        await asyncio.sleep(0)  # they have asked
        for task in tasks[::2]:
            task.cancel()
        grants = [
            grant
            for grant in await asyncio.gather(*tasks, return_exceptions=True)
            if isinstance(grant, Grant)
        ]
        assert len(grants) >= 20
        assert all(await asyncio.gather(*map(authority.aio.release, grants)))
        for node in nodes[:2]:
            node.resume()
        assert await becomes_free(nodes)

    run(main())


def test_grants_whose_release_is_under_way_are_not_released_twice(
    authority: Redlock, nodes: Nodes, run: Run
) -> None:
    """Two nodes answer only when all is over: they have had one call to acquire, and one to release."""

    async def main() -> None:
        await connected(authority)
        await becomes_free(nodes)
        before = calls_of_scripts(nodes)
        for node in nodes[3:]:
            node.pause()
        grants: list[Grant] = await asyncio.gather(
            *(authority.aio.acquire((f"r{number}",), ttl=60, timeout=0) for number in range(20))
        )
        assert all(await asyncio.gather(*map(authority.aio.release, grants)))
        for node in nodes[3:]:
            node.resume()
        assert await becomes_free(nodes)
        links = [seat.link for seat in authority.aio._lines_here()._seats]
        assert await soon(lambda: not any(link is not None and link.waiting for link in links))
        calls = [now - then for then, now in zip(before, calls_of_scripts(nodes), strict=True)]
        assert calls == [2] * 5

    run(main())


def test_link_that_breaks_owes_the_parts_of_what_was_merged(
    authority: Redlock, nodes: Nodes, run: Run
) -> None:
    """Each of them is released when there is a link again; and until then everybody has heard of it."""

    async def main() -> None:
        await connected(authority)
        lines = authority.aio._lines_here()
        nodes[0].pause()
        grants: list[Grant] = await asyncio.gather(
            *(authority.aio.acquire((f"r{number}",), ttl=60, timeout=0) for number in range(20))
        )
        nonces = {grant.proof.bid.nonce for grant in grants}
        assert all(await asyncio.gather(*map(authority.aio.release, grants)))
        lines._drop(0, GONE)
        assert lines._seats[0].owed.keys() >= nonces
        nodes[0].resume()
        assert await becomes_free(nodes)

    run(main())


def test_connections_that_are_closed_between_asking_and_writing_are_heard_of(
    authority: Redlock, nodes: Nodes, run: Run
) -> None:
    """Who has asked in this very tick tries again over new ones, and does not wait for an answer."""

    async def main() -> None:
        await connected(authority)
        lines = authority.aio._lines_here()
        tasks = [asyncio.create_task(take(authority, f"r{number}")) for number in range(10)]
        await asyncio.sleep(0)
        assert len(lines._gathering.parts) == 10
        await authority.aio.close()
        assert all(asking.complete for asking in lines._asking)
        assert len(await asyncio.gather(*tasks)) == 10
        assert await becomes_free(nodes)

    run(main())


def test_what_cannot_be_merged_does_not_overtake(authority: Redlock, nodes: Nodes, run: Run) -> None:
    """Two locks at once, one of which was given back in the same tick by another task: they are free."""

    async def main() -> None:
        for number in range(10):
            grant = await authority.aio.acquire(("a",), ttl=60, timeout=0)
            released, both = await asyncio.gather(
                authority.aio.release(grant), authority.aio.acquire(("a", f"b{number}"), ttl=60, timeout=0)
            )
            assert released
            assert await authority.aio.release(both)
        assert await becomes_free(nodes)

    run(main())


def test_answers_of_a_minority_are_told_when_the_patience_ends(
    authority: Redlock, nodes: Nodes, run: Run
) -> None:
    """Two of five have granted, and were held back: the error says so, and their locks go."""

    async def main() -> None:
        await connected(authority)
        for node in nodes[:3]:
            node.pause()
        outcomes = await asyncio.gather(
            *(authority.aio.acquire((f"r{number}",), ttl=30, timeout=0) for number in range(10)),
            return_exceptions=True,
        )
        for outcome in outcomes:
            said = list(getattr(outcome, "nodes", {}).values())
            assert sum("granted" in word for word in said) == 2, said
        for node in nodes[:3]:
            node.resume()
        assert await becomes_free(nodes)

    run(main())


def test_where_every_vote_must_prove_its_server_nothing_is_merged(nodes: Nodes, run: Run) -> None:
    """The script would refuse, and so it is not sent."""
    with Redlock(nodes.urls, verify="vote") as authority:
        authority.init(base=0)

        async def main() -> None:
            await connected(authority)
            before = calls_of_scripts(nodes)
            await take_all(authority, 20)
            assert await becomes_free(nodes)
            calls = [now - then for then, now in zip(before, calls_of_scripts(nodes), strict=True)]
            assert min(calls) >= 40, calls

        run(main())
    station = RealNode(nodes[0].url)
    membership = station.link.identity.membership
    station.link.close()
    station.link = Node(nodes[0].url, 2.0, verify_votes=True).open(NODE_KEY)
    assert membership is not None
    gathering = Gathering()
    for name in ("a", "b"):
        request = request_for(name)
        arguments = (membership.fingerprint, *request.command.arguments[1:])
        request = request._replace(command=request.command._replace(arguments=arguments))
        assert gathering.add(Ballot(request), request)
    assert station.execute(gathering.command()) == Answer(Said.SINGLY)
    station.close()


def test_majority_of_which_one_answers_by_itself_is_told_at_once(
    authority: Redlock, nodes: Nodes, run: Run
) -> None:
    """Two merged answers and a single one are three: they are not held back, waiting for nodes that hang."""

    async def main() -> None:
        await connected(authority)
        lines = authority.aio._lines_here()
        link = lines._seats[0].link
        assert link is not None
        link.merges = False
        for node in nodes[3:]:
            node.pause()
        grants: list[Grant] = await asyncio.wait_for(
            asyncio.gather(
                *(authority.aio.acquire((f"r{number}",), ttl=30, timeout=0) for number in range(5))
            ),
            10.0,
        )
        assert all(await asyncio.gather(*map(authority.aio.release, grants)))
        for node in nodes[3:]:
            node.resume()
        assert await becomes_free(nodes)

    with Redlock(authority.nodes, node_timeout=30.0) as authority:  # noqa: PLR1704 - one with much patience
        run(main())


@pytest.mark.parametrize("fresh", [0.0, 60.0])
@pytest.mark.parametrize("count", [1, 3])
def test_release_after_the_loop_was_busy_says_who_held_it(  # noqa: PLR0917 - what pytest hands in
    authority: Redlock, nodes: Nodes, run: Run, count: int, fresh: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Grants that came late are not undone, be they read just before the release is put together or after.

    The release would hear that it had been before.
    """
    monkeypatch.setattr("fencelock.authority.redlock.multiplex.FRESH", fresh)

    def locks(number: int) -> list[str]:
        return [f"{NODE_KEY}:l:r{lock}" for lock in range(count)] if number < 5 else []

    async def main() -> None:
        await connected(authority)
        for node in nodes[3:]:
            node.pause()
        grants: list[Grant] = await asyncio.gather(
            *(authority.aio.acquire((f"r{number}",), ttl=30, timeout=0) for number in range(count))
        )
        for node in nodes[3:]:
            node.resume()
        for number, node in enumerate(nodes):  # which blocks the loop
            with redis.Redis.from_url(node.url) as client:
                assert eventually(lambda: client.exists(*locks(number)) == count)  # noqa: B023 - at once
                if number < 2:
                    client.delete(*locks(number))
        assert await asyncio.gather(*map(authority.aio.release, grants)) == [True] * count
        assert await becomes_free(nodes)

    run(main())


def test_key_that_somebody_else_has_written_is_left_alone(authority: Redlock, nodes: Nodes, run: Run) -> None:
    """A list is no lock, and is not there for MGET: it is not granted away; the error is ACQUIRE's own."""

    async def main() -> None:
        await connected(authority)
        for node in nodes:
            with redis.Redis.from_url(node.url) as client:
                client.rpush(f"{NODE_KEY}:l:r1", "foreign")
        first, second, third = await asyncio.gather(
            *(authority.aio.acquire((f"r{number}",), ttl=30, timeout=0) for number in range(3)),
            return_exceptions=True,
        )
        assert isinstance(second, QuorumError)
        assert "WRONGTYPE" in str(second)
        assert isinstance(first, Grant)
        assert isinstance(third, Grant)
        for node in nodes:
            with redis.Redis.from_url(node.url) as client:
                assert client.type(f"{NODE_KEY}:l:r1") == b"list"
                client.delete(f"{NODE_KEY}:l:r1")
        assert all(await asyncio.gather(*map(authority.aio.release, (first, third))))
        assert await becomes_free(nodes)

    run(main())


class Interruption(Exception):  # noqa: N818 - what a signal handler raises
    """Comes at any line."""


@pytest.mark.parametrize("count", [2, MOST])
def test_link_whose_writing_was_interrupted_is_not_used_again(
    authority: Redlock, nodes: Nodes, run: Run, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """Between noting what is to be answered, and what is to be written: answers would be taken for others.

    Where the call is full, it is the last task that is interrupted, and gives up over the same links.
    """
    put = Link.put
    left = [1]

    def patched(link: Link, sent: Any, packed: bytes) -> None:
        if left:
            left.pop()
            link.unsent = Interrupting()
        put(link, sent, packed)

    class Interrupting(list[bytes]):
        interrupts = True

        def append(self, data: bytes, /) -> None:
            if self.interrupts:
                self.interrupts = False
                raise Interruption
            super().append(data)

    async def main() -> None:
        await connected(authority)
        await becomes_free(nodes)
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)
        lines = authority.aio._lines_here()
        links = [seat.link for seat in lines._seats]
        monkeypatch.setattr(Link, "put", patched)
        first = await asyncio.gather(
            *(authority.aio.acquire((f"a{number}",), ttl=30, timeout=0.5) for number in range(count)),
            return_exceptions=True,
        )
        assert not left
        for turn in range(3):
            tokens = await take_all(authority, 2, f"b{turn}-")
            assert tokens == [1, 1]
        assert sum(seat.link is not link for seat, link in zip(lines._seats, links, strict=True)) == 1
        assert all([await authority.aio.release(grant) for grant in first if isinstance(grant, Grant)])
        assert await becomes_free(nodes)

    run(main())


@pytest.mark.parametrize("where", ["looking", "planning"])
def test_interrupted_look_leaves_nobody_waiting(
    authority: Redlock, nodes: Nodes, run: Run, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Who waits for nodes that hang is told when the patience ends, whatever a signal handler has raised."""

    async def main() -> None:
        await connected(authority)
        await becomes_free(nodes)
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda *_: None)
        lines = authority.aio._lines_here()
        look, left = lines._look, [1]

        def patched(now: float) -> None:
            if left and lines._asking:
                left.pop()
                raise Interruption
            look(now)

        def interrupt(*_: object, **__: object) -> None:
            raise Interruption

        if where == "looking":
            monkeypatch.setattr(lines, "_look", patched)
        else:
            lines._looks_at = math.inf
            with monkeypatch.context() as patch:
                patch.setattr("fencelock.authority.redlock.multiplex.max", interrupt, raising=False)
                with pytest.raises(Interruption):
                    await authority.aio.acquire(("z",), ttl=30, timeout=0)
        for node in nodes[:3]:
            node.pause()
        waiting = (authority.aio.acquire((name,), ttl=30, timeout=0) for name in "xy")
        outcomes = await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 10.0)
        assert all(isinstance(outcome, QuorumError) for outcome in outcomes), outcomes
        for node in nodes[:3]:
            node.resume()
        assert await becomes_free(nodes)

    run(main())
