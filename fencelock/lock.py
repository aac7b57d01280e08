"""The life of a lease: wait for it, hold it, extend it, release it."""

from __future__ import annotations

import logging
from types import EllipsisType, TracebackType
from typing import Generic, TypeVar, overload

from fencelock._checks import check_timeout, check_ttl
from fencelock.authority.base import Authority, Grant
from fencelock.errors import AuthorityError, LockError, LockLostError, LockTimeoutError, NotHeldError
from fencelock.lease import Lease, check_resource, note_ended, note_held
from fencelock.settings import default_authority

_Token = TypeVar("_Token", int, tuple[int, ...])

logger = logging.getLogger(__name__)


class FencedLock(Generic[_Token]):
    """A lock on one or several resources; a context manager that yields the fencing token.

    Made by `fenced_lock` or `Redlock.lock`. May be used again after it has been released, but holds one
    grant at a time: two threads use two objects.
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
        self._grant: Grant | None = None
        self._granted_by: Authority | None = None
        self._leases: tuple[Lease, ...] = ()

    def __repr__(self) -> str:
        names = ", ".join(map(repr, self._resources))
        return f"<fenced_lock {names} {'held' if self._grant else 'not held'}>"

    @property
    def leases(self) -> tuple[Lease, ...]:
        """The leases while held, in the order of the resources; empty otherwise."""
        return self._leases

    @property
    def lease(self) -> Lease:
        """The lease while held: of the first resource, where there are several.

        Raises:
            NotHeldError: if the lock is not held.
        """
        self._held_grant()
        return self._leases[0]

    def acquire(self, timeout: float | EllipsisType | None = ...) -> Lease:
        """Wait for the lock and return its lease: of the first resource, where there are several.

        Args:
            timeout: seconds to wait for another holder; None for ever, 0 one try. By default what the
                lock was made with.

        Raises:
            LockTimeoutError: somebody else held it until the timeout.
            AuthorityError: it could not be decided.
            LockError: this object holds it already.
        """
        if self._grant is not None:
            raise LockError(f"{self!r} is held by this very object; release it first, or make another")
        waiting = self._timeout if timeout is ... else check_timeout(timeout)
        authority = self._authority or default_authority()
        grant = authority.acquire(self._resources, ttl=self._ttl, timeout=waiting)
        try:
            self._leases = tuple(
                Lease(resource, token, grant.expires_at)
                for resource, token in zip(grant.resources, grant.tokens, strict=True)
            )
            note_held(*self._leases)
            self._grant, self._granted_by = grant, authority
            return self._leases[0]
        except BaseException:  # a signal handler's: the caller does not learn that it holds the lock
            self._grant, self._granted_by = grant, authority
            self._give_back()
            raise

    def try_acquire(self) -> Lease | None:
        """Try once: return the lease, or None if somebody else holds the lock.

        Raises:
            AuthorityError: it could not be decided.
            LockError: this object holds it already.
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
        grant = self._held_grant()
        for lease in self._leases:
            lease.check()
            if lease.lost:
                raise LockLostError(f"the lease of {lease.resource!r} has ended; acquire the lock again")
        try:
            self._grant = self._grantor().extend(grant, self._ttl if ttl is None else check_ttl(ttl))
        except LockLostError as error:
            for lease in self._leases:
                lease.lose(str(error))
            raise
        for lease in self._leases:
            lease.extend_to(self._grant.expires_at)

    def release(self) -> None:
        """Give the lock back.

        Where too few nodes answer to do so, it ends by itself with its ttl, and a warning is logged.

        Raises:
            NotHeldError: the lock is not held.
            LockLostError: the lease had ended before: somebody else may have held the lock meanwhile.
        """
        if lost := self._give_back():
            raise LockLostError(lost)

    def _give_back(self) -> str:
        """Release; return in what way the lease had been lost before, or nothing."""
        grant = self._held_grant()
        leases = self._leases
        lost = next((lease for lease in leases if lease.lost), None)
        inherited = any(lease.inherited for lease in leases)
        self._grant, self._leases = None, ()
        for lease in leases:
            lease.release()
        note_ended(*leases)
        name = ", ".join(map(repr, self._resources))
        if inherited:
            return f"the lease of {name} belongs to the process that this one was forked from"
        ours: bool | None = None
        try:
            ours = self._grantor().release(grant)
            if ours is None:
                logger.warning("%s: too few nodes answered to release it; it ends by itself", name)
        except AuthorityError as error:
            logger.warning("%s could not be released and ends by itself: %s", name, error)
        if lost is not None or ours is False:
            return (
                f"the lease of {name} (token {grant.tokens[0]}) ended before the work did: somebody else may "
                "have worked on it meanwhile. What was committed stays committed, and fenced tables are "
                "safe; make the ttl longer or the work shorter"
            )
        return ""

    def _held_grant(self) -> Grant:
        if self._grant is None:
            raise NotHeldError(f"{self!r}: acquire it first")
        return self._grant

    def _grantor(self) -> Authority:
        """Return who granted what is held: the default may have been configured anew since."""
        return self._granted_by or self._authority or default_authority()

    def __enter__(self) -> _Token:
        self.acquire()
        try:
            tokens = tuple(lease.fencing_token for lease in self._leases)
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
        if self._grant is None:
            return  # the body has released it
        lost = self._give_back()
        if lost and exc_value is None:
            raise LockLostError(lost)
        if lost and exc_value is not None:
            exc_value.add_note(lost)


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
