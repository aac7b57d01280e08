"""Everybody who takes part in `benchmarks.authorities` on etcd and ZooKeeper: how each lock is made.

As in `benchmarks.contenders`, each has processes of its own, this file imports nothing but the standard
library before it is known which contender is wanted, and settings are the fastest that a sensible user would
have. All ask the same member of etcd. Connections are kept.

grpcio sends bytes that are protobuf already, by identity serialisers: three calls, of which the second is a
transaction that nobody waits in. Where a lock is waited for, it calls etcd's own service for locks. etcd3gw
has no wait: whoever does not get its lock asks again after a few milliseconds. Its lock leaves a lease behind
each time, which the server ends when its ttl is over. kazoo's lock has no form for coroutines: it is called
in threads, with one for each task, up to a hundred.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import random
import secrets
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

from benchmarks.contenders import (
    FENCELOCK,
    PATIENCE,
    POOL,
    TTL,
    AskedFor,
    AsyncLock,
    BlockingLock,
    NotLockedError,
    Setting,
)
from benchmarks.on_databases import BARE, OnDatabase

ETCD, ZOOKEEPER = "etcd", "ZooKeeper"
#: Seconds between two attempts of somebody whose lock does not wait; with fewer, etcd has more to do.
_PAUSE = 0.005


def _authority(setting: Setting) -> Any:
    url = setting.urls[0]
    name = "Etcd" if url.startswith("etcd") else "ZooKeeper"
    return getattr(importlib.import_module("fencelock"), name)(url)


def _timeout(setting: Setting) -> float:
    # kazoo's lock always waits, so that fencelock does beside it, too.
    return PATIENCE if setting.waiting or setting.urls[0].startswith("zookeeper") else 0


def _fencelock(setting: Setting) -> Callable[[str], Any]:
    authority, timeout = _authority(setting), _timeout(setting)
    return lambda resource: authority.lock(resource, ttl=TTL, timeout=timeout)


def _fencelock_bare(setting: Setting) -> Callable[[str], BlockingLock]:
    authority, timeout = _authority(setting), _timeout(setting)

    def make_lock(resource: str) -> BlockingLock:
        def lock() -> Any:
            return authority.acquire((resource,), ttl=TTL, timeout=timeout)

        return AskedFor(lock, authority.release, waiting=False)

    return make_lock


class _Calls:
    """What grpcio is to say for a lock: requests of the messages that fencelock has, too.

    Args:
        resource: what is locked.
    """

    __slots__ = ("_key", "_messages", "_unlocked")

    def __init__(self, resource: str) -> None:
        self._messages = importlib.import_module("fencelock.authority.etcd.messages")
        self._key = f"/grpcio/{resource}".encode()
        self._unlocked = self._messages.compare(self._key, self._messages.CREATE, self._messages.EQUAL, 0)

    def grant(self, lease: int) -> Any:
        return self._messages.grant(lease, TTL)

    def put(self, lease: int) -> Any:
        return self._messages.txn([self._unlocked], [self._messages.put(self._key, b"", lease)])

    def has_put(self, answer: bytes) -> bool:
        return bool(self._messages.fields_of(answer).get(2) == [1])

    def line_up(self, lease: int) -> Any:
        """Return the call of etcd's service for locks, which is answered when the lock is got."""
        # The name is field 1, and the lease is field 2 as in the message that makes it, behind two bytes.
        return self._messages.Call(
            b"/v3lockpb.Lock/Lock",
            (self._messages.get(self._key) + self._messages.grant(lease, 1).requests[0][2:],),
        )

    def revoke(self, lease: int) -> Any:
        return self._messages.revoke(lease)


def _new_lease() -> int:
    return secrets.randbits(63) or 1


def _saying(channel: Any) -> Callable[[Any], Any]:
    """Return what makes calls; methods are looked up once."""

    @functools.cache
    def method(path: bytes) -> Callable[[bytes], Any]:
        found: Callable[[bytes], Any] = channel.unary_unary(path.decode())
        return found

    return lambda call: method(call.path)(call.requests[0])


def _target(setting: Setting) -> str:
    return urlsplit(setting.urls[0]).netloc


def _grpcio(setting: Setting, *, by_service: bool = False) -> Callable[[str], BlockingLock]:
    say = _saying(importlib.import_module("grpc").insecure_channel(_target(setting)))

    def make_lock(resource: str) -> BlockingLock:
        calls = _Calls(resource)

        def lock() -> int:
            lease = _new_lease()
            say(calls.grant(lease))
            if by_service:
                say(calls.line_up(lease))
            elif not calls.has_put(say(calls.put(lease))):
                raise NotLockedError("it was not granted")
            return lease

        return AskedFor(lock, lambda lease: say(calls.revoke(lease)), waiting=False)

    return make_lock


class _Awaited:
    """A lock that is got from one coroutine function and given back to another."""

    __slots__ = ("_got", "_lock", "_unlock")

    def __init__(self, lock: Callable[[], Awaitable[Any]], unlock: Callable[[Any], Awaitable[Any]]) -> None:
        self._lock = lock
        self._unlock = unlock

    async def __aenter__(self) -> None:
        self._got = await self._lock()

    async def __aexit__(self, *details: object) -> None:
        await self._unlock(self._got)


