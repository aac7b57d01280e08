"""A cancelled call leaves no lease behind, and the next task of the client works as usual."""

from __future__ import annotations

import asyncio
import gc
import types
from collections.abc import Awaitable, Callable, Coroutine, Generator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

import pytest

from fencelock.authority.base import Grant
from fencelock.errors import LockTimeoutError
from tests.authorities import faces
from tests.authorities.faces import AsyncClient, Client
from tests.authorities.kinds import IN_LOOPS, SORTS_IN_TASKS
from tests.authorities.stage import Stage, in_one_loop
from tests.authorities.storm import Storm

#: More often than that, no operation is suspended.
_MOST: Final = 300
#: For what each sort does in its own way, by one driver.
each_sort = pytest.mark.parametrize("stage", [f"{name}, asyncio" for name in SORTS_IN_TASKS], indirect=True)
each_driver = pytest.mark.parametrize("stage", IN_LOOPS, indirect=True)


@dataclass(slots=True)
class Stroke:
    """Where a task is cancelled.

    Attributes:
        number: at which of its suspensions, from 0.
        late: when what it waits for has happened and the task has not heard of it yet; else, at once.
        passed: how many suspensions there have been.
        struck: whether it came so far.
    """

    number: int
    late: bool = False
    passed: int = 0
    struck: bool = False

    def pass_by(self, waits_for: asyncio.Future[Any] | None) -> None:
        """Count a suspension of the running task, and cancel it if that is the one."""
        task = asyncio.current_task()
        assert task is not None
        if self.passed == self.number:
            self.struck = True
            if not self.late:
                task.cancel()
            elif waits_for is None:
                asyncio.get_running_loop().call_soon(task.cancel)
            else:
                waits_for.add_done_callback(lambda _: task.cancel())  # before the one that wakes the task
        self.passed += 1


@types.coroutine
def _counting(steps: Coroutine[Any, Any, Any], stroke: Stroke) -> Generator[Any, Any, Any]:
    """Drive a coroutine to its end, and tell the stroke of each suspension."""
    error: BaseException | None = None
    while True:
        try:
            waits_for = steps.send(None) if error is None else steps.throw(error)
        except StopIteration as end:
            return end.value
        stroke.pass_by(waits_for)
        error = None
        try:
            yield waits_for
        except BaseException as caught:  # noqa: BLE001 - the coroutine gets it
            error = caught


async def strike(operation: Coroutine[Any, Any, Any], stroke: Stroke) -> Any:
    """Run an operation as a task that is cancelled; return None then, else what it returned."""

    async def count() -> Any:
        return await _counting(operation, stroke)

    task = asyncio.create_task(count())
    await asyncio.wait([task], timeout=40.0)
    assert task.done(), f"hangs after {stroke}"
    if stroke.struck:
        assert task.cancelled(), f"{task} goes on after {stroke}"
        return None
    return task.result()


async def is_free(client: AsyncClient, resource: str) -> bool:
    """Tell whether a resource is granted long before its lease would end."""
    with suppress(LockTimeoutError):
        return await client.release(await client.acquire((resource,), ttl=5.0, timeout=faces.SOON)) is True
    return False


class Bystander:
    """Another client, and what it finds left behind."""

    def __init__(self, stage: Stage) -> None:
        self._client = stage.new_client().aio
        self.left: list[tuple[str, Stroke]] = []
        self.strokes = 0

    async def look(self, resource: str, stroke: Stroke) -> None:
        """Note a resource that is not free in time."""
        self.strokes += stroke.struck
        if not await is_free(self._client, resource):
            self.left.append((resource, stroke))


async def at_every_await(
    bystander: Bystander,
    prepare: Callable[[str], Awaitable[Any]],
    operate: Callable[[str, Any], Coroutine[Any, Any, Any]],
    clean_up: Callable[[Any, Any], Awaitable[object]],
) -> None:
    """Cancel an operation at its first suspension, at its second …, until it ends before that comes.

    Args:
        bystander: looks at each resource after that.
        prepare: makes what the operation needs, for a resource that is new each time.
        operate: the operation.
        clean_up: does what the caller of a cancelled operation has to do, and that of a complete one.
    """
    for late in (False, True):
        for number in range(_MOST):
            stroke, resource = Stroke(number, late), f"r{late:d}.{number}"
            prepared = await prepare(resource)
            result = await strike(operate(resource, prepared), stroke)
            await clean_up(prepared, result)
            await bystander.look(resource, stroke)
            assert not bystander.left
            if not stroke.struck:
                break
        else:
            raise AssertionError("never ends")
    assert bystander.strokes >= 2


async def _nothing(*_: object) -> None:
    """Do nothing."""


@each_sort
def test_a_cancelled_acquisition_leaves_nothing(stage: Stage) -> None:
    client, bystander = stage.new_client().aio, Bystander(stage)

    async def acquire(resource: str, _: object) -> Any:
        return await client.acquire((resource,), ttl=40.0, timeout=5.0)

    async def release(_: object, grant: Grant | None) -> None:
        if grant is not None:
            assert await client.release(grant) is True

    async def main() -> None:
        await is_free(client, "warm")
        await at_every_await(bystander, _nothing, acquire, release)
        assert await is_free(client, "afterwards")

    stage.run(main())


