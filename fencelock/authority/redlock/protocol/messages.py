"""Commands to the nodes, their answers, and what the protocol asks of its driver."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

STRIPES = 1024


class ReplyKind(enum.Enum):
    """What a node said, or why it said nothing."""

    GRANTED = "granted"
    HELD = "held by another"
    CONFIRMED = "confirmed"
    HIGHER = "granted a higher counter"
    LOST = "does not know the lock any more"
    EPOCH = "is in another epoch"
    RELEASED = "released"
    EXTENDED = "extended"
    RESTORED = "had no lock, and has made it again"
    TICKET = "waiting to be admitted"
    OPENED = "opened"
    ADMITTED = "admitted"
    STANDING = "told where it stands"
    PROMISED = "promised the epoch"
    RAISED = "raised to the epoch"
    LEASES = "told how long its locks live"
    CLEARED = "deleted what was left"
    SHUT = "closed in favour of the next list"
    SHOWN = "told which locks are held"
    NOTED = "has noted what this client is"
    ON_DISK = "has written it to its disk"
    SUBSCRIBED = "publishes its calls to this connection"
    NOT_ON_DISK = "has not written it to its disk in time"
    EARLY = "stays out until the locks that it has forgotten have ended"
    NO_TICKET = "lost its ticket: it restarted or was flushed in between"
    AMNESIA = "blank: it holds no marker, and must not vote"
    RESTARTED = "restarted since it was admitted, or loaded older data; must not vote until admitted again"
    CONFIG = "belongs to another list of nodes"
    CLOSED = "closed: its list of nodes has been replaced"
    FULL = "has no counters left in this epoch, or another program has written to them"
    UNREACHABLE = "unreachable"
    SILENT = "no answer in time"
    ERROR = "error"

    #: Of each there is one. That of `Enum` is written in Python, and looked up for every answer.
    __hash__ = object.__hash__


#: These get better by themselves or with a new connection; the others need an operator.
PASSING = frozenset({ReplyKind.UNREACHABLE, ReplyKind.SILENT})


#: What a lock that EXTEND has made again holds instead of a counter.
RESTORED_VALUE = "restored"


#: What EXTEND says of a grant.
KEPT, RECREATED = 2, 1


#: Looked up for every answer.
GRANTED = ReplyKind.GRANTED


VOTING = frozenset(
    {
        ReplyKind.GRANTED,
        ReplyKind.HELD,
        ReplyKind.CONFIRMED,
        ReplyKind.HIGHER,
        ReplyKind.LOST,
        ReplyKind.EPOCH,
        ReplyKind.EXTENDED,
        ReplyKind.SHOWN,
    }
)


class Reply(NamedTuple):
    """One node's answer to one command. Like all that every lease takes many of, a tuple: quickly made.

    Attributes:
        kind: what kind of answer it is.
        epoch: the node's epoch, where the answer names one.
        counters: what it granted, a number for each resource.
        ttl: seconds that the other holder's lock still lives, for HELD; that the node still stays out, for
            RESTARTED and EARLY. Infinite where that is unknown.
        detail: what a person should read, for the kinds that are failures.
        facts: what the kinds about membership carry, as text.
    """

    kind: ReplyKind
    epoch: int = 0
    counters: tuple[int, ...] = ()
    ttl: float = 0.0
    detail: str = ""
    facts: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.kind.value} ({self.detail})" if self.detail else self.kind.value


NodeReplies = Mapping[int, Reply]


class Command(NamedTuple):
    """A script and its arguments: the same for every node. The socket adds its own."""

    script: str
    nonce: str
    keys: tuple[str, ...]
    arguments: tuple[str | int, ...]


#: No script, but WAITAOF of newer servers: when it answers, what this socket was told before is on the disk.
#: A server without it, or without a file, says so in an error. The ms to wait come last.
SYNC = Command("sync", "", (), (1, 0, 2000))


#: No script, either: messages on the channel that it names come over this connection from now on.
SUBSCRIBE = "subscribe"


#: No script, either: it sets a key to what a client is. The ms for which that is kept come last.
INTRODUCE = "introduce"


class Broadcast(NamedTuple):
    """Request: send `command` to `nodes`, and resume once `enough` holds or `patience` is over.

    Answers that come later are not lost: whoever runs this reads them, and releases a grant that came
    for an acquisition that had been given up.
    Before it is sent, connections to a majority may be waited for, until `links_until` by the driver's clock;
    not with a patience of 0.
    """

    command: Command
    nodes: Sequence[int]
    enough: Callable[[NodeReplies], bool]
    patience: float
    links_until: float = math.inf


class Replies(NamedTuple):
    """What came of a `Broadcast`: an answer for each node it went to, and when it began and ended."""

    began: float
    ended: float
    answers: NodeReplies


class Sleep(NamedTuple):
    """Request: resume after so many seconds, with the time.

    Attributes:
        seconds: how many.
        waits_for: the resources for which a contender waits. A call of the nodes may resume it earlier.
        place: its place in line, under which they call it; empty for none.
    """

    seconds: float
    waits_for: tuple[str, ...] = ()
    place: str = ""


Request = Broadcast | Sleep
