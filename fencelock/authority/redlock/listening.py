"""Hears the nodes' calls for all threads of this client that wait, over one connection to each node.

There is no thread in the background: one of those that wait reads for all of them, and when its own wait
is over, leaves that to another. So the one that is called wakes up by itself, and nothing is left to end
when nobody waits, in a forked child, or while the interpreter goes down.

Connections are opened when somebody waits for the first time, and opened again when they are lost. A node
that cannot be reached, or does not let this user listen, is silent. As long as fewer than a majority can
be heard, nobody stands in line, and waiting means looking again and again.

What the calls mean stands in `waiting.py`.
"""

from __future__ import annotations

import random
import secrets
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress

from fencelock.authority.redlock.node import Link, Node, Unusable
from fencelock.authority.redlock.protocol import Answers, Said
from fencelock.authority.redlock.waiting import Line

_BACKOFF = 0.05
_LONGEST_BACKOFF = 2.0
#: Where a user or a password is refused, that will not change soon.
_REFUSED_BACKOFF = 30.0


class _Ear:
    """One node's connection, or when to try for another."""

    def __init__(self, number: int, node: Node) -> None:
        self.number = number
        self.node = node
        self.link: Link | None = None
        self.dialling = False
        self.failures = 0
        self.retry_at = 0.0

    def fail(self, said: Said, now: float) -> None:
        """Put off the next try."""
        self.failures += 1
        pause = _REFUSED_BACKOFF
        if said is not Said.ERROR:
            pause = min(_LONGEST_BACKOFF, _BACKOFF * 2 ** min(self.failures, 10))
        self.retry_at = now + pause * random.uniform(0.5, 1.0)  # noqa: S311 - spreads clients, hides nothing


