"""The blocking driver, which moves the bytes: all threads share one connection to each node.

No thread stays in the background. Of the threads that wait for answers, or in line for a lock, one reads for
all and wakes the others. When its own wait is over, another waiting thread reads. So no thread has to be
ended when no caller waits, in a forked child, or when the interpreter exits. A RELEASE follows its ACQUIRE on
the same connection, unless that is lost.

A signal handler may raise at any line. Then connections are dropped if their answers could be mixed up, and
another thread takes over the reading. A handler that locks gets a RuntimeError if it has interrupted a frame
that is using these connections, because that frame cannot go on before the handler ends.
"""

from __future__ import annotations

import math
import select
import socket
import ssl
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final, NamedTuple

from fencelock._owners import current_stack
from fencelock._process import start_over_in_children
from fencelock._threads import Sleepers, new_wakeup, sleep_until_woken, wake
from fencelock.authority.redlock.protocol.messages import Broadcast, Replies, Sleep
from fencelock.authority.redlock.protocol.queue import WaitQueue
from fencelock.authority.redlock.transport.connector import Connections, Node, Opened, UnusableError
from fencelock.authority.redlock.transport.polling import READ, WRITE, Selected, new_poll
from fencelock.authority.redlock.wire.connection import Connection, PendingBroadcast

#: Seconds after which the reading thread looks for new connections, while a node has none.
_GLANCE: Final = 0.05
#: Seconds in which a node has to take more of a command that is too large for one write.
_TAKES_MORE: Final = 0.05
#: Seconds without a read, after which connections are read before use: they may be gone, or have old answers.
FRESH: Final = 0.01
READ_SIZE: Final = 1024  # bytes of the first read: mostly enough, and quickly allocated
_MUCH: Final = 65536
_NOTHING: Final = (BlockingIOError, ssl.SSLWantReadError)
_BOTH: Final = READ | WRITE


def read_from(sock: socket.socket) -> bytes | None:
    """Return the data that has arrived, or None; raise OSError if the connection is broken."""
    try:
        data = sock.recv(READ_SIZE)
    except _NOTHING:
        return None
    if not data:
        raise ConnectionResetError("closed by the node")
    # With TLS, data may wait inside the socket object where no poll sees it.
    if len(data) == READ_SIZE or isinstance(sock, ssl.SSLSocket):
        with suppress(*_NOTHING):
            while more := sock.recv(_MUCH):
                data += more
    return data


def write_to(sock: socket.socket, connection: Connection) -> bool:
    """Write as much as the socket takes; return whether that was all; OSError if the connection is broken."""
    outgoing = connection.outgoing
    try:
        del outgoing[: sock.send(outgoing)]
    except (BlockingIOError, ssl.SSLWantWriteError, ssl.SSLWantReadError):
        return False
    return not outgoing


class _Sleeper:
    """A thread that sleeps on its wakeup while another one reads for it."""

    wakeup: threading.Lock | None = None

    def wake(self) -> None:
        if self.wakeup is not None:
            wake(self.wakeup)


class WaitForAnswers(_Sleeper, PendingBroadcast):
    """A broadcast whose thread waits, until its patience ends."""


class WaitForCall(_Sleeper):
    """A wait in line for a call of the nodes (see `queue`); `over` is True when it has ended."""

    def __init__(self, until: float, queue: WaitQueue, place: str) -> None:
        self.over = False
        self._until = until
        self._queue = queue
        self._place = place

    @property
    def deadline(self) -> float:
        """When the wait is over, as far as is known now."""
        return min(self._until, self._queue.due(self._place))


Wait = WaitForAnswers | WaitForCall


class _Socket(NamedTuple):
    """An open connection: its node, its socket, and the state of the protocol."""

    node: int
    sock: socket.socket
    connection: Connection