@each_driver
def test_a_cancelled_first_acquisition_leaves_nothing(stage: Stage) -> None:
    """Each of these first acquisitions opens a connection.

    After the cancellation, the client works when it is asked again.
    """
    bystander = Bystander(stage)

    async def make(_: str) -> Client:
        return stage.kind.make()

    async def acquire(resource: str, client: Client) -> Any:
        return await client.aio.acquire((resource, f"{resource} too"), ttl=40.0, timeout=5.0)

    async def close(client: Client, grant: Grant | None) -> None:
        if grant is not None:
            assert await client.aio.release(grant) is True
        assert await is_free(client.aio, "afterwards")
        await client.aio.close()
        client.close()

    stage.run(at_every_await(bystander, make, acquire, close))


@each_sort
def test_a_cancelled_wait_leaves_nothing(stage: Stage) -> None:
    holder, client, bystander = stage.new_client().aio, stage.new_client().aio, Bystander(stage)

    async def wait(number: int, late: bool) -> None:
        stroke, resource = Stroke(number, late), f"r{late:d}.{number}"
        held = await holder.acquire((resource,), ttl=40.0, timeout=5.0)
        waiting = client.acquire((resource,), ttl=30.0, timeout=20.0)
        task = asyncio.create_task(strike(waiting, stroke))
        await asyncio.sleep(0.02 * (number % 5))
        assert await holder.release(held) is True
        granted = await task
        if granted is not None:
            assert await client.release(granted) is True
        await bystander.look(resource, stroke)

    async def main() -> None:
        await is_free(client, "warm")
        await in_one_loop(*(wait(number, late) for number in range(12) for late in (False, True)))
        assert not bystander.left
        assert bystander.strokes > 1
        assert await is_free(client, "afterwards")

    stage.run(main())


@each_driver
def test_a_cancelled_release_takes_place(stage: Stage) -> None:
    """All the same, wherever it is cancelled; also where it waits for new connections."""
    client, bystander = stage.new_client().aio, Bystander(stage)

    async def acquire(resource: str) -> Any:
        return await client.acquire((resource,), ttl=40.0, timeout=5.0)

    async def acquire_and_close(resource: str) -> Any:
        grant = await acquire(resource)
        await client.close()
        return grant

    async def release(_: str, grant: Grant) -> Any:
        return await client.release(grant)

    async def main() -> None:
        for prepare in (acquire, acquire_and_close):
            await at_every_await(bystander, prepare, release, _nothing)
        assert await is_free(client, "afterwards")

    stage.run(main())


@each_sort
@pytest.mark.parametrize("operation", ["extend_many", "remint"])
def test_what_a_cancelled_change_leaves_is_released_by_the_caller(stage: Stage, operation: str) -> None:
    client, bystander = stage.new_client().aio, Bystander(stage)

    async def acquire(resource: str) -> Any:
        return await client.acquire((resource,), ttl=40.0, timeout=5.0)

    async def change(_: str, grant: Grant) -> Any:
        return await (
            client.remint(grant, 50.0) if operation == "remint" else client.extend_many([(grant, 50.0)])
        )

    async def release(old: Grant, new: Any) -> None:
        released = await client.release(new if isinstance(new, Grant) else old)
        assert released is True or operation == "remint"

    async def main() -> None:
        await at_every_await(bystander, acquire, change, release)
        assert await is_free(client, "afterwards")

    stage.run(main())


@pytest.mark.long
@each_sort
def test_a_storm_of_cancellations_leaves_the_client_whole(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    """Connections that were given up do not run out, and none answers the question of another.

    The log says nothing of exceptions that were never retrieved.
    """
    storm = Storm(stage.new_client())

    async def main() -> None:
        await storm.rage(tasks=20, seconds=1.0)
        await storm.check()

    stage.run(main(), 60.0)
    assert "never retrieved" not in caplog.text


@pytest.mark.long
@each_driver
@pytest.mark.filterwarnings("error")
def test_a_loop_that_has_ended_disturbs_no_other(stage: Stage) -> None:
    client, other = stage.kind.make(), stage.new()

    async def use(resource: str) -> int:
        grant = await client.aio.acquire((resource,), ttl=40.0, timeout=5.0)
        assert await client.aio.release(grant) is True
        return int(grant.tokens[0])

    async def leave_in_the_midst() -> None:
        for number in range(3):
            task = asyncio.create_task(use(f"midst{number}"))
            for _ in range(number):
                await asyncio.sleep(0)
            assert not task.done()

    tokens = [asyncio.run(use("r"))]
    asyncio.run(leave_in_the_midst())
    gc.collect()
    tokens += [asyncio.run(use("r")), asyncio.run(use("r"))]
    assert tokens == sorted(set(tokens))

    async def close() -> None:
        await client.aio.close()
        await client.aio.close()
        await use("r")
        await client.aio.close()

    asyncio.run(close())
    client.close()
    gc.collect()
    assert other.release(other.acquire("r", timeout=2)) is True
