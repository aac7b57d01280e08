"""What a lock does: acquire, hold, extend, remint and give back, each as steps that take time."""

from __future__ import annotations

import json
import logging
import math
import re
import sys
import time
from collections.abc import Callable
from types import EllipsisType, FrameType
from typing import Any, Final, Generic, TypeVar, cast
from weakref import ref

from fencelock import _events
from fencelock._checks import check_choice, check_max_hold, check_timeout, check_ttl
from fencelock._events import LockNotAcquired, Outcome
from fencelock._owners import running_loop
from fencelock.authority.base import Authority, Grant, named
from fencelock.errors import LockError, LockLostError, LockTimeoutError, NotHeldError
from fencelock.lease import OBJECT_IN_NAME, Lease, check_resource
from fencelock.lock.block import Block, last_of_ours
from fencelock.lock.hold import Hold, find, remove
from fencelock.lock.options import DEFAULT_TTL, IfLost
from fencelock.lock.releasing import Loss, end_releases, go_on_holding, leave, stop_renewal
from fencelock.lock.steps import (
    Acquisition,
    Step,
    Steps,
    ask_to_extend,
    ask_to_release,
    ask_to_remint,
    ask_to_vouch,
    name_holder,
)
from fencelock.renewal.loop import for_loop
from fencelock.renewal.schedule import Renewer, tell

logger = logging.getLogger("fencelock.lock")

Token = TypeVar("Token", int, tuple[int, ...])

_ITSELF = (
    "this very thread, task or greenlet holds it, and reentrant=False forbids to enter it again. Leave the "
    "outer block first, or write reentrant=True"
)

#: Braces that an f-string would have filled.
_UNFILLED = re.compile(r"\{[A-Za-z_][\w.]*\}")

#: Nodes take so many names, of any length, in one command.
_MOST_NAMES: Final = 5000

#: What the text of a lease that is handed over says of itself: its version, too.
HANDED: Final = "fencelock lease 1"

#: `for_thread`, or `for_loop`.
Renewers = Callable[[Authority], Renewer]


