"""One connection to a node: which commands it has not answered, and what is still to be written.

It moves no bytes. Whoever owns the socket hands in what has arrived and writes `outgoing`. A token is safe
only if the answers on a connection come from the server process that was there when it was opened. So the
process belongs to the connection for good, and nothing here resends on another one. A client that silently
reconnected after its node had been killed was granted the same counter twice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from fencelock.authority.redlock.membership import Membership
from fencelock.authority.redlock.protocol import Answer, Answers, Broadcast, Command, Said
from fencelock.authority.redlock.wire.codec import Replies, pack_with_script, pack_words

_SILENT: Final = Answer(Said.SILENT)


@dataclass(frozen=True, slots=True)
class Identity:
    """The server process that answered when a connection was opened.

    Attributes:
        run_id: random id of the server process; a restart changes it.
        replid: its replication id, where every vote must prove it again; otherwise empty.
        node_id: the node's own id, given when it was initialised; empty while it is blank.
        membership: the list that it belongs to; None while it is blank.
        eviction: the policy by which it drops keys when its memory is full; empty if it drops none; None
            where it does not tell.
    """

    run_id: str
    replid: str
    node_id: str
    membership: Membership | None
    eviction: str | None = ""

    def admitted(self, node_id: str, members: str) -> Identity:
        """Return the same server process, as a member of a list.

        Raises:
            MembershipError: if the list cannot be read.
        """
        return replace(self, node_id=node_id, membership=Membership.from_json(members))


class PendingReply(NamedTuple):
    """A command that a node has been sent and has not answered.

    Attributes:
        broadcast: what waits for the answer; None for nothing.
        command: the command.
        sent_at: when.
    """

    broadcast: PendingBroadcast | None
    command: Command
    sent_at: float


class PendingBroadcast:
    """A broadcast that waits for answers, and what has come back.

    Attributes:
        answers: of each node that has answered, or could not be asked.
        complete: whether more of them would change nothing.
        over: whether nothing waits for them any more: what comes now is late.
    """

    __slots__ = ("_enough", "_least", "_nodes", "answers", "complete", "over")

    def __init__(self, request: Broadcast) -> None:
        self._nodes, self._enough, self._least = request.nodes, request.enough, request.least
        self.answers: dict[int, Answer] = {}
        self.complete = False
        self.over = False

    def add_reply(self, node: int, answer: Answer) -> None:
        """Note a node's answer, or why there is none."""
        self.answers[node] = answer
        count = len(self.answers)
        if count < self._least or self.complete:
            return
        if count == len(self._nodes) or self._enough(self.answers):
            self.complete = True
            self.wake()

    def wake(self) -> None:
        """Let the caller go on."""

    def close(self) -> Answers:
        """Return an answer for each node; what comes from now on is late."""
        self.over = True
        if len(self.answers) == len(self._nodes):
            return self.answers
        return dict.fromkeys(self._nodes, _SILENT) | self.answers


class Connection:
    """The state of one connection.

    Attributes:
        identity: the server process that it was opened to.
        unanswered: what has been sent and not been answered, in that order.
        outgoing: what is still to be written.
        published: messages that have arrived on the channel of this client, to be taken away.
        leads_elsewhere: whether an answer has said that another server has taken over.
        spoilt: whether an exception from outside, such as a signal handler's, has struck in the middle of a
            change: then answers could be taken for others, and it must not be used any more.
    """

    __slots__ = (
        "_own_arguments",
        "_replies",
        "_under_way",
        "identity",
        "leads_elsewhere",
        "outgoing",
        "published",
        "spoilt",
        "unanswered",
    )

    def __init__(self, identity: Identity) -> None:
        self.identity = identity
        self.unanswered: deque[PendingReply] = deque()
        self.outgoing: list[bytes] = []
        self.published: list[bytes] = []
        self.leads_elsewhere = False
        self.spoilt = False
        self._replies = Replies()
        self._own_arguments = pack_words(identity.run_id, identity.replid)
        #: By script and nonce, how many are unanswered.
        self._under_way: dict[tuple[str, str], int] = {}

    def put(self, pending: PendingReply, packed: bytes) -> None:
        """Take a command, whose common part has been packed."""
        spoilt, self.spoilt = self.spoilt, True
        self.unanswered.append(pending)
        command = pending.command
        kind = command.script, command.nonce
        self._under_way[kind] = self._under_way.get(kind, 0) + 1
        # All scripts have a key.
        self.outgoing.append(packed + self._own_arguments if command.keys else packed)
        self.spoilt = spoilt  # where an earlier one was interrupted, it stays so

    def releases(self, nonce: str) -> bool:
        """Tell whether a RELEASE of that nonce is under way."""
        return ("release", nonce) in self._under_way

    def may_still_grant(self, nonce: str) -> bool:
        """Tell whether an ACQUIRE of that nonce is under way."""
        return ("acquire", nonce) in self._under_way

    def received(self, data: bytes, now: float) -> Iterator[tuple[PendingReply, Answer]]:
        """Yield the answers that have arrived, with what they answer.

        A command whose script the node does not know is put here again, with its text.

        Raises:
            MalformedReplyError: if what answers is no node.
        """
        self.spoilt = True
        for reply in self._replies.read(data):
            if isinstance(reply, bytes):
                self.published.append(reply)
                continue
            pending = self._answered()
            if reply is None:
                broadcast, command, _ = pending
                # On the same connection, because another may lead to another server process.
                self.put(PendingReply(broadcast, command, now), pack_with_script(command))
            else:
                yield pending, reply
        self.spoilt = False

    def _answered(self) -> PendingReply:
        pending = self.unanswered.popleft()
        kind = pending.command.script, pending.command.nonce
        if left := self._under_way.pop(kind) - 1:
            self._under_way[kind] = left
        return pending

    def take_outgoing(self) -> bytes:
        """Return what is to be written now."""
        outgoing, self.outgoing = self.outgoing, []
        return outgoing[0] if len(outgoing) == 1 else b"".join(outgoing)
