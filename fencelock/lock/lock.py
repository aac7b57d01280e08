"""The faces of a lock: `FencedLock` blocks and `AsyncLock` awaits what `base` has written once."""

# ruff: noqa: SLF001 - the rooms of a lock are one thing

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine
from types import EllipsisType
from typing import Any, Generic

from fencelock.errors import LockTimeoutError
from fencelock.lease import Lease
from fencelock.lock.base import BaseLock, Token, under_way
from fencelock.lock.hold import Block


class FencedLock(BaseLock[Token]):
    """A lock on one or several resources; a context manager that yields the fencing token.

    Made by `fenced_lock` or `Redlock.lock`, for `with` and for `async with`; coroutines find its methods
    under `aio`. The thread (asyncio task, greenlet) that holds a resource enters it again at no cost and
    gets the same token, with this object or another; the lease is given back when the last block is left,
    or, where a transaction that was written under it is still open then, when that ends. May be used again
    afterwards.
    """

    def __repr__(self) -> str:
        names = ", ".join(map(repr, self._resources))
        return f"<fenced_lock {names} {'held' if self._entered else 'not held'}>"

    @property
    def aio(self) -> AsyncLock[Token]:
        """The same lock for coroutines: `await lock.aio.acquire()`."""
        return AsyncLock(self)

    @property
    def leases(self) -> tuple[Lease, ...]:
        """The leases while held, in the order of the resources; empty otherwise."""
        return self._innermost().leases if self._entered else ()

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
            timeout: seconds to wait for another holder; None for ever, 0 one try. By default the lock's.

        Raises:
            LockTimeoutError: another holder kept it until the timeout.
            LockLostError: the lease of a resource that was held already ended meanwhile.
            AuthorityError: it could not be decided.
        """
        return self._enter(self._new_block(timeout))  # type: ignore[no-any-return]

    def try_acquire(self) -> Lease | None:
        """Try once: return the lease, or None if another holder has the lock; errors as for `acquire`."""
        try:
            return self._enter(self._new_block(0, is_try=True))  # type: ignore[no-any-return]
        except LockTimeoutError:
            return None

    def _enter(self, block: Block) -> Any:
        try:
            return block.authority.run(self._acquire_gen(block))
        except BaseException:
            block.authority.run(self._take_back_gen(block))
            raise

    def extend(self, ttl: float | None = None) -> None:
        """Let the lease live on for `ttl` seconds from now, or for what the lock was made with.

        The token stays. A lease is never shortened. One that is renewed needs no help.

        Raises:
            NotHeldError: the lock is not held.
            LockLostError: the lease has ended; it stays lost.
            AuthorityError: it could not be decided; the lease still ends when it would have.
        """
        block = self._innermost()
        block.authority.run(self._extend_gen(block, ttl))

    def remint(self) -> Token:
        """Exchange the token for a new, larger one, and keep holding the lock; return it.

        For a COMMIT in doubt: its outcome is unknown, and the guard refuses the lease. Once the
        rows are claimed with the new token (or their gate is passed), nothing that is under way with the old
        one can be written any more. In this order: roll back, remint, load again. Statements without objects
        also need a claim before them.

        Raises:
            NotHeldError: the lock is not held.
            LockLostError: it could not be done; the lease has ended.
        """
        block = self._innermost()
        return block.authority.run(self._remint_gen(block))  # type: ignore[no-any-return]

    def locked(self) -> bool:
        """Tell whether a holder anywhere, also in this process, has one of the resources at this moment."""
        authority = self._find_authority()
        return authority.run(self._locked_gen(authority))

    def cancel(self) -> None:
        """Give up the acquisitions of this lock that wait for another holder, in whatever thread or task.

        Within about a second each raises a LockTimeoutError, and leaves no lock behind.
        """
        for block, lock in list(under_way.items()):
            block.given_up = block.given_up or lock is self

    def hand_over(self) -> str:
        """End the holding here without giving the lock back; return a text for another process's `take_over`.

        Nothing renews the lease on its way. A LockError says where the lock was entered more than once, or a
        transaction needs it; then it stays held. Other errors are as for `remint`.
        """
        block = self._innermost()
        return block.authority.run(self._hand_over_gen(block))

    def release(self) -> None:
        """Give the lock back; where it was entered several times, leave one block.

        Where too few nodes answer to do so, it ends by itself with its ttl, and a warning is logged.

        Raises:
            NotHeldError: the lock is not held.
            LockLostError: the lease had ended before, and nothing was committed under it.
        """
        block = self._innermost(to_leave=True)
        if (lost := block.authority.run(self._leave_gen(block))) is not None:
            self._complain(lost, None)

    def on_lost(self, callback: Callable[[Lease], object]) -> None:
        """Have a function called with the lease when it is found to be lost, once for each lease.

        It is called when the lease could not be renewed: for blocking code in a thread of its own, for
        coroutines by the event loop, so `task.cancel` makes sense there. The work under the lease is not
        interrupted; the guard will refuse its writes. Without `renew`, and after a pause, the loss may be
        found only when the block is left. Where the lease is lost already it is called at once.

        Raises:
            TypeError: for anything but a plain function.
        """
        given: object = callback
        if not callable(given) or inspect.iscoroutinefunction(given):
            raise TypeError(f"on_lost calls a plain function with the lease, and {callback!r} is none")
        self._listeners = (*self._listeners, callback)
        for hold in dict.fromkeys(hold for block in self._entered for hold in block.holds):
            hold.tell_when_lost([callback])

    def __enter__(self) -> Token:
        return self._enter(self._new_block(is_with=True))  # type: ignore[no-any-return]

    def __exit__(self, exc_type: object, exc_value: BaseException | None, traceback: object) -> None:
        block = lost = None
        try:
            if (block := self._block_to_leave()) is not None:
                lost = block.authority.run(self._leave_gen(block, is_exit=True))
        except BaseException:
            # A signal handler's, at any line. Until `block` is known nothing is left, and it is found again.
            if (block := block or self._block_to_leave()) is not None:
                block.authority.run(self._take_back_gen(block))
            raise
        if lost is not None:
            self._complain(lost, exc_value)

    async def _enter_async(self, block: Block) -> Any:
        try:
            return await block.authority.aio.run(self._acquire_gen(block, in_loop=True))
        except BaseException:
            if block.grant is not None or block.holds:  # or else no loop may be there any more
                await block.authority.aio.run(self._take_back_gen(block))
            raise

    def __aenter__(self) -> Coroutine[Any, Any, Token]:
        return self._enter_async(self._new_block(is_with=True))

    async def __aexit__(self, exc_type: object, exc_value: BaseException | None, traceback: object) -> None:
        if (block := self._block_to_leave()) is not None:
            lost = await block.authority.aio.run(self._leave_gen(block, is_exit=True))
            if lost is not None:
                self._complain(lost, exc_value)


class AsyncLock(Generic[Token]):
    """The methods of a `FencedLock` for coroutines: the same names, the same promises.

    A cancelled acquisition leaves no lease behind; a cancelled release is sent all the same.
    """

    __slots__ = ("_lock",)

    def __init__(self, lock: FencedLock[Token]) -> None:
        self._lock: FencedLock[Token] = lock

    def __repr__(self) -> str:
        return f"{self._lock!r}.aio"

    async def acquire(self, timeout: float | EllipsisType | None = ...) -> Lease:  # noqa: ASYNC109 - how long others may hold it
        """Wait for the lock and return its lease: see `FencedLock.acquire`."""
        return await self._lock._enter_async(self._lock._new_block(timeout))  # type: ignore[no-any-return]

    async def try_acquire(self) -> Lease | None:
        """Try once: return the lease, or None if another holder has the lock."""
        try:
            return await self._lock._enter_async(self._lock._new_block(0, is_try=True))  # type: ignore[no-any-return]
        except LockTimeoutError:
            return None

    async def extend(self, ttl: float | None = None) -> None:
        """Let the lease live on: see `FencedLock.extend`."""
        block = self._lock._innermost()
        await block.authority.aio.run(self._lock._extend_gen(block, ttl))

    async def remint(self) -> Token:
        """Exchange the token for a new, larger one, and keep holding the lock: see `FencedLock.remint`."""
        block = self._lock._innermost()
        return await block.authority.aio.run(self._lock._remint_gen(block))

    async def locked(self) -> bool:
        """Tell whether a holder anywhere has one of the resources at this moment: see `FencedLock.locked`."""
        authority = self._lock._find_authority()
        return await authority.aio.run(self._lock._locked_gen(authority))

    async def hand_over(self) -> str:
        """End the holding here without giving the lock back: see `FencedLock.hand_over`."""
        block = self._lock._innermost()
        return await block.authority.aio.run(self._lock._hand_over_gen(block))

    async def release(self) -> None:
        """Give the lock back: see `FencedLock.release`."""
        block = self._lock._innermost(to_leave=True)
        if (lost := await block.authority.aio.run(self._lock._leave_gen(block))) is not None:
            self._lock._complain(lost, None)
