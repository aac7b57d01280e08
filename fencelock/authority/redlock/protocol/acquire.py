"""How a quorum grants a lease: the commands to the nodes, and the meaning of their answers.

The algorithm has no sockets, no clock and no threads. Each operation is a generator. It yields a *request*
(`Broadcast` a command, or `Sleep`), and gets the outcome (`Replies`, or the time after sleeping). A blocking
driver, an asyncio driver and a simulator run the same generators, so the tested code is the shipped code.

How a quorum mints one token. Every node grants from its own counter, so a majority may give out the same
number twice: client A gets {n0: 1, n1: 1}, B gets {n1: 2, n2: 1}, and C gets {n2: 2, n0: 2}, which is B's
maximum again. Therefore a value is decided only when a majority *stands at* it, by its grants or raises:

1. ACQUIRE on all nodes. A value that a majority granted is decided: one round trip.
2. Otherwise T is the maximum over a granted majority, and CONFIRM raises the others to T, each only
   while the lock there is still ours and *its own grant is not above T*. The last condition prevents this:
   counters stand at n0=0, n1=1, n2=1. A is granted n0 (1), expires there, then n1 (2): T = 2. B is
   granted n0 (2) and n2 (2); n2 expires; A's late ACQUIRE arrives at n2 (3); n2 acknowledges
   A's raise to 2, and both A and B hold 2.
3. Votes of different epochs are never added up.

The majorities of two decided values of one resource share a node. That node granted the second value after it
had reached the first, so the second is larger. An acquisition that began after another had completed finds a
majority of counters at or above that token. Clocks take no part in this: they only bound the *validity*.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from fencelock._backoff import grown, spread
from fencelock.authority.base import Grant
from fencelock.authority.redlock.protocol.attempts import (
    Attempt,
    Failed,
    NodeSet,
    Proof,
    QueuePosition,
    abandon,
    can_vote,
    enough_granted,
    in_pairs,
    largest_epoch,
    maximum_of,
)
from fencelock.authority.redlock.protocol.messages import (
    PASSING,
    VOTING,
    Broadcast,
    Broadcasts,
    Command,
    NodeReplies,
    Reply,
    ReplyKind,
    Sleep,
    Steps,
)
from fencelock.authority.redlock.protocol.queue import WaitQueue
from fencelock.authority.redlock.protocol.refusals import raise_timeout, raise_ttl_too_long
from fencelock.errors import FencelockError
from fencelock.lease import validity
from fencelock.tokens import compose

#: Seconds after which a contender tries again without a call, at first; longer than a claim of `queue.lua`.
_LOOK = 0.15
_LEAST_FOR_LINKS = 0.5  # the least seconds to wait for connections, however short the timeout


class Acquisition:
    """Makes one attempt after the other, each with a new nonce, until a quorum grants.

    The first attempt does not wait in line if the client's last acquisition did not wait. Then the lock is
    mostly free, and nodes have less to do.

    A nonce is made when it is needed. If two processes that were restored from one snapshot shared a prepared
    nonce, a node would take the attempt of one for a repeated one of the other.
    """

    def __init__(
        self,
        resources: tuple[str, ...],
        ttl: float,
        new_nonce: Callable[[], str],
        queue: WaitQueue | None = None,  # hears which places the nodes call; None if it never waits in line
        *,
        fair: bool = False,  # leave a free lock to contenders that have waited longer
        at_least: float = 0.0,
        instead_of: Proof | None = None,  # the grant whose locks the attempts take over
    ) -> None:
        self._resources = resources
        self._longest = max(ttl, at_least)
        self._canonical = resources if len(resources) == 1 else tuple(sorted(resources))
        self._ttl = ttl
        self._new_nonce = new_nonce
        self._queue = queue
        self._fair = fair
        self._special: dict[str, Any] = {}  # more fields of each attempt, if it takes over a grant
        if instead_of is not None:
            hints = tuple(counter + 1 for counter in instead_of.counters)
            self._special = {
                "hint_epoch": instead_of.epoch,
                "hints": hints,
                "instead_of": instead_of.attempt.nonce,
            }
        self._latest: tuple[NodeSet, Attempt] | None = None
        self._attempts = 0
        self._is_alone = False  # whether the next attempt asks one node at a time: see `make_attempt`
        self._waits = True
        self._place = ""  # the place in line by which the nodes call this acquisition; empty for none
        self._began = self._since = self._now = 0.0

    def acquire(
        self,
        current: Callable[[], NodeSet],  # returns the nodes as they are known at the moment
        *,
        began: float,  # on the clock of the code that runs the generator
        since: float,  # the same moment in Unix time, which is about the same for all clients
        timeout: float | None,
        grace: float,  # seconds to keep trying without a quorum, so that a short outage is survived
        outage: float,  # seconds without a quorum for which it waits for connections
        jitter: Callable[[], float],
        go_on: Callable[[], None] = lambda: None,  # called after each wait; may raise
    ) -> Steps[Grant]:
        """Make attempts until a quorum grants, or until the time is over; raise as `Redlock.acquire_gen`."""
        self._began, self._since, self._now, self._waits = began, since, began, timeout != 0
        self._ends = math.inf if timeout is None else began + timeout
        self._links_end = math.inf if timeout is None else began + max(timeout, _LEAST_FOR_LINKS)
        self._last_quorum, self._grace = began, grace
        try:
            while True:
                node_set = current()
                attempt = self.next_attempt(node_set)
                links_until = min(self._links_end, self._last_quorum + outage)
                outcome = yield from make_attempt(
                    node_set, attempt, alone=self._is_alone, links_until=links_until
                )
                if isinstance(outcome, Grant):
                    self.leave_queue()
                    return self.in_order(outcome)
                self._now = outcome.ended
                yield from self._undo(node_set, outcome, links_until)
                if current() == node_set:  # otherwise nodes answered for the first time, or have another list
                    yield from self._sleep(node_set, outcome, jitter)
                    go_on()
        except (FencelockError, GeneratorExit):  # abandoned already, or nothing can be sent any more
            self.leave_queue()
            raise
        except BaseException:  # mostly a signal handler's error, or a cancellation: only this releases it
            yield from self.abandon_latest()
            self.leave_queue()
            raise

    def _undo(self, node_set: NodeSet, outcome: Failed, links_until: float) -> Broadcasts[None]:
        """Release the locks that an attempt has left, and ask nodes of another list for that list."""
        if nodes := [node for node, answer in outcome.answers.items() if answer.kind is not ReplyKind.HELD]:
            yield from abandon(node_set, outcome.attempt, nodes, stay=True)
        self._is_alone = outcome.split and not self._is_alone
        yield from _learn(node_set, outcome, links_until)

    def _sleep(self, node_set: NodeSet, outcome: Failed, jitter: Callable[[], float]) -> Steps[None]:
        """Wait until the next attempt; raise the reason if the time is over."""
        attempt = outcome.attempt
        if outcome.contended:
            self._last_quorum, is_hopeless = outcome.ended, False
        else:
            is_over = outcome.ended - self._last_quorum >= self._grace
            is_hopeless = is_over or not _may_recover(node_set, outcome.answers, self._grace)
        if is_hopeless or outcome.ended >= self._ends:
            if attempt.place:
                yield from abandon(node_set, attempt)
            raise_timeout(node_set, outcome)
        pause = min(self._ends - outcome.ended, next_pause(outcome, self._attempts, jitter()))
        self._now = yield Sleep(pause, attempt.resources, attempt.place)

    def next_attempt(self, node_set: NodeSet) -> Attempt:
        """Return a new attempt, with a nonce of its own; raise ValueError if the ttl is too long."""
        if self._longest > node_set.max_ttl:
            raise_ttl_too_long(self._longest, node_set)
        nonce = self._new_nonce()
        self._attempts += 1
        attempt = Attempt.of(node_set, self._canonical, nonce, self._ttl, self._position())
        if self._special:
            attempt = replace(attempt, **self._special)
        self._latest = node_set, attempt
        return attempt

    def _position(self) -> QueuePosition | None:
        """Return the position in line of the next attempt; calls for it count from now on."""
        queue = self._queue
        if queue is not None and self._waits and (self._attempts > 1 or queue.waits) and queue.hears:
            self._place = queue.expect(self._place)
            return QueuePosition(self._place, self._now - self._began, self._since, self._fair)
        if queue is not None and self._place:  # otherwise an earlier call would end every sleep at once
            queue.leave(self._place)
            self._place = ""
        return QueuePosition(fair=True) if self._fair else None

    def abandon_latest(self) -> Broadcasts[None]:
        if self._latest is not None:
            yield from abandon(*self._latest)

    def in_order(self, grant: Grant) -> Grant:
        """Return a grant in the caller's order of the resources."""
        if grant.resources == self._resources:
            return grant
        by_name = dict(zip(grant.resources, grant.tokens, strict=True))
        tokens = tuple([by_name[resource] for resource in self._resources])
        return replace(grant, resources=self._resources, tokens=tokens)

    def leave_queue(self) -> None:
        if self._queue is not None:
            self._queue.waits = self._attempts > 1
            if self._place:
                self._queue.leave(self._place)


