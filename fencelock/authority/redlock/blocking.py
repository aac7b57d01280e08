"""The blocking driver: runs the protocol's generators over sockets, writing to all before reading any.

A `Channels` is one socket to every node and serves one thread at a time. Commands are written to all
nodes, then replies are read as they come until the protocol has enough: no threads, and no waiting for
the slow. An answer that comes after that is read before the next exchange; if it grants a lock that was
given up in the meantime, the lock is released.

Connections are opened in short-lived background threads, so that a node that hangs while being
connected to costs the others nothing; only the very first exchange waits for them.
"""

from __future__ import annotations

import contextlib
import random
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from typing import Any, TypeVar

from fencelock.authority.redlock.node import Identity, Link, Node, Unusable, pack
from fencelock.authority.redlock.protocol import Answer, Broadcast, Command, Request, Round, Said
from fencelock.errors import MembershipError

_T = TypeVar("_T")

_BACKOFF = 0.05
_LONGEST_BACKOFF = 2.0
_OTHERS_GRACE = 0.05
_MOST_IDLE = 16
#: Seconds after which a link is looked at before it is used: it may be gone, or have old answers.
_FRESH = 0.01
#: Releases that are owed to a node which could not be reached; the rest ends with its ttl.
_MOST_OWED = 1000


class _Seat:
    """One node's place in a `Channels`: its link, or why there is none and when to try again."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.link: Link | None = None
        self.arrived: Link | None = None
        self.dialler: threading.Thread | None = None
        self.lost_bids: deque[Command] = deque(maxlen=_MOST_OWED)
        self.failure = Answer(Said.UNREACHABLE, detail="not connected yet")
        self.failures = 0
        self.retry_at = 0.0

    @property
    def dialling(self) -> bool:
        """Whether a thread is at work on a new link."""
        return self.dialler is not None and self.dialler.is_alive()


class Channels:
    """One connection to each node. Not for two threads at once.

    Where an exception leaves a broadcast, be it a signal handler's in the middle of a write, nobody knows
    any more which answer belongs to what: `usable` stays false, and it must be closed.

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
        self.usable = True

    def close(self) -> None:
        """Close every connection, also those that are still being opened."""
        with self._news:
            self._closed = True
            for seat in self._seats:
                for link in (seat.link, seat.arrived):
                    if link is not None:
                        link.close()
                seat.link = seat.arrived = None

    def leave_to_parent(self) -> None:
        """In a forked child: close its copies of the sockets, by no lock that a thread may have held."""
        for seat in self._seats:
            for link in (seat.link, seat.arrived):
                if link is not None:
                    link.close()

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
        self.usable = False
        if time.monotonic() - self._last_used > _FRESH:
            self._adopt()
            while self._read({}, 0, 0.0):
                pass  # behind an old answer there may be the end of the connection
        self.connect()
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
        for index in unanswered:
            answers[index] = Answer(Said.SILENT)
        self._last_used = now
        self.usable = True
        return Round(began, now, answers)

    def _send(self, index: int, command: Command, packed: bytes, now: float) -> Answer | None:
        seat = self._seats[index]
        link = seat.link
        if link is None:
            return seat.failure
        if link.waiting:
            owing = now - link.waiting[0][2]
            # A hung node gets only what undoes what it was sent before, and not for ever.
            may_undo = command.script == "release" and len(link.waiting) < _MOST_OWED
            if owing > self._patience and not may_undo:
                return Answer(Said.SILENT, detail=f"it owes an answer for {owing:.1f} s")
        try:
            link.send(self._number, command, packed, now)
        except Unusable as error:
            self._drop(index, error.answer)
            return error.answer
        return None

    def _read(self, answers: dict[int, Answer], number: int, timeout: float) -> bool:
        """Read what has arrived: answers to `number` are noted, earlier ones dealt with.

        Returns whether anything had arrived.
        """
        ready = self._poll.poll(timeout * 1000)
        now = time.monotonic()
        for descriptor, _ in ready:
            index = self._by_descriptor[descriptor]
            link = self._seats[index].link
            if link is None:
                continue
            try:
                self._take(index, link, answers, number, now)
            except Unusable as error:
                if any(owed == number for owed, _, _ in link.waiting):
                    answers[index] = error.answer
                self._drop(index, error.answer)
        return bool(ready)

    def _take(self, index: int, link: Link, answers: dict[int, Answer], number: int, now: float) -> None:
        late: dict[str, Command] = {}
        for answered, command, answer in link.receive(now):
            if answered == number:
                answers[index] = answer
                if answer.said is Said.ADMITTED:
                    answers[index] = self._noted(index, link, answer)
            elif answer.said is Said.GRANTED:
                late[command.nonce] = command
            if command.script == "release":
                late.pop(command.nonce, None)
        for command in late.values():
            self._undo(link, command)

    def _noted(self, index: int, link: Link, answer: Answer) -> Answer:
        try:
            link.identity = link.identity.admitted(*answer.facts[:2])
        except MembershipError as error:
            return Answer(Said.CONFIG, detail=str(error))
        self._on_identity(index, link.identity)
        return answer

    def _undo(self, link: Link, bid: Command) -> None:
        """Release what an ACQUIRE may have locked, if its acquisition is over and nobody else has."""
        if self._is_open(bid.nonce):
            return
        if any(sent.nonce == bid.nonce and sent.script == "release" for _, sent, _ in link.waiting):
            return
        locks = len(bid.keys) - 1
        undo = Command("release", bid.nonce, bid.keys, ("", bid.nonce, 0, *(0, 0) * locks))
        link.send(0, undo, pack(undo), time.monotonic())

    def _drop(self, index: int, failure: Answer) -> None:
        seat = self._seats[index]
        if seat.link is not None:
            self._poll.unregister(seat.link.descriptor)
            del self._by_descriptor[seat.link.descriptor]
            seat.link.close()
            seat.lost_bids.extend(sent for _, sent, _ in seat.link.waiting if sent.script == "acquire")
            seat.link = None
        seat.failure = failure

    def _dial(self, index: int, seat: _Seat) -> None:
        seat.dialler = threading.Thread(
            target=self._open, args=(index, seat), name=f"fencelock-connect-{seat.node.name}", daemon=True
        )
        try:
            seat.dialler.start()
        except RuntimeError as error:  # too many threads, or the interpreter is on its way out
            seat.failure = Answer(Said.UNREACHABLE, detail=f"no thread to connect with: {error}")

    def _open(self, index: int, seat: _Seat) -> None:
        try:
            link = seat.node.open(self._node_key)
        except Unusable as error:
            with self._news:
                seat.failures += 1
                pause = min(_LONGEST_BACKOFF, _BACKOFF * 2**seat.failures) * random.uniform(0.5, 1.0)  # noqa: S311
                seat.retry_at = time.monotonic() + pause
                seat.failure = error.answer
                seat.dialler = None
                self._news.notify_all()
            return
        self._on_identity(index, link.identity)
        with self._news:
            seat.dialler = None
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
            arrived = [(index, seat) for index, seat in enumerate(self._seats) if seat.arrived is not None]
            for index, seat in arrived:
                link, seat.arrived = seat.arrived, None
                if link is not None:
                    self._seat(index, seat, link)

    def _seat(self, index: int, seat: _Seat, link: Link) -> None:
        """Use a link that has been opened, unless its server has a seat already: it would vote twice."""
        for other in self._seats:
            if other.link is not None and other.link.identity.run_id == link.identity.run_id:
                link.close()
                seat.failure = Answer(Said.CONFIG, detail=f"the same server as {other.node.name}")
                seat.retry_at = time.monotonic() + _LONGEST_BACKOFF
                return
        seat.link = link
        self._by_descriptor[link.descriptor] = index
        self._poll.register(link.descriptor, select.POLLIN)
        try:
            while seat.lost_bids:
                self._undo(link, seat.lost_bids.popleft())
        except Unusable as error:
            self._drop(index, error.answer)


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
        if not channels.usable or len(self._idle) >= _MOST_IDLE:
            channels.close()
            return
        self._idle.append(channels)
        if self._closed:
            self.close()

    def close(self) -> None:
        """Close what is idle now, and what is lent when it comes back."""
        self._closed = True
        with contextlib.suppress(IndexError):  # another thread may take the last one
            while True:
                self._idle.pop().close()

    def leave_to_parent(self) -> None:
        """In a forked child: close its copies of the idle sockets."""
        for channels in self._idle:
            channels.leave_to_parent()
