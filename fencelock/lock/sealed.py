"""Sealing what is held in the database of a lock."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from fencelock._holds import Hold
from fencelock.authority.base import Grant
from fencelock.errors import LockError, LockLostError, LockTimeoutError
from fencelock.lock.steps import CheckStep, SealStep, Steps

if TYPE_CHECKING:
    from sqlalchemy import Engine
    from sqlalchemy.ext.asyncio import AsyncEngine

    from fencelock.sealing import Sealer


def sealer_with(engine: Engine | AsyncEngine) -> Sealer:
    """Return what seals in the database of an engine."""
    from fencelock.sealing import Sealer  # noqa: PLC0415 - locks that seal nothing need no database

    return Sealer(engine)


def seal_held(sealer: Sealer, hold: Hold) -> Steps[None]:
    """Seal what is held already, and was not sealed in that database: who enters with `seal=` relies on it.

    Raises:
        LockError: the database refuses, or this very thread, task or greenlet keeps it from being done.
        LockTimeoutError: it could not be done while the lease was valid.
    """
    if sealer in hold.sealers:
        return
    yield CheckStep(sealer)
    sealer.refuse_to_wait_for_oneself(hold.grant.resources)
    seal = SealStep(sealer, hold.grant, hold.seal_nonce)
    yield seal
    if seal.fences:
        raise LockError(
            f"{seal.wish.complaint(seal.fences)}; the block that holds the lock did not seal it, and may "
            "have passed the gate itself: give that block seal= too"
        )
    if not seal.done:
        raise LockTimeoutError(seal.wish.complaint(seal.fences))
    hold.sealers, hold.seal_nonce = (*hold.sealers, sealer), seal.wish.nonce


def seal_anew(sealers: Iterable[Sealer], grant: Grant) -> Steps[str]:
    """Seal new tokens of a hold wherever it was sealed; return under which nonce."""
    nonce = ""
    for sealer in sealers:
        seal = SealStep(sealer, grant, nonce)
        yield seal
        if not seal.done:
            raise LockLostError(
                f"{seal.wish.complaint(seal.fences)}; the lease is lost, acquire the lock again"
            )
        nonce = seal.wish.nonce
    return nonce
