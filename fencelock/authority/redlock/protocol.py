"""What to say to the nodes, and what their answers mean.

The algorithm, top to bottom, with no sockets, no clock and no threads. Each operation is a generator: it
yields a *request* (`Broadcast` a command, or `Sleep`) and is sent what came of it (a `Round`, or the time
after sleeping). A blocking driver, an asyncio driver and a simulator run the very same generators, so
what is proven is what ships.

How a quorum mints one token. Every node grants from a counter of its own, so that a majority may hand
out the same number twice: client A gets {n0: 1, n1: 1}, B gets {n1: 2, n2: 1}, and C gets {n2: 2, n0: 2},
which is B's maximum again. Therefore a value is decided only when a majority *stands at* it:

1. ACQUIRE on all nodes. A value that a majority granted is decided: one round trip.
2. Otherwise T is the maximum over a granted majority, and CONFIRM raises the others to T, each only
   while the lock there is still ours and *its own grant is not above T*. Why that last condition:
   counters stand at n0=0, n1=1, n2=1. A is granted n0 (1), expires there, then n1 (2): T = 2. B is
   granted n0 (2) and n2 (2); n2 expires; A's late ACQUIRE lands on n2 (3); n2 would acknowledge A's
   raise to 2, and both A and B would hold 2.
3. Votes of different epochs are never added up.

Two decided values of one resource share a node. There the second was granted after the first had been
reached, so it is larger; and whoever began after another had completed finds a majority of counters at
or above that token. No clock takes part in this. Clocks bound only the *validity* of the lease.
"""

from __future__ import annotations

import enum
import functools
import math
import zlib
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, NoReturn

from fencelock.authority.base import drift, held_by_another
from fencelock.errors import (
    FencelockError,
    LockLostError,
    LockTimeoutError,
    MembershipError,
    NodesNotInitialisedError,
    QuorumError,
)

STRIPES = 1024
#: Seconds in which connections may come up, however soon an acquisition is to be over.
LEAST_FOR_LINKS = 0.5
#: Seconds after which one who waits to be called looks for the first time; longer than a claim.
_LOOK = 0.15


class Said(enum.Enum):
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
    ON_DISK = "has written it to its disk"
    SUBSCRIBED = "publishes its calls to this connection"
    NOT_ON_DISK = "has not written it to its disk in time"
    EARLY = "stays out until the locks that it has forgotten have ended"
    NO_TICKET = "lost its ticket: it restarted or was flushed in between"
    AMNESIA = "blank: it holds no marker, and must not vote"
    RESTARTED = "restarted since it was admitted, or loaded older data; must not vote until admitted again"
    CONFIG = "belongs to another list of nodes"
    CLOSED = "closed: its list of nodes has been replaced"
    FULL = "has no counters left in this epoch"
    UNREACHABLE = "unreachable"
    SILENT = "no answer in time"
    ERROR = "error"

    #: Of each there is one. That of `Enum` is written in Python, and looked up for every answer.
    __hash__ = object.__hash__


#: These get better by themselves or with a new connection; the others need an operator.
PASSING = frozenset({Said.UNREACHABLE, Said.SILENT})
#: What a lock that EXTEND has made again holds instead of a counter.
RESTORED = "restored"
#: What EXTEND says of a grant.
_EXTENDED, _MADE_AGAIN = 2, 1
#: Looked up for every answer.
_GRANTED = Said.GRANTED
_VOTING = frozenset(
    {Said.GRANTED, Said.HELD, Said.CONFIRMED, Said.HIGHER, Said.LOST, Said.EPOCH, Said.EXTENDED}
)


class Answer(NamedTuple):
    """One node's answer to one command. Like all that every lease takes many of, a tuple: quickly made.

    Attributes:
        said: the kind of answer.
        epoch: the node's epoch, where the answer names one.
        counters: what it granted, a number for each resource.
        ttl: seconds that the other holder's lock still lives, for HELD; that the node still stays out, for
            RESTARTED and EARLY. Infinite where that is unknown.
        detail: what a person should read, for the kinds that are failures.
        facts: what the kinds about membership carry, as text.
    """

    said: Said
    epoch: int = 0
    counters: tuple[int, ...] = ()
    ttl: float = 0.0
    detail: str = ""
    facts: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.said.value} ({self.detail})" if self.detail else self.said.value


Answers = Mapping[int, Answer]


class Command(NamedTuple):
    """A script and its arguments: the same for every node. The socket adds what is its own."""

    script: str
    nonce: str
    keys: tuple[str, ...]
    arguments: tuple[str | int, ...]


#: No script, but WAITAOF of newer servers: when it answers, what this socket was told before is on the disk.
#: A server without it, or without a file, says so in an error. The ms to wait come last.
SYNC = Command("sync", "", (), (1, 0, 2000))


