"""A lock, its renewal, its authority and the guard tell their events, on nodes and on each database."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
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
from tests.polling import IMPATIENT, eventually

#: For what the lock does itself, above its authority.
TWO_KINDS = pytest.mark.parametrize("kind", ["quorum", "sqlite"], indirect=True)


def kinds_of(events: list[Event]) -> list[str]:
    """Return the names of what was told about locks."""
    return [type(event).__name__ for event in events if isinstance(event, LockEvent)]


def only(events: list[Event], kind: type[Any]) -> Any:
    (found,) = [event for event in events if type(event) is kind]
    return found


def test_a_lock_tells_that_it_was_acquired_and_released(mine: Any, events: list[Event]) -> None:
    """Acquired, released: each once, with what was granted and how long it took."""
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


@TWO_KINDS
def test_a_lock_of_a_task_tells_the_same(mine: Any, events: list[Event]) -> None:
    """The same behind `async with`."""

    async def main() -> None:
        async with mine.lock("order:1"):
            pass
        await mine.aio.close()

    asyncio.run(main())
    assert kinds_of(events) == ["LockAcquired", "LockReleased"]


def test_a_timeout_is_told_with_the_error_of_the_caller(mine: Any, other: Any, events: list[Event]) -> None:
    """It was waited for, and the error is that of the caller."""
    with other.lock("order:1"):
        events.clear()
        with pytest.raises(LockTimeoutError) as refused:
            mine.lock("order:1").acquire(timeout=0.2)
    assert kinds_of(events)[:2] == ["LockWaiting", "LockNotAcquired"]
    event = only(events, LockNotAcquired)
    assert (event.outcome, event.error) == ("timeout", refused.value)
    assert 0.2 <= event.waited < 5
    assert event.had_to_wait


def test_a_task_that_is_cancelled_while_it_waits_is_no_error(
    mine: Any, other: Any, events: list[Event]
) -> None:
    """That is no error of the authority."""

    async def main() -> None:
        task = asyncio.create_task(mine.lock("order:1").aio.acquire())
        await asyncio.to_thread(eventually, lambda: kinds_of(events)[-1:] == ["LockWaiting"])
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        await mine.aio.close()

    with other.lock("order:1"):
        events.clear()
        asyncio.run(main())
    assert only(events, LockNotAcquired).outcome == "cancelled"


@TWO_KINDS
def test_a_task_that_is_cancelled_while_it_leaves_has_released(mine: Any, events: list[Event]) -> None:
    """As a disconnected client of a web server does: the lock is released, and so a gauge goes down."""

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
def test_a_release_that_is_broken_off_is_told_once(
    mine: Any, events: list[Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is sent once more, and what that does not find was not lost."""
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
def test_an_acquisition_that_is_given_up_is_no_timeout(mine: Any, other: Any, events: list[Event]) -> None:
    """By `cancel`: that is no timeout."""
    lock = mine.lock("order:1", timeout=None)
    with other.lock("order:1"):
        thread = threading.Thread(target=wait_for, args=(lock,))
        thread.start()
        assert eventually(lambda: kinds_of(events)[-1:] == ["LockWaiting"])
        lock.cancel()
        thread.join()
    assert only(events, LockNotAcquired).outcome == "cancelled"


def wait_for(lock: Any) -> None:
    """Acquire a lock until that is given up."""
    with suppress(LockTimeoutError):
        lock.acquire()


@pytest.mark.timed
def test_each_extension_is_told_with_its_lateness(mine: Any, events: list[Event]) -> None:
    """Each time with how late that began."""
    with mine.lock("order:1", ttl=0.6):
        assert eventually(lambda: sum(isinstance(event, LeaseExtended) for event in events) >= 2)
    for event in events:
        if isinstance(event, LeaseExtended):
            assert (event.outcome, event.ttl, event.error) == ("extended", 0.6, None)
            assert 0 <= event.lateness < 0.6


