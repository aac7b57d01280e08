"""Which lease is to be extended when, and what became of that. No thread and no event loop.

A lease is looked at after a third of its ttl; if the nodes cannot be reached then, again and again until its
validity is over. Then it is *lost*, and so it is at the end of `max_hold`: a worker that hangs beside a
healthy renewer must not hold for ever. Whoever works under a lost lease is not interrupted, but hears of it
from the next use of the lease, from `on_lost`, and on leaving the block; the storage has the last word.

A lease that is given back is taken off the agenda first, and an extension that is under way is waited for:
nothing is extended after its release. Where it cannot be waited for, in another thread than the loop's, nodes
may make locks again behind the release: then the one of the two that ends last releases once more.
"""

from __future__ import annotations

import heapq
import logging
import math
import random
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Protocol

from fencelock.authority.base import Authority, Grant, Wish
from fencelock.errors import AuthorityError, FencelockError, LockLostError

logger = logging.getLogger("fencelock.renewal")

_PARTS = 16
_SHORTEST_PAUSE = 0.01

#: What is wanted.
Wishes = list[Wish]

#: What became of a wish.
Extended = Grant | FencelockError


class Renewable(Protocol):
    """What is renewed: a hold of the lock's."""

    grant: Grant
    planned: float
    trouble: str
    extended_behind: bool

    @property
    def authority(self) -> Authority:
        """The authority that granted it."""

    @property
    def itself(self) -> Callable[[], Renewable | None]:
        """A weak reference."""

    @property
    def ttl(self) -> float:
        """Seconds that an extension asks for."""

    @property
    def deadline(self) -> float:
        """When it is to end whatever happens."""

    @property
    def release_ended(self) -> bool:
        """Whether its release has been answered, or given up."""

    @property
    def over(self) -> bool:
        """Whether there is nothing to extend."""

    @property
    def released(self) -> bool:
        """Whether it has been given back, or is being so."""

    def most_seconds(self, now: float) -> float:
        """Return for how long it may be extended at that time."""

    def prolong(self, grant: Grant) -> None:
        """Note that the authority has extended the grant."""

    def lose(self, reason: str) -> tuple[Callable[[], object], ...]:
        """Note that it has ended; return what is to be called for that."""


class Agenda:
    """When each hold is to be looked at: in steps of a sixteenth of its interval, so that batches form.

    Not for two threads at once, save `strike`; but a signal handler may plan in the midst of planning. Holds
    are referred to weakly.

    Attributes:
        next_at: when something is to be done; infinite if nothing is.
    """

    def __init__(self) -> None:
        self._steps: dict[float, set[Callable[[], Renewable | None]]] = {}
        self._times: list[float] = []
        self.next_at = math.inf
        # Another one in every process, or all would ask the nodes at the same moments.
        self._phase = random.random()  # noqa: S311 - no secret

    def enter(self, hold: Renewable, now: float) -> None:
        """Plan the first look at a hold."""
        self.plan(hold, *first_look(hold, now))

    def plan(self, hold: Renewable, at: float, interval: float) -> None:
        """Look at a hold at that time, or up to a sixteenth of the interval later; and at no other."""
        self.strike(hold)
        width = interval / _PARTS
        hold.planned = step = (math.ceil(at / width - self._phase) + self._phase) * width
        if step not in self._steps:
            heapq.heappush(self._times, step)  # twice, if a handler does the same here
        self._steps.setdefault(step, set()).add(hold.itself)
        self.next_at = min(self.next_at, step)

    def strike(self, hold: Renewable) -> None:
        """Take a hold off the agenda."""
        if (holds := self._steps.get(hold.planned)) is not None:
            holds.discard(hold.itself)

    def take(self, now: float) -> list[Renewable]:
        """Take off, and return, what is to be looked at now."""
        due: list[Renewable] = []
        while self._times and self._times[0] <= now:
            references = self._steps.pop(heapq.heappop(self._times), ())
            # A copy, made in one step: another thread may strike one.
            due += [hold for reference in list(references) if (hold := reference()) is not None]
        self.next_at = self._times[0] if self._times else math.inf
        return due