def make_attempt(
    node_set: NodeSet, attempt: Attempt, *, alone: bool = False, links_until: float = math.inf
) -> Broadcasts[Grant | Failed]:
    """Make one attempt: ACQUIRE, and CONFIRM if the counters disagree.

    With `alone`, nodes are asked one by one in the fixed order until one grants (then all the others are
    asked) or answers HELD. Otherwise two clients could split the votes of an even number of voters for ever.
    """
    patience = min(node_set.patience, attempt.ttl)
    command = _acquire_command(attempt, node_set)
    answers: dict[int, Reply] = {}
    began: float | None = None
    for node in node_set.order if alone else ():
        first = yield Broadcast(command, [node], lambda new: len(new) == 1, patience, links_until)
        began = first.began if began is None else began
        answers.update(first.answers)
        if answers[node].kind is ReplyKind.GRANTED:
            break
        if answers[node].kind is ReplyKind.HELD:
            return Failed(attempt, answers, began, first.ended, contended=True, split=True)
    others = [node for node in node_set.all_nodes if node not in answers]
    enough = enough_granted(node_set, dict(answers))
    everyone = yield Broadcast(command, others, enough, patience, links_until)
    began = everyone.began if began is None else began
    answers.update(everyone.answers)
    # The validity counts from before the first request to after the last answer.
    expires_at = validity(began, attempt.ttl)
    epoch, granted = largest_epoch(answers)
    if len(granted) < node_set.quorum:
        contended = can_vote(node_set, answers)
        held = any(answer.kind is ReplyKind.HELD for answer in answers.values())
        split = contended and held and len(granted) > 0
        return Failed(attempt, answers, began, everyone.ended, contended=contended, split=split)
    counters, ended = yield from _decide(node_set, attempt, answers, epoch, granted, everyone.ended)
    if counters is None:
        return Failed(attempt, answers, began, ended, contended=can_vote(node_set, answers))
    if expires_at <= ended:
        return Failed(attempt, answers, began, ended, contended=True, late=True)
    tokens = tuple([compose(epoch, counter) for counter in counters])
    return Grant(attempt.resources, tokens, expires_at, Proof(attempt, epoch, counters))


