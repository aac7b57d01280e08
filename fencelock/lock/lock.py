"""The faces of a lock: `FencedLock` blocks and `AsyncLock` awaits what `acquiring` has written once."""

# ruff: noqa: SLF001 - the rooms of a lock are one thing

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import EllipsisType
from typing import Generic

from fencelock.errors import LockTimeoutError
from fencelock.lease import Lease
from fencelock.lock.acquiring import LockSteps, Token
from fencelock.lock.block import Block
from fencelock.lock.steps import run_blocking, run_waiting, under_way
from fencelock.renewal.loop import for_loop
from fencelock.renewal.thread import for_thread


class FencedLock(LockSteps[Token]):
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
        return self._acquire_lease(Block(), timeout)

    def try_acquire(self) -> Lease | None:
        """Try once: return the lease, or None if another holder has the lock; errors as for `acquire`."""
        try:
            return self._acquire_lease(Block(is_try=True), 0)
        except LockTimeoutError:
            return None

    def _acquire_lease(self, block: Block, timeout: float | EllipsisType | None) -> Lease:
        try:
            return run_blocking(self._acquire(block, timeout, for_thread)).leases[0]
        except BaseException:
            run_blocking(self._take_back(block))
            raise

    def extend(self, ttl: float | None = None) -> None:
        """Let the lease live on for `ttl` seconds from now, or for what the lock was made with.

        The token stays. A lease is never shortened. One that is renewed needs no help.

        Raises:
            NotHeldError: the lock is not held.
            LockLostError: the lease has ended; it stays lost.
            AuthorityError: it could not be decided; the lease still ends when it would have.
        """
        run_blocking(self._extend(ttl))

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
        return run_blocking(self._remint())  # type: ignore[no-any-return]

    def locked(self) -> bool:
        """Tell whether a holder anywhere, also in this process, has one of the resources at this moment."""
        return run_blocking(self._locked())

    def cancel(self) -> None:
        """Give up the acquisitions of this lock that wait for another holder, in whatever thread or task.

        Within about a second each raises a LockTimeoutError, and leaves no lock behind.
        """
        for asked in list(under_way):
            asked.given_up = asked.given_up or asked.lock is self

    def hand_over(self) -> str:
        """End the holding here without giving the lock back; return a text for another process's `take_over`.

        Nothing renews the lease on its way. A LockError says where the lock was entered more than once, or a
        transaction needs it; then it stays held. Other errors are as for `remint`.
        """
        return run_blocking(self._hand_over())

    def release(self) -> None:
        """Give the lock back; where it was entered several times, leave one block.

        Where too few nodes answer to do so, it ends by itself with its ttl, and a warning is logged.

        Raises:
            NotHeldError: the lock is not held.
            LockLostError: the lease had ended before, and nothing was committed under it.
        """
        run_blocking(self._release())

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
        block = Block()
        try:
            return self._begin_block(run_blocking(self._acquire(block, ..., for_thread)))
        except BaseException:
            run_blocking(self._take_back(block))
            raise

    def __exit__(self, exc_type: object, exc_value: BaseException | None, traceback: object) -> None:
        block = None
        try:
            block = self._block_to_leave()
            lost = run_blocking(self._exit(block))
        except BaseException:
            # A signal handler's, at any line. Until `block` is known nothing is left, and it is found again.
            if (block := block or self._block_to_leave()) is not None:
                run_blocking(self._take_back(block))
            raise
        self._complain(lost, exc_value)

    async def __aenter__(self) -> Token:
        block = Block()
        try:
            return self._begin_block(await run_waiting(self._acquire(block, ..., for_loop)))
        except BaseException:
            await run_waiting(self._take_back(block))
            raise

    async def __aexit__(self, exc_type: object, exc_value: BaseException | None, traceback: object) -> None:
        self._complain(await run_waiting(self._exit(self._block_to_leave())), exc_value)


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
        return await self._acquire_lease(Block(), timeout)

    async def try_acquire(self) -> Lease | None:
        """Try once: return the lease, or None if another holder has the lock."""
        try:
            return await self._acquire_lease(Block(is_try=True), 0)
        except LockTimeoutError:
            return None

    async def _acquire_lease(self, block: Block, seconds: float | EllipsisType | None) -> Lease:
        try:
            return (await run_waiting(self._lock._acquire(block, seconds, for_loop))).leases[0]
        except BaseException:
            await run_waiting(self._lock._take_back(block))
            raise

    async def extend(self, ttl: float | None = None) -> None:
        """Let the lease live on: see `FencedLock.extend`."""
        await run_waiting(self._lock._extend(ttl))

    async def remint(self) -> Token:
        """Exchange the token for a new, larger one, and keep holding the lock: see `FencedLock.remint`."""
        return await run_waiting(self._lock._remint())

    async def locked(self) -> bool:
        """Tell whether a holder anywhere has one of the resources at this moment: see `FencedLock.locked`."""
        return await run_waiting(self._lock._locked())

    async def hand_over(self) -> str:
        """End the holding here without giving the lock back: see `FencedLock.hand_over`."""
        return await run_waiting(self._lock._hand_over())

    async def release(self) -> None:
        """Give the lock back: see `FencedLock.release`."""
        await run_waiting(self._lock._release())
