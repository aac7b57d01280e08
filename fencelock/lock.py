"""The life of a lease: wait for it, hold it, extend it, release it; for `with` and for `async with`.

What a lock does is written once, as generators that yield what takes time (`_Call`, `_Stop`). `FencedLock`
blocks for it, `AsyncLock` awaits it.
"""

# ruff: noqa: SLF001 - the two are halves of one thing

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import inspect
import logging
import math
import re
import threading
import time
from collections.abc import Awaitable, Callable, Generator, Iterable, Iterator, Sequence
from types import EllipsisType, TracebackType
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, TypedDict, TypeVar, Unpack, overload
from weakref import ref

from fencelock import _threads, renewal
from fencelock._checks import check_choice, check_max_hold, check_timeout, check_ttl
from fencelock._holds import Hold, add, find, owners_of, remove
from fencelock._owners import current_owner, running_loop, switches_greenlets, waits_in_vain_for
from fencelock.authority.base import Authority, Grant, is_sealed_by, make_locks_with
from fencelock.errors import AuthorityError, LockError, LockLostError, LockTimeoutError, NotHeldError
from fencelock.lease import OBJECT_IN_NAME, Lease, check_resource, held_leases, note_ended
from fencelock.settings import default_authority

if TYPE_CHECKING:
    from sqlalchemy import Engine
    from sqlalchemy.ext.asyncio import AsyncEngine

    from fencelock.authority.base import Seal
    from fencelock.sealing import Sealer, Wish

_T = TypeVar("_T")
_Token = TypeVar("_Token", int, tuple[int, ...])

IfLost = Literal["raise", "warn"]


class LockSettings(TypedDict, total=False):
    """The settings of a lock, save who grants it; `fenced_lock` says what they mean, and their defaults."""

    ttl: float
    timeout: float | None
    renew: bool
    max_hold: float | None
    fair: bool
    if_lost: IfLost
    seal: Engine | AsyncEngine | None


class AllLockSettings(LockSettings, total=False):
    """The settings of a lock, and who grants it."""

    authority: Authority | None


_DEFAULT_TTL = 30.0

#: How often an acquisition is tried whose time is over, because the storage was ahead of the nodes.
_HINTED_TRIES = 3

#: Braces that an f-string would have filled.
_UNFILLED = re.compile(r"\{[A-Za-z_][\w.]*\}")

_IN_VAIN = (
    "another greenlet of this thread holds it, and cannot go on while this one waits, for what waits is not "
    "patched: call gevent.monkey.patch_all() or eventlet.monkey_patch() before anything else is imported"
)

_PARENT = (
    "the task or thread that started this one holds it, and waits in vain if it waits for this one: take the "
    "lock in one of the two only. What the holder starts may write under its lease"
)

logger = logging.getLogger(__name__)


class _Step:
    """Something that takes time: `block` does it, and what `wait` returns is to be awaited.

    Attributes:
        answer: what was awaited. It is kept here so that an interruption on the way back does not lose it.
    """

    __slots__ = ("answer",)

    answer: Any


class _Call(_Step):
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


class _Ask(_Call):
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


def _ask_to_extend(authority: Authority, grant: Grant, seconds: float) -> _Call:
    return _Call(authority, lambda its: its.extend_many([(grant, seconds)]))


def _ask_to_remint(authority: Authority, grant: Grant, seconds: float) -> _Call:
    return _Call(authority, lambda its: its.remint(grant, seconds))


def _ask_to_release(authority: Authority, grant: Grant) -> _Call:
    return _Call(authority, lambda its: its.release(grant))


class _Stop(_Step):
    """Have a hold not be extended any more, once an extension under way has ended."""

    __slots__ = ("hold", "renewer")

    def __init__(self, renewer: renewal.Renewer, hold: Hold) -> None:
        self.renewer = renewer
        self.hold = hold

    def block(self) -> None:
        self.renewer.stop(self.hold)

    async def wait(self) -> None:
        await self.renewer.stop_soon(self.hold)


class _EndReleases(_Step):
    """Wait for an owner's releases behind its COMMIT: its next acquisition comes after them."""

    __slots__ = ("owner",)

    def __init__(self, owner: object) -> None:
        self.owner = owner

    def block(self) -> None:
        """Do nothing: a thread that ends a transaction gives back before it goes on."""

    async def wait(self) -> None:
        if tasks := [task for task, hold in _releases.items() if hold.owner == self.owner]:
            await asyncio.wait(tasks)


