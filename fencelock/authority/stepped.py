"""An authority written once, as generators of steps, for blocking code and for coroutines.

Its author writes `acquiring`, `extending`, `reminting`, `releasing`, `inspecting` and `forcing`, which yield
steps of the author's own. `do` takes such a step in blocking code, and `wait_for` of the `AsyncView` takes
all of them in a loop. `Stepped` makes an `Authority` of that.
"""

from __future__ import annotations

import abc
import asyncio
import logging
from collections.abc import Sequence
from typing import Any, ClassVar, Self, TypeVar, Unpack, overload
from weakref import WeakSet

from fencelock._owners import running_loop
from fencelock._steps import Steps, block
from fencelock.authority.base import Grant, Terms, Wish
from fencelock.errors import FencelockError
from fencelock.holder import LockInfo
from fencelock.lease import check_resource
from fencelock.lock.lock import FencedLock
from fencelock.lock.options import LockSettings

_T = TypeVar("_T")

logger = logging.getLogger("fencelock.authority")

#: Event loops in which a blocking lock had to wait, and which the log has told of it.
_warned_of: WeakSet[asyncio.AbstractEventLoop] = WeakSet()


def warn_of_blocked_loop(key: str) -> None:
    """Tell, once for each event loop, that a blocking acquisition keeps it from running."""
    if (loop := running_loop()) is not None and loop not in _warned_of:
        _warned_of.add(loop)
        logger.warning(
            "%s: a blocking lock waits for its holder inside an event loop, which runs nothing meanwhile: no "
            "task of it, and not the holder's either. In coroutines write `async with`, or `await "
            "lock.aio.acquire()`",
            key,
        )


