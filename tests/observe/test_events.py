"""A lock, its renewal, its authority and the guard tell their events, on nodes and on each database."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest

from fencelock import (
    LockLostError,
    LockTimeoutError,
    QuorumError,
    Redlock,
    fenced,
    forget,
    on_event,
    take_over,
)
from fencelock.observe import (
    ConnectionFailed,
    ConnectionOpened,
    Event,
    LeaseExtended,
    LeaseLost,
    LockAcquired,
    LockEvent,
    LockNotAcquired,
    LockReleased,
    TokenReminted,
)
from proof.servers import Nodes
from tests.observe.conftest import TWO_KINDS
from tests.polling import IMPATIENT, eventually

ONE_KIND = pytest.mark.parametrize("kind", ["sqlite"], indirect=True)


def kinds_of(events: list[Event]) -> list[str]:
    return [type(event).__name__ for event in events if isinstance(event, LockEvent)]


def only(events: list[Event], kind: type[Any]) -> Any:
    (found,) = [event for event in events if type(event) is kind]
    return found


def test_a_lock_tells_that_it_was_acquired_and_released(mine: Any, events: list[Event]) -> None:
    with mine.lock("order:1", "order:2") as tokens, mine.lock("order:1"):
        time.sleep(0.05)
    assert kinds_of(events) == ["LockAcquired", "LockReleased"]
    for event in events:
        if isinstance(event, LockEvent):
            assert (event.authority, event.resources, event.template) == (mine, ("order:1", "order:2"), "")
    acquired, released = only(events, LockAcquired), only(events, LockReleased)
    assert acquired.tokens == released.tokens == tokens
    assert 0 < acquired.waited < 5
    assert not acquired.had_to_wait
    assert 0.05 <= released.held < 5
    assert (released.end, released.error) == ("released", None)


def test_a_timeout_is_told_with_the_error_of_the_caller(mine: Any, other: Any, events: list[Event]) -> None:
    with other.lock("order:1"):
        events.clear()
        with pytest.raises(LockTimeoutError) as refused:
            mine.lock("order:1").acquire(timeout=2)
    assert kinds_of(events)[:2] == ["LockWaiting", "LockNotAcquired"]
    event = only(events, LockNotAcquired)
    assert (event.outcome, event.error) == ("timeout", refused.value)
    assert event.waited >= 2
    assert event.had_to_wait


@TWO_KINDS
def test_a_task_that_is_cancelled_while_it_leaves_has_released(mine: Any, events: list[Event]) -> None:
    async def work(inside: asyncio.Event) -> None:
        async with mine.lock("order:1"):
            inside.set()

    async def main() -> None:
        task = asyncio.create_task(work(inside := asyncio.Event()))
        await inside.wait()
        task.cancel()
        await asyncio.wait([task])
        await mine.aio.close()

    asyncio.run(main())
    assert kinds_of(events) == ["LockAcquired", "LockReleased"]
    assert only(events, LockReleased).end == "released"


@TWO_KINDS
@pytest.mark.parametrize("gives_up", ["a task that is cancelled", "a thread that another one calls off"])
def test_an_acquisition_that_is_given_up_is_neither_an_error_nor_a_timeout(
    mine: Any, other: Any, events: list[Event], gives_up: str
) -> None:
    lock = mine.lock("order:1", timeout=None)

    def is_waiting() -> bool:
        return kinds_of(events)[-1:] == ["LockWaiting"]

    async def cancel_a_task() -> None:
        task = asyncio.create_task(lock.aio.acquire())
        await asyncio.to_thread(eventually, is_waiting)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        await mine.aio.close()

    with other.lock("order:1"), ThreadPoolExecutor(1) as pool:
        events.clear()
        if "task" in gives_up:
            asyncio.run(cancel_a_task())
        else:
            waiting = pool.submit(lock.acquire)
            assert eventually(is_waiting)
            lock.cancel()
            assert isinstance(waiting.exception(), LockTimeoutError)
    assert only(events, LockNotAcquired).outcome == "cancelled"


@TWO_KINDS
def test_a_new_token_and_the_next_holder_of_a_lock_are_told(
    mine: Any, other: Any, events: list[Event]
) -> None:
    lock = mine.lock("order:1")
    lock.acquire()
    token = lock.remint()
    with take_over(lock.hand_over(), authority=other):
        pass
    assert kinds_of(events) == [
        "LockAcquired",
        "TokenReminted",
        "LockReleased",
        "LockAcquired",
        "LockReleased",
    ]
    assert only(events, TokenReminted).tokens == (token,)
    assert {event.tokens for event in events if isinstance(event, LockReleased)} == {(token,)}


@TWO_KINDS
def test_a_release_that_is_broken_off_is_told_once(
    mine: Any, events: list[Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    release_gen = mine.release_gen

    def strike(grant: object) -> Iterator[Any]:
        monkeypatch.undo()
        yield from release_gen(grant)
        raise InterruptedError

    monkeypatch.setattr(mine, "release_gen", strike)
    with pytest.raises(InterruptedError), mine.lock("order:1"):
        pass
    assert kinds_of(events) == ["LockAcquired", "LockReleased"]
    assert only(events, LockReleased).end == "released"


@TWO_KINDS
@pytest.mark.timed
def test_each_extension_is_told_with_its_lateness(mine: Any, events: list[Event]) -> None:
    with mine.lock("order:1", ttl=3):
        assert eventually(lambda: any(isinstance(event, LeaseExtended) for event in events))
    for event in events:
        if isinstance(event, LeaseExtended):
            assert (event.outcome, event.ttl, event.error) == ("extended", 3, None)
            assert 0 <= event.lateness < 3


@TWO_KINDS
@pytest.mark.timed
def test_the_end_of_max_hold_is_told_once(mine: Any, events: list[Event]) -> None:
    with mine.lock("order:1", ttl=2, max_hold=2.5, if_lost="warn"):
        assert eventually(lambda: any(isinstance(event, LeaseLost) for event in events))
    lost = only(events, LeaseLost)
    assert lost.reason == "max_hold"
    assert "max_hold" in lost.detail
    assert only(events, LockReleased).end == "max_hold"


@TWO_KINDS
@pytest.mark.timed
def test_a_lease_that_nothing_extends_is_lost_when_its_block_is_left(mine: Any, events: list[Event]) -> None:
    with pytest.raises(LockLostError), mine.lock("order:1", ttl=0.2, renew=False):
        time.sleep(0.3)
    assert only(events, LeaseLost).reason == "expired"
    assert only(events, LockReleased).end == "lost"


@ONE_KIND
def test_events_have_the_template_of_a_decorated_function(mine: Any, events: list[Event]) -> None:
    """Metrics are labelled by it, because there are as many resources as orders."""

    @fenced("order:{order_id}", authority=mine)
    def ship(order_id: int) -> int:
        return order_id

    assert ship(7) == 7
    assert {event.template for event in events if isinstance(event, LockEvent)} == {"order:{order_id}"}
    assert only(events, LockAcquired).resources == ("order:7",)


def test_connections_are_told_without_passwords(mine: Any, events: list[Event]) -> None:
    with mine.lock("order:1"):
        pass
    opened = [event for event in events if isinstance(event, ConnectionOpened)]
    assert {event.authority for event in opened} == {type(mine).__name__}
    assert all(event.endpoint in repr(mine) for event in opened)


def test_failed_connections_are_told_and_no_majority_is_an_error(
    make_nodes: Callable[..., Nodes], events: list[Event]
) -> None:
    nodes = make_nodes(1)
    with Redlock(nodes.urls, **IMPATIENT) as authority:
        authority.init()
        nodes[0].kill()
        with pytest.raises(QuorumError):
            authority.lock("order:1").acquire(timeout=1)
    failed = [event for event in events if isinstance(event, ConnectionFailed)]
    assert {event.endpoint for event in failed} >= set(authority.nodes)
    assert only(events, LockNotAcquired).outcome == "error"


@ONE_KIND
def test_listener_that_fails_changes_nothing(
    mine: Any, events: list[Event], caplog: pytest.LogCaptureFixture
) -> None:
    @on_event
    def fails(_event: Event) -> None:
        raise RuntimeError("of a listener")

    try:
        with mine.lock("order:1"):
            pass
    finally:
        forget(fails)
    assert kinds_of(events) == ["LockAcquired", "LockReleased"]
    assert "of a listener" in caplog.text


@ONE_KIND
def test_lock_acquired_before_anything_listened(mine: Any) -> None:
    """Its release is not told: a gauge would go below zero."""
    found: list[Event] = []
    with mine.lock("order:1"):
        on_event(found.append)
    forget(found.append)
    assert not [event for event in found if isinstance(event, LockReleased)]
