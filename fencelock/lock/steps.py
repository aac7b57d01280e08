"""What takes time in the life of a lease, one step at a time: blocking code does it, asyncio awaits it."""

# ruff: noqa: D102 - `_Step` says what they do

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import time
from collections.abc import Awaitable, Callable, Generator, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from fencelock._holds import Hold, owners_of
from fencelock._owners import switches_greenlets, waits_in_vain_for
from fencelock.authority.base import Authority, Grant
from fencelock.errors import LockTimeoutError
from fencelock.lease import held_leases
from fencelock.renewal.schedule import Renewer

if TYPE_CHECKING:
    from fencelock.authority.base import Seal
    from fencelock.sealing import Sealer, Wish

logger = logging.getLogger("fencelock.lock")

_T = TypeVar("_T")

_IN_VAIN = (
    "another greenlet of this thread holds it, and cannot go on while this one waits, for what waits is not "
    "patched: call gevent.monkey.patch_all() or eventlet.monkey_patch() before anything else is imported"
)

_PARENT = (
    "the task or thread that started this one holds it, and waits in vain if it waits for this one: take the "
    "lock in one of the two only. What the holder starts may write under its lease"
)


class _Step:
    """Something that takes time: `block` does it, and what `wait` returns is to be awaited.

    Attributes:
        answer: what was awaited. It is kept here so that an interruption on the way back does not lose it.
    """

    __slots__ = ("answer",)

    answer: Any


class Call(_Step):
    """A call of an authority; the answer is what it returned.

    `ask` calls it, or its `aio`, with the arguments written out. Behind a call with `*` or `**`, as behind
    all that goes through C, Python runs signal handlers: if one raised, the answer would be lost on its way.
    """

    __slots__ = ("ask", "authority")

    def __init__(self, authority: Authority, ask: Callable[[Any], Any]) -> None:
        self.authority = authority
        self.ask = ask
        self.answer: Any = None

    def block(self) -> None:
        self.answer = self.ask(self.authority)

    def wait(self) -> Awaitable[Any]:
        awaitable: Awaitable[Any] = self.ask(self.authority.aio)
        return awaitable


class Ask(Call):
    """An acquisition of resources, which waits for others for `timeout` seconds."""

    __slots__ = ("resources", "timeout")

    def __init__(
        self,
        authority: Authority,
        resources: tuple[str, ...],
        *,
        ttl: float,
        timeout: float | None,
        fair: bool,
        above: tuple[int, ...] = (),
        seal: Seal | None = None,
    ) -> None:
        if seal is not None:
            super().__init__(
                authority,
                lambda its: its.acquire(resources, ttl=ttl, timeout=timeout, fair=fair, seal=seal),
            )
        elif above:
            super().__init__(
                authority,
                lambda its: its.acquire(resources, ttl=ttl, timeout=timeout, fair=fair, above=above),
            )
        else:
            super().__init__(
                authority, lambda its: its.acquire(resources, ttl=ttl, timeout=timeout, fair=fair)
            )
        self.resources = resources
        self.timeout = timeout

    def block(self) -> None:
        with self._telling():
            self.answer = self.ask(self.authority)

    async def wait(self) -> Any:
        with self._telling():
            self.answer = await super().wait()  # kept, should an interruption follow
        return self.answer

    @contextlib.contextmanager
    def _telling(self) -> Iterator[None]:
        """Say at once, and in the error, where it waits for code that may be waiting for it."""
        parent = self._waits_for_parent() and self.timeout != 0
        if parent or (self.timeout is None and self._is_in_vain()):
            logger.warning("%s: %s", ", ".join(map(repr, self.resources)), _PARENT if parent else _IN_VAIN)
        try:
            yield
        except LockTimeoutError as error:
            if parent or (self.timeout != 0 and self._is_in_vain()):
                sentence = f"{error}; {_PARENT if parent else _IN_VAIN}"
                raise LockTimeoutError(sentence, holder_ttl=error.holder_ttl) from None
            raise

    def _is_in_vain(self) -> bool:
        return switches_greenlets() and waits_in_vain_for(owners_of(self.authority, self.resources))

    def _waits_for_parent(self) -> bool:
        """Tell whether the lease stands in this context, which was copied from that of its holder."""
        held = [lease.resource for lease in held_leases() if lease.resource in self.resources]
        return bool(held and owners_of(self.authority, held))


