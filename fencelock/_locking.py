"""Makes the locks of users, and finds the default authority: from `configure` or FENCELOCK_URL."""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import os
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, Unpack, cast, overload

from sqlalchemy import URL, Engine

from fencelock._engines import is_async_engine
from fencelock.authority.base import Authority, Grant, logger
from fencelock.authority.database.database import Database
from fencelock.errors import AuthorityError
from fencelock.lock.base import HANDED
from fencelock.lock.lock import FencedLock
from fencelock.lock.options import DEFAULT_TTL, AllLockSettings, IfHeld, IfLost, LockSettings
from fencelock.lock.slots import FencedSemaphore, check_name, check_slots, make_lock
from fencelock.tokens import check as check_token

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncEngine

    from fencelock.authority.line.line import LineAuthority
    from fencelock.authority.redlock.redlock import Redlock
    from fencelock.authority.redlock.transport.endpoints import Source

    Shipped: TypeAlias = Redlock | Database | LineAuthority  # the authorities of this library


_Authority = TypeVar("_Authority", bound=Authority)

#: The class of an authority by URL scheme without `+driver`. A class is loaded when it is first needed.
_FACTORIES: dict[str, str] = {
    **dict.fromkeys(("redis", "rediss", "valkey", "valkeys", "unix"), "Redlock"),
    **dict.fromkeys(("postgresql", "mysql", "mariadb", "sqlite"), "Database"),
    **dict.fromkeys(("etcd", "etcds"), "Etcd"),
    **dict.fromkeys(("zookeeper", "zookeepers"), "ZooKeeper"),
}

_lock = threading.RLock()  # reentrant, because a signal handler may interrupt its owner
_default: Authority | None = None


@overload
def configure(authority: str, **options: Any) -> Shipped: ...
@overload
def configure(authority: Engine | AsyncEngine | URL, **options: Any) -> Database: ...
@overload
def configure(authority: Source | Sequence[Source], **options: Any) -> Redlock: ...
@overload
def configure(authority: _Authority) -> _Authority: ...
def configure(authority: Any, **options: Any) -> Any:
    """Make an authority the default of this process, and return it.

    ```python
    fencelock.configure(engine)
    fencelock.configure("redis://r1:6379,redis://r2:6379,redis://r3:6379", node_timeout=0.2)
    ```

    Connections are opened when they are first needed. Without this call, FENCELOCK_URL is used.

    Args:
        authority: the URL of a database (`sqlite:///app.db`, `postgresql+psycopg://user@host/name`,
            `mysql+pymysql://user@host/name`) or an engine of SQLAlchemy; URLs of nodes
            (`redis://host:6379,…`) or clients of redis-py; `etcd://host:2379,…`, `zookeeper://host:2181,…`;
            or a ready authority.
        **options: settings of `Database`, `Redlock`, `Etcd` or `ZooKeeper`.

    Returns:
        The authority.

    Raises:
        ValueError: for a bad URL or setting.
        TypeError: for other arguments, and for options with a ready authority.
        ImportError: if a library is missing.
    """
    global _default  # noqa: PLW0603 - the process default is what this module is about
    ready = hasattr(authority, "acquire_gen")
    if ready and options:
        raise TypeError(f"{authority!r} has its settings already; these belong to it: {', '.join(options)}")
    made = authority if ready else _make(authority, options)
    if (url := os.environ.get("FENCELOCK_URL", "")) and url != authority and _place(url) != _place(made):
        logger.warning(
            "configure() has named %r, and FENCELOCK_URL names another authority: this process uses the "
            "first, and commands such as `fencelock run` use FENCELOCK_URL",
            made,
        )
    with _lock:
        _default = made
    return made


def _place(authority: Any) -> object:
    """Return a value to compare authorities by, without driver, user and options; None for a bad URL."""
    if isinstance(authority, str):
        try:
            authority = _make(authority, {})
        except (ValueError, TypeError, ImportError):
            return None
    if (nodes := getattr(authority, "nodes", None)) is not None:
        return {*nodes}
    return re.sub(r"\+\w+(?=://)|(?<=//)[^@/]*@|:(?:5432|3306)(?=/)|\?.*|>$", "", repr(authority))


def load(name: str) -> Any:
    """Return the class of an authority, and import it with the client of its servers."""
    room = name.lower()
    try:
        return getattr(importlib.import_module(f"fencelock.authority.{room}.{room}"), name)
    except ImportError as error:
        raise ImportError(f"{name} needs one more library: pip install 'fencelock[{room}]'") from error


