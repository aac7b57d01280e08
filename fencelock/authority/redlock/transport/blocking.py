"""The blocking driver: threads share one connection to each node, and one that waits reads for all.

No thread stays in the background. Of the threads that wait for answers, or in line for a lock, one reads for
all and wakes the others. Its own wait over, it leaves that to another. So nothing is left to end when nothing
waits, in a forked child, or while the interpreter goes down. A RELEASE is always behind its ACQUIRE on one
connection.

A signal handler may lock while the thread that it has interrupted is in the midst of this. It uses
connections of its own then, because the interrupted frame cannot go on before it. Where it raises, the
connections are dropped on which answers could be taken for others, and another thread takes over the reading.
"""

from __future__ import annotations

import random
import secrets
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final, TypeVar

from fencelock._owners import blocks_greenlets
from fencelock.authority.redlock.protocol import Answer, Answers, Broadcast, Request, Round, Said
from fencelock.authority.redlock.transport.connector import Connector, Node, Opened, UnusableError
from fencelock.authority.redlock.transport.polling import new_poll
from fencelock.authority.redlock.waiting import Line
from fencelock.authority.redlock.wire.connection import Connection, PendingBroadcast
from fencelock.authority.redlock.wire.nodes import NodeConnections

_T = TypeVar("_T")

READ_SIZE: Final = 1024
#: Seconds after which connections are looked at before they are used: they may be gone, or have old answers.
FRESH: Final = 0.01
#: How often a lock is looked at that cannot be waited for.
_GLANCE: Final = 0.01


def read_from(sock: socket.socket) -> bytes | None:
    """Return what has arrived; None where that is nothing.

    Raises:
        OSError: the connection is broken.
    """
    try:
        data = sock.recv(READ_SIZE)
        # With TLS, data may wait inside the socket object where no poll sees it.
        while isinstance(sock, ssl.SSLSocket) and sock.pending():
            data += sock.recv(READ_SIZE)
    except (BlockingIOError, ssl.SSLWantReadError):
        return None
    if not data:
        raise ConnectionResetError("closed by the node")
    return data


def write_to(sock: socket.socket, connection: Connection) -> bool:
    """Write as much as the socket takes; return whether that was all.

    Raises:
        OSError: the connection is broken.
    """
    data = connection.take_outgoing()
    try:
        sent = sock.send(data)
    except (BlockingIOError, ssl.SSLWantWriteError, ssl.SSLWantReadError):
        sent = 0
    if sent < len(data):
        connection.outgoing.insert(0, data[sent:])
    return sent == len(data)


class _Wait:
    """A wait of one thread: for answers, or to be called.

    Attributes:
        deadline: when it is over in any case.
        bell: what the thread sleeps on while another one reads for it.
        over: whether it has ended.
    """

    __slots__ = ("bell", "deadline", "over")

    def __init__(self, deadline: float) -> None:
        self.deadline = deadline
        self.bell = threading.Lock()
        self.bell.acquire()
        self.over = False

    def due(self) -> float:
        """Return when it is over as far as is known now."""
        return self.deadline

    def ring(self) -> None:
        """Wake the thread."""
        with suppress(RuntimeError):  # it is awake
            self.bell.release()


class _WaitForAnswers(_Wait):
    __slots__ = ("broadcast",)

    def __init__(self, deadline: float, broadcast: PendingBroadcast) -> None:
        super().__init__(deadline)
        self.broadcast = broadcast

    def due(self) -> float:
        return 0.0 if self.broadcast.complete else self.deadline


class _WaitForCall(_Wait):
    __slots__ = ("place", "queue")

    def __init__(self, deadline: float, queue: Line, place: str) -> None:
        super().__init__(deadline)
        self.queue = queue
        self.place = place

    def due(self) -> float:
        return min(self.deadline, self.queue.due(self.place))


class _Pending(PendingBroadcast):
    __slots__ = ("waiting",)

    def __init__(self, request: Broadcast) -> None:
        super().__init__(request)
        self.waiting: _Wait | None = None

    def wake(self) -> None:
        if self.waiting is not None:
            self.waiting.ring()


