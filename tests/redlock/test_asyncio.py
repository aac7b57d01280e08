"""The asyncio driver loses no answer and no lock on real nodes, with many tasks, and loops that come and go.

These tests check the same as `test_faults.py` does with the blocking driver. They also check the cases that
only asyncio has: a task may be cancelled at any await, and a loop may end at any time.
"""

from __future__ import annotations

import asyncio
import gc
import random
import threading
import time
import weakref
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress

import pytest

from fencelock import Redlock
from fencelock.authority.base import Grant
from fencelock.authority.redlock.wire import nodes as wire_nodes
from fencelock.authority.redlock.wire.nodes import NodeConnections
from fencelock.errors import NodesNotInitialisedError, QuorumError
from proof.servers import Nodes
from tests.authorities.storm import Storm
from tests.polling import eventually
from tests.redlock.stage import SlowDoor
from tests.redlock.views import (
    Run,
    all_wait,
    becomes_free,
    connected,
    connections_to,
    is_held_everywhere,
    locks_on,
    soon,
    take,
)

pytestmark = [pytest.mark.timed, pytest.mark.usefixtures("no_noise")]


def no_connection_is_left(nodes: Nodes) -> bool:
    """Tell whether all loops that were thrown away have closed theirs."""
    gc.collect()  # each time: a thread that still connects may know its loop
    return connections_to(nodes) == 0


def test_loop_that_has_ended_is_thrown_away_with_its_connections(
    authority: Redlock, nodes: Nodes, run: Run
) -> None:
    """One to each node, also where the timer of its renewal is still to ring."""
    authority.close()
    assert eventually(lambda: connections_to(nodes) == 0)
    loops: list[weakref.ref[asyncio.AbstractEventLoop]] = []

    async def work() -> None:
        loops.append(weakref.ref(asyncio.get_running_loop()))
        await asyncio.gather(*(take(authority, f"r{number}") for number in range(50)))
        assert connections_to(nodes) == 1
        async with authority.lock("r"):
            pass

    for _ in range(3):
        run(work())
    assert eventually(lambda: no_connection_is_left(nodes))
    assert [loop() for loop in loops] == [None, None, None]


def test_close_ends_the_connections_of_a_loop_in_another_thread(authority: Redlock, nodes: Nodes) -> None:
    """The connections are closed where that may be done. A task that goes on is connected again."""
    ready, closed = threading.Event(), threading.Event()

    async def main() -> None:
        await take(authority)
        ready.set()
        await asyncio.to_thread(closed.wait)
        await take(authority)

    with ThreadPoolExecutor(1) as threads:
        done = threads.submit(asyncio.run, main())
        ready.wait()
        authority.close()
        assert eventually(lambda: connections_to(nodes) == 0)
        closed.set()
        done.result()


@pytest.mark.long
def test_loop_that_is_closed_without_farewell_leaves_no_socket_behind(
    authority: Redlock, nodes: Nodes
) -> None:
    """Tasks still wait, and are not cancelled: the next loop closes everything, or the end of the first."""

    async def wait(resource: str) -> None:
        # Fair, because another attempt may be granted while the task waits, for no caller.
        await authority.aio.acquire((resource,), ttl=30, timeout=None, fair=True)

    def hears_all() -> bool:
        return not authority.aio.here()._nodes.absent

    # Two resources: the first is kept, for a moment, for a task that is no more.
    for resource, next_loop in (("r1", True), ("r2", False)):
        authority.close()
        loop = asyncio.new_event_loop()
        loop.run_until_complete(take(authority, "other"))
        with authority.lock(resource):
            # Else the task may be granted the lock of a node that the holder was not connected to yet.
            assert is_held_everywhere(nodes.urls, resource)
            task = loop.create_task(wait(resource))
            assert loop.run_until_complete(soon(hears_all))
            loop.run_until_complete(asyncio.sleep(0.2))
            task._log_destroy_pending = False  # type: ignore[attr-defined] # it is, and we know
            loop.close()
        authority._connections.close()
        assert eventually(lambda: connections_to(nodes) == 1)
        if next_loop:
            asyncio.run(take(authority, "other"))
        else:
            del task, loop
        assert eventually(lambda: no_connection_is_left(nodes))
    assert eventually(lambda: locks_on(nodes) == [])


