"""One set of signatures for blocking code and for asyncio, so that one test body speaks to both."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Protocol, TypeVar

from fencelock.authority.base import Grant, Wish
from fencelock.errors import AuthorityError, FencelockError, LockTimeoutError
from fencelock.holder import LockInfo

_T = TypeVar("_T")

#: Seconds after which anything that a test waits for counts as hung.
PATIENCE = 30.0


class AsyncClient(Protocol):
    """An authority for coroutines, or an imitation that is not sound."""

    async def acquire(
        self,
        resources: tuple[str, ...],
        *,
        ttl: float,
        timeout: float | None,  # noqa: ASYNC109 - as every authority has it
        fair: bool = False,
    ) -> Grant:
        """See `Face`."""

    async def extend_many(self, wishes: Sequence[Wish]) -> list[Grant | FencelockError]:
        """See `Face`."""

    async def remint(self, grant: Grant, ttl: float) -> Grant:
        """See `Face`."""

    async def release(self, grant: Grant) -> bool | None:
        """See `Face`."""

    async def close(self) -> None:
        """Close the connections of the running loop."""


class Client(Protocol):
    """An authority, or an imitation that is not sound."""

    @property
    def aio(self) -> AsyncClient:
        """The same client for coroutines."""

    def acquire(
        self, resources: tuple[str, ...], *, ttl: float, timeout: float | None, fair: bool = False
    ) -> Grant:
        """See `Face`."""

    def extend_many(self, wishes: Sequence[Wish]) -> list[Grant | FencelockError]:
        """See `Face`."""

    def remint(self, grant: Grant, ttl: float) -> Grant:
        """See `Face`."""

    def release(self, grant: Grant) -> bool | None:
        """See `Face`."""

    def close(self) -> None:
        """Close the connections."""


class Face(Protocol):
    """A client with blocking signatures, and with defaults that suit most tests."""

    client: Client

    def acquire(
        self,
        *resources: str,
        ttl: float = 30.0,
        timeout: float | None = 2.0,
        fair: bool = False,
    ) -> Grant:
        """See `Authority.acquire_gen`."""

    def extend_many(self, wishes: Sequence[Wish]) -> list[Grant | FencelockError]:
        """See `Authority.extend_gen`."""

    def remint(self, grant: Grant, ttl: float = 30.0) -> Grant:
        """See `Authority.remint_gen`."""

    def release(self, grant: Grant) -> bool | None:
        """See `Authority.release_gen`."""

    def holder_ttl(self, *resources: str) -> float | None:
        """Return the seconds for which one of the resources is held; None for none."""

    def close(self) -> None:
        """Close the connections of this face."""


def longest(found: Sequence[LockInfo]) -> float | None:
    """Return the seconds until the last of some locks ends; None for none."""
    return max((info.remaining for info in found), default=None)


class BlockingFace:
    """A client as threads use it."""

    def __init__(self, client: Client) -> None:
        self.client = client

    def acquire(
        self,
        *resources: str,
        ttl: float = 30.0,
        timeout: float | None = 2.0,
        fair: bool = False,
    ) -> Grant:
        """See `Authority.acquire_gen`."""
        return self.client.acquire(resources, ttl=ttl, timeout=timeout, fair=fair)

    def extend_many(self, wishes: Sequence[Wish]) -> list[Grant | FencelockError]:
        """See `Authority.extend_gen`."""
        return self.client.extend_many(wishes)

    def remint(self, grant: Grant, ttl: float = 30.0) -> Grant:
        """See `Authority.remint_gen`."""
        return self.client.remint(grant, ttl)

    def release(self, grant: Grant) -> bool | None:
        """See `Authority.release_gen`."""
        return self.client.release(grant)

    def holder_ttl(self, *resources: str) -> float | None:
        """Return the seconds for which one of the resources is held; None for none."""
        client: Any = self.client
        return longest(client.run(client.inspect_gen(resources)))

    def close(self) -> None:
        self.client.close()


class Loop:
    """An event loop in a thread of its own, which ends with the process at the latest."""

    def __init__(self, new_loop: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop) -> None:
        self._loop = new_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="loop of a test", daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, _T], seconds: float = PATIENCE) -> _T:
        """Run a coroutine as a task of the loop; return what it returns."""
        future: Future[_T] = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        return future.result(seconds)

    def close(self) -> None:
        """Cancel what still runs, as `asyncio.run` does at its end, and end the loop."""
        self.run(_cancel_the_others())
        self.run(self._loop.shutdown_default_executor())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(PATIENCE)
        self._loop.close()


async def _cancel_the_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


class AsyncFace:
    """A client as tasks use it: each call is a task of the loop, and the thread that calls waits for it."""

    def __init__(self, client: Client, loop: Loop) -> None:
        self.client = client
        self.loop = loop

    def acquire(
        self,
        *resources: str,
        ttl: float = 30.0,
        timeout: float | None = 2.0,
        fair: bool = False,
    ) -> Grant:
        """See `Authority.acquire_gen`."""
        return self.loop.run(self.client.aio.acquire(resources, ttl=ttl, timeout=timeout, fair=fair))

    def extend_many(self, wishes: Sequence[Wish]) -> list[Grant | FencelockError]:
        """See `Authority.extend_gen`."""
        return self.loop.run(self.client.aio.extend_many(wishes))

    def remint(self, grant: Grant, ttl: float = 30.0) -> Grant:
        """See `Authority.remint_gen`."""
        return self.loop.run(self.client.aio.remint(grant, ttl))

    def release(self, grant: Grant) -> bool | None:
        """See `Authority.release_gen`."""
        return self.loop.run(self.client.aio.release(grant))

    def holder_ttl(self, *resources: str) -> float | None:
        """Return the seconds for which one of the resources is held; None for none."""
        client: Any = self.client

        async def look() -> Sequence[LockInfo]:
            return await client.aio.run(client.inspect_gen(resources))  # type: ignore[no-any-return]

        return longest(self.loop.run(look()))

    def close(self) -> None:
        """Close the connections of the loop, then whatever else the client has."""
        self.loop.run(self.client.aio.close())
        self.client.close()


def acquire_briefly(face: Face, *resources: str) -> Grant:
    """Return a grant that expires soon: as soon as a slow server can grant it with validity left."""
    for ttl in (0.2, 0.5, 1.0):
        with suppress(AuthorityError):
            return face.acquire(*resources, ttl=ttl)
    return face.acquire(*resources, ttl=2.0)


def take(face: Face, *resources: str, **terms: Any) -> int:
    """Acquire and release once; return the first token."""
    grant = face.acquire(*(resources or ("r",)), **{"timeout": 10.0, **terms})
    assert face.release(grant) is True
    return grant.tokens[0]


def is_held(face: Face, *resources: str) -> bool:
    """Tell whether another client is refused; where it is not, it gives back what it got."""
    try:
        grant = face.acquire(*resources, ttl=1.0, timeout=0)
    except LockTimeoutError:
        return True
    face.release(grant)
    return False


def is_free_soon(face: Face, *resources: str, seconds: float = 2.0) -> bool:
    """Tell whether another client is granted the resources within some seconds."""
    try:
        grant = face.acquire(*resources, ttl=5.0, timeout=seconds)
    except LockTimeoutError:
        return False
    face.release(grant)
    return True
