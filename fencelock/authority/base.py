"""What every authority offers to the lock, be it a quorum of nodes, a database or a consensus store."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from fencelock.errors import FencelockError


@dataclass(slots=True, unsafe_hash=True)
class Grant:
    """Leases of one or several resources that were granted together. Never changed.

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


#: A grant, and for how many seconds from now it is to last.
Wish = tuple[Grant, float]


class Authority(Protocol):
    """Grants leases and mints their tokens.

    For each resource, no two grants carry the same token, and a token exceeds every token whose
    acquisition had completed before its own began.
    """

    @property
    def aio(self) -> AsyncAuthority:
        """The same authority for coroutines."""

    def acquire(
        self,
        resources: tuple[str, ...],
        *,
        ttl: float,
        timeout: float | None,
        fair: bool = False,
        above: tuple[int, ...] = (),
    ) -> Grant:
        """Return leases of all the resources, or of none.

        With `fair`, those who have waited longer come first, as far as the authority can tell. `above` has a
        token for each resource that the new one must exceed, 0 for none: what a storage has seen, where the
        authority has forgotten. It is asked for after a refusal only.

        Raises:
            LockTimeoutError: somebody else held one of them until the timeout.
            AuthorityError: it could not be decided.
        """

    def extend_many(self, wishes: Sequence[Wish]) -> list[Grant | FencelockError]:
        """Extend grants, in as few round trips as can be; return what became of each.

        That is the grant with an end at least so many seconds from when this was asked; a LockLostError
        where the lease has ended; or an AuthorityError where that could not be decided, and the grant still
        ends when it would have.
        """

    def remint(self, grant: Grant, ttl: float) -> Grant:
        """Exchange a grant for one of the same resources with larger tokens, that nobody came between.

        Raises:
            LockLostError: it came to nothing; the old grant is not in force any more either.
        """

    def release(self, grant: Grant) -> bool | None:
        """Give the leases back.

        Returns True if they were still ours, False if they no longer were, None if that could not be told.
        """


class AsyncAuthority(Protocol):
    """What an `Authority` offers to coroutines: the same names, promises and errors.

    One that is cancelled leaves no lease behind: what an acquisition may have got is given back, without
    waiting for that, and a release takes place all the same.
    """

    async def acquire(
        self,
        resources: tuple[str, ...],
        *,
        ttl: float,
        timeout: float | None,  # noqa: ASYNC109 - it waits for other holders, with errors of its own
        fair: bool = False,
        above: tuple[int, ...] = (),
    ) -> Grant:
        """Return leases of all the resources, or of none: see `Authority.acquire`."""

    async def extend_many(self, wishes: Sequence[Wish]) -> list[Grant | FencelockError]:
        """See `Authority.extend_many`."""

    async def remint(self, grant: Grant, ttl: float) -> Grant:
        """See `Authority.remint`."""

    async def release(self, grant: Grant) -> bool | None:
        """See `Authority.release`."""