class _Check(_Step):
    """Refuse to seal from coroutines with an engine that blocks, and the other way round."""

    __slots__ = ("sealer",)

    def __init__(self, sealer: Sealer) -> None:
        self.sealer = sealer

    def block(self) -> None:
        self.sealer.check(blocking=True)

    async def wait(self) -> None:
        self.sealer.check(blocking=False)


class _Seal(_Step):
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


_Steps = Generator[_Call | _Stop | _EndReleases | _Check | _Seal, None, _T]
_Renewers = Callable[[Authority], renewal.Renewer]


def _block(steps: _Steps[_T]) -> _T:
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


async def _wait(steps: _Steps[_T]) -> _T:
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


class _Loss(NamedTuple):
    """A lease that ended before it was given back.

    Attributes:
        error: what to raise.
        is_committed: whether work was committed under it, and nothing is open. Then the loss is only logged,
            because an error invites a retry, and what is committed must not be done twice.
    """

    error: LockLostError
    is_committed: bool = False


class _Entry:
    """One time that a lock was entered.

    Attributes:
        owner: who did: a thread, task or greenlet.
        mark: stands for it in the holds' blocks, which must not refer to it: a cycle would keep a lock that
            was thrown away alive, and renewed, until the garbage collector comes along.
        asked: for what it did not hold before.
        holds: what it is inside.
        leases: what it yields, in the order of the lock's resources.
    """

    __slots__ = ("asked", "holds", "leases", "mark", "owner")

    def __init__(self) -> None:
        self.owner = current_owner()
        self.mark = object()
        self.asked: _Call | None = None
        self.holds: tuple[Hold, ...] = ()
        self.leases: tuple[Lease, ...] = ()

    def enter_again(self, hold: Hold) -> bool:
        """Be inside a hold that the owner has already; return False where that is being given back."""
        if hold not in self.holds:
            self.holds = (*self.holds, hold)  # first, so that an interruption leaves it again
            if not (hold.blocks or hold.stop_waiting()):
                self.holds = self.holds[:-1]
                return False
            hold.blocks.add(self.mark)
        return True

    def enter(self, holds: Sequence[Hold], resources: Iterable[str]) -> None:
        """Be inside holds, which have all of the resources between them."""
        self.holds = tuple(holds)
        self.asked = None
        self.leases = self.holds[0].leases
        if len(self.holds) > 1 or len(self.leases) > 1:
            self.holds = tuple(dict.fromkeys(holds))
            by_name = {lease.resource: lease for hold in self.holds for lease in hold.leases}
            self.leases = tuple(by_name[resource] for resource in resources)
        for hold in self.holds:
            hold.blocks.add(self.mark)
            for lease in hold.leases:
                lease.enter()
            add(hold)

    @property
    def tokens(self) -> Any:
        """What `with` yields: the token, or the tokens of several resources."""
        if len(self.leases) == 1:
            return self.leases[0].fencing_token
        return tuple(lease.fencing_token for lease in self.leases)

    def let_go(self) -> list[Hold]:
        """Be inside nothing any more; return what is to be given back."""
        over = []
        for hold in reversed(self.holds):
            hold.blocks.discard(self.mark)
            if not hold.blocks and not _waits(hold):
                over.append(hold)
        return over

    def leave(self) -> _Steps[_Loss | None]:
        """Give back what no block is inside any more; return what had been lost before, or None."""
        over = self.let_go()
        return _release(over[0]) if len(over) == 1 else _release_each(over)