def _decide(  # noqa: PLR0917 - the state of the attempt
    node_set: NodeSet,
    attempt: Attempt,
    answers: dict[int, Reply],
    epoch: int,
    granted: dict[int, tuple[int, ...]],
    ended: float,
) -> Broadcasts[tuple[tuple[int, ...] | None, float]]:
    """Find the value that a majority stands at; raise nodes to it if they disagree.

    Returns the value (None if no majority could be brought to one), and when this was known.
    """
    votes = list(granted.values())
    value = max(votes, key=votes.count)
    if votes.count(value) >= node_set.quorum:
        return value, ended
    value = maximum_of(votes)
    patience = min(node_set.patience, attempt.ttl)
    acknowledged: set[int] = set()
    refused = {node for node in answers if node not in granted and answers[node].kind is not ReplyKind.SILENT}
    while True:
        at_value = {node for node, counters in granted.items() if counters == value} | acknowledged
        if len(at_value) >= node_set.quorum:
            return value, ended
        targets = [node for node in node_set.all_nodes if node not in at_value and node not in refused]
        if len(at_value) + len(targets) < node_set.quorum:
            return None, ended
        arguments = (node_set.fingerprint, attempt.nonce, epoch, *in_pairs(attempt.stripes, value))
        command = Command("confirm", attempt.nonce, attempt.keys, arguments)
        enough = _enough_confirmed(node_set.quorum - len(at_value), len(targets))
        confirmed = yield Broadcast(command, targets, enough, patience)
        ended = confirmed.ended
        cut_short = any(answer.kind is ReplyKind.HIGHER for answer in confirmed.answers.values())
        for node, answer in confirmed.answers.items():
            if cut_short and answer.kind is ReplyKind.SILENT:
                continue  # the wait was cut short, so the node is asked again
            answers[node] = answer
            if answer.kind is ReplyKind.CONFIRMED:
                acknowledged.add(node)
            elif answer.kind is ReplyKind.HIGHER:
                granted[node] = answer.counters
            else:
                refused.add(node)
        larger = maximum_of([value, *granted.values()])
        if larger != value:
            # A node had granted more: decide again with that, and ask again.
            value = larger
            acknowledged.clear()


