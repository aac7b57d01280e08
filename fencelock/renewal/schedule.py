"""Which lease is extended when, and what became of that. No thread and no event loop.

A lease is looked at after a third of its ttl; if the nodes cannot be reached then, again and again until its
validity is over. Then it is *lost*, and so it is at the end of `max_hold`: a worker that hangs beside a
healthy renewer must not hold for ever. Work under a lost lease is not interrupted, but hears of it from the
next use of the lease, from `on_lost`, and on leaving the block; the storage has the last word.

A lease that is given back is struck off first, and an extension that is under way is waited for: nothing is
extended after its release. Where it cannot be waited for, in another thread than the loop's, nodes may make
locks again behind the release: then the one of the two that ends last releases once more.
"""

from __future__ import annotations

import abc
import logging
import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, Protocol

from fencelock import _events
from fencelock._events import LeaseExtended, LossReason
from fencelock._generators import Steps
from fencelock.authority.base import Authority, Grant, Wish
from fencelock.errors import AuthorityError, FencelockError, LockLostError

logger = logging.getLogger("fencelock.renewal")

_PARTS = 16
_SHORTEST_PAUSE = 0.01

#: Functions to call for leases that were lost.
Calls = list[Callable[[], object]]


class Renewable(Protocol):
    """A hold that is renewed. `Hold` of `lock/` meets it, and says what each of these is."""

    grant: Grant
    ttl: float
    deadline: float
    renew_at: float
    last_error: str
    extended_after_release: bool
    release_finished: bool
    template: str

    @property
    def authority(self) -> Authority: ...
    @property
    def itself(self) -> Callable[[], Renewable | None]: ...
    @property
    def over(self) -> bool: ...
    @property
    def released(self) -> bool: ...
    def ttl_left(self, now: float) -> float: ...
    def note_extension(self, grant: Grant) -> None: ...
    def mark_lost(self, detail: str, reason: LossReason = "gone") -> tuple[Callable[[], object], ...]: ...


class Renewer(abc.ABC):
    """Extends holds: many together, because looks are rounded up by less than a sixteenth of their interval.

    Not for two threads at once, save `cancel`; but a signal handler may plan in the midst of planning.
    """

    def __init__(self) -> None:
        self._due: dict[float, set[Callable[[], Renewable | None]]] = {}  # weak references
        self._in_flight: frozenset[Renewable] = frozenset()
        # Another one in every process, or all would ask the nodes at the same moments.
        self._phase = random.uniform(0.0, 1024.0)  # noqa: S311 - no secret

    @abc.abstractmethod
    def add(self, hold: Renewable) -> None:
        """Begin to extend a hold."""

    @abc.abstractmethod
    def stop(self, hold: Renewable) -> None:
        """Cease to extend a hold; an extension under way has ended when this returns."""

    @abc.abstractmethod
    async def stop_soon(self, hold: Renewable) -> None:
        """Do as `stop`, and let other tasks run meanwhile."""

    def cancel(self, hold: Renewable) -> bool:
        """Extend a hold no more; return False where an extension is under way."""
        if hold in self._in_flight:
            return False
        self._unplan(hold)
        return True

    def _unplan(self, hold: Renewable) -> None:
        if (holds := self._due.get(hold.renew_at)) is not None:
            holds.discard(hold.itself)

    @property
    def next_at(self) -> float:
        return min(self._due, default=math.inf)

    def reschedule(self, hold: Renewable, now: float) -> None:
        """Look at a hold when it is to be extended next, or ends, or up to a sixteenth of the pause later."""
        self._unplan(hold)
        left = hold.grant.expires_at - now
        interval = max(hold.ttl / 20, _SHORTEST_PAUSE) if hold.last_error else hold.ttl / 3
        if not _is_final(hold):  # or else there is nothing to gain before the end
            # An acquisition that took long has left less than its ttl.
            left = min(interval, left if hold.last_error else left / 2)
        # A power of two: leases of many ttls are looked at together.
        width = 2.0 ** math.floor(math.log2(interval / _PARTS))
        hold.renew_at = math.ceil((now + left - self._phase) / width) * width + self._phase
        self._due.setdefault(hold.renew_at, set()).add(hold.itself)

    def pop_due(self, now: float) -> list[Renewable]:
        """Take off, and return, the holds to look at now."""
        due: list[Renewable] = []
        while (look := self.next_at) <= now:
            # A copy, made in one step: another thread may strike one.
            references = tuple(self._due.pop(look, ()))
            due += [hold for reference in references if (hold := reference()) is not None]
        self._in_flight = frozenset(due)
        return due

    def renew_due(
        self, due: Sequence[Renewable], now: Callable[[], float], tell: Callable[[Calls], None]
    ) -> Steps[None]:
        """Extend the holds that are due, give up those that have ended, and plan the rest."""
        authority = due[0].authority
        calls: Calls = []
        ended: list[Grant] = []
        wanted = list(self._look(due, now, calls, ended))
        wishes = [wish for _, wish, _ in wanted]
        outcomes = (yield from _tried(authority.extend_gen(wishes), len(wanted))) if wanted else ()
        for (hold, (grant, _), late), outcome in zip(wanted, outcomes, strict=True):
            # A holder in another thread or loop, or one that was interrupted, did not wait for this.
            if hold.released:
                ended += release_again(hold)
            elif hold.grant is grant:  # or else extended or reminted meanwhile, and renew_at
                calls += self._note(hold, outcome, late, now())
                if hold.over:
                    ended.append(hold.grant)
        if calls:
            tell(calls)
        for each in ended:
            yield from _tried(authority.release_gen(each))

    def _look(
        self, due: Iterable[Renewable], now: Callable[[], float], calls: Calls, ended: list[Grant]
    ) -> Iterator[tuple[Renewable, Wish, float]]:
        """Yield the holds to extend, with the wish and how late it is; give up those that have ended."""
        for hold in due:
            moment = now()
            if hold.over:
                continue
            if moment >= hold.grant.expires_at:
                calls += _give_up(hold, moment)
                ended.append(hold.grant)
            elif _is_final(hold):
                self.reschedule(hold, moment)
            else:
                late = max(0.0, moment - hold.renew_at)
                yield hold, (hold.grant, hold.ttl_left(moment)), late

    def _note(
        self, hold: Renewable, outcome: Grant | FencelockError, late: float, now: float
    ) -> Iterable[Callable[[], object]]:
        """Note what an extension came to; return the callbacks where that is a loss."""
        _tell(hold, outcome, late)
        if hold.over or isinstance(outcome, LockLostError):
            return hold.mark_lost(str(outcome))
        if isinstance(outcome, Grant):
            hold.note_extension(outcome)
        else:
            hold.last_error = str(outcome)
        self.reschedule(hold, now)
        return ()