class LockSteps(Generic[Token]):
    """What a lock is and does, as steps that yield what takes time; the faces block or await."""

    def __init__(
        self,
        resources: tuple[str, ...],
        find_authority: Callable[[], Authority],
        *,
        ttl: float = DEFAULT_TTL,
        timeout: float | None = 10.0,
        renew: bool = True,
        max_hold: float | None = 3600.0,
        fair: bool = False,
        reentrant: bool = True,
        if_lost: IfLost = "raise",
    ) -> None:
        self._resources = _check_resources(resources)
        self._find_authority = find_authority
        self._ttl = check_ttl(ttl)
        self._timeout = check_timeout(timeout)
        self._renew = bool(renew)
        most = check_max_hold(max_hold, self._ttl) if self._renew else None
        self._max_hold = math.inf if most is None else most
        self._fair = bool(fair)
        self._reentrant = bool(reentrant)
        #: A grant that the next entering takes over.
        self._handed: Grant | None = None
        self._if_lost = check_choice("if_lost", if_lost, ("raise", "warn"))
        self._entered: list[Block] = []
        #: Entered by `with` and not left yet. Its body may have released it, so that it is no block any more.
        self._with_blocks: list[Block] = []
        self._listeners: tuple[Callable[[Lease], object], ...] = ()
        #: What `@fenced` was given; for listeners to events.
        self.template = ""

    def _acquire(
        self, block: Block, timeout: float | EllipsisType | None, renewers: Renewers
    ) -> Steps[Block]:
        waiting = self._timeout if timeout is ... else check_timeout(timeout)
        authority = self._find_authority()
        handed, self._handed = self._handed, None
        if not self._reentrant and any(find(authority, block.owner, name) for name in self._resources):
            raise LockTimeoutError(f"{self!r}: {_ITSELF}")
        holds = [] if handed else (yield from self._enter_again(block, authority))
        known = {name for hold in holds for name in hold.grant.resources}
        missing = tuple(name for name in dict.fromkeys(self._resources) if name not in known)
        if missing:
            asked = Acquisition(
                authority=authority,
                resources=missing,
                ttl=self._ttl,
                timeout=waiting,
                fair=self._fair,
                lock=self,
            )
            yield from self._enter_anew(block, asked, holds, handed, renewers)
        else:
            self._note_entered(block, holds)
        for hold in block.holds:
            hold.tell_when_lost(self._listeners)
        return block

    def _enter_anew(
        self,
        block: Block,
        asked: Acquisition,
        holds: list[Hold],
        handed: Grant | None,
        renewers: Renewers,
    ) -> Steps[None]:
        """Acquire the missing resources, and enter these and the rest."""
        began = time.monotonic()
        try:
            grant = yield from self._granted(block, asked, handed)
            for hold in holds:
                _check_still_held(hold)  # it may have ended while the others were waited for
            new = self._new_hold(block, asked.authority, grant, renewers)
            self._note_entered(block, [*holds, new])
        except BaseException as error:
            if type(error) is LockTimeoutError and not (block.is_try or asked.given_up):
                yield from name_holder(asked, error)
            if _events.listeners:
                outcome = "cancelled" if asked.given_up else _outcome_of(error)
                waited = time.monotonic() - began
                _events.tell(LockNotAcquired(*asked.names, waited, asked.had_to_wait, outcome, error))
            raise
        new.note_acquired(time.monotonic() - began, had_to_wait=asked.had_to_wait)
        if new.renewer is not None:
            # Not before: a hold that is interrupted until here is not extended while the traceback lives.
            new.renewer.watch(new)

    def _granted(self, block: Block, asked: Acquisition, handed: Grant | None) -> Steps[Grant]:
        if handed is not None:
            return (yield from _take_over(asked.authority, handed, self._ttl))
        block.asked = asked
        yield asked
        return asked.answer  # type: ignore[no-any-return]

    def _new_hold(self, block: Block, authority: Authority, grant: Grant, renewers: Renewers) -> Hold:
        hold = Hold(authority, grant, block.owner, self._ttl, time.monotonic() + self._max_hold)
        hold.template = self.template
        frame: FrameType | None = sys._getframe()  # noqa: SLF001 - as `inspect.currentframe` does
        while frame is not None and frame.f_globals.get("__name__", "").startswith("fencelock."):
            frame = frame.f_back
        hold.place = None if frame is None else (frame.f_code, frame.f_lineno)
        if renewers is for_loop and (loop := running_loop()) is not None:
            hold.loop = ref(loop)
        if self._renew:
            hold.renewer = renewers(authority)
        return hold

    def _note_entered(self, block: Block, holds: list[Hold]) -> None:
        block.enter(holds, self._resources)
        self._entered.append(block)

    def _enter_again(self, block: Block, authority: Authority) -> Steps[list[Hold]]:
        """Enter what the owner holds already; return that."""
        found = [hold for name in self._resources if (hold := find(authority, block.owner, name))]
        holds = [hold for hold in found if block.enter_again(hold)]
        if len(holds) < len(found):
            yield end_releases(block.owner)
        for hold in block.holds:
            if self._ttl not in {hold.ttl, DEFAULT_TTL}:
                sentence = "%s: entered again with ttl=%g, and the ttl=%g of the outer block counts"
                logger.warning(sentence, hold.name, self._ttl, hold.ttl)
        return holds

    def _take_back(self, block: Block) -> Steps[Loss | None]:
        """Leave a block whose entering or leaving was interrupted; return as `_leave` does."""
        for entries in (self._with_blocks, self._entered):
            if block in entries:
                entries.remove(block)
        try:
            if block.asked is not None and block.asked.answer is not None:  # it became no hold
                yield ask_to_release(block.asked.authority, block.asked.answer)
        finally:
            lost = (yield from self._leave(block)) if block.holds else None
        return lost

    def _extend(self, ttl: float | None) -> Steps[None]:
        seconds = self._ttl if ttl is None else check_ttl(ttl)
        for hold in self._innermost().holds:
            _check_still_held(hold)
            try:
                yield from stop_renewal(hold)
                asked = ask_to_extend(hold.authority, hold.grant, seconds)
                yield asked
                (outcome,) = asked.answer
                if isinstance(outcome, LockLostError):
                    tell(hold.lose(str(outcome)))
                if not isinstance(outcome, Grant):
                    raise outcome
                _check_still_held(hold)
                hold.prolong(outcome)
            finally:
                yield from go_on_holding(hold)

    def _remint(self) -> Steps[Any]:
        block = self._innermost()
        for hold in block.holds:
            _check_still_held(hold)
            asked: Step | None = None
            try:
                yield from stop_renewal(hold)
                now = time.monotonic()
                seconds = max(hold.most_seconds(now), hold.grant.expires_at - now)
                asked = ask_to_remint(hold.authority, hold.grant, seconds)
                yield asked
                _note_remint(hold, asked)
            except BaseException:
                # Once more, where a signal handler raised in the middle of it.
                _note_remint(hold, asked)
                raise
            finally:
                yield from go_on_holding(hold)
            _check_still_held(hold)
        return block.tokens

    def _locked(self) -> Steps[bool]:
        authority: Any = self._find_authority()
        names = tuple(dict.fromkeys(self._resources))
        asked = Step(lambda: authority.holder_ttl(names), lambda: authority.aio.holder_ttl(names))
        yield asked
        return asked.answer is not None

    def _hand_over(self) -> Steps[str]:
        block = self._innermost()
        hold, authority = block.holds[0], cast("Any", block.holds[0].authority)
        _check_still_held(hold)
        try:
            yield from stop_renewal(hold)
            _check_still_held(hold)
            if len(block.holds) > 1 or len(hold.blocks) > 1:
                raise LockError(f"{self!r} was entered more than once: leave the other blocks first")
            if any(lease.needed or lease.in_doubt for lease in hold.leases):
                raise LockError(f"{self!r}: a transaction under it is open or in doubt: end it first")
            its = {"resources": hold.grant.resources, "tokens": hold.grant.tokens, "ttl": hold.ttl}
            its |= {"proof": authority.dump(hold.grant), "by": repr(authority)}
            self._entered.remove(block)
            block.holds = ()
            remove(hold)
            hold.note_released()
        finally:
            yield from go_on_holding(hold)
        return json.dumps({HANDED: its})

    def _release(self) -> Steps[None]:
        self._complain((yield from self._leave(self._innermost(to_leave=True))), None)

    def _leave(self, block: Block) -> Steps[Loss | None]:
        """Leave one block; return what had been lost before, or None."""
        try:
            if block in self._entered:
                self._entered.remove(block)
            return (yield from leave(block))
        except (Exception, KeyboardInterrupt, SystemExit):
            # A signal handler's, at any line. (One that is cancelled has been sent.) Once more does no harm.
            yield from leave(block)
            raise

    def _innermost(self, *, to_leave: bool = False) -> Block:
        """Return what this thread, task or greenlet entered last; or else the last block of all."""
        if (block := last_of_ours(self._entered, to_leave=to_leave)) is None:
            raise NotHeldError(f"{self!r}: acquire it first")
        return block

    def _begin_block(self, block: Block) -> Token:
        self._with_blocks.append(block)
        return block.tokens  # type: ignore[no-any-return]

    def _block_to_leave(self) -> Block | None:
        """Return what this thread, task or greenlet leaves next."""
        # The second: it was acquired, and handed over to an ExitStack.
        return last_of_ours(self._with_blocks, to_leave=True) or last_of_ours(self._entered, to_leave=True)

    def _exit(self, block: Block | None) -> Steps[Loss | None]:
        """Leave a block, unless its body has released it; return as `_leave` does."""
        if block in self._with_blocks:
            self._with_blocks.remove(block)
        return (yield from self._leave(block)) if block in self._entered else None

    def _complain(self, lost: Loss | None, exc_value: BaseException | None) -> None:
        if lost is None:
            return
        if exc_value is not None:
            exc_value.add_note(str(lost.error))
        elif lost.is_committed or self._if_lost == "warn":
            logger.warning("%s", lost.error)
        else:
            raise lost.error