def factory_of(url: str) -> Callable[..., Shipped]:
    """Return the authority's class that a URL names; raise ValueError if none, ImportError without extra."""
    before, mark, _ = url.strip().partition("://")
    scheme = before.partition("+")[0].lower()
    if scheme not in _FACTORIES:
        shown = repr(scheme) if mark else "a text without ://"  # the text may have a password
        raise ValueError(
            f"{shown} names no authority that fencelock knows: write a URL such as sqlite:///app.db, "
            "postgresql+psycopg://user@host/name, mysql+pymysql://user@host/name, redis://host:6379, "
            "etcd://host:2379 or zookeeper://host:2181"
        )
    return cast("Callable[..., Shipped]", load(_FACTORIES[scheme]))


def _make(source: Any, options: dict[str, Any]) -> Shipped:
    if isinstance(source, str):
        return factory_of(source)(source, **options)
    if isinstance(source, URL | Engine) or is_async_engine(source):
        return Database(source, **options)
    if isinstance(source, Sequence) or callable(getattr(source, "execute_command", None)):
        return cast("Shipped", load("Redlock")(source, **options))
    raise TypeError(f"an authority is a URL, an Engine or redis-py clients, not {type(source).__name__}")


@contextlib.contextmanager
def as_default(authority: Authority) -> Iterator[None]:
    """Make an authority the default in a block; restore the previous default afterwards."""
    global _default  # noqa: PLW0603 - the process default is what this module is about
    with _lock:
        before, _default = _default, authority
    try:
        yield
    finally:
        with _lock:
            _default = before


def default_authority() -> Authority:
    """Return the default authority of this process; raise AuthorityError if none is configured."""
    global _default  # noqa: PLW0603 - the process default is what this module is about
    with _lock:
        if _default is None:
            url = os.environ.get("FENCELOCK_URL", "")
            if not url.strip():
                raise AuthorityError(
                    "no authority is configured, so no lock can be granted. Add one line with the database "
                    "of this project: fencelock.configure(engine), or "
                    "fencelock.configure('sqlite:///app.db') if all workers are on one machine. Nodes of "
                    "Redis or Valkey work, too: fencelock.configure('redis://host:6379,…'). Or set the "
                    "environment variable FENCELOCK_URL to such a URL"
                )
            _default = _make(url, {})
        return _default


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
    if_held: IfHeld = "wait",
    at_least: float | None = None,
    shared: bool = False,
    readers: int | None = None,
    authority: Authority | None = None,
) -> FencedLock[int] | FencedLock[tuple[int, ...]]:
    """Return a lock on a resource, to be entered with `with` or `async with`: it yields the fencing token.

    ```python
    with fenced_lock("order:1") as token, Session(engine) as session:
        order = claim(session, Order, 1)
        order.status = "paid"
        session.commit()
    ```

    Every lease of a resource has a larger token than all leases that were acquired before its own acquisition
    began. The storage compares tokens, because an older holder may still be at work. Under which faults:
    https://fencelock.github.io/fencelock/correctness/

    Args:
        *resources: names of 1 to 255 characters, without control characters. Several, at most 5000, are
            acquired together or not at all, and yield a tuple of tokens in their order. A name that occurs
            twice is one lock.
        ttl: seconds that the lease lasts after its acquisition, and after each extension.
        timeout: seconds to wait for another holder: None waits for ever, 0 tries once.
        renew: extend the lease in the background, after each third of its ttl, until it is released.
        max_hold: seconds after which a lease is lost instead of renewed, because a worker that hangs must
            not hold for ever. None for no limit.
        fair: wait in line: first come, first served, as far as a quorum can tell.
        reentrant: let a thread, task or greenlet enter again a lock it holds; else LockTimeoutError at once.
            A shared lock then takes one more slot.
        if_lost: "raise" LockLostError or "warn" in the log, when a block is left whose lease was lost. Not
            used if the body raised an error, or if work was committed and no transaction is open or in doubt.
        if_held: "wait" for another holder, or "skip". Then `timeout` is not used. As soon as a holder is
            known, a function below `@fenced` returns None, and `with` raises LockTimeoutError.
        at_least: seconds since its grant for which the lease is kept, also if the block is left earlier. This
            process cannot enter again then, either. If it dies in the block, the lease ends with its ttl.
            None to release when the block is left.
        shared: read beside other readers, while no writer holds the lock. The guard accepts no writes then.
        readers: how many may read at once, the same number in all programs. Without this number, a lock that
            is not shared ignores readers.
        authority: grants the lease; by default the one of `configure()` or FENCELOCK_URL.

    Raises:
        TypeError: for arguments of the wrong kind; entering raises the errors of `FencedLock.acquire`.
        ValueError: for arguments out of range.
    """
    make: Callable[..., FencedLock[Any]] = FencedLock
    if shared is not False or readers is not None or "#" in str(resources):
        make = functools.partial(make_lock, shared=shared, readers=readers)
    return make(
        resources,
        default_authority if authority is None else _finder(authority),
        ttl=ttl,
        timeout=timeout,
        renew=renew,
        max_hold=max_hold,
        fair=fair,
        reentrant=reentrant,
        if_lost=if_lost,
        if_held=if_held,
        at_least=at_least,
    )


