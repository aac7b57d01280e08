"""The blocking driver: runs the protocol's generators over sockets, writing to all before reading any.

A `Channels` is one socket to every node and serves one thread at a time. Commands are written to all
nodes, then replies are read as they come until the protocol has enough: no threads, and no waiting for
the slow. An answer that comes after that is read before the next exchange; if it grants a lock that was
given up in the meantime, the lock is released.

Connections are opened in short-lived background threads, so that a node that hangs while being
connected to costs the others nothing; only the very first exchange waits for them.
"""

from __future__ import annotations

import random
import select
import threading
import time
from collections.abc import Callable, Generator, Sequence
from typing import Any, TypeVar

from fencelock.authority.redlock.node import Identity, Link, Node, Unusable, pack
from fencelock.authority.redlock.protocol import Answer, Broadcast, Command, Request, Round, Said

_T = TypeVar("_T")

_BACKOFF = 0.05
_LONGEST_BACKOFF = 2.0
_OTHERS_GRACE = 0.05
_MOST_IDLE = 16


class _Seat:
    """One node's place in a `Channels`: its link, or why there is none and when to try again."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.link: Link | None = None
        self.arrived: Link | None = None
        self.dialling = False
        self.failure = Answer(Said.UNREACHABLE, detail="not connected yet")
        self.failures = 0
        self.retry_at = 0.0


class Channels:
    """One connection to each node. Not for two threads at once.

    Args:
        nodes: where the nodes are.
        node_key: key of a node's hash, which is read while connecting.
        on_identity: told who answered whenever a connection has been opened.
        is_open: whether an acquisition (by its nonce) is wanted still; a late grant of any other is
            released.
        connect_timeout: seconds that a node may take to accept a connection.
        patience: seconds after which a node that owes an answer is not asked again.
    """

    def __init__(
        self,
        nodes: Sequence[Node],
        node_key: str,
        *,
        on_identity: Callable[[int, Identity], None],
        is_open: Callable[[str], bool],
        connect_timeout: float,
        patience: float,
    ) -> None:
        self._seats = [_Seat(node) for node in nodes]
        self._node_key = node_key
        self._on_identity = on_identity
        self._is_open = is_open
        self._connect_timeout = connect_timeout
        self._patience = patience
        self._poll = select.poll()
        self._by_descriptor: dict[int, int] = {}
        self._news = threading.Condition()
        self._number = 0
        self._last_used = 0.0
        self._closed = False

    def close(self) -> None:
        """Close every connection, also those that are still being opened."""
        with self._news:
            self._closed = True
            for seat in self._seats:
                for link in (seat.link, seat.arrived):
                    if link is not None:
                        link.close()
                seat.link = seat.arrived = None

    def connect(self) -> None:
        """Open what is not open, in the background; wait only while less than a majority is."""
        now = time.monotonic()
        missing = False
        for index, seat in enumerate(self._seats):
            if seat.link is None:
                missing = True
                if not seat.dialling and seat.arrived is None and now >= seat.retry_at:
                    self._dial(index, seat)
        if missing:
            self._await_majority(now, grace=_OTHERS_GRACE if self._number == 0 else 0.0)
            self._adopt()

    def broadcast(self, request: Broadcast) -> Round:
        """Send a command to its nodes, and read until there are answers enough."""
        self.connect()
        self._catch_up()
        self._number += 1
        packed = pack(request.command)
        answers: dict[int, Answer] = {}
        unanswered: set[int] = set()
        began = time.monotonic()
        for index in request.nodes:
            problem = self._send(index, request.command, packed, began)
            if problem is None:
                unanswered.add(index)
            else:
                answers[index] = problem
        deadline = began + request.patience
        now = began
        while unanswered and not request.enough(answers) and now < deadline:
            self._read(answers, self._number, deadline - now)
            unanswered.difference_update(answers)
            now = time.monotonic()
        self._last_used = now
        for index in unanswered:
            answers[index] = Answer(Said.SILENT)
        return Round(began, now, answers)

    def _catch_up(self) -> None:
        """Read what nobody has looked at yet: old answers, and the news that a connection is gone."""
        now = time.monotonic()
        idle = now - self._last_used > self._patience
        if idle or any(seat.link and self._owes_too_long(seat.link, now) for seat in self._seats):
            self._read({}, 0, 0.0)
            self.connect()

    def _send(self, index: int, command: Command, packed: bytes, now: float) -> Answer | None:
        seat = self._seats[index]
        link = seat.link
        if link is None:
            return seat.failure
        if self._owes_too_long(link, now):
            owes_this = any(waiting.nonce == command.nonce for _, waiting, _ in link.waiting)
            # A hung node gets only what undoes what it was sent before.
            if not (command.script == "release" and owes_this):
                return Answer(Said.SILENT, detail=f"it owes an answer for {now - link.waiting[0][2]:.1f} s")
        try:
            link.send(self._number, command, packed, now)
        except Unusable as error:
            self._drop(index, error.answer)
            return error.answer
        return None

    def _owes_too_long(self, link: Link, now: float) -> bool:
        return bool(link.waiting) and now - link.waiting[0][2] > self._patience

    def _read(self, answers: dict[int, Answer], number: int, timeout: float) -> None:
        """Read what has arrived: answers to `number` are noted, earlier ones dealt with."""
        for descriptor, _ in self._poll.poll(timeout * 1000):
            index = self._by_descriptor[descriptor]
            link = self._seats[index].link
            if link is None:
                continue
            now = time.monotonic()
            try:
                for answered, command, answer in link.receive(now):
                    if answered == number:
                        answers[index] = self._noted(index, link, answer)
                    else:
                        self._deal_with_late(link, command, answer, now)
            except Unusable as error:
                self._drop(index, error.answer)
                if any(owed == number for owed, _, _ in link.waiting):
                    answers[index] = error.answer

    def _noted(self, index: int, link: Link, answer: Answer) -> Answer:
        if answer.said is Said.ADMITTED:
            link.identity = link.identity.admitted(*answer.facts)
            self._on_identity(index, link.identity)
        return answer

    def _deal_with_late(self, link: Link, command: Command, answer: Answer, now: float) -> None:
        if answer.said is not Said.GRANTED or self._is_open(command.nonce):
            return
        locks = len(command.keys) - 1
        undo = Command("release", command.nonce, command.keys, ("", command.nonce, 0, *(0, 0) * locks))
        link.send(0, undo, pack(undo), now)

    def _drop(self, index: int, failure: Answer) -> None:
        seat = self._seats[index]
        if seat.link is not None:
            self._poll.unregister(seat.link.descriptor)
            del self._by_descriptor[seat.link.descriptor]
            seat.link.close()
            seat.link = None
        seat.failure = failure

    def _dial(self, index: int, seat: _Seat) -> None:
        seat.dialling = True
        threading.Thread(
            target=self._open, args=(index, seat), name=f"fencelock-connect-{seat.node.name}", daemon=True
        ).start()

    def _open(self, index: int, seat: _Seat) -> None:
        try:
            link = seat.node.open(self._node_key)
        except Unusable as error:
            with self._news:
                seat.failures += 1
                pause = min(_LONGEST_BACKOFF, _BACKOFF * 2**seat.failures) * random.uniform(0.5, 1.0)  # noqa: S311
                seat.retry_at = time.monotonic() + pause
                seat.failure = error.answer
                seat.dialling = False
                self._news.notify_all()
            return
        self._on_identity(index, link.identity)
        with self._news:
            seat.dialling = False
            seat.failures = 0
            if self._closed:
                link.close()
            else:
                seat.arrived = link
            self._news.notify_all()

    def _await_majority(self, began: float, *, grace: float) -> None:
        """Wait until a majority is connected, and then up to `grace` seconds for the others."""
        quorum = len(self._seats) // 2 + 1
        deadline = began + self._connect_timeout
        enough = False
        with self._news:
            while any(seat.dialling for seat in self._seats):
                connected = sum(bool(seat.link or seat.arrived) for seat in self._seats)
                now = time.monotonic()
                if connected >= quorum and not enough:
                    enough = True
                    deadline = min(deadline, now + grace)
                if now >= deadline:
                    return
                self._news.wait(deadline - now)

    def _adopt(self) -> None:
        with self._news:
            for index, seat in enumerate(self._seats):
                if seat.arrived is not None:
                    seat.link, seat.arrived = seat.arrived, None
                    self._by_descriptor[seat.link.descriptor] = index
                    self._poll.register(seat.link.descriptor, select.POLLIN)


def run(generator: Generator[Request, Any, _T], pool: Pool) -> _T:
    """Run one of the protocol's generators to its end, blocking; return what it returns."""
    channels: Channels | None = None
    try:
        request = next(generator)
        while True:
            if isinstance(request, Broadcast):
                channels = channels or pool.lend()
                request = generator.send(channels.broadcast(request))
            else:
                if channels is not None:
                    pool.give_back(channels)
                    channels = None
                time.sleep(request.seconds)
                request = generator.send(time.monotonic())
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]
    finally:
        if channels is not None:
            pool.give_back(channels)


class Pool:
    """Lends `Channels` to threads, the last used first.

    Args:
        make: makes another `Channels` when all are lent.
    """

    def __init__(self, make: Callable[[], Channels]) -> None:
        self._make = make
        self._idle: list[Channels] = []
        self._closed = False

    def lend(self) -> Channels:
        """Return a `Channels` that nobody else uses."""
        try:
            return self._idle.pop()
        except IndexError:
            return self._make()

    def give_back(self, channels: Channels) -> None:
        """Take back what was lent."""
        if self._closed or len(self._idle) >= _MOST_IDLE:
            channels.close()
        else:
            self._idle.append(channels)

    def close(self) -> None:
        """Close what is idle now, and what is lent when it comes back."""
        self._closed = True
        while self._idle:
            self._idle.pop().close()