#: No script, either: what is published on the channel that it names comes over this connection from now on.
SUBSCRIBE = "subscribe"


class Broadcast(NamedTuple):
    """Request: send `command` to `nodes`, and resume once `enough` holds or `patience` is over.

    Answers that come later are not lost: whoever runs this reads them, and releases a grant that came
    for an acquisition that had been given up. With fewer answers than `least`, `enough` never holds.
    Before it is sent, connections to a majority may be waited for, until `links_until` by the driver's clock.
    """

    command: Command
    nodes: Sequence[int]
    enough: Callable[[Answers], bool]
    patience: float
    least: int = 1
    links_until: float = math.inf


class Round(NamedTuple):
    """What came of a `Broadcast`: an answer for each node it went to, and when it began and ended."""

    began: float
    ended: float
    answers: Answers


@dataclass(frozen=True, slots=True)
class Sleep:
    """Request: resume after so many seconds, with the time.

    Where it is `wakeable`, the bidder waits for somebody else, and may be resumed earlier when the nodes
    call it.
    """

    seconds: float
    wakeable: bool = False


Request = Broadcast | Sleep


@dataclass(frozen=True, slots=True)
class Fleet:
    """The N nodes as this client sees them.

    Attributes:
        names: for messages: the nodes' addresses without passwords.
        node_key: key of each node's hash, `{namespace}`. Its braces keep all keys in one slot.
        fingerprint: of the membership, which every vote must name.
        order: the nodes' indexes in the fixed order that all clients agree on.
        max_ttl: longest lease in seconds that this membership allows.
        patience: seconds to wait for a silent node before deciding without it.
        init_command: what an operator types to initialise these nodes.
        everybody: index of every node.
        quorum: how many nodes are a majority.
        enough_granted: whether more answers of everybody to ACQUIRE could not change what comes next.
        enough_released: the same for RELEASE.
    """

    names: tuple[str, ...]
    node_key: str
    fingerprint: str
    order: tuple[int, ...]
    max_ttl: float
    patience: float = 1.0
    init_command: str = ""
    everybody: range = field(init=False)
    quorum: int = field(init=False)
    enough_granted: Callable[[Answers], bool] = field(init=False, repr=False, compare=False)
    enough_released: Callable[[Answers], bool] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "everybody", range(len(self.names)))
        object.__setattr__(self, "quorum", len(self.names) // 2 + 1)
        object.__setattr__(self, "enough_granted", _enough_granted(self, {}))
        object.__setattr__(self, "enough_released", _is_clear(self, Said.RELEASED))


@dataclass(frozen=True, slots=True)
class Turn:
    """How a bidder behaves towards others who wait. A hint: no token depends on it.

    Attributes:
        place: its place in line, `client.number`, under which the nodes call it; empty for one who
            is not going to wait, or cannot hear.
        waited: seconds since it began to wait.
        since: when that was, in seconds on the clock of the wall. Nodes order by it, unless it is far from
            what `waited` and their own clock say.
        fair: whether it leaves a lock that is free to those who have waited longer.
    """

    place: str = ""
    waited: float = 0.0
    since: float = 0.0
    fair: bool = False


def _names(node_key: str, resources: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Return the keys and the stripes of resources."""
    # What equals a text, and is cached as such, may be written otherwise: a member of an enumeration.
    locks = [f"{node_key}:l:{str.__str__(resource)}" for resource in resources]
    stripes = [zlib.crc32(resource.encode()) % STRIPES for resource in resources]
    return (node_key, *locks), tuple(stripes)


_names_of_one = functools.lru_cache(1024)(_names)


@dataclass(slots=True, weakref_slot=True, eq=False)
class Bid:
    """One attempt at a lock: which resources, under which nonce, for how long. Never changed.

    Attributes:
        resources: in canonical order, which is the same for everybody.
        nonce: new for every attempt, so that a late duplicate of an old message means nothing.
        ttl: seconds.
        turn: its place in line; None for one who neither waits in line nor heeds it.
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
            return cls(resources, nonce, ttl, *_names_of_one(fleet.node_key, resources), turn)
        return cls(resources, nonce, ttl, *_names(fleet.node_key, resources), turn)

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
        split: nobody has a majority, for contenders have divided the votes among them.
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
            answer.said in _VOTING and answer.said is not Said.HELD for answer in self.answers.values()
        )

    @property
    def stands(self) -> bool:
        """Whether nodes may grant the bid while the bidder waits; it is released when the waiting ends."""
        return self.bid.may_be_parked and self.waits_for_a_call

    @property
    def holder_ttl(self) -> float | None:
        """Seconds until the last of the others' locks ends; None if nobody held any."""
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


def acquire(
    see: Callable[[], Fleet],
    new_bid: Callable[[Fleet], Bid],
    *,
    timeout: float | None,
    grace: float,
    jitter: Callable[[], float],
    granted_meanwhile: Callable[[], Answers] = dict,
    deadlines: Deadlines | None = None,
) -> Generator[Request, Any, Granted]:
    """Bid until a quorum grants, or until the time is over.

    Args:
        see: returns the nodes as they are known at the moment.
        new_bid: makes the next bid, each with a nonce of its own.
        timeout: seconds to wait for another holder; None for ever, 0 one try.
        grace: seconds to go on without a quorum before giving up, so that a short outage is survived.
        jitter: returns a random number between 0 and 1.
        granted_meanwhile: returns the nodes that have granted the latest bid while it waited.
        deadlines: where the time for connections counts too.

    Raises:
        LockTimeoutError: somebody else held the resource until the timeout.
        QuorumError: too few nodes answered.
        NodesNotInitialisedError: too many nodes are blank.
        MembershipError: too many nodes belong to another list.
    """
    began = None if deadlines is None else deadlines.began
    last_quorum = began or 0.0
    tries = 0
    alone = False
    while True:
        fleet = see()
        bid = new_bid(fleet)
        links_until = math.inf if deadlines is None else deadlines.links_until(last_quorum)
        outcome = yield from attempt(fleet, bid, alone=alone, links_until=links_until)
        if isinstance(outcome, Granted):
            return outcome
        if not outcome.stands:
            yield from give_way(fleet, outcome, links_until)
        tries += 1
        alone = outcome.split and not alone
        if began is None:
            began = last_quorum = outcome.began
        yield from _learn(fleet, outcome, links_until)
        if see() != fleet:  # nodes were heard for the first time, or have got another list
            yield from give_way(fleet, outcome, links_until)
            continue
        if outcome.contended:
            last_quorum = outcome.ended
        elif not _may_recover(fleet, outcome.answers, grace) or outcome.ended - last_quorum >= grace:
            yield from leave(fleet, bid, links_until)
            _raise_no_quorum(fleet, outcome.answers)
        left = math.inf if timeout is None else began + timeout - outcome.ended
        if left <= 0:
            yield from leave(fleet, bid, links_until)
            _raise_timeout(fleet, outcome)
        pause = min(left, _pause(outcome, tries, jitter()))
        granted = yield from _wait(fleet, outcome, pause, granted_meanwhile)
        if granted is not None:
            return granted


def attempt(
    fleet: Fleet,
    bid: Bid,
    *,
    alone: bool = False,
    links_until: float = math.inf,
) -> Generator[Broadcast, Round, Granted | Failed]:
    """Make one bid: ACQUIRE, and CONFIRM where the counters disagree.

    With `alone`, the first node of the fixed order that answers is asked before all the others. Two (or
    four) clients that keep splitting the votes of an even number of nodes would otherwise do so for ever.
    """
    request = Broadcast(
        _acquire_command(bid, fleet),
        fleet.everybody,
        fleet.enough_granted,
        min(fleet.patience, bid.ttl),
        fleet.quorum,
        links_until,
    )
    earlier: dict[int, Answer] = {}
    began: float | None = None
    if alone:
        for node in fleet.order:
            first = yield request._replace(nodes=[node], enough=lambda new: len(new) == 1, least=1)
            began = first.began if began is None else began
            earlier.update(first.answers)
            if earlier[node].said is Said.GRANTED:
                break
            if earlier[node].said is Said.HELD:
                return Failed(bid, earlier, began, first.ended, contended=True, split=True)
    if earlier:
        others = [node for node in fleet.everybody if node not in earlier]
        enough, least = _enough_granted(fleet, earlier), fleet.quorum - len(earlier)
        request = request._replace(nodes=others, enough=enough, least=least)
    everyone = yield request
    began = everyone.began if began is None else began
    answers = {**earlier, **everyone.answers}
    # The validity counts from before the first request to after the last answer.
    expires_at = began + bid.ttl - bid.drift

    same = _same_grant(answers, fleet.quorum)
    if same is not None and expires_at > everyone.ended:  # mostly that is so
        return Granted(bid, same.epoch, same.counters, expires_at)
    grants = len(_largest_epoch(answers)[1])
    if grants < fleet.quorum:
        contended = _can_vote(fleet, answers)
        held = any(answer.said is Said.HELD for answer in answers.values())
        split = contended and held and grants > 0
        return Failed(bid, answers, began, everyone.ended, contended=contended, split=split)
    epoch, counters, ended = yield from _decide(fleet, bid, answers, everyone.ended)
    if counters is None:
        return Failed(bid, answers, began, ended, contended=_can_vote(fleet, answers))
    if expires_at <= ended:
        return Failed(bid, answers, began, ended, contended=True, late=True)
    return Granted(bid, epoch, counters, expires_at)


def _decide(
    fleet: Fleet, bid: Bid, answers: dict[int, Answer], ended: float
) -> Generator[Broadcast, Round, tuple[int, tuple[int, ...] | None, float]]:
    """Find the value that a majority stands at, raising nodes to it where they disagree.

    Returns the epoch, the value (None where no majority could be brought to one) and when that was known.
    """
    epoch, granted = _largest_epoch(answers)
    votes = list(granted.values())
    value = votes[0] if votes.count(votes[0]) >= fleet.quorum else max(votes, key=votes.count)
    if votes.count(value) >= fleet.quorum:
        return epoch, value, ended
    value = _maximum(granted.values())
    patience = min(fleet.patience, bid.ttl)
    acknowledged: set[int] = set()
    refused = {node for node in answers if node not in granted and answers[node].said is not Said.SILENT}
    while True:
        at_value = {node for node, counters in granted.items() if counters == value} | acknowledged
        if len(at_value) >= fleet.quorum:
            return epoch, value, ended
        targets = [node for node in fleet.everybody if node not in at_value and node not in refused]
        if len(at_value) + len(targets) < fleet.quorum:
            return epoch, None, ended
        command = Command(
            "confirm",
            bid.nonce,
            bid.keys,
            (fleet.fingerprint, bid.nonce, epoch, *_pairs(bid.stripes, value)),
        )
        confirmed = yield Broadcast(
            command, targets, _enough_confirmed(fleet.quorum - len(at_value), len(targets)), patience
        )
        ended = confirmed.ended
        cut_short = any(answer.said is Said.HIGHER for answer in confirmed.answers.values())
        for node, answer in confirmed.answers.items():
            if cut_short and answer.said is Said.SILENT:
                continue  # it had no time, and is asked again
            answers[node] = answer
            if answer.said is Said.CONFIRMED:
                acknowledged.add(node)
            elif answer.said is Said.HIGHER:
                granted[node] = answer.counters
            else:
                refused.add(node)
        larger = _maximum([value, *granted.values()])
        if larger != value:
            # A node had granted more: decide again with that, and ask everybody anew.
            value = larger
            acknowledged.clear()


def release(fleet: Fleet, granted: Granted) -> Generator[Broadcast, Round, bool | None]:
    """Give the lock back, and let lagging nodes catch up with the token.

    Returns True if a majority still held it for us, False if that can no longer be, None if too few
    nodes answered to tell; in that case the lock ends by itself with its ttl.
    """
    command = _release_command(fleet, granted.bid, granted.epoch, granted.counters)
    least = len(fleet.names) - fleet.quorum + 1
    done = yield Broadcast(command, fleet.everybody, fleet.enough_released, fleet.patience, least)
    if _count(Said.RELEASED, done.answers) >= fleet.quorum:
        return True
    # RELEASE refuses nobody. Voters that do not know the lock and blank nodes are not added up: see EXTEND.
    gone = max(_count(Said.LOST, done.answers), _count(Said.AMNESIA, done.answers))
    return None if len(fleet.names) - gone >= fleet.quorum else False


def extend(
    fleet: Fleet, wishes: Sequence[tuple[Granted, float]]
) -> Generator[Broadcast, Round, list[float | FencelockError]]:
    """Let grants live on, each for so many seconds from now; the tokens stay.

    Returns for each when it ends, on the driver's clock and never earlier than it would have without; a
    LockLostError if a majority can no longer hold it for us; a QuorumError if too few nodes answered to tell,
    and it still ends when it would have.

    A node that had no lock, and has made it again, counts for nothing in this round. Where it might be the
    last that is needed, for it was admitted a moment ago and the next is blank, there is a second round.
    """
    bids = [replace(granted.bid, ttl=ttl) for granted, ttl in wishes]
    command = _extend_command(fleet, bids, [granted.epoch for granted, _ in wishes])
    patience = min(fleet.patience, *(bid.ttl for bid in bids))
    request = Broadcast(command, fleet.everybody, _are_clear(fleet, len(bids)), patience)
    done = yield request
    again: Round | None = None
    ends: list[float | FencelockError] = []
    for index, ((granted, _), bid) in enumerate(zip(wishes, bids, strict=True)):
        end = _extended(fleet, bid, granted, done, index)
        if isinstance(end, QuorumError) and done.ended < granted.expires_at and _is_made_again(done, index):
            again = again or (yield request)
            end = _extended(fleet, bid, granted, again, index)
        ends.append(end)
    return ends


def remint(
    see: Callable[[], Fleet],
    new_bid: Callable[[Fleet], Bid],
    granted: Granted,
    *,
    jitter: Callable[[], float],
) -> Generator[Request, Round | float, Granted]:
    """Exchange a grant for one with larger tokens, without letting anybody in between: with bids made anew.

    On each node RELEASE and ACQUIRE in one step, under a new nonce: the old one is not heard of again. It is
    decided and confirmed as any acquisition; and tried again until the validity is over, for a part of the
    nodes has forgotten the old nonce already.

    Raises:
        LockLostError: it came to nothing, and neither is the old grant in force any more.
    """
    while True:
        fleet = see()
        bid = new_bid(fleet)
        outcome = yield from attempt(fleet, bid)
        if isinstance(outcome, Granted):
            # Where the new nonce has not arrived, the old lock would live on.
            yield from abandon(fleet, granted.bid)
            return outcome
        yield from abandon(fleet, bid)
        pause = _pause(outcome, 0, jitter())
        others = sum(answer.said is Said.HELD for answer in outcome.answers.values())
        if len(fleet.names) - others < fleet.quorum or outcome.ended + pause >= granted.expires_at:
            yield from abandon(fleet, granted.bid)
            raise LockLostError(
                f"{_name(bid)} was not minted anew: the lease has ended; acquire the lock again "
                f"({_report(fleet, outcome.answers)})"
            )
        yield Sleep(pause)


def _extended(fleet: Fleet, bid: Bid, granted: Granted, done: Round, index: int) -> float | FencelockError:
    """Return what became of one grant's extension."""
    ours = _still_extended(fleet, done.answers, index)
    if ours is False:
        return LockLostError(
            f"{_name(bid)} was not extended: the lease has ended; acquire the lock again "
            f"({_report(fleet, _of_one(done.answers, index))})"
        )
    expires_at = done.began + bid.ttl - bid.drift
    if ours is None or expires_at <= done.ended:
        answers = _of_one(done.answers, index)
        return QuorumError(
            f"{_name(bid)} was not extended: too few nodes answered in time: {_report(fleet, answers)}",
            nodes=_by_name(fleet.names, answers),
        )
    return max(expires_at, granted.expires_at)


def _of_one(answers: Answers, index: int) -> Answers:
    """Return what the nodes said of one of the grants that were to be extended."""
    said = {_EXTENDED: Said.EXTENDED, _MADE_AGAIN: Said.RESTORED}
    return {
        node: Answer(said.get(answer.counters[index], Said.LOST)) if answer.said is Said.EXTENDED else answer
        for node, answer in answers.items()
    }


def _still_extended(fleet: Fleet, answers: Answers, index: int) -> bool | None:
    """Return whether a majority has had a grant's lock all the time; None where that can still be said later.

    What a node has made again counts from the next round on, and what a blank one has, when it is admitted: a
    node may forget as soon as another has been admitted, and soon after a majority has had the lock all the
    time. Only where a majority votes and has missed it, others may have had it.
    """
    extended = missed = 0
    for answer in answers.values():
        if answer.said is Said.EXTENDED:
            extended += answer.counters[index] == _EXTENDED
            missed += answer.counters[index] != _EXTENDED
    if extended >= fleet.quorum:
        return True
    return None if len(fleet.names) - missed >= fleet.quorum else False


def _is_made_again(done: Round, index: int) -> bool:
    """Whether a node has made a grant's lock again."""
    return any(
        answer.said is Said.EXTENDED and answer.counters[index] == _MADE_AGAIN
        for answer in done.answers.values()
    )


def _are_clear(fleet: Fleet, count: int) -> Callable[[Answers], bool]:
    """Return whether more answers to EXTEND could not change what became of any of so many grants."""

    def enough(answers: Answers) -> bool:
        if len(answers) < fleet.quorum:
            return False
        all_well = sum(
            answer.said is Said.EXTENDED and min(answer.counters) == _EXTENDED for answer in answers.values()
        )
        return all_well >= fleet.quorum or all(
            _still_extended(fleet, answers, index) is not None for index in range(count)
        )

    return enough


def _extend_command(fleet: Fleet, bids: Sequence[Bid], epochs: Sequence[int]) -> Command:
    keys = (fleet.node_key, *(key for bid in bids for key in bid.keys[1:]))
    parts: list[str | int] = []
    for bid, epoch in zip(bids, epochs, strict=True):
        parts += bid.nonce, bid.ttl_ms, len(bid.resources), f"{bid.nonce}|{epoch}|{RESTORED}"
    return Command("extend", "", keys, (fleet.fingerprint, "", *parts))


#: What a node says that may have made locks again.
_MAKES_AGAIN = frozenset({Said.EXTENDED, Said.AMNESIA, Said.RESTARTED})


def undoing(command: Command, answer: Answer | None) -> list[Command]:
    """Return the RELEASEs of what a command may have locked while nobody waits for its answer.

    Whoever gets such an answer (None: it will never come) sends those that are of no grant in use. They give
    nobody a place in line, as a RELEASE may: by now nobody may wait there any more.
    """
    script, nonce, keys, arguments = command
    if script == "release":
        has_place = len(arguments) > 1 + 2 * len(keys)
        return [] if answer else [command._replace(arguments=(*arguments[:-1], "")) if has_place else command]
    if script == "acquire" and (answer is None or answer.said is Said.GRANTED):
        place, waited = (*arguments[2 + 2 * len(keys) :], "", 0)[:2]
        return [_undo(nonce, keys, (place, waited, "") if place else ())]
    if script != "extend" or (answer is not None and answer.said not in _MAKES_AGAIN):
        return []
    if answer is not None and answer.said is not Said.EXTENDED:
        answer = None  # it says nothing about each
    found, key = [], 1
    for index in range(len(arguments[2:]) // 4):
        its_nonce, _, locks, _ = arguments[2 + 4 * index : 6 + 4 * index]
        if answer is None or answer.counters[index] == _MADE_AGAIN:
            found.append(_undo(str(its_nonce), (keys[0], *keys[key : key + int(locks)])))
        key += int(locks)
    return found


def _undo(nonce: str, keys: tuple[str, ...], turn: tuple[str | int, ...] = ()) -> Command:
    """Return a RELEASE that decides nothing, of a client whose list of nodes may be another by now.

    It names the stripes all the same: a node that grants the lock to who waits for it counts on from there.
    With a turn, that bid is not granted while it waits.
    """
    resources = tuple(key.removeprefix(f"{keys[0]}:l:") for key in keys[1:])
    _, stripes = (_names_of_one if len(resources) == 1 else _names)(keys[0], resources)
    return Command("release", nonce, keys, ("", nonce, 0, *_pairs(stripes, (0,) * len(stripes)), *turn))


def abandon(fleet: Fleet, bid: Bid, links_until: float = math.inf) -> Generator[Broadcast, Round, None]:
    """Release a failed bid everywhere, also where the answer was lost; wait for nobody."""
    command = _release_command(fleet, bid, 0, (0,) * len(bid.resources))
    yield Broadcast(command, fleet.everybody, lambda _: True, 0.0, links_until=links_until)


def _wait(
    fleet: Fleet, outcome: Failed, seconds: float, granted_meanwhile: Callable[[], Answers]
) -> Generator[Request, Any, Granted | None]:
    """Wait for the next try. Return what the bid has come to, if a majority has granted it in that time."""
    now = yield Sleep(seconds, wakeable=True)
    if not outcome.stands:
        return None
    granted = yield from _take(fleet, outcome, granted_meanwhile(), now)
    if granted is None:
        yield from give_way(fleet, outcome)
    return granted


def _take(
    fleet: Fleet, outcome: Failed, granted: Answers, now: float
) -> Generator[Broadcast, Round, Granted | None]:
    """Return what a bid has come to while it waited, if that is enough.

    A node that releases a lock may execute the ACQUIRE of who waits for it as if that had arrived only
    now, which any message may do. Its answer is a call. The validity counts from when it was sent.
    """
    bid = outcome.bid
    silent = Answer(Said.SILENT)
    answers = {node: granted.get(node, silent) for node in fleet.everybody}
    if len(_largest_epoch(answers)[1]) < fleet.quorum:
        return None
    epoch, counters, ended = yield from _decide(fleet, bid, answers, now)
    expires_at = outcome.began + bid.ttl - bid.drift
    if counters is None or expires_at <= ended:
        return None
    return Granted(bid, epoch, counters, expires_at)


def give_way(
    fleet: Fleet, outcome: Failed, links_until: float = math.inf
) -> Generator[Broadcast, Round, None]:
    """Release a failed bid wherever it may have locked something, and stay in line there; wait for nobody."""
    bid = outcome.bid
    nodes = [
        node for node, answer in outcome.answers.items() if answer.said is not Said.HELD or bid.may_be_parked
    ]
    if nodes:
        nothing = (0,) * len(bid.resources)
        command = _release_command(fleet, bid, 0, nothing, stay=True)
        yield Broadcast(command, nodes, lambda _: True, 0.0, links_until=links_until)


def leave(fleet: Fleet, bid: Bid, links_until: float) -> Generator[Broadcast, Round, None]:
    """Wait no longer: give up the place in line, if there is one."""
    if bid.stands_in_line:
        yield from abandon(fleet, bid, links_until)


def _learn(fleet: Fleet, outcome: Failed, links_until: float) -> Generator[Broadcast, Round, None]:
    """Ask nodes that name another list which one, where too few vote in this one.

    They may have been initialised, or changed, since we last looked; also while we waited.
    """
    others = [node for node, answer in outcome.answers.items() if answer.said is Said.CONFIG]
    if others and not outcome.contended:
        who = Command("who", "", (fleet.node_key,), ("", ""))
        yield Broadcast(
            who, others, lambda new: len(new) == len(others), fleet.patience, links_until=links_until
        )


def _acquire_command(bid: Bid, fleet: Fleet) -> Command:
    hints = bid.hints or (0,) * len(bid.resources)
    arguments = (fleet.fingerprint, bid.nonce, bid.ttl_ms, bid.hint_epoch, *_pairs(bid.stripes, hints))
    turn = bid.turn
    if turn is not None:
        waiting = (round(turn.waited * 1e6), round(turn.since * 1000))
        arguments = (*arguments, turn.place, *waiting, int(turn.fair))
    elif bid.instead_of:
        arguments = (*arguments, "", 0, 0, 0, bid.instead_of)
    return Command("acquire", bid.nonce, bid.keys, arguments)


def _release_command(
    fleet: Fleet, bid: Bid, epoch: int, counters: Sequence[int], *, stay: bool = False
) -> Command:
    arguments = (fleet.fingerprint, bid.nonce, epoch, *_pairs(bid.stripes, counters))
    turn = bid.turn
    if turn is not None and turn.place:
        waiting = (round(turn.waited * 1e6) if stay else "leave", round(turn.since * 1000))
        arguments = (*arguments, turn.place, *waiting)
    return Command("release", bid.nonce, bid.keys, arguments)


def _pairs(stripes: Sequence[int], counters: Sequence[int]) -> Sequence[str | int]:
    if len(stripes) == len(counters) == 1:  # most often
        return stripes[0], counters[0]
    return [number for pair in zip(stripes, counters, strict=True) for number in pair]


def _maximum(vectors: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(max(column) for column in zip(*vectors, strict=True))


def _same_grant(answers: Answers, quorum: int) -> Answer | None:
    """Return what a majority has granted, if nobody else has granted anything else: nothing is to decide."""
    grants = [answer for answer in answers.values() if answer.said is _GRANTED]
    return grants[0] if len(grants) >= quorum and grants.count(grants[0]) == len(grants) else None


def _largest_epoch(answers: Answers) -> tuple[int, dict[int, tuple[int, ...]]]:
    """Return the epoch in which most nodes granted, and their counters: epochs are never mixed."""
    epochs = _epochs(answers)
    epoch = epochs[0] if epochs else 0
    if epochs.count(epoch) < len(epochs):
        epoch = max(epochs, key=epochs.count)
    return epoch, {
        node: answer.counters
        for node, answer in answers.items()
        if answer.said is _GRANTED and answer.epoch == epoch
    }


def _epochs(answers: Answers) -> list[int]:
    """Return the epoch of every grant."""
    return [answer.epoch for answer in answers.values() if answer.said is _GRANTED]


def _enough_granted(fleet: Fleet, earlier: Answers) -> Callable[[Answers], bool]:
    """Return whether more answers to ACQUIRE could not change what comes next.

    Where it fails for want of voters, every node is heard: the error will say what each one said.
    """
    quorum = fleet.quorum

    def enough(answers: Answers) -> bool:
        together = {**earlier, **answers} if earlier else answers
        if _same_grant(together, quorum) is not None:
            return True
        epochs = _epochs(together)
        best = max(map(epochs.count, epochs), default=0)
        if best >= quorum:
            return True
        return best + len(fleet.names) - len(together) < quorum and _can_vote(fleet, together)

    return enough


def _enough_confirmed(needed: int, asked: int) -> Callable[[Answers], bool]:
    def enough(answers: Answers) -> bool:
        confirmed = sum(answer.said is Said.CONFIRMED for answer in answers.values())
        higher = any(answer.said is Said.HIGHER for answer in answers.values())
        return higher or confirmed >= needed or confirmed + asked - len(answers) < needed

    return enough


def _is_clear(fleet: Fleet, good: Said) -> Callable[[Answers], bool]:
    """Return whether a majority has said, or can no longer say, what is hoped for."""
    quorum = fleet.quorum
    spare = len(fleet.names) - quorum

    def enough(answers: Answers) -> bool:
        count = _count(good, answers)
        return count >= quorum or len(answers) - count > spare

    return enough


def _count(said: Said, answers: Answers) -> int:
    return [answer.said for answer in answers.values()].count(said)


def _pause(outcome: Failed, tries: int, random: float) -> float:
    """Seconds until the next try: longer from try to try, never the same for two contenders."""
    if tries == 1 and outcome.contended and not outcome.split and not outcome.bid.stands_in_line:
        return 0.0  # the next one does
    ends = [answer.ttl for answer in outcome.answers.values() if answer.said is Said.HELD]
    if outcome.waits_for_a_call:
        # The nodes will call; should they not, or should the one before us never come, look again. Locks that
        # end sooner than that are mostly kept for somebody who has been called: all would come back at once.
        pause = min(1.0, _LOOK * 1.5 ** min(tries, 12)) * (0.75 + 0.5 * random)
        ends = [end for end in ends if end > _LOOK]
    else:
        pause = min(0.1, 0.01 * 1.5 ** min(tries, 12)) * (0.5 + random)
    # A little beyond the first end of a lock: at that very moment the node may still refuse.
    return min([pause, *(end + 0.001 + 0.01 * random for end in ends)])


def _can_vote(fleet: Fleet, answers: Answers) -> bool:
    return sum(answer.said in _VOTING for answer in answers.values()) >= fleet.quorum


def _may_recover(fleet: Fleet, answers: Answers, grace: float) -> bool:
    """Whether a quorum could come back without an operator, and within so many seconds."""
    hopeful = sum(
        answer.said in _VOTING
        or answer.said in PASSING
        or (answer.said is Said.RESTARTED and answer.ttl < grace)
        for answer in answers.values()
    )
    return hopeful >= fleet.quorum


def _name(bid: Bid) -> str:
    return ", ".join(repr(resource) for resource in bid.resources)


def _raise_timeout(fleet: Fleet, outcome: Failed) -> NoReturn:
    if not outcome.contended:
        _raise_no_quorum(fleet, outcome.answers)
    if outcome.late:
        raise QuorumError(
            f"the nodes answer too slowly for a ttl of {outcome.bid.ttl:g} s: a majority granted "
            f"{_name(outcome.bid)}, but no validity was left; use a longer ttl",
            nodes=_by_name(fleet.names, outcome.answers),
        )
    holder_ttl = outcome.holder_ttl
    if holder_ttl is None:
        raise LockTimeoutError(
            f"{_name(outcome.bid)} could not be acquired in time: contenders split the votes"
        )
    if holder_ttl == math.inf:
        raise LockTimeoutError(
            f"{_name(outcome.bid)} is held for ever: something else than fencelock has written its key "
            f"({', '.join(outcome.bid.keys[1:])}) without an end; remove it on the nodes",
            holder_ttl=holder_ttl,
        )
    raise held_by_another(outcome.bid.resources, holder_ttl)


def _raise_no_quorum(fleet: Fleet, answers: Answers) -> NoReturn:
    said = Counter(answer.said for answer in answers.values())
    spare = len(fleet.names) - fleet.quorum
    report = _report(fleet, answers)
    if said[Said.AMNESIA] > spare:
        raise NodesNotInitialisedError(_why_blank(fleet, said[Said.AMNESIA], report))
    if said[Said.CONFIG] + said[Said.CLOSED] > spare:
        raise MembershipError(
            f"the nodes do not agree with this list of {len(fleet.names)} nodes: configure every client with "
            f"exactly the nodes that were initialised together ({report})"
        )
    voters = sum(answer.said in _VOTING for answer in answers.values())
    advice = "bring the others back, or mend their URLs"
    if said[Said.AMNESIA] or said[Said.RESTARTED]:
        advice = f"{_when_back(fleet, answers)}; `fencelock nodes` tells more (docs/redis.md)"
    raise QuorumError(
        f"{voters} of {len(fleet.names)} nodes can vote, and a majority is {fleet.quorum}: {report}; "
        f"{advice}",
        nodes=_by_name(fleet.names, answers),
    )


def _why_blank(fleet: Fleet, blank: int, report: str) -> str:
    """Return what to say where too many nodes are blank: what is likelier comes first."""
    new = f"Nodes that are used for the first time: `{fleet.init_command}`"
    used = (
        f"Nodes that were used before: `{fleet.init_command} --after-loss --database URL`, which starts "
        "above the tokens that the database has seen"
    )
    if blank < len(fleet.names):
        return (
            f"{blank} of {len(fleet.names)} nodes are blank, and may have forgotten tokens that they gave "
            f"out ({report}). {used}. {new}"
        )
    if fleet.fingerprint:
        return f"no node is initialised any more: they have lost their memory in use. {used}. {new}"
    return f"no node is initialised. {new}. {used}"


def _when_back(fleet: Fleet, answers: Answers) -> str:
    """Return when nodes that restarted vote again, as far as they have said it."""
    waits = [answer.ttl for answer in answers.values() if answer.said is Said.RESTARTED]
    if waits and not max(waits):
        return "what restarted votes again as soon as a client has admitted it, which begins now: try again"
    if waits and max(waits) < math.inf:
        return f"what restarted votes again in {math.ceil(max(waits))} s, when the next client admits it"
    longest = f", {fleet.max_ttl:g} s," if fleet.max_ttl < math.inf else ""
    return f"what restarted votes again when the longest lease{longest} has passed since a client met it"


def _by_name(names: Sequence[str], answers: Answers) -> dict[str, str]:
    return {names[node]: str(answers[node]) for node in sorted(answers)}


def _report(fleet: Fleet, answers: Answers) -> str:
    return "; ".join(f"{name}: {said}" for name, said in _by_name(fleet.names, answers).items())
