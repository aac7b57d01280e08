"""Base classes of authorities that are written once, as generators, for blocking code and coroutines."""

from __future__ import annotations

import abc
from collections.abc import Coroutine, Sequence
from typing import TYPE_CHECKING, Any, Self, TypeVar, Unpack, overload

from fencelock._generators import Steps
from fencelock.authority.base import Authority, Grant, Terms, Wish, lock_makers
from fencelock.errors import FencelockError
from fencelock.holder import LockInfo
from fencelock.lease import check_resource

if TYPE_CHECKING:  # an authority knows no lock, but a caller of `lock` gets one
    from fencelock.lock.lock import FencedLock
    from fencelock.lock.options import LockSettings

_T = TypeVar("_T")


class GeneratorAuthority(Authority):
    """An `Authority` with methods for blocking code. It works as a context manager, which closes it."""

    aio: AsyncView

    @abc.abstractmethod
    def keep_gen(self, grant: Grant, until: float) -> Steps[bool | None]:
        """Move the end of the leases: see `Authority`."""

    def is_held_gen(self, resources: tuple[str, ...]) -> Steps[bool]:
        return bool((yield from self.inspect_gen(resources)))

    @abc.abstractmethod
    def force_gen(self, resource: str, token: int | None) -> Steps[LockInfo | None]:
        """See `force_release`."""

    @abc.abstractmethod
    def close(self) -> None:
        """Close the connections. Held leases end with their ttl; the next use connects again."""

    def vouch_gen(self, grant: Grant) -> Steps[bool]:
        found = yield from self.inspect_gen(grant.resources)
        granted = {info.resource: info.token for info in found}
        return all(granted.get(name) == its for name, its in zip(grant.resources, grant.tokens, strict=True))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    @overload
    def lock(self, resource: str, /, **settings: Unpack[LockSettings]) -> FencedLock[int]: ...
    @overload
    def lock(self, *resources: str, **settings: Unpack[LockSettings]) -> FencedLock[tuple[int, ...]]: ...
    def lock(self, *resources: str, **settings: Unpack[LockSettings]) -> Any:
        """Return a lock of this authority: `fenced_lock(*resources, …)`, with the same settings.

        Raises:
            TypeError, ValueError: as `fenced_lock` does.
        """
        return lock_makers[0](resources, lambda: self, **settings)

    def acquire(self, resources: tuple[str, ...], **terms: Unpack[Terms]) -> Grant:
        return self.run(self.acquire_gen(resources, **terms))

    def extend_many(self, wishes: Sequence[Wish]) -> list[Grant | FencelockError]:
        return self.run(self.extend_gen(wishes))

    def remint(self, grant: Grant, ttl: float) -> Grant:
        return self.run(self.remint_gen(grant, ttl))

    def release(self, grant: Grant) -> bool | None:
        return self.run(self.release_gen(grant))

    def force_release(self, resource: str, *, token: int | None = None) -> LockInfo | None:
        """Release a lock of another holder, and return its `LockInfo`; None if there was no such lock.

        With a token, only the holder of this token loses the lock, so a successor keeps it.

        The holder is not stopped. It learns of the release when it extends its lease. Let a new holder claim
        the rows that the old holder may write, so that the database refuses the old token: `fencelock release
        --force` can do so.

        Returns:
            The state of the lock before its release; None if there was no such lock.

        Raises:
            AuthorityError: the release failed, or its outcome is unknown.
            TypeError, ValueError: `resource` cannot name a lock.
        """
        return self.run(self.force_gen(check_resource(resource), token))

    @overload
    def inspect(self, resource: str, /) -> LockInfo | None: ...
    @overload
    def inspect(self, resource: None = None, /) -> list[LockInfo]: ...
    def inspect(self, resource: str | None = None, /) -> LockInfo | list[LockInfo] | None:
        """Return the lock of a resource, or None if it is free; without a resource, return all held locks.

        Raises:
            AuthorityError: the authority did not answer, or cannot tell.
            TypeError, ValueError: `resource` cannot name a lock.
        """
        found = self.run(self.inspect_gen(() if resource is None else (check_resource(resource),)))
        return found if resource is None else next(iter(found), None)


class AsyncView(abc.ABC):
    """A `GeneratorAuthority` for coroutines; `async with` closes its connections of the running loop."""

    def __init__(self, authority: GeneratorAuthority) -> None:
        self._authority = authority

    def __repr__(self) -> str:
        return f"{self._authority!r}.aio"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.close()

    @abc.abstractmethod
    async def close(self) -> None:
        """Close the connections of the running loop; the next use connects again.

        Before that, it waits for the releases of tasks that are cancelled (for two seconds at most), and
        releases what ended tasks of this loop still hold.
        """

    @abc.abstractmethod
    def run(self, steps: Steps[_T]) -> Coroutine[Any, Any, _T]:
        """Run a generator; other tasks run meanwhile."""

    async def acquire(self, resources: tuple[str, ...], **terms: Unpack[Terms]) -> Grant:
        """Acquire all resources, or none: see `Authority.acquire_gen`.

        If this call is cancelled, it releases what it may have acquired, without waiting.
        """
        return await self.run(self._authority.acquire_gen(resources, **terms))

    async def extend_many(self, wishes: Sequence[Wish]) -> list[Grant | FencelockError]:
        return await self.run(self._authority.extend_gen(wishes))

    async def remint(self, grant: Grant, ttl: float) -> Grant:
        return await self.run(self._authority.remint_gen(grant, ttl))

    async def release(self, grant: Grant) -> bool | None:
        return await self.run(self._authority.release_gen(grant))

    @overload
    async def inspect(self, resource: str, /) -> LockInfo | None: ...
    @overload
    async def inspect(self, resource: None = None, /) -> list[LockInfo]: ...
    async def inspect(self, resource: str | None = None, /) -> LockInfo | list[LockInfo] | None:
        """Return the lock of a resource, or all held locks: see `GeneratorAuthority.inspect`."""
        asked = () if resource is None else (check_resource(resource),)
        found = await self.run(self._authority.inspect_gen(asked))
        return found if resource is None else next(iter(found), None)