def test_loop_that_is_closed_while_a_task_waits_for_answers_can_go(authority: Redlock, nodes: Nodes) -> None:
    """Nothing that knows the connections keeps it in memory."""
    loop = asyncio.new_event_loop()
    loop.run_until_complete(connected(authority))
    for node in nodes:
        node.pause()
    try:
        task = loop.create_task(authority.aio.acquire(("r",), ttl=30, timeout=0))
        loop.run_until_complete(asyncio.sleep(0.05))
        task._log_destroy_pending = False  # type: ignore[attr-defined] # it is, and we know
        loop.close()
        known = weakref.ref(loop)
        del task, loop
        gc.collect()
        assert known() is None
    finally:
        for node in nodes:
            node.resume()
    assert eventually(lambda: no_connection_is_left(nodes))


@pytest.mark.long
@pytest.mark.parametrize("hang", [False, True], ids=["all answer", "some hang"])
def test_storm_of_cancellations_leaves_no_lock_and_no_place_in_line(
    authority: Redlock, nodes: Nodes, run: Run, *, hang: bool
) -> None:
    """Also where nodes hang again and again, for longer than a client waits: what hangs hears all."""
    chance, storm = random.Random(11), Storm(authority)

    async def let_nodes_hang() -> None:
        hung = chance.sample(list(nodes), chance.choice([1, 2, 5]))
        for node in hung:
            node.pause()
        await asyncio.sleep(chance.uniform(0.05, 0.8))
        for node in hung:
            node.resume()

    async def main() -> None:
        raging = asyncio.ensure_future(storm.rage(tasks=200, seconds=1.5))
        while not raging.done():
            if hang:
                await let_nodes_hang()
            await asyncio.sleep(chance.uniform(0.1, 0.5))
        await raging
        assert await becomes_free(nodes)
        known = authority.aio.here()
        assert not known._in_line
        assert not known.queue._places
        assert await soon(lambda: all(all_wait(nodes, 0, resource) for resource in storm.tokens))
        await storm.check()

    run(main())


@pytest.mark.long
def test_node_that_hangs_hears_of_every_lock_that_it_is_to_grant(nodes: Nodes, run: Run) -> None:
    """However many it has been asked for, and however many come and go while it hangs.

    Also where its connection breaks meanwhile.
    """

    async def main(authority: Redlock) -> None:
        await connected(authority)
        nodes[0].pause()
        grants: list[Grant] = await asyncio.gather(
            *(authority.aio.acquire((f"r{number}",), ttl=60, timeout=0) for number in range(600))
        )
        known = authority.aio.here()._nodes
        hung = known.connection(0)
        assert hung is not None
        await asyncio.sleep(1.05)
        before = len(hung.unanswered)
        await asyncio.gather(*(take(authority, f"other{number}") for number in range(800)))
        assert len(hung.unanswered) == before
        assert all(await asyncio.gather(*map(authority.aio.release, grants)))
        nonces = {grant.proof.attempt.nonce for grant in grants}
        assert {sent.command.nonce for sent in hung.unanswered if sent.command.script == "release"} == nonces
        known.broken(0, "gone")
        await asyncio.gather(*(take(authority, f"other{number}") for number in range(800)))
        assert known._nodes[0].pending_releases.keys() >= nonces
        nodes[0].resume()
        assert await becomes_free(nodes)

    # So much patience that all of them are asked for before the node counts as silent, on a slow machine too.
    with Redlock(nodes.urls, node_timeout=1.0) as authority:
        authority.init(base=0)
        run(main(authority))


async def release_while_away(authority: Redlock, nodes: Nodes) -> NodeConnections:
    """Release a lock that the first node has, while it hangs and there is no connection to it."""
    await connected(authority)
    mine = await authority.aio.acquire(("mine",), ttl=60, timeout=0)
    assert await soon(lambda: any(lock.startswith("0: ") for lock in locks_on(nodes)))
    known = authority.aio.here()._nodes
    assert await soon(lambda: (hung := known.connection(0)) is not None and not hung.unanswered)
    nodes[0].pause()
    known.broken(0, "gone")
    assert await authority.aio.release(mine) is True
    assert mine.proof.attempt.nonce in known._nodes[0].pending_releases
    return known


