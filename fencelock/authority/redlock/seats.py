"""The N nodes' places: what the blocking and the asyncio driver have in common.

Which links are open and which are being opened; who may be asked at the moment; what becomes of an answer
that nobody waits for any more. A driver adds how it waits (`Ballot.wake`), how written data leaves
(`_write`), how a socket is watched, and who is told of a new link (`_announce`).

How links are opened stands in `dialling.py`.
"""

from __future__ import annotations

import abc
import itertools
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence

from fencelock.authority.redlock.dialling import LONGEST_BACKOFF, Dialler
from fencelock.authority.redlock.node import Identity, Link, Node, Sent, Unusable, leads_elsewhere, pack
from fencelock.authority.redlock.protocol import Answer, Answers, Broadcast, Command, Said, undoing
from fencelock.errors import MembershipError

#: Seconds after which a link is looked at before it is used: it may be gone, or have old answers.
FRESH = 0.01
#: RELEASEs that are kept for a node without a link, of what it may hold; the rest ends with its ttl.
MOST_OWED = 10_000
#: The same for what it was not asked for, or, where it is behind with its answers, may not have been.
MOST_OTHERS = 1000
#: RELEASEs that are owed, and put into a new link at once; the next when it has answered some.
_PORTION = 200
#: Seconds until a node that is owed something is connected to for that alone, and then again.
PAID_AFTER = 0.5
#: Seconds after which it is not any more: few locks last longer. It goes out when the node is asked again.
_WORTH_PAYING = 600.0

#: Answers after which there may be a lock that was not there before.
MAKES_LOCKS = frozenset({Said.GRANTED, Said.EXTENDED, Said.AMNESIA, Said.RESTARTED})
_SILENT = Answer(Said.SILENT)
#: Looked up for every answer.
_GRANTED, _MERGED = Said.GRANTED, Said.MERGED
_ADMITTING = frozenset({Said.ADMITTED, Said.OPENED})
_FORGETFUL = frozenset({Said.AMNESIA, Said.RESTARTED})
#: Answers that say something about the node itself.
NEWS = _ADMITTING | _FORGETFUL | {Said.UNREACHABLE, Said.ERROR}
_OTHERS_GRACE = 0.05
#: Seconds after which a node that still owes an answer is connected to anew: its machine may be gone, and
#: nobody there to say that the connection is.
_LOST_AFTER = 10.0
#: Answers that a node may owe on one link before it counts as silent.
_MOST_UNANSWERED = 50_000


class Ballot:
    """A broadcast that waits for answers, and what has come back.

    Args:
        request: what is asked.

    Attributes:
        answers: of each node that has answered, or could not be asked.
        alike: what most of the nodes have said, where that is all there is to know.
        complete: whether more of them would change nothing.
        over: whether nobody waits any more: what comes now is late.
    """

    __slots__ = ("_request", "alike", "answers", "complete", "over")

    def __init__(self, request: Broadcast) -> None:
        self._request = request
        self.answers: dict[int, Answer] = {}
        self.alike: Answer | None = None
        self.complete = False
        self.over = False

    def hear(self, node: int, answer: Answer) -> None:
        """Note a node's answer, or why there is none."""
        answers, request = self.answers, self._request
        answers[node] = answer
        count = len(answers)
        if count < request.least or self.complete:
            return
        if (
            answer.said is request.hoped
            and 2 * count > len(request.nodes)
            and list(answers.values()).count(answer) == count
        ):
            self.alike = answer
        elif count < len(request.nodes) and not request.enough(answers):
            return
        self.complete = True
        self.wake()

    def hear_alike(self, nodes: Sequence[int], answer: Answer) -> None:
        """Note the answer that several nodes have given; at least one."""
        request = self._request
        if answer.said is request.hoped and not self.answers and 2 * len(nodes) > len(request.nodes):
            self.answers = dict.fromkeys(nodes, answer)
            self.alike = answer
            self.complete = True
            self.wake()
            return
        *most, last = nodes
        for node in most:
            self.answers[node] = answer
        self.hear(last, answer)

    def wake(self) -> None:
        """Let who waits go on."""

    def close(self) -> Answers:
        """Return an answer for each node; what comes from now on is late."""
        self.over = True
        answers, nodes = self.answers, self._request.nodes
        if len(answers) == len(nodes):
            return answers
        return dict.fromkeys(nodes, _SILENT) | answers


