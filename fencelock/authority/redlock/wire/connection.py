"""One connection to a node: which commands it has not answered, and the bytes still to be written.

It moves no bytes. The owner of the socket hands in the data that has arrived, and writes `outgoing`. A token
is safe only if the answers on a connection come from the server process that was there when it was opened. So
the process belongs to the connection for good, and nothing is sent again on another one. A client that
silently reconnected after its node had been killed was granted the same counter twice.
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
    pack_words,
    read_answer,
    read_reply,
)

_SILENT: Final = Reply(ReplyKind.SILENT)
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
    """A command that a node has been sent and has not answered.

    Attributes:
        broadcast: the broadcast that waits for the answer, or None.
        command: the command.
        sent_at: when it was sent.
    """

    broadcast: PendingBroadcast | None
    command: Command
    sent_at: float


#: Commands, and answers to them that say something about the node itself.
News = list[tuple[PendingReply, Reply]]


class PendingBroadcast:
    """A broadcast that waits for answers, and the answers until now.

    Attributes:
        answers: of each node that has answered, or could not be asked.
        complete: whether more of them would change nothing.
        over: whether nothing waits for them any more, so that further answers are late.
        deadline: when its patience ends; -inf once it is complete.
    """

    __slots__ = ("_enough", "_nodes", "answers", "complete", "deadline", "over")

    def __init__(self, request: Broadcast) -> None:
        self._nodes = request.nodes
        self._enough = request.enough
        self.answers: dict[int, Reply] = {}
        self.complete: bool = not request.nodes
        self.over: bool = False
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
    """The state of one connection.

    Attributes:
        acquiring: the nonces of the ACQUIREs that are not answered, and were not released meanwhile.
        identity: the server process that it was opened to.
        epoch: the epoch of the nodes' last grant; None if there is none.
        pushes: whether it can bring published messages, beside the answers.
        unanswered: commands that were sent and are not answered, in this order.
        outgoing: bytes still to be written.
        published: messages on the channel of this client, until they are taken away.
        changing: how many changes are under way, or were interrupted, as by a signal handler that raises.
            While it is not 0, answers could be mixed up. It is only counted, never reset, so that a dirty
            connection stays dirty.
    """

    __slots__ = (
        "_index",
        "_own_arguments",
        "_reader",
        "acquiring",
        "changing",
        "epoch",
        "identity",
        "outgoing",
        "published",
        "pushes",
        "unanswered",
    )

    def __init__(self, index: int, identity: Identity, epoch: int | None, *, pushes: bool) -> None:
        self.identity: Identity = identity
        self.epoch: int | None = epoch
        self.pushes: bool = pushes
        self.unanswered: deque[PendingReply] = deque()
        self.outgoing: bytearray = bytearray()
        self.published: list[bytes] = []
        self.acquiring: set[str] = set()
        self.changing: int = 0
        self._index = index
        self._reader = hiredis.Reader()
        self._own_arguments = pack_words(identity.run_id, identity.replid)

    def put(self, pending: PendingReply, packed: Packed) -> None:
        """Take a command, which may join a batch."""
        self.put_alone(pending, packed)

    def put_alone(self, pending: PendingReply, packed: Packed) -> None:
        """Take a command that travels alone."""
        self.changing += 1
        self._note(pending)
        self.outgoing += packed.alone
        if pending.command.keys:  # all scripts have one
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

    def received(self, data: bytes, now: float) -> News:
        """Hand on the answers that callers wait for; return those that say something about the node.

        Raises:
            MalformedReplyError: the server does not answer like a node.
        """
        news: News = []
        reader = self._reader
        try:
            reader.feed(data)
            while (reply := reader.gets()) is not False:
                if type(reply) is hiredis.PushNotification and reply[0] != b"subscribe":
                    self.published += reply[2:] if reply[0] == b"message" else ()
                else:
                    self._take(reply, now, news)
        except (hiredis.HiredisError, LookupError, TypeError, ValueError, AttributeError) as error:
            raise MalformedReplyError(repr(error)) from error
        return news

    def _take(self, reply: Any, now: float, news: News) -> None:
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

    def _put_again(self, now: float, packed: bytes | None = None) -> None:
        """Put the oldest command again, alone, on this connection: another may lead to another process.

        Only a RELEASE is put again in any case. An ACQUIRE or EXTEND after its RELEASE would leave a lock.
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
        """Hand an answer to its broadcast; return True instead if it says something about the node."""
        said = answer.kind
        self.acquiring.discard(pending.command.nonce)
        if said in _NEWS or (said is GRANTED and answer.epoch != self.epoch):
            return True
        if (broadcast := pending.broadcast) is not None and not broadcast.over:
            broadcast.add_reply(self._index, answer)
        return False