class FencedLock(Generic[_Token]):
    """A lock on one or several resources; a context manager that yields the fencing token.

    Made by `fenced_lock` or `Redlock.lock`, for `with` and for `async with`; coroutines find its methods
    under `aio`. The thread (asyncio task, greenlet) that holds a resource enters it again at no cost and
    gets the same token, with this object or another; what is held is given back when the last block is left,
    or, where a transaction that was written under it is still open then, when that ends. May be used again
    afterwards.
    """

    def __init__(self, resources: tuple[str, ...], **settings: Unpack[AllLockSettings]) -> None:
        self._resources = _check_resources(resources)
        self._ttl = check_ttl(settings["ttl"])
        self._timeout = check_timeout(settings["timeout"])
        self._renew = bool(settings["renew"])
        self._max_hold = check_max_hold(settings["max_hold"], self._ttl) if self._renew else None
        self._fair = bool(settings["fair"])
        self._if_lost = check_choice("if_lost", settings["if_lost"], ("raise", "warn"))
        self._authority = settings["authority"]
        self._sealer = None if settings["seal"] is None else _sealer_with(settings["seal"])
        self._entries: list[_Entry] = []
        #: Entered by `with` and not left yet. Its body may have released it, so that it is no entry any more.
        self._blocks: list[_Entry] = []
        self._listeners: tuple[Callable[[Lease], object], ...] = ()

    def __repr__(self) -> str:
        names = ", ".join(map(repr, self._resources))
        return f"<fenced_lock {names} {'held' if self._entries else 'not held'}>"

    @property
    def aio(self) -> AsyncLock[_Token]:
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
            timeout: seconds to wait for another holder; None for ever, 0 one try. By default what the
                lock was made with.

        Raises:
            LockTimeoutError: somebody else held it until the timeout.
            LockLostError: one of the resources was held already, and its lease ended while the others were
                waited for.
            AuthorityError: it could not be decided.
        """
        entry = _Entry()
        try:
            return _block(self._acquire(entry, timeout, renewal.for_thread)).leases[0]
        except BaseException:
            _block(self._take_back(entry))
            raise

    def try_acquire(self) -> Lease | None:
        """Try once: return the lease, or None if somebody else holds the lock.

        Raises:
            AuthorityError: it could not be decided.
        """
        try:
            return self.acquire(timeout=0)
        except LockTimeoutError:
            return None

    def extend(self, ttl: float | None = None) -> None:
        """Let the lease live on for `ttl` seconds from now, or for what the lock was made with.

        The token stays. A lease is never shortened. One that is renewed needs no help.

        Raises:
            NotHeldError: the lock is not held.
            LockLostError: the lease has ended; it stays lost.
            AuthorityError: it could not be decided; the lease still ends when it would have.
        """
        _block(self._extend(ttl))

    def remint(self) -> _Token:
        """Exchange the token for a new, larger one, and keep holding the lock; return it.

        For a COMMIT in doubt: when the connection was lost during one, nobody knows whether it took place,
        and the guard refuses the lease. Once what was written has been claimed with the new token (or its
        gate passed), nothing that is under way with the old one can be written any more. In this order: roll
        back, mint anew, claim, only then read.

        Raises:
            NotHeldError: the lock is not held.
            LockLostError: it could not be done; the lease has ended.
        """
        return _block(self._remint())  # type: ignore[no-any-return]

    def release(self) -> None:
        """Give the lock back; where it was entered several times, leave one block.

        Where too few nodes answer to do so, it ends by itself with its ttl, and a warning is logged.

        Raises:
            NotHeldError: the lock is not held.
            LockLostError: the lease had ended before, and nothing was committed under it.
        """
        _block(self._release())

    def on_lost(self, callback: Callable[[Lease], object]) -> None:
        """Have a function called with the lease when it is found to be lost, once for each lease.

        It is called when the lease could not be renewed: for blocking code in a thread of its own, for
        coroutines by the event loop (where `task.cancel` is a callback that makes sense). The work under the
        lease is not interrupted; the guard will refuse its writes. Without `renew`, and after a pause, the
        loss may be found only when the block is left; it is called there. Where the lease is lost already it
        is called at once.

        Raises:
            TypeError: for what cannot be called, and for coroutine functions, which nobody would await.
        """
        _check_listener(callback)
        self._listeners = (*self._listeners, callback)
        for hold in dict.fromkeys(hold for entry in self._entries for hold in entry.holds):
            hold.tell_when_lost([callback])

    def _acquire(
        self, entry: _Entry, timeout: float | EllipsisType | None, renewers: _Renewers
    ) -> _Steps[_Entry]:
        waiting = self._timeout if timeout is ... else check_timeout(timeout)
        authority = self._authority or default_authority()
        holds = yield from self._enter_again(entry, authority)
        known = {name for hold in holds for name in hold.grant.resources}
        missing = tuple(name for name in self._resources if name not in known)
        if missing:
            nonce = ""
            if self._sealer is None:
                entry.asked = _Ask(authority, missing, ttl=self._ttl, timeout=waiting, fair=self._fair)
                yield entry.asked
            else:
                nonce = yield from self._acquire_sealed(entry, self._sealer, authority, missing, waiting)
            assert entry.asked is not None  # noqa: S101 - either way it was
            for hold in holds:
                _check_still_held(hold)  # it may have ended while the others were waited for
            holds.append(self._hold(authority, entry.asked.answer, entry.owner, renewers))
            if self._sealer is not None:
                holds[-1].sealers, holds[-1].seal_nonce = (self._sealer,), nonce
        entry.enter(holds, self._resources)
        self._entries.append(entry)
        if missing:
            _keep(holds[-1])  # only now: what is interrupted before is not extended while the traceback lives
        for hold in entry.holds:
            hold.tell_when_lost(self._listeners)
        return entry

    def _enter_again(self, entry: _Entry, authority: Authority) -> _Steps[list[Hold]]:
        """Be inside what the owner holds already; return that."""
        found = [hold for name in self._resources if (hold := find(authority, entry.owner, name))]
        holds = [hold for hold in found if entry.enter_again(hold)]
        if len(holds) < len(found):
            yield _EndReleases(entry.owner)
        for hold in entry.holds:
            if self._ttl not in {hold.ttl, _DEFAULT_TTL}:
                logger.warning(
                    "%s: entered again with ttl=%g, and the ttl=%g of the outer block counts",
                    _name(hold),
                    self._ttl,
                    hold.ttl,
                )
        if self._sealer is not None:
            for hold in entry.holds:
                yield from _seal_held(self._sealer, hold)
        return holds

    def _acquire_sealed(
        self,
        entry: _Entry,
        sealer: Sealer,
        authority: Authority,
        missing: tuple[str, ...],
        waiting: float | None,
    ) -> _Steps[str]:
        """Acquire until the storage has accepted the tokens, and the lease is still valid after that.

        Returns the nonce that it has accepted them under.
        """
        yield _Check(sealer)
        if is_sealed_by(authority, sealer.engine):
            nonce = sealer.new_nonce()
            entry.asked = _Ask(
                authority, missing, ttl=self._ttl, timeout=waiting, fair=self._fair, seal=sealer.within(nonce)
            )
            yield entry.asked
            return nonce
        end = math.inf if waiting is None else time.monotonic() + waiting
        above: tuple[int, ...] = ()
        tries = 0
        while True:
            left = None if waiting is None else max(0.0, end - time.monotonic())
            entry.asked = _Ask(authority, missing, ttl=self._ttl, timeout=left, fair=self._fair, above=above)
            yield entry.asked
            seal = _Seal(sealer, entry.asked.answer)
            yield seal
            if seal.done:
                return seal.wish.nonce
            yield _ask_to_release(authority, entry.asked.answer)
            entry.asked = None
            tries += 1
            # Nobody is to wait for a hint, which costs no time, even where one try was asked for.
            if time.monotonic() >= end and not (seal.fences and tries < _HINTED_TRIES):
                raise LockTimeoutError(seal.wish.complaint(seal.fences))
            above = seal.fences

    def _take_back(self, entry: _Entry) -> _Steps[_Loss | None]:
        """Leave a block whose entering or leaving was interrupted; return as `_leave` does."""
        self._forget(entry)
        try:
            if entry.asked is not None and entry.asked.answer is not None:  # it became no hold
                yield _ask_to_release(entry.asked.authority, entry.asked.answer)
        finally:
            lost = (yield from self._leave(entry)) if entry.holds else None
        return lost

    def _forget(self, entry: _Entry) -> None:
        for entries in (self._blocks, self._entries):
            if entry in entries:
                entries.remove(entry)

    def _hold(self, authority: Authority, grant: Grant, owner: object, renewers: _Renewers) -> Hold:
        hold = Hold(authority, grant, owner, ttl=self._ttl, max_hold=self._max_hold)
        if renewers is renewal.for_loop and (loop := running_loop()) is not None:
            hold.loop = ref(loop)
        if self._renew:
            hold.renewer = renewers(authority)
        return hold

    def _extend(self, ttl: float | None) -> _Steps[None]:
        seconds = self._ttl if ttl is None else check_ttl(ttl)
        for hold in self._innermost().holds:
            _check_still_held(hold)
            try:
                yield from _stop(hold)
                asked = _ask_to_extend(hold.authority, hold.grant, seconds)
                yield asked
                (outcome,) = asked.answer
                if isinstance(outcome, LockLostError):
                    renewal.tell(hold.lose(str(outcome)))
                if not isinstance(outcome, Grant):
                    raise outcome
                _check_still_held(hold)
                hold.prolong(outcome)
            finally:
                yield from _go_on_holding(hold)

    def _remint(self) -> _Steps[Any]:
        entry = self._innermost()
        for hold in entry.holds:
            _check_still_held(hold)
            # Also what a lock without seal= mints anew, inside a block that has sealed.
            for sealer in hold.sealers:
                yield _Check(sealer)
                sealer.refuse_to_wait_for_oneself(hold.grant.resources)
            sealed = not hold.sealers
            asked: _Call | None = None
            try:
                yield from _stop(hold)
                now = time.monotonic()
                seconds = max(hold.most_seconds(now), hold.grant.expires_at - now)
                asked = _ask_to_remint(hold.authority, hold.grant, seconds)
                yield asked
                if hold.sealers:
                    hold.seal_nonce = yield from _seal_anew(hold.sealers, asked.answer)
                    sealed = True
                _note_remint(hold, asked, sealed=sealed)
            except BaseException:
                # Once more, where a signal handler raised in the middle of it.
                _note_remint(hold, asked, sealed=sealed)
                raise
            finally:
                yield from _go_on_holding(hold)
            _check_still_held(hold)
        return entry.tokens

    def _release(self) -> _Steps[None]:
        self._complain((yield from self._leave(self._innermost())), None)

    def _leave(self, entry: _Entry) -> _Steps[_Loss | None]:
        """Leave one block; return what had been lost before, or None."""
        try:
            if entry in self._entries:
                self._entries.remove(entry)
            return (yield from entry.leave())
        except (Exception, KeyboardInterrupt, SystemExit):
            # A signal handler's, at any line. (One that is cancelled has been sent.) Once more does no harm.
            yield from entry.leave()
            raise

    def _innermost(self) -> _Entry:
        """Return where this thread, task or greenlet entered last; or else where anybody did."""
        if (entry := _last_of_ours(self._entries)) is None:
            raise NotHeldError(f"{self!r}: acquire it first")
        return entry

    def _begin_block(self, entry: _Entry) -> _Token:
        self._blocks.append(entry)
        return entry.tokens  # type: ignore[no-any-return]

    def _block_to_leave(self) -> _Entry | None:
        """Return what this thread, task or greenlet leaves next."""
        # The second: it was acquired, and handed over to an ExitStack.
        return _last_of_ours(self._blocks) or _last_of_ours(self._entries)

    def _exit(self, entry: _Entry | None) -> _Steps[_Loss | None]:
        """Leave a block, unless its body has released it; return as `_leave` does."""
        if entry in self._blocks:
            self._blocks.remove(entry)
        return (yield from self._leave(entry)) if entry in self._entries else None

    def _complain(self, lost: _Loss | None, exc_value: BaseException | None) -> None:
        if lost is None:
            return
        if exc_value is not None:
            exc_value.add_note(str(lost.error))
        elif lost.is_committed or self._if_lost == "warn":
            logger.warning("%s", lost.error)
        else:
            raise lost.error

    def __enter__(self) -> _Token:
        entry = _Entry()
        try:
            return self._begin_block(_block(self._acquire(entry, ..., renewal.for_thread)))
        except BaseException:
            _block(self._take_back(entry))
            raise

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        entry = None
        try:
            entry = self._block_to_leave()
            lost = _block(self._exit(entry))
        except BaseException:
            # A signal handler's, at any line. Until `entry` is known nothing is left, and it is found again.
            if (entry := entry or self._block_to_leave()) is not None:
                _block(self._take_back(entry))
            raise
        self._complain(lost, exc_value)

    async def __aenter__(self) -> _Token:
        entry = _Entry()
        try:
            return self._begin_block(await _wait(self._acquire(entry, ..., renewal.for_loop)))
        except BaseException:
            await _wait(self._take_back(entry))
            raise

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._complain(await _wait(self._exit(self._block_to_leave())), exc_value)


class AsyncLock(Generic[_Token]):
    """The methods of a `FencedLock` for coroutines: the same names, the same promises.

    A cancelled acquisition leaves no lease behind; a cancelled release is sent all the same.
    """

    __slots__ = ("_lock",)

    def __init__(self, lock: FencedLock[_Token]) -> None:
        self._lock: FencedLock[_Token] = lock

    def __repr__(self) -> str:
        return f"{self._lock!r}.aio"

    async def acquire(self, timeout: float | EllipsisType | None = ...) -> Lease:  # noqa: ASYNC109 - how long others may hold it
        """Wait for the lock and return its lease: see `FencedLock.acquire`."""
        entry = _Entry()
        try:
            return (await _wait(self._lock._acquire(entry, timeout, renewal.for_loop))).leases[0]
        except BaseException:
            await _wait(self._lock._take_back(entry))
            raise

    async def try_acquire(self) -> Lease | None:
        """Try once: return the lease, or None if somebody else holds the lock."""
        try:
            return await self.acquire(timeout=0)
        except LockTimeoutError:
            return None

    async def extend(self, ttl: float | None = None) -> None:
        """Let the lease live on: see `FencedLock.extend`."""
        await _wait(self._lock._extend(ttl))

    async def remint(self) -> _Token:
        """Exchange the token for a new, larger one, and keep holding the lock: see `FencedLock.remint`."""
        return await _wait(self._lock._remint())

    async def release(self) -> None:
        """Give the lock back: see `FencedLock.release`."""
        await _wait(self._lock._release())


def _name(hold: Hold) -> str:
    return ", ".join(map(repr, hold.grant.resources))


def give_back(hold: Hold) -> None:
    """Give a hold back, whatever blocks are still inside; blocking, also for a task's."""
    _block(_release(hold))


