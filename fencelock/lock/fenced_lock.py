"""`fenced_lock` and `take_over`: locks of the authority that is named, or of the default one."""

from __future__ import annotations

import json
from typing import Any, Unpack, cast, overload

from fencelock._configure import default_authority
from fencelock.authority.base import Authority, Grant
from fencelock.lock.base import HANDED
from fencelock.lock.lock import FencedLock
from fencelock.lock.options import DEFAULT_TTL, AllLockSettings, IfLost
from fencelock.tokens import check as check_token


@overload
def fenced_lock(resource: str, /, **settings: Unpack[AllLockSettings]) -> FencedLock[int]: ...


@overload
def fenced_lock(*resources: str, **settings: Unpack[AllLockSettings]) -> FencedLock[tuple[int, ...]]: ...


def fenced_lock(
    *resources: str,
    ttl: float = DEFAULT_TTL,
    timeout: float | None = 10.0,
    renew: bool = True,
    max_hold: float | None = 3600.0,
    fair: bool = False,
    reentrant: bool = True,
    if_lost: IfLost = "raise",
    authority: Authority | None = None,
) -> FencedLock[int] | FencedLock[tuple[int, ...]]:
    """Return a lock on a resource, to be entered with `with` or `async with`: it yields the fencing token.

    ```python
    with fenced_lock("order:1") as token, Session(engine) as session:
        order = claim(session, Order, 1)
        order.status = "paid"
        session.commit()
    ```

    Every lease of a resource has a larger token than all leases that had been acquired before its own
    acquisition began, whatever networks, clocks and pauses do. An older holder may still be at work: that is
    why the storage compares tokens.

    Args:
        *resources: what to lock: 1 to 255 characters each, without control characters. Several, at
            most 5000, are acquired together or not at all, and yield a tuple of tokens in their order. A name
            that comes twice is one lock.
        ttl: seconds that the lease lasts on every node, and by which it is extended.
        timeout: seconds to wait for another holder; None for ever, 0 one try.
        renew: extend the lease in the background, after each third of its ttl, until it is released.
        max_hold: seconds after which a lease is no longer renewed but lost, because a worker that hangs must
            not hold for ever. None for no limit.
        fair: wait in line: first come, first served, as far as a quorum can tell.
        reentrant: let a thread, task or greenlet enter again what it holds. False: LockTimeoutError at once.
        if_lost: what leaving the block does if the lease was lost before, nothing was committed under it and
            the body raised nothing: "raise" LockLostError, or "warn" in the log.
        authority: grants it; by default what `configure()` or FENCELOCK_URL say.

    Raises:
        TypeError: for arguments of the wrong kind; entering raises the errors of `FencedLock.acquire`.
        ValueError: for arguments out of range.
    """
    lock: FencedLock[int] = FencedLock(
        resources,
        default_authority if authority is None else lambda: authority,
        ttl=ttl,
        timeout=timeout,
        renew=renew,
        max_hold=max_hold,
        fair=fair,
        reentrant=reentrant,
        if_lost=if_lost,
    )
    return lock


def take_over(text: str, **settings: Unpack[AllLockSettings]) -> FencedLock[Any]:
    """Return a lock that was handed over: its first entering extends the lease instead of acquiring it.

    The tokens stay. Each text is for one process. Entering raises LockLostError where the lease has ended, or
    the text does not have the tokens that were granted.

    Args:
        text: of `FencedLock.hand_over`.
        **settings: as for `fenced_lock`. The ttl is that of the text by default, and max_hold begins again.

    Raises:
        ValueError: for any other text, also of another kind of authority, or of another namespace.
    """
    settings["authority"] = authority = cast("Any", settings.get("authority") or default_authority())
    try:
        grant, proof, by, ttl = _read(text, authority)
    except (ValueError, TypeError, AttributeError, LookupError, RecursionError) as error:
        raise ValueError(f"this is no text of hand_over: {str(text)[:80]!r} ({str(error)[:200]})") from error
    settings.setdefault("ttl", ttl)
    if authority.dump(grant) != proof:
        raise ValueError(f"{str(by)[:200]!r} has granted this lease, and {authority!r} cannot take it over")
    lock: FencedLock[Any] = fenced_lock(*grant.resources, **settings)
    lock._handed = grant  # noqa: SLF001 - the rooms of a lock are one thing
    return lock


def _read(text: str, authority: Any) -> tuple[Grant, object, object, float]:
    """Return the grant of a text, its proof, the name of its authority, and the ttl in seconds."""
    its = json.loads(text)[HANDED]
    names, tokens, proof, by, ttl = (its[word] for word in ("resources", "tokens", "proof", "by", "ttl"))
    if not isinstance(names, list) or len({*names}) < len(names) or len(names) != len(tokens):
        raise ValueError("its resources are no list of different names, each with a token")
    fenced_lock(*names, ttl=ttl, authority=authority)  # which refuses wrong ones
    return authority.load(tuple(names), tuple(map(check_token, tokens)), proof), proof, by, ttl