def test_node_that_is_away_hears_of_every_lock_that_it_has(
    authority: Redlock, nodes: Nodes, run: Run
) -> None:
    """However many come and go meanwhile that it was not asked for, as long as they are not too many."""

    async def main() -> None:
        known = await release_while_away(authority, nodes)
        for _ in range(3):
            await asyncio.gather(*(take(authority, f"other{number}") for number in range(500)))
        assert known.connection(0) is None
        assert len(known._nodes[0].pending_releases) <= wire_nodes.MOST_PENDING
        nodes[0].resume()
        for _ in range(100):
            await take(authority)
            if not locks_on(nodes):
                break
            await asyncio.sleep(0.05)
        assert not locks_on(nodes)

    run(main())


def test_acquisition_that_is_cancelled_while_connecting_is_forgotten(nodes: Nodes, run: Run) -> None:
    """The waiting tasks use the connections at once. The cancelled acquisitions have locked nothing."""
    with (
        closing(SlowDoor(nodes[0].port)) as door,
        Redlock(f"redis://127.0.0.1:{door.port}", connect_timeout=30.0) as authority,
    ):
        with Redlock(nodes.urls[0]) as other:
            other.init(base=0)

        async def main() -> None:
            tasks = [asyncio.ensure_future(take(authority, f"r{number}")) for number in range(10)]
            await asyncio.sleep(0.05)
            for task in tasks[1:]:
                task.cancel()
            door.open.set()
            outcomes = await asyncio.gather(*tasks, return_exceptions=True)
            assert outcomes[0] == 1
            assert all(isinstance(outcome, asyncio.CancelledError) for outcome in outcomes[1:])

        run(main())
        assert eventually(lambda: locks_on(nodes) == [])


def test_loop_that_ends_while_connecting_leaves_no_connection(nodes: Nodes, run: Run) -> None:
    """The connection comes up when the loop's tasks are gone."""
    with closing(SlowDoor(nodes[0].port)) as door:
        authority = Redlock(f"redis://127.0.0.1:{door.port}")

        async def main() -> None:
            with suppress(TimeoutError):
                async with asyncio.timeout(0.05):
                    await take(authority)

        run(main())
        gc.collect()
        door.open.set()
        assert eventually(
            lambda: not any(thread.name.startswith("fencelock-connect") for thread in threading.enumerate())
        )
        assert eventually(lambda: connections_to(nodes) == 0)


def test_silence_of_a_majority_is_waited_for_once_by_all_tasks_together(
    authority: Redlock, nodes: Nodes, run: Run
) -> None:
    """100 tasks have their answer after the patience, and those that come later have it at once."""

    async def fail() -> float:
        began = time.monotonic()
        with pytest.raises(QuorumError):
            await authority.aio.acquire((f"r{began}",), ttl=30, timeout=0)
        return time.monotonic() - began

    async def main() -> None:
        await take(authority)
        for node in nodes[:3]:
            node.pause()
        durations = await asyncio.gather(*(fail() for _ in range(100)))
        assert 0.25 < min(durations) <= max(durations) < 100 * 0.3 / 10
        later = [await asyncio.gather(*(fail() for _ in range(100))) for _ in range(3)]
        assert min(map(max, later)) < 0.25
        for node in nodes[:3]:
            node.resume()
        assert await becomes_free(nodes)

    run(main())


def test_nodes_that_answer_slowly_lose_no_answer(nodes: Nodes, run: Run) -> None:
    """They pause again and again, for less than the patience: every acquisition comes to its end.

    The loop may end while a minority has not read the last RELEASEs. It keeps those locks until their ttl.
    """
    with Redlock(nodes.urls, node_timeout=2.0) as authority:
        authority.init(base=0)
        stop = threading.Event()

        def stutter() -> None:
            while not stop.is_set():
                for node in nodes:
                    node.pause()
                stop.wait(0.1)
                for node in nodes:
                    node.resume()
                stop.wait(0.02)

        async def main() -> None:
            tokens = [await asyncio.gather(*(take(authority, f"r{n}") for n in range(50))) for _ in range(5)]
            for of_one in zip(*tokens, strict=True):
                assert list(of_one) == sorted(set(of_one))

        with ThreadPoolExecutor(1) as threads:
            done = threads.submit(stutter)
            try:
                run(main())
            finally:
                stop.set()
                done.result()
        left = Counter(line.split()[1] for line in locks_on(nodes))
        assert max(left.values(), default=0) <= 2