def _waits(hold: Hold) -> bool:
    """Have a hold given back when the transactions that have written under it end; tell whether any is open.

    The lock must outlive the COMMIT: who came next would otherwise read, by its own claim, what is about to
    change. Until then the hold is renewed as before, and its owner may enter it again. New transactions do
    not begin under it.
    """
    if not any(lease.needed for lease in hold.leases) or hold.inherited or hold.lost or hold.released:
        return False
    hold.wait_for_transactions()
    lease = _go_on_when_let_go(hold)
    if lease is None:
        return not hold.stop_waiting()  # it has ended meanwhile, and may have given the hold back
    for each in hold.leases:
        each.leave()
    note_ended(*hold.leases)
    logger.debug("%s: released when the transaction that has written to %r ends", _name(hold), lease.resource)
    return True


def _go_on_when_let_go(hold: Hold) -> Lease | None:
    """Have `_go_on` called when open transactions let a lease go; return that lease, or None if none does."""
    go_on = functools.partial(_go_on, hold)
    return next((lease for lease in hold.leases if lease.needed and lease.when_let_go(go_on)), None)


def _go_on(hold: Hold) -> None:
    """Give a hold back that has waited for transactions, unless its owner has entered it again."""
    if hold.released or _go_on_when_let_go(hold) is not None or not hold.stop_waiting():
        return
    loop = hold.loop()
    here = running_loop()
    if loop is not None and not loop.is_running():
        loop = None
    if loop is not None and loop is here:
        _give_back_soon(hold, loop)
        return
    if loop is not None:
        try:
            loop.call_soon_threadsafe(_give_back_soon, hold, loop, context=contextvars.Context())
        except RuntimeError:  # it has been closed
            loop = None
    if loop is None and here is None:
        _give_back_quietly(_release(hold))
    elif loop is None:  # nobody else in this loop is to wait for it
        _give_back_apart(_release(hold))


