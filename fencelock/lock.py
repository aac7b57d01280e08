"""The life of a lease: wait for it, hold it, extend it, release it."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from types import EllipsisType, TracebackType
from typing import Generic, TypeVar, overload

from fencelock._checks import check_timeout, check_ttl
from fencelock._holds import Hold, add, current_owner, find, remove
from fencelock.authority.base import Authority, Grant
from fencelock.errors import AuthorityError, LockLostError, LockTimeoutError, NotHeldError
from fencelock.lease import Lease, check_resource
from fencelock.settings import default_authority

_Token = TypeVar("_Token", int, tuple[int, ...])

logger = logging.getLogger(__name__)


class _Entry:
    """One time that a lock was entered.

    Attributes:
        owner: the thread or task that did.
        holds: what it is inside.
        leases: what it yields, in the order of the lock's resources.
    """

    __slots__ = ("holds", "leases", "owner")

    def __init__(self, owner: object) -> None:
        self.owner = owner
        self.holds: tuple[Hold, ...] = ()
        self.leases: tuple[Lease, ...] = ()

    def enter(self, holds: Iterable[Hold], resources: Iterable[str]) -> None:
        """Be inside holds, which have all of the resources between them."""
        self.holds = tuple(dict.fromkeys(holds))
        by_name = {lease.resource: lease for hold in self.holds for lease in hold.leases}
        self.leases = tuple(by_name[resource] for resource in resources)
        for hold in self.holds:
            hold.blocks.add(self)
            add(hold)

    def leave(self) -> str:
        """Give back what no block is inside any more; return how a lease had been lost, or nothing."""
        lost = ""
        for hold in reversed(self.holds):
            hold.blocks.discard(self)
            if not hold.blocks:
                lost = _release(hold) or lost
        return lost


class FencedLock(Generic[_Token]):
    """A lock on one or several resources; a context manager that yields the fencing token.

    Made by `fenced_lock` or `Redlock.lock`. The thread (or asyncio task) that holds a resource enters it
    again at no cost and gets the same token, with this object or another; what is held is given back when
    the last block is left. May be used again afterwards.
    """

    def __init__(
        self,
        resources: tuple[str, ...],
        *,
        ttl: float,
        timeout: float | None,
        authority: Authority | None,
    ) -> None:
        self._resources = _check_resources(resources)
        self._ttl = check_ttl(ttl)
        self._timeout = check_timeout(timeout)
        self._authority = authority
        self._entries: list[_Entry] = []

    def __repr__(self) -> str:
        names = ", ".join(map(repr, self._resources))
        return f"<fenced_lock {names} {'held' if self._entries else 'not held'}>"

    @property
    def leases(self) -> tuple[Lease, ...]:
        """The leases while held, in the order of the resources; empty otherwise."""
        return self._innermost().leases if self._entries else ()

    @property
    def lease(self) -> Lease:
        """The lease while held: of the first resource, where there are several.

        Raises:
            NotHeldError: if the lock is not held.
        """
        return self._innermost().leases[0]

    def acquire(self, timeout: float | EllipsisType | None = ...) -> Lease:
        """Wait for the lock and return its lease: of the first resource, where there are several.

        Args:
            timeout: seconds to wait for another holder; None for ever, 0 one try. By default what the
                lock was made with.

        Raises:
            LockTimeoutError: somebody else held it until the timeout.
            AuthorityError: it could not be decided.
            LockLostError: this thread or task holds it already, but its lease has ended.
        """
        waiting = self._timeout if timeout is ... else check_timeout(timeout)
        authority = self._authority or default_authority()
        owner = current_owner()
        held = [hold for name in self._resources if (hold := find(authority, owner, name))]
        for hold in held:
            _check_still_held(hold)
        known = {name for hold in held for name in hold.grant.resources}
        missing = tuple(name for name in self._resources if name not in known)
        grant: Grant | None = None
        entry = _Entry(owner)
        try:
            if missing:
                grant = authority.acquire(missing, ttl=self._ttl, timeout=waiting)
                held.append(Hold(authority, grant, owner))
            self._entries.append(entry)
            entry.enter(held, self._resources)
            return entry.leases[0]
        except BaseException:  # perhaps a signal handler's: the caller does not learn that it holds the lock
            if entry.leases:
                self._give_back()
            elif grant is not None:
                authority.release(grant)
            raise

    def try_acquire(self) -> Lease | None:
        """Try once: return the lease, or None if somebody else holds the lock.

        Raises:
            AuthorityError: it could not be decided.
            LockLostError: this thread or task holds it already, but its lease has ended.
        """
        try:
            return self.acquire(timeout=0)
        except LockTimeoutError:
            return None

    def extend(self, ttl: float | None = None) -> None:
        """Let the lease live on for `ttl` seconds from now, or for what the lock was made with.

        The token stays. A lease is never shortened.

        Raises:
            NotHeldError: the lock is not held.
            LockLostError: the lease has ended; it stays lost.
            AuthorityError: it could not be decided; the lease still ends when it would have.
        """
        seconds = self._ttl if ttl is None else check_ttl(ttl)
        for hold in self._innermost().holds:
            _check_still_held(hold)
            try:
                hold.grant = hold.authority.extend(hold.grant, seconds)
            except LockLostError as error:
                for lease in hold.leases:
                    lease.lose(str(error))
                raise
            for lease in hold.leases:
                lease.extend_to(hold.grant.expires_at)

    def release(self) -> None:
        """Give the lock back; where it was entered several times, leave one block.

        Where too few nodes answer to do so, it ends by itself with its ttl, and a warning is logged.

        Raises:
            NotHeldError: the lock is not held.
            LockLostError: the lease had ended before: somebody else may have held the lock meanwhile.
        """
        if lost := self._give_back():
            raise LockLostError(lost)

    def _give_back(self) -> str:
        """Leave one block; return in what way a lease had been lost before, or nothing."""
        entry = self._innermost()
        self._entries.remove(entry)
        return entry.leave()

    def _innermost(self) -> _Entry:
        """Return where this thread or task entered last; or else where anybody did."""
        if not self._entries:
            raise NotHeldError(f"{self!r}: acquire it first")
        owner = current_owner()
        ours = (entry for entry in reversed(self._entries) if entry.owner is owner)
        return next(ours, self._entries[-1])

    def __enter__(self) -> _Token:
        self.acquire()
        try:
            tokens = tuple(lease.fencing_token for lease in self.leases)
            return tokens if len(self._resources) > 1 else tokens[0]  # type: ignore[return-value]
        except BaseException:  # a signal handler's: the body will not run, and nobody would release
            self._give_back()
            raise

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if not self._entries:
            return  # the body has released it
        lost = self._give_back()
        if lost and exc_value is None:
            raise LockLostError(lost)
        if lost and exc_value is not None:
            exc_value.add_note(lost)


def _check_still_held(hold: Hold) -> None:
    for lease in hold.leases:
        lease.check()
        if lease.lost:
            raise LockLostError(f"the lease of {lease.resource!r} has ended; acquire the lock again")


def _release(hold: Hold) -> str:
    """Give a hold back; return in what way it had been lost before, or nothing."""
    name = ", ".join(map(repr, hold.grant.resources))
    lost = any(lease.lost for lease in hold.leases)
    remove(hold)
    if hold.inherited:
        return f"the lease of {name} belongs to the process that this one was forked from"
    ours: bool | None = None
    try:
        ours = hold.authority.release(hold.grant)
        if ours is None:
            logger.warning("%s: too few nodes answered to release it; it ends by itself", name)
    except AuthorityError as error:
        logger.warning("%s could not be released and ends by itself: %s", name, error)
    if lost or ours is False:
        return (
            f"the lease of {name} (token {hold.grant.tokens[0]}) ended before the work did: somebody else "
            "may have worked on it meanwhile. What was committed stays committed, and fenced tables are "
            "safe; make the ttl longer or the work shorter"
        )
    return ""


@overload
def fenced_lock(
    resource: str, /, *, ttl: float = ..., timeout: float | None = ..., authority: Authority | None = ...
) -> FencedLock[int]: ...


@overload
def fenced_lock(
    *resources: str, ttl: float = ..., timeout: float | None = ..., authority: Authority | None = ...
) -> FencedLock[tuple[int, ...]]: ...


def fenced_lock(
    *resources: str,
    ttl: float = 30.0,
    timeout: float | None = 10.0,
    authority: Authority | None = None,
) -> FencedLock[int] | FencedLock[tuple[int, ...]]:
    """Return a lock on a resource, to be entered with `with`: it yields the fencing token.

    ```python
    with fenced_lock("order:1") as token, Session(engine) as session:
        order = claim(session, Order, 1)
        order.status = "paid"
        session.commit()
    ```

    What it promises: every lease of a resource has a larger token than all leases that had been
    acquired before its own acquisition began, whatever networks, clocks and pauses do. What it does not
    promise: that no older holder is still at work. That is why the storage compares tokens.

    Args:
        *resources: what to lock: 1 to 255 characters each, without control characters. Several are
            acquired together or not at all, and yield a tuple of tokens in their order.
        ttl: seconds that the lease lasts on every node.
        timeout: seconds to wait for another holder; None for ever, 0 one try.
        authority: who grants it; by default what `configure()` or FENCELOCK_URL say.

    Raises:
        TypeError: for arguments of the wrong kind; entering raises the errors of `FencedLock.acquire`.
        ValueError: for arguments out of range.
    """
    lock: FencedLock[int] = FencedLock(resources, ttl=ttl, timeout=timeout, authority=authority)
    return lock


def _check_resources(resources: tuple[str, ...]) -> tuple[str, ...]:
    if not resources:
        raise ValueError("name what to lock, such as fenced_lock('order:1')")
    for resource in resources:
        check_resource(resource)
    if len(set(resources)) != len(resources):
        raise ValueError(f"a resource is named twice: {', '.join(map(repr, resources))}")
    return resources
