"""What every authority offers to the lock, be it a quorum of nodes, a database or a consensus store.

A lock calls `Authority` and `AsyncAuthority`. `authority/stepped.py` makes both of one set of generators.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final, NotRequired, Protocol, TypedDict, Unpack
from weakref import WeakSet

from fencelock.errors import FencelockError, LockTimeoutError, QuorumError


@dataclass(slots=True, unsafe_hash=True)
class Grant:
    """Leases of one or several resources that were granted together. Never changed.

    Attributes:
        resources: in the order in which they were asked for.
        tokens: the fencing token of each.
        expires_at: when all of them end, on the clock of `time.monotonic`.
        proof: what the authority needs to recognise the grant; nothing else looks into it.
    """

    resources: tuple[str, ...]
    tokens: tuple[int, ...]
    expires_at: float
    proof: Any


#: A grant, and for how many seconds from now it is to last.
Wish = tuple[Grant, float]


def drift(ttl: float) -> float:
    """Return the seconds by which clocks may disagree over a lease of `ttl` seconds."""
    return ttl * 0.01 + 0.002


def validity(began: float, ttl: float) -> float:
    """Return until when a holder may rely on a lease of `ttl` seconds that was asked for at `began`.

    Both are times on the clock of `time.monotonic`.
    """
    return began + ttl - drift(ttl)


def named(resources: Iterable[str]) -> str:
    """Return resources as they stand in a sentence."""
    return ", ".join(map(repr, resources))


_LEAST_SHOWN: Final = 0.001
"""Seconds."""


def held_by_another(resources: Iterable[str], holder_ttl: float | None) -> LockTimeoutError:
    """Return the error of an acquisition that has waited for resources for long enough.

    They are held for `holder_ttl` seconds; None where they are free by now, as they nearly are at 0.
    """
    if holder_ttl is None or holder_ttl < _LEAST_SHOWN:
        sentence = f"{named(resources)} could not be acquired in time: others were faster"
        return LockTimeoutError(sentence, holder_ttl=holder_ttl)
    return LockTimeoutError(
        f"{named(resources)} is held by another, whose lease ends in {holder_ttl:.3f} s unless it is "
        "extended; wait longer (timeout=) or try again later",
        holder_ttl=holder_ttl,
    )


def too_slow(
    authority: str, ttl: float, resources: Iterable[str], nodes: Mapping[str, str] | None = None
) -> QuorumError:
    """Return the error of a grant that arrived after the end of its lease."""
    return QuorumError(
        f"{authority} answered too slowly for a ttl of {ttl:g} s: {named(resources)} was granted, but no "
        "validity was left; use a longer ttl",
        nodes=nodes,
    )


class GivenUp(BaseException):
    """Ends an acquisition that `FencedLock.cancel` has given up, as an interruption does."""


class Asked(Protocol):
    """An acquisition of a lock."""

    def go_on_waiting(self) -> None:
        """Note that it waits; raise GivenUp where it is to end."""


#: The acquisition of this context.
asked_here: ContextVar[Asked | None] = ContextVar("fencelock_asked_here", default=None)


def go_on_waiting() -> None:
    """Tell the acquisition of this context that it has waited. Drivers call it after each wait.

    Raises:
        GivenUp: it is to wait no more.
    """
    asked = asked_here.get()
    if asked is not None:
        asked.go_on_waiting()


class Terms(TypedDict):
    """How an acquisition is asked for: see `Authority.acquire`."""

    ttl: float
    timeout: float | None
    fair: NotRequired[bool]


class Authority(Protocol):
    """Grants leases and mints their tokens.

    For each resource, no two grants carry the same token, and a token exceeds every token whose
    acquisition had completed before its own began.

    Any thread and any greenlet may call it. A signal handler that has interrupted a call may get a
    RuntimeError. A forked child uses it with connections of its own and leaves those of its parent alone. An
    acquisition that raises leaves no lease behind.

    An authority may have more than this:

    - `close()` closes its connections, and using it again opens them again. One that is in `in_use` is closed
      when the interpreter exits, after leases have been given back.
    - `settle()` sends the releases that are owed; called before that.
    - `kinds`, a `frozenset` of what else it can do: `"fair"`.
    - `holder_ttl(resources)`, also of `aio`, tells for how many seconds one of them is held; None for none.
    - `dump(grant)` makes plain data of a grant, and `load(resources, tokens, data)` the grant of it again.
      Its end is known when it has been extended. `vouch(grant)`, also of `aio`, tells whether its tokens are
      those that were granted.
    - `inspect(resource)`, also of `aio`, returns the `LockInfo` of a resource, None where it is free;
      `inspect()` those of all that are held.
    """

    @property
    def aio(self) -> AsyncAuthority:
        """The same authority for coroutines."""

    def acquire(self, resources: tuple[str, ...], **terms: Unpack[Terms]) -> Grant:
        """Return leases of all the resources, or of none.

        Args:
            resources: what to lock.
            **terms: `ttl`: seconds that the leases last. `timeout`: seconds to wait for other holders; None
                for ever, 0 one try. `fair`: the client that has waited longest comes first, as far as the
                authority can tell.

        Raises:
            LockTimeoutError: another holder kept one of them until the timeout.
            AuthorityError: it could not be decided.
        """

    def extend_many(self, wishes: Sequence[Wish]) -> list[Grant | FencelockError]:
        """Extend any number of grants, in as few round trips as can be; return what became of each.

        That is the grant with its new end, which may be earlier than asked for where the authority has a
        limit of its own, and never earlier than it was; a LockLostError where the lease has ended; or an
        AuthorityError where that could not be decided, and the grant still ends when it would have.
        """

    def remint(self, grant: Grant, ttl: float) -> Grant:
        """Exchange a grant for one of the same resources with larger tokens, and no other grant in between.

        Raises:
            LockLostError: it came to nothing; the old grant is not in force any more either.
        """

    def release(self, grant: Grant) -> bool | None:
        """Give the leases back.

        Returns True if they were still ours, False if they no longer were, None if that could not be told.
        """


class AsyncAuthority(Protocol):
    """What an `Authority` offers to coroutines: the same names, promises and errors.

    One that is cancelled leaves no lease behind: what an acquisition may have got is given back, without
    waiting for that, and a release takes place all the same.
    """

    async def acquire(self, resources: tuple[str, ...], **terms: Unpack[Terms]) -> Grant:
        """See `Authority.acquire`."""

    async def extend_many(self, wishes: Sequence[Wish]) -> list[Grant | FencelockError]:
        """See `Authority.extend_many`."""

    async def remint(self, grant: Grant, ttl: float) -> Grant:
        """See `Authority.remint`."""

    async def release(self, grant: Grant) -> bool | None:
        """See `Authority.release`."""


#: The authorities that have a `close()`, which is called when the interpreter exits.
in_use: WeakSet[Any] = WeakSet()
