"""One leader among several processes: the process that holds a lock.

A *term* is one lease of `fenced_lock`, which is renewed. The next leader has a larger token: after its write
or claim of a row, the database refuses the previous leader's late writes of that row.
"""

# ruff: noqa: SLF001 - a leader ends its terms

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeVar, final, overload

from fencelock._backoff import randomly
from fencelock._checks import check_callback, check_result
from fencelock._locking import fenced_lock
from fencelock.authority.base import Authority
from fencelock.errors import AuthorityError, FenceError, LockLostError, QuorumError
from fencelock.lease import Lease

_R = TypeVar("_R")

logger = logging.getLogger("fencelock.leader")

#: A term ends earlier than its lease, by this part of the ttl, so that its work can stop in time.
_MARGIN: Final = 0.1
_LOOK: Final = 0.05  # seconds between two checks by a task that sleeps until a term ends
_FIRST_PAUSE: Final = 0.1
_LONGEST_PAUSE: Final = 5.0


@final
class Term:
    """The time for which a leader is elected; it ends only once.

    ```python
    with leader("jobs") as term:
        term.on_end(lambda term: print("another one may lead"))
        while term.wait(0.1) and jobs:           # in coroutines: await term.wait_async(0.1)
            jobs.pop()
    ```

    Threads may share it. A forked child's copy is not current.

    Attributes:
        lease: guards the writes of this term: `bind(session, term.lease)` in other threads and executors.
    """

    def __init__(self, lease: Lease, ttl: float) -> None:
        self.lease = lease
        self._margin = ttl * _MARGIN
        self._over = threading.Event()
        self._was_current = False  # whether the term was current when its block was left
        self._callbacks: list[Callable[[Term], object]] = []

    def __repr__(self) -> str:
        state = "current" if self.is_current else "over"
        return f"<Term of {self.lease.resource!r} token={self.token} {state}>"

    @property
    def token(self) -> int:
        """The fencing token; later terms have larger tokens."""
        return self.lease.token

    @property
    def is_current(self) -> bool:
        """Whether the term goes on, by this process' clock; no server is asked.

        It becomes False a tenth of the ttl before the lease ends, after a known loss, and after the block.
        """
        lease = self.lease
        if not self._over.is_set() and (self._seconds_left() <= 0 or lease.lost or not lease._usable):
            self._end()
        return not self._over.is_set()

    def wait(self, seconds: float) -> bool:
        """Sleep until the seconds are over or the term ends; return whether the term goes on."""
        until = time.monotonic() + seconds
        while self.is_current and (left := until - time.monotonic()) > 0:
            self._over.wait(min(left, self._seconds_left()))
        return self.is_current

    async def wait_async(self, seconds: float) -> bool:
        """Sleep as `wait` does, while other tasks run."""
        until = time.monotonic() + seconds
        while self.is_current and (left := until - time.monotonic()) > 0:  # noqa: ASYNC110 - threads end it
            await asyncio.sleep(min(left, self._seconds_left(), _LOOK))
        return self.is_current

    def on_end(self, callback: Callable[[Term], object]) -> None:
        """Call a plain function with the term when its end is found; now if it was found already.

        `is_current`, `wait` and the end of the block find the end. Otherwise renewal finds it when the lease
        ends, and calls the function in a new thread, or by the event loop.

        Raises:
            TypeError: `callback` is not a plain function.
        """
        check_callback("on_end", "term", callback)
        self._callbacks.append(callback)
        if self._over.is_set():
            self._end()

    def _end(self) -> None:
        self._over.set()
        if self.lease._inherited:
            return  # the callbacks belong to the parent process
        with contextlib.suppress(IndexError):
            while True:
                call = self._callbacks.pop(0)  # in one step of Python: each is called once
                try:
                    call(self)
                except Exception:
                    logger.exception("a callback of on_end failed")

    def _seconds_left(self) -> float:
        return self.lease.expires_at - self._margin - time.monotonic()