def _tried(steps: Steps[Any], outcomes: int = 0) -> Steps[Any]:
    """Run a generator; return what it does, or an error as each outcome, because renewal must go on."""
    try:
        return (yield from steps)
    except AuthorityError as error:
        return [error] * outcomes
    except Exception as error:
        logger.exception("leases could not be extended or released")
        return [error if isinstance(error, FencelockError) else AuthorityError(repr(error))] * outcomes


def _is_final(hold: Renewable) -> bool:
    return hold.deadline - hold.grant.expires_at < hold.ttl / 20


def _give_up(hold: Renewable, now: float) -> tuple[Callable[[], object], ...]:
    """Note that a hold's time has run out; return the functions to call."""
    if _is_final(hold):
        return hold.mark_lost("it was held for as long as max_hold allows", "max_hold")
    detail = f"it could not be extended in time: {hold.last_error or 'this process was held up'}"
    _tell(hold, LockLostError(detail), max(0.0, now - hold.renew_at))
    return hold.mark_lost(detail, "expired")


def _tell(hold: Renewable, outcome: Grant | FencelockError, late: float) -> None:
    """Tell listeners what has become of an extension."""
    if _events.listeners:
        names = hold.authority, hold.grant.resources, hold.template
        if isinstance(outcome, Grant):
            _events.tell(LeaseExtended(*names, "extended", late, hold.ttl, None))
        else:
            word: Literal["lost", "error"] = "lost" if isinstance(outcome, LockLostError) else "error"
            _events.tell(LeaseExtended(*names, word, late, hold.ttl, outcome))


def release_again(hold: Renewable) -> Iterator[Grant]:
    """Release once more what may have been made again behind the release; or leave that to the releaser."""
    hold.extended_after_release = True
    if hold.release_finished:
        yield hold.grant


def tell(calls: Iterable[Callable[[], object]]) -> None:
    """Call the functions for leases that were lost; one that fails is logged."""
    for call in calls:
        try:
            call()
        except Exception:
            logger.exception("an on_lost callback failed")
