"""Locks that several holders can have at once: a semaphore, and a lock for many readers or one writer.

They need no protocol of their own, because each slot is an ordinary resource, such as `gpu#2`. A holder of a
semaphore, or a reader, holds one of the slots. A writer holds the resource itself and all slots.
"""

from __future__ import annotations

import asyncio
import math
import os
import random
import re
import time
from collections.abc import Callable, Sequence
from typing import Any, Final
from weakref import WeakKeyDictionary

from fencelock._checks import check_flag
from fencelock._generators import Call, Steps
from fencelock.authority.base import Authority, Grant, lock_makers
from fencelock.errors import LockError, LockTimeoutError, QuorumError
from fencelock.lease import check_resource
from fencelock.lock.base import Token, enter
from fencelock.lock.hold import Block, Hold
from fencelock.lock.lock import FencedLock

MAX_SLOTS: Final = 1000
_PATIENCE: Final = 0.1  # seconds to wait for one slot before all slots are checked again
_SLOWLY: Final = 2.0  # the most seconds for a try for one slot that has got no answer before
_MOMENT: Final = 1.0
"""Seconds for which all slots are taken to be held after an acquisition has waited for one."""
_MOST_NAMES: Final = 10_000  # the most entries of `_checked`, and of `_full_at`, for each authority
_LOOKED_AT: Final = 64
"""How many slots above this program's last one are checked, because other programs may have more slots."""

_full_at: WeakKeyDictionary[Authority, dict[str, float]] = WeakKeyDictionary()
"""By authority and name: when an acquisition of this process last ended a wait (`time.monotonic`)."""

_checked: WeakKeyDictionary[Authority, set[tuple[str, int]]] = WeakKeyDictionary()
"""By authority: each name and number of slots for which the higher slots were once found free."""


def make_lock(
    resources: tuple[str, ...],
    find_authority: Callable[[], Authority],
    *,
    shared: bool = False,
    readers: int | None = None,
    **settings: Any,
) -> FencedLock[Any]:
    """Return a `FencedLock`; with `readers`, a `WriterLock`, or a `ReaderLock` if `shared`."""
    if not check_flag("shared", shared) and readers is None:
        for each in resources if "#" in str(resources) else ():
            check_name(each)
        return FencedLock(resources, find_authority, **settings)
    if len(resources) != 1:
        raise TypeError(f"a lock with readers has one resource, not {len(resources)}")
    if readers is None:
        raise ValueError(
            "readers= is missing, the number that may read at once: write shared=True, readers=16, the "
            "same in all programs"
        )
    kind = ReaderLock if shared else WriterLock
    return kind(check_name(resources[0]), check_slots("readers", readers), find_authority, **settings)


lock_makers.append(make_lock)


def check_name(name: object) -> str:
    resource = check_resource(name)
    if re.search(r"#\d+$", resource):
        raise ValueError(f"{resource!r} is the name of a slot: no other lock's name ends with # and a number")
    return resource