@final
class Leader:
    """A candidate, and the leader while it is elected.

    ```python
    candidate = leader("jobs")
    candidate.run(lambda term: term.token)
    with candidate as term:                      # the same, without a second try
        ...
    ```

    If the authority does not answer an election, `run` logs the error and tries again; `with` raises it.
    """

    def __init__(self, name: str, ttl: float, authority: Authority | None) -> None:
        self._lock = fenced_lock(
            name, ttl=ttl, timeout=None, max_hold=None, reentrant=False, authority=authority
        )
        self._name = name
        self._ttl = ttl
        self._terms: dict[Lease, Term] = {}
        terms = self._terms  # and not `self`: a leader that was thrown away must not be renewed
        self._lock.on_lost(lambda lease: terms[lease]._end() if lease in terms else None)

    def __repr__(self) -> str:
        return f"<leader {self._name!r} {'elected' if self._terms else 'not elected'}>"

    def __enter__(self) -> Term:
        self._lock.__enter__()
        return self._elected()

    def __exit__(self, exc_type: object, exc_value: BaseException | None, traceback: object) -> None:
        try:
            self._resign()
        finally:
            self._lock.__exit__(exc_type, exc_value, traceback)

    async def __aenter__(self) -> Term:
        await self._lock.__aenter__()
        return self._elected()

    async def __aexit__(self, exc_type: object, exc_value: BaseException | None, traceback: object) -> None:
        try:
            self._resign()
        finally:
            await self._lock.__aexit__(exc_type, exc_value, traceback)

    def _elected(self) -> Term:
        term = self._terms[self._lock.lease] = Term(self._lock.lease, self._ttl)
        logger.info("%s: elected with token %d", self._name, term.token)
        return term

    def _resign(self) -> None:
        term = self._terms.pop(self._lock.lease)
        term._was_current = term.is_current
        term._end()

    @overload
    def run(self, work: Callable[[Term], Awaitable[_R]]) -> Awaitable[_R]: ...
    @overload
    def run(self, work: Callable[[Term], _R]) -> _R: ...
    def run(self, work: Callable[[Term], Any]) -> Any:
        """Call `work(term)` in each term, until it returns while its term is current; return its result.

        `work` is called again if its term was over when it returned, or raised a LockLostError or FenceError,
        or if the release raises a LockLostError. A QuorumError of the election is logged, and another
        election follows.

        Returns:
            What `work` returned in a current term.

        Raises:
            AuthorityError: the authority refuses, or `work` raised the error.
        """
        if inspect.iscoroutinefunction(work):
            return self._run_async(work)
        check_callback("run", "term", work)
        pause = 0.0
        while True:
            term, is_done = None, False
            try:
                with self as term:
                    result = check_result("the work of a leader", work(term))
                    is_done = True
                    if term.is_current:
                        return result
            except (AuthorityError, FenceError, LockLostError) as error:
                self._check_passing(error, term, is_done=is_done)
            pause = self._next_pause(term, pause)
            time.sleep(pause)

    async def _run_async(self, work: Callable[[Term], Awaitable[_R]]) -> _R:
        pause = 0.0
        while True:
            term, is_done = None, False
            try:
                async with self as term:
                    result = await work(term)
                    is_done = True
                    if term.is_current:
                        return result
            except (AuthorityError, FenceError, LockLostError) as error:
                self._check_passing(error, term, is_done=is_done)
            pause = self._next_pause(term, pause)
            await asyncio.sleep(pause)

    def _check_passing(self, error: Exception, term: Term | None, *, is_done: bool) -> None:
        """Raise an error again, unless another election or another term may succeed.

        A LockLostError of the work in a current term is about another lock.
        """
        if term is None:
            if not isinstance(error, QuorumError):
                raise error
            logger.warning(
                "%s: could not take part in the election, and tries again soon: %s", self._name, error
            )
        elif isinstance(error, FenceError | LockLostError) and (is_done or not term._was_current):
            logger.warning("%s: the term with token %d is over: %s", self._name, term.token, error)
        else:
            raise error

    def _next_pause(self, term: Term | None, last: float) -> float:
        """Return a random pause; its limit rises with each election, unless a term lasted over a ttl."""
        has_lasted = term is not None and time.monotonic() - term.lease._granted_at > self._ttl
        longest = _FIRST_PAUSE if has_lasted else min(_LONGEST_PAUSE, _FIRST_PAUSE + 2 * last)
        return randomly(longest)


def leader(name: str, *, ttl: float = 15.0, authority: Authority | None = None) -> Leader:
    """Return a candidate for the one leader of this name: for `with`, `async with`, or `run`.

    ```python
    def work(term: Term) -> int:
        while term.wait(0.1) and jobs:           # until the term ends, or nothing is left
            jobs.pop()
        return term.token

    leader("jobs").run(work)
    ```

    Args:
        name: the name of the lock; its lease guards rows of this resource.
        ttl: seconds until another candidate replaces a dead leader.
        authority: as for `fenced_lock`.

    Raises:
        TypeError, ValueError: as `fenced_lock` does.
    """
    return Leader(name, ttl, authority)
