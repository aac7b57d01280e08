"""The operations of a lock, as generators: acquire, extend, remint, hand over, release."""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import math
import re
import signal
import sys
import time
from collections.abc import Callable, Sequence
from types import EllipsisType, FrameType
from typing import TYPE_CHECKING, Any, Final, Generic, cast
from weakref import ref

from fencelock import _events
from fencelock._checks import check_at_least, check_max_hold, check_timeout, check_ttl
from fencelock._events import LockNotAcquired, Outcome
from fencelock._generators import Steps
from fencelock._owners import current_owner
from fencelock.authority.base import Authority, GivenUp, Grant, Terms, named
from fencelock.errors import LockError, LockLostError, LockTimeoutError, NotHeldError
from fencelock.lease import OBJECT_IN_NAME, Lease, check_resource, note_held, stands_here
from fencelock.lock.at_exit import arrange_end, handler_seen
from fencelock.lock.hold import (
    Block,
    Hold,
    acquisitions_have_ended,
    by_owner,
    ends,
    remove,
    under_way,
)
from fencelock.lock.options import DEFAULT_TTL, IfHeld, IfLost
from fencelock.lock.releasing import (
    LostLease,
    leave_gen,
    resume_renewal_gen,
    stop_renewal_gen,
    wait_for_releases,
)
from fencelock.lock.renewal import for_loop, for_thread, tell
from fencelock.lock.waiting import (
    acquire_beside_runner_gen,
    acquire_unless_held_gen,
    go_on_waiting,
    name_holder_gen,
    of_runner,
    with_reason,
)

# The owner of a hold is a thread, task or greenlet (see `_owners`). It can enter its hold again, with the
# same token, if its context has the lease. All other callers wait, even if the same thread serves them.

logger: logging.Logger = logging.getLogger("fencelock.lock")

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    Token = TypeVar("Token", bound="int | tuple[int, ...]", default=int)
else:  # before Python 3.13, only checkers know of defaults
    from typing import TypeVar

    Token = TypeVar("Token")

_ITSELF: Final = (
    "this same thread, task or greenlet holds it, and with reentrant=False it cannot be entered again. "
    "Leave the outer block first; a fenced_lock may allow it by reentrant=True"
)

_NOT_SKIPPED: Final = (
    "if_held='skip' does not wait, and the body of a `with` cannot be skipped: write "
    "`if lock.try_acquire():`, or give the work to a function below @fenced(…, if_held='skip')"
)

_UNFILLED = re.compile(r"\{[A-Za-z_][\w.]*\}")  # matches braces that were meant for an f-string

_MOST_NAMES: Final = 5000  # the most names of one lock: nodes accept this many, of any length, in one command

#: The key of the text that `hand_over` returns; it includes the version of the format.
HANDED: Final = "fencelock lease 1"


