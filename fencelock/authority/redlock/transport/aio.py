"""Moves the bytes for asyncio: all tasks of a loop share one connection to each node, which the loop reads.

Requests of one turn of the loop mostly leave in one write for each node. A loop refers to its connections
by its readers and timers. The connections refer to the loop weakly, so that an abandoned loop can be freed.
They are closed when it is freed; if it was closed, also when the next loop begins to use the authority.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

from fencelock._process import start_over_in_children
from fencelock.authority.redlock.protocol.messages import Broadcast, Replies, Sleep
from fencelock.authority.redlock.transport.blocking import FRESH, read_from, write_to
from fencelock.authority.redlock.transport.connector import Connections, Node, Opened, UnusableError
from fencelock.authority.redlock.wire.connection import PendingBroadcast

BATCHES: Final = True  # False sends every command alone
_LOOK: Final = 0.02  # seconds between two checks for broadcasts whose patience has ended
_SLACK: Final = 0.01  # seconds that are added to the time of the next try to connect to a node


class PendingOfTask(PendingBroadcast):
    """A broadcast whose task waits for `woken`: a weak reference, because a future refers to its loop."""

    __slots__ = ("woken",)

    woken: weakref.ref[asyncio.Future[None]]

    def wake(self) -> None:
        resume(self.woken())


def resume(woken: asyncio.Future[None] | None) -> None:
    """Resume the task that waits, unless it was resumed already, or its loop is closed."""
    if woken is not None and not woken.done() and not woken.get_loop().is_closed():
        woken.set_result(None)


class LoopConnections(Connections):
    """One connection to each node, for all tasks of one loop; other arguments as for `Connections`.

    While the loop runs, callers in other threads may use only `tell`, `do_there` and `is_elsewhere`.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, nodes: Sequence[Node], node_key: str, **options: Any
    ) -> None:
        if type(loop).add_reader is asyncio.AbstractEventLoop.add_reader:
            raise RuntimeError(
                f"{type(loop).__name__} cannot tell when a socket is readable, which locks on Redis nodes "
                "need: use asyncio.run(main(), loop_factory=asyncio.SelectorEventLoop), from Python 3.12"
            )
        super().__init__(nodes, node_key, **options)
        self._sockets: dict[int, socket.socket] = {}
        #: Connections that threads have opened, and that the loop has not taken over yet.
        self._arrived: dict[int, Opened | UnusableError] = {}
        self._congested: set[int] = set()
        self._loop = weakref.ref(loop)
        self._newcomers: weakref.WeakSet[asyncio.Future[None]] = weakref.WeakSet()
        self._in_line: weakref.WeakValueDictionary[str, asyncio.Future[None]] = weakref.WeakValueDictionary()
        self._flush_is_due = False
        self._pending: set[PendingOfTask] = set()
        #: When the next check is due. If an error interrupts a check, a later broadcast plans another.
        self._looks_at = -math.inf
        #: When sockets were read last. Answers lie unread while tasks run, and must not count as missing.
        self._last_read = 0.0
        self.closed: bool = False  # whether these connections cannot be used any more
        self._farewell = weakref.finalize(loop, self.close)
        start_over_in_children(self)

    # The loop of the connections.

    def _open_loop(self) -> asyncio.AbstractEventLoop | None:
        loop = self._loop()
        return None if loop is None or loop.is_closed() else loop

    @property
    def is_elsewhere(self) -> bool:
        """Whether the loop of the connections runs in another thread than this one."""
        loop = self._loop()
        if loop is None or not loop.is_running():
            return False
        try:
            return asyncio.get_running_loop() is not loop
        except RuntimeError:
            return True

    def do_there(self, action: Callable[[], object]) -> None:
        """Make the loop of the connections call `action` soon, if it still runs."""
        if (loop := self._loop()) is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(action)

    def close(self) -> None:
        self._farewell.detach()
        self.closed = True
        self._flush()
        self._nodes.close()
        self._close_arrived()

    def begin_in_child(self) -> None:
        """Close the child's copies of the sockets, and send nothing at the end of the loop."""
        self._farewell.detach()
        self.closed = True
        for sock in self._sockets.values():
            sock.close()

    # The operations of callers.

    async def broadcast(self, request: Broadcast) -> Replies:
        if request.patience <= 0.0:
            return self.tell(request)
        loop = asyncio.get_running_loop()
        now = time.monotonic()
        if now - self._last_read > FRESH:
            self._read_all(now)
            self._flush()  # commands of other tasks have waited for the end of such a long turn
        if self._nodes.absent:
            await self._await_connections(request, loop)
        began = time.monotonic()
        woken = loop.create_future()
        pending = PendingOfTask(request)
        pending.woken = weakref.ref(woken)
        try:
            # If no other task waits, there is no batch to join.
            self._nodes.ask(pending, request, began, together=BATCHES and bool(self._pending))
            self._flush_soon(loop)
            if not pending.complete:
                pending.deadline = began + request.patience
                self._pending.add(pending)
                if self._looks_at < began:
                    self._look_later(loop)
                await woken
        finally:
            self._pending.discard(pending)
            answers = pending.close()
        return Replies(began, time.monotonic(), answers)

    def tell(self, request: Broadcast) -> Replies:
        """Send a command to its nodes without waiting; from another thread, the loop sends it soon.

        Any thread may call it, because a coroutine may be thrown away in any thread.
        """
        now = time.monotonic()
        if self.is_elsewhere:
            self.do_there(partial(self.tell, request))
            return Replies(now, now, {})
        pending = PendingBroadcast(request)
        pending.over = True
        self._nodes.ask(pending, request, now)
        self._flush()
        return Replies(now, now, pending.close())

    async def sleep(self, request: Sleep) -> float:
        """Sleep until a node calls the place, or the time is over; return the time then."""
        place, seconds, now = request.place, request.seconds, time.monotonic()
        if not request.waits_for:
            await asyncio.sleep(seconds)
            return time.monotonic()
        loop = asyncio.get_running_loop()
        end = now + seconds
        if self._nodes.listen(now):
            self._flush()
        while (due := min(end, self.queue.due(place))) > now and not self.closed:
            if self._nodes.absent and place:
                due = min(due, self._nodes.open_absent(now) + _SLACK)
            woken = loop.create_future()
            if place:
                self._in_line[place] = woken
            alarm = loop.call_later(due - now, resume, woken)
            try:
                await woken
            finally:
                alarm.cancel()
                self._in_line.pop(place, None)
            now = time.monotonic()
        return now

    async def _await_connections(self, request: Broadcast, loop: asyncio.AbstractEventLoop) -> None:
        """Open missing connections, and wait for them while `worth_waiting_until` says so."""
        began = now = time.monotonic()
        self._nodes.open_absent(now)
        while (left := self._nodes.worth_waiting_until(began, request, now) - now) > 0 and not self.closed:
            newcomer = loop.create_future()
            self._newcomers.add(newcomer)
            try:
                await asyncio.wait((newcomer,), timeout=left)
            finally:
                self._newcomers.discard(newcomer)
            now = time.monotonic()

    # Moving bytes.

    def _readable(self, index: int) -> None:
        """Read the data that has arrived; the loop calls this."""
        self._last_read = now = time.monotonic()
        connection = self._nodes.connection(index)
        if connection is None:
            return
        try:
            called = self._nodes.receive(index, partial(read_from, self._sockets[index]), now)
        except BaseException:
            self._nodes.drop_dirty()
            raise
        if index not in self._sockets:  # the connection is broken, and tasks in line open it again
            called = list(self._in_line)
        for place in called:
            resume(self._in_line.get(place))
        if connection.outgoing:
            self._flush_soon(self._loop())

    def _read_all(self, now: float) -> None:
        """Read everything that has arrived, before answers are missed or a connection is trusted."""
        self._last_read = now
        for index in list(self._sockets):
            self._readable(index)

    def _flush_soon(self, loop: asyncio.AbstractEventLoop | None) -> None:
        if not self._flush_is_due and loop is not None and not loop.is_closed():
            loop.call_soon(self._flush)
            self._flush_is_due = True  # last: after an interruption, there is only one flush too many

    def _flush(self) -> None:
        """Write to each node the commands that were put since the last flush."""
        self._flush_is_due = False
        for index in list(self._sockets):
            if index not in self._congested:
                self._write(index)

    def _write(self, index: int) -> None:
        """Write as much as the socket takes; the loop calls this again when the socket takes more."""
        connection = self._nodes.connection(index)
        if connection is None:
            return
        try:
            connection.flush_batch()
            if not connection.outgoing:
                return
            is_complete = write_to(self._sockets[index], connection)
        except OSError as error:
            self._nodes.broken(index, f"the connection broke: {error}")
            return
        except BaseException:
            connection.changing += 1
            self._nodes.drop_dirty()
            raise
        if is_complete == (index in self._congested) and (loop := self._open_loop()) is not None:
            if is_complete:
                self._congested.discard(index)
                loop.remove_writer(self._sockets[index].fileno())
            else:
                self._congested.add(index)
                loop.add_writer(self._sockets[index].fileno(), self._write, index)

    def _look_later(self, loop: asyncio.AbstractEventLoop | None) -> None:
        """Plan the next check for broadcasts whose patience has ended, if any are pending."""
        if self._pending and loop is not None:
            due = time.monotonic() + _LOOK
            loop.call_later(_LOOK, self._look, due)
            self._looks_at = due

    def _look(self, due: float) -> None:
        now = time.monotonic()
        try:
            self._read_all(now)  # answers may have arrived while the loop was busy with other work
        finally:
            for pending in tuple(self._pending):
                if pending.deadline <= now:
                    pending.wake()
            if due == self._looks_at:  # otherwise a later check is planned
                self._look_later(self._open_loop())

    # The `Transport` for `NodeConnections`.

    def disconnect(self, node: int) -> None:
        sock = self._sockets.pop(node)
        is_congested = node in self._congested
        self._congested.discard(node)
        if (loop := self._open_loop()) is not None:
            loop.remove_reader(sock.fileno())
            if is_congested:
                loop.remove_writer(sock.fileno())
        sock.close()

    def is_connecting(self, node: int) -> bool:
        return node in self._arrived or super().is_connecting(node)

    def _opened(self, node: int, opened: Opened | UnusableError) -> None:
        self._arrived[node] = opened
        loop = self._loop()
        try:
            if loop is not None and not self.closed:
                loop.call_soon_threadsafe(self._take, node)
                return
        except RuntimeError:  # the loop is closed
            pass
        self._close_arrived()

    def _close_arrived(self) -> None:
        """Close the connections that were opened, and will not be used; any thread may call this."""
        for index in list(self._arrived):
            if isinstance(opened := self._arrived.pop(index, None), Opened):
                opened.sock.close()

    def _take(self, index: int) -> None:
        loop = self._open_loop()
        if self.closed or loop is None:
            self._close_arrived()
        elif (opened := self._arrived.pop(index, None)) and (used := self._use(index, opened)):
            self._sockets[index], _ = used
            loop.add_reader(self._sockets[index].fileno(), self._readable, index)
            self._write(index)
        for woken in (*self._newcomers, *self._in_line.values()):
            resume(woken)
