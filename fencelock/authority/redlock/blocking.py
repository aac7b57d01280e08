"""The blocking driver: runs the protocol's generators over sockets, writing to all before reading any.

A `Channels` is one socket to every node and serves one thread at a time. Commands are written to all
nodes, then replies are read as they come until the protocol has enough: no threads, and no waiting for
the slow. An answer that comes after that is read before the next exchange; if it grants a lock that was
given up in the meantime, the lock is released.

Threads share a pool of `Channels`, so that a lock may be released over other sockets than it was acquired
over. There a RELEASE can overtake the ACQUIRE, on a node that had not answered yet, and the lock would stay
there for its ttl. So a thread gets the same sockets again if they are free; and where they are not, a RELEASE
is sent behind the ACQUIRE as well. A RELEASE that found no connection goes out over the next one to that
node: where the sockets are not used again soon, a thread that lives while anything is owed sees to it.
"""

from __future__ import annotations

import contextlib
import itertools
import select
import threading
import time
import weakref
from collections.abc import Callable, Generator
from typing import Any, TypeVar

from fencelock import _threads
from fencelock.authority.redlock.node import Link, Unusable, broken, pack, read_whole
from fencelock.authority.redlock.polling import new_poll
from fencelock.authority.redlock.protocol import Answer, Broadcast, Command, Request, Round, Said, undoing
from fencelock.authority.redlock.seats import FRESH, MAKES_LOCKS, NEWS, PAID_AFTER, Ballot, Seats, is_lost

_T = TypeVar("_T")

_MOST_IDLE = 16
#: Commands that a node may owe answers to, and is written to without further thought.
_FEW = 4
#: Bytes to read at once where one answer is expected. Python allots so few at no cost.
_ONE_ANSWER = 400
_MOST_KNOWN = 32


