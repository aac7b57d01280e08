"""The nodes as a client sees them, one attempt at a lock, its outcome, and its release."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from fencelock.authority.base import named
from fencelock.authority.redlock.protocol.messages import (
    GRANTED,
    STRIPES,
    VOTING,
    Broadcast,
    Broadcasts,
    Command,
    NodeReplies,
    ReplyKind,
)
from fencelock.errors import FencelockError

#: Matches a nonce: the id of the client, the time in milliseconds, and random digits.
NONCE: Final = re.compile("[0-9a-f]{43}")
CLIENT_DIGITS: Final = 16
TIME_DIGITS: Final = 11


@dataclass(frozen=True)
class NodeSet:
    """The N nodes as this client sees them."""

    names: tuple[str, ...]  # the nodes' addresses without passwords, for messages
    node_key: str  # key of each node's hash, `{namespace}`. Its braces keep all keys in one slot.
    fingerprint: str  # that of the membership; commands name it, nodes compare it
    order: tuple[int, ...]  # the nodes' indexes in the fixed order that all clients agree on
    max_ttl: float  # longest lease in seconds that this membership allows
    patience: float = 1.0  # seconds to wait for a silent node before deciding without it
    init_command: str = ""  # the command that initialises these nodes

    @cached_property
    def all_nodes(self) -> range:
        return range(len(self.names))

    @cached_property
    def quorum(self) -> int:
        return len(self.names) // 2 + 1


def names_of(node_key: str, resources: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[int, ...]]:
    # `str.__str__`, because a member of an enumeration prints its name.
    locks = [f"{node_key}:l:{str.__str__(resource)}" for resource in resources]
    stripes = [zlib.crc32(resource.encode()) % STRIPES for resource in resources]
    return (node_key, *locks), tuple(stripes)


def largest_epoch(answers: NodeReplies) -> tuple[int, dict[int, tuple[int, ...]]]:
    """Return the epoch in which most nodes granted, and their counters; epochs are never mixed."""
    grants = [(node, answer) for node, answer in answers.items() if answer.kind is GRANTED]
    epochs = [answer.epoch for _, answer in grants]
    epoch = max(epochs, key=epochs.count, default=0)
    return epoch, {node: answer.counters for node, answer in grants if answer.epoch == epoch}


def enough_granted(node_set: NodeSet, earlier: NodeReplies) -> Callable[[NodeReplies], bool]:
    """Return a function that tells whether answers to ACQUIRE are enough to decide the next step.

    If too few nodes vote, every node is waited for, because the error lists all answers.
    """

    def enough(answers: NodeReplies) -> bool:
        together = {**earlier, **answers} if earlier else answers
        if len(together) < node_set.quorum:
            return False
        most = len(largest_epoch(together)[1])
        missing = len(node_set.names) - len(together)
        return most >= node_set.quorum or (most + missing < node_set.quorum and can_vote(node_set, together))

    return enough


def enough_released(node_set: NodeSet) -> Callable[[NodeReplies], bool]:
    """Return a function that tells whether a majority has released the lock, or no majority can any more."""
    spare = len(node_set.names) - node_set.quorum

    def enough(answers: NodeReplies) -> bool:
        if len(answers) <= spare:
            return False
        count = count_of(ReplyKind.RELEASED, answers)
        return count >= node_set.quorum or len(answers) - count > spare

    return enough


def count_of(said: ReplyKind, answers: NodeReplies) -> int:
    return [answer.kind for answer in answers.values()].count(said)


def can_vote(node_set: NodeSet, answers: NodeReplies) -> bool:
    return sum(answer.kind in VOTING for answer in answers.values()) >= node_set.quorum


@dataclass(frozen=True, slots=True)
class QueuePosition:
    """A contender's part in the waiting line. It is a hint: no token depends on it."""

    #: Its place in line, `client.number`, by which the nodes call it; empty if it is not in line.
    place: str = ""
    waited: float = 0.0  # seconds since it began to wait
    #: When it began, in Unix time. Nodes order by it, unless it differs by more than a second from their own
    #: clock minus `waited`.
    since: float = 0.0
    fair: bool = False  # whether it leaves a free lock to contenders that have waited longer