def _finder(authority: Authority | None) -> Callable[[], Authority]:
    """Return a function that returns the authority, or by default that of `configure()` or FENCELOCK_URL."""
    if authority is None:
        return default_authority
    if not hasattr(authority, "acquire_gen"):
        kind = type(authority).__name__
        raise TypeError(f"authority= is a Redlock(…), Database(…), Etcd(…) or ZooKeeper(…), not {kind}")
    return lambda: authority


def fenced_semaphore(
    name: str, /, slots: int = 4, *, authority: Authority | None = None, **settings: Unpack[LockSettings]
) -> FencedSemaphore:
    """Return a lock that `slots` holders may have at once; it yields the number of the slot, and its token.

    ```python
    with fenced_semaphore("gpu", slots=4) as (slot, token):
        ...                                      # the token guards rows of the resource "gpu#2", if slot is 2
    ```

    Each slot is a lock of its own, `name#0` and so on, and its tokens rise. A thread, task or greenlet that
    has a slot enters it again, if `reentrant`. `slots` may grow at any time. After it was lowered, programs
    with the lower number wait until the higher slots are free.

    Args:
        name: as for `fenced_lock`, without `#` and a number at its end.
        slots: from 1 to 1000, the same number in all programs.
        authority: grants the leases; by default the one of `configure()` or FENCELOCK_URL.
        **settings: as for `fenced_lock`, except `shared` and `readers`. Callers try different slots, so
            `fair` orders only the callers that wait for the same slot.

    Raises:
        TypeError, ValueError: as `fenced_lock` does.
    """
    if given := {"shared", "readers"} & settings.keys():
        raise TypeError(
            f"fenced_semaphore takes no {', '.join(sorted(given))}: each holder has a slot of its own"
        )
    return FencedSemaphore(check_name(name), check_slots("slots", slots), _finder(authority), **settings)


def take_over(text: str, **settings: Unpack[AllLockSettings]) -> FencedLock[Any]:
    """Return a lock that was handed over: its first entering extends the lease instead of acquiring it.

    ```python
    lock = fenced_lock("import")
    lock.acquire()
    text = lock.hand_over()                      # send it to a worker, which goes on with the work:

    with take_over(text) as token:
        ...
    ```

    The tokens do not change. Use each text in one process only. Entering raises LockLostError if the lease
    has ended, or if the text has other tokens than were granted.

    Args:
        text: the result of `FencedLock.hand_over`.
        **settings: as for `fenced_lock`. ttl and at_least are those of the text, and max_hold begins again.

    Raises:
        ValueError: for any other text, also of another kind of authority or another namespace; and for
            settings out of range.
        TypeError: for settings of the wrong kind.
        AuthorityError: if no authority is configured.
    """
    settings["authority"] = authority = cast("Any", _finder(settings.get("authority"))())
    try:
        grant, proof, by, ttl, at_least = _read(text, authority)
    except (ValueError, TypeError, AttributeError, LookupError, RecursionError) as error:
        raise ValueError(
            f"this text was not made by hand_over: {str(text)[:80]!r} ({str(error)[:200]})"
        ) from error
    settings.setdefault("ttl", ttl)
    settings.setdefault("at_least", at_least or None)
    if authority.dump(grant) != proof:
        raise ValueError(
            f"{str(by)[:200]!r} has granted this lease, and {authority!r} cannot take it over: name the "
            "same authority here"
        )
    lock: FencedLock[Any] = fenced_lock(*grant.resources, **settings)
    lock._handed = grant  # noqa: SLF001 - the modules of a lock share private names
    return lock


def _read(text: str, authority: Any) -> tuple[Grant, object, object, float, float]:
    its = json.loads(text)[HANDED]
    words = ("resources", "tokens", "proof", "by", "ttl", "at_least")
    names, tokens, proof, by, ttl, at_least = (its[word] for word in words)
    if not isinstance(names, list) or len({*names}) < len(names) or len(names) != len(tokens):
        raise ValueError("its resources are no list of different names, each with a token")
    fenced_lock(*names, ttl=ttl, at_least=at_least or None, authority=authority)  # raises if one is invalid
    return authority.load(tuple(names), tuple(map(check_token, tokens)), proof), proof, by, ttl, at_least
