"""The faces of a lock: `FencedLock` blocks and `AsyncLock` awaits what `acquiring` has written once."""

# ruff: noqa: SLF001 - the rooms of a lock are one thing

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from types import EllipsisType
from typing import Any, Generic, Unpack, cast, overload

from fencelock import token
from fencelock.authority.base import Authority, make_locks_with
from fencelock.errors import LockTimeoutError
from fencelock.lease import Lease
from fencelock.lock.acquiring import HANDED, LockSteps, Token
from fencelock.lock.hold import Entry
from fencelock.lock.steps import run_blocking, run_waiting, under_way
from fencelock.renewal.loop import for_loop
from fencelock.renewal.thread import for_thread
from fencelock.settings import DEFAULT_TTL, AllLockSettings, IfLost, default_authority


class FencedLock(LockSteps[Token]):
    """A lock on one or several resources; a context manager that yields the fencing token.

    Made by `fenced_lock` or `Redlock.lock`, for `with` and for `async with`; coroutines find its methods
    under `aio`. The thread (asyncio task, greenlet) that holds a resource enters it again at no cost and
    gets the same token, with this object or another; what is held is given back when the last block is left,
    or, where a transaction that was written under it is still open then, when that ends. May be used again
    afterwards.
    """

    def __repr__(self) -> str:
        names = ", ".join(map(repr, self._resources))
        return f"<fenced_lock {names} {'held' if self._entries else 'not held'}>"

    @property
    def aio(self) -> AsyncLock[Token]:
        """The same lock for coroutines: `await lock.aio.acquire()`."""
        return AsyncLock(self)

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
            timeout: seconds to wait for another holder; None for ever, 0 one try. By default the lock's.

        Raises:
            LockTimeoutError: another holder kept it until the timeout.
            LockLostError: the lease of a resource that was held already ended meanwhile.
            AuthorityError: it could not be decided.
        """
        return self._acquire_lease(Entry(), timeout)

    def try_acquire(self) -> Lease | None:
        """Try once: return the lease, or None if another holder has the lock; errors as for `acquire`."""
        try:
            return self._acquire_lease(Entry(is_try=True), 0)
        except LockTimeoutError:
            return None

    def _acquire_lease(self, entry: Entry, timeout: float | EllipsisType | None) -> Lease:
        try:
            return run_blocking(self._acquire(entry, timeout, for_thread)).leases[0]
        except BaseException:
            run_blocking(self._take_back(entry))
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

        For a COMMIT in doubt: the connection was lost during one, and the guard refuses the lease. Once the
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
        for hold in dict.fromkeys(hold for entry in self._entries for hold in entry.holds):
            hold.tell_when_lost([callback])

    def __enter__(self) -> Token:
        entry = Entry()
        try:
            return self._begin_block(run_blocking(self._acquire(entry, ..., for_thread)))
        except BaseException:
            run_blocking(self._take_back(entry))
            raise

    def __exit__(self, exc_type: object, exc_value: BaseException | None, traceback: object) -> None:
        entry = None
        try:
            entry = self._block_to_leave()
            lost = run_blocking(self._exit(entry))
        except BaseException:
            # A signal handler's, at any line. Until `entry` is known nothing is left, and it is found again.
            if (entry := entry or self._block_to_leave()) is not None:
                run_blocking(self._take_back(entry))
            raise
        self._complain(lost, exc_value)

    async def __aenter__(self) -> Token:
        entry = Entry()
        try:
            return self._begin_block(await run_waiting(self._acquire(entry, ..., for_loop)))
        except BaseException:
            await run_waiting(self._take_back(entry))
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
        return await self._acquire_lease(Entry(), timeout)

    async def try_acquire(self) -> Lease | None:
        """Try once: return the lease, or None if another holder has the lock."""
        try:
            return await self._acquire_lease(Entry(is_try=True), 0)
        except LockTimeoutError:
            return None

    async def _acquire_lease(self, entry: Entry, seconds: float | EllipsisType | None) -> Lease:
        try:
            return (await run_waiting(self._lock._acquire(entry, seconds, for_loop))).leases[0]
        except BaseException:
            await run_waiting(self._lock._take_back(entry))
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


@overload
def fenced_lock(resource: str, /, **settings: Unpack[AllLockSettings]) -> FencedLock[int]: ...


@overload
def fenced_lock(*resources: str, **settings: Unpack[AllLockSettings]) -> FencedLock[tuple[int, ...]]: ...


def fenced_lock(
    *resources: str,
    ttl: float = DEFAULT_TTL,
    timeout: float | None = 10.0,
    renew: bool = True,
    max_hold: float | None = 3600.0,
    fair: bool = False,
    reentrant: bool = True,
    if_lost: IfLost = "raise",
    authority: Authority | None = None,
) -> FencedLock[int] | FencedLock[tuple[int, ...]]:
    """Return a lock on a resource, to be entered with `with` or `async with`: it yields the fencing token.

    ```python
    with fenced_lock("order:1") as token, Session(engine) as session:
        order = claim(session, Order, 1)
        order.status = "paid"
        session.commit()
    ```

    Every lease of a resource has a larger token than all leases that had been acquired before its own
    acquisition began, whatever networks, clocks and pauses do. An older holder may still be at work: that is
    why the storage compares tokens.

    Args:
        *resources: what to lock: 1 to 255 characters each, without control characters. Several are
            acquired together or not at all, and yield a tuple of tokens in their order.
        ttl: seconds that the lease lasts on every node, and by which it is extended.
        timeout: seconds to wait for another holder; None for ever, 0 one try.
        renew: extend the lease in the background, after each third of its ttl, until it is released.
        max_hold: seconds after which a lease is no longer renewed but lost, because a worker that hangs must
            not hold for ever. None for no limit.
        fair: wait in line: first come, first served, as far as a quorum can tell.
        reentrant: let a thread, task or greenlet enter again what it holds. False: LockTimeoutError at once.
        if_lost: what leaving the block does if the lease was lost before, nothing was committed under it and
            the body raised nothing: "raise" LockLostError, or "warn" in the log.
        authority: grants it; by default what `configure()` or FENCELOCK_URL say.

    Raises:
        TypeError: for arguments of the wrong kind; entering raises the errors of `FencedLock.acquire`.
        ValueError: for arguments out of range.
    """
    lock: FencedLock[int] = FencedLock(
        resources,
        ttl=ttl,
        timeout=timeout,
        renew=renew,
        max_hold=max_hold,
        fair=fair,
        reentrant=reentrant,
        if_lost=if_lost,
        authority=authority,
    )
    return lock


def take_over(text: str, **settings: Unpack[AllLockSettings]) -> FencedLock[Any]:
    """Return a lock that was handed over: its first entering extends the lease instead of acquiring it.

    The tokens stay. Each text is for one process. Entering raises LockLostError where the lease has ended.

    Args:
        text: of `FencedLock.hand_over`.
        **settings: as for `fenced_lock`. The ttl is that of the text by default, and max_hold begins anew.

    Raises:
        ValueError: for any other text, also of another kind of authority, or of another namespace.
    """
    settings["authority"] = authority = cast("Any", settings.get("authority") or default_authority())
    try:
        its = json.loads(text)[HANDED]
        grant = authority.load(tuple(its["resources"]), tuple(map(token.check, its["tokens"])), its["proof"])
        by = its["by"]
        settings.setdefault("ttl", its["ttl"])
    except (ValueError, TypeError, AttributeError, LookupError) as error:
        raise ValueError(f"this is no text of hand_over: {str(text)[:80]!r} ({error!r})") from error
    if authority.dump(grant) != its["proof"]:
        raise ValueError(f"{by} has granted this lease, and {authority!r} cannot take it over")
    lock: FencedLock[Any] = fenced_lock(*grant.resources, **settings)
    lock._handed = grant
    return lock


make_locks_with(fenced_lock)