class BaseLock(Generic[Token]):
    """The state and the operations of a lock; `FencedLock` and `AsyncLock` run the generators."""

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
        if_held: IfHeld = "wait",
        at_least: float | None = None,
    ) -> None:
        if not {renew, fair, reentrant} <= {True, False}:  # a text, for example
            flags = f"renew={renew!r}, fair={fair!r}, reentrant={reentrant!r}"
            raise TypeError(f"renew, fair and reentrant are True or False each: {flags}")
        self._names = self._resources = _check_resources(resources)
        self._find_authority = find_authority
        self._ttl = check_ttl(ttl)
        self._timeout = check_timeout(timeout)
        if if_held not in {"wait", "skip"}:
            raise ValueError(f"if_held is 'wait' or 'skip', not {if_held!r}")
        self._skips = if_held == "skip"
        if self._skips:
            self._timeout = 0.0
        self._at_least = 0.0 if at_least is None else check_at_least(at_least)
        self._renew = bool(renew)
        most = check_max_hold(max_hold, self._ttl) if self._renew else None
        self._max_hold = math.inf if most is None else most
        self._fair = bool(fair)
        self._reentrant = bool(reentrant)
        #: A grant that was handed over, from `take_over`; the next acquisition extends it.
        self._handed: Grant | None = None
        if if_lost not in {"raise", "warn"}:
            raise ValueError(f"if_lost is 'raise' or 'warn', not {if_lost!r}")
        self._if_lost = if_lost
        self._entered: list[Block] = []
        #: Blocks that `with` has entered and not left. If the body released one, `_entered` lacks it.
        self._with_blocks: list[Block] = []
        self._listeners: tuple[Callable[[Lease], object], ...] = ()
        self.template = ""  # the template of `@fenced`, for listeners

    def _new_block(
        self, timeout: float | EllipsisType | None = ..., *, is_with: bool = False, is_try: bool = False
    ) -> Block:
        seconds = self._timeout if timeout is ... else check_timeout(timeout)
        return Block(self._find_authority(), seconds, is_with, is_try, self._names)

    def _acquire_gen(self, block: Block) -> Steps[Any]:
        """Enter the lock; return the tokens for `with`, and else the first lease."""
        held = [hold for name in self._resources if (hold := _find(block, name))]
        missing = tuple(dict.fromkeys(self._resources)) if len(self._resources) > 1 else self._resources
        if held:
            missing = yield from self._enter_again_gen(block, held, missing)
        began, new = time.monotonic(), None
        if missing:
            try:
                under_way[block] = self
                block.grant = yield from self._grant_gen(block, missing)
                for hold in block.holds:
                    _check_still_held(hold)  # it may have ended during the wait for the other resources
                new = self._new_hold(block, block.grant)
                enter(block, (*block.holds, new))
            except BaseException as caught:
                under_way.pop(block, None)
                yield from self._explain_gen(caught, block, missing, began)
                raise
            under_way.pop(block, None)
        else:
            enter(block, block.holds)
        self._entered.append(block)
        if block.is_with:
            self._with_blocks.append(block)
        if new is not None:
            if _events.listeners:
                new.note_acquired(time.monotonic() - began, has_waited=block.had_to_wait)
            if new.renewer is not None:
                # Last, because the traceback of an earlier interruption would keep a renewed hold alive.
                new.renewer.add(new)
        if self._at_least or self._listeners:
            self._note_wishes(block)
        return block.tokens if block.is_with else block.leases[0]

    def _note_wishes(self, block: Block) -> None:
        for hold in block.holds:
            hold.keep_at_least(self._at_least)
            hold.tell_when_lost(self._listeners)

    def _grant_gen(self, block: Block, missing: tuple[str, ...]) -> Steps[Grant]:
        """Return the generator that acquires a lease, or that takes over one that was handed over."""
        if signal.getsignal(signal.SIGTERM) is not handler_seen[0]:
            arrange_end()
        if ends and acquisitions_have_ended():
            raise LockError(f"{named(missing)} is not acquired any more: the process ends")
        handed, self._handed = self._handed, None
        if handed is not None:
            return _take_over_gen(block.authority, handed, self._ttl)
        go_on = functools.partial(go_on_waiting, block, missing, self.template)
        terms: Terms = {"ttl": self._ttl, "timeout": block.timeout, "fair": self._fair, "go_on": go_on}
        if self._at_least:
            terms["at_least"] = self._at_least
        if self._skips and block.timeout == 0:
            acquire = functools.partial(block.authority.acquire_gen, missing, **terms)
            return acquire_unless_held_gen(block.authority, missing, acquire)
        acquiring = block.authority.acquire_gen(missing, **terms)
        return acquire_beside_runner_gen(block.authority, acquiring) if of_runner[0] in missing else acquiring

    def _new_hold(self, block: Block, grant: Grant) -> Hold:
        authority = block.authority
        hold = Hold(authority, grant, block.owner, self._ttl, time.monotonic() + self._max_hold)
        hold.template = self.template
        frame: FrameType | None = sys._getframe()  # noqa: SLF001 - as `inspect.currentframe` does
        while frame is not None and frame.f_globals.get("__name__", "").startswith("fencelock."):
            frame = frame.f_back
        hold.place = None if frame is None else (frame.f_code, frame.f_lineno)
        if block.in_loop:
            hold.loop = ref(asyncio.get_running_loop())
        if self._renew:
            hold.renewer = for_loop(authority) if block.in_loop else for_thread(authority)
        return hold

    def _enter_again_gen(
        self, block: Block, held: Sequence[Hold], names: tuple[str, ...]
    ) -> Steps[tuple[str, ...]]:
        """Enter the owner's holds, unless a lease is taken over; return the names still to be acquired."""
        if not self._reentrant:
            raise LockTimeoutError(f"{self!r}: {_ITSELF}")
        if self._handed is not None:
            return names
        if False in [_enter_again(block, hold) for hold in held]:
            yield wait_for_releases(block.owner)
        for hold in block.holds:
            if self._ttl not in {hold.ttl, DEFAULT_TTL}:
                sentence = "%s: entered again with ttl=%g, and the ttl=%g of the outer block counts"
                logger.warning(sentence, hold.name, self._ttl, hold.ttl)
        known = {name for hold in block.holds for name in hold.grant.resources}
        return tuple(name for name in names if name not in known)

    def _explain_gen(
        self, caught: BaseException, block: Block, missing: tuple[str, ...], began: float
    ) -> Steps[None]:
        """Tell listeners of a failed acquisition; name the holder in its error, or raise a clearer error."""
        error = caught
        if isinstance(error, GivenUp):
            acquisitions_have_ended()
            error = LockTimeoutError(f"{named(missing)}: the acquisition was cancelled")
        elif isinstance(error, LockTimeoutError) and block.timeout != 0:
            error = with_reason(error, block.authority, missing)
        if type(error) is LockTimeoutError and not (block.is_try or block.given_up):
            yield from name_holder_gen(block.authority, missing, error)
            if self._skips and block.is_with:
                error.args = (f"{error}. {_NOT_SKIPPED}",)
        if _events.listeners:
            outcome: Outcome = "cancelled"
            if not block.given_up and isinstance(error, Exception):
                outcome = "timeout" if isinstance(error, LockTimeoutError) else "error"
            facts = time.monotonic() - began, block.had_to_wait, outcome, error
            _events.tell(LockNotAcquired(block.authority, missing, self.template, *facts))
        if error is not caught:
            raise error from None

    def _extend_gen(self, block: Block, ttl: float | None) -> Steps[None]:
        seconds = self._ttl if ttl is None else check_ttl(ttl)
        for hold in block.holds:
            _check_still_held(hold)
            try:
                yield from stop_renewal_gen(hold)
                (outcome,) = yield from hold.authority.extend_gen([(hold.grant, seconds)])
                if isinstance(outcome, LockLostError):
                    tell(hold.mark_lost(str(outcome)))
                if not isinstance(outcome, Grant):
                    raise outcome
                _check_still_held(hold)
                hold.note_extension(outcome)
            finally:
                yield from resume_renewal_gen(hold)

    def _remint_gen(self, block: Block) -> Steps[Any]:
        for hold in block.holds:
            _check_still_held(hold)
            began, grant = False, None
            try:
                yield from stop_renewal_gen(hold)
                now = time.monotonic()
                ttl = max(hold.ttl_left(now), hold.grant.expires_at - now)
                began = True
                grant = yield from hold.authority.remint_gen(hold.grant, ttl)
                _note_remint(hold, grant)
            except BaseException:
                if began:
                    _note_remint(hold, grant)  # again, because a signal handler may have interrupted it
                raise
            finally:
                yield from resume_renewal_gen(hold)
            _check_still_held(hold)
        return block.tokens

    def _locked_gen(self, authority: Authority) -> Steps[bool]:
        return bool((yield from authority.inspect_gen(tuple(dict.fromkeys(self._resources)))))

    def _hand_over_gen(self, block: Block) -> Steps[str]:
        hold, authority = block.holds[0], cast("Any", block.authority)
        _check_still_held(hold)
        try:
            yield from stop_renewal_gen(hold)
            _check_still_held(hold)
            if len(block.holds) > 1 or len(hold.blocks) > 1:
                raise LockError(f"{self!r} was entered more than once: leave the other blocks first")
            if any(lease._needed or lease.in_doubt for lease in hold.leases):
                raise LockError(f"{self!r}: a transaction under it is open or in doubt: end it first")
            its = {"resources": hold.grant.resources, "tokens": hold.grant.tokens, "ttl": hold.ttl}
            its |= {"proof": authority.dump(hold.grant), "by": repr(authority)}
            its["at_least"] = max(0.0, hold.keep_until - time.monotonic())
            self._entered.remove(block)
            block.holds = ()
            remove(hold)
            hold.note_released()
        finally:
            yield from resume_renewal_gen(hold)
        return json.dumps({HANDED: its})

    def _leave_gen(self, block: Block, *, is_release: bool = False) -> Steps[LostLease | None]:
        """Leave a block, also one whose acquisition has failed; return a lost lease or None.

        A block that was left has no holds, so leaving it again does no harm. `with` leaves its block again
        after a release by its body.
        """
        try:
            under_way.pop(block, None)
            if not is_release and block in self._with_blocks:
                self._with_blocks.remove(block)
            if block in self._entered:
                self._entered.remove(block)
            return (yield from leave_gen(block))
        except (Exception, KeyboardInterrupt, SystemExit):
            # A signal handler may raise at any line. After a cancellation this is not needed, because the
            # release was sent.
            yield from leave_gen(block)
            raise

    def _innermost(self, *, to_leave: bool = False) -> Block:
        """Return the block that `_last_of_ours` chooses; raise NotHeldError if the lock is not held."""
        if (block := _last_of_ours(self._entered, to_leave=to_leave)) is None:
            raise NotHeldError(f"{self!r} is not held: acquire it first")
        return block

    def _block_to_leave(self) -> Block | None:
        # `_entered` is for a lock that was acquired first, and then pushed to an ExitStack.
        return _last_of_ours(self._with_blocks, to_leave=True) or _last_of_ours(self._entered, to_leave=True)

    def _complain(self, lost: LostLease, exc_value: BaseException | None) -> None:
        if exc_value is not None:
            exc_value.add_note(str(lost.error))
        elif lost.is_committed or self._if_lost == "warn":
            logger.warning("%s", lost.error)
        else:
            raise lost.error