def _take_over(authority: Authority, grant: Grant, ttl: float) -> Steps[Grant]:
    known = ask_to_vouch(authority, grant)
    yield known
    if not known.answer:
        raise LockLostError(
            f"{named(grant.resources)} was not taken over: its lease has ended, or a token of the text is "
            "not that of its lock; acquire the lock again"
        )
    asked = ask_to_extend(authority, grant, ttl)
    yield asked
    (outcome,) = asked.answer
    if isinstance(outcome, LockLostError):
        yield ask_to_release(authority, grant)  # nodes may have made its locks again
    if not isinstance(outcome, Grant):
        raise outcome
    return outcome


def _outcome_of(error: BaseException) -> Outcome:
    if isinstance(error, LockTimeoutError):
        return "timeout"
    return "error" if isinstance(error, Exception) else "cancelled"


def _check_still_held(hold: Hold) -> None:
    """Refuse with a LockLostError to go on with a hold that has ended."""
    for lease in hold.leases:
        lease.check()
        if lease.lost or lease.released:
            raise LockLostError(f"the lease of {lease.resource!r} has ended; acquire the lock again")


def _note_remint(hold: Hold, asked: Step | None) -> None:
    """Note what has become of a hold for which a new token was asked for, if it was; again has no effect."""
    if asked is not None and asked.answer is not None and not hold.released:
        hold.remint(asked.answer)
    elif asked is not None:
        hold.grant = asked.answer or hold.grant
        # The old token may belong to no lease any more.
        tell(hold.lose("a new token was asked for, and none came"))


def _check_resources(resources: tuple[str, ...]) -> tuple[str, ...]:
    if not resources:
        raise ValueError("name what to lock, such as fenced_lock('order:1')")
    if len(resources) > _MOST_NAMES:
        raise ValueError(
            f"one lock has at most {_MOST_NAMES} names, and this one has {len(resources)}: lock what they "
            "have in common, or take several locks one after the other, always in the same order"
        )
    names = tuple(map(check_resource, resources))
    for name in names:
        if _UNFILLED.search(name) or OBJECT_IN_NAME.search(name):
            raise ValueError(
                f"{name!r} names no one thing to lock: fill its braces with a value, as "
                "fenced_lock(f'order:{order.id}') does"
            )
    return names
