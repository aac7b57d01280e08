"""Giving a lease back: at once, when a transaction that was written under it ends, and at last."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import logging
import threading
import time
from typing import NamedTuple

from fencelock import _threads
from fencelock._generators import Call, Steps
from fencelock._owners import running_loop
from fencelock.errors import AuthorityError, LockLostError
from fencelock.lease import Lease, note_left
from fencelock.lock.hold import Block, Hold, remove
from fencelock.renewal.schedule import release_again, tell

logger = logging.getLogger("fencelock.lock")

#: The tasks that give back, each with its hold. Loops refer to their tasks weakly.
_releases: dict[asyncio.Task[None], Hold] = {}


class LostLease(NamedTuple):
    """A lease that ended before it was given back.

    Attributes:
        error: what to raise.
        is_committed: whether work was committed under it, and nothing is open. Then the loss is only logged,
            because an error invites a retry, and a COMMIT must not be made twice.
    """

    error: LockLostError
    is_committed: bool = False


def defer_release(hold: Hold) -> bool:
    """Have a hold given back when the transactions that have written under it end; tell whether any is open.

    The lock must outlive the COMMIT: the next holder would otherwise read, by its own claim, what is about to
    change. Until then the hold is renewed as before, and its owner may enter it again. New transactions do
    not begin under it.
    """
    if not any(lease.needed for lease in hold.leases) or hold.inherited or hold.lost or hold.released:
        return False
    hold.wait_for_transactions()
    lease = _call_when_idle(hold)
    if lease is None:
        return not hold.stop_waiting()  # it has ended meanwhile, and may have given the hold back
    for each in hold.leases:
        each.left = True
    note_left(*hold.leases)
    written = lease.resource
    logger.debug("%s: released when the transaction that has written to %r ends", hold.name, written)
    return True


def _call_when_idle(hold: Hold) -> Lease | None:
    """Have `_release_if_idle` called when no open transaction needs a lease; return that lease, or None."""
    call = functools.partial(_release_if_idle, hold)
    return next((lease for lease in hold.leases if lease.needed and lease.when_let_go(call)), None)


def _release_if_idle(hold: Hold) -> None:
    """Give a hold back that has waited for transactions, unless its owner has entered it again."""
    if hold.released or _call_when_idle(hold) is not None or not hold.stop_waiting():
        return
    loop, here = hold.loop(), running_loop()
    if loop is not None and loop is here:
        _release_in_loop(hold, loop)
        return
    if loop is not None and loop.is_running():
        with contextlib.suppress(RuntimeError):  # it has been closed
            loop.call_soon_threadsafe(_release_in_loop, hold, loop, context=contextvars.Context())
            return
    if here is None:
        _release_logged(hold)
    else:  # no other task of this loop is to wait for it
        _release_in_thread(hold)


def _release_in_loop(hold: Hold, loop: asyncio.AbstractEventLoop) -> None:
    async def release() -> None:
        _note_late(await hold.authority.aio.run(release_hold_gen(hold)))

    def end(done: asyncio.Task[None]) -> None:
        _releases.pop(done, None)
        if done.cancelled() and not hold.released:  # by a loop that ends, before it began
            _release_in_thread(hold)
        elif not done.cancelled() and (error := done.exception()) is not None:
            logger.error("%s could not be released", hold.name, exc_info=error)

    task = loop.create_task(release(), name="fencelock-release", context=contextvars.Context())
    _releases[task] = hold
    task.add_done_callback(end)


def _release_in_thread(hold: Hold) -> None:
    """Give back in a thread of its own, which the interpreter waits for when it ends."""
    with contextlib.suppress(RuntimeError):  # it has, and gives everything back
        _threads.start(threading.Thread(target=_release_logged, args=(hold,), name="fencelock-release"))


def _release_logged(hold: Hold) -> None:
    """Give back; what ends a transaction is not to hear that it could not be done."""
    try:
        _note_late(hold.authority.run(release_hold_gen(hold)))
    except Exception:
        logger.exception("a lock could not be released")


def _note_late(lost: LostLease | None) -> None:
    if lost:
        logger.warning("%s", lost.error)


async def _end_releases(owner: object) -> None:
    if tasks := [task for task, hold in _releases.items() if hold.owner == owner]:
        await asyncio.wait(tasks)


def wait_for_releases(owner: object) -> Call:
    """Return a step that waits for an owner's releases behind its COMMIT.

    Blocking code need not: a thread that ends a transaction gives back before it goes on.
    """
    return Call(lambda: None, lambda: _end_releases(owner))


def stop_renewal_gen(hold: Hold) -> Steps[None]:
    """Have a hold not be extended any more: mostly at once, without a step."""
    renewer = hold.renewer
    if renewer is not None and not renewer.cancel(hold):
        yield Call(lambda: renewer.stop(hold), lambda: renewer.stop_soon(hold))


def resume_renewal_gen(hold: Hold) -> Steps[None]:
    """Have a hold renewed again that was stopped; or given back, if another thread released it meanwhile."""
    if hold.released:
        for grant in release_again(hold):
            yield from hold.authority.release_gen(grant)
    elif hold.renewer is not None and not hold.over:
        hold.renewer.add(hold)


def leave_gen(block: Block) -> Steps[LostLease | None]:
    """Give back what no block is inside any more; return what had been lost before, or None."""
    over = []
    for hold in reversed(block.holds):
        hold.blocks.discard(block.mark)
        if not hold.blocks and not defer_release(hold):
            over.append(hold)
    lost, interruption = None, None
    for hold in over:
        try:
            lost = (yield from release_hold_gen(hold)) or lost
        except BaseException as error:  # noqa: BLE001 - the others are given back all the same
            interruption = interruption or error
    if interruption is not None:
        raise interruption
    return lost


def release_hold_gen(hold: Hold) -> Steps[LostLease | None]:
    """Give a hold back; return how to report it where it had been lost before."""
    if hold.given_back:
        return None
    lost = hold.leases[0].lost
    remove(hold)
    if lost and hold.leases[0].inherited:
        error = f"the lease of {hold.name} belongs to the parent of this forked process"
        return LostLease(LockLostError(error))
    again = hold.release_finished  # the first release was interrupted, so that this one may find nothing
    released: bool | None = None
    failure: AuthorityError | None = None
    try:
        try:
            yield from stop_renewal_gen(hold)
        finally:
            hold.extended_after_release = False  # what has been extended by now is released with the rest
            try:
                released = yield from hold.authority.release_gen(hold.grant)
            finally:
                hold.release_finished = True
                if hold.extended_after_release:
                    yield from hold.authority.release_gen(hold.grant)
        if released is None:
            logger.warning("%s: too few answers to its release; it ends by itself at the latest", hold.name)
    except AuthorityError as error:
        failure = error
        logger.warning("%s was not released, and ends by itself at the latest: %s", hold.name, error)
    except BaseException:  # a cancellation, or of a signal handler; it was sent all the same
        hold.note_released()
        raise
    hold.given_back = True
    found = _lost_lease(hold) if lost or (released is False and not again) else None
    hold.note_released(failure)
    return found


def _lost_lease(hold: Hold) -> LostLease:
    """Return how a lease is to be reported that ended before it was given back, and tell its listeners."""
    tell(hold.calls_when_lost())
    leases = hold.leases
    is_over = hold.grant.expires_at <= time.monotonic()
    hold.note_loss("found when it was given back", "expired" if is_over else "gone")
    ended = f"the lease of {hold.name} (token {hold.grant.tokens[0]}) ended before the work did"
    if reason := leases[0].why_lost:
        ended += f" ({reason})"
    if any(lease.needed or lease.in_doubt for lease in leases):
        ended += (
            "; a transaction that was written under it is open, or its COMMIT is in doubt: roll back, lock "
            "again, and look at the row"
        )
    elif any(lease.committed for lease in leases):
        ended += (
            ". What was committed stays committed, and overwrites nothing of a newer holder; make the ttl "
            "longer, or the work shorter"
        )
        return LostLease(LockLostError(ended), is_committed=True)
    elif any(lease.guarded for lease in leases):
        ended += "; all that was written under it was rolled back: lock again, and begin again"
        return LostLease(LockLostError(ended, written=False))
    else:
        ended += (
            "; nothing went through the guard, so another holder may have done the same work meanwhile: look "
            "before you do it again, and make the ttl longer, or the work shorter"
        )
    return LostLease(LockLostError(ended))