#: The tasks that give back, each with its hold. Loops refer to their tasks weakly.
_releases: dict[asyncio.Task[None], Hold] = {}


def _give_back_soon(hold: Hold, loop: asyncio.AbstractEventLoop) -> None:
    """Give a hold back in a task of its own, of the running loop."""

    async def release() -> None:
        _note_late(await _wait(_release(hold)))

    def end(done: asyncio.Task[None]) -> None:
        _releases.pop(done, None)
        if done.cancelled() and not hold.released:  # by a loop that ends, before it began
            _give_back_apart(_release(hold))
        elif not done.cancelled() and (error := done.exception()) is not None:
            logger.error("%s could not be released", _name(hold), exc_info=error)

    task = loop.create_task(release(), name="fencelock-release", context=contextvars.Context())
    _releases[task] = hold
    task.add_done_callback(end)


def _give_back_apart(steps: _Steps[_Loss | None]) -> None:
    """Give back in a thread of its own, which the interpreter waits for when it ends."""
    with contextlib.suppress(RuntimeError):  # it has, and gives everything back
        _threads.start(threading.Thread(target=_give_back_quietly, args=(steps,), name="fencelock-release"))


def _give_back_quietly(steps: _Steps[_Loss | None]) -> None:
    """Give back; whoever ends a transaction is not to hear that it could not be done."""
    try:
        _note_late(_block(steps))
    except Exception:
        logger.exception("a lock could not be released")