def _learn(node_set: NodeSet, outcome: Failed, links_until: float) -> Broadcasts[None]:
    """If too few nodes vote in this list, ask the nodes of another list which list it is.

    The nodes may have been initialised, or their list replaced, since their last answers.
    """
    others = [node for node, answer in outcome.answers.items() if answer.kind is ReplyKind.CONFIG]
    if others and not outcome.contended:
        read = Command("read", "", (node_set.node_key,), ("",))
        yield Broadcast(
            read, others, lambda new: len(new) == len(others), node_set.patience, links_until=links_until
        )


def _acquire_command(attempt: Attempt, node_set: NodeSet) -> Command:
    hints = attempt.hints or (0,) * len(attempt.resources)
    wanted = (node_set.fingerprint, attempt.nonce, round(attempt.ttl * 1000), attempt.hint_epoch)
    arguments = (*wanted, *in_pairs(attempt.stripes, hints))
    position = attempt.position
    if position is not None:
        waiting = (round(position.waited * 1000), round(position.since * 1000))
        arguments = (*arguments, position.place, *waiting, int(position.fair))
    elif attempt.instead_of:
        arguments = (*arguments, "", 0, 0, 0, attempt.instead_of)
    return Command("acquire", attempt.nonce, attempt.keys, arguments)


def _enough_confirmed(needed: int, asked: int) -> Callable[[NodeReplies], bool]:
    def enough(answers: NodeReplies) -> bool:
        confirmed = sum(answer.kind is ReplyKind.CONFIRMED for answer in answers.values())
        higher = any(answer.kind is ReplyKind.HIGHER for answer in answers.values())
        return higher or confirmed >= needed or confirmed + asked - len(answers) < needed

    return enough


def next_pause(outcome: Failed, tries: int, random: float) -> float:
    """Return the seconds until the next try: mostly longer than before; random, so that contenders differ."""
    if tries == 1 and outcome.contended and not outcome.split and not outcome.attempt.place:
        return 0.0  # the next attempt waits in line
    ends = [answer.ttl for answer in outcome.answers.values() if answer.kind is ReplyKind.HELD]
    if outcome.waits_for_a_call:
        # The nodes will call. Try again in case they do not, or the contender before us never comes. Locks
        # that end within `_LOOK` are mostly claims of a called contender: all others would try at once.
        pause = spread(grown(_LOOK, 1.0, tries), random, 0.75, 1.25)
        ends = [end for end in ends if end > _LOOK]
    else:
        pause = spread(grown(0.01, 0.1, tries), random, 0.5, 1.5)
    # A little later than the first end of a lock, because at that moment the node may still refuse.
    return min([pause, *(end + 0.001 + 0.01 * random for end in ends)])


def _may_recover(node_set: NodeSet, answers: NodeReplies, grace: float) -> bool:
    """Return whether a quorum may come back without an operator, within `grace` seconds."""
    hopeful = sum(
        answer.kind in VOTING
        or answer.kind in PASSING
        or (answer.kind is ReplyKind.RESTARTED and answer.ttl < grace)
        for answer in answers.values()
    )
    return hopeful >= node_set.quorum