def test_loop_that_comes_to_no_end_of_its_turn_takes_no_node_for_silent(nodes: Nodes, run: Run) -> None:
    """So many tasks are under way at once that answers lie unread for longer than the patience."""
    with Redlock(nodes.urls, node_timeout=0.2) as authority:
        authority.init(base=0)

        async def work(number: int) -> int:
            time.sleep(0.004)  # noqa: ASYNC251 - what the loop does else in the same turn
            return await take(authority, f"r{number}", timeout=0)

        async def main() -> None:
            await connected(authority)
            tokens = await asyncio.gather(*map(work, range(200)))
            assert min(tokens) > 0

        run(main())
        assert eventually(lambda: not locks_on(nodes)), locks_on(nodes)


@pytest.mark.long
def test_full_socket_delays_and_loses_nothing(nodes: Nodes, run: Run) -> None:
    """More is written to a node that hangs than its socket takes: the rest follows, in order."""
    with Redlock(nodes.urls[:3], node_timeout=30.0) as authority:
        authority.init(base=0)
        resources = [tuple(f"{task}-{number}-{'x' * 200}" for number in range(40)) for task in range(500)]

        async def main() -> None:
            await take(authority)
            connections = authority.aio.here()
            nodes[0].pause()
            grants = [await authority.aio.acquire(some, ttl=60, timeout=0) for some in resources]
            assert connections._congested == {0}
            hung = connections._nodes.connection(0)
            nodes[0].resume()
            for grant in grants:
                assert await authority.aio.release(grant) is True
            assert connections._nodes.connection(0) is hung
            assert await becomes_free(nodes)

        run(main())


def test_node_that_owes_too_much_is_not_asked(
    nodes: Nodes, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However much is asked within the patience, no more than so much is kept for a node that hangs."""
    monkeypatch.setattr(wire_nodes, "_MOST_UNANSWERED", 50)

    async def main() -> None:
        await take(authority)
        nodes[0].pause()
        for number in range(300):
            await take(authority, f"r{number}")
        hung = authority.aio.here()._nodes.connection(0)
        assert hung is not None
        assert 50 <= len(hung.unanswered) <= 101
        nodes[0].resume()
        assert await becomes_free(nodes)

    with Redlock(nodes.urls, node_timeout=30.0) as authority:
        authority.init(base=0)
        run(main())


def test_nodes_are_initialised_on_demand_only_where_asked_for(
    nodes: Nodes, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FENCELOCK_AUTO_INIT counts here as well; otherwise the error says what to do."""

    async def main() -> None:
        async with Redlock(nodes.urls).aio as aio:
            monkeypatch.delenv("FENCELOCK_AUTO_INIT", raising=False)
            with pytest.raises(NodesNotInitialisedError, match="fencelock init"):
                await aio.acquire(("r",), ttl=5, timeout=0)
            monkeypatch.setenv("FENCELOCK_AUTO_INIT", "1")
            assert await aio.release(await aio.acquire(("r",), ttl=5, timeout=0))
            assert not await aio.init()

    run(main())


def test_a_look_that_a_signal_handler_strikes_is_planned_again(nodes: Nodes, run: Run) -> None:
    """By the next broadcast; and looks do not become more, however busy the loop is."""
    looks: list[float] = []

    async def main() -> None:
        authority = Redlock(nodes.urls[:1], node_timeout=0.3, outage_grace=0)
        authority.init(base=0)
        connections = authority.aio.here()
        look = connections._look
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)

        def strike(due: float) -> None:
            looks.append(due)
            if len(looks) == 1:
                raise InterruptedError
            look(due)

        connections._look = strike  # type: ignore[method-assign]
        await authority.aio.release(await authority.aio.acquire(("a",), ttl=9, timeout=0))
        looks.clear()
        nodes[0].pause()
        try:
            async with asyncio.timeout(5):
                first = asyncio.ensure_future(authority.aio.acquire(("a",), ttl=9, timeout=0))
                await asyncio.sleep(0.05)
                for _ in range(10):
                    time.sleep(0.03)  # noqa: ASYNC251 - a busy loop
                    second = asyncio.ensure_future(authority.aio.acquire(("b",), ttl=9, timeout=0))
                    await asyncio.sleep(0)
                results = await asyncio.gather(first, second, return_exceptions=True)
        finally:
            nodes[0].resume()
        assert [type(each) for each in results] == [QuorumError, QuorumError]
        assert 1 < len(looks) < 60
        await authority.aio.close()
        authority.close()

    run(main())