def first_look(hold: Renewable, now: float) -> tuple[float, float]:
    """Return when to look at a hold that was granted or extended, and the interval of such looks."""
    interval = hold.ttl / 3
    left = hold.grant.expires_at - now
    # An acquisition that took long has left less than its ttl. At the end there is nothing to gain.
    return now + (left if _is_final(hold) else min(interval, left / 2)), interval


def second_look(hold: Renewable, now: float) -> tuple[float, float]:
    """Return when to look again at a hold that could not be extended, and the interval of such looks."""
    interval = max(hold.ttl / 20, _SHORTEST_PAUSE)
    return min(now + interval, hold.grant.expires_at), interval


def _is_final(hold: Renewable) -> bool:
    """Whether the grant lasts for as long as it ever may."""
    return hold.deadline - hold.grant.expires_at < hold.ttl / 20


def tend(
    due: Iterable[Renewable], now: Callable[[], float], plan: Callable[[Renewable, float, float], None]
) -> Generator[Wishes | Grant, Sequence[Extended], list[Callable[[], object]]]:
    """Extend what is due and can be, give up what cannot, and plan the rest.

    Yields wishes, and is sent what became of each; yields a grant that is lost, to be released
    for what may be left of it. Returns what is to be called for leases that were lost.
    """
    calls: list[Callable[[], object]] = []
    wanted: list[tuple[Renewable, Grant, float]] = []
    for hold in due:
        moment = now()
        if hold.over:
            continue
        if moment >= hold.grant.expires_at:
            reason = (
                "it was held for as long as max_hold allows"
                if _is_final(hold)
                else f"it could not be extended in time: {hold.trouble or 'this process was held up'}"
            )
            calls += hold.lose(reason)
            yield hold.grant
        elif _is_final(hold):
            plan(hold, *first_look(hold, moment))
        else:
            wanted.append((hold, hold.grant, hold.most_seconds(moment)))
    outcomes: Sequence[Extended] = ()
    if wanted:
        outcomes = yield [(grant, seconds) for _, grant, seconds in wanted]
    for (hold, grant, _), outcome in zip(wanted, outcomes, strict=True):
        # A holder in another thread or loop, or one that was interrupted, did not wait for this.
        if hold.released:
            yield from follow_release(hold)
        elif hold.grant is grant:  # or else extended or minted anew meanwhile, and planned
            calls += yield from _note(hold, outcome, now, plan)
    return calls


def follow_release(hold: Renewable) -> Generator[Grant, object, None]:
    """Release once more what may have been made again behind the release; or leave that to the releaser."""
    hold.extended_behind = True
    if hold.release_ended:
        yield hold.grant


def _note(
    hold: Renewable,
    outcome: Extended,
    now: Callable[[], float],
    plan: Callable[[Renewable, float, float], None],
) -> Generator[Grant, object, tuple[Callable[[], object], ...]]:
    calls: tuple[Callable[[], object], ...] = ()
    if hold.over or isinstance(outcome, LockLostError):
        calls = hold.lose(str(outcome))
        yield hold.grant
    elif isinstance(outcome, Grant):
        hold.prolong(outcome)
        plan(hold, *first_look(hold, now()))
    else:
        hold.trouble = str(outcome)
        plan(hold, *second_look(hold, now()))
    return calls


def tell(calls: Iterable[Callable[[], object]]) -> None:
    """Call what is to be called for leases that were lost; one that fails is logged."""
    for call in calls:
        try:
            call()
        except Exception:
            logger.exception("an on_lost callback failed")


class Renewer(Protocol):
    """Extends holds."""

    def watch(self, hold: Renewable) -> None:
        """Begin to extend a hold."""

    def strike(self, hold: Renewable) -> bool:
        """Cease to extend a hold; or return False, and go on, where an extension is under way."""

    def stop(self, hold: Renewable) -> None:
        """Cease to extend a hold; an extension under way has ended when this returns."""

    async def stop_soon(self, hold: Renewable) -> None:
        """Do as `stop`, and let other tasks run meanwhile."""


def failed(asked: Wishes | Grant, error: Exception) -> Sequence[Extended]:
    """Return an authority's error as what became of each wish."""
    if not isinstance(error, AuthorityError):
        logger.error("leases could not be extended or released", exc_info=error)
    count = 0 if isinstance(asked, Grant) else len(asked)
    return [error if isinstance(error, FencelockError) else AuthorityError(repr(error))] * count
