"""The lock classes of users: `FencedLock`, and `AsyncLock` with its methods for coroutines."""

# ruff: noqa: SLF001 - the modules of a lock share private names

from __future__ import annotations

from collections.abc import Callable, Coroutine
from types import EllipsisType
from typing import Any, Generic

from fencelock._checks import check_callback
from fencelock._owners import running_loop
from fencelock.authority.base import warn_of_blocked_loop
from fencelock.errors import LockTimeoutError
from fencelock.lease import Lease
from fencelock.lock.base import BaseLock, Token
from fencelock.lock.hold import Block, under_way


class FencedLock(BaseLock[Token]):
    """A lock on one or several resources; a context manager that yields the fencing token.

    ```python
    lock = fenced_lock("order:1")
    lock.on_lost(lambda lease: print(lease.why_lost))
    if lock.try_acquire():                       # or lock.acquire(timeout=5), which waits
        lock.extend(60)
        token = lock.remint()                    # the old token writes nothing more
        lock.release()
    lock.locked()                                # False
    lock.cancel()                                # ends the waiting of other threads for this object

    lock.acquire()
    text = lock.hand_over()                      # for `take_over` in another process
    ```

    `fenced_lock` and the method `lock` of an authority return it, for `with` and for `async with`; `aio` has
    its methods for coroutines. A thread (task, greenlet) that holds a resource can lock it again, with
    this object or another (unless `reentrant=False`), and gets the same token. The lease is not released
    before its last block and the transactions under it have ended. Then the object can be used again.
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
        """The leases in the order of the resources; empty if the lock is not held."""
        return self._innermost().leases if self._entered else ()

    @property
    def lease(self) -> Lease:
        """The lease; with several resources, the lease of the first one.

        Raises:
            NotHeldError: the lock is not held.
        """
        return self._innermost().leases[0]

    def acquire(self, timeout: float | EllipsisType | None = ...) -> Lease:
        """Wait for the lock and return its lease; with several resources, the lease of the first one.

        Args:
            timeout: seconds to wait for another holder; None for ever, 0 one try. By default, the lock's.

        Raises:
            LockTimeoutError: it was not free in time, `cancel` was called, or `reentrant=False` forbids it.
            LockLostError: a lease that the caller held before, or one that was handed over, has ended.
            AuthorityError: the authority did not answer, or must not grant a lease now.
            LockError: the process ends, or the caller would wait for itself.
            ValueError: the authority cannot be `fair`, or does not allow this ttl or so many names; or the
                timeout is negative.
            TypeError: the timeout is no number.
        """
        return self._enter(self._new_block(timeout))  # type: ignore[no-any-return]

    def try_acquire(self) -> Lease | None:
        """Try once; return the lease, or None instead of LockTimeoutError; other errors as for `acquire`."""
        try:
            return self._enter(self._new_block(0, is_try=True))  # type: ignore[no-any-return]
        except LockTimeoutError:
            return None

    def _enter(self, block: Block) -> Any:
        if (loop := running_loop()) is not None:
            warn_of_blocked_loop(loop, self)
        try:
            return block.authority.run(self._acquire_gen(block))
        except BaseException:
            block.authority.run(self._leave_gen(block))
            raise

    def extend(self, ttl: float | None = None) -> None:
        """Extend the lease to `ttl` seconds from now; by default, to the ttl of the lock.

        The token does not change. A lease is never shortened. With `renew=True`, no call is needed.

        Raises:
            NotHeldError: the lock is not held.
            LockLostError: the lease has ended; it stays lost.
            AuthorityError: the authority did not answer, or refused; the lease ends as before this call.
            TypeError, ValueError: the ttl is no number, or out of range.
        """
        block = self._innermost()
        block.authority.run(self._extend_gen(block, ttl))

    def remint(self) -> Token:
        """Exchange the token for a new, larger one, and return it; the lock stays held.

        Call it when the outcome of a COMMIT is unknown, because the guard then refuses the old token. First
        roll back, then remint, then load the objects again. Before a statement that writes without objects,
        claim its rows (or pass their gate): after that, the old token can write nothing to them.

        Returns:
            The new token; with several resources, a tuple of tokens.

        Raises:
            NotHeldError: the lock is not held.
            LockLostError, AuthorityError: there is no new token, and the lease is lost.
        """
        block = self._innermost()
        return block.authority.run(self._remint_gen(block))  # type: ignore[no-any-return]

    def locked(self) -> bool:
        """Return whether one of the resources is held; of a semaphore or shared lock, whether all slots are.

        Raises:
            AuthorityError: the authority did not answer, or cannot tell.
        """
        authority = self._find_authority()
        return authority.run(self._locked_gen(authority))

    def cancel(self) -> None:
        """Cancel the acquisitions of this lock object that wait, in all threads and tasks of this process.

        Each of them raises a LockTimeoutError within about a second, and leaves no lease behind.
        """
        for block, lock in list(under_way.items()):
            block.given_up = block.given_up or lock is self

    def hand_over(self) -> str:
        """Stop holding the lock without a release; return a text for `take_over` in another process.

        Nothing renews the lease until `take_over` is called and the lock it returns is entered.

        Raises:
            NotHeldError: the lock is not held.
            LockLostError: the lease has ended.
            LockError: it was entered twice or in parts, or a transaction is open or in doubt. It stays held.
        """
        block = self._innermost()
        return block.authority.run(self._hand_over_gen(block))

    def release(self) -> None:
        """Release the lock; if it was entered several times, leave one block.

        If the authority does not answer, the lease ends with its ttl at the latest, and a warning is logged.

        Raises:
            NotHeldError: the lock is not held.
            LockLostError: the lease had ended before. With `if_lost="warn"`, or if work was committed under
                it and no transaction is open or in doubt, a warning is logged instead.
        """
        block = self._innermost(to_leave=True)
        if (lost := block.authority.run(self._leave_gen(block, is_release=True))) is not None:
            self._complain(lost, None)

    def on_lost(self, callback: Callable[[Lease], object]) -> None:
        """Call a function with the lease when its loss is found, once for each lease.

        If renewal finds the loss, the function is called in a new thread for blocking code. For coroutines,
        the event loop calls it, so that it can call `task.cancel`. The work under the lease is not
        interrupted, but the guard refuses its writes. Without `renew`, or if the process was paused, the loss
        may be found only when the block is left. If the lease is lost already, the function is called now.

        Raises:
            TypeError: `callback` cannot be called, or is a coroutine function.
        """
        check_callback("on_lost", "lease", callback)
        self._listeners = (*self._listeners, callback)
        for hold in dict.fromkeys(hold for block in self._entered for hold in block.holds):
            hold.tell_when_lost([callback])

    def __enter__(self) -> Token:
        return self._enter(self._new_block(is_with=True))  # type: ignore[no-any-return]

    def __exit__(self, exc_type: object, exc_value: BaseException | None, traceback: object) -> None:
        block = lost = None
        try:
            if (block := self._block_to_leave()) is not None:
                lost = block.authority.run(self._leave_gen(block))
        except BaseException:
            # Perhaps a signal handler's, before `_leave_gen` began. Without a block, none was left: find it.
            if (block := block or self._block_to_leave()) is not None:
                block.authority.run(self._leave_gen(block))
            raise
        if lost is not None:
            self._complain(lost, exc_value)

    async def _enter_async(self, block: Block) -> Any:
        block.in_loop = True
        try:
            return await block.authority.aio.run(self._acquire_gen(block))
        except BaseException:
            if block.grant is not None or block.holds:  # otherwise the loop may be closed already
                await block.authority.aio.run(self._leave_gen(block))
            raise

    def __aenter__(self) -> Coroutine[Any, Any, Token]:
        return self._enter_async(self._new_block(is_with=True))

    async def __aexit__(self, exc_type: object, exc_value: BaseException | None, traceback: object) -> None:
        if (block := self._block_to_leave()) is not None:
            lost = await block.authority.aio.run(self._leave_gen(block))
            if lost is not None:
                self._complain(lost, exc_value)


class AsyncLock(Generic[Token]):
    """The methods of a `FencedLock` for coroutines, with the same names and the same guarantees.

    ```python
    lock = fenced_lock("order:2").aio
    if await lock.try_acquire():                 # or await lock.acquire(timeout=5), which waits
        await lock.extend(60)
        token = await lock.remint()              # the old token writes nothing more
        await lock.release()
    await lock.locked()                          # False

    await lock.acquire()
    text = await lock.hand_over()                # for `take_over` in another process
    ```

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
        """Try once: return the lease, or None: see `FencedLock.try_acquire`."""
        try:
            return await self._lock._enter_async(self._lock._new_block(0, is_try=True))  # type: ignore[no-any-return]
        except LockTimeoutError:
            return None

    async def extend(self, ttl: float | None = None) -> None:
        """Extend the lease: see `FencedLock.extend`."""
        block = self._lock._innermost()
        await block.authority.aio.run(self._lock._extend_gen(block, ttl))

    async def remint(self) -> Token:
        """Exchange the token for a new, larger one: see `FencedLock.remint`."""
        block = self._lock._innermost()
        return await block.authority.aio.run(self._lock._remint_gen(block))

    async def locked(self) -> bool:
        """Return whether the lock is held at this moment: see `FencedLock.locked`."""
        authority = self._lock._find_authority()
        return await authority.aio.run(self._lock._locked_gen(authority))

    async def hand_over(self) -> str:
        """Stop holding the lock without a release: see `FencedLock.hand_over`."""
        block = self._lock._innermost()
        return await block.authority.aio.run(self._lock._hand_over_gen(block))

    async def release(self) -> None:
        """Release the lock: see `FencedLock.release`."""
        block = self._lock._innermost(to_leave=True)
        leaving = self._lock._leave_gen(block, is_release=True)
        if (lost := await block.authority.aio.run(leaving)) is not None:
            self._lock._complain(lost, None)
