"""One set of signatures for blocking code and for asyncio, so that one test body speaks to both."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeAlias, TypeVar

from fencelock.authority.base import Grant, Wish
from fencelock.errors import AuthorityError, FencelockError, LockTimeoutError

_T = TypeVar("_T")

#: Seconds after which anything that a test waits for counts as hung.
PATIENCE = 60.0

#: Seconds in which what was given back is free, be the machine busy; leases in tests are longer.
SOON = 20.0

#: An authority, or an imitation that is not sound; and the same for coroutines.
Client: TypeAlias = Any
AsyncClient: TypeAlias = Any


class Face:
    """A client with blocking signatures, and with defaults that suit most tests; this one is for threads."""

    def __init__(self, client: Client) -> None:
        self.client = client

    def run(self, steps: Any) -> Any:
        """Run a generator of the authority."""
        return self.client.run(steps)

    def do(self, name: str, *arguments: Any, **terms: Any) -> Any:
        """Call a method of the client."""
        return getattr(self.client, name)(*arguments, **terms)

    def acquire(
        self, *resources: str, ttl: float = 30.0, timeout: float | None = 2.0, fair: bool = False
    ) -> Grant:
        """See `Authority.acquire_gen`."""
        grant: Grant = self.do("acquire", resources, ttl=ttl, timeout=timeout, fair=fair)
        return grant

    def extend_many(self, wishes: Sequence[Wish]) -> list[Grant | FencelockError]:
        """See `Authority.extend_gen`."""
        said: list[Grant | FencelockError] = self.do("extend_many", wishes)
        return said

    def extend(self, grant: Grant, ttl: float) -> Grant:
        """Return the extended grant."""
        (said,) = self.extend_many([(grant, ttl)])
        assert isinstance(said, Grant), said
        return said

    def remint(self, grant: Grant, ttl: float = 30.0) -> Grant:
        """See `Authority.remint_gen`."""
        minted: Grant = self.do("remint", grant, ttl)
        return minted

    def release(self, grant: Grant) -> bool | None:
        """See `Authority.release_gen`."""
        released: bool | None = self.do("release", grant)
        return released

    def holder_ttl(self, *resources: str) -> float | None:
        """Return the seconds for which one of the resources is held; None for none."""
        found = self.run(self.client.inspect_gen(resources))
        return max((info.remaining for info in found), default=None)

    def close(self) -> None:
        """Close the connections of this face."""
        self.client.close()


BlockingFace = Face


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


class AsyncFace(Face):
    """A client as tasks use it: each call is a task of the loop, and the thread that calls waits for it."""

    def __init__(self, client: Client, loop: Loop) -> None:
        super().__init__(client)
        self.loop = loop

    def run(self, steps: Any) -> Any:
        """Run a generator of the authority in the loop."""

        async def run_it() -> Any:
            return await self.client.aio.run(steps)

        return self.loop.run(run_it())

    def do(self, name: str, *arguments: Any, **terms: Any) -> Any:
        """Call a method of the client's asynchronous form."""
        return self.loop.run(getattr(self.client.aio, name)(*arguments, **terms))

    def close(self) -> None:
        """Close the connections of the loop, then whatever else the client has."""
        self.do("close")
        self.client.close()


def acquire_briefly(face: Face, *resources: str) -> Grant:
    """Return a grant that expires soon: as soon as a slow server can grant it with validity left."""
    for ttl in (0.2, 0.5, 1.0):
        with suppress(AuthorityError):
            return face.acquire(*resources, ttl=ttl)
    return face.acquire(*resources, ttl=3.0)


def take(face: Face, *resources: str, **terms: Any) -> int:
    """Acquire and release once; return the first token."""
    grant = face.acquire(*(resources or ("r",)), **{"timeout": 10.0, **terms})
    assert face.release(grant) is True
    return grant.tokens[0]


def is_held(face: Face, *resources: str) -> bool:
    """Tell whether another client is refused; where it is not, it gives back what it got.

    A `timeout` of 0 has 0.4 s for the question, and a machine that does much else may need longer.
    """
    for _ in range(20):
        with suppress(AuthorityError):
            return not is_free_soon(face, *resources, seconds=0.0, ttl=3.0)
    return not is_free_soon(face, *resources, seconds=0.0, ttl=3.0)


def is_free_soon(face: Face, *resources: str, seconds: float | None = None, ttl: float = 5.0) -> bool:
    """Tell whether another client is granted the resources within some seconds."""
    try:
        grant = face.acquire(*resources, ttl=ttl, timeout=SOON if seconds is None else seconds)
    except LockTimeoutError:
        return False
    face.release(grant)
    return True
