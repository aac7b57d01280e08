"""How etcd and ZooKeeper grant leases: by a line for each resource, first come, first served."""

from __future__ import annotations

import abc
import functools
import math
import re
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from operator import attrgetter
from typing import Any, Final, TypeVar

from fencelock._backoff import pauses
from fencelock._checks import check_older_than
from fencelock._generators import Steps
from fencelock.authority.base import AFTER, Grant, Wish, held_by_another, too_slow
from fencelock.authority.line.due import Due, DueReleases
from fencelock.authority.line.entries import SHIFT, Exchange, Head, Mark, Place, View, lost
from fencelock.authority.loops import Abandon, AsyncWithLoops, Wait, WithLoops
from fencelock.errors import (
    AuthorityError,
    CountersExhaustedError,
    FencelockError,
    LockLostError,
    QuorumError,
)
from fencelock.holder import LockInfo
from fencelock.lease import validity
from fencelock.tokens import FORGED, JUMP, MAX_TOKEN, check_above

# The store has a line for each resource, with an entry for each acquisition that waits or holds, and a mark:
# the last token. An acquisition enters the lines of all its resources in one transaction, so the order is the
# same everywhere, and no two can wait for each other. An acquisition holds when it has minted and is the
# first in all its lines. Its token is `max((mark >> 10) + 1, base + now) << 10`, where `now` is the Unix time
# of the client in milliseconds.
#
# The transaction that mints adds its entry to the line, or requires that it is there. It also requires that
# the base is the one that the client knows, and that the mark is lower. So the tokens of a resource rise
# whatever clocks say. The position in the line cannot be the token, because a holder may mint again.
#
# A store that is restored from a snapshot loses marks, and nothing in its answers shows it. The time makes
# new tokens larger than the lost ones, if clocks differ by less than the restore took. `base` is 0 until
# `init(above=…)` raises it. `proof/line` is the model.


_T = TypeVar("_T")

ANSWER: Final = (2.0, 0.5)  # the longest and the shortest time limit of an answer, in seconds
#: Seconds for which an acquisition keeps trying while servers elect a leader, within its timeout.
_ELECTION: Final = 5.0
_MOST_BASE: Final = FORGED >> SHIFT  # the least base that is refused, in milliseconds
_GLANCE: Final = 0.5  # seconds after which an acquisition without a wakeup checks its lines again
_AT_ONCE: Final = 200  # the most requests of one exchange, and the most leases of one extension
_NONCE: Final = re.compile("[0-9a-f]{16}|[0-9a-f]{32}")


