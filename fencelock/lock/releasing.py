"""Releases leases: at once, or when the transactions that wrote under them have ended."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import logging
import sys
import threading
import time
from typing import Any, NamedTuple, cast

from fencelock import _threads
from fencelock._generators import Call, Steps
from fencelock._owners import running_loop
from fencelock.errors import AuthorityError, LockLostError
from fencelock.lease import Lease, note_left
from fencelock.lock.hold import Block, Hold, giving_back, remove
from fencelock.lock.renewal import release_again, tell

logger: logging.Logger = logging.getLogger("fencelock.lock")

#: The tasks that release, each with its hold; kept here, because loops refer to their tasks weakly.
_releases: dict[asyncio.Task[None], Hold] = {}


class LostLease(NamedTuple):
    """A lease that ended before its release."""

    error: LockLostError
    #: Whether work was committed under it, and no transaction is open or in doubt. Then the loss raises no
    #: error, which would invite a retry that does the work twice.
    is_committed: bool = False


def defer_release(hold: Hold) -> bool:
    """Put off a release until the open transactions under the hold end; return False if it is due now.

    The lock must outlive the COMMIT, because the next holder would otherwise read rows that are about to
    change. Until then the hold is renewed, and its owner may enter it again. New transactions do not begin
    under it.
    """
    if not any(lease._needed for lease in hold.leases) or hold.inherited or hold.lost or hold.released:
        return False
    hold.wait_for_transactions()
    lease = _call_when_idle(hold)
    if lease is None:
        return not hold.stop_waiting()  # the transaction has ended, and may have released the hold
    for each in hold.leases:
        each._left = True
    note_left(*hold.leases)
    written = lease.resource
    logger.debug("%s: released when the transaction that has written to %r ends", hold.name, written)
    return True


def _call_when_idle(hold: Hold) -> Lease | None:
    """Plan a call of `_release_if_idle` for the end of a lease's transactions; return that lease, or None."""
    call = functools.partial(_release_if_idle, hold)
    return next((lease for lease in hold.leases if lease._needed and lease._when_let_go(call)), None)


def _release_if_idle(hold: Hold) -> None:
    """Release a hold that has waited for transactions, unless its owner has entered it again."""
    if hold.released or _call_when_idle(hold) is not None or not hold.stop_waiting():
        return
    loop, here = hold.loop(), running_loop()
    if loop is not None and loop is here:
        _release_in_loop(hold, loop)
        return
    if loop is not None and loop.is_running():
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(_release_in_loop, hold, loop, context=contextvars.Context())
            return
    if here is None:
        _release_logged(hold)
    else:  # the other tasks of this loop must not wait for the release
        _release_in_thread(hold)


def _release_in_loop(hold: Hold, loop: asyncio.AbstractEventLoop) -> None:
    async def release() -> None:
        _note_late(await hold.authority.aio.run(release_hold_gen(hold)))

    def end(done: asyncio.Task[None]) -> None:
        _releases.pop(done, None)
        if done.cancelled() and not hold.released:  # by a loop that ends, before the task began
            _release_in_thread(hold)
        elif not done.cancelled() and (error := done.exception()) is not None:
            logger.error("%s could not be released", hold.name, exc_info=error)

    task = loop.create_task(release(), name="fencelock-release", context=contextvars.Context())
    _releases[task] = hold
    task.add_done_callback(end)


def _release_in_thread(hold: Hold) -> None:
    """Release in a new thread, which the interpreter joins before it exits."""
    try:
        _threads.start(threading.Thread(target=_release_logged, args=(hold,), name="fencelock-release"))
    except RuntimeError:
        if not sys.is_finalizing():  # too many threads; an interpreter that exits releases everything
            _release_logged(hold)


def _release_logged(hold: Hold) -> None:
    """Release, and log a failure, because the code that ends a transaction must not get the error."""
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
    """Return a step (see `_generators.py`): a task waits for the releases after its owner's transactions.

    Blocking code does not wait: outside of a loop, the thread that ends a transaction has released by then.
    """
    return Call(lambda: None, lambda: _end_releases(owner))


def stop_renewal_gen(hold: Hold) -> Steps[None]:
    """Stop extending a hold; mostly wait for the end of an extension that is under way."""
    renewer = hold.renewer
    if renewer is not None and not renewer.cancel(hold):
        yield Call(lambda: renewer.stop(hold), lambda: renewer.stop_soon(hold))


