"""One connection to etcd, shared by all threads of a process: one waiting thread reads for all of them."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

from fencelock._owners import current_stack
from fencelock.authority.etcd.channel import ChannelError
from fencelock.authority.etcd.members import Members
from fencelock.authority.etcd.messages import Answer, Call, watch_is_over
from fencelock.authority.hosts import shown
from fencelock.authority.loops import ThreadWakeup

_SEND: Final = 2.0  # seconds that a send may take; it blocks while the server's receive buffer is full
_CHUNK: Final = 65_536
_INTERRUPTED: Final = "a signal handler has interrupted a lock's own exchange with etcd"


class Link:
    """A connection to one member; making it raises OSError, or AuthorityError if the login is refused."""

    def __init__(self, members: Members, address: tuple[str, int], until: float) -> None:
        self.address: tuple[str, int] = address
        self._channel = members.new_channel(self.address)
        self._mutex = threading.RLock()
        #: The stacks that wait here. A signal handler runs on the stack that it interrupts.
        self._stacks: set[int] = set()
        self._works = False
        self._reader: ThreadWakeup | None = None
        self._waiting: dict[ThreadWakeup, None] = {}
        self.lost: str = ""  # why the connection is lost; empty if it is not
        self._socket = socket.create_connection(self.address, timeout=_left(until))
        try:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            # A second descriptor for reading, because a socket has one timeout for both directions.
            self._to_read = self._socket.dup()
            self._tls = None if members.tls is None else _Tls(members.tls, self.address[0])
            if self._tls is not None:
                self._tls.shake_hands(self._socket, until)
            self._socket.settimeout(_SEND)
            if (login := members.login) is not None:
                (answer,) = self.exchange([login], until)
                members.log_in(self._channel, answer)
        except BaseException:
            self.lose("it could not be opened")
            raise

    def exchange(self, calls: Sequence[Call], until: float) -> list[Answer]:
        """Return the answers to calls; raise OSError if the connection is lost, or nothing came in time."""
        answers: list[Answer] = []
        try:
            self.start(calls, answers)
            in_time = self.wait(lambda: all(answer.is_over for answer in answers), answers, until)
        except BaseException:
            self.cancel(answers)
            raise
        if not in_time:
            raise TimeoutError(f"{shown(self.address)} did not answer in time")
        # An answer counts only if both its message and its status came before the connection was lost.
        if self.lost and not all(answer.is_over and answer.messages for answer in answers):
            raise ChannelError(self.lost)
        return answers

    def start(self, calls: Sequence[Call], answers: list[Answer]) -> None:
        """Begin calls; `answers` gets the answer of each."""

        def begin() -> None:
            answers.extend(map(self._channel.start, calls))
            self._send()

        if current_stack() in self._stacks:
            raise RuntimeError(_INTERRUPTED)
        self._alone(begin)

    def wait(self, ready: Callable[[], bool], answers: Sequence[Answer], until: float) -> bool:
        """Wait until `ready()` is true or the connection is lost; return False if `until` passes first."""
        wakeup, stack = ThreadWakeup(), current_stack()
        for answer in answers:
            answer.notify = wakeup.wake
        try:
            self._waiting[wakeup] = None
            self._stacks.add(stack)
            while not ready() and not self.lost:
                if (left := until - time.monotonic()) <= 0:
                    return False
                if self._reader is None:
                    self._become_reader(wakeup)
                if self._reader is wakeup:
                    self._read(left)
                else:
                    wakeup.sleep(left)
        finally:
            self._waiting.pop(wakeup, None)
            if self._reader is wakeup:
                self._reader = None
            # Also if this thread was not the reader: it may have been woken to read while it was leaving.
            if self._reader is None and (other := next(iter(list(self._waiting)), None)) is not None:
                other.wake()
            self._stacks.discard(stack)  # last: a handler must not wait for the reader that it interrupts
        return True

    def _become_reader(self, wakeup: ThreadWakeup) -> None:
        with self._mutex:
            self._reader = self._reader or wakeup

    def cancel(self, answers: Sequence[Answer]) -> None:
        def forget() -> None:
            for answer in answers:
                self._channel.cancel(answer)
            self._send()

        if not self.lost and not all(answer.is_over for answer in answers):
            with contextlib.suppress(OSError):
                self._alone(forget)

    @property
    def is_crowded(self) -> bool:
        return self._channel.is_crowded

    def lose(self, reason: str) -> None:
        """Close the connection; all calls of all threads are over."""
        self.lost = self.lost or reason or "the connection is lost"
        for each in (self._socket, getattr(self, "_to_read", None)):
            if each is not None:
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)
                each.close()
        with self._mutex:  # not while another thread processes received bytes
            self._channel.lose(self.lost)
        for wakeup in list(self._waiting):
            wakeup.wake()

    def __del__(self) -> None:
        """Close the sockets without a shutdown, because a forked child shares them with its parent."""
        for each in (getattr(self, "_socket", None), getattr(self, "_to_read", None)):
            if each is not None:
                each.close()

    def _alone(self, work: Callable[[], object]) -> None:
        """Do work under the mutex. If it fails, the connection is lost, because its state is unknown."""
        with self._mutex:
            if self._works:
                raise RuntimeError(_INTERRUPTED)
            if self.lost:
                raise ChannelError(self.lost)
            try:
                self._works = True
                work()
            except BaseException as error:
                self.lose(str(error) or type(error).__name__)
                raise
            finally:
                self._works = False

    def _send(self) -> None:
        # No local variable has the data, which may contain a password: some tools show all in a traceback.
        self._socket.sendall(self._encrypted(self._channel.data_to_send()))

    def _encrypted(self, data: bytes) -> bytes:
        return self._tls.encrypt(data) if data and self._tls is not None else data

    def _read(self, seconds: float) -> None:
        # Send what earlier reads have queued, acknowledgements above all.
        with contextlib.suppress(OSError):
            self._alone(self._send)
        try:
            self._to_read.settimeout(seconds)
            data = self._to_read.recv(_CHUNK)
        except TimeoutError:
            return
        except BaseException as error:  # after a signal handler's error, received bytes may be lost
            self.lose(str(error) or type(error).__name__)
            if isinstance(error, OSError):
                return
            raise

        def take() -> None:
            if not data:
                raise ChannelError("the server has closed the connection")
            self._channel.receive(data if self._tls is None else self._tls.decrypt(data))

        with contextlib.suppress(OSError):
            self._alone(take)


def _left(until: float) -> float:
    if (left := until - time.monotonic()) <= 0:
        raise TimeoutError("it could not be opened in time")
    return left


class _Tls:
    """TLS without a socket, because two threads must not use one `SSLSocket` at the same time."""

    def __init__(self, context: ssl.SSLContext, host: str) -> None:
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._object = context.wrap_bio(self._incoming, self._outgoing, server_hostname=host)

    def shake_hands(self, connected: socket.socket, until: float) -> None:
        while True:
            connected.settimeout(_left(until))
            try:
                self._object.do_handshake()
            except ssl.SSLWantReadError:
                connected.sendall(self._outgoing.read())
                if not (data := connected.recv(_CHUNK)):
                    raise ConnectionError("the server has closed the connection instead of TLS") from None
                self._incoming.write(data)
            else:
                connected.sendall(self._outgoing.read())
                return

    def encrypt(self, data: bytes) -> bytes:
        self._object.write(data)
        return self._outgoing.read()

    def decrypt(self, data: bytes) -> bytes:
        self._incoming.write(data)
        found = bytearray()
        with contextlib.suppress(ssl.SSLWantReadError):
            while part := self._object.read(_CHUNK):
                found += part
        return bytes(found)


class Watch:
    """The wakeup with which a thread waits until a key is gone; the step `Wait` sleeps on it."""

    def __init__(self, link: Link, call: Call) -> None:
        self._link = link
        self._answers: list[Answer] = []
        link.start([call], self._answers)

    @property
    def over(self) -> bool:
        return bool(self._link.lost) or watch_is_over(self._answers[0])

    def sleep(self, seconds: float) -> None:
        self._link.wait(lambda: self.over, self._answers, time.monotonic() + seconds)

    def close(self) -> None:
        self._link.cancel(self._answers)
