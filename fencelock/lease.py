"""The lease, which locks and the guard share, and the leases that the current context holds.

Locks make leases and move their end; the guard reads resource and token. This module has no code for Redis or
SQLAlchemy.

A context variable stores the held leases. Tasks, greenlets of SQLAlchemy's asyncio extension and
`asyncio.to_thread` copy it. New threads, executors, and the greenlets that gevent spawns do not get it.
`held_leases` leaves out a released lease in every copy, and a lease whose last block was left.
"""

from __future__ import annotations

import contextlib
import math
import re
import time
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, Final, final
from urllib.parse import quote, unquote
from weakref import ref

from fencelock._process import in_forked_child
from fencelock.errors import CommitInDoubtError, LockLostError, NotHeldError
from fencelock.tokens import check as check_token

MAX_RESOURCE_LENGTH = 255
#: Matches a name into which an f-string has put an object instead of a value.
OBJECT_IN_NAME = re.compile(r"<built-in | object at 0x")
_SAFE: Final = ":/@"  # characters of a name that a header has unquoted, besides letters, digits and `_.-~`
_ENTRY: Final = re.compile(rf"((?:[A-Za-z0-9_.~{_SAFE}-]|%[0-9A-Fa-f]{{2}})+)=([1-9][0-9]{{0,18}})")
#: The longest entry of a header: each character of a name may be four bytes, each written like `%F0`.
_LONGEST_ENTRY: Final = MAX_RESOURCE_LENGTH * 12 + len("=") + 19


def check_resource(resource: object) -> str:
    """Return `resource`, as a plain string, if it can name a lock.

    A name has 1 to 255 characters, no control characters or surrogates, and no white space at either end.
    Every supported database stores and compares it exactly.
    """
    if not isinstance(resource, str):
        raise TypeError(f"a resource is named by a str such as 'order:1', not {type(resource).__name__}")
    if not resource:
        raise ValueError("a resource needs a name, such as 'order:1'; this one is empty")
    if len(resource) > MAX_RESOURCE_LENGTH:
        raise ValueError(
            f"a resource's name has at most {MAX_RESOURCE_LENGTH} characters, and this one has "
            f"{len(resource)}: {resource[:40]!r}…; where names are long by nature, lock a digest of the name"
        )
    if resource != resource.strip():
        raise ValueError(f"a resource's name neither begins nor ends with white space: {resource!r}")
    if not resource.isprintable() and {"Cc", "Cs"} & set(map(unicodedata.category, resource)):
        raise ValueError(f"a resource's name has no control characters or surrogates: {resource!r}")
    # A subclass of str may print another text: a member of an enumeration prints its name.
    return str.__str__(resource)


def validity(began: float, ttl: float) -> float:
    """Return when a lease of `ttl` seconds ends for its holder, if it was asked for at `began`.

    Times are of `time.monotonic`. The end is 1 % of the ttl and 2 ms early, because clocks may disagree.
    """
    return began + ttl - (ttl * 0.01 + 0.002)


#: The SQLAlchemy session that began the last transaction in this context, as far as the guard knows.
latest_session: ContextVar[ref[Any] | None] = ContextVar("fencelock_latest_session", default=None)

#: Identifies this process. A forked child puts in another object, so that inherited leases are lost.
_process = [object()]
in_forked_child(lambda: _process.__setitem__(0, object()))


