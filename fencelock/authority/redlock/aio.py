"""The asyncio face of a `Redlock`: the same operations as coroutines."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Awaitable, Coroutine
from typing import Any, Protocol, TypeVar, Unpack
from weakref import WeakKeyDictionary

from fencelock._generators import Steps, run_async
from fencelock.authority.base import Grant, Terms
from fencelock.authority.generators import AsyncView, GeneratorAuthority
from fencelock.authority.redlock.admin import NodeStatus
from fencelock.authority.redlock.protocol.messages import Broadcast
from fencelock.authority.redlock.protocol.queue import WaitQueue
from fencelock.authority.redlock.transport.aio import LoopConnections

_T = TypeVar("_T")


class Nodes(Protocol):
    """The part of a `Redlock` that `AsyncRedlock` uses."""

    def init(
        self, *, base: int | None, max_ttl: float | None, above: int | None, allow_eviction: bool
    ) -> bool: ...
    def status(self) -> tuple[NodeStatus, ...]: ...
    def begin_in_child(self) -> None: ...
    def acquire_gen(
        self, resources: tuple[str, ...], *, queue: WaitQueue, **terms: Unpack[Terms]
    ) -> Steps[Grant]: ...
    def connect_in(self, loop: asyncio.AbstractEventLoop) -> LoopConnections: ...


class AsyncRedlock(AsyncView):
    """A `Redlock` for asyncio code, found as `Redlock.aio`.

    All tasks of a loop share one connection to each node. Every loop has its own connections, which end with
    it. A cancelled operation leaves no lock behind. A cancelled release is sent all the same.
    """

    def __init__(self, authority: GeneratorAuthority, nodes: Nodes) -> None:
        super().__init__(authority)
        self._nodes = nodes
        self._start_over()

    def _start_over(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._by_loop: WeakKeyDictionary[asyncio.AbstractEventLoop, LoopConnections] = WeakKeyDictionary()

    def acquire_gen(self, resources: tuple[str, ...], **terms: Unpack[Terms]) -> Steps[Grant]:
        return self._nodes.acquire_gen(resources, queue=self.here().queue, **terms)

    def run(self, steps: Steps[_T]) -> Coroutine[Any, Any, _T]:
        """Run a generator; other tasks run meanwhile.

        After a cancellation, the steps that release what may have been acquired do not wait.
        """
        connections = self.here()

        def do(step: Any) -> Awaitable[Any]:
            nonlocal connections
            if connections.closed:  # while this task waited in line
                connections = self.here()
            return connections.broadcast(step) if type(step) is Broadcast else connections.sleep(step)

        def tell(step: Any) -> Any:
            return connections.tell(step)

        return run_async(steps, do, tell)

    async def init(
        self,
        *,
        base: int | None = None,
        max_ttl: float | None = None,
        above: int | None = None,
        allow_eviction: bool = False,
    ) -> bool:
        """Initialise N blank nodes, once in their life: see `Redlock.init`, also for the errors."""
        return await asyncio.to_thread(
            self._nodes.init, base=base, max_ttl=max_ttl, above=above, allow_eviction=allow_eviction
        )

    async def status(self) -> tuple[NodeStatus, ...]:
        """Return the status of every node: see `Redlock.status`."""
        return await asyncio.to_thread(self._nodes.status)

    async def close(self) -> None:
        """Close the connections of the running loop; the next use connects again."""
        with self._lock:
            connections = self._by_loop.pop(asyncio.get_running_loop(), None)
        if connections is not None:
            connections.close()

    def here(self) -> LoopConnections:
        if self._pid != os.getpid():
            self._nodes.begin_in_child()
        loop = asyncio.get_running_loop()
        connections = self._by_loop.get(loop)
        if connections is None or connections.closed:
            with self._lock:
                self._close_orphans()
                self._by_loop[loop] = connections = self._nodes.connect_in(loop)
        return connections

    def _close_orphans(self) -> None:
        """Close the connections of loops that were closed too early."""
        for loop, connections in list(self._by_loop.items()):
            if loop.is_closed():
                connections.close()
                del self._by_loop[loop]

    def close_everywhere(self) -> None:
        """Close the connections of every loop, each in its own thread."""
        with self._lock:
            everywhere, self._by_loop = list(self._by_loop.values()), WeakKeyDictionary()
        for connections in everywhere:
            if connections.is_elsewhere:
                connections.do_there(connections.close)
            else:
                connections.close()

    def leave_to_parent(self) -> None:
        """In a forked child, close its copies of the sockets, without a lock that a thread may have held."""
        for connections in list(self._by_loop.values()):
            connections.leave_to_parent()
        self._start_over()
