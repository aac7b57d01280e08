"""The N nodes as a client sees them, and what a set of their answers amounts to."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from fencelock.authority.redlock.protocol.messages import GRANTED, STRIPES, VOTING, Answers, Said


@dataclass(frozen=True)
class NodeSet:
    """The N nodes as this client sees them.

    Attributes:
        names: for messages: the nodes' addresses without passwords.
        node_key: key of each node's hash, `{namespace}`. Its braces keep all keys in one slot.
        fingerprint: of the membership, which every vote must name.
        order: the nodes' indexes in the fixed order that all clients agree on.
        max_ttl: longest lease in seconds that this membership allows.
        patience: seconds to wait for a silent node before deciding without it.
        init_command: what an operator types to initialise these nodes.
    """

    names: tuple[str, ...]
    node_key: str
    fingerprint: str
    order: tuple[int, ...]
    max_ttl: float
    patience: float = 1.0
    init_command: str = ""

    @cached_property
    def everybody(self) -> range:
        """Index of every node."""
        return range(len(self.names))

    @cached_property
    def quorum(self) -> int:
        """How many nodes are a majority."""
        return len(self.names) // 2 + 1


def names_of(node_key: str, resources: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Return the keys and the stripes of resources."""
    # A member of an enumeration equals its text, and is written otherwise.
    locks = [f"{node_key}:l:{str.__str__(resource)}" for resource in resources]
    stripes = [zlib.crc32(resource.encode()) % STRIPES for resource in resources]
    return (node_key, *locks), tuple(stripes)


def largest_epoch(answers: Answers) -> tuple[int, dict[int, tuple[int, ...]]]:
    """Return the epoch in which most nodes granted, and their counters: epochs are never mixed."""
    grants = [(node, answer) for node, answer in answers.items() if answer.said is GRANTED]
    epochs = [answer.epoch for _, answer in grants]
    epoch = max(epochs, key=epochs.count, default=0)
    return epoch, {node: answer.counters for node, answer in grants if answer.epoch == epoch}


def enough_granted(node_set: NodeSet, earlier: Answers) -> Callable[[Answers], bool]:
    """Return whether more answers to ACQUIRE could not change what comes next.

    Where it fails for want of voters, every node is heard: the error will say what each one said.
    """

    def enough(answers: Answers) -> bool:
        together = {**earlier, **answers} if earlier else answers
        if len(together) < node_set.quorum:
            return False
        most = len(largest_epoch(together)[1])
        missing = len(node_set.names) - len(together)
        return most >= node_set.quorum or (most + missing < node_set.quorum and can_vote(node_set, together))

    return enough


def enough_released(node_set: NodeSet) -> Callable[[Answers], bool]:
    """Return whether a majority has released the lock, or can no longer say so."""
    spare = len(node_set.names) - node_set.quorum

    def enough(answers: Answers) -> bool:
        if len(answers) <= spare:
            return False
        count = count_of(Said.RELEASED, answers)
        return count >= node_set.quorum or len(answers) - count > spare

    return enough


def count_of(said: Said, answers: Answers) -> int:
    """Return how many nodes have said that."""
    return [answer.said for answer in answers.values()].count(said)


def can_vote(node_set: NodeSet, answers: Answers) -> bool:
    """Tell whether a majority votes."""
    return sum(answer.said in VOTING for answer in answers.values()) >= node_set.quorum
