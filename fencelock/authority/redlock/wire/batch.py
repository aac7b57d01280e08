"""Sends many ACQUIREs and RELEASEs to a node in one call, whose reply answers all of them.

Event loops use it: the commands of all tasks within one turn leave together. A node takes simple commands,
for one lock each, in the order in which they were put. If one is not so simple, because the lock is held or
its queue is not empty, the node changes nothing for it and answers 0. Then it is put again, alone, on the
same connection. Code above the connections does not notice. `BATCHES = False` sends every command alone.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Final

import hiredis

from fencelock.authority.redlock.membership.members import Identity
from fencelock.authority.redlock.protocol.messages import GRANTED, Reply, ReplyKind
from fencelock.authority.redlock.wire.codec import Packed, pack_batch, read_reply
from fencelock.authority.redlock.wire.connection import Connection, News, PendingReply

BATCHES: Final = True
#: Commands in a batch, for which a node does nothing else: about half a millisecond.
_LARGEST: Final = 100

_RELEASED: Final = Reply(ReplyKind.RELEASED)


class BatchingConnection(Connection):
    """A connection that sends the simple commands between two writes as one batch."""

    __slots__ = ("_batches", "_does_batches", "_parts")

    changing: int
    outgoing: bytearray

    def __init__(self, index: int, identity: Identity, epoch: int | None, *, pushes: bool) -> None:
        super().__init__(index, identity, epoch, pushes=pushes)
        #: The last commands of `unanswered`, which are not in `outgoing` yet.
        self._parts: list[Packed] = []
        #: The first command of each batch that is not answered, and how many commands the batch has.
        self._batches: deque[tuple[PendingReply, int]] = deque()
        #: False if each vote has to prove its server, because a batch takes shortcuts.
        self._does_batches = not identity.replid

    def put(self, pending: PendingReply, packed: Packed) -> None:
        if not packed.is_simple or not self._does_batches:
            self.put_alone(pending, packed)
            return
        self.changing += 1
        parts = self._parts
        if parts and (len(parts) == _LARGEST or parts[0].fingerprint != packed.fingerprint):
            self.flush_batch()
        self._note(pending)  # first: after an interruption, every part is in `unanswered`
        self._parts.append(packed)
        self.changing -= 1

    def put_alone(self, pending: PendingReply, packed: Packed) -> None:
        if self._parts:
            self.flush_batch()
        super().put_alone(pending, packed)

    def flush_batch(self) -> None:
        if not self._parts:
            return
        self.changing += 1
        parts, self._parts = self._parts, []
        if len(parts) > 1:
            self._batches.append((self.unanswered[-len(parts)], len(parts)))
        self.outgoing += pack_batch(parts) if len(parts) > 1 else parts[0].alone
        self.outgoing += self._own_arguments
        self.changing -= 1

    def _take(self, reply: Any, now: float, news: News) -> None:
        if not self._batches or self._batches[0][0] is not self.unanswered[0]:
            super()._take(reply, now, news)
            return
        _, size = self._batches.popleft()
        if isinstance(reply, hiredis.ReplyError):
            self._take_error(reply, size, now, news)
        else:
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
        """Hand an error to each ACQUIRE, whose lock may have been granted; put each RELEASE again.

        If the node does not know the script, it does not get it: from now on each command is sent alone.
        """
        self._does_batches = self._does_batches and read_reply(reply) is not None
        for _ in range(size):
            if self.unanswered[0].command.script == "release":
                self._put_again(now)
            else:
                super()._take(reply, now, news)