class Listener:
    """Wakes up whoever waits, when the nodes call them. May be shared by threads.

    Args:
        nodes: where the nodes are.
        node_key: key of a node's hash; channels begin with it.

    Attributes:
        hears: whether a majority of the nodes could call.
    """

    def __init__(self, nodes: Sequence[Node], node_key: str) -> None:
        self._ears = [_Ear(number, node) for number, node in enumerate(nodes)]
        self._node_key = node_key
        client = secrets.token_hex(8)
        self._channel = f"{node_key}:w:{client}"
        # Guards what follows. Of the connections only the thread that reads for all may know more.
        self._lock = threading.Lock()
        self._line = Line(client, len(nodes), random.random)
        self._bells: dict[threading.Lock, str] = {}
        self._arrived: deque[tuple[_Ear, Link | Said]] = deque()
        self._has_reader = False
        self._closed = False
        self._poll: select.poll | None = None
        self._by_descriptor: dict[int, _Ear] = {}
        self._stirred: tuple[socket.socket, socket.socket] | None = None
        self.hears = False

    def close(self) -> None:
        """Close the connections; whoever waits goes on by looking."""
        with self._lock:
            self._closed = True
            if not self._has_reader:
                self._hang_up()
        self._stir()

    def leave_to_parent(self) -> None:
        """In a forked child: close its copies of the sockets, by no lock that a thread may have held."""
        for ear in self._ears:
            if ear.link is not None:
                ear.link.close()
        for end in self._stirred or ():
            end.close()

    def expect(self, place: str, nonce: str) -> str:
        """Count the calls for a bid from now on; return its place, a new one where it is empty."""
        with self._lock:
            place = place or self._line.new_place()
            self._line.expect(place, nonce)
            return place

    def granted(self, place: str) -> Answers:
        """Return the nodes that have granted the present bid of a place while it waited."""
        with self._lock:
            return self._line.granted(place)

    def leave(self, place: str) -> None:
        """Forget a place whose acquisition is over."""
        with self._lock:
            self._line.leave(place)

    def wait(self, place: str, seconds: float) -> None:
        """Return when the nodes call the place, at the latest after so many seconds."""
        deadline = time.monotonic() + seconds
        bell = threading.Lock()
        bell.acquire()
        with self._lock:
            self._bells[bell] = place
        try:
            while (now := time.monotonic()) < deadline:
                with self._lock:
                    if self._line.due(place) <= now:
                        return
                    reads = not self._has_reader and not self._closed
                    self._has_reader = self._has_reader or reads
                if reads:
                    self._read_for_all(bell, place, deadline)
                else:  # until called, or asked to read for all
                    bell.acquire(timeout=min(deadline - now, threading.TIMEOUT_MAX))
        finally:
            with self._lock:
                del self._bells[bell]

    def _read_for_all(self, own: threading.Lock, place: str, deadline: float) -> None:
        """Read until this thread's own wait is over; then have another one do so."""
        try:
            while (timeout := self._ring(place, deadline)) is not None:
                self._listen(timeout)
        except BaseException:  # a signal handler's: nobody knows how much of a message has been read
            with self._lock:
                self._hang_up()
            raise
        finally:
            with self._lock:
                self._has_reader = False
                if self._closed:
                    self._hang_up()
                successor = next((bell for bell in self._bells if bell is not own and bell.locked()), None)
                if successor is not None:
                    successor.release()

    def _ring(self, own: str, deadline: float) -> float | None:
        """Wake up the others that are due; return for how long to read, None when the own wait is over."""
        now = time.monotonic()
        next_due = deadline
        with self._lock:
            if self._closed or now >= deadline or self._line.due(own) <= now:
                return None
            for bell, place in self._bells.items():
                if (due := self._line.due(place)) > now:
                    next_due = min(next_due, due)
                elif bell.locked():
                    bell.release()
        return next_due - now

    def _listen(self, timeout: float) -> None:
        """Read what the nodes say within so many seconds."""
        poll = self._poll
        if poll is None:
            poll = self._pick_up()
        now = time.monotonic()
        for ear in self._ears:
            if ear.link is None and not ear.dialling:
                if now >= ear.retry_at:
                    self._dial(ear, now)
                else:
                    timeout = min(timeout, ear.retry_at - now)
        for descriptor, _ in poll.poll(timeout * 1000):
            ear_or_none = self._by_descriptor.get(descriptor)
            if ear_or_none is not None:
                self._hear(poll, ear_or_none)
            elif self._stirred is not None:
                self._stirred[0].recv(1024)
        while self._arrived:
            self._subscribe(poll, *self._arrived.popleft())

    def _pick_up(self) -> select.poll:
        poll = select.poll()
        stirred = socket.socketpair()
        for end in stirred:
            end.setblocking(False)  # noqa: FBT003 - the standard library's signature
        poll.register(stirred[0].fileno(), select.POLLIN)
        self._poll, self._stirred = poll, stirred
        return poll

    def _stir(self) -> None:
        """Have the thread that reads look around."""
        if (stirred := self._stirred) is not None:
            with suppress(OSError):  # its buffer is full, or it has been closed meanwhile
                stirred[1].send(b".")

    def _dial(self, ear: _Ear, now: float) -> None:
        # In a thread of its own: a node that hangs while being connected to must not deafen us.
        dialler = threading.Thread(
            target=self._open, args=(ear,), name=f"fencelock-listen-{ear.node.name}", daemon=True
        )
        try:
            ear.dialling = True
            dialler.start()
        except RuntimeError:  # too many threads, or the interpreter is on its way out
            ear.dialling = False
            ear.fail(Said.UNREACHABLE, now)

    def _open(self, ear: _Ear) -> None:
        result: Link | Said
        try:
            result = ear.node.open(self._node_key)
        except Unusable as error:
            result = error.answer.said
        with self._lock:
            if self._poll is not None and not self._closed:
                self._arrived.append((ear, result))
                self._stir()
            else:
                ear.dialling = False
                if isinstance(result, Link):
                    result.close()

    def _subscribe(self, poll: select.poll, ear: _Ear, result: Link | Said) -> None:
        ear.dialling = False
        if isinstance(result, Said):
            ear.fail(result, time.monotonic())
            return
        ear.link = result
        self._by_descriptor[result.descriptor] = ear
        poll.register(result.descriptor, select.POLLIN)
        try:
            result.subscribe(self._channel)
        except Unusable as error:
            self._lose(poll, ear, error.answer.said)

    def _hear(self, poll: select.poll, ear: _Ear) -> None:
        if ear.link is None:
            return
        try:
            messages = ear.link.messages()
        except Unusable as error:
            self._lose(poll, ear, error.answer.said)
            return
        now = time.monotonic()
        with self._lock:
            for message in messages:
                if message is not None:
                    self._line.note(ear.number, message, now)
                else:
                    ear.failures = 0
                    self._line.listen(ear.number)
                    self.hears = self._line.hears

    def _lose(self, poll: select.poll, ear: _Ear, said: Said) -> None:
        if ear.link is None:
            return
        poll.unregister(ear.link.descriptor)
        del self._by_descriptor[ear.link.descriptor]
        ear.link.close()
        ear.link = None
        ear.fail(said, time.monotonic())
        with self._lock:
            self._line.go_deaf(ear.number)
            self.hears = self._line.hears

    def _hang_up(self) -> None:
        """Close everything. Called with the lock held, while nobody reads."""
        self.hears = False
        self._poll = None
        self._by_descriptor.clear()
        links = [result for _, result in self._arrived if isinstance(result, Link)]
        self._arrived.clear()
        for ear in self._ears:
            self._line.go_deaf(ear.number)
            if ear.link is not None:
                links.append(ear.link)
            ear.link, ear.dialling = None, False
        for link in links:
            link.close()
        stirred, self._stirred = self._stirred, None
        for end in stirred or ():
            end.close()