class SharedConnections(Connections):
    """One connection to each node, for all threads of a process; arguments as for `Connections`."""

    def __init__(self, nodes: Sequence[Node], node_key: str, **options: Any) -> None:
        super().__init__(nodes, node_key, **options)
        self._mutex = threading.Lock()
        self._changed = Sleepers()
        self._links: dict[int, _Socket] = {}  # open connections by descriptor
        self._poll = new_poll()
        self._congested: set[int] = set()  # descriptors of sockets that have not taken all of a command yet
        self._reader: Wait | None = None
        self._sleeping: dict[Wait, None] = {}
        self._in_line: dict[str, WaitForCall] = {}
        self._last_read = 0.0
        #: The wait of each stack of frames that uses these connections. An interruption may leave an entry.
        self._inside: dict[int, Wait] = {}
        start_over_in_children(self)

    def _check_not_inside(self) -> int:
        """Return the number of this stack; raise RuntimeError if a frame of it uses these connections.

        A frame uses them while its wait goes on. A wait that is over may still hold the mutex.
        """
        stack = current_stack()
        waiting = self._inside.get(stack)
        if waiting is not None and (not waiting.over or self._mutex.locked()):
            raise RuntimeError(
                "a signal handler or a finaliser has interrupted a lock call, and uses the same nodes: the "
                "interrupted call cannot go on first. Set a flag in the handler, or raise an exception, and "
                "use the lock outside"
            )
        return stack

    # The operations of callers.

    def do(self, request: Any) -> Any:
        if type(request) is not Broadcast:
            return self._sleep(request)
        stack = self._check_not_inside()
        waiting = WaitForAnswers(request)
        try:
            self._inside[stack] = waiting
            was_congested = bool(self._congested)
            began, ended = self._ask(waiting, request), self._wait(waiting)
            if self._congested and not was_congested:
                self._drain()
            return Replies(began, ended, waiting.close())
        except BaseException:
            with self._mutex:
                waiting.close()
                self._clean_up(waiting)
            raise
        finally:
            self._inside.pop(stack, None)

    def _sleep(self, request: Sleep) -> float:
        """Sleep until a node calls the place, or the time is over; return the time then."""
        if not request.waits_for:
            time.sleep(request.seconds)
            return time.monotonic()
        place, stack = request.place, self._check_not_inside()
        waiting = WaitForCall(time.monotonic() + request.seconds, self.queue, place)
        try:
            self._inside[stack] = waiting
            with self._mutex:
                if place:
                    self._in_line[place] = waiting
                if self._nodes.listen(time.monotonic()):
                    self._write_all()
            return self._wait(waiting)
        except BaseException:
            with self._mutex:
                self._clean_up(waiting)
            raise
        finally:
            self._in_line.pop(place, None)
            self._inside.pop(stack, None)

    def settle(self, request: Broadcast) -> None:
        """Send the releases that are owed, ahead of a request to all nodes."""
        if self._nodes.has_pending_releases:
            self.do(request)

    def connect_here(self, until: float) -> None:
        """Connect to absent nodes in this thread, until a time.

        At the end of a process, Python 3.12.1 starts no thread (https://github.com/python/cpython/issues/113964).
        """
        for node in range(len(self._names)):
            with self._mutex:
                if self._nodes.connection(node) or self.is_connecting(node) or time.monotonic() > until:
                    continue
                self._connecting[node] = threading.current_thread()
            self._open(node)

    def close(self) -> None:
        """Close every connection; waiting callers get an answer. The next use opens others."""
        self._check_not_inside()
        with self._mutex:
            self._connecting.clear()  # so a connection that is being opened is closed
            self._nodes.close()
            self._changed.wake_all()

    def begin_in_child(self) -> None:
        """Close the child's copies of the sockets, without a mutex that a thread may have held."""
        for link in self._links.values():
            link.sock.close()

    # Waiting.

    def _wait(self, waiting: Wait) -> float:
        """Read for all until a wait is over, or sleep while another thread reads; return the time then."""
        ready: Sequence[tuple[int, int]] = ()
        while True:
            with self._mutex:
                now = time.monotonic()
                if ready:
                    self._read(ready, now)
                if (due := waiting.deadline) <= now:
                    self._end(waiting)
                    return now
                wakeup = self._wakeup_of(waiting)
                if self._nodes.absent:  # connect to them, because they should answer and call, too
                    due = min(due, self._nodes.open_absent(now))
                glance = _GLANCE if self._nodes.absent else math.inf
                poll = self._poll
                if wakeup is not None and self._congested:  # the reading thread may poll only for reads
                    poll = self._new_poll(self._links)
            if wakeup is None or poll is not self._poll:
                ready = poll.poll(min(max(0.0, due - now), glance) * 1000)
            else:
                ready = ()
                sleep_until_woken(wakeup, min(due - now, threading.TIMEOUT_MAX))

    def _wakeup_of(self, waiting: Wait) -> threading.Lock | None:
        """Return the wakeup that wakes a waiting thread; None if the thread is the one that reads for all."""
        if self._reader is None or self._reader.over:
            self._reader = waiting
            self._sleeping.pop(waiting, None)
        elif self._reader is not waiting and waiting.wakeup is None:
            waiting.wakeup = new_wakeup()
            self._sleeping[waiting] = None
        return None if self._reader is waiting else waiting.wakeup

    def _end(self, waiting: Wait) -> None:
        """Note that a wait is over, and make another thread read if none does."""
        waiting.over = True
        self._sleeping.pop(waiting, None)
        if self._reader is waiting:
            self._reader = None
        if self._reader is None or self._reader.over:
            for other in self._sleeping:
                other.wake()
                return

    def _clean_up(self, waiting: Wait) -> None:
        """End a wait that an exception has interrupted; drop connections whose answers could be mixed up."""
        self._nodes.drop_dirty()
        self._end(waiting)

    def _ask(self, waiting: WaitForAnswers, request: Broadcast) -> float:
        """Send a command and return the time; first wait for missing connections, if that is worth it."""
        began = now = time.monotonic()
        wakeup: threading.Lock | None = None
        while True:
            with self._mutex:
                if wakeup is not None:
                    self._changed.remove(wakeup)
                    now = time.monotonic()
                if now - self._last_read > FRESH and (self._reader is None or self._reader.over):
                    # Data that arrived while no thread read: old answers, and the end of a connection.
                    while ready := self._poll.poll(0):
                        self._read(ready, now)
                    self._last_read = now = time.monotonic()
                left = 0.0
                if self._nodes.absent:
                    self._nodes.open_absent(now)
                    left = self._nodes.worth_waiting_until(began, request, now) - now
                if left <= 0:
                    if request.patience > 0.0 and not waiting.complete:
                        waiting.deadline = now + request.patience
                    self._nodes.ask(waiting, request, now)
                    self._write_all()
                    return now
                wakeup = self._changed.add()
            sleep_until_woken(wakeup, left)

    def _drain(self) -> None:
        """Write the rest of commands that were too large for one write, while the nodes accept it."""
        while True:
            with self._mutex:
                poll = self._new_poll(self._congested)
            if not (self._congested and (ready := poll.poll(_TAKES_MORE * 1000))):
                return
            with self._mutex:
                self._read(ready, time.monotonic())

    # Moving bytes, with the mutex held. (`_opened` takes it.)

    def _new_poll(self, descriptors: Iterable[int]) -> select.poll | Selected:
        """Return a poll object for these sockets, apart from that of the reading thread."""
        poll = new_poll()
        for descriptor in descriptors:
            poll.register(descriptor, _BOTH if descriptor in self._congested else READ)
        return poll

    def _read(self, ready: Sequence[tuple[int, int]], now: float) -> None:
        self._last_read = now
        for descriptor, _ in ready:
            link = self._links.get(descriptor)
            if link is None:  # closed in the meantime
                with suppress(KeyError):  # it is still registered only if closing was interrupted
                    self._poll.unregister(descriptor)
                continue
            index, sock, connection = link
            for place in self._nodes.receive(index, partial(read_from, sock), now):
                if place in self._in_line:
                    self._in_line[place].wake()
            if connection.outgoing and descriptor in self._links:  # it may be broken now
                self._write(link)

    def _write_all(self) -> None:
        for link in tuple(self._links.values()):
            if link.connection.outgoing:
                self._write(link)

    def _write(self, link: _Socket) -> None:
        """Write the outgoing bytes of a connection; the rest follows when the socket takes more."""
        index, sock, connection = link
        connection.changing += 1
        try:
            is_all = write_to(sock, connection)
        except OSError as error:
            self._nodes.broken(index, f"the connection broke: {error}")
            return
        connection.changing -= 1
        if is_all == (sock.fileno() in self._congested):
            (self._congested.discard if is_all else self._congested.add)(sock.fileno())
            self._poll.register(sock.fileno(), READ if is_all else _BOTH)

    def disconnect(self, node: int) -> None:
        for descriptor, link in tuple(self._links.items()):
            if link.node == node:
                del self._links[descriptor]
                self._congested.discard(descriptor)
                self._poll.unregister(descriptor)
                with suppress(OSError):  # the socket is not connected any more
                    link.sock.shutdown(socket.SHUT_RDWR)
                link.sock.close()

    def _opened(self, node: int, opened: Opened | UnusableError) -> None:
        stack = current_stack()
        self._inside[stack] = WaitForCall(0.0, self.queue, "")  # a finaliser may run here, and use a lock
        with self._mutex:
            if self._connecting.get(node) is threading.current_thread():
                del self._connecting[node]
                if used := self._use(node, opened):
                    link = _Socket(node, *used)
                    self._links[link.sock.fileno()] = link
                    self._poll.register(link.sock.fileno(), READ)
                    self._write(link)
            elif isinstance(opened, Opened):  # the connections were closed in between
                opened.sock.close()
            self._changed.wake_all()
        self._inside.pop(stack, None)
