"""What every authority offers to the lock, be it a quorum of nodes, a database or a consensus store."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Grant:
    """Leases of one or several resources that were granted together.

    Attributes:
        resources: in the order in which they were asked for.
        tokens: the fencing token of each.
        expires_at: when all of them end, on the clock of `time.monotonic`.
        proof: what the authority needs to recognise the grant; nobody else looks into it.
    """

    resources: tuple[str, ...]
    tokens: tuple[int, ...]
    expires_at: float
    proof: Any


class Authority(Protocol):
    """Grants leases and mints their tokens.

    For each resource, no two grants carry the same token, and a token exceeds every token whose
    acquisition had completed before its own began.
    """

    def acquire(
        self, resources: tuple[str, ...], *, ttl: float, timeout: float | None, fair: bool = False
    ) -> Grant:
        """Return leases of all the resources, or of none.

        With `fair`, those who have waited longer come first, as far as the authority can tell.

        Raises:
            LockTimeoutError: somebody else held one of them until the timeout.
            AuthorityError: it could not be decided.
        """

    def extend(self, grant: Grant, ttl: float) -> Grant:
        """Return the grant with an end at least `ttl` seconds from when this was asked.

        Raises:
            LockLostError: the lease has ended.
            AuthorityError: it could not be decided; the grant still ends when it would have.
        """

    def release(self, grant: Grant) -> bool | None:
        """Give the leases back.

        Returns True if they were still ours, False if they no longer were, None if that could not be told.
        """

    @property
    def aio(self) -> AsyncAuthority:
        """The same operations as coroutines, on the same nodes."""


class AsyncAuthority(Protocol):
    """What an `Authority` offers to asyncio code: the same promises, names and errors.

    A coroutine that is cancelled leaves no lease behind: what an acquisition may have got is given back,
    without waiting for that, and a release takes place all the same.
    """

    async def acquire(
        self,
        resources: tuple[str, ...],
        *,
        ttl: float,
        timeout: float | None,  # noqa: ASYNC109 - it waits for other holders, with errors of its own
        fair: bool = False,
    ) -> Grant:
        """Return leases of all the resources, or of none: see `Authority.acquire`."""

    async def extend(self, grant: Grant, ttl: float) -> Grant:
        """Return the grant with an end at least `ttl` seconds from now: see `Authority.extend`."""

    async def release(self, grant: Grant) -> bool | None:
        """Give the leases back: see `Authority.release`."""