class Channels(Seats):
    """One connection to each node, for one thread at a time; arguments as for `Seats`.

    Where an exception leaves a broadcast, be it a signal handler's in the middle of a write, nobody knows
    any more which answer belongs to what: `usable` stays false, and it must be closed.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._poll = new_poll()
        self._by_descriptor: dict[int, int] = {}
        self._news = threading.Condition(self._mutex)
        self._last_used = 0.0
        #: What answers look like that nobody but who waits for them has to hear of.
        self._known: dict[bytes, Answer] = {}
        self.usable = True
        #: Whether a node may be owed something that found no link. Where these are left alone, others pay.
        self.indebted = False
        #: The nonces of locks that a node may still grant here, and is not told here to release.
        self._outstanding: tuple[str, ...] = ()

    def connect(self, request: Broadcast) -> None:
        """Open what is not open, in the background; wait only while less than a majority is."""
        if self._absent:
            self._dial_absent()
            began = time.monotonic()
            with self._news:
                while (left := self._time_to_wait(began, request)) > 0:
                    self._news.wait(left)
            self._adopt()

    def broadcast(self, request: Broadcast) -> Round:
        """Send a command to its nodes, and read until there are answers enough."""
        self.usable = False
        command = request.command
        self._about_to_release = (command.nonce,) if command.script == "release" else ()
        began = time.monotonic()
        if began - self._last_used > FRESH:
            self._adopt()
            while self._read(0.0):
                pass  # behind an old answer there may be the end of the connection
            began = time.monotonic()
        if self._absent:
            self.connect(request)
            began = time.monotonic()
        ballot = Ballot(request)
        self._ask(ballot, request, began)
        deadline = began + request.patience
        now = began
        while not ballot.complete and now < deadline:
            now = self._listen(ballot, deadline - now)
        self._last_used = now
        self.usable = True
        return Round(began, now, ballot.close(), ballot.alike)

    def _ask(self, ballot: Ballot, request: Broadcast, now: float) -> None:
        """Send a command to its nodes; where a link is as it should be, without further ado."""
        command = request.command
        packed, sent = pack(command), (ballot, command, now)
        overdue = now - self._patience
        others = []
        for index in request.nodes:
            link = self._seats[index].link
            if (
                link is None
                or link.unsent
                or ((waiting := link.waiting) and (waiting[0][2] < overdue or len(waiting) > _FEW))
            ):
                others.append(index)
                continue
            try:
                link.send(sent, packed)
            except Unusable as error:
                self._drop(index, error.answer)
        if others:
            super()._ask(ballot, request._replace(nodes=others), now)
            self._flush()
        self._has_asked = True

    def _listen(self, ballot: Ballot, timeout: float) -> float:
        """Read what has arrived, as `_read` does; return when that was over.

        Most answers say what another node has said before, in the same bytes: then they are not read again.
        """
        known = self._known
        for descriptor, _ in self._poll.poll(timeout * 1000):
            index = self._by_descriptor[descriptor]
            seat = self._seats[index]
            link = seat.link
            if link is None:
                continue
            answer, read = None, b""
            try:
                if link.whole:
                    read = _receive_one(link)
                    answer = known.get(read)
                    if answer is None and len(link.waiting) == 1:
                        answer = self._get_to_know(read)
                if answer is None or not link.waiting or link.unsent or seat.owed:
                    self._take(index, link, time.monotonic(), read)
                    link.whole = link.whole or answer is not None
                    continue
                sender, command, _ = link.answered()
                if sender is ballot:
                    ballot.hear(index, answer)
                elif answer.said in MAKES_LOCKS:  # nobody waits for it any more
                    self._undo_now(index, link, command, answer)
            except Unusable as error:
                self._drop(index, error.answer)
        return time.monotonic()

    def _undo_now(self, index: int, link: Link, command: Command, answer: Answer) -> None:
        self._undo(link, command, answer)
        if link.unsent:
            self._write(index, link)

    def _get_to_know(self, read: bytes) -> Answer | None:
        """Return the answer that has been read, if it is one that only who waits for it has to hear."""
        answer = read_whole(read)
        if answer is None or answer.said in NEWS:
            return None
        if answer.said is Said.GRANTED and answer.epoch != self._epoch:
            return None
        if len(self._known) >= _MOST_KNOWN:
            self._known.clear()
        self._known[read] = answer
        return answer

    def _note_epoch(self, epoch: int) -> None:
        self._known.clear()
        super()._note_epoch(epoch)

    def note_outstanding(self) -> None:
        """Note which locks a node may still grant that has not answered."""
        self._outstanding = tuple(
            undo.nonce
            for seat in self._seats
            if seat.link is not None
            for _, command, _ in seat.link.waiting
            for undo in undoing(command, None)
            if not seat.link.releases(undo.nonce)
        )

    @property
    def is_settled(self) -> bool:
        """Whether all locks that were noted are wanted. May be asked in any thread."""
        return all(map(self._is_open, self._outstanding))

    def settle(self) -> None:
        """Send, behind what a node has not answered, the release of locks that are not wanted any more."""
        self.usable = False
        self._about_to_release = ()
        while self._read(0.0):
            pass
        for seat in self._seats:
            if seat.link is not None:
                for _, command, _ in tuple(seat.link.waiting):
                    self._undo(seat.link, command, None)
        self._flush()
        self.note_outstanding()
        self.usable = True

    @property
    def are_left_alone(self) -> bool:
        """Whether nobody has used these for a while. May be asked in any thread."""
        return time.monotonic() - self._last_used >= PAID_AFTER

    def pay(self) -> None:
        """Send what is owed to those nodes that can be reached again, and note whether that has arrived."""
        self.usable = False
        self._about_to_release = ()
        now = time.monotonic()
        for index, seat in enumerate(self._seats):
            if seat.is_owed() and (seat.link is None or is_lost(seat.link, now)):
                self._dial(index, seat)
        self._adopt()
        self.settle()
        self.indebted = any(seat.is_owed() for seat in self._seats)

    def _flush(self) -> None:
        """Write to each node what has been put into its link."""
        for index, seat in enumerate(self._seats):
            if seat.link is not None and seat.link.unsent:
                try:
                    self._write(index, seat.link)
                except Unusable as error:
                    self._drop(index, error.answer)

    def _read(self, timeout: float) -> bool:
        """Read what has arrived; return whether anything had."""
        ready = self._poll.poll(timeout * 1000)
        now = time.monotonic()
        for descriptor, _ in ready:
            index = self._by_descriptor[descriptor]
            link = self._seats[index].link
            if link is None:
                continue
            try:
                self._take(index, link, now)
            except Unusable as error:
                self._drop(index, error.answer)
        return bool(ready)

    def _write(self, index: int, link: Link) -> None:  # noqa: ARG002 - the other driver needs the index
        link.flush()  # the rest when it has answered some of it

    def _watch(self, index: int, link: Link) -> None:
        self._by_descriptor[link.descriptor] = index
        self._poll.register(link.descriptor, select.POLLIN)

    def _unwatch(self, index: int, link: Link) -> None:  # noqa: ARG002 - the same
        self._poll.unregister(link.descriptor)
        del self._by_descriptor[link.descriptor]

    def _note_debt(self, index: int) -> None:
        self.indebted = self.indebted or self._seats[index].is_owed()

    def _announce(self) -> None:
        with self._news:
            self._news.notify_all()


def _receive_one(link: Link) -> bytes:
    """Return what has arrived where one answer is expected; nothing where that is nothing.

    Raises:
        Unusable: if the connection is broken. So it counts too where a signal handler raises an OSError (as
            TimeoutError is one), for the answer may be lost with it: the next would be taken for this one.
    """
    try:
        return link.recv(_ONE_ANSWER)
    except BlockingIOError:
        return b""
    except OSError as error:
        raise broken(error) from error


def run(generator: Generator[Request, Any, _T], pool: Pool, wait: Callable[[float], None] = time.sleep) -> _T:
    """Run one of the protocol's generators to its end, blocking; return what it returns.

    Args:
        generator: the operation.
        pool: where the connections come from.
        wait: how to sleep where it may be woken up.
    """
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
                (wait if request.wakeable else time.sleep)(request.seconds)
                request = generator.send(time.monotonic())
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]
    finally:
        if channels is not None:
            pool.give_back(channels)


class Pool:
    """Lends `Channels` to threads: to each what it had before, or else what was used last.

    Args:
        make: makes another `Channels` when all are lent.
    """

    def __init__(self, make: Callable[[], Channels]) -> None:
        self._make = make
        self._idle: list[Channels] = []
        self._mine = threading.local()
        self._several = False
        self._count = itertools.count(1)
        self._is_paying = False
        self._closed = False

    def lend(self) -> Channels:
        """Return a `Channels` that nobody else uses."""
        if self._several and (mine := getattr(self._mine, "channels", None)) is not None and self._take(mine):
            return mine  # type: ignore[no-any-return]
        try:
            channels = self._idle.pop()
        except IndexError:
            channels = self._make()
            self._several = next(self._count) > 1
        self._mine.channels = channels
        return channels

    def give_back(self, channels: Channels) -> None:
        """Take back what was lent."""
        if not channels.usable or len(self._idle) >= _MOST_IDLE:
            channels.close()
            return
        if self._several:
            channels.note_outstanding()
        self._idle.append(channels)
        if self._several:
            self._settle()
        if self._closed:
            self.close()
        elif channels.indebted and not self._is_paying:
            self._begin_to_pay()

    def _settle(self) -> None:
        """Have locks released that a node may still grant over idle sockets, and that nobody wants any more.

        After what is given back has been put with the idle ones: so of two threads, one that gives back these
        sockets and one that has just released their lock over others, at least one gets here in time.
        """
        for channels in tuple(self._idle):
            # Also while they were out of sight here, another may have released a lock.
            while not channels.is_settled and self._take(channels):
                self._put_back_after(channels, channels.settle)

    def _put_back_after(self, channels: Channels, action: Callable[[], None]) -> None:
        try:
            action()
        finally:
            if channels.usable:
                self._idle.append(channels)
            else:
                channels.close()

    def _begin_to_pay(self) -> None:
        """See to it that what nodes are owed goes out, though these sockets may not be used again."""
        thread = threading.Thread(
            target=_keep_paying, args=(weakref.ref(self),), name="fencelock-paying", daemon=True
        )
        try:
            self._is_paying = True
            _threads.start(thread)
        except BaseException as error:
            self._is_paying = False
            if not isinstance(error, RuntimeError):  # too many threads, or the interpreter is on its way out
                raise

    def pay(self) -> bool:
        """Send what nodes are owed over sockets that are left alone; return whether to try again later."""
        try:
            for channels in tuple(self._idle):
                if channels.indebted and channels.are_left_alone and self._take(channels):
                    self._put_back_after(channels, channels.pay)
            self._settle()
        finally:
            if self._closed:
                self.close()
            # Before the last look: what is given back now is seen here, or another thread begins with it.
            self._is_paying = False
        if again := any(channels.indebted for channels in tuple(self._idle)):
            self._is_paying = True
        return again

    def _take(self, channels: Channels) -> bool:
        """Take sockets out of the idle ones; tell whether they were there."""
        try:
            self._idle.remove(channels)
        except ValueError:
            return False
        return True

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


def _keep_paying(pool: weakref.ref[Pool]) -> None:
    """Pay what is owed, in a thread of its own, as long as there is anything."""
    time.sleep(PAID_AFTER)
    while (its := pool()) is not None and its.pay():
        del its
        time.sleep(PAID_AFTER)