def _find(block: Block, resource: str) -> Hold | None:
    """Return the owner's hold of a resource if it can be entered again, else None.

    A lost hold cannot be entered: a larger token may exist. A hold of another context is another caller's.
    """
    hold = by_owner.get((block.authority, block.owner, resource))
    if hold is None or hold.inherited or hold.lost or not stands_here(hold.leases[0]):
        return None
    return hold


def _enter_again(block: Block, hold: Hold) -> bool:
    """Enter a hold that the owner has already; return False if the hold is being released."""
    if hold not in block.holds:
        block.holds = (*block.holds, hold)  # first, so that the hold is left after an interruption
        if not (hold.blocks or hold.stop_waiting()):
            block.holds = block.holds[:-1]
            return False
        hold.blocks.add(block.mark)
        for lease in hold.leases:
            lease._left = False
    return True


def enter(block: Block, holds: Sequence[Hold]) -> None:
    """Enter holds that together have all `names`: the owner may enter them again, and write under them."""
    block.holds = tuple(dict.fromkeys(holds))
    block.grant = None
    by_name: dict[str, Lease] = {}
    for hold in block.holds:
        hold.blocks.add(block.mark)
        for resource, lease in zip(hold.grant.resources, hold.leases, strict=True):
            by_owner[hold.authority, hold.owner, resource] = hold
            by_name[resource] = lease
        note_held(*hold.leases)
    block.leases = tuple([by_name[resource] for resource in block.names])