@final
class Lease:
    """A time-bounded hold on a resource, with its fencing token.

    ```python
    with fenced_lock("order:3"):
        text = assert_held("order:3").to_header()    # "order:3=123", for another service
    lease = Lease.from_header(text)
    older = Lease("order:3", lease.token - 1)
    ```

    Its token is larger than the token of every lease of the resource that was acquired before this
    acquisition began. A lease does *not* promise that no other holder works on the resource now. Only the
    storage, which compares tokens, can tell.

    Args:
        resource: name of the resource.
        token: 1 … 2**63 - 1.
        expires_at: when the lease ends, on the clock of `time.monotonic`. By default it never ends: give
            `bind` such a lease if the token is of another source.
    """

    __slots__ = (
        *("__weakref__", "_doubted", "_expires_at", "_needed_by", "_process"),
        *("_resource", "_token", "_waiting", "_committed"),
        *("_granted_at", "_guarded", "_left", "_released", "_why_lost"),
    )

    def __init__(self, resource: str, token: int, expires_at: float = math.inf) -> None:
        self._resource = check_resource(resource)
        self._token = check_token(token)
        self._expires_at = expires_at
        self._released: bool = False
        self._left: bool = False
        self._guarded: bool = False
        self._committed: bool = False
        self._why_lost: str = ""
        self._granted_at: float = -math.inf
        self._process = _process[0]
        self._doubted = 0
        self._needed_by: set[object] = set()
        self._waiting: list[Callable[[], object]] = []

    def __repr__(self) -> str:
        state = "released" if self._released else "lost" if self.lost else f"{self.remaining:.3f} s left"
        return f"<Lease {self._resource!r} token={self._token} {state}>"

    @property
    def resource(self) -> str:
        """The name of the resource."""
        return self._resource

    @property
    def token(self) -> int:
        """The fencing token to write with. It changes only when the lease is reminted."""
        return self._token

    def to_header(self) -> str:
        """Return name and token as ASCII text for the header `Fencing-Token`, such as `order:1=123`.

        The text is no secret, and no proof: see https://fencelock.github.io/fencelock/services/
        """
        return f"{quote(self._resource, safe=_SAFE)}={self._token}"

    @staticmethod
    def from_header(text: str) -> Lease:
        """Return the lease that a text of `to_header` names; by this process' clock it never ends.

        Raises:
            ValueError: for any other text, also for one that names several leases.
        """
        given = str(text)
        entry = _ENTRY.fullmatch(given) if len(given) <= _LONGEST_ENTRY else None
        if entry is None:
            raise ValueError(f"a fencing token is written as 'order:1=123', not as {given[:80]!r}")
        return Lease(unquote(entry[1], errors="strict"), int(entry[2]))

    @property
    def expires_at(self) -> float:
        """When the lease ends unless it is extended: seconds on the clock of `time.monotonic`."""
        return self._expires_at

    @property
    def remaining(self) -> float:
        """Seconds until the lease ends; 0.0 once it has."""
        return max(0.0, self._expires_at - time.monotonic())

    @property
    def why_lost(self) -> str:
        """Why the lease ended before its release; empty if no loss was noted."""
        return self._why_lost

    @property
    def _usable(self) -> bool:
        """Whether the lease is not released, and its last block was not left. It may be lost."""
        return not (self._released or self._left)

    @property
    def lost(self) -> bool:
        """Whether the lease is known to have ended before it was released.

        True if its time ran out by this process' clock, if its loss was noted, and in a forked child's copy.
        """
        if self._released:
            return False
        return (
            bool(self._why_lost) or self._process is not _process[0] or self._expires_at <= time.monotonic()
        )

    @property
    def _over(self) -> bool:
        """Whether the lease was released, its loss was noted, or it belongs to the parent process."""
        return self._released or bool(self._why_lost) or self._inherited

    @property
    def _inherited(self) -> bool:
        """Whether this is a forked child's copy of a lease, which only the parent process may release."""
        return self._process is not _process[0]

    def _check(self) -> None:
        """Raise LockLostError if a loss was noted; the end by the clock does not count."""
        parent = "it belongs to the process that this one was forked from"
        if reason := parent if self._process is not _process[0] else self._why_lost:
            raise LockLostError(
                f"the lease of {self._resource!r} is lost: {reason}; acquire the lock again", written=False
            )

    def _token_to_write(self) -> int:
        """Return the token for a write under the lease.

        It raises after the end of the lease, because the storage accepts an older token until a newer holder
        has claimed or written the row.
        """
        self._check()
        if self._expires_at <= time.monotonic():
            raise LockLostError(
                f"the lease of {self._resource!r} ended before this statement: nothing was sent, so roll "
                f"back, and lock again",
                written=False,
            )
        if self._doubted == self._token:
            raise CommitInDoubtError(
                f"a transaction that was written under the lease of {self._resource!r} with token "
                f"{self._token} may still be committed: the outcome of its COMMIT is unknown, so "
                f"roll back, call remint() on the lock (or lock again), and load again what you write"
            )
        return self._token

    # Methods that the lock calls.

    def _extend_to(self, expires_at: float) -> None:
        self._expires_at = expires_at

    def _remint(self, token: int, expires_at: float) -> None:
        self._token = check_token(token)
        self._expires_at = expires_at

    def _mark_lost(self, reason: str) -> None:
        self._why_lost = self._why_lost or reason

    # Methods that the guard and the lock call, in any thread.

    @property
    def in_doubt(self) -> bool:
        """Whether an earlier transaction that wrote with the present token may still be committed."""
        return self._doubted == self._token

    def _doubt(self) -> None:
        self._doubted = self._token

    @property
    def _needed(self) -> bool:
        return bool(self._needed_by)

    def _need(self, user: object) -> None:
        """Note that `user`, which stands for a transaction, needs the lease until its end."""
        self._guarded = True
        self._needed_by.add(user)

    def _let_go(self, user: object, *, committed: bool = False) -> list[Callable[[], object]]:
        """Note that `user` has ended; return the functions to call if nothing needs the lease any more."""
        self._committed = self._committed or committed
        self._needed_by.discard(user)
        calls: list[Callable[[], object]] = []
        with contextlib.suppress(IndexError):
            while not self._needed_by:
                calls.append(self._waiting.pop())
        return calls

    def _when_let_go(self, call: Callable[[], object]) -> bool:
        """Keep `call` until no transaction needs the lease; return False if none needs it now."""
        self._waiting.append(call)
        if self._needed_by:
            return True
        try:  # in another thread, `let_go` may have taken the call already, and then makes it
            self._waiting.remove(call)
        except ValueError:
            return True
        return False


