"""The asyncio face of a `Redlock`: the same operations as coroutines."""

# ruff: noqa: SLF001 - these are the two faces of one authority

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary

from fencelock.authority.base import AsyncClosing, Grant, Wish
from fencelock.authority.redlock import protocol
from fencelock.authority.redlock.multiplex import Lines, run, tell
from fencelock.authority.redlock.survey import NodeStatus
from fencelock.authority.redlock.waiting import Waiter
from fencelock.errors import AuthorityError, FencelockError

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
        self._lines: WeakKeyDictionary[asyncio.AbstractEventLoop, Lines] = WeakKeyDictionary()
        #: Those that were asked for last: mostly there is but one loop.
        self._latest: Lines | None = None

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
        lines = self._lines_here()
        listener = lines.listener
        waiter = Waiter(listener, time.monotonic, time.time, fair=fair, patient=timeout != 0)
        bids = self._redlock._new_bids(resources, ttl, waiter, above=above)
        deadlines = self._redlock._deadlines(timeout)

        async def wait(seconds: float) -> Lines:
            nonlocal lines
            await listener.wait(waiter.place, seconds)
            lines = self._lines_here()
            return lines

        try:
            if not above:
                heard = await lines.broadcast(bids.open(self._redlock._see(), deadlines))
                if (grant := bids.settle(heard)) is not None:
                    return grant
            return await run(self._redlock._going_on(bids, deadlines), lines, wait)
        except BaseException as error:
            for undo in bids.give_up(error):
                tell(undo, lines)
            raise

    async def extend_many(self, wishes: Sequence[Wish]) -> list[Grant | FencelockError]:
        """Extend grants: see `Authority.extend_many`."""
        outcomes: list[Grant | FencelockError] = []
        for batch in self._redlock._batches(wishes):
            try:
                outcomes += await self._run(self._redlock._extending(batch))
            except AuthorityError as error:
                outcomes += [error] * len(batch)
        return outcomes

    async def remint(self, grant: Grant, ttl: float) -> Grant:
        """Exchange a grant for one with larger tokens: see `Authority.remint`."""
        bids = self._redlock._new_bids(grant.resources, ttl, None, instead_of=grant.proof)
        lines = self._lines_here()
        try:
            return await run(self._redlock._reminting(bids, grant), lines)
        except BaseException as error:
            for undo in bids.give_up(error):
                tell(undo, lines)
            raise

    async def release(self, grant: Grant) -> bool | None:
        """Give the leases back: see `AsyncAuthority.release`.

        Cancelled, it is sent all the same.
        """
        lines = self._lines_here()
        try:
            fleet, request = self._redlock._closing(grant)
            return protocol.released(fleet, await lines.broadcast(request))
        except FencelockError:
            raise
        except BaseException:
            tell(self._redlock._releasing(grant), lines)
            raise

    async def init(
        self, *, base: int | None = None, max_ttl: float | None = None, allow_eviction: bool = False
    ) -> bool:
        """Initialise N blank nodes, once in their life: see `Redlock.init`, also for the errors."""
        return await self._run(self._redlock._initialising(base, max_ttl, allow_eviction=allow_eviction))

    async def status(self) -> tuple[NodeStatus, ...]:
        """Ask every node how it stands: see `Redlock.status`."""
        return await self._run(self._redlock._asking())

    async def close(self) -> None:
        """Close the connections of the running loop; using it again connects again."""
        with self._lock:
            lines = self._lines.pop(asyncio.get_running_loop(), None)
        if lines is not None:
            lines.close()

    async def _run(self, generator: Generator[protocol.Request, Any, _T]) -> _T:
        return await run(generator, self._lines_here())

    def _lines_here(self) -> Lines:
        """Return the running loop's connections."""
        self._redlock._check_process()
        loop = asyncio.get_running_loop()
        latest = self._latest
        if latest is not None and latest.serve(loop):
            return latest
        lines = self._lines.get(loop)
        if lines is None or lines.is_closed:
            with self._lock:
                self._close_orphans()
                self._lines[loop] = lines = self._redlock._make_lines(loop)
        self._latest = lines
        return lines

    def _close_orphans(self) -> None:
        """Close what loops have left that were closed before everything was over in them."""
        for loop, lines in list(self._lines.items()):
            if loop.is_closed():
                lines.close()
                del self._lines[loop]

    def _close_everywhere(self) -> None:
        """Close the connections of every loop, each in its own thread."""
        with self._lock:
            everywhere, self._lines = list(self._lines.values()), WeakKeyDictionary()
        for lines in everywhere:
            if lines.is_elsewhere:
                lines.do_there(lines.close)
            else:
                lines.close()

    def _leave_to_parent(self) -> None:
        """In a forked child: close its copies of the sockets, by no lock that a thread may have held."""
        for lines in list(self._lines.values()):
            lines.leave_to_parent()
        self._start_over()
