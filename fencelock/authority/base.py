"""The protocol between a lock and its authority: a quorum of nodes, a database, or a consensus store."""

from __future__ import annotations

import abc
import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NotRequired, Protocol, TypedDict, TypeVar, Unpack
from weakref import WeakSet

from fencelock._generators import Steps
from fencelock.errors import FencelockError, LockTimeoutError, QuorumError
from fencelock.holder import LockInfo

_T = TypeVar("_T")

logger: logging.Logger = logging.getLogger("fencelock.authority")


@dataclass(slots=True, unsafe_hash=True)
class Grant:
    """Leases of one or several resources that were granted together. A grant is never changed."""

    resources: tuple[str, ...]  # in the order in which they were asked for
    tokens: tuple[int, ...]  # the fencing token of each
    expires_at: float  # when all of them end, on the clock of `time.monotonic`
    proof: Any  # data by which the authority recognises the grant


Wish = tuple[Grant, float]  # a grant, and for how many seconds from now it is to last


def named(resources: Iterable[str]) -> str:
    """Return resources for a sentence: quoted, with commas between them."""
    return ", ".join(map(repr, resources))


_LEAST_SHOWN: Final = 0.001  # seconds; if a holder has less left, the error does not mention a holder


def held_by_another(resources: Iterable[str], holder_ttl: float | None) -> LockTimeoutError:
    """Return the error of an acquisition whose time is over.

    The resources are held for `holder_ttl` more seconds; None if they are free by now, or this is unknown.
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


AFTER: Final = 0.4  # seconds that all of an acquisition may take beyond its timeout


class GivenUp(BaseException):
    """Raised to end a cancelled acquisition; a BaseException, because it is handled like an interruption."""


#: Event loops for which the log has warned of a waiting blocking lock.
_warned_of: WeakSet[asyncio.AbstractEventLoop] = WeakSet()


def warn_of_blocked_loop(loop: asyncio.AbstractEventLoop, lock: object) -> None:
    """Log, once for each event loop, that a blocking acquisition keeps the loop from running."""
    if loop not in _warned_of:
        _warned_of.add(loop)
        logger.warning(
            "%r: a blocking lock inside an event loop, none of whose tasks can run meanwhile, not even the "
            "holder's. In coroutines write `async with`, or `await lock.aio.acquire()`",
            lock,
        )


class Terms(TypedDict):
    """The terms of an acquisition."""

    ttl: float  # seconds that the leases last
    timeout: float | None  # seconds to wait for other holders; None for ever, 0 one try
    #: The client that has waited longest acquires first, as far as the authority can tell.
    fair: NotRequired[bool]
    go_on: NotRequired[Callable[[], None]]  # called while waiting; may raise `GivenUp`
    at_least: NotRequired[float]  # for how many seconds from its grant `keep_gen` may keep the lease


class AsyncRunner(Protocol):
    """Runs the generators of an `Authority` for coroutines.

    A cancelled acquisition leaves no lease behind: it releases what it may have acquired, without waiting. A
    cancelled release takes place all the same.
    """

    def run(self, steps: Steps[_T]) -> Coroutine[Any, Any, _T]:
        """Run a generator; other tasks run meanwhile."""


class Authority(abc.ABC):
    """Grants leases and mints their tokens, by generators that `run` or `aio.run` runs.

    For each resource, no two grants have the same token. A token exceeds every token whose acquisition had
    completed before its own acquisition began.

    Any thread and any greenlet may call it. A signal handler that has interrupted a call may get a
    RuntimeError. A forked child uses its own connections, and leaves those of its parent alone. An
    acquisition that raises leaves no lease behind.

    An authority may have more methods:

    - `close()` closes its connections; the next use opens them again. The authorities in `in_use` are closed
      when the interpreter exits, after leases were released.
    - `connect_here(until)` connects in the calling thread; it is called before leases are released at exit.
    - `is_async` tells whether only coroutines can use it.
    - `settle()` sends the releases that are owed; it is called before `close()` when the interpreter exits.
    - `keep_gen(grant, until)` moves the end of the leases to `until`, on the clock of `time.monotonic`,
      earlier or later, even if this process ends. It returns as `release_gen` does. `at_least=` needs it.
    - `is_held_gen(resources)` returns whether one of the resources is known to have a holder; False while
      contenders have divided the votes. `if_held="skip"` needs it.
    - `dump(grant)` returns plain data for a grant. `load(resources, tokens, data)` returns the grant of such
      data, whose end is unknown until it is extended. `vouch_gen(grant)` returns whether its locks are held
      with its tokens.
    """

    aio: AsyncRunner  # the same authority for coroutines

    @abc.abstractmethod
    def run(self, steps: Steps[_T]) -> _T:
        """Run a generator, blocking."""

    @abc.abstractmethod
    def acquire_gen(self, resources: tuple[str, ...], **terms: Unpack[Terms]) -> Steps[Grant]:
        """Acquire all resources, or none, and return the grant.

        Raises:
            LockTimeoutError: the resources were not acquired before the timeout.
            AuthorityError: the authority did not answer in time, or refuses.
            ValueError: the authority does not allow these terms.
        """

    @abc.abstractmethod
    def extend_gen(self, wishes: Sequence[Wish]) -> Steps[list[Grant | FencelockError]]:
        """Extend any number of grants, in as few round trips as possible; return the outcome of each.

        An outcome is the grant with its new end, or a LockLostError if the lease has ended. It is an
        AuthorityError if this is unknown; the grant then ends as before. The new end is never earlier
        than the old one. The authority may extend a lease by less than was asked for.
        """

    @abc.abstractmethod
    def remint_gen(self, grant: Grant, ttl: float) -> Steps[Grant]:
        """Exchange a grant for one of the same resources with larger tokens; no other holder comes between.

        Raises:
            LockLostError, AuthorityError: there is no new grant, and the old one may have ended, too.
        """

    @abc.abstractmethod
    def release_gen(self, grant: Grant) -> Steps[bool | None]:
        """Release the leases.

        Returns True if they were still ours, False if they had ended before, None if this is unknown.

        Raises:
            AuthorityError: the authority did not answer, or refuses.
        """

    @abc.abstractmethod
    def inspect_gen(self, resources: tuple[str, ...]) -> Steps[list[LockInfo]]:
        """Return the held locks among these resources; of all resources, if none is named.

        Raises:
            AuthorityError: the authority did not answer, or cannot tell.
        """


#: The authorities that have a `close()`, which is called when the interpreter exits.
in_use: WeakSet[Any] = WeakSet()

#: The function that makes the locks of an authority. `lock.slots` adds it: an authority knows no lock.
lock_makers: list[Callable[..., Any]] = []

#: Called in a loop with an authority whose connections there are about to close. `lock.at_exit` adds one.
before_closing: list[Callable[[Any], Awaitable[None]]] = []