def _note_late(lost: _Loss | None) -> None:
    if lost:
        logger.warning("%s", lost.error)


def _check_listener(callback: object) -> None:
    if not callable(callback) or inspect.iscoroutinefunction(callback):
        raise TypeError(f"on_lost calls a plain function with the lease, and {callback!r} is none")


def _last_of_ours(entries: list[_Entry]) -> _Entry | None:
    """Return what this thread, task or greenlet entered last; or else what anybody did."""
    snapshot = tuple(entries)
    if len(snapshot) < 2:  # noqa: PLR2004 - then there is nothing to choose
        return snapshot[0] if snapshot else None
    owner = current_owner()
    ours = (entry for entry in reversed(snapshot) if entry.owner == owner)
    return next(ours, snapshot[-1])


def _check_still_held(hold: Hold) -> None:
    for lease in hold.leases:
        lease.check()
        if lease.lost or lease.released:
            raise LockLostError(f"the lease of {lease.resource!r} has ended; acquire the lock again")


def _note_remint(hold: Hold, asked: _Call | None, *, sealed: bool) -> None:
    """Note what has become of a hold for which a new token was asked for, if it was; again has no effect."""
    if asked is not None and asked.answer is not None and sealed and not hold.released:
        hold.remint(asked.answer)
    elif asked is not None:
        hold.grant = asked.answer or hold.grant  # what was not sealed is still to be given back
        # The old token may be nobody's any more.
        renewal.tell(hold.lose("a new token was asked for, and none came"))