def ask_to_extend(authority: Authority, grant: Grant, seconds: float) -> Call:
    """Return a call that lets a grant live on."""
    return Call(authority, lambda its: its.extend_many([(grant, seconds)]))


def ask_to_remint(authority: Authority, grant: Grant, seconds: float) -> Call:
    """Return a call that exchanges a grant for one with larger tokens."""
    return Call(authority, lambda its: its.remint(grant, seconds))


def ask_to_release(authority: Authority, grant: Grant) -> Call:
    """Return a call that gives a grant back."""
    return Call(authority, lambda its: its.release(grant))


class StopRenewal(_Step):
    """Have a hold not be extended any more, once an extension under way has ended."""

    __slots__ = ("hold", "renewer")

    def __init__(self, renewer: Renewer, hold: Hold) -> None:
        self.renewer = renewer
        self.hold = hold

    def block(self) -> None:
        self.renewer.stop(self.hold)

    async def wait(self) -> None:
        await self.renewer.stop_soon(self.hold)


class EndReleases(_Step):
    """Wait for an owner's releases behind its COMMIT: its next acquisition comes after them."""

    __slots__ = ("owner",)

    def __init__(self, owner: object) -> None:
        self.owner = owner

    def block(self) -> None:
        """Do nothing: a thread that ends a transaction gives back before it goes on."""

    async def wait(self) -> None:
        if tasks := [task for task, hold in releases.items() if hold.owner == self.owner]:
            await asyncio.wait(tasks)


class CheckStep(_Step):
    """Refuse to seal from coroutines with an engine that blocks, and the other way round."""

    __slots__ = ("sealer",)

    def __init__(self, sealer: Sealer) -> None:
        self.sealer = sealer

    def block(self) -> None:
        self.sealer.check(blocking=True)

    async def wait(self) -> None:
        self.sealer.check(blocking=False)


class SealStep(_Step):
    """Have a database raise its fences to a grant's tokens.

    Attributes:
        fences: those that were in the way; empty where there was none.
        done: whether it is sealed.
    """

    __slots__ = ("done", "fences", "sealer", "wish")

    def __init__(self, sealer: Sealer, grant: Grant, nonce: str = "") -> None:
        self.sealer = sealer
        self.wish: Wish = sealer.wish(grant.resources, grant.tokens, grant.expires_at, nonce)
        self.fences: tuple[int, ...] = ()
        self.done = False

    def block(self) -> None:
        self._note(*self.sealer.seal(self.wish))

    async def wait(self) -> None:
        self._note(*await self.sealer.seal_soon(self.wish))

    def _note(self, done: bool, fences: tuple[int, ...]) -> None:
        # The validity is looked at after the COMMIT, and not before.
        self.done = done and time.monotonic() < self.wish.expires_at
        self.fences = fences


Steps = Generator[Call | StopRenewal | EndReleases | CheckStep | SealStep, None, _T]


Renewers = Callable[[Authority], Renewer]


def run_blocking(steps: Steps[_T]) -> _T:
    """Take steps to their end, blocking."""
    error: BaseException | None = None
    while True:
        try:
            while True:  # inside, for it is where a loop goes round that signal handlers run
                step = next(steps) if error is None else steps.throw(error)
                error = None
                step.block()
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
        except BaseException as caught:
            if inspect.getgeneratorstate(steps) == inspect.GEN_CLOSED:
                raise
            error = caught  # of the step, or a signal handler's: the steps decide what to do about it


async def run_waiting(steps: Steps[_T]) -> _T:
    """Take steps to their end, letting other tasks run."""
    error: BaseException | None = None
    while True:
        try:
            step = next(steps) if error is None else steps.throw(error)
            error = None
            step.answer = await step.wait()
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
        except BaseException as caught:
            if inspect.getgeneratorstate(steps) == inspect.GEN_CLOSED:
                raise
            error = caught


#: The tasks that give back, each with its hold. Loops refer to their tasks weakly.
releases: dict[asyncio.Task[None], Hold] = {}
