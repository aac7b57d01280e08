"""One attempt at a lock, and what came of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fencelock.authority.base import named
from fencelock.authority.redlock.protocol.messages import VOTING, Answers, Said
from fencelock.authority.redlock.protocol.nodeset import NodeSet, names_of


@dataclass(frozen=True, slots=True)
class QueuePosition:
    """How a contender behaves towards others that wait. A hint: no token depends on it.

    Attributes:
        place: its place in line, `client.number`, under which the nodes call it; empty for one that
            is not going to wait, or cannot hear.
        waited: seconds since it began to wait.
        since: when that was, in seconds on the clock of the wall. Nodes order by it, unless it is far from
            what `waited` and their own clock say.
        fair: whether it leaves a lock that is free to those that have waited longer.
    """

    place: str = ""
    waited: float = 0.0
    since: float = 0.0
    fair: bool = False


@dataclass(slots=True, eq=False)
class Attempt:
    """One attempt at a lock: which resources, under which nonce, for how long. Never changed.

    Attributes:
        resources: in canonical order, which is the same for everybody.
        nonce: new for every attempt, so that a late duplicate of an old message means nothing.
        ttl: seconds.
        keys: the key of a node's counters, then the key of each resource.
        stripes: which counter each resource has.
        position: its place in line; None if it waits in no line.
        hint_epoch: of which epoch the hints are.
        hints: below which no counter is granted; empty for none.
        instead_of: the nonce of a grant of the same client, whose locks this attempt takes over.
    """

    resources: tuple[str, ...]
    nonce: str
    ttl: float
    keys: tuple[str, ...]
    stripes: tuple[int, ...]
    position: QueuePosition | None = None
    hint_epoch: int = 0
    hints: tuple[int, ...] = ()
    instead_of: str = ""

    @classmethod
    def of(
        cls,
        node_set: NodeSet,
        resources: tuple[str, ...],
        nonce: str,
        ttl: float,
        position: QueuePosition | None = None,
    ) -> Attempt:
        """Return an attempt with the keys and stripes that the resources have on these nodes."""
        return cls(resources, nonce, ttl, *names_of(node_set.node_key, resources), position)

    @property
    def ttl_ms(self) -> int:
        """The ttl as it goes over the wire."""
        return round(self.ttl * 1000)

    @property
    def name(self) -> str:
        """The resources, as they stand in a sentence."""
        return named(self.resources)

    @property
    def place(self) -> str:
        """Its place in line; empty for none."""
        return "" if self.position is None else self.position.place


@dataclass(slots=True, unsafe_hash=True)
class Granted:
    """An attempt that a quorum granted, and what it came to. Never changed.

    Attributes:
        attempt: what was asked for.
        epoch: the epoch of the decision.
        counters: the decided counter of each resource; with the epoch it makes the token.
        expires_at: end of the validity on the driver's clock.
    """

    attempt: Attempt
    epoch: int
    counters: tuple[int, ...]
    expires_at: float


@dataclass(frozen=True, slots=True)
class Failed:
    """An attempt that came to nothing. What it left behind must be released.

    Attributes:
        attempt: what was asked for.
        answers: the last that each node said.
        began: when it began, on the driver's clock.
        ended: when it was over.
        contended: enough nodes vote; it is other clients that stand in the way.
        split: none has a majority, for contenders have divided the votes among them.
        late: a majority granted, but too slowly for the ttl.
    """

    attempt: Attempt
    answers: Answers
    began: float
    ended: float
    contended: bool = False
    split: bool = False
    late: bool = False

    @property
    def waits_for_a_call(self) -> bool:
        """Whether others hold the lock, nothing was granted, and the nodes know whom to call."""
        voted = {answer.said for answer in self.answers.values() if answer.said in VOTING}
        return self.attempt.place != "" and self.contended and voted == {Said.HELD}

    @property
    def holder_ttl(self) -> float | None:
        """Seconds until the last of the others' locks ends; None if there were none."""
        return max((a.ttl for a in self.answers.values() if a.said is Said.HELD), default=None)


def in_pairs(stripes: Sequence[int], counters: Sequence[int]) -> Sequence[str | int]:
    """Return stripe, counter, stripe, counter …, as scripts take them."""
    return [number for pair in zip(stripes, counters, strict=True) for number in pair]


def maximum_of(vectors: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    """Return the largest counter of each resource."""
    return tuple(max(column) for column in zip(*vectors, strict=True))
