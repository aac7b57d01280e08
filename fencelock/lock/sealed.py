"""Sealing tokens in the database of a lock."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from fencelock.authority.base import Grant
from fencelock.errors import LockError, LockLostError, LockTimeoutError
from fencelock.lock.hold import Hold
from fencelock.lock.steps import Step, Steps

if TYPE_CHECKING:
    from fencelock.sealing import Sealer, Wish


def check(sealer: Sealer) -> Step:
    """Refuse to seal from coroutines with an engine that blocks, and the other way round."""

    async def wait() -> None:
        sealer.check(blocking=False)

    return Step(lambda: sealer.check(blocking=True), wait)


def seal(sealer: Sealer, grant: Grant, nonce: str = "") -> Steps[tuple[Wish, bool, tuple[int, ...]]]:
    """Have a database raise its fences to a grant's tokens.

    Returns what was wished, whether it is sealed, and the fences that were in the way.
    """
    wish = sealer.wish(grant.resources, grant.tokens, grant.expires_at, nonce)
    step = Step(lambda: sealer.seal(wish), lambda: sealer.seal_soon(wish))
    yield step
    done, fences = step.answer
    # The validity is looked at after the COMMIT, and not before.
    return wish, done and time.monotonic() < wish.expires_at, fences


def seal_held(sealer: Sealer, hold: Hold) -> Steps[None]:
    """Seal what is held already, and was not sealed in that database: a block with `seal=` relies on it.

    Raises:
        LockError: the database refuses, or this very thread, task or greenlet keeps it from being done.
        LockTimeoutError: it could not be done while the lease was valid.
    """
    if sealer in hold.sealers:
        return
    yield check(sealer)
    sealer.refuse_to_wait_for_oneself(hold.grant.resources)
    wish, done, fences = yield from seal(sealer, hold.grant, hold.seal_nonce)
    if fences:
        raise LockError(
            f"{wish.complaint(fences)}; the block that holds the lock did not seal it, and may have passed "
            "the gate itself: give that block seal= too"
        )
    if not done:
        raise LockTimeoutError(wish.complaint(fences))
    hold.sealers, hold.seal_nonce = (*hold.sealers, sealer), wish.nonce


def seal_anew(sealers: Iterable[Sealer], grant: Grant) -> Steps[str]:
    """Seal new tokens of a hold wherever it was sealed; return under which nonce."""
    nonce = ""
    for sealer in sealers:
        wish, done, fences = yield from seal(sealer, grant, nonce)
        if not done:
            raise LockLostError(f"{wish.complaint(fences)}; the lease is lost, acquire the lock again")
        nonce = wish.nonce
    return nonce