class LineAuthority(WithLoops):
    """An authority that grants by lines of entries."""

    _comes_late = True  # whether a request may be executed after another one that was sent later
    _patience: float = _ELECTION  # seconds for which an acquisition goes on without an answer
    _most: int  # the most resources of one lock
    _shown: str

    # A subclass for a store implements the following.

    @abc.abstractmethod
    def _enter(self, place: Place, *, alone: bool, until: float) -> Steps[tuple[int, ...] | View]:
        """Enter the lines; if `alone`, only empty ones. Return tokens if the place holds, else a `View`."""

    @abc.abstractmethod
    def _take(self, place: Place, *, extend: bool, until: float) -> Steps[tuple[int, ...] | View]:
        """Return new tokens if the place is first in all lines, else a `View`; may `extend` its lease."""

    @abc.abstractmethod
    def _giving_back(
        self, resources: tuple[str, ...], nonce: str, ends: float = math.inf
    ) -> Steps[bool | None]:
        """Release, as `release_gen` does; wait only briefly if the lease has ended already."""

    @abc.abstractmethod
    def _watch(self, place: Place, ahead: str) -> Steps[Any]:
        """Return a wakeup that is `over` when the entry `ahead` is gone; None if no wakeup can be had."""

    @abc.abstractmethod
    def _lasting(self, wishes: Sequence[Wish], until: float) -> Steps[list[float | AuthorityError]]:
        """Extend leases; return for how many seconds each lasts, 0 if it has ended; or an error."""

    @abc.abstractmethod
    def _keeping(self, grant: Grant, until: float) -> Steps[bool]:
        """Move the end of leases; return False if they have ended."""

    @abc.abstractmethod
    def _ends_late(self, ttl: float) -> bool:
        """Return whether the store ends a lease of this ttl later than the ttl says."""

    @abc.abstractmethod
    def _heads(self, resources: tuple[str, ...]) -> Steps[list[Head]]:
        """Return the first entry of each line; of all lines, if no resource is named."""

    @abc.abstractmethod
    def _evict(self, head: Head) -> Steps[None]:
        """Remove the holder from the line of `head`."""

    @abc.abstractmethod
    def _raise_base(self, least: int) -> Steps[None]:
        """Raise the base to `least` milliseconds, if it is lower."""

    @abc.abstractmethod
    def pruning(self, older_than: float) -> Steps[int]:
        """Delete old marks of resources without a holder and without waiters; return how many."""

    # All stores share the following.

    def __init__(self) -> None:
        self._begin()

    def _start_over(self) -> None:
        super()._start_over()
        #: Releases that a thread has to send, by nonce.
        self._due = DueReleases(lambda nonce, due: self.run(self._ending(due.resources, nonce)))

    def asking(
        self, requests: Sequence[Any], until: float, again: list[str] | None = None
    ) -> Steps[list[Any]]:
        """Return the answers to requests, which may be sent again; `again` collects the reasons for that."""
        failures: dict[str, str] = {}
        waits = pauses(0.01, 0.2)
        while True:
            seconds = self._answer_within(until)
            where = self._asked
            try:
                answers: list[Any] = yield Exchange(requests, seconds)
                reason = next(filter(None, map(self._why_again, answers)), "")
            except OSError as error:
                reason = str(error) or type(error).__name__
            else:
                if not reason:
                    return answers
            failures[where] = reason
            if again is not None:
                again.append(reason)
            if time.monotonic() >= until:
                raise self._silent(failures)
            yield Wait(time.monotonic() + next(waits))

    def _answer_within(self, until: float) -> float:
        """Return for how many seconds to wait for an answer, so that another server can be asked after it."""
        return min(ANSWER[0], max(ANSWER[1], (until - time.monotonic()) / 2))

    def _answer_by(self, end: float) -> float:
        """Return until when the servers have to answer an acquisition whose timeout is over at `end`."""
        now = time.monotonic()
        return max(now + ANSWER[0], min(end, now + self._patience))

    def within(self, deadline: float, steps: Steps[_T]) -> Steps[_T]:
        """Run a generator, but let no answer arrive after the deadline: QuorumError is raised then."""
        answer: Any = None
        error: BaseException | None = None
        reason = "no answer came in time"
        while True:
            try:
                step = steps.send(answer) if error is None else steps.throw(error)
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]
            answer, error = None, None
            if isinstance(step, Exchange):
                if (left := deadline - time.monotonic()) <= 0:
                    error = self._silent({self._asked: reason})
                    continue
                step = step._replace(seconds=min(step.seconds, left))
            elif isinstance(step, Wait):
                step = step._replace(until=min(step.until, deadline))
            try:
                answer = yield step
            except GeneratorExit:
                steps.close()
                raise
            except BaseException as caught:  # noqa: BLE001 - the generator handles it
                error, reason = caught, str(caught) or type(caught).__name__

    def all_of(self, requests: Iterable[Any]) -> Steps[list[Any]]:
        """Return the answers to any number of requests, which are sent in parts."""
        left, answers = list(requests), []
        while left:
            part, left = left[:_AT_ONCE], left[_AT_ONCE:]
            answers += yield from self.asking(part, time.monotonic() + ANSWER[0])
        return answers

    def _silent(self, failures: Mapping[str, str]) -> QuorumError:
        said = "; ".join(f"{where}: {reason}" for where, reason in failures.items())
        return QuorumError(f"{self._shown} did not answer: {said}", nodes=failures)

    def _check_time(self, error: OSError, until: float) -> None:
        if time.monotonic() >= until:
            raise self._silent({self._asked: str(error) or type(error).__name__}) from error

    @property
    def _asked(self) -> str:
        """The address of the server that is asked now, for errors."""
        return self._shown

    def _why_again(self, answer: Any) -> str:  # noqa: ARG002 - etcd's subclass needs it
        """Return why a request has to be sent again; an empty text if it was answered."""
        return ""

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._shown}>"

    def init(self, *, above: int | None = None) -> None:
        """Check that the servers answer, and make all new tokens larger than `above`, if it is given.

        Raises:
            AuthorityError: the servers cannot be used.
            ValueError: `above` is neither 0 nor a token.
        """
        self.run(self.initialising(above))

    def prune(self, older_than: float) -> int:
        """Delete the old marks of free resources.

        Args:
            older_than: seconds since the last lock; an hour at least.

        Returns:
            The number of deleted marks.

        Raises:
            AuthorityError: the servers cannot be used.
            ValueError: for less than an hour, and for infinity.
        """
        return self.run(self.pruning(check_older_than(older_than)))

    def initialising(self, above: int | None) -> Steps[None]:
        ahead = ((check_above(above) if above else 0) >> SHIFT) - int(time.time() * 1000)
        yield from self._raise_base(ahead + JUMP if ahead >= 0 else 0)

    def acquire_gen(
        self,
        resources: tuple[str, ...],
        *,
        ttl: float,
        timeout: float | None,
        fair: bool = False,  # noqa: ARG002 - a line is always fair
        go_on: Callable[[], None] = lambda: None,
        at_least: float = 0.0,  # noqa: ARG002 - `keep_gen` needs nothing in advance
    ) -> Steps[Grant]:
        if len(resources) > self._most:
            raise ValueError(
                f"one lock of {self!r} has at most {self._most} names, and this one has {len(resources)}: "
                "lock what they have in common, or take several locks, always in the same order"
            )
        place = Place(resources, self._new_nonce(), float(ttl), began=time.monotonic())
        end = math.inf if timeout is None else place.began + timeout
        deadline = end + AFTER
        try:
            return (yield from self.within(deadline, self._acquiring(place, end, go_on)))
        except GeneratorExit:
            raise
        except QuorumError as error:
            self._owe(place, in_doubt=True)
            if place.waits and time.monotonic() >= end:
                timeout_error = held_by_another(resources, None)
                timeout_error._seen = ()  # noqa: SLF001 - there is no time left for a look
                raise timeout_error from error
            raise
        except FencelockError:
            with suppress(AuthorityError):
                yield from self._abandoning(place, deadline)
            raise
        except BaseException:
            yield Abandon(functools.partial(self._abandoning, place))
            raise

    def _new_nonce(self) -> str:
        return f"{secrets.randbits(63) or 1:016x}"

    def _acquiring(self, place: Place, end: float, go_on: Callable[[], None]) -> Steps[Grant]:
        alone = end <= place.began
        found: tuple[int, ...] | View
        found = yield from self._enter(place, alone=alone, until=self._answer_by(end))
        while isinstance(found, View):
            if not found.is_there and (place.waits or not found.ahead):
                if place.waits:  # the lease of the place has ended meanwhile, or an entry was deleted
                    old, place.nonce = place.nonce, self._new_nonce()
                    place.revision, place.granted = 0, 0.0
                    yield from self._giving_back(place.resources, old)
                found = yield from self._enter(
                    place, alone=alone and not place.waits, until=self._answer_by(end)
                )
                continue
            if found.ahead or found.kept_for > 0:
                if alone or time.monotonic() >= end:
                    yield from self._refusing(place)
                place.waits = True
                yield from self._waiting(place, found, end, go_on)
            found = yield from self._take(place, extend=place.waits, until=self._answer_by(end))
        if time.monotonic() >= place.expires_at:
            raise too_slow(self._shown, place.ttl, place.resources)
        grant = Grant(place.resources, found, place.expires_at, place.nonce)
        self._note_end(grant, place.ttl)
        return grant

    def _waiting(self, place: Place, view: View, end: float, go_on: Callable[[], None]) -> Steps[None]:
        """Wait until an entry ahead is gone, or until it is time to check the lines again."""
        until = min(end, place.extend_at)
        if not view.ahead:
            until = min(until, time.monotonic() + view.kept_for)
        wakeup = (yield from self._watch(place, view.ahead[0])) if view.ahead else None
        if view.ahead and wakeup is None:
            until = min(until, time.monotonic() + _GLANCE)
        try:
            while time.monotonic() < until and not (wakeup is not None and wakeup.over):
                yield Wait(until, wakeup)
                go_on()
        finally:
            if wakeup is not None:
                wakeup.close()

    def _refusing(self, place: Place) -> Steps[None]:
        others: list[LockInfo] = []
        with suppress(QuorumError):  # there is no time left for a look
            heads = yield from self._heads(place.resources)
            others = [head.info() for head in heads if head.nonce != place.nonce]
        held = [info.resource for info in others] or place.resources
        error = held_by_another(held, max((info.remaining for info in others), default=None))
        error._seen = others  # noqa: SLF001 - so that nothing is read again
        raise error

    def remint_gen(self, grant: Grant, ttl: float) -> Steps[Grant]:
        place = Place(grant.resources, grant.proof, ttl, holds=True)
        found: tuple[int, ...] | View = View(is_there=True, ahead=())
        is_watched = grant.proof in self._due
        while isinstance(found, View):
            if not found.is_there:
                raise lost(grant)
            found = yield from self._take(place, extend=True, until=time.monotonic() + ANSWER[0])
        minted = replace(grant, tokens=found, expires_at=max(grant.expires_at, place.expires_at))
        if isinstance(outcome := self._extended(grant, minted, ttl, is_watched=is_watched), LockLostError):
            raise outcome
        return outcome

    def extend_gen(self, wishes: Sequence[Wish]) -> Steps[list[Grant | FencelockError]]:
        outcomes: list[Grant | FencelockError] = []
        for start in range(0, len(wishes), _AT_ONCE):
            outcomes += yield from self._extending(wishes[start : start + _AT_ONCE])
        return outcomes

    def _extending(self, wishes: Sequence[Wish]) -> Steps[list[Grant | FencelockError]]:
        began = time.monotonic()
        ends = min(grant.expires_at for grant, _ in wishes)  # 0 for a lease that was handed over
        watched = self._due.keys() & {grant.proof for grant, _ in wishes}
        try:
            lasts = yield from self._lasting(wishes, ends if ends > began else began + ANSWER[0])
        except AuthorityError as error:
            return [error] * len(wishes)
        outcomes: list[Grant | FencelockError] = []
        for (grant, ttl), seconds in zip(wishes, lasts, strict=True):
            if isinstance(seconds, AuthorityError):
                outcomes.append(seconds)
                continue
            longer = replace(grant, expires_at=max(grant.expires_at, validity(began, min(ttl, seconds))))
            is_watched = grant.proof in watched
            outcomes.append(
                self._extended(grant, longer, ttl, is_watched=is_watched) if seconds > 0 else lost(grant)
            )
        return outcomes

    def keep_gen(self, grant: Grant, until: float) -> Steps[bool | None]:
        keep = functools.partial(self._keeping, grant, until)
        try:
            return (yield from keep())
        except (FencelockError, GeneratorExit):
            raise
        except BaseException:  # a signal handler's error, or a cancellation: send it once more
            yield Abandon(keep)
            raise

    def release_gen(self, grant: Grant) -> Steps[bool | None]:
        place = Place(grant.resources, grant.proof, 0.0, began=grant.expires_at)
        try:
            return (yield from self._giving_back(grant.resources, grant.proof, grant.expires_at))
        except QuorumError as error:
            self._owe(place, in_doubt=False)
            raise QuorumError(
                f"{error}; it is released when the servers answer", nodes=error.nodes
            ) from error
        except (AuthorityError, GeneratorExit):
            raise
        except BaseException:
            yield Abandon(functools.partial(self._abandoning, place))
            raise

    def _abandoning(self, place: Place, deadline: float = math.inf) -> Steps[None]:
        """Release what an operation may have left; in the background, if no server answers in time."""
        try:
            yield from self.within(deadline, self._giving_back(place.resources, place.nonce))
        except QuorumError:
            self._owe(place, in_doubt=True)

    def _owe(self, place: Place, *, in_doubt: bool) -> None:
        """Release in the background, while the caller goes on."""
        until = max(time.monotonic(), place.began) + max(place.ttl, place.granted) + ANSWER[0]
        in_doubt = in_doubt and self._comes_late
        self._due.plan(place.nonce, Due(place.resources, time.monotonic(), self._gone_at(until), in_doubt))

    def _gone_at(self, until: float) -> float:
        """Return when the store has deleted the entries of a lease that ends at `until`."""
        return until

    def _note_end(self, grant: Grant, ttl: float) -> None:
        """Plan the release of a lease at its end, if the store ends it later or one is planned already."""
        if self._ends_late(ttl) or grant.proof in self._due:
            self._end_at(grant, grant.expires_at)

    def _end_at(self, grant: Grant, end: float) -> None:
        """Plan the release of a lease at its end; a later plan for the lease replaces this one."""
        until = self._gone_at(end + ANSWER[0])
        self._due.plan(grant.proof, Due(grant.resources, end, until, in_doubt=False))

    def _extended(
        self, grant: Grant, longer: Grant, ttl: float, *, is_watched: bool
    ) -> Grant | LockLostError:
        """Note the new end of a lease; return the grant, or LockLostError if `_due` may have released it.

        `is_watched` says whether the thread of `_due` knew the lease when its extension began.
        """
        self._note_end(longer, ttl)  # before the clock is read, because from now on `_due` has the new end
        if is_watched and time.monotonic() >= grant.expires_at:
            self._end_at(grant, grant.expires_at)
            return lost(grant)
        return longer

    def _ending(self, resources: tuple[str, ...], nonce: str) -> Steps[object]:
        return self._giving_back(resources, nonce)

    def _leave(self, nonce: str) -> None:
        """Leave a lease to another process, which may extend it."""
        self._due.pop(nonce, None)

    def inspect_gen(self, resources: tuple[str, ...]) -> Steps[list[LockInfo]]:
        return sorted(
            (head.info() for head in (yield from self._heads(resources))), key=attrgetter("resource")
        )

    def force_gen(self, resource: str, token: int | None) -> Steps[LockInfo | None]:
        (head,) = (yield from self._heads((resource,))) or (None,)
        if head is None or (token is not None and head.info().token != token):
            return None
        yield from self._evict(head)
        return head.info()

    def dump(self, grant: Grant) -> dict[str, Any]:
        self._leave(grant.proof)
        root = self._shown.partition("://")[2].partition("/")[2]
        return {type(self).__name__.lower(): root, "nonce": grant.proof}

    def load(self, resources: tuple[str, ...], tokens: tuple[int, ...], data: dict[str, Any]) -> Grant:
        if not _NONCE.fullmatch(data["nonce"]):
            raise ValueError(f"its nonce has another form than those of {type(self).__name__}")
        return Grant(resources, tokens, 0.0, data["nonce"])

    def _minted(self, mark: Mark, base: int) -> int:
        if base >= _MOST_BASE:
            raise AuthorityError(
                f"{self._shown} has the base {base} ms, which no use explains, and which would close rows for"
                " good: see what programs can write there, and lower it while none runs"
            )
        token = max((mark.token >> SHIFT) + 1, base + int(time.time() * 1000)) << SHIFT
        if token > MAX_TOKEN:
            raise CountersExhaustedError(
                f"{self._shown} can count no further: its mark is {mark.token}, and its base {base} ms"
            )
        return token

    def read_mark(self, text: bytes, key: object) -> Mark:
        if (mark := Mark.read(text)) is None:
            raise AuthorityError(f"{self._shown} has {text[:40]!r} at {key}, which is no mark of fencelock")
        return mark


class AsyncLine(AsyncWithLoops):
    """A `LineAuthority` for asyncio code."""

    _authority: LineAuthority

    async def init(self, *, above: int | None = None) -> None:
        """Check that the servers answer: see `LineAuthority.init`."""
        await self.run(self._authority.initialising(above))

    async def prune(self, older_than: float) -> int:
        """Delete old marks: see `LineAuthority.prune`."""
        return await self.run(self._authority.pruning(check_older_than(older_than)))
