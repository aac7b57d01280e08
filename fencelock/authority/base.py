"""What every authority offers to the lock, be it a quorum of nodes, a database or a consensus store.

`Authority` and `AsyncAuthority` are what a lock calls. `authority/stepped.py` makes both of one set of
generators.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self, overload
from weakref import WeakSet

from fencelock.errors import FencelockError, LockTimeoutError

if TYPE_CHECKING:
    from typing import Unpack

    from fencelock.lock.lock import FencedLock
    from fencelock.settings import LockSettings


@dataclass(slots=True, unsafe_hash=True)
class Grant:
    """Leases of one or several resources that were granted together. Never changed.

    Attributes:
        resources: in the order in which they were asked for.
        tokens: the fencing token of each.
        expires_at: when all of them end, on the clock of `time.monotonic`.
        proof: what the authority needs to recognise the grant; nothing else looks into it.
    """

    resources: tuple[str, ...]
    tokens: tuple[int, ...]
    expires_at: float
    proof: Any


#: A grant, and for how many seconds from now it is to last.
Wish = tuple[Grant, float]


def drift(ttl: float) -> float:
    """Return the seconds by which clocks may disagree over a lease of `ttl` seconds."""
    return ttl * 0.01 + 0.002


def validity(began: float, ttl: float) -> float:
    """Return until when a holder may rely on a lease, on the clock of `time.monotonic`.

    Args:
        began: when it was asked for.
        ttl: seconds that it was asked for.
    """
    return began + ttl - drift(ttl)


def named(resources: Iterable[str]) -> str:
    """Return resources as they stand in a sentence."""
    return ", ".join(map(repr, resources))


def held_by_another(resources: Iterable[str], holder_ttl: float | None) -> LockTimeoutError:
    """Return the error of an acquisition that has waited for long enough.

    Args:
        resources: that are held.
        holder_ttl: seconds for which they are; None where they are free by now.
    """
    if holder_ttl is None:
        return LockTimeoutError(f"{named(resources)} could not be acquired in time: others were faster")
    return LockTimeoutError(
        f"{named(resources)} is held by another, whose lease ends in {holder_ttl:.3f} s unless it is "
        "extended; wait longer (timeout=) or try again later",
        holder_ttl=holder_ttl,
    )


class Authority(Protocol):
    """Grants leases and mints their tokens.

    For each resource, no two grants carry the same token, and a token exceeds every token whose
    acquisition had completed before its own began.

    Any thread and any greenlet may call it, also from a signal handler that has interrupted another call.
    A forked child uses it with connections of its own and leaves those of its parent alone. An acquisition
    that raises leaves no lease behind.

    An authority may have more than this:

    - `close()` closes its connections, and using it again opens them again. One that is in `in_use` is closed
      when the interpreter exits, after what is held has been given back.
    - `kinds`, a `frozenset` of what else it can do: `"fair"`.
    - `sealed_by(engine)` tells whether it grants in the very database of an engine. Its `acquire` then takes
      `seal=`, a function that is called inside the transaction that grants (see `Seal`).
    - `holder_ttl(resources)`, also of `aio`, tells for how many seconds one of them is held; None for none.
    - `dump(grant)` makes plain data of a grant, and `load(resources, tokens, data)` the grant of it again.
      Its end is known when it has been extended.
    - `inspect(resource)` tells the holder of a resource.
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
            LockTimeoutError: another holder kept one of them until the timeout.
            AuthorityError: it could not be decided.
        """

    def extend_many(self, wishes: Sequence[Wish]) -> list[Grant | FencelockError]:
        """Extend any number of grants, in as few round trips as can be; return what became of each.

        That is the grant with its new end, which may be earlier than asked for where the authority has a
        limit of its own, and never earlier than it was; a LockLostError where the lease has ended; or an
        AuthorityError where that could not be decided, and the grant still ends when it would have.
        """

    def remint(self, grant: Grant, ttl: float) -> Grant:
        """Exchange a grant for one of the same resources with larger tokens, and no other grant in between.

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


#: Raises the fences of a database to the tokens of a grant, on a connection of SQLAlchemy, in the transaction
#: that grants. It returns the fences that were in the way, in the order of the resources; nothing is granted
#: then. Empty where none was.
Seal = Callable[[Any, Grant], tuple[int, ...]]


def is_sealed_by(authority: Authority, engine: object) -> bool:
    """Tell whether an authority can grant and seal in one COMMIT of an engine's database."""
    sealed_by: Callable[[object], bool] | None = getattr(authority, "sealed_by", None)
    return sealed_by is not None and sealed_by(engine)


class Closable(Protocol):
    """An authority that has connections."""

    def close(self) -> None:
        """Close them; using the authority again opens them again."""


#: What is closed when the interpreter exits, after leases have been given back.
in_use: WeakSet[Closable] = WeakSet()

#: Makes a lock. The module of locks puts `fenced_lock` here, because authorities import no locks.
_lock_factories: list[Callable[..., Any]] = []


def make_locks_with(factory: Callable[..., Any]) -> None:
    """Have `Locking.lock` call this."""
    _lock_factories[:] = [factory]


class Locking:
    """What an authority inherits to have `lock`, and to be closed at the end of a `with`."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections. Leases that are held end by themselves; using it again connects again."""

    @overload
    def lock(self, resource: str, /, **settings: Unpack[LockSettings]) -> FencedLock[int]: ...
    @overload
    def lock(self, *resources: str, **settings: Unpack[LockSettings]) -> FencedLock[tuple[int, ...]]: ...
    def lock(
        self, *resources: str, **settings: Unpack[LockSettings]
    ) -> FencedLock[int] | FencedLock[tuple[int, ...]]:
        """Return `fenced_lock(*resources, …)` of this authority, with the same settings.

        Args:
            *resources: what to lock.
            **settings: ttl, timeout, renew, max_hold, fair, reentrant, if_lost, seal: as for `fenced_lock`.

        Raises:
            TypeError: as `fenced_lock` does, and for settings that it does not have.
            ValueError: for arguments out of range.
        """
        made: FencedLock[int] = _lock_factories[0](*resources, **settings, authority=self)
        return made


class AsyncClosing:
    """What the view of an authority for coroutines inherits, to be closed at the end of an `async with`."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections of the running loop; using it again connects again."""
