"""What both stores have in common: lines, marks, a base, and owners of entries that come to an end."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

#: What one acquisition's entries are known by: the lease's id in etcd, the nonce in ZooKeeper.
Who = int


class LostError(Exception):
    """No answer came: the request was done, or not, or it is yet to arrive."""


class GoneError(Exception):
    """The lease or session does not exist, or the parent of an entry."""


@dataclass(slots=True)
class Entry:
    """A place in line; `owner` is the lease or session whose end takes it away."""

    who: Who
    created: int
    owner: int


@dataclass(slots=True)
class Node:
    """The mark of a resource. In ZooKeeper it is the parent, whose number counts the entries it has had."""

    mark: int = 0
    version: int = 0
    number: int = 0
    kept: int = 0


@dataclass(slots=True)
class Owner:
    ttl: int
    ends: float


@dataclass(slots=True)
class State:
    """What a snapshot has."""

    revision: int = 1
    lines: dict[int, dict[Hashable, Entry]] = field(default_factory=dict)
    nodes: dict[int, Node] = field(default_factory=dict)
    base: Node = field(default_factory=Node)
    owners: dict[int, Owner] = field(default_factory=dict)


class Base(NamedTuple):
    value: int = 0
    version: int = 0


class Minted(NamedTuple):
    """A transaction that minted, as the judge sees it."""

    who: Who
    tokens: dict[int, int]
    ahead: bool
    """Whether another client stood before it."""


class Store:
    """One state that all requests see; a request is one call of a method here."""

    def __init__(self) -> None:
        self.state = State()
        self.now = 0.0
        self.down = False
        self.above = 0
        self.minted: list[Minted] = []
        self.taken: list[Who] = []

    def tick(self, now: float) -> None:
        """Let owners end whose time is over."""
        self.now = now
        for owner in [key for key, each in self.state.owners.items() if each.ends <= now]:
            self.end(owner)

    def end(self, owner: int) -> None:
        if self.state.owners.pop(owner, None) is None:
            return
        self.state.revision += 1
        for line in self.state.lines.values():
            for key in [key for key, entry in line.items() if entry.owner == owner]:
                del line[key]

    def restore(self, state: State) -> None:
        """Go back to a snapshot; the time of each owner begins again."""
        self.state = state
        for owner in state.owners.values():
            owner.ends = self.now + owner.ttl

    def line(self, resource: int) -> dict[Hashable, Entry]:
        return self.state.lines.setdefault(resource, {})

    def base(self) -> Base:
        return Base(self.state.base.mark, self.state.base.version)

    def set_base(self, known: Base, value: int, above: int) -> bool:
        if self.base() != known:
            return False
        self.above = max(self.above, above)
        self.state.revision += 1
        self.state.base = Node(value, known.version + 1)
        return True

    def force(self, resource: int) -> None:
        """Release the head of a line, as an operator may."""
        raise NotImplementedError

    def head(self, resource: int) -> Entry | None:
        return min(self.line(resource).values(), key=lambda entry: entry.created, default=None)

    def note(self, who: Who, tokens: dict[int, int]) -> None:
        """Tell the judge that tokens were minted."""
        heads: Iterable[Entry | None] = (self.head(resource) for resource in tokens)
        self.minted.append(Minted(who, tokens, any(head is None or head.who != who for head in heads)))


PATIENCE: Final = 120
"""Milliseconds after which a client gives a request up."""
