"""Where a test of an authority takes place: one kind, in blocking code or in asyncio, and its clients."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, Final, Self, TypeVar

import uvloop

from tests.authorities.faces import PATIENCE, AsyncFace, Client, Face, Loop
from tests.authorities.kinds import Kind

_T = TypeVar("_T")

#: What makes the loop of each world that has one.
_LOOPS: Final = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


class Stage:
    """The clients of one kind, in one world.

    Args:
        kind: the authority and its server.
        world: "blocking", "asyncio" or "uvloop".
    """

    def __init__(self, kind: Kind, world: str) -> None:
        self.kind = kind
        self.world = world
        self._loop = Loop(_LOOPS[world]) if world in _LOOPS else None
        self._faces: list[Face] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for face in self._faces:
            face.close()
        if self._loop is not None:
            self._loop.close()

    def new(self, client: Client | None = None) -> Face:
        """Return a new client: an object and connections of its own, or the given one's."""
        client = client or self.kind.make()
        face: Face = Face(client) if self._loop is None else AsyncFace(client, self._loop)
        self._faces.append(face)
        return face

    def new_client(self) -> Client:
        """Return a new client as the library makes it, which the stage closes."""
        return self.new().client

    def run(self, coroutine: Coroutine[Any, Any, _T], seconds: float = PATIENCE) -> _T:
        """Run a coroutine in the loop in which the clients live."""
        assert self._loop is not None, "only asyncio has a loop"
        return self._loop.run(coroutine, seconds)


def together(*jobs: Callable[[], _T], seconds: float = PATIENCE) -> list[_T]:
    """Run jobs in threads, side by side; return what each returned, or raise what one of them raised."""
    results: dict[int, _T] = {}
    errors: list[BaseException] = []

    def work(number: int, job: Callable[[], _T]) -> None:
        try:
            results[number] = job()
        except BaseException as error:  # noqa: BLE001 - the thread that waits raises it
            errors.append(error)

    threads = [
        threading.Thread(target=work, args=(number, job), name=f"job {number} of a test", daemon=True)
        for number, job in enumerate(jobs)
    ]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    if errors:
        raise errors[0]
    hung = [thread.name for thread in threads if thread.is_alive()]
    assert not hung, f"not over after {seconds} s: {', '.join(hung)}"
    return [results[number] for number in range(len(jobs))]


async def in_one_loop(*jobs: Coroutine[Any, Any, _T], seconds: float = PATIENCE) -> list[_T]:
    """Run coroutines as tasks of the running loop, side by side; return what each returned."""
    async with asyncio.timeout(seconds):
        return await asyncio.gather(*jobs)
