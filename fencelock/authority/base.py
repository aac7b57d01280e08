"""What every authority offers to the lock, be it a quorum of nodes, a database or a consensus store."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NotRequired, Protocol, TypedDict, TypeVar, Unpack
from weakref import WeakSet

from fencelock._generators import Steps
from fencelock._owners import running_loop
from fencelock.errors import FencelockError, LockTimeoutError, QuorumError
from fencelock.holder import LockInfo

_T = TypeVar("_T")

logger = logging.getLogger("fencelock.authority")


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


#: Event loops in which a blocking lock had to wait, and which the log has told of it.
_warned_of: WeakSet[asyncio.AbstractEventLoop] = WeakSet()


def warn_of_blocked_loop(key: str) -> None:
    """Log, once for each event loop, that a blocking acquisition keeps it from running."""
    if (loop := running_loop()) is not None and loop not in _warned_of:
        _warned_of.add(loop)
        logger.warning(
            "%s: a blocking lock waits for its holder inside an event loop, which runs nothing meanwhile: no "
            "task of it, and not the holder's either. In coroutines write `async with`, or `await "
            "lock.aio.acquire()`",
            key,
        )


class Terms(TypedDict):
    """How an acquisition is asked for: see `Authority.acquire_gen`."""

    ttl: float
    timeout: float | None
    fair: NotRequired[bool]
    go_on: NotRequired[Callable[[], None]]


class AsyncAuthority(Protocol):
    """The part of an `Authority` that differs for coroutines.

    A generator that is cancelled leaves no lease behind: what an acquisition may have got is given back,
    without waiting for that, and a release takes place all the same.
    """

    def acquire_gen(self, resources: tuple[str, ...], **terms: Unpack[Terms]) -> Steps[Grant]:
        """See `Authority.acquire_gen`."""

    def run(self, steps: Steps[_T]) -> Coroutine[Any, Any, _T]:
        """Run a generator; other tasks run meanwhile."""


class Authority(Protocol):
    """Grants leases and mints their tokens, by generators that `run` or `aio.run` runs.

    For each resource, no two grants carry the same token, and a token exceeds every token whose
    acquisition had completed before its own began.

    Any thread and any greenlet may call it. A signal handler that has interrupted a call may get a
    RuntimeError. A forked child uses it with connections of its own and leaves those of its parent alone. An
    acquisition that raises leaves no lease behind.

    An authority may have more than this:

    - `close()` closes its connections, and using it again opens them again. One that is in `in_use` is closed
      when the interpreter exits, after leases have been given back.
    - `settle()` sends the releases that are owed; called before that.
    - `dump(grant)` makes plain data of a grant, and `load(resources, tokens, data)` the grant of it again.
      Its end is known when it has been extended. `vouch_gen(grant)` tells whether its tokens are those that
      were granted.
    """

    @property
    def aio(self) -> AsyncAuthority:
        """The same authority for coroutines."""

    def run(self, steps: Steps[_T]) -> _T:
        """Run a generator, blocking."""

    def acquire_gen(self, resources: tuple[str, ...], **terms: Unpack[Terms]) -> Steps[Grant]:
        """Return leases of all the resources, or of none.

        Args:
            resources: what to lock.
            **terms: `ttl`: seconds that the leases last. `timeout`: seconds to wait for other holders; None
                for ever, 0 one try. `fair`: the client that has waited longest comes first, as far as the
                authority can tell. `go_on`: called after each wait; may raise `GivenUp`.

        Raises:
            LockTimeoutError: another holder kept one of them until the timeout.
            AuthorityError: it could not be decided.
            ValueError: it cannot be `fair`.
        """

    def extend_gen(self, wishes: Sequence[Wish]) -> Steps[list[Grant | FencelockError]]:
        """Extend any number of grants, in as few round trips as can be; return what became of each.

        That is the grant with its new end, which may be earlier than asked for where the authority has a
        limit of its own, and never earlier than it was; a LockLostError where the lease has ended; or an
        AuthorityError where that could not be decided, and the grant still ends when it would have.
        """

    def remint_gen(self, grant: Grant, ttl: float) -> Steps[Grant]:
        """Exchange a grant for one of the same resources with larger tokens, and no other grant in between.

        Raises:
            LockLostError: it came to nothing; the old grant is not in force any more either.
        """

    def release_gen(self, grant: Grant) -> Steps[bool | None]:
        """Give the leases back.

        Returns True if they were still ours, False if they no longer were, None if that could not be told.
        """

    def inspect_gen(self, resources: tuple[str, ...]) -> Steps[list[LockInfo]]:
        """Return the locks that are held of these resources; of all, where none is named."""


#: The authorities that have a `close()`, which is called when the interpreter exits.
in_use: WeakSet[Any] = WeakSet()
