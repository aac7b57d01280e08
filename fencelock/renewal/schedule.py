"""Plans when each lease is extended, and handles the outcomes. It has no thread and no event loop.

A lease is looked at after a third of its ttl. If the authority cannot be reached, the renewer tries again and
again until the validity of the lease is over. Then the lease is *lost*. It is also lost at the end of
`max_hold`, because a worker that hangs beside a healthy renewer must not hold for ever. Work under a lost
lease is not interrupted. It hears of the loss from its next use of the lease, from `on_lost`, and on leaving
the block; the storage has the last word.

A release first strikes its lease off, and waits for an extension that is under way: nothing is extended after
its release. In another thread than the loop's, a release cannot wait. Then an extension may make locks again
after the release, so the one of the two that ends last releases once more.
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

logger: logging.Logger = logging.getLogger("fencelock.renewal")

_PARTS = 16
_SHORTEST_PAUSE = 0.01

#: Functions to call for leases that were lost.
Calls = list[Callable[[], object]]


class Renewable(Protocol):
    """The part of a hold that a renewer uses; `Hold` of `lock/` has it, and documents each attribute."""

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
    def give_back(self) -> Callable[[Grant], Steps[bool | None]]: ...
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
    """Extends holds, many together, because the times of looks are rounded up to common moments.

    Two threads at once may call only `cancel`. A signal handler may interrupt any method, and plan.
    """

    def __init__(self) -> None:
        self._due: dict[float, set[Callable[[], Renewable | None]]] = {}  # weak references
        self._in_flight: frozenset[Renewable] = frozenset()
        # Random, because all processes would otherwise ask the nodes at the same moments.
        self._phase = random.uniform(0.0, 1024.0)  # noqa: S311 - no secret

    @abc.abstractmethod
    def add(self, hold: Renewable) -> None:
        """Begin to extend a hold."""

    @abc.abstractmethod
    def stop(self, hold: Renewable) -> None:
        """Stop extending a hold; the renewer of threads waits for an extension that is under way."""

    @abc.abstractmethod
    async def stop_soon(self, hold: Renewable) -> None:
        """Stop extending a hold, and wait for an extension that is under way; other tasks run meanwhile."""

    def cancel(self, hold: Renewable) -> bool:
        """Stop extending a hold at once; return False if an extension is under way."""
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
        """Plan the next look at a hold: at its next extension or its end, or up to a sixteenth later."""
        self._unplan(hold)
        left = hold.grant.expires_at - now
        interval = max(hold.ttl / 20, _SHORTEST_PAUSE) if hold.last_error else hold.ttl / 3
        if not _is_final(hold):  # a final hold can gain nothing before its end
            # A slow acquisition has left less than its ttl.
            left = min(interval, left if hold.last_error else left / 2)
        # A power of two, so that leases of different ttls are looked at together.
        width = 2.0 ** math.floor(math.log2(interval / _PARTS))
        hold.renew_at = math.ceil((now + left - self._phase) / width) * width + self._phase
        self._due.setdefault(hold.renew_at, set()).add(hold.itself)

    def pop_due(self, now: float) -> list[Renewable]:
        due: list[Renewable] = []
        while (look := self.next_at) <= now:
            # Copied in one step of Python, because another thread may strike a hold off.
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
        ended: list[Steps[Any]] = []
        wanted = list(self._look(due, now, calls, ended))
        wishes = [wish for _, wish, _ in wanted]
        outcomes = (yield from _tried(authority.extend_gen(wishes), len(wanted))) if wanted else ()
        for (hold, (grant, _), late), outcome in zip(wanted, outcomes, strict=True):
            # A holder in another thread or loop, or one that was interrupted, did not wait for this.
            if hold.released:
                ended += release_again(hold)
            elif hold.grant is grant:  # else its holder has extended or reminted it, and plans it again
                calls += self._note(hold, outcome, late, now())
                if hold.over:
                    ended.append(authority.release_gen(hold.grant))
        if calls:
            tell(calls)
        for each in ended:
            yield from _tried(each)

    def _look(
        self, due: Iterable[Renewable], now: Callable[[], float], calls: Calls, ended: list[Steps[Any]]
    ) -> Iterator[tuple[Renewable, Wish, float]]:
        """Yield each hold to extend, its wish, and the seconds that it is late; give up ended holds."""
        for hold in due:
            moment = now()
            if hold.over:
                continue
            if moment >= hold.grant.expires_at:
                calls += _give_up(hold, moment)
                ended.append(hold.authority.release_gen(hold.grant))
            elif _is_final(hold):
                self.reschedule(hold, moment)
            else:
                late = max(0.0, moment - hold.renew_at)
                yield hold, (hold.grant, hold.ttl_left(moment)), late

    def _note(
        self, hold: Renewable, outcome: Grant | FencelockError, late: float, now: float
    ) -> Iterable[Callable[[], object]]:
        """Note the outcome of an extension; return the callbacks to call if it is a loss."""
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
    """Return the result of a generator, or its error as each outcome, because renewal must go on."""
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
    """Note that a hold's time has run out; return the callbacks to call."""
    if _is_final(hold):
        return hold.mark_lost("it was held for as long as max_hold allows", "max_hold")
    detail = f"it could not be extended in time: {hold.last_error or 'this process was held up'}"
    _tell(hold, LockLostError(detail), max(0.0, now - hold.renew_at))
    return hold.mark_lost(detail, "expired")


def _tell(hold: Renewable, outcome: Grant | FencelockError, late: float) -> None:
    if _events.listeners:
        names = hold.authority, hold.grant.resources, hold.template
        if isinstance(outcome, Grant):
            _events.tell(LeaseExtended(*names, "extended", late, hold.ttl, None))
        else:
            word: Literal["lost", "error"] = "lost" if isinstance(outcome, LockLostError) else "error"
            _events.tell(LeaseExtended(*names, word, late, hold.ttl, outcome))


def release_again(hold: Renewable) -> Iterator[Steps[Any]]:
    """Yield the steps that give a hold back once more, because an extension may have made its locks again."""
    hold.extended_after_release = True  # if the release is still under way, it releases once more itself
    if hold.release_finished:
        yield hold.give_back(hold.grant)


def tell(calls: Iterable[Callable[[], object]]) -> None:
    """Call the callbacks of lost leases; log those that fail."""
    for call in calls:
        try:
            call()
        except Exception:
            logger.exception("an on_lost callback failed")
