"""Commands to the nodes, their answers, and requests of the protocol to its driver, which moves bytes."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from fencelock.errors import PAGES

_T = TypeVar("_T")

STRIPES = 1024


class ReplyKind(enum.Enum):
    """The kind of a node's answer, or the reason why there is none."""

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
    STANDING = "told its state"
    PROMISED = "promised the epoch"
    RAISED = "raised to the epoch"
    LEASES = "told how long its locks live"
    CLEARED = "deleted what was left"
    SHUT = "closed in favour of the next list"
    SHOWN = "told which locks are held"
    NOTED = "has noted the name of this client"
    ON_DISK = "has written it to its disk"
    SUBSCRIBED = "will publish its calls on this connection"
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

    #: Each member exists once. The hash of `Enum` is slow Python code, and every answer needs it.
    if not TYPE_CHECKING:
        __hash__ = object.__hash__


#: Failures that pass with time or with a new connection.
PASSING = frozenset({ReplyKind.UNREACHABLE, ReplyKind.SILENT})
#: The part of the documentation that lists the rights which a user needs.
MISSING_RIGHT = f"{PAGES}/redis/#the-smallest-acl-rule"
#: Stands in place of the counter in the value of a lock that EXTEND has made again.
RESTORED_VALUE = "restored"
#: The answers of EXTEND about a grant: its lock was there, or was made again.
KEPT, RECREATED = 2, 1
#: A module constant, because it is needed for every answer, and an attribute of an enumeration is slow.
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
    """One node's answer to one command; a tuple, because a lease takes many, and they are made quickly."""

    kind: ReplyKind
    epoch: int = 0  # the node's epoch, if the answer names one
    #: The granted counters, one for each resource; for EXTENDED, the outcome of each grant.
    counters: tuple[int, ...] = ()
    #: For HELD, seconds that the other holder's lock still lasts; for RESTARTED and EARLY, seconds that the
    #: node still stays out. Infinite if unknown.
    ttl: float = 0.0
    detail: str = ""  # a text for a person, for the kinds that are failures
    facts: tuple[str, ...] = ()  # further texts, for the kinds about membership, leases and held locks

    def __str__(self) -> str:
        return f"{self.kind.value} ({self.detail})" if self.detail else self.kind.value


NodeReplies = Mapping[int, Reply]


class Command(NamedTuple):
    """A command and its arguments, the same for every node; each connection adds arguments to a script."""

    script: str
    nonce: str
    keys: tuple[str, ...]
    arguments: tuple[str | int, ...]


#: WAITAOF of newer servers, not a script. If it answers 1, earlier commands of this connection are on the
#: disk. A server without it, or without a file, answers with an error. The ms to wait come last.
SYNC = Command("sync", "", (), (1, 0, 2000))
#: Not a script: from now on, messages on the channel that it names come over this connection.
SUBSCRIBE = "subscribe"
#: Not a script: it sets a key to the description of a client. The ms for which it is kept come last.
INTRODUCE = "introduce"


class Broadcast(NamedTuple):
    """Request: send `command` to `nodes`, and resume once `enough` holds or `patience` is over.

    The driver reads later answers, too, because they may say something about their nodes. Before it sends, it
    may wait for connections to a majority, until `links_until` by its clock. It does not wait with a patience
    of 0.
    """

    command: Command
    nodes: Sequence[int]
    enough: Callable[[NodeReplies], bool]
    patience: float
    links_until: float = math.inf


class Replies(NamedTuple):
    """The outcome of a `Broadcast`: an answer for each of its nodes, and when it began and ended."""

    began: float
    ended: float
    answers: NodeReplies


class Sleep(NamedTuple):
    """Request: resume after some seconds, with the time."""

    seconds: float
    #: The resources for which a contender waits. A call (see `queue`) may resume it earlier.
    waits_for: tuple[str, ...] = ()
    place: str = ""  # the contender's place in line, by which the nodes call it; empty for none


Request = Broadcast | Sleep

# A procedure yields requests to the nodes, and returns a result.
Steps = Generator[Request, Any, _T]
Broadcasts = Generator[Broadcast, Replies, _T]  # a procedure that does not sleep