@TWO_KINDS
@pytest.mark.timed
def test_the_end_of_max_hold_is_told_once(mine: Any, events: list[Event]) -> None:
    """The loss is told once, and so is the end of the lock."""
    with mine.lock("order:1", ttl=0.3, max_hold=0.4, if_lost="warn"):
        assert eventually(lambda: any(isinstance(event, LeaseLost) for event in events))
    lost = only(events, LeaseLost)
    assert lost.reason == "max_hold"
    assert "max_hold" in lost.detail
    assert only(events, LockReleased).end == "max_hold"


@TWO_KINDS
@pytest.mark.timed
def test_a_lease_that_nothing_extends_is_lost_when_its_block_is_left(mine: Any, events: list[Event]) -> None:
    """It is found when the block is left."""
    with pytest.raises(LockLostError), mine.lock("order:1", ttl=0.2, renew=False):
        time.sleep(0.3)
    assert only(events, LeaseLost).reason == "expired"
    assert only(events, LockReleased).end == "lost"


def test_a_new_token_is_told(mine: Any, events: list[Event]) -> None:
    """The new token is told."""
    lock = mine.lock("order:1")
    with lock:
        token = lock.remint()
    assert only(events, TokenReminted).tokens == (token,)
    assert only(events, LockReleased).tokens == (token,)


def test_a_lock_that_is_handed_over_ends_here_and_begins_there(
    mine: Any, other: Any, events: list[Event]
) -> None:
    """It ends here, and begins there."""
    lock = mine.lock("order:1")
    lock.acquire()
    text = lock.hand_over()
    with take_over(text, authority=other):
        pass
    assert kinds_of(events) == ["LockAcquired", "LockReleased"] * 2


@TWO_KINDS
def test_events_have_the_template_of_a_decorated_function(mine: Any, events: list[Event]) -> None:
    """Metrics are labelled by it, because there are as many resources as orders."""

    @fenced("order:{order_id}", authority=mine)
    def ship(order_id: int) -> int:
        return order_id

    assert ship(7) == 7
    assert {event.template for event in events if isinstance(event, LockEvent)} == {"order:{order_id}"}
    assert only(events, LockAcquired).resources == ("order:7",)


def test_connections_are_told_without_passwords(mine: Any, events: list[Event]) -> None:
    """Each with where it leads."""
    with mine.lock("order:1"):
        pass
    opened = [event for event in events if isinstance(event, ConnectionOpened)]
    assert {event.authority for event in opened} == {type(mine).__name__}
    assert all(event.endpoint in repr(mine) for event in opened)


def test_failed_connections_are_told_and_no_majority_is_an_error(
    make_nodes: Callable[..., Nodes], events: list[Event]
) -> None:
    """Each try to connect is told; and a lock without a majority is an error."""
    nodes = make_nodes(1)
    with Redlock(nodes.urls, **IMPATIENT) as authority:
        authority.init()
        nodes[0].kill()
        with pytest.raises(QuorumError):
            authority.lock("order:1").acquire(timeout=1)
    failed = [event for event in events if isinstance(event, ConnectionFailed)]
    assert {event.endpoint for event in failed} >= set(authority.nodes)
    assert only(events, LockNotAcquired).outcome == "error"


@TWO_KINDS
def test_listener_that_fails_changes_nothing(
    mine: Any, events: list[Event], caplog: pytest.LogCaptureFixture
) -> None:
    """It is logged, and the others are called."""

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


@TWO_KINDS
def test_lock_acquired_before_anything_listened(mine: Any) -> None:
    """Its release is not told: a gauge would go below zero."""
    found: list[Event] = []
    with mine.lock("order:1"):
        on_event(found.append)
    forget(found.append)
    assert not [event for event in found if isinstance(event, LockReleased)]


@TWO_KINDS
def test_threads_tell_in_their_own_thread(mine: Any) -> None:
    """A listener may know its caller by that."""
    found: list[int] = []

    @on_event
    def note(event: Event) -> None:
        if isinstance(event, LockAcquired):
            found.append(threading.get_ident())

    def work() -> None:
        with mine.lock("order:1"):
            pass

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    forget(note)
    assert found == [thread.ident]


def test_what_is_no_function_is_refused() -> None:
    """At once, and not when something happens."""
    given: Any = "metrics"
    with pytest.raises(TypeError, match="on_event takes a plain function"):
        on_event(given)