def _grpc_aio(setting: Setting) -> Callable[[str], AsyncLock]:
    say = _saying(importlib.import_module("grpc.aio").insecure_channel(_target(setting)))

    def make_lock(resource: str) -> AsyncLock:
        calls = _Calls(resource)

        async def lock() -> int:
            lease = _new_lease()
            await say(calls.grant(lease))
            if calls.has_put(await say(calls.put(lease))):
                return lease
            raise NotLockedError("it was not granted")

        return _Awaited(lock, lambda lease: say(calls.revoke(lease)))

    return make_lock


def _etcd3gw(setting: Setting) -> Callable[[str], BlockingLock]:
    host, _, port = _target(setting).partition(":")
    client = importlib.import_module("etcd3gw.client").Etcd3Client(host=host, port=int(port))

    def make_lock(resource: str) -> BlockingLock:
        its = client.lock(resource, ttl=TTL)

        def lock() -> bool:
            while not its.acquire():
                if not setting.waiting:
                    return False
                time.sleep(_PAUSE * random.uniform(0.5, 1.0))
            return True

        return AskedFor(lock, lambda _: its.release(), waiting=False)

    return make_lock


def _kazoo(setting: Setting) -> Callable[[str], BlockingLock]:
    client = importlib.import_module("kazoo.client").KazooClient(_target(setting))
    client.start()

    def make_lock(resource: str) -> BlockingLock:
        lock: BlockingLock = client.Lock(f"/kazoo/{resource}")
        return lock

    return make_lock


def _kazoo_in_threads(setting: Setting) -> Callable[[str], AsyncLock]:
    make_blocking: Callable[[str], Any] = _kazoo(setting)
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(min(setting.tasks, POOL)))

    def make_lock(resource: str) -> AsyncLock:
        lock = make_blocking(resource)
        return _Awaited(lambda: asyncio.to_thread(lock.acquire), lambda _: asyncio.to_thread(lock.release))

    return make_lock


class _Section:
    """Lock, read, write, COMMIT, release: a lock whose entry does all that, but the last."""

    __slots__ = ("_lock", "_model", "_new_session")

    def __init__(self, lock: BlockingLock, new_session: Callable[[], Any], model: type[Any]) -> None:
        self._lock = lock
        self._new_session = new_session
        self._model = model

    def __enter__(self) -> None:
        self._lock.__enter__()
        with self._new_session() as session:
            session.get_one(self._model, 1).balance += 1
            session.commit()

    def __exit__(self, *details: object) -> None:
        self._lock.__exit__(*details)  # type: ignore[arg-type] # they are what it expects


def _section(setting: Setting, make: Callable[[Setting], Callable[[str], BlockingLock]]) -> Any:
    """Return what makes sections over a lock; the second URL is that of the database."""
    make_lock, accounts = make(setting), importlib.import_module("benchmarks.accounts")
    engine = importlib.import_module("sqlalchemy").create_engine(setting.urls[1])
    new_session = importlib.import_module("sqlalchemy.orm").sessionmaker(engine)
    if make is _fencelock:
        return lambda _: _Section(make_lock("account:1"), new_session, accounts.Account)
    return lambda _: _Section(make_lock("plain:1"), new_session, accounts.PlainAccount)


def _on(database: str, name: str, make: Callable[[Setting], Any], nodes: int = 1, **more: Any) -> OnDatabase:
    return OnDatabase(name, nodes, make, database=database, **more)


GRPCIO, SERVICE, GRPC_AIO = "grpcio, three calls", "grpcio, etcd's Lock service", "grpc.aio, three calls"
ETCD3GW, KAZOO, KAZOO_IN_THREADS = "etcd3gw Lock", "kazoo Lock", "kazoo Lock in threads"
_SECTION = ", whole section"
_service = functools.partial(_grpcio, by_service=True)
_CONTENDING = {
    ETCD: ((FENCELOCK, _fencelock, None), (SERVICE, _service, "grpc"), (ETCD3GW, _etcd3gw, "etcd3gw")),
    ZOOKEEPER: ((FENCELOCK, _fencelock, None), (KAZOO, _kazoo, "kazoo")),
}
#: Those who can wait for each other.
CONTENDING = {
    place: tuple(_on(place, name, make, module=module) for name, make, module in entered)
    for place, entered in _CONTENDING.items()
}
#: One caller, by the place.
ALONE = {
    ETCD: (
        *CONTENDING[ETCD],
        _on(ETCD, BARE, _fencelock_bare),
        _on(ETCD, GRPCIO, _grpcio, module="grpc"),
    ),
    ZOOKEEPER: (*CONTENDING[ZOOKEEPER], _on(ZOOKEEPER, BARE, _fencelock_bare)),
}
#: Tasks of one loop.
TASKS = {
    ETCD: (
        _on(ETCD, FENCELOCK, _fencelock, style="asyncio"),
        _on(ETCD, GRPC_AIO, _grpc_aio, style="asyncio", module="grpc"),
    ),
    ZOOKEEPER: (
        _on(ZOOKEEPER, FENCELOCK, _fencelock, style="asyncio"),
        _on(ZOOKEEPER, KAZOO_IN_THREADS, _kazoo_in_threads, style="asyncio", module="kazoo"),
    ),
}
#: One caller who also writes a row: these use a database besides.
SECTIONS = {
    place: tuple(
        _on(place, name + _SECTION, functools.partial(_section, make=make), nodes=2, module=module)
        for name, make, module in (
            *_CONTENDING[place],
            *([(GRPCIO, _grpcio, "grpc")] if place == ETCD else []),
        )
    )
    for place in _CONTENDING
}
ALL = tuple(one for each in (ALONE, TASKS, SECTIONS) for entered in each.values() for one in entered)
