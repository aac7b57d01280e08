"""The asyncio driver: runs the protocol's generators for all tasks of a loop over one connection a node.

Everybody's commands go over the same links. What is asked within one tick of the loop leaves in one write
for each node, most of it merged into one command (`merging.py`); answers are matched in the order of the
requests, and a broadcast resumes as soon as it has enough of them, or its patience ends. What comes later is
read all the same, and a grant of an acquisition that has been given up is released.

`Lines` belong to one loop, and are gone with it: a loop knows them by its readers, they know it by a weak
reference only. Where a loop is shut down as `asyncio.run` does it, they are closed before it is.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import time
import weakref
from collections.abc import Awaitable, Callable, Generator, Sequence
from typing import Any, TypeVar

from fencelock.authority.redlock.loop_listening import LoopListener, call_into
from fencelock.authority.redlock.merging import Batch, Gathering, Part, may_be_merged
from fencelock.authority.redlock.node import Link, Unusable, pack
from fencelock.authority.redlock.protocol import Answer, Broadcast, Command, Request, Round, Said, undoing
from fencelock.authority.redlock.seats import FRESH, PAID_AFTER, Ballot, Seats

_T = TypeVar("_T")

#: Seconds by which a patience may be exceeded, so that one look serves many broadcasts.
_SLACK = 0.01


class _Asking(Ballot):
    """A broadcast whose task waits, and when its patience ends."""

    __slots__ = ("deadline", "woken")

    def __init__(self, request: Broadcast, deadline: float, woken: asyncio.Future[None]) -> None:
        super().__init__(request)
        self.deadline = deadline
        #: None as soon as nobody waits any more, for it knows the loop, which is to be free to go.
        self.woken: asyncio.Future[None] | None = woken

    def wake(self) -> None:
        """Let the task go on, unless it is on its way already."""
        if self.woken is not None and not self.woken.done():
            self.woken.set_result(None)


class Lines(Seats):
    """One connection to each node, for all tasks of one loop; other arguments as for `Seats`.

    May be used in the loop's own thread only, and has to be closed there.

    Attributes:
        listener: hears the nodes' calls for those who wait; it ends with the connections.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.listener = LoopListener(loop, [seat.node for seat in self._seats], self._node_key)
        self._loop = weakref.ref(loop)
        self._pid = os.getpid()
        self._asking: set[_Asking] = set()
        self._newcomers: set[asyncio.Future[None]] = set()
        self._congested: set[int] = set()
        self._flush_is_due = False
        self._about_to_release: set[str] = set()
        self._gathering = Gathering()
        #: Those that may hold something back.
        self._batches: list[Batch] = []
        self._looks_at = math.inf
        #: Nodes that are to be connected to for what they are owed, when they may be tried again.
        self._debtors: set[int] = set()
        #: While tasks have their turns, answers lie unread, and must not be taken for missing.
        self._last_read = 0.0
        self._farewell = weakref.finalize(loop, self.close)

    def serve(self, loop: asyncio.AbstractEventLoop) -> bool:
        """Whether these are the running loop's, and open."""
        return not self._closed and self._loop() is loop

    @property
    def is_closed(self) -> bool:
        """Whether these are of no use any more: closed, or left behind by a loop that was."""
        loop = self._loop()
        return self._closed or loop is None or loop.is_closed()

    def close(self) -> None:
        """Close every connection; a broadcast that waits is told that they broke."""
        if self._pid != os.getpid():
            self.leave_to_parent()
            return
        self._farewell.detach()
        self._closed = True
        if (loop := self._loop()) is None or loop.is_closed():
            for asking in self._asking:
                asking.over = True  # nobody can be woken any more
        self._send_gathered(time.monotonic())
        for index in range(len(self._seats)):
            self._drop(index, Answer(Said.UNREACHABLE, detail="the connection was closed here"))
        self.listener.close()
        super().close()

    def leave_to_parent(self) -> None:
        """In a forked child: close its copies of the sockets, by no lock that a thread may have held."""
        super().leave_to_parent()
        self.listener.leave_to_parent()

    @property
    def is_elsewhere(self) -> bool:
        """Whether their loop runs, and does so in another thread than this."""
        loop = self._loop()
        if loop is None or not loop.is_running():
            return False
        try:
            return asyncio.get_running_loop() is not loop
        except RuntimeError:
            return True

    def do_there(self, action: Callable[[], object]) -> None:
        """Have their loop do something soon, if it still runs."""
        loop = self._loop()
        if loop is not None:
            with contextlib.suppress(RuntimeError):  # it has been closed
                loop.call_soon_threadsafe(action)

    async def broadcast(self, request: Broadcast) -> Round:
        """Send a command to its nodes, and wait until there are answers enough."""
        if request.patience <= 0.0:
            return self.tell(request)
        began = time.monotonic()
        if began - self._last_read > FRESH or self._absent:
            began = await self._look_after_links(request, began)
        loop = asyncio.get_running_loop()
        deadline = began + request.patience
        woken = loop.create_future()
        asking = _Asking(request, deadline, woken)
        self._put(asking, request, began)
        if not self._flush_is_due:
            self._flush_soon(loop)
        try:
            if not asking.complete:
                if deadline < self._looks_at:
                    self._look_at(deadline, loop)
                self._asking.add(asking)
                await woken
        finally:
            self._asking.discard(asking)
            asking.woken = None
            answers = asking.close()
        return Round(began, time.monotonic(), answers, asking.alike)

    def tell(self, request: Broadcast) -> Round:
        """Send a command to its nodes at once, and wait for nothing: also where no loop runs any more."""
        now = time.monotonic()
        ballot = Ballot(request)
        ballot.over = True
        self._put(ballot, request, now)
        self._flush()
        return Round(now, now, ballot.close())

    async def _look_after_links(self, request: Broadcast, now: float) -> float:
        """Read what has arrived, and open what is not open, before a command is sent; return when that is."""
        command = request.command
        if command.script == "release":
            self._about_to_release.add(command.nonce)
        try:
            if now - self._last_read > FRESH:
                self._look(now)
                self._flush()  # in a turn that is so long, others have waited for its end
            if self._absent:
                self._dial_absent()
                await self._await_links(request)
                now = time.monotonic()
        finally:
            self._about_to_release.discard(command.nonce)
        return now

    async def _await_links(self, request: Broadcast) -> None:
        """Wait while less than a majority is connected, as long as that may change."""
        loop = asyncio.get_running_loop()
        began = time.monotonic()
        while (left := self._time_to_wait(began, request)) > 0:
            newcomer = loop.create_future()
            self._newcomers.add(newcomer)
            try:
                await asyncio.wait((newcomer,), timeout=left)
            finally:
                self._newcomers.discard(newcomer)
        self._adopt()

    def _announce(self) -> None:
        call_into(self._loop(), self._welcome, self.close)

    def _welcome(self) -> None:
        self._adopt()
        for newcomer in self._newcomers:
            if not newcomer.done():
                newcomer.set_result(None)

    def _note_debt(self, index: int) -> None:
        """See to it that a node that is owed something is connected to, though nobody asks any more."""
        seat, loop = self._seats[index], self._loop()
        if seat.link is not None or not seat.is_owed() or index in self._debtors or self._closed:
            return
        if loop is not None and not loop.is_closed():
            loop.call_later(max(seat.retry_at - time.monotonic(), PAID_AFTER), self._pay, index)
            self._debtors.add(index)  # not before: who is interrupted in between connects once too often

    def _pay(self, index: int) -> None:
        """Connect where something is owed still: it goes out with the link. Do so until there is one."""
        self._debtors.discard(index)
        self._note_debt(index)
        if index in self._debtors:
            self._dial(index, self._seats[index])

    def _readable(self, index: int, link: Link) -> None:
        """Read what has arrived; called by the loop."""
        self._last_read = now = time.monotonic()
        try:
            self._take(index, link, now)
        except Unusable as error:
            self._drop(index, error.answer)
        except BaseException:
            # A signal handler's: nobody knows any more which answer belongs to what.
            self._drop(index, Answer(Said.UNREACHABLE, detail="reading was interrupted"))
            raise

    def _look(self, now: float) -> None:
        """Read everything that has arrived, before answers are missed or a link is trusted."""
        self._adopt()
        self._last_read = now
        for index, seat in enumerate(self._seats):
            if seat.link is not None:
                self._readable(index, seat.link)

    def _put(self, ballot: Ballot, request: Broadcast, now: float) -> None:
        """Have a request leave with the next flush, behind those before it."""
        if not may_be_merged(request, len(self._seats)):
            self._send_gathered(now)
            self._ask(ballot, request, now)
            return
        if not self._gathering.add(ballot, request):
            self._send_gathered(now)
            self._gathering.add(ballot, request)
        if self._gathering.full:
            self._flush()

    def _send_gathered(self, now: float) -> None:
        """Put what has been gathered into the links: in one command, for nodes that can be asked as usual."""
        gathering = self._gathering
        if not (parts := gathering.parts):
            return
        self._gathering = Gathering()
        if len(parts) == 1:
            self._ask(*parts[0], now)
            return
        links: list[Link] = []
        others: list[int] = []
        for index, seat in enumerate(self._seats):
            if seat.link is not None and seat.link.merges and not self._is_behind(seat.link, now):
                links.append(seat.link)
            else:
                others.append(index)
        if others:
            for ballot, request in parts:
                self._ask(ballot, request._replace(nodes=others), now)
        # What these answer by themselves counts as well: less of the others may complete a part.
        quorum = len(self._seats) // 2 + 1 - sum(self._seats[index].link is not None for index in others)
        batch = Batch(gathering, len(links), quorum, self._undo_late, self._ask_singly)
        command = gathering.command()
        packed = pack(command)
        for link in links:
            link.put((batch, command, now), packed)
        self._batches = [*(each for each in self._batches if each.holds), batch]

    def _ask_singly(self, index: int, parts: Sequence[Part], answer: Answer) -> None:
        """Send a node what it has not executed; where it is gone, `answer` says why."""
        link = self._seats[index].link
        if link is None:
            for ballot, _ in parts:
                if not ballot.over:
                    ballot.hear(index, answer)
            return
        if answer.said is Said.ERROR and not answer.detail.startswith("OOM"):
            link.merges = False
        now = time.monotonic()
        late = []
        for ballot, request in parts:
            command = request.command
            if not ballot.over or command.script == "release":
                link.put((ballot, command, now), pack(command))
            elif answer.said is Said.ERROR:  # an ACQUIRE that nobody waits for, and who knows how far it came
                late.append(command)
        self._undo_late(index, late)
        self._flush_after_this()

    def _releases(self, link: Link, nonce: str) -> bool:
        """Whether that is so; what has been gathered is about to go out, too."""
        return nonce in self._gathering.releasing or super()._releases(link, nonce)

    def _undo_late(self, index: int, commands: Sequence[Command]) -> None:
        """Release what a node has granted for acquisitions that have been given up."""
        over = [command for command in commands if not self._is_open(command.nonce)]
        if not over:
            return
        seat = self._seats[index]
        if seat.link is None:
            seat.owe(undo for command in over for undo in undoing(command, None))
            self._note_debt(index)
            return
        for command in over:
            self._undo(seat.link, command, None)
        self._flush_after_this()

    def _flush_after_this(self) -> None:
        loop = self._loop()
        if loop is not None and not loop.is_closed() and not self._flush_is_due:
            self._flush_soon(loop)

    def _flush_soon(self, loop: asyncio.AbstractEventLoop) -> None:
        loop.call_soon(self._flush)
        self._flush_is_due = True  # not before: who is interrupted in between flushes once too often

    def _flush(self) -> None:
        """Write to each node what has been put there since the last time."""
        self._flush_is_due = False
        self._send_gathered(time.monotonic())
        for index, seat in enumerate(self._seats):
            if seat.link is not None and seat.link.unsent and index not in self._congested:
                self._write_or_drop(index, seat.link)

    def _write_or_drop(self, index: int, link: Link) -> None:
        try:
            self._write(index, link)
        except Unusable as error:
            self._drop(index, error.answer)
        except BaseException:
            self._drop(index, Answer(Said.UNREACHABLE, detail="writing was interrupted"))
            raise

    def _write(self, index: int, link: Link) -> None:
        """Write as much as the socket takes; the loop says when it takes more."""
        complete = link.flush()
        if complete == (index in self._congested):
            loop = self._loop()
            if complete:
                self._congested.discard(index)
                if loop is not None:
                    loop.remove_writer(link.descriptor)
            elif loop is not None and not loop.is_closed():
                self._congested.add(index)
                loop.add_writer(link.descriptor, self._write_or_drop, index, link)

    def _watch(self, index: int, link: Link) -> None:
        loop = self._loop()
        if loop is not None and not loop.is_closed():
            loop.add_reader(link.descriptor, self._readable, index, link)

    def _unwatch(self, index: int, link: Link) -> None:
        congested = index in self._congested
        self._congested.discard(index)
        loop = self._loop()
        if loop is not None and not loop.is_closed():
            loop.remove_reader(link.descriptor)
            if congested:
                loop.remove_writer(link.descriptor)

    def _look_at(self, deadline: float, loop: asyncio.AbstractEventLoop) -> None:
        """Look for broadcasts whose patience has ended then, or not long after."""
        # The handle is not kept: it knows the loop, which is to be free to go.
        loop.call_later(max(deadline - time.monotonic(), _SLACK), self._end_patience, deadline)
        self._looks_at = deadline  # not before: who is interrupted in between looks once too often

    def _end_patience(self, looks_at: float) -> None:
        if looks_at != self._looks_at:
            return  # an earlier look has taken its place
        self._looks_at = math.inf
        now = time.monotonic()
        try:
            self._look(now)  # the loop may have been busy with something else, and the answers be here
            for batch in self._batches:
                batch.tell_held()
        finally:
            self._wake_overdue(now)

    def _wake_overdue(self, now: float) -> None:
        """Wake whose patience has ended, and see to it that the others are looked for."""
        next_end = math.inf
        for asking in self._asking:
            if asking.deadline <= now:
                asking.wake()
            else:
                next_end = min(next_end, asking.deadline)
        loop = self._loop()
        if next_end < self._looks_at and loop is not None:
            self._look_at(next_end, loop)


async def run(
    generator: Generator[Request, Any, _T],
    lines: Lines,
    wait: Callable[[float], Awaitable[Lines]] | None = None,
) -> _T:
    """Run one of the protocol's generators to its end; return what it returns.

    Args:
        generator: the operation.
        lines: the loop's connections.
        wait: how to sleep where it may be woken up; returns the connections to go on with, for these may
            have been closed in the meantime.
    """
    try:
        request = next(generator)
        while True:
            if isinstance(request, Broadcast):
                request = generator.send(await lines.broadcast(request))
            else:
                if wait is not None and request.wakeable:
                    lines = await wait(request.seconds)
                else:
                    await asyncio.sleep(request.seconds)
                request = generator.send(time.monotonic())
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]


def tell(generator: Generator[Request, Any, object], lines: Lines) -> None:
    """Run a generator whose answers nobody needs: send what it has to say, and wait for nothing.

    May be called anywhere: a coroutine that nobody awaits any more ends wherever it is thrown away.
    """
    if lines.is_elsewhere:
        lines.do_there(lambda: tell(generator, lines))
        return
    with contextlib.suppress(StopIteration):
        request = next(generator)
        while isinstance(request, Broadcast):
            request = generator.send(lines.tell(request))
