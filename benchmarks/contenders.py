"""Everybody who takes part in `benchmarks.locks`: how each lock is made, as its own documentation says.

Each contender runs in processes of its own (`benchmarks.worker`), some of them with other versions of
redis-py, or of no redis-py at all. So this file imports nothing but the standard library before it knows
which contender it is for.

How the settings were chosen: the fastest that a sensible user would have. Clients are shared, hiredis is
installed, scripts are cached, logs are off, no timeout is set for a node unless nodes are going to hang, and
a lock object is made once where it may be used again. redis.asyncio has a connection for each task, up to a
hundred: with one for each of a thousand tasks it is four times slower. redis-py is faster with
`single_connection_client=True`, which threads must not share: so that stands beside the ordinary client. The
documentation of node-redlock is about its release 5, a beta for years, which is taken as it is.

aioredlock needs aioredis 1, whose last release is of 2019, and that needs `distutils`, which Python 3.12 has
not any more. It runs all the same (`benchmarks.peers`). It has no timeout for a node that hangs, and waits.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal

#: Seconds. Long enough for nothing to expire while it is measured.
TTL = 10
#: Seconds that whoever waits for a lock waits at most.
PATIENCE = 60
#: Connections to a node; where there are more tasks than that, redis.asyncio is slower with one for each.
POOL = 100

BlockingLock = AbstractContextManager[Any]
AsyncLock = AbstractAsyncContextManager[Any]
Style = Literal["blocking", "asyncio", "node"]


@dataclass(frozen=True, slots=True)
class Setting:
    """What a contender has to cope with.

    Attributes:
        urls: the nodes that it uses.
        waiting: whether somebody else may hold the lock, and is to be waited for.
        node_timeout: seconds to give a node, where a peer leaves that to its user; None for no limit, the
            fastest.
        tasks: how many use it at once in asyncio code.
    """

    urls: Sequence[str]
    waiting: bool = False
    node_timeout: float | None = None
    tasks: int = 1


class NotLockedError(Exception):
    """A lock was not got, where that is told by a value."""


@dataclass(frozen=True, slots=True)
class Contender:
    """One way to lock.

    Attributes:
        name: whose.
        nodes: how many of the nodes it uses.
        make: for a setting, what makes a lock on a resource: a context manager that may be entered again and
            again. None where that is written in another language.
        style: how it waits.
        module: what must be installed for it.
        home: the installation of its own that it needs (`benchmarks.peers`); None where it gets on with the
            redis-py that fencelock uses.
        is_redlock: whether it is somebody else's Redlock, for Python.
    """

    name: str
    nodes: int
    make: Callable[[Setting], Callable[[str], Any]] | None
    style: Style = "blocking"
    module: str | None = None
    home: str | None = None
    is_redlock: bool = False

    @property
    def key(self) -> str:
        """What tells it apart from all others."""
        return f"{self.style}, {self.name}, {self.nodes}"

    @property
    def label(self) -> str:
        """What it is called where there is little space."""
        return f"{self.name} · {self.nodes}"

    @property
    def is_installed(self) -> bool:
        """Whether what it needs is here; of one with a home of its own, nobody knows."""
        return self.module is None or self.home is not None or bool(importlib.util.find_spec(self.module))


def namespace_of(nodes: int) -> str:
    """Return the namespace in which so many nodes are initialised for fencelock."""
    return f"of-{nodes}"


def _fencelock(setting: Setting) -> Callable[[str], Any]:
    redlock = importlib.import_module("fencelock").Redlock(
        setting.urls, namespace=namespace_of(len(setting.urls))
    )
    timeout = PATIENCE if setting.waiting else 0
    return lambda resource: redlock.lock(resource, ttl=TTL, timeout=timeout)


def _fencelock_anew(setting: Setting) -> Callable[[str], BlockingLock]:
    make_lock = _fencelock(setting)
    return lambda resource: _Anew(lambda: make_lock(resource))


class _Anew:
    """A lock whose object is made each time that it is entered."""

    __slots__ = ("_lock", "_make")

    def __init__(self, make: Callable[[], BlockingLock]) -> None:
        self._make = make

    def __enter__(self) -> None:
        self._lock = self._make()
        self._lock.__enter__()

    def __exit__(self, *details: object) -> None:
        self._lock.__exit__(*details)  # type: ignore[arg-type] # they are what it expects


def _fencelock_authority(setting: Setting) -> Callable[[str], AsyncLock]:
    module = importlib.import_module("fencelock")
    redlock = module.Redlock(setting.urls, namespace=namespace_of(len(setting.urls)))
    return lambda resource: _Bare(redlock.aio, resource)


class _Bare:
    """A grant of an authority, without a lock object: nothing is renewed, nothing can be entered twice."""

    __slots__ = ("_aio", "_grant", "_resource")

    def __init__(self, aio: Any, resource: str) -> None:
        self._aio = aio
        self._resource = resource

    async def __aenter__(self) -> None:
        self._grant = await self._aio.acquire((self._resource,), ttl=TTL, timeout=0)

    async def __aexit__(self, *details: object) -> None:
        await self._aio.release(self._grant)


def _bare_sockets(setting: Setting) -> Callable[[str], BlockingLock]:
    module = importlib.import_module("benchmarks.bare_sockets")
    namespace = namespace_of(len(setting.urls))
    return lambda resource: module.BareSockets(setting.urls, namespace, resource)


def _clients(setting: Setting) -> list[Any]:
    """Return a client of the installed redis-py for each node."""
    redis = importlib.import_module("redis")
    return [redis.Redis.from_url(url, **_limits(setting)) for url in setting.urls]


def _limits(setting: Setting) -> dict[str, Any]:
    if setting.node_timeout is None:
        return {"socket_timeout": None, "socket_connect_timeout": None}
    return {
        "socket_timeout": setting.node_timeout,
        "socket_connect_timeout": setting.node_timeout,
        "retry": importlib.import_module("redis.retry").Retry(
            importlib.import_module("redis.backoff").NoBackoff(), 0
        ),
    }


def _redis_py(setting: Setting) -> Callable[[str], Any]:
    (client,) = _clients(setting)
    return lambda resource: client.lock(resource, timeout=TTL, blocking=setting.waiting)


def _redis_py_single(setting: Setting) -> Callable[[str], Any]:
    client = importlib.import_module("redis").Redis.from_url(
        setting.urls[0], single_connection_client=True, **_limits(setting)
    )
    return lambda resource: client.lock(resource, timeout=TTL, blocking=setting.waiting)


def _redis_py_hasty(setting: Setting) -> Callable[[str], Any]:
    (client,) = _clients(setting)
    return lambda resource: client.lock(resource, timeout=TTL, blocking=setting.waiting, sleep=0.001)


def _python_redis_lock(setting: Setting) -> Callable[[str], Any]:
    (client,) = _clients(setting)
    module = importlib.import_module("redis_lock")
    return lambda resource: module.Lock(client, resource, expire=TTL)


def _pottery(setting: Setting) -> Callable[[str], Any]:
    clients = set(_clients(setting))
    module = importlib.import_module("pottery")
    return lambda resource: module.Redlock(key=resource, masters=clients, auto_release_time=TTL)


class AskedFor:
    """A lock that is got from one function and given back to another."""

    __slots__ = ("_got", "_lock", "_unlock", "_waiting")

    def __init__(self, lock: Callable[[], Any], unlock: Callable[[Any], Any], *, waiting: bool) -> None:
        self._lock = lock
        self._unlock = unlock
        self._waiting = waiting

    def __enter__(self) -> None:
        got = self._lock()
        while not got and self._waiting:
            got = self._lock()
        if not got:
            raise NotLockedError("it was not granted")
        self._got = got

    def __exit__(self, *details: object) -> None:
        self._unlock(self._got)


def _redlock_py(setting: Setting) -> Callable[[str], BlockingLock]:
    manager = importlib.import_module("redlock").Redlock(_clients(setting))

    def make_lock(resource: str) -> BlockingLock:
        return AskedFor(lambda: manager.lock(resource, TTL * 1000), manager.unlock, waiting=setting.waiting)

    return make_lock


def _redlock(setting: Setting) -> Callable[[str], BlockingLock]:
    factory = importlib.import_module("redlock").RedLockFactory(_clients(setting))

    def make_lock(resource: str) -> BlockingLock:
        lock = factory.create_lock(resource, ttl=TTL * 1000)
        return AskedFor(lock.acquire, lambda _: lock.release(), waiting=setting.waiting)

    return make_lock


def _redlock_ng(setting: Setting) -> Callable[[str], BlockingLock]:
    redlock = importlib.import_module("redlock").Redlock(_redlock_ng_config(setting))

    def make_lock(resource: str) -> BlockingLock:
        def lock() -> Any:
            return redlock.acquire(resource, TTL * 1000, blocking=setting.waiting)

        return AskedFor(lock, redlock.release, waiting=setting.waiting)

    return make_lock


def _redlock_ng_config(setting: Setting) -> Any:
    module = importlib.import_module("redlock")
    limits = {} if setting.node_timeout is None else {"socket_timeout": setting.node_timeout}
    return module.RedlockConfig(masters=list(setting.urls), **limits)


def _mithril(setting: Setting) -> Callable[[str], BlockingLock]:
    backends = importlib.import_module("mithril.backends._redlock")
    fencing = importlib.import_module("mithril._fencing")
    clients = _clients(setting)
    # It demands a place that counts its tokens: here the last node, which never hangs.
    provider = fencing.RedisFencingTokenProvider(clients[-1])
    limits = {} if setting.node_timeout is None else {"per_instance_timeout": setting.node_timeout}
    backend = backends.RedlockBackend(
        backends.RedlockConfig(instances=clients, fencing_provider=provider, **limits)
    )
    return mithril_locks(backend, setting)


def mithril_locks(backend: Any, setting: Setting) -> Callable[[str], BlockingLock]:
    """Return what makes locks of mithril-locks, with its log off."""
    structlog = importlib.import_module("structlog")
    quiet = structlog.make_filtering_bound_logger(logging.ERROR)
    structlog.configure(wrapper_class=quiet, cache_logger_on_first_use=True)
    mithril = importlib.import_module("mithril")
    timeout = PATIENCE if setting.waiting else 0
    return lambda resource: _Anew(  # its objects are for one use
        lambda: mithril.Lock(resource, backend=backend, ttl=TTL, timeout=timeout)
    )


def _sequential(setting: Setting) -> Callable[[str], BlockingLock]:
    redlock = importlib.import_module("benchmarks.sequential").SequentialRedlock(setting.urls)

    def make_lock(resource: str) -> BlockingLock:
        def unlock(nonce: str) -> None:
            redlock.release(resource, nonce)

        return AskedFor(lambda: redlock.acquire(resource, TTL), unlock, waiting=setting.waiting)

    return make_lock


def _async_clients(setting: Setting) -> list[Any]:
    redis = importlib.import_module("redis.asyncio")
    limits = _async_limits(setting)
    if setting.tasks <= POOL:
        return [redis.Redis.from_url(url, max_connections=POOL, **limits) for url in setting.urls]
    pool = redis.BlockingConnectionPool
    return [
        redis.Redis.from_pool(pool.from_url(url, max_connections=POOL, timeout=PATIENCE, **limits))
        for url in setting.urls
    ]


def _async_limits(setting: Setting) -> dict[str, Any]:
    limits = _limits(setting)
    if "retry" in limits:
        limits["retry"] = importlib.import_module("redis.asyncio.retry").Retry(
            importlib.import_module("redis.backoff").NoBackoff(), 0
        )
    return limits


def _redis_asyncio(setting: Setting) -> Callable[[str], Any]:
    (client,) = _async_clients(setting)
    return lambda resource: client.lock(resource, timeout=TTL, blocking=setting.waiting)


def _pottery_asyncio(setting: Setting) -> Callable[[str], Any]:
    clients = set(_async_clients(setting))
    module = importlib.import_module("pottery")
    return lambda resource: module.AIORedlock(key=resource, masters=clients, auto_release_time=TTL)


class _Awaited:
    """A lock that is got from one coroutine function and given back to another."""

    __slots__ = ("_got", "_lock", "_unlock")

    def __init__(self, lock: Callable[[], Any], unlock: Callable[[Any], Any]) -> None:
        self._lock = lock
        self._unlock = unlock

    async def __aenter__(self) -> None:
        self._got = await self._lock()
        if not self._got:
            raise NotLockedError("it was not granted")

    async def __aexit__(self, *details: object) -> None:
        await self._unlock(self._got)


def _redlock_ng_asyncio(setting: Setting) -> Callable[[str], AsyncLock]:
    redlock = importlib.import_module("redlock").AsyncRedlock(_redlock_ng_config(setting))
    return lambda resource: _Awaited(lambda: redlock.acquire(resource, TTL * 1000), redlock.release)


def _aioredlock(setting: Setting) -> Callable[[str], AsyncLock]:
    manager = importlib.import_module("aioredlock").Aioredlock(list(setting.urls))
    return lambda resource: _Awaited(lambda: manager.lock(resource, lock_timeout=TTL), manager.unlock)


FENCELOCK = "fencelock"
FLOOR = Contender("bare sockets (floor)", 5, _bare_sockets)
REDIS_PY = Contender("redis-py Lock", 1, _redis_py)
REDIS_PY_SINGLE = Contender("redis-py Lock, single connection", 1, _redis_py_single)
REDIS_ASYNCIO = Contender("redis.asyncio Lock", 1, _redis_asyncio, "asyncio")
PYTHON_REDIS_LOCK = Contender("python-redis-lock", 1, _python_redis_lock, module="redis_lock")
NODE_REDLOCK = Contender("node-redlock", 5, None, "node", home="node-redlock")

OURS = tuple(Contender(FENCELOCK, nodes, _fencelock) for nodes in (1, 3, 5))
OURS_ASYNCIO = tuple(Contender(FENCELOCK, nodes, _fencelock, "asyncio") for nodes in (1, 3, 5))

REDLOCKS = (
    Contender("redlock-py", 5, _redlock_py, module="redlock", is_redlock=True),
    Contender("pottery Redlock", 5, _pottery, module="pottery", is_redlock=True),
    Contender("redlock-ng", 5, _redlock_ng, home="redlock-ng", is_redlock=True),
    Contender("redlock", 5, _redlock, home="redlock", is_redlock=True),
    Contender("mithril-locks Redlock", 5, _mithril, home="mithril-locks", is_redlock=True),
)
REDLOCKS_ASYNCIO = (
    Contender("pottery AIORedlock", 5, _pottery_asyncio, "asyncio", module="pottery", is_redlock=True),
    Contender("redlock-ng", 5, _redlock_ng_asyncio, "asyncio", home="redlock-ng", is_redlock=True),
    Contender("aioredlock", 5, _aioredlock, "asyncio", home="aioredlock", is_redlock=True),
)
ANEW = Contender(f"{FENCELOCK}, lock made anew", 5, _fencelock_anew)
BARE_AUTHORITY = Contender(f"{FENCELOCK}, without a lock object", 5, _fencelock_authority, "asyncio")
REDIS_PY_HASTY = Contender("redis-py Lock, sleep=0.001", 1, _redis_py_hasty)
SEQUENTIAL = Contender("sequential redis-py (foil)", 5, _sequential)

ALL = (
    *(FLOOR, SEQUENTIAL, NODE_REDLOCK, PYTHON_REDIS_LOCK, REDIS_ASYNCIO),
    *(REDIS_PY, REDIS_PY_SINGLE, REDIS_PY_HASTY),
    *(*OURS, ANEW, *OURS_ASYNCIO, BARE_AUTHORITY, *REDLOCKS, *REDLOCKS_ASYNCIO),
)