_held: ContextVar[tuple[Lease | ref[Lease], ...]] = ContextVar("fencelock_held", default=())
_left: ContextVar[tuple[float, tuple[Lease, ...]]] = ContextVar("fencelock_left", default=(0.0, ()))


def newest(leases: Iterable[Lease]) -> dict[str, Lease]:
    """Return the usable leases by resource: of several leases of one resource, that with the largest token.

    A context has several if it locks again inside a block that it has lost, or under a received token. The
    newest counts even if it is lost: a store must not take the token of an older one after it.
    """
    found: dict[str, Lease] = {}
    for lease in leases:
        known = found.get(lease.resource)
        is_usable = not (lease._released or lease._left)
        if is_usable and (known is None or known.token < lease.token):
            found[lease.resource] = lease
    return found


def held_by_resource() -> dict[str, Lease]:
    """Return the leases that the current context holds, one for each resource."""
    leases = [entry if isinstance(entry, Lease) else entry() for entry in _held.get()]
    return newest([lease for lease in leases if lease is not None])


def held_leases() -> tuple[Lease, ...]:
    """Return the leases that the current context holds, one for each resource."""
    return tuple(held_by_resource().values())


def stands_here(lease: Lease) -> bool:
    """Return whether the current context has a lease, which it acquired or copied from another context.

    It still has the lease after the last block was left, while open transactions need it.
    """
    return lease in _held.get()


def _standing() -> list[Lease]:
    leases = [entry if isinstance(entry, Lease) else entry() for entry in _held.get()]
    return [lease for lease in leases if lease is not None and not lease._released]


def note_held(*leases: Lease) -> None:
    """Add leases to the current context; a lease that it holds already keeps its place in the order."""
    if not _held.get():
        _held.set(leases)
        return
    held = _standing()
    # Expired leases become weak references, because leases that are never released must not pile up. Code
    # that still uses such a lease keeps it alive, and the storage refuses its token.
    earlier = (lease if lease.remaining else ref(lease) for lease in held)
    _held.set((*earlier, *(lease for lease in leases if lease not in held)))


@contextlib.contextmanager
def holding(leases: Sequence[Lease]) -> Iterator[None]:
    """Let the current context hold these leases in a block, beside those that it holds.

    Tasks that are started in the block keep them. The end of the block releases none.
    """
    before = _held.set((*_standing(), *leases))
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # a coroutine that is thrown away ends in another context
            _held.reset(before)


def note_left(*leases: Lease) -> None:
    """Note that the last block under these leases was left."""
    _left.set((time.monotonic(), leases))


def note_ended(*leases: Lease) -> None:
    """Remove leases from the current context; leases that it does not hold are ignored."""
    _left.set((time.monotonic(), leases))
    # The comparison is quick, and mostly true: the context holds nothing else.
    _held.set(() if _held.get() == leases else tuple([each for each in _standing() if each not in leases]))


def was_left(resource: str, *, since: float = 0.0) -> bool:
    """Return whether the last block that this context left held `resource`, and was left after `since`."""
    when, leases = _left.get()
    return when >= since and any(lease.resource == resource for lease in leases)


def assert_held(resource: str) -> Lease:
    """Return the lease that this context holds on a resource; raise an error without a valid lease.

    ```python
    def price(order_id: int) -> None:
        assert_held(f"order:{order_id}")
        ...

    with fenced_lock("order:1"):
        price(1)
    ```

    Use it in code that relies on its caller's lock. It asks no server: only the storage knows whether another
    holder has taken over.

    Raises:
        NotHeldError: this context holds no lock on the resource. New threads and executors do not see the
            locks of their starter.
        LockLostError: the lease has ended.
    """
    lease = held_by_resource().get(resource)
    if lease is not None:
        lease._check()
        if lease.lost:
            raise LockLostError(f"the lease of {resource!r} has ended: lock again", written=False)
        return lease
    left = "; a block of it was left" if was_left(resource) else ""
    raise NotHeldError(
        f"{resource!r} is not locked here{left}: write `with fenced_lock({resource!r}):` around"
    )