def resume_renewal_gen(hold: Hold) -> Steps[None]:
    """Resume the renewal of a hold; if another thread has released it meanwhile, release it once more."""
    if hold.released:
        for steps in release_again(hold):
            yield from steps
    elif hold.renewer is not None and not hold.over:
        hold.renewer.add(hold)


def leave_gen(block: Block) -> Steps[LostLease | None]:
    """Leave a block, and release the holds that no other block has entered; return a lost lease or None.

    A second call finishes what an error has interrupted.
    """
    over = []
    for hold in reversed(block.holds):
        hold.blocks.discard(block.mark)
        if not hold.blocks and not defer_release(hold):
            over.append(hold)
    lost, interruption = None, None
    for hold in over:
        try:
            lost = (yield from release_hold_gen(hold)) or lost
        except BaseException as error:  # noqa: BLE001 - the others are released all the same
            interruption = interruption or error
    if block.grant is not None:  # it has not become a hold
        grant, block.grant = block.grant, None
        yield from block.authority.release_gen(grant)
    if interruption is not None:
        raise interruption
    block.holds = ()
    return lost


def release_hold_gen(hold: Hold) -> Steps[LostLease | None]:
    """Release a hold; if its lease was lost before, return the loss, else None.

    The authority keeps the lease until `at_least` has passed. This process treats it as released at once.
    """
    if hold.given_back:
        return None
    lost = hold.leases[0].lost
    if hold.keep_until > time.monotonic() and not lost:
        hold.give_back = functools.partial(cast("Any", hold.authority).keep_gen, until=hold.keep_until)
    giving_back.add(hold)
    remove(hold)
    if lost and hold.leases[0]._inherited:
        giving_back.discard(hold)
        error = f"the lease of {hold.name} belongs to the parent of this forked process"
        return LostLease(LockLostError(error))
    again = False
    released: bool | None = None
    failure: AuthorityError | None = None
    try:
        try:
            yield from stop_renewal_gen(hold)
        finally:
            hold.extended_after_release = False  # this release covers the extensions until now
            again, hold.release_began = hold.release_began, True  # a second release may find nothing
            try:
                released = yield from hold.give_back(hold.grant)
            finally:
                hold.release_finished = True
                if hold.extended_after_release:
                    yield from hold.give_back(hold.grant)
        if released is None:
            logger.warning("%s: too few answers to its release; it ends with its ttl", hold.name)
    except AuthorityError as error:
        failure = error
        logger.warning("%s was not released, and ends with its ttl: %s", hold.name, error)
    except BaseException:  # a cancellation, or a signal handler's error; the release was sent
        hold.note_released()
        raise
    hold.given_back = True
    found = _lost_lease(hold) if lost or (released is False and not again) else None
    hold.note_released(failure)
    return found


def _lost_lease(hold: Hold) -> LostLease:
    """Tell listeners that a lease ended before its release, and return the error for the caller."""
    tell(hold.calls_when_lost())
    leases = hold.leases
    is_over = hold.grant.expires_at <= time.monotonic()
    hold.note_loss("found at its release", "expired" if is_over else "gone")
    ended = f"the lease of {hold.name} (token {hold.grant.tokens[0]}) ended before the work did"
    if reason := leases[0].why_lost:
        ended += f" ({reason})"
    if any(lease._needed or lease.in_doubt for lease in leases):
        ended += (
            "; a transaction that wrote under it is open, or its COMMIT is in doubt: roll back, lock "
            "again, and look at the row"
        )
    elif any(lease._committed for lease in leases):
        ended += (
            ". What was committed stays committed, and overwrites nothing of a newer holder; make the ttl "
            "longer, or the work shorter"
        )
        return LostLease(LockLostError(ended), is_committed=True)
    elif any(lease._guarded for lease in leases):
        ended += "; all that was written under it was rolled back: lock again, and begin again"
        return LostLease(LockLostError(ended, written=False))
    else:
        ended += (
            "; nothing went through the guard, so another holder may have done the same work meanwhile: look "
            "before you do it again, and make the ttl longer, or the work shorter"
        )
    return LostLease(LockLostError(ended))