def _stop(hold: Hold) -> _Steps[None]:
    """Have a hold not be extended any more: mostly at once, without a step."""
    if hold.renewer is not None and not hold.renewer.strike(hold):
        yield _Stop(hold.renewer, hold)


def _keep(hold: Hold) -> None:
    """Have a hold renewed, if it is one that is."""
    if hold.renewer is not None:
        hold.renewer.watch(hold)


def _go_on_holding(hold: Hold) -> _Steps[None]:
    """Have a hold renewed again that was stopped; or given back, if somebody else released it meanwhile."""
    if hold.released:
        for grant in renewal.follow_release(hold):
            yield _ask_to_release(hold.authority, grant)
    elif not hold.over:
        _keep(hold)


def _release_each(holds: list[Hold]) -> _Steps[_Loss | None]:
    """Give holds back, each also where it was interrupted at the one before; return as `_release` does."""
    lost = None
    if holds:
        try:
            lost = yield from _release(holds[0])
        finally:
            lost = (yield from _release_each(holds[1:])) or lost
    return lost


def _sealer_with(engine: Engine | AsyncEngine) -> Sealer:
    from fencelock.sealing import Sealer  # noqa: PLC0415 - locks that seal nothing need no database

    return Sealer(engine)


def _seal_held(sealer: Sealer, hold: Hold) -> _Steps[None]:
    """Seal what is held already, and was not sealed in that database: who enters with `seal=` relies on it.

    Raises:
        LockError: the database refuses, or this very thread, task or greenlet keeps it from being done.
        LockTimeoutError: it could not be done while the lease was valid.
    """
    if sealer in hold.sealers:
        return
    yield _Check(sealer)
    sealer.refuse_to_wait_for_oneself(hold.grant.resources)
    seal = _Seal(sealer, hold.grant, hold.seal_nonce)
    yield seal
    if seal.fences:
        raise LockError(
            f"{seal.wish.complaint(seal.fences)}; the block that holds the lock did not seal it, and may "
            "have passed the gate itself: give that block seal= too"
        )
    if not seal.done:
        raise LockTimeoutError(seal.wish.complaint(seal.fences))
    hold.sealers, hold.seal_nonce = (*hold.sealers, sealer), seal.wish.nonce


def _seal_anew(sealers: Iterable[Sealer], grant: Grant) -> _Steps[str]:
    """Seal new tokens of a hold wherever it was sealed; return under which nonce."""
    nonce = ""
    for sealer in sealers:
        seal = _Seal(sealer, grant, nonce)
        yield seal
        if not seal.done:
            raise LockLostError(
                f"{seal.wish.complaint(seal.fences)}; the lease is lost, acquire the lock again"
            )
        nonce = seal.wish.nonce
    return nonce


def _release(hold: Hold) -> _Steps[_Loss | None]:
    """Give a hold back; return how to report it where it had been lost before."""
    lost = hold.lost
    remove(hold)
    if hold.inherited:
        return _Loss(
            LockLostError(f"the lease of {_name(hold)} belongs to the parent of this forked process")
        )
    released = _ask_to_release(hold.authority, hold.grant)
    try:
        try:
            yield from _stop(hold)
        finally:
            hold.extended_behind = False  # what has been extended by now is released with the rest
            try:
                yield released
            finally:
                hold.release_ended = True
                if hold.extended_behind:
                    yield _ask_to_release(hold.authority, hold.grant)
        if released.answer is None:
            logger.warning("%s: too few nodes answered to release it; it ends by itself", _name(hold))
    except AuthorityError as error:
        logger.warning("%s could not be released and ends by itself: %s", _name(hold), error)
    return _loss_of(hold) if lost or released.answer is False else None


