"""The asyncio face of a `Redlock`: the same operations as coroutines."""

# ruff: noqa: SLF001 - these are the two faces of one authority

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary

from fencelock.authority.base import AsyncClosing, Grant, Wish
from fencelock.authority.redlock import operations
from fencelock.authority.redlock.admin import NodeStatus
from fencelock.authority.redlock.protocol import messages
from fencelock.authority.redlock.transport.aio import LoopConnections, run, tell
from fencelock.authority.redlock.waiting import Waiter
from fencelock.errors import FencelockError

if TYPE_CHECKING:
    from fencelock.authority.redlock.redlock import Redlock

_T = TypeVar("_T")


class AsyncRedlock(AsyncClosing):
    """A `Redlock` for asyncio code; made by it, as `Redlock.aio`.

    All tasks of a loop share one connection to each node; every loop has its own, which end with it.
    A cancelled operation leaves no lock behind: what it may have acquired is released, and a release is
    sent all the same.
    """

    def __init__(self, redlock: Redlock) -> None:
        self._redlock = redlock
        self._start_over()

    def _start_over(self) -> None:
        """Begin without connections: at first, and in a forked child."""
        self._lock = threading.Lock()
        self._by_loop: WeakKeyDictionary[asyncio.AbstractEventLoop, LoopConnections] = WeakKeyDictionary()

    def __repr__(self) -> str:
        return f"{self._redlock!r}.aio"

    async def acquire(
        self,
        resources: tuple[str, ...],
        *,
        ttl: float,
        timeout: float | None,  # noqa: ASYNC109 - it waits for other holders, with errors of its own
        fair: bool = False,
        above: tuple[int, ...] = (),
    ) -> Grant:
        """Return leases of all the resources, or of none: see `Redlock.acquire`, also for the errors.

        Cancelled, it releases what it may have acquired, without waiting for that.
        """
        connections = self._here()
        waiter = Waiter(connections.queue, time.monotonic, time.time, fair=fair, patient=timeout != 0)
        acquisition = self._redlock._new_acquisition(resources, ttl, waiter, above=above)

        async def wait(seconds: float) -> LoopConnections:
            nonlocal connections
            await connections.wait(waiter.place, seconds)
            connections = self._here()
            return connections

        try:
            return await run(self._redlock._acquiring(acquisition, timeout), connections, wait)
        except BaseException as error:
            for undo in acquisition.give_up(error):
                tell(undo, connections)
            raise

    async def extend_many(self, wishes: Sequence[Wish]) -> list[Grant | FencelockError]:
        """Extend grants: see `Authority.extend_many`."""
        return await self._run(operations.extend(self._redlock._see, wishes))

    async def remint(self, grant: Grant, ttl: float) -> Grant:
        """Exchange a grant for one with larger tokens: see `Authority.remint`."""
        acquisition = self._redlock._new_acquisition(grant.resources, ttl, instead_of=grant.proof)
        connections = self._here()
        steps = acquisition.remint(self._redlock._see, grant.proof, jitter=random.random)
        try:
            return await run(steps, connections)
        except BaseException as error:
            for undo in acquisition.give_up(error):
                tell(undo, connections)
            raise

    async def release(self, grant: Grant) -> bool | None:
        """Give the leases back: see `AsyncAuthority.release`.

        Cancelled, it is sent all the same.
        """
        connections = self._here()
        try:
            return await run(self._redlock._releasing(grant), connections)
        except FencelockError:
            raise
        except BaseException:
            tell(self._redlock._releasing(grant), connections)
            raise

    async def init(
        self, *, base: int | None = None, max_ttl: float | None = None, allow_eviction: bool = False
    ) -> bool:
        """Initialise N blank nodes, once in their life: see `Redlock.init`, also for the errors."""
        init = self._redlock.init
        return await asyncio.to_thread(init, base=base, max_ttl=max_ttl, allow_eviction=allow_eviction)

    async def status(self) -> tuple[NodeStatus, ...]:
        """Ask every node how it stands: see `Redlock.status`."""
        return await asyncio.to_thread(self._redlock.status)

    async def close(self) -> None:
        """Close the connections of the running loop; using it again connects again."""
        with self._lock:
            connections = self._by_loop.pop(asyncio.get_running_loop(), None)
        if connections is not None:
            connections.close()

    async def _run(self, generator: Generator[messages.Request, Any, _T]) -> _T:
        return await run(generator, self._here())

    def _here(self) -> LoopConnections:
        """Return the running loop's connections."""
        self._redlock._check_process()
        loop = asyncio.get_running_loop()
        connections = self._by_loop.get(loop)
        if connections is None or connections.is_closed:
            with self._lock:
                self._close_orphans()
                self._by_loop[loop] = connections = self._redlock._connect_in(loop)
        return connections

    def _close_orphans(self) -> None:
        """Close what loops have left that were closed before everything was over in them."""
        for loop, connections in list(self._by_loop.items()):
            if loop.is_closed():
                connections.close()
                del self._by_loop[loop]

    def _close_everywhere(self) -> None:
        """Close the connections of every loop, each in its own thread."""
        with self._lock:
            everywhere, self._by_loop = list(self._by_loop.values()), WeakKeyDictionary()
        for connections in everywhere:
            if connections.is_elsewhere:
                connections.do_there(connections.close)
            else:
                connections.close()

    def _leave_to_parent(self) -> None:
        """In a forked child: close its copies of the sockets, by no lock that a thread may have held."""
        for connections in list(self._by_loop.values()):
            connections.leave_to_parent()
        self._start_over()