class Stepped(abc.ABC):
    """An `Authority` whose operations are generators of steps. May be used in a `with`, which closes it."""

    #: What else it can do; see `Authority`.
    kinds: ClassVar[frozenset[str]] = frozenset()

    aio: AsyncView

    @abc.abstractmethod
    def acquiring(self, resources: tuple[str, ...], **terms: Unpack[Terms]) -> Steps[Grant]:
        """Do as `Authority.acquire`; the ttl is checked, and `fair` refused or among the `kinds`."""

    @abc.abstractmethod
    def extending(self, wishes: Sequence[Wish]) -> Steps[list[Grant | FencelockError]]:
        """Do as `Authority.extend_many`."""

    @abc.abstractmethod
    def reminting(self, grant: Grant, ttl: float) -> Steps[Grant]:
        """Do as `Authority.remint`."""

    @abc.abstractmethod
    def releasing(self, grant: Grant) -> Steps[bool | None]:
        """Do as `Authority.release`."""

    def vouching(self, grant: Grant) -> Steps[bool]:
        """Tell whether the tokens of a grant that was loaded are those that its locks were granted with."""
        found = yield from self.inspecting(grant.resources)
        granted = {info.resource: info.token for info in found}
        return all(granted.get(name) == its for name, its in zip(grant.resources, grant.tokens, strict=True))

    @abc.abstractmethod
    def inspecting(self, resources: tuple[str, ...]) -> Steps[list[LockInfo]]:
        """Return the locks that are held of these resources; of all, where none is named."""

    @abc.abstractmethod
    def forcing(self, resource: str, token: int | None) -> Steps[LockInfo | None]:
        """Do as `force_release`."""

    @abc.abstractmethod
    def do(self, step: Any) -> Any:
        """Take a step, blocking."""

    @abc.abstractmethod
    def close(self) -> None:
        """Close the connections. Leases that are held end by themselves; using it again connects again."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    @overload
    def lock(self, resource: str, /, **settings: Unpack[LockSettings]) -> FencedLock[int]: ...
    @overload
    def lock(self, *resources: str, **settings: Unpack[LockSettings]) -> FencedLock[tuple[int, ...]]: ...
    def lock(self, *resources: str, **settings: Unpack[LockSettings]) -> Any:
        """Return `fenced_lock(*resources, …)` of this authority, with the same settings.

        Raises:
            TypeError, ValueError: as `fenced_lock` does.
        """
        return FencedLock(resources, lambda: self, **settings)

    def checked(self, resources: tuple[str, ...], **terms: Unpack[Terms]) -> Steps[Grant]:
        """Return `acquiring(…)`, unless this authority cannot do it."""
        if terms.get("fair") and "fair" not in self.kinds:
            raise ValueError(f"{self!r} keeps no waiting line: fair=True needs nodes of Redis or Valkey")
        return self.acquiring(resources, **terms)

    def acquire(self, resources: tuple[str, ...], **terms: Unpack[Terms]) -> Grant:
        return self.run(self.checked(resources, **terms))

    def extend_many(self, wishes: Sequence[Wish]) -> list[Grant | FencelockError]:
        return self.run(self.extending(wishes))

    def remint(self, grant: Grant, ttl: float) -> Grant:
        return self.run(self.reminting(grant, ttl))

    def release(self, grant: Grant) -> bool | None:
        return self.run(self.releasing(grant))

    def vouch(self, grant: Grant) -> bool:
        return self.run(self.vouching(grant))

    def run(self, steps: Steps[_T]) -> _T:
        return block(steps, self.do)

    def holder_ttl(self, resources: tuple[str, ...]) -> float | None:
        """Tell for how many seconds one of them is held: see `Authority`."""
        return _last_end(self.run(self.inspecting(resources)))

    def force_release(self, resource: str, *, token: int | None = None) -> LockInfo | None:
        """Give back what another holds, and return what it was; None where it was free.

        With a token, only the holder that has it loses the lock: repeated, it takes nothing from a successor.

        Nothing stops the holder, which hears of it when it extends its lease. Have a new holder claim what
        the old one may write, so that the database refuses it: `fencelock release --force` does so.

        Raises:
            AuthorityError: it could not be done, or not be told whether it was.
        """
        return self.run(self.forcing(check_resource(resource), token))

    @overload
    def inspect(self, resource: str, /) -> LockInfo | None: ...
    @overload
    def inspect(self, resource: None = None, /) -> list[LockInfo]: ...
    def inspect(self, resource: str | None = None, /) -> LockInfo | list[LockInfo] | None:
        """Tell by whom a resource is held, None where it is free; without one, all that is held.

        Raises:
            AuthorityError: it could not be told.
        """
        if resource is None:
            return self.run(self.inspecting(()))
        return next(iter(self.run(self.inspecting((check_resource(resource),)))), None)


class AsyncView(abc.ABC):
    """A `Stepped` authority for coroutines. May be used in an `async with`, which closes it."""

    def __init__(self, authority: Stepped) -> None:
        self._authority = authority

    def __repr__(self) -> str:
        return f"{self._authority!r}.aio"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.close()

    @abc.abstractmethod
    async def close(self) -> None:
        """Close the connections of the running loop; using it again connects again."""

    async def acquire(self, resources: tuple[str, ...], **terms: Unpack[Terms]) -> Grant:
        """Return leases of all the resources, or of none: see `Authority.acquire`.

        Cancelled, it gives back what it may have acquired, without waiting for that.
        """
        return await self.wait_for(self._authority.checked(resources, **terms))

    async def extend_many(self, wishes: Sequence[Wish]) -> list[Grant | FencelockError]:
        return await self.wait_for(self._authority.extending(wishes))

    async def remint(self, grant: Grant, ttl: float) -> Grant:
        return await self.wait_for(self._authority.reminting(grant, ttl))

    async def release(self, grant: Grant) -> bool | None:
        return await self.wait_for(self._authority.releasing(grant))

    async def vouch(self, grant: Grant) -> bool:
        return await self.wait_for(self._authority.vouching(grant))

    async def holder_ttl(self, resources: tuple[str, ...]) -> float | None:
        return _last_end(await self.wait_for(self._authority.inspecting(resources)))

    @overload
    async def inspect(self, resource: str, /) -> LockInfo | None: ...
    @overload
    async def inspect(self, resource: None = None, /) -> list[LockInfo]: ...
    async def inspect(self, resource: str | None = None, /) -> LockInfo | list[LockInfo] | None:
        """Tell by whom a resource is held: see `Stepped.inspect`."""
        if resource is None:
            return await self.wait_for(self._authority.inspecting(()))
        found = await self.wait_for(self._authority.inspecting((check_resource(resource),)))
        return next(iter(found), None)

    @abc.abstractmethod
    async def wait_for(self, steps: Steps[_T]) -> _T:
        """Take steps to their end, letting other tasks run."""


def _last_end(found: Sequence[LockInfo]) -> float | None:
    return max((info.remaining for info in found), default=None)