class SharedConnections:
    """One connection to each node, for all threads of a process.

    Args:
        nodes: where the nodes are.
        node_key: key of a node's hash; the channel of this client begins with it.
        options: those of `NodeConnections`.

    Attributes:
        queue: hears the nodes' calls.
    """

    def __init__(self, nodes: Sequence[Node], node_key: str, **options: Any) -> None:
        self._again = partial(SharedConnections, nodes, node_key, **options)
        self._mutex = threading.Lock()
        self._changed = threading.Condition(self._mutex)
        client = secrets.token_hex(8)
        self.queue = Line(client, len(nodes), random.random)
        names = [node.name for node in nodes]
        self._nodes = NodeConnections(names, self, self.queue, jitter=random.random, **options)
        self._addresses = nodes, node_key, f"{node_key}:w:{client}"
        self._connectors = self._new_connectors()
        self._sockets: dict[int, socket.socket] = {}
        self._by_descriptor: dict[int, int] = {}
        self._poll = new_poll()
        self._stirring: tuple[socket.socket, socket.socket] | None = None
        self._reader: _Wait | None = None
        self._waits: dict[_Wait, None] = {}
        self._last_read = 0.0
        #: Threads that are in the midst of using these.
        self._inside: set[int] = set()
        self._closes_later = False
        self._of_handlers: SharedConnections | None = None
        self._closed = False

    def _new_connectors(self) -> list[Connector]:
        nodes, node_key, channel = self._addresses
        return [
            Connector(node, node_key, channel, partial(self._connected, index))
            for index, node in enumerate(nodes)
        ]

    def own(self) -> SharedConnections:
        """Return the connections that the calling frame may use.

        In a signal handler they are others, where it has interrupted a frame that is using these.
        """
        if threading.get_ident() not in self._inside:
            return self
        if self._of_handlers is None:
            self._of_handlers = self._again()
        return self._of_handlers.own()

    # What callers do.

    def broadcast(self, request: Broadcast) -> Round:
        """Send a command to its nodes, and wait until there are answers enough."""
        pending = _Pending(request)
        thread = threading.get_ident()
        try:
            self._inside.add(thread)
            with self._mutex:
                self._look_around()
                self._await_connections(request)
                began = time.monotonic()
                self._nodes.ask(pending, request, began)
                self._write_all()
            ended = began
            if not pending.complete and request.patience > 0.0:
                pending.waiting = _WaitForAnswers(began + request.patience, pending)
                ended = self._wait(pending.waiting)
            return Round(began, ended, self._close_pending(pending))
        except BaseException:
            with self._mutex:
                pending.close()
                self._clean_up(pending.waiting)
            raise
        finally:
            self._leave(thread)

    def _close_pending(self, pending: PendingBroadcast) -> Answers:
        with self._mutex:
            return pending.close()

    def wait(self, place: str, seconds: float) -> None:
        """Return when the nodes call the place, at the latest after so many seconds."""
        waiting = _WaitForCall(time.monotonic() + seconds, self.queue, place)
        thread = threading.get_ident()
        try:
            self._inside.add(thread)
            self._wait(waiting)
        except BaseException:
            with self._mutex:
                self._clean_up(waiting)
            raise
        finally:
            self._leave(thread)

    def _leave(self, thread: int) -> None:
        self._inside.discard(thread)
        if self._closes_later:
            self.close()

    def close(self) -> None:
        """Close every connection; what waits for answers is told. Using these again opens others.

        In a signal handler, the frame that it has interrupted closes them when it has done with them.
        """
        self._closes_later = threading.get_ident() in self._inside
        if self._closes_later:
            return
        with self._mutex:
            self._closed = True
            self._connectors = self._new_connectors()  # what the former ones open is closed
            self._nodes.close()
            self._changed.notify_all()
            self._stir()
            self._stop_stirring()
        if self._of_handlers is not None:
            self._of_handlers.close()

    def leave_to_parent(self) -> None:
        """In a forked child: close its copies of the sockets, by no lock that a thread may have held."""
        for sock in (*self._sockets.values(), *(self._stirring or ())):
            sock.close()
        if self._of_handlers is not None:
            self._of_handlers.leave_to_parent()

    # Waiting.

    def _wait(self, waiting: _Wait) -> float:
        """Read for all until a wait is over, or sleep while another thread reads; return when it is over."""
        while True:
            with self._mutex:
                self._waits[waiting] = None
                now = time.monotonic()
                if (due := waiting.due()) <= now:
                    self._end(waiting)
                    return now
                if reads := self._reader is None or self._reader.over:
                    self._reader = waiting
            if reads:
                self._read_for_all(waiting)
            else:
                _await(waiting.bell, min(due - now, threading.TIMEOUT_MAX))

    def _end(self, waiting: _Wait) -> None:
        """Note that a wait is over, and have another thread read if nobody does."""
        waiting.over = True
        self._waits.pop(waiting, None)
        if self._reader is waiting:
            self._reader = None
        if self._reader is None or self._reader.over:
            self._stop_stirring()
            for other in self._waits:
                other.ring()
                return

    def _clean_up(self, waiting: _Wait | None) -> None:
        """Put in order what an exception from outside has interrupted."""
        self._nodes.drop_spoilt()
        if waiting is not None:
            self._end(waiting)

    def _read_for_all(self, waiting: _Wait) -> None:
        """Read until this thread's own wait is over."""
        is_in_line = isinstance(waiting, _WaitForCall)
        while True:
            with self._mutex:
                now = time.monotonic()
                due = waiting.due()
                if due <= now:
                    return
                if is_in_line:  # the nodes that are away are to call as well
                    due = min(due, self._nodes.open_absent(now))
                if self._stirring is None:
                    self._make_stirring()
            ready = self._poll.poll(max(0.0, due - now) * 1000)
            with self._mutex:
                self._read(ready)

    def _look_around(self) -> None:
        """Read what has arrived while nobody has: old answers, and behind them the end of a connection."""
        now = time.monotonic()
        if now - self._last_read > FRESH and (self._reader is None or self._reader.over):
            while ready := self._poll.poll(0):
                self._read(ready)
            self._last_read = now

    def _await_connections(self, request: Broadcast) -> None:
        """Open what is not open; wait only while less than a majority is."""
        if not self._nodes.absent:
            return
        began = now = time.monotonic()
        self._nodes.open_absent(now)
        while (left := self._nodes.worth_waiting_until(began, request, now) - now) > 0:
            self._changed.wait(left)
            now = time.monotonic()

    # Moving bytes. With the mutex held.

    def _read(self, ready: Sequence[tuple[int, int]]) -> None:
        """Read from the sockets on which something has arrived."""
        self._last_read = now = time.monotonic()
        for descriptor, _ in ready:
            if self._stirring is not None and descriptor == self._stirring[0].fileno():
                self._stirring[0].recv(READ_SIZE)
                continue
            index = self._by_descriptor.get(descriptor, -1)
            sock, connection = self._sockets.get(index), self._nodes.connection(index)
            if sock is None or connection is None or sock.fileno() != descriptor:
                with suppress(KeyError):  # it was closed meanwhile; else closing it was interrupted
                    self._poll.unregister(descriptor)
                continue
            connection.spoilt = True  # until `received` has dealt with all that was read
            try:
                data = read_from(sock)
            except OSError as error:
                self._nodes.broken(index, _broken(error))
                continue
            for place in self._nodes.received(index, data or b"", now):
                for waiting in self._waits:
                    if isinstance(waiting, _WaitForCall) and waiting.place == place:
                        waiting.ring()
            if connection.outgoing:
                self._write(index)

    def _write_all(self) -> None:
        for index in range(len(self._connectors)):
            self._write(index)

    def _write(self, index: int) -> None:
        """Write what a connection has to say; what is too much follows when the node has answered some."""
        connection = self._nodes.connection(index)
        if connection is None or not connection.outgoing:
            return
        spoilt, connection.spoilt = connection.spoilt, True
        try:
            write_to(self._sockets[index], connection)
        except OSError as error:
            self._nodes.broken(index, _broken(error))
            self._stir()  # the thread that reads may be one that has waited for this node
            return
        connection.spoilt = spoilt

    # What `NodeConnections` asks for.

    def connect(self, node: int) -> None:
        """Begin to connect to a node."""
        self._closed = False
        try:
            self._connectors[node].begin()
        except RuntimeError as error:
            detail = f"no thread to connect with: {error}"
            self._nodes.failed(node, Answer(Said.UNREACHABLE, detail=detail), time.monotonic())

    def is_connecting(self, node: int) -> bool:
        """Tell whether that is going on."""
        return self._connectors[node].is_busy

    def disconnect(self, node: int) -> None:
        """Close the socket of a node's connection."""
        sock = self._sockets.pop(node)
        descriptor = sock.fileno()
        self._by_descriptor.pop(descriptor, None)
        self._poll.unregister(descriptor)
        sock.close()

    def _connected(self, index: int, connector: Connector, opened: Opened | UnusableError) -> None:
        """Use a connection that has been opened; called in the connecting thread, which ends with it."""
        self._inside.add(threading.get_ident())  # for what the garbage collector may call here
        with self._mutex:
            connector.end()
            now = time.monotonic()
            is_stale = connector is not self._connectors[index]  # these were closed in between
            if isinstance(opened, UnusableError):
                if not is_stale:
                    self._nodes.failed(index, opened.answer, now)
            elif is_stale or not self._nodes.connected(index, opened.identity, now, hears=opened.hears):
                opened.sock.close()
            else:
                descriptor = opened.sock.fileno()
                self._sockets[index] = opened.sock
                self._by_descriptor[descriptor] = index
                self._poll.register(descriptor, select.POLLIN)
                self._write(index)
            self._changed.notify_all()
        self._stir()
        self._inside.discard(threading.get_ident())

    def _make_stirring(self) -> None:
        ends = socket.socketpair()
        for end in ends:
            end.setblocking(False)  # noqa: FBT003 - the standard library's signature
        self._poll.register(ends[0].fileno(), select.POLLIN)
        self._stirring = ends  # not before: what is not registered cannot be unregistered

    def _stop_stirring(self) -> None:
        """Close what was made to stir the reader, if the connections are closed and there is no reader."""
        if self._closed and self._stirring is not None and (self._reader is None or self._reader.over):
            ends, self._stirring = self._stirring, None
            self._poll.unregister(ends[0].fileno())
            for end in ends:
                end.close()

    def _stir(self) -> None:
        """Have the thread that reads look around."""
        if self._stirring is not None:
            with suppress(OSError):  # its buffer is full, or it has been closed meanwhile
                self._stirring[1].send(b".")


def _broken(error: OSError) -> Answer:
    return Answer(Said.UNREACHABLE, detail=f"the connection broke: {error}")


def _await(bell: threading.Lock, seconds: float) -> None:
    """Return when a bell has been rung, at the latest after so many seconds."""
    if blocks_greenlets(bell.acquire) and not blocks_greenlets(time.sleep):
        # `threading` alone is not patched: the greenlet that is to ring could never run.
        deadline = time.monotonic() + seconds
        while not bell.acquire(blocking=False) and (left := deadline - time.monotonic()) > 0:
            time.sleep(min(_GLANCE, left))
    else:
        bell.acquire(timeout=seconds)


def run(
    generator: Generator[Request, Any, _T],
    connections: SharedConnections,
    wait: Callable[[float], None] = time.sleep,
) -> _T:
    """Run one of the protocol's generators to its end, blocking; return what it returns.

    Args:
        generator: the operation.
        connections: to the nodes.
        wait: how to sleep where a call may end it.
    """
    try:
        request = next(generator)
        while True:
            if isinstance(request, Broadcast):
                request = generator.send(connections.broadcast(request))
            else:
                (wait if request.wakeable else time.sleep)(request.seconds)
                request = generator.send(time.monotonic())
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]