@dataclass(slots=True, eq=False)
class Attempt:
    """One attempt at a lock: which resources, under which nonce, for how long; it is never changed."""

    resources: tuple[str, ...]  # in canonical order, which is the same for all clients
    nonce: str  # new for every attempt, so that a late duplicate of an old message has no effect
    ttl: float  # seconds that the lease lasts
    keys: tuple[str, ...]  # the key of a node's counters, then the key of each resource
    stripes: tuple[int, ...]  # which counter each resource has
    position: QueuePosition | None = None  # its place in line; None if it waits in no line
    hint_epoch: int = 0
    hints: tuple[int, ...] = ()  # the least counters to grant; empty for none
    instead_of: str = ""  # the nonce of a grant of the same client, whose locks this attempt takes over

    @classmethod
    def of(
        cls,
        node_set: NodeSet,
        resources: tuple[str, ...],
        nonce: str,
        ttl: float,
        position: QueuePosition | None = None,
    ) -> Attempt:
        return cls(resources, nonce, ttl, *names_of(node_set.node_key, resources), position)

    @property
    def name(self) -> str:
        return named(self.resources)

    @property
    def place(self) -> str:
        return "" if self.position is None else self.position.place


@dataclass(slots=True, unsafe_hash=True)
class Proof:
    """The facts by which nodes recognise a `Grant`; never changed."""

    attempt: Attempt
    epoch: int  # the epoch of the decision
    #: The decided counter of each resource of the attempt; with the epoch it makes the token.
    counters: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Failed:
    """An attempt that failed. Locks that it left behind must be released."""

    attempt: Attempt
    answers: NodeReplies  # the last answer of each node
    began: float  # when it began, on the clock of the code that executes the requests
    ended: float
    #: Whether enough nodes vote, so that only other clients or slow answers prevented a grant.
    contended: bool = False
    split: bool = False  # whether the votes are divided, so that perhaps no client has a majority
    late: bool = False  # whether a majority granted, but too slowly for the ttl

    @property
    def waits_for_a_call(self) -> bool:
        """Whether all voters answered HELD, and nodes will call this attempt's place (`queue.py`)."""
        voted = {answer.kind for answer in self.answers.values() if answer.kind in VOTING}
        return self.attempt.place != "" and self.contended and voted == {ReplyKind.HELD}

    @property
    def holder_ttl(self) -> float | None:
        """Seconds until the last of the others' locks ends; None if there were none."""
        return max((a.ttl for a in self.answers.values() if a.kind is ReplyKind.HELD), default=None)


def in_pairs(stripes: Sequence[int], counters: Sequence[int]) -> Sequence[str | int]:
    """Return stripe, counter, stripe, counter …, as the scripts expect them."""
    return [number for pair in zip(stripes, counters, strict=True) for number in pair]


def maximum_of(vectors: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(max(column) for column in zip(*vectors, strict=True))


def without_place(release: Command) -> Command:
    """Return a RELEASE that names no place in line, so that it leaves the line as it is."""
    return release._replace(arguments=release.arguments[: 1 + 2 * len(release.keys)])


def abandon(
    node_set: NodeSet, attempt: Attempt, nodes: Sequence[int] | None = None, *, stay: bool = False
) -> Broadcasts[None]:
    """Release an attempt on these nodes, by default on all; do not wait for answers.

    With `stay` it keeps the place in line.
    """
    command = release_command(node_set, attempt, 0, (0,) * len(attempt.resources), stay=stay)
    yield Broadcast(command, node_set.all_nodes if nodes is None else nodes, lambda _: True, 0.0)


def release_command(
    node_set: NodeSet, attempt: Attempt, epoch: int, counters: Sequence[int], *, stay: bool = False
) -> Command:
    """Return the RELEASE of an attempt. With `stay` it keeps the place in line."""
    arguments = (node_set.fingerprint, attempt.nonce, epoch, *in_pairs(attempt.stripes, counters))
    if (position := attempt.position) is not None and position.place:
        waiting = (round(position.waited * 1000), round(position.since * 1000)) if stay else ()
        arguments = (*arguments, position.place, *waiting)
    return Command("release", attempt.nonce, attempt.keys, arguments)


def release(current: Callable[[], NodeSet], proof: Proof) -> Broadcasts[bool | None]:
    """Release the lock, and let nodes that lag catch up with the token.

    Returns True if a majority still held it for us, False if none can any more, None if too few nodes
    answered to tell. At the latest, its ttl ends the lock.
    """
    node_set = current()
    try:
        command = release_command(node_set, proof.attempt, proof.epoch, proof.counters)
        done = yield Broadcast(command, node_set.all_nodes, enough_released(node_set), node_set.patience)
        if sum(answer.kind is ReplyKind.RELEASED for answer in done.answers.values()) >= node_set.quorum:
            return True
        # RELEASE is never refused. LOST and AMNESIA are not added up, because a blank node, which answers
        # AMNESIA, may have had the lock: EXTEND makes locks there, too.
        gone = max(count_of(ReplyKind.LOST, done.answers), count_of(ReplyKind.AMNESIA, done.answers))
        return None if len(node_set.names) - gone >= node_set.quorum else False
    except (FencelockError, GeneratorExit):
        raise
    except BaseException:  # a signal handler's error, or a cancellation: send it once more
        yield from abandon(current(), proof.attempt)
        raise
