"""One attempt at a lock, and what came of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from fencelock.authority.base import drift
from fencelock.authority.redlock.protocol.messages import VOTING, Answers, Said
from fencelock.authority.redlock.protocol.nodeset import Fleet, names_of, names_of_one

#: Seconds in which connections may come up, however soon an acquisition is to be over.
LEAST_FOR_LINKS = 0.5


@dataclass(frozen=True, slots=True)
class Turn:
    """How a bidder behaves towards others that wait. A hint: no token depends on it.

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


@dataclass(slots=True, weakref_slot=True, eq=False)
class Bid:
    """One attempt at a lock: which resources, under which nonce, for how long. Never changed.

    Attributes:
        resources: in canonical order, which is the same for everybody.
        nonce: new for every attempt, so that a late duplicate of an old message means nothing.
        ttl: seconds.
        turn: its place in line; None for one that neither waits in line nor heeds it.
        hint_epoch: of which epoch the hints are.
        hints: below which no counter is granted; empty for none.
        instead_of: the nonce of a grant of the same client, whose locks this bid takes over.
    """

    resources: tuple[str, ...]
    nonce: str
    ttl: float
    keys: tuple[str, ...] = field(default=())
    stripes: tuple[int, ...] = field(default=())
    turn: Turn | None = None
    hint_epoch: int = 0
    hints: tuple[int, ...] = ()
    instead_of: str = ""

    @classmethod
    def of(
        cls, fleet: Fleet, resources: tuple[str, ...], nonce: str, ttl: float, turn: Turn | None = None
    ) -> Bid:
        """Return a bid with the keys and stripes that the resources have on this fleet."""
        if len(resources) == 1:  # mostly of a few that are locked over and over
            return cls(resources, nonce, ttl, *names_of_one(fleet.node_key, resources), turn)
        return cls(resources, nonce, ttl, *names_of(fleet.node_key, resources), turn)

    def anew(self, granted: Granted) -> Bid:
        """Return this bid as one that takes over the locks of a grant, for a larger token."""
        hints = tuple(counter + 1 for counter in granted.counters)
        return replace(self, turn=None, hint_epoch=granted.epoch, hints=hints, instead_of=granted.bid.nonce)

    def not_below(self, epoch: int, hints: tuple[int, ...]) -> Bid:
        """Return this bid as one that is granted no counter below the hints, where nodes are in that epoch.

        It does not wait in line: a node would grant it later as it grants others, without the hints.
        """
        return replace(self, turn=None, hint_epoch=epoch, hints=hints)

    @property
    def ttl_ms(self) -> int:
        """The ttl as it goes over the wire."""
        return round(self.ttl * 1000)

    @property
    def stands_in_line(self) -> bool:
        """Whether the nodes know whom to call when it is this bidder's turn."""
        return self.turn is not None and self.turn.place != ""

    @property
    def may_be_parked(self) -> bool:
        """Whether a node that refuses it may keep it for a moment, and grant it when the lock is released."""
        turn = self.turn
        return turn is not None and turn.place != "" and not turn.fair and len(self.resources) == 1

    @property
    def drift(self) -> float:
        """Seconds by which clocks may disagree over one lease."""
        return drift(self.ttl)


@dataclass(slots=True, unsafe_hash=True)
class Granted:
    """A bid that a quorum granted, and what it came to. Never changed.

    Attributes:
        bid: what was asked for.
        epoch: the epoch of the decision.
        counters: the decided counter of each resource; with the epoch it makes the token.
        expires_at: end of the validity on the driver's clock.
    """

    bid: Bid
    epoch: int
    counters: tuple[int, ...]
    expires_at: float


@dataclass(frozen=True, slots=True)
class Failed:
    """A bid that came to nothing. What it left behind must be released.

    Attributes:
        bid: what was asked for.
        answers: the last that each node said.
        began: when it began, on the driver's clock.
        ended: when it was over.
        contended: enough nodes vote; it is other clients that stand in the way.
        split: none has a majority, for contenders have divided the votes among them.
        late: a majority granted, but too slowly for the ttl.
    """

    bid: Bid
    answers: Answers
    began: float
    ended: float
    contended: bool = False
    split: bool = False
    late: bool = False

    @property
    def waits_for_a_call(self) -> bool:
        """Whether others hold the lock, nothing was granted, and the nodes know whom to call."""
        if not self.bid.stands_in_line or not self.contended:
            return False
        return not any(
            answer.said in VOTING and answer.said is not Said.HELD for answer in self.answers.values()
        )

    @property
    def stands(self) -> bool:
        """Whether nodes may grant the bid while the bidder waits; it is released when the waiting ends."""
        return self.bid.may_be_parked and self.waits_for_a_call

    @property
    def holder_ttl(self) -> float | None:
        """Seconds until the last of the others' locks ends; None if there were none."""
        return max((a.ttl for a in self.answers.values() if a.said is Said.HELD), default=None)


class Deadlines(NamedTuple):
    """What an acquisition may take that finds no connections.

    Attributes:
        began: when it did, on the driver's clock.
        timeout: that it was given.
        outage: seconds without a quorum in which connections are worth waiting for.
    """

    began: float
    timeout: float | None
    outage: float

    def links_until(self, last_quorum: float) -> float:
        """Return until when connections are waited for, where there was a quorum at `last_quorum`."""
        until = last_quorum + self.outage
        if self.timeout is None:
            return until
        return min(until, self.began + max(self.timeout, LEAST_FOR_LINKS))


def in_pairs(stripes: Sequence[int], counters: Sequence[int]) -> Sequence[str | int]:
    """Return stripe, counter, stripe, counter …, as scripts take them."""
    if len(stripes) == len(counters) == 1:  # most often
        return stripes[0], counters[0]
    return [number for pair in zip(stripes, counters, strict=True) for number in pair]


def maximum_of(vectors: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    """Return the largest counter of each resource."""
    return tuple(max(column) for column in zip(*vectors, strict=True))