def _loss_of(hold: Hold) -> _Loss:
    """Return how a lease is to be reported that ended before it was given back, and tell its listeners."""
    renewal.tell(hold.calls_when_lost())
    leases = hold.leases
    ended = f"the lease of {_name(hold)} (token {hold.grant.tokens[0]}) ended before the work did"
    if reason := leases[0].why_lost:
        ended += f" ({reason})"
    if any(lease.needed or lease.in_doubt for lease in leases):
        return _Loss(
            LockLostError(
                f"{ended}; a transaction that was written under it is open, or its COMMIT is in doubt: roll "
                "back, lock again, and look what is written"
            )
        )
    if any(lease.committed for lease in leases):
        return _Loss(
            LockLostError(
                f"{ended}. What was committed stays committed, and overwrites nothing of a newer holder; "
                "make the ttl longer, or the work shorter"
            ),
            is_committed=True,
        )
    if any(lease.guarded for lease in leases):
        sentence = f"{ended}; all that was written under it was rolled back: lock again, and begin again"
        return _Loss(LockLostError(sentence, written=False))
    return _Loss(
        LockLostError(
            f"{ended}; nothing went through the guard, so another holder may have done the same work "
            "meanwhile: look before you do it again, and make the ttl longer, or the work shorter"
        )
    )


@overload
def fenced_lock(resource: str, /, **settings: Unpack[AllLockSettings]) -> FencedLock[int]: ...
@overload
def fenced_lock(*resources: str, **settings: Unpack[AllLockSettings]) -> FencedLock[tuple[int, ...]]: ...
def fenced_lock(
    *resources: str,
    ttl: float = _DEFAULT_TTL,
    timeout: float | None = 10.0,
    renew: bool = True,
    max_hold: float | None = 3600.0,
    fair: bool = False,
    if_lost: IfLost = "raise",
    authority: Authority | None = None,
    seal: Engine | AsyncEngine | None = None,
) -> FencedLock[int] | FencedLock[tuple[int, ...]]:
    """Return a lock on a resource, to be entered with `with` or `async with`: it yields the fencing token.

    ```python
    with fenced_lock("order:1") as token, Session(engine) as session:
        order = claim(session, Order, 1)
        order.status = "paid"
        session.commit()
    ```

    What it promises: every lease of a resource has a larger token than all leases that had been
    acquired before its own acquisition began, whatever networks, clocks and pauses do. What it does not
    promise: that no older holder is still at work. That is why the storage compares tokens.

    Args:
        *resources: what to lock: 1 to 255 characters each, without control characters. Several are
            acquired together or not at all, and yield a tuple of tokens in their order.
        ttl: seconds that the lease lasts on every node, and by which it is extended.
        timeout: seconds to wait for another holder; None for ever, 0 one try.
        renew: extend the lease in the background, after each third of its ttl, until it is released.
        max_hold: seconds after which a lease is no longer renewed, for a worker that hangs must not hold for
            ever; it is lost then. None for no limit.
        fair: wait in line: first come, first served, as far as a quorum can tell.
        if_lost: what leaving the block does if the lease was lost before, nothing was committed under it and
            the body raised nothing: "raise" LockLostError, or "warn" in the log.
        authority: who grants it; by default what `configure()` or FENCELOCK_URL say.
        seal: an engine (an `AsyncEngine` for `async with`) on the database that has the fence table: the
            resource's fence is raised there, in a transaction of its own, before the lock is held. Tokens are
            then unique and rising even if every node loses its memory. It holds only if every acquisition of
            the resource seals, in the same database. See docs/sealed.md.

    Raises:
        TypeError: for arguments of the wrong kind, and for an engine that does not suit `with` or `async
            with`; entering raises the errors of `FencedLock.acquire`.
        ValueError: for arguments out of range.
    """
    lock: FencedLock[int] = FencedLock(
        resources,
        ttl=ttl,
        timeout=timeout,
        renew=renew,
        max_hold=max_hold,
        fair=fair,
        if_lost=if_lost,
        authority=authority,
        seal=seal,
    )
    return lock


make_locks_with(fenced_lock)


def _check_resources(resources: tuple[str, ...]) -> tuple[str, ...]:
    if not resources:
        raise ValueError("name what to lock, such as fenced_lock('order:1')")
    names = tuple(map(check_resource, resources))
    for name in names:
        if _UNFILLED.search(name) or OBJECT_IN_NAME.search(name):
            raise ValueError(
                f"{name!r} names no one thing to lock: fill its braces with a value, as "
                "fenced_lock(f'order:{order.id}') does"
            )
    if len(set(names)) != len(names):
        raise ValueError(f"a resource is named twice: {', '.join(map(repr, names))}")
    return names