class Seat(Dialler):
    """One node's place: its link, or why there is none and when to try again.

    Attributes:
        link: what it is spoken to over; None while there is none.
        owed: RELEASEs of what it may have locked over the last link, by nonce; they are sent over the next.
        others: the latest RELEASEs of what it was not asked for. Another connection may have made it again.
    """

    def __init__(self, node: Node, mutex: threading.RLock) -> None:
        super().__init__(node, mutex)
        self.link: Link | None = None
        self.owed: dict[str, Command] = {}
        self.others: deque[Command] = deque(maxlen=MOST_OTHERS)
        #: Nonces of ACQUIREs that found no link.
        self._unasked: set[str] = set()
        #: Nonces that it is still to grant, until when that stays so, and how many others it was told of.
        self._to_grant: set[str] = set()
        self._until = -math.inf
        self._others_told = 0
        self._owed_at = -math.inf

    def is_owed(self) -> bool:
        """Whether there is a RELEASE that has found no link, or something that may be lost with this one."""
        if self.owed:
            latest = self._owed_at
        elif self.link is not None and self.link.waiting:
            latest = self.link.waiting[0][2]
        else:
            return False
        return time.monotonic() - latest < _WORTH_PAYING

    def owe(self, undos: Iterable[Command]) -> None:
        """Keep RELEASEs for the next link."""
        self._owed_at = time.monotonic()
        self.owed.update((undo.nonce, undo) for undo in undos)
        for nonce in list(itertools.islice(self.owed, max(0, len(self.owed) - MOST_OWED))):
            del self.owed[nonce]

    def miss(self, command: Command) -> None:
        """Take notice of a command that found no link: of a RELEASE, which is kept for the next."""
        if command.script == "acquire":
            if len(self._unasked) >= MOST_OWED:
                self._unasked.clear()
            self._unasked.add(command.nonce)
        elif command.nonce in self._unasked:
            # Among thousands of these that come and go while a node is away, the rest would be lost.
            self.others += undoing(command, None)
        elif command.script == "release":
            self.owe(undoing(command, None))

    def owe_all(self) -> None:
        """Owe the others as well, now that there is a link."""
        self.owe(self.others)
        self.others.clear()
        self._unasked.clear()

    def must_hear(self, link: Link, release: Command, overdue: float) -> bool:
        """Whether to send a RELEASE to a node that owes an answer to what was sent before `overdue`.

        Of what it is still to grant, in any case. Others, which it may have granted before or was never asked
        for, so many.
        """
        if link.waiting[0][2] >= self._until:
            # As long as it owes anything that old, it is not asked for more.
            self._until = overdue
            self._to_grant = {
                command.nonce for _, command in link.unanswered() if command.script == "acquire"
            }
            self._others_told = 0
        if release.nonce in self._to_grant:
            return True
        self._others_told += 1
        return self._others_told <= MOST_OTHERS