def _last_of_ours(blocks: list[Block], *, to_leave: bool = False) -> Block | None:
    """Return the block that this thread, task or greenlet entered last; if it entered none, the last of all.

    With `to_leave`, it prefers lost blocks of others to the rest, which may belong to later callers.
    """
    snapshot = tuple(blocks)
    if len(snapshot) < 2:  # noqa: PLR2004 - then there is nothing to choose
        return snapshot[0] if snapshot else None
    owner = current_owner()
    ours = [block for block in snapshot if block.owner == owner]
    lost = [block for block in snapshot if to_leave and (not block.holds or block.holds[0].lost)]
    return (ours or lost or snapshot)[-1]


def _take_over_gen(authority: Any, grant: Grant, ttl: float) -> Steps[Grant]:
    if not (yield from authority.vouch_gen(grant)):
        raise LockLostError(
            f"{named(grant.resources)} was not taken over: its lease has ended, or a token of the text is "
            "not that of its lock; acquire the lock again"
        )
    (outcome,) = yield from authority.extend_gen([(grant, ttl)])
    if isinstance(outcome, LockLostError):
        yield from authority.release_gen(grant)  # the extension may have made locks again on some nodes
    if not isinstance(outcome, Grant):
        raise outcome
    return outcome


def _check_still_held(hold: Hold) -> None:
    for lease in hold.leases:
        lease._check()
        if lease.lost or lease._released:
            raise LockLostError(f"the lease of {lease.resource!r} has ended; acquire the lock again")


def _note_remint(hold: Hold, grant: Grant | None) -> None:
    """Note the new grant, or the loss if there is none. A second call does no harm."""
    if grant is not None and not hold.released:
        hold.remint(grant)
    else:
        hold.grant = grant or hold.grant
        # The lease of the old token may have ended.
        tell(hold.mark_lost("a new token was asked for, and none came"))


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
                f"{name!r} has no value where one belongs: write fenced_lock(f'order:{{order.id}}')"
            )
    return names
