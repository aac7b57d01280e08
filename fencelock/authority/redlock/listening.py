"""Hears the nodes' calls for all threads of this client that wait, over one connection to each node.

There is no thread in the background: one of those that wait reads for all of them, and when its own wait
is over, leaves that to another. So the one that is called wakes up by itself, and nothing is left to end
when nobody waits, in a forked child, or while the interpreter goes down.
"""

from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress

from fencelock._owners import blocks_greenlets
from fencelock.authority.redlock.ears import Ear, Listening
from fencelock.authority.redlock.node import Link, Node
from fencelock.authority.redlock.polling import Patched, new_poll

#: How often a bell is looked at that cannot be waited for.
_GLANCE = 0.01


class Listener(Listening):
    """Wakes up whoever waits, when the nodes call them. May be shared by threads.

    Arguments as for `Listening`.
    """

    def __init__(self, nodes: Sequence[Node], node_key: str) -> None:
        super().__init__(nodes, node_key)
        # Under the mutex. Of the connections only the thread that reads for all may know more.
        self._bells: dict[threading.Lock, str] = {}
        self._has_reader = False
        self._closed = False
        self._poll: select.poll | Patched | None = None
        self._by_descriptor: dict[int, Ear] = {}
        self._stirred: tuple[socket.socket, socket.socket] | None = None

    def close(self) -> None:
        """Close the connections; whoever waits goes on by looking."""
        with self._mutex:
            self._closed = True
            for ear in self._ears:
                ear.close()
            if not self._has_reader:
                self._hang_up()
        self._stir()

    def leave_to_parent(self) -> None:
        """In a forked child: close its copies of the sockets, by no lock that a thread may have held."""
        super().leave_to_parent()
        for end in self._stirred or ():
            end.close()

    def wait(self, place: str, seconds: float) -> None:
        """Return when the nodes call the place, at the latest after so many seconds."""
        deadline = time.monotonic() + seconds
        bell = threading.Lock()
        bell.acquire()
        with self._mutex:
            self._bells[bell] = place
        try:
            while (now := time.monotonic()) < deadline:
                with self._mutex:
                    if self._line.due(place) <= now:
                        return
                    reads = not self._has_reader and not self._closed
                    self._has_reader = self._has_reader or reads
                if reads:
                    self._read_for_all(bell, place, deadline)
                else:  # until called, or asked to read for all
                    _await(bell, min(deadline - now, threading.TIMEOUT_MAX))
        finally:
            with self._mutex:
                del self._bells[bell]

    def _read_for_all(self, own: threading.Lock, place: str, deadline: float) -> None:
        """Read until this thread's own wait is over; then have another one do so."""
        try:
            while (timeout := self._ring(place, deadline)) is not None:
                self._listen(timeout)
        except BaseException:  # a signal handler's: nobody knows how much of a message has been read
            with self._mutex:
                self._hang_up()
            raise
        finally:
            with self._mutex:
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
        with self._mutex:
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
        self._dial_absent(now)
        self._adopt()
        for ear in self._ears:
            if ear.link is None and ear.retry_at > now:
                timeout = min(timeout, ear.retry_at - now)
        for descriptor, _ in poll.poll(timeout * 1000):
            ear_or_none = self._by_descriptor.get(descriptor)
            if ear_or_none is not None:
                self._hear(ear_or_none)
            elif self._stirred is not None:
                self._stirred[0].recv(1024)

    def _pick_up(self) -> select.poll | Patched:
        poll = new_poll()
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

    def _announce(self) -> None:
        with self._mutex:
            self._stir()

    def _watch(self, ear: Ear, link: Link) -> None:
        self._by_descriptor[link.descriptor] = ear
        if self._poll is not None:
            self._poll.register(link.descriptor, select.POLLIN)

    def _unwatch(self, ear: Ear, link: Link) -> None:  # noqa: ARG002 - the other listener needs it
        self._by_descriptor.pop(link.descriptor, None)
        if self._poll is not None:
            self._poll.unregister(link.descriptor)

    def _hang_up(self) -> None:
        """Close everything. Called with the mutex held, while nobody reads."""
        self._poll = None
        super()._hang_up()
        stirred, self._stirred = self._stirred, None
        for end in stirred or ():
            end.close()


def _await(bell: threading.Lock, seconds: float) -> None:
    """Return when a bell has been rung, at the latest after so many seconds."""
    if blocks_greenlets(bell.acquire) and not blocks_greenlets(time.sleep):
        # `threading` alone is not patched: the greenlet that is to ring could never run.
        deadline = time.monotonic() + seconds
        while not bell.acquire(blocking=False) and (left := deadline - time.monotonic()) > 0:
            time.sleep(min(_GLANCE, left))
    else:
        bell.acquire(timeout=seconds)