def check_slots(setting: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{setting} is a whole number, not {value!r}")
    if not 1 <= value <= MAX_SLOTS:
        raise ValueError(f"{setting} is a number from 1 to {MAX_SLOTS}, not {value}")
    return value


def slot_names(name: str, first: int, end: int) -> tuple[str, ...]:
    return tuple([f"{name}#{number}" for number in range(first, end)])


def _wait_for_higher_gen(block: Block, name: str, count: int) -> Steps[None]:
    """Wait until the slots above this program's were free once: programs with more slots may hold them."""
    checked = _checked.setdefault(block.authority, set())
    end = math.inf if block.timeout is None else time.monotonic() + block.timeout
    while (name, count) not in checked:
        higher = yield from block.authority.inspect_gen(slot_names(name, count, count + _LOOKED_AT))
        if not higher:
            _make_room(checked)
            checked.add((name, count))
        elif time.monotonic() >= end:
            raise LockTimeoutError(
                f"{higher[0].resource!r} is held, and this program has {count} slots of {name!r}: give all "
                "programs the same number (slots=, readers=), or wait until the programs with more slots "
                "have ended",
                holder_ttl=higher[0].remaining,
            )
        else:
            yield Call(lambda: time.sleep(_PATIENCE), lambda: asyncio.sleep(_PATIENCE))


def _make_room(names: Any) -> None:
    """Forget all names if there are too many; this only costs requests later."""
    if len(names) >= _MOST_NAMES:
        names.clear()


class _OnSlots(FencedLock[Token]):
    """A lock that holds slots."""

    def _try_gen(self, block: Block, names: tuple[str, ...], end: float) -> Steps[Grant]:
        """Try for `block.timeout`; if no answer comes in that time, for as long as the caller has, or 2 s."""
        try:
            return (yield from super()._grant_gen(block, names))
        except QuorumError:
            left = end - time.monotonic()
            if left <= 0:
                raise
            block.timeout = min(_SLOWLY, left)
            return (yield from super()._grant_gen(block, names))

    def _hand_over_gen(self, block: Block) -> Steps[str]:  # noqa: ARG002  it hands over no block
        raise LockError(f"{self!r} is not handed over, because it holds slots: let the other process lock it")


class OneOf(_OnSlots[Token]):
    """A lock on one of several slots, whichever is free."""

    def __init__(
        self, name: str, count: int, find_authority: Callable[[], Authority], **settings: Any
    ) -> None:
        super().__init__(slot_names(name, 0, count), find_authority, **settings)
        self._name = name

    def _enter_again_gen(
        self, block: Block, held: Sequence[Hold], names: tuple[str, ...]
    ) -> Steps[tuple[str, ...]]:
        """Enter one hold that the owner has of a slot, also as a writer; return no names then."""
        if not self._reentrant:
            return names
        yield from super()._enter_again_gen(block, held[:1], names)
        if not block.holds:  # it was released meanwhile, or a lease is handed over
            return names
        its = block.holds[0].grant.resources
        block.names = (next(name for name in its if name in names),)
        return ()

    def _grant_gen(self, block: Block, missing: tuple[str, ...]) -> Steps[Grant]:
        yield from _wait_for_higher_gen(block, self._name, len(missing))
        full = _full_at.setdefault(block.authority, {})
        timeout, end = block.timeout, math.inf if block.timeout is None else time.monotonic() + block.timeout
        # The hash gives each owner its first slot. The owner waits at once if all were held a moment ago.
        name = missing[hash((os.getpid(), block.owner)) % len(missing)]
        is_full = time.monotonic() < full.get(self._name, -math.inf) + _MOMENT
        block.timeout = min(_PATIENCE, end - time.monotonic()) if is_full and timeout != 0 else 0
        try:
            while True:
                try:
                    # Assigned here, because a signal handler may raise before the caller assigns it.
                    block.grant = grant = yield from self._try_gen(block, (name,), end)
                except LockTimeoutError:
                    held = yield from block.authority.inspect_gen(missing)
                else:
                    block.names = (name,)
                    return grant
                left, free = end - time.monotonic(), {*missing} - {info.resource for info in held}
                waiters = {info.resource: info.waiters or 0 for info in held}
                fewest = min(waiters.values(), default=0)
                shortest = [each for each, count in waiters.items() if count == fewest]
                name = random.choice([*free] or shortest)  # noqa: S311 - no secret
                block.timeout = max(0.0, min(_PATIENCE, left))
                if left <= 0 and (not free or left < -_PATIENCE):
                    ttl = min((info.remaining for info in held), default=None)
                    raise LockTimeoutError(self._said_of_full, holder_ttl=ttl)
        finally:
            block.timeout = timeout
            if block.had_to_wait:
                _make_room(full)
                full[self._name] = time.monotonic()

    @property
    def _said_of_full(self) -> str:
        return f"all slots of {self._name!r} ({len(self._resources)}) are held by others"

    def _locked_gen(self, authority: Authority) -> Steps[bool]:
        return len((yield from authority.inspect_gen(self._resources))) == len(self._resources)


class ReaderLock(OneOf[int]):
    """A shared lock: a reader holds one of the slots, and a writer needs all of them."""

    @property
    def _said_of_full(self) -> str:
        return f"{self._name!r} is held by a writer, or by {len(self._resources)} readers"

    def __repr__(self) -> str:
        return f"<fenced_lock {self._name!r} shared, {'held' if self._entered else 'not held'}>"


class FencedSemaphore(OneOf[tuple[int, int]]):
    """A lock that several holders can have at once, from `fenced_semaphore`; it yields slot and token."""

    def __repr__(self) -> str:
        state = "held" if self._entered else "not held"
        return f"<fenced_semaphore {self._name!r} of {len(self._resources)} slots, {state}>"

    @property
    def slot(self) -> int:
        """The number of the slot that is held.

        Raises:
            NotHeldError: no slot is held.
        """
        return _slot_of(self._innermost())

    def _acquire_gen(self, block: Block) -> Steps[Any]:
        found = yield from super()._acquire_gen(block)
        return (_slot_of(block), found) if block.is_with else found

    def _remint_gen(self, block: Block) -> Steps[Any]:
        token = yield from super()._remint_gen(block)
        return _slot_of(block), token


def _slot_of(block: Block) -> int:
    return int(block.names[0].rpartition("#")[2])


class WriterLock(_OnSlots[int]):
    """A lock on a resource and on all slots of its readers."""

    def __init__(
        self, name: str, readers: int, find_authority: Callable[[], Authority], **settings: Any
    ) -> None:
        super().__init__((name, *slot_names(name, 0, readers)), find_authority, **settings)
        self._names = (name,)

    def __repr__(self) -> str:
        return f"<fenced_lock {self._names[0]!r} beside readers, {'held' if self._entered else 'not held'}>"

    def _enter_again_gen(
        self, block: Block, held: Sequence[Hold], names: tuple[str, ...]
    ) -> Steps[tuple[str, ...]]:
        if self._names[0] not in held[0].grant.resources:
            raise LockError(
                f"{self!r}: this thread, task or greenlet holds a shared lock of it, and would wait for "
                "itself: leave that first, then lock, and read again"
            )
        return (yield from super()._enter_again_gen(block, held, names))

    def _grant_gen(self, block: Block, missing: tuple[str, ...]) -> Steps[Grant]:
        """Try to acquire all at once; else acquire the resource, to keep writers out, and then each slot."""
        yield from _wait_for_higher_gen(block, self._names[0], len(self._resources) - 1)
        timeout, block.timeout = block.timeout, 0
        end = math.inf if timeout is None else time.monotonic() + timeout
        try:
            try:
                return (yield from self._try_gen(block, missing, end))
            except LockTimeoutError:
                if timeout == 0:
                    raise
            for name in missing[:-1]:
                yield from self._collect_gen(block, name, end)
            block.timeout = _left_until(end)
            return (yield from super()._grant_gen(block, missing[-1:]))
        finally:
            block.timeout = timeout

    def _explain_gen(
        self, caught: BaseException, block: Block, missing: tuple[str, ...], began: float
    ) -> Steps[None]:
        collected = {name for hold in block.holds for name in hold.grant.resources}
        waited_for = tuple([name for name in missing if name not in collected])
        return super()._explain_gen(caught, block, waited_for, began)

    def _collect_gen(self, block: Block, name: str, end: float) -> Steps[None]:
        """Acquire one resource for the block; with `renew`, it is renewed while the others are acquired."""
        block.timeout = _left_until(end)
        block.grant = yield from super()._grant_gen(block, (name,))
        hold = self._new_hold(block, block.grant)
        enter(block, (*block.holds, hold))
        if hold.renewer is not None:
            hold.renewer.add(hold)


def _left_until(end: float) -> float | None:
    return None if end == math.inf else max(0.0, end - time.monotonic())
