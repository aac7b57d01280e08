"""One connection to a node: which commands it has not answered, and the bytes still to be written.

It moves no bytes. The owner of the socket passes in the data that has arrived, and writes `outgoing`. A token
is safe only if all answers on a connection come from the server process to which it was opened. So a
connection keeps its process, and no ACQUIRE is sent again on another connection. Otherwise a client that
silently reconnects after its node was killed could be granted the same counter twice.

Event loops send the commands of all tasks within one turn in a batch: one call, whose reply answers all of
them. A batch has simple commands, of one lock each, in the order in which they were put. If a command turns
out not to be simple, because the lock is held or its queue is not empty, the node changes nothing for it and
answers 0. Then it is put again, alone, on the same connection. Callers do not notice this.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Any, Final, NamedTuple

import hiredis

from fencelock.authority.redlock.membership.members import Identity
from fencelock.authority.redlock.protocol.messages import (
    GRANTED,
    Broadcast,
    Command,
    NodeReplies,
    Reply,
    ReplyKind,
)
from fencelock.authority.redlock.wire.codec import (
    SCRIPTS,
    Packed,
    pack,
    pack_batch,
    pack_words,
    read_answer,
    read_reply,
)

#: The most commands in a batch, which occupies a node for about half a millisecond.
_LARGEST_BATCH: Final = 100
_SILENT: Final = Reply(ReplyKind.SILENT)
_RELEASED: Final = Reply(ReplyKind.RELEASED)
#: Answers that name the node's id and its list, if it has one.
NAMING: Final = frozenset({ReplyKind.ADMITTED, ReplyKind.OPENED, ReplyKind.STANDING})
FORGETFUL: Final = frozenset({ReplyKind.AMNESIA, ReplyKind.RESTARTED})
#: The answers that only one script has, with this script.
_ONLY_TO: Final = {
    GRANTED: "acquire",
    ReplyKind.HELD: "acquire",
    ReplyKind.CONFIRMED: "confirm",
    ReplyKind.RELEASED: "release",
    ReplyKind.EXTENDED: "extend",
    ReplyKind.SHOWN: "inspect",
}
#: Answers that say something about the node itself.
_NEWS: Final = NAMING | FORGETFUL | {ReplyKind.UNREACHABLE, ReplyKind.ERROR}


class PendingReply(NamedTuple):
    """A command that was sent to a node, and is not answered yet."""

    broadcast: PendingBroadcast | None  # the broadcast that waits for the answer, or None
    command: Command
    sent_at: float


#: Commands, and answers to them that say something about the node itself.
News = list[tuple[PendingReply, Reply]]


class PendingBroadcast:
    """A broadcast that waits for answers, and the answers until now."""

    __slots__ = ("_enough", "_nodes", "answers", "complete", "deadline", "over")

    def __init__(self, request: Broadcast) -> None:
        self._nodes = request.nodes
        self._enough = request.enough
        self.answers: dict[int, Reply] = {}  # of each node that has answered, or could not be asked
        self.complete: bool = not request.nodes  # whether further answers would change nothing
        self.over: bool = False  # whether no caller waits any more, so that further answers are late
        #: When its patience ends; -inf before that is known, and once it is complete.
        self.deadline: float = -math.inf

    def add_reply(self, node: int, answer: Reply) -> None:
        answers = self.answers
        answers[node] = answer
        if not self.complete and (len(answers) == len(self._nodes) or self._enough(answers)):
            self.complete = True
            self.deadline = -math.inf
            self.wake()

    def wake(self) -> None:
        """Let the caller go on."""

    def close(self) -> NodeReplies:
        """Return an answer for each node; answers are late from now on."""
        self.over = True
        if len(self.answers) == len(self._nodes):
            return self.answers
        return dict.fromkeys(self._nodes, _SILENT) | self.answers


class MalformedReplyError(Exception):
    """The server does not answer like a node."""


class Connection:
    """The state of one connection."""

    __slots__ = (
        *("_batches", "_does_batches", "_index", "_own_arguments", "_parts", "_reader", "acquiring"),
        *("changing", "epoch", "identity", "outgoing", "published", "pushes", "unanswered"),
    )

    def __init__(self, index: int, identity: Identity, epoch: int | None, *, pushes: bool) -> None:
        self.identity: Identity = identity  # the server process that it was opened to
        self.epoch: int | None = epoch  # the epoch of the nodes' last grant; None if there is none
        self.pushes: bool = pushes  # whether it can receive published messages, besides the answers
        #: Commands that were put here and are not answered, in this order.
        self.unanswered: deque[PendingReply] = deque()
        self.outgoing: bytearray = bytearray()  # bytes still to be written
        #: Messages on the channel of this client, until `NodeConnections.receive` handles them.
        self.published: list[bytes] = []
        #: The nonces of the ACQUIREs that are not answered, and were not released meanwhile.
        self.acquiring: set[str] = set()
        #: How many changes are under way, or were interrupted, as by a signal handler that raises. While it
        #: is not 0, answers could be mixed up. An interrupted change is counted for ever.
        self.changing: int = 0
        self._index = index
        self._reader = hiredis.Reader()
        self._own_arguments = pack_words(identity.run_id, identity.replid)
        self._parts: list[Packed] = []  # the last commands of `unanswered`, which are not in `outgoing` yet
        #: The first command of each batch that is not answered, and how many commands the batch has.
        self._batches: deque[tuple[PendingReply, int]] = deque()
        #: False if each vote has to prove its server (a batch takes shortcuts), or the node lacks the script.
        self._does_batches = not identity.replid

    def put(self, pending: PendingReply, packed: Packed) -> None:
        """Put a command into the waiting batch, or else into `outgoing`."""
        if not packed.is_simple or not self._does_batches:
            self.put_alone(pending, packed)
            return
        self.changing += 1
        parts = self._parts
        if parts and (len(parts) == _LARGEST_BATCH or parts[0].fingerprint != packed.fingerprint):
            self.flush_batch()
        self._note(pending)  # first: after an interruption, every part is in `unanswered`
        self._parts.append(packed)
        self.changing -= 1

    def put_alone(self, pending: PendingReply, packed: Packed) -> None:
        if self._parts:
            self.flush_batch()
        self.changing += 1
        self._note(pending)
        self.outgoing += packed.alone
        if pending.command.keys:  # it is a script, because every script has a key
            self.outgoing += self._own_arguments
        self.changing -= 1

    def _note(self, pending: PendingReply) -> None:
        self.unanswered.append(pending)
        script, nonce, _, _ = pending.command
        if script == "acquire":
            self.acquiring.add(nonce)
        elif script == "release":
            self.acquiring.discard(nonce)

    def flush_batch(self) -> None:
        """Put the waiting batch into `outgoing`, which is about to be written."""
        if not self._parts:
            return
        self.changing += 1
        parts, self._parts = self._parts, []
        if len(parts) > 1:
            self._batches.append((self.unanswered[-len(parts)], len(parts)))
        self.outgoing += pack_batch(parts) if len(parts) > 1 else parts[0].alone
        self.outgoing += self._own_arguments
        self.changing -= 1

    def received(self, data: bytes, now: float) -> News:
        """Pass on the answers that callers wait for; return those that say something about the node."""
        news: News = []
        reader = self._reader
        try:
            reader.feed(data)
            while (reply := reader.gets()) is not False:
                if type(reply) is hiredis.PushNotification and reply[0] != b"subscribe":
                    if reply[0] == b"message":
                        self.published.append(b"".join(reply[2:]))
                else:
                    self._take(reply, now, news)
        except (hiredis.HiredisError, LookupError, TypeError, ValueError, AttributeError) as error:
            raise MalformedReplyError(repr(error)) from error
        return news

    def _take(self, reply: Any, now: float, news: News) -> None:
        if self._batches and self._batches[0][0] is self.unanswered[0]:
            self._take_batch(reply, now, news)
            return
        answer = read_answer(reply) if type(reply) is list else read_reply(reply)
        if answer is None:
            self._put_again(now, pack(command := self.unanswered[0].command, SCRIPTS[command.script]))
            return
        script, _, keys, _ = self.unanswered[0].command
        if _ONLY_TO.get(answer.kind, script) != script:
            raise ValueError(f"{answer.kind} in answer to {script}")
        if answer.kind is GRANTED and len(answer.counters) != len(keys) - 1:
            raise ValueError(f"{len(answer.counters)} counters for other locks")
        if self.answered(pending := self.unanswered.popleft(), answer):
            news.append((pending, answer))

    def _take_batch(self, reply: Any, now: float, news: News) -> None:
        _, size = self._batches.popleft()
        if isinstance(reply, hiredis.ReplyError):
            self._take_error(reply, size, now, news)
            return
        _, epoch, *numbers = reply
        if len(numbers) != size or type(sum(numbers, epoch)) is not int:
            raise ValueError(f"{len(numbers)} answers to {size} commands")
        for number in numbers:
            if not number:
                self._put_again(now)
                continue
            pending = self.unanswered.popleft()
            is_release = pending.command.script == "release"
            answer = _RELEASED if is_release else Reply(GRANTED, epoch, (number,))
            if self.answered(pending, answer):
                news.append((pending, answer))

    def _take_error(self, reply: hiredis.ReplyError, size: int, now: float, news: News) -> None:
        """Pass an error on to each ACQUIRE, whose lock may have been granted; put each RELEASE again.

        If the node lacks the script, put every command again; from now on each command is sent alone.
        """
        self._does_batches = self._does_batches and read_reply(reply) is not None
        for _ in range(size):
            if self.unanswered[0].command.script == "release":
                self._put_again(now)
            else:
                self._take(reply, now, news)

    def _put_again(self, now: float, packed: bytes | None = None) -> None:
        """Put the oldest command again, alone, on this connection: others may lead to another process.

        Other commands than RELEASE are put again only if a caller wants them: an ACQUIRE or EXTEND after its
        RELEASE would leave a lock.
        """
        broadcast, command, _ = self.unanswered[0]
        if command.script == "acquire":
            is_wanted = command.nonce in self.acquiring
        else:
            is_wanted = command.script == "release" or (broadcast is not None and not broadcast.over)
        if is_wanted:
            self.put_alone(PendingReply(broadcast, command, now), Packed(command, packed))
        self.unanswered.popleft()  # last: if this is interrupted before, a RELEASE is owed

    def answered(self, pending: PendingReply, answer: Reply) -> bool:
        """Pass an answer on to its broadcast; return True instead if it says something about the node."""
        said = answer.kind
        self.acquiring.discard(pending.command.nonce)
        if said in _NEWS or (said is GRANTED and answer.epoch != self.epoch):
            return True
        if (broadcast := pending.broadcast) is not None and not broadcast.over:
            broadcast.add_reply(self._index, answer)
        return False