class Seats(abc.ABC):
    """One connection to each node. Not for two threads at once.

    Args:
        nodes: where the nodes are.
        node_key: key of a node's hash, which is read while connecting.
        on_identity: told who answered whenever a connection has been opened.
        is_open: whether an acquisition (by its nonce) is wanted still; a late grant of any other is
            released.
        on_trouble: told when an answer shows that a node has forgotten, restarted or is in another epoch
            than the others.
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
        on_trouble: Callable[[], None],
        connect_timeout: float,
        patience: float,
    ) -> None:
        #: Held for what the connecting threads share with the driver's.
        self._mutex = threading.RLock()
        self._seats = [Seat(node, self._mutex) for node in nodes]
        self._node_key = node_key
        self._on_identity = on_identity
        self._is_open = is_open
        self._on_trouble = on_trouble
        self._epoch: int | None = None
        self._connect_timeout = connect_timeout
        self._patience = patience
        self._has_asked = False
        #: The nonces of RELEASEs that go out after old answers have been read; they need no others.
        self._about_to_release: Collection[str] = ()
        self._majority_at: float | None = None
        self._closed = False
        self._absent = len(self._seats)

    @abc.abstractmethod
    def _watch(self, index: int, link: Link) -> None:
        """See to it that what arrives on a link is read."""

    @abc.abstractmethod
    def _unwatch(self, index: int, link: Link) -> None:
        """Undo `_watch`, before the link is closed."""

    @abc.abstractmethod
    def _write(self, index: int, link: Link) -> None:
        """Have what was put into a link go out; raise `Unusable` where it cannot."""

    @abc.abstractmethod
    def _announce(self) -> None:
        """Tell the driver that a connection has come up or failed; called in the connecting thread."""

    @abc.abstractmethod
    def _note_debt(self, index: int) -> None:
        """Take notice that a node without a link may be owed something; called in the driver's thread."""

    def close(self) -> None:
        """Close every connection, also those that are still being opened."""
        with self._mutex:
            self._closed = True
            for seat in self._seats:
                seat.close()
                if seat.link is not None:
                    seat.link.hang_up()
                seat.link = None

    def leave_to_parent(self) -> None:
        """In a forked child: close its copies of the sockets, by no lock that a thread may have held."""
        for seat in self._seats:
            seat.leave_to_parent()
            if seat.link is not None:
                seat.link.close()

    def _ask(self, ballot: Ballot, request: Broadcast, now: float) -> None:
        """Put a command into the links of its nodes; where there is none, that is the answer."""
        self._has_asked = True
        command, packed = request.command, pack(request.command)
        sent = (ballot, command, now)
        seats = self._seats
        for index in request.nodes:
            seat = seats[index]
            link = seat.link
            if link is None:
                ballot.hear(index, seat.failure)
                seat.miss(command)
                self._note_debt(index)
            elif not self._is_behind(link, now) or (
                command.script == "release"
                and len(link.waiting) < 2 * _MOST_UNANSWERED
                and seat.must_hear(link, command, now - self._patience)
            ):
                link.put(sent, packed)
            else:
                ballot.hear(index, _why_silent(link.waiting, now))
                if is_lost(link, now):
                    self._dial(index, seat)

    def _is_behind(self, link: Link, now: float) -> bool:
        """Whether a link owes answers for so long, or so many, that not everything may be sent there."""
        waiting = link.waiting
        return bool(waiting) and (waiting[0][2] < now - self._patience or len(waiting) >= _MOST_UNANSWERED)

    def _take(self, index: int, link: Link, now: float, read: bytes = b"") -> None:
        """Read what has arrived on a link: hand on what is waited for, deal with the rest."""
        for (ballot, command, _), answer in link.receive(now, read):
            said = answer.said
            if said is _GRANTED or said is _MERGED:
                if answer.epoch != self._epoch:
                    self._note_epoch(answer.epoch)
            elif said in NEWS:
                answer = self._noted(index, link, answer, now)  # noqa: PLW2901 - it may be no good
            if ballot is not None and not ballot.over:
                ballot.hear(index, answer)
            elif said in MAKES_LOCKS:
                self._undo(link, command, answer)
        if link.leads_elsewhere:
            raise Unusable(Said.UNREACHABLE, "another server has taken over")
        if self._seats[index].owed:
            self._put_owed(self._seats[index], link)
        if link.unsent:
            self._write(index, link)

    def _noted(self, index: int, link: Link, answer: Answer, now: float) -> Answer:
        """Take notice of what an answer says about its node; return the answer, or what is wrong with it."""
        if answer.said in _ADMITTING:
            return self._met_again(index, link, answer)
        if answer.said in _FORGETFUL:
            self._on_trouble()
            self._look_elsewhere(index, link, now)
        elif leads_elsewhere(answer):
            link.leads_elsewhere = True
        return answer

    def _note_epoch(self, epoch: int) -> None:
        if self._epoch is not None:  # some nodes have moved on; others may lag behind
            self._on_trouble()
        self._epoch = epoch

    def _met_again(self, index: int, link: Link, answer: Answer) -> Answer:
        try:
            link.identity = link.identity.admitted(*answer.facts[:2])
        except MembershipError as error:
            return Answer(Said.CONFIG, detail=str(error))
        self._on_identity(index, link.identity)
        return answer

    def _undo(self, link: Link, command: Command, answer: Answer | None) -> None:
        """Release what a command may have locked, if its grant is over and no release is under way."""
        nonce = command.nonce  # of most commands there is but one, and mostly nothing is to do
        if not nonce or self._is_left_behind(link, nonce):
            for undo in undoing(command, answer):
                self._put_undo(link, undo)

    def _put_owed(self, seat: Seat, link: Link) -> None:
        """Put a portion of what is owed into a link; the next is put when the node has answered some."""
        most = max(len(link.waiting) + 1, _PORTION)
        for nonce, undo in list(seat.owed.items()):
            if len(link.waiting) >= most:
                return
            self._put_undo(link, undo)
            del seat.owed[nonce]

    def _put_undo(self, link: Link, undo: Command) -> None:
        if self._is_left_behind(link, undo.nonce):
            link.put((None, undo, time.monotonic()), pack(undo))

    def _is_left_behind(self, link: Link, nonce: str) -> bool:
        return not self._is_open(nonce) and not self._releases(link, nonce)

    def _releases(self, link: Link, nonce: str) -> bool:
        """Whether a RELEASE of that nonce is under way on a link, or is about to be."""
        return nonce in self._about_to_release or link.releases(nonce)

    def _drop(self, index: int, failure: Answer) -> None:
        """Close a node's link: what it owes is answered with the failure, and released later."""
        seat = self._seats[index]
        seat.failure = failure
        if (link := seat.link) is None:
            return
        seat.link = None
        self._absent += 1
        self._unwatch(index, link)
        link.hang_up()
        for ballot, _, _ in link.waiting:
            if ballot is not None and not ballot.over:
                ballot.hear(index, failure)
        seat.owe(undo for _, command in link.unanswered() for undo in undoing(command, None))
        self._note_debt(index)

    def _dial_absent(self) -> None:
        """Begin to open what is not open."""
        for index, seat in enumerate(self._seats):
            if seat.link is None:
                self._dial(index, seat)

    def _time_to_wait(self, began: float, request: Broadcast) -> float:
        """Return for how many seconds links are still worth waiting for, if that began at `began`.

        Until there is a majority; and before the very first exchange a moment longer, for the others.
        """
        if not any(seat.dialling for seat in self._seats):
            return 0.0
        now = time.monotonic()
        deadline = min(began + self._connect_timeout, request.links_until)
        if sum(bool(seat.link or seat.arrived) for seat in self._seats) >= len(self._seats) // 2 + 1:
            if self._majority_at is None:
                self._majority_at = now
            grace = 0.0 if self._has_asked else _OTHERS_GRACE
            deadline = min(deadline, self._majority_at + grace)
        return deadline - now

    def _dial(self, index: int, seat: Seat) -> None:
        """Begin to open a link, unless that is going on, has just failed, or is too late."""
        seat.dial(self._node_key, lambda link: self._on_identity(index, link.identity), self._announce)

    def _adopt(self) -> None:
        """Use the links that have been opened in the background."""
        with self._mutex:
            for index, seat in enumerate(self._seats):
                if seat.arrived is not None and (link := seat.take()) is not None:
                    self._seat(index, seat, link)

    def _look_elsewhere(self, index: int, link: Link, now: float) -> None:
        """Find out, beside the link, whether another server has taken over from one that must not vote.

        Who was replaced may go on to say so on this link for ever.
        """
        seat = self._seats[index]
        if link.identity.replid and now >= seat.retry_at:
            self._dial(index, seat)
            seat.retry_at = now + LONGEST_BACKOFF

    def _look_again(self, index: int, link: Link, newer: Link) -> None:
        """Drop a link that was given up for lost or for replaced, unless it has come back to life."""
        if link.identity.run_id != newer.identity.run_id:
            self._drop(index, Answer(Said.UNREACHABLE, detail="another server has taken over"))
            return
        now = time.monotonic()
        try:
            self._take(index, link, now)
        except Unusable as error:
            self._drop(index, error.answer)
        else:
            if is_lost(link, now):
                self._drop(index, Answer(Said.SILENT, detail="it answers on another connection only"))

    def _seat(self, index: int, seat: Seat, link: Link) -> None:
        """Use a link that has been opened, unless its server has a seat already: it would vote twice."""
        if seat.link is not None:
            self._look_again(index, seat.link, link)
        if seat.link is not None:
            link.close()
            return
        for other in self._seats:
            if other.link is not None and other.link.identity.run_id == link.identity.run_id:
                link.close()
                seat.failure = Answer(Said.CONFIG, detail=f"the same server as {other.node.name}")
                seat.retry_at = time.monotonic() + LONGEST_BACKOFF
                return
        seat.link = link
        self._absent -= 1
        self._watch(index, link)
        try:
            seat.owe_all()
            self._put_owed(seat, link)
            if link.unsent:
                self._write(index, link)
        except Unusable as error:
            self._drop(index, error.answer)


def is_lost(link: Link, now: float) -> bool:
    """Whether a link has owed an answer for so long that another is to be tried."""
    return bool(link.waiting) and now - link.waiting[0][2] > _LOST_AFTER


def _why_silent(waiting: Sequence[Sent], now: float) -> Answer:
    """Return what to report for a node that is not asked, for it owes too much, or for too long."""
    if len(waiting) >= _MOST_UNANSWERED:
        return Answer(Said.SILENT, detail=f"it owes {len(waiting)} answers")
    return Answer(Said.SILENT, detail=f"it owes an answer for {now - waiting[0][2]:.1f} s")
