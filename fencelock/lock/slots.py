"""Locks of several holders: a semaphore, and readers beside each other with writers alone.

They have no protocol of their own. A slot is a resource, such as `gpu#2`. A holder of a semaphore, or a
reader, has one of the slots. A writer has the resource itself and all slots.
"""

from __future__ import annotations

import functools
import random
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from fencelock._generators import Steps
from fencelock.authority.base import Authority, Grant
from fencelock.errors import LockTimeoutError
from fencelock.lock.base import Token
from fencelock.lock.hold import Block, Hold
from fencelock.lock.lock import FencedLock
from fencelock.lock.waiting import go_on_waiting

MAX_SLOTS: Final = 1000
_PATIENCE: Final = 0.1
"""Seconds to wait for one slot before the others are tried again."""


def slot_names(name: str, count: int) -> tuple[str, ...]:
    return tuple([f"{name}#{number}" for number in range(count)])


def check_slots(setting: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{setting} is a whole number, not {value!r}")
    if not 1 <= value <= MAX_SLOTS:
        raise ValueError(f"{setting} is a number from 1 to {MAX_SLOTS}, not {value}")
    return value


class OneOf(FencedLock[Token]):
    """A lock on one of several slots, whichever is free."""

    def __init__(
        self, name: str, count: int, find_authority: Callable[[], Authority], **settings: Any
    ) -> None:
        super().__init__(slot_names(name, count), find_authority, **settings)
        self._name = name

    def _enter_again_gen(
        self, block: Block, held: Sequence[Hold], names: tuple[str, ...]
    ) -> Steps[tuple[str, ...]]:
        """Enter the slot that the owner has already."""
        if not self._reentrant or self._handed is not None:
            return names
        yield from super()._enter_again_gen(block, held[:1], names)
        if not block.holds:  # it was released meanwhile
            return names
        block.names = block.holds[0].grant.resources
        return ()

    def _grant_gen(self, block: Block, missing: tuple[str, ...], *, in_loop: bool) -> Steps[Grant]:
        if self._handed is not None:
            return (yield from super()._grant_gen(block, missing, in_loop=in_loop))
        its = block.authority.aio if in_loop else block.authority
        go_on = functools.partial(go_on_waiting, block, missing, self.template)
        for name, patience in _tries(missing, block.timeout):
            try:
                grant = yield from its.acquire_gen(
                    (name,), ttl=self._ttl, timeout=patience, fair=self._fair, go_on=go_on
                )
            except LockTimeoutError as error:
                failed = error
            else:
                block.names = grant.resources
                return grant
        raise LockTimeoutError(
            f"all {len(missing)} slots of {self._name!r} are held by others", holder_ttl=failed.holder_ttl
        )


def _tries(names: Sequence[str], timeout: float | None) -> Iterator[tuple[str, float]]:
    """Yield which slot to try next, and for how many seconds: each at once, then one for a while."""
    end = None if timeout is None else time.monotonic() + timeout
    while True:
        order = random.sample(names, len(names))
        yield from ((name, 0.0) for name in order)
        left = _PATIENCE if end is None else min(_PATIENCE, end - time.monotonic())
        if left <= 0:
            return
        yield order[0], left


class FencedSemaphore(OneOf[tuple[int, int]]):
    """A lock that a number of holders have at once; `fenced_semaphore` makes it. It yields slot and token."""

    def __repr__(self) -> str:
        state = "held" if self._entered else "not held"
        return f"<fenced_semaphore {self._name!r} of {len(self._resources)} slots, {state}>"

    @property
    def slot(self) -> int:
        """The number of the slot that is held.

        Raises:
            NotHeldError: none is held.
        """
        return _slot_of(self._innermost())

    def _acquire_gen(self, block: Block, *, in_loop: bool = False) -> Steps[Any]:
        found = yield from super()._acquire_gen(block, in_loop=in_loop)
        return (_slot_of(block), found) if block.is_with else found

    def _remint_gen(self, block: Block) -> Steps[Any]:
        token = yield from super()._remint_gen(block)
        return _slot_of(block), token


def _slot_of(block: Block) -> int:
    return int(block.names[0].rpartition("#")[2])


class WriterLock(FencedLock[int]):
    """A lock on a resource and on all slots of its readers."""

    def __init__(
        self, name: str, readers: int, find_authority: Callable[[], Authority], **settings: Any
    ) -> None:
        super().__init__((name, *slot_names(name, readers)), find_authority, **settings)
        self._names = (name,)

    def _grant_gen(self, block: Block, missing: tuple[str, ...], *, in_loop: bool) -> Steps[Grant | None]:
        """Acquire all at once; else the resource, so that no other writer begins, and slot after slot."""
        its = block.authority.aio if in_loop else block.authority
        try:
            return (yield from its.acquire_gen(missing, ttl=self._ttl, timeout=0))
        except LockTimeoutError:
            if block.timeout == 0:
                raise
        end = None if block.timeout is None else time.monotonic() + block.timeout
        for name in missing:
            left = None if end is None else max(0.0, end - time.monotonic())
            yield from self._collect_gen(block, name, left, in_loop=in_loop)
        return None

    def _collect_gen(self, block: Block, name: str, timeout: float | None, *, in_loop: bool) -> Steps[None]:
        """Acquire one resource, renewed from now on, and enter it with the block."""
        part = FencedLock[int](
            (name,),
            self._find_authority,
            ttl=self._ttl,
            timeout=timeout,
            renew=self._renew,
            max_hold=self._max_hold,
            fair=self._fair,
        )
        own = part._new_block()  # noqa: SLF001 - the modules of a lock share private names
        own.had_to_wait = block.had_to_wait
        try:
            yield from part._acquire_gen(own, in_loop=in_loop)  # noqa: SLF001 - the same
            block.enter_again(own.holds[0])
        finally:
            yield from part._take_back_gen(own)  # noqa: SLF001 - the same; the block keeps the hold
