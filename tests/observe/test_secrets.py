"""No output shows a password, for each place of a URL that may have one."""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections.abc import Iterator
from typing import Any

import pytest

import fencelock
from fencelock import AuthorityError, FencelockError, Redlock
from fencelock._locking import factory_of
from fencelock.observe import Event
from proof.servers import Etcd as EtcdServer

SECRET = "s3cr3t"
#: Nothing answers there.
HOST = "127.0.0.1:1"
NODES = (
    f"redis://:{SECRET}@{HOST}",
    f"redis://user:{SECRET}@{HOST}/2",
    f"redis://{HOST}?password={SECRET}",
    f"rediss://{HOST}?ssl_password={SECRET}&ssl_keyfile=/none",
    f"valkey://user:{SECRET}@{HOST}",
    f"redis+cluster://user:{SECRET}@{HOST}",
    f"redis+sentinel://user:{SECRET}@{HOST}/service?sentinel_password={SECRET}",
    f"redis://:{SECRET}@{HOST},redis://:{SECRET}@127.0.0.1:2,redis://:{SECRET}@127.0.0.1:3",
)
LINES = (
    f"etcd://user:{SECRET}@{HOST}",
    f"zookeeper://user:{SECRET}@{HOST}",
)
DATABASES = (
    f"postgresql+psycopg://user:{SECRET}@{HOST}/shop",
    f"postgresql+psycopg://{HOST}/shop?user=u&password={SECRET}",
    f"postgresql+psycopg://{HOST}/shop?user=u&sslpassword={SECRET}",
    f"mysql+pymysql://user:{SECRET}@{HOST}/shop",
    f"mysql+pymysql://{HOST}/shop?user=u&password={SECRET}",
)


#: In blocking code, they are refused with a sentence.
FOR_COROUTINES = (
    f"postgresql+asyncpg://{HOST}/shop?user=u&password={SECRET}",
    f"mysql+aiomysql://{HOST}/shop?user=u&password={SECRET}",
    f"mysql+asyncmy://user:{SECRET}@{HOST}/shop",
)


def clean(*shown: object) -> bool:
    return all(SECRET not in f"{each} {each!r}" for each in shown)


def of_traceback(error: BaseException) -> str:
    """Return the traceback of an error and its causes, with what tools such as Sentry add: local variables.

    The frames of the program are left out, which has the URL itself.
    """
    told = []
    for each in error_and_causes(error):
        found = traceback.TracebackException.from_exception(each, capture_locals=True)
        ours = [frame for frame in found.stack if "/tests/" not in frame.filename]
        told += [f"{frame.name}: {frame.locals}" for frame in ours] + [*found.format_exception_only()]
    return "\n".join(told)


def error_and_causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


@pytest.mark.parametrize("url", [*NODES, *DATABASES, *FOR_COROUTINES, *LINES])
def test_a_program(url: str, events: list[Event], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    made: Any = Redlock(url, outage_grace=0) if url in NODES else factory_of(url)(url)
    with made as authority:
        lock = authority.lock("r", timeout=0)
        assert clean(authority, authority.aio, lock)
        with pytest.raises(FencelockError) as caught:
            lock.acquire()
        assert clean(caught.value, vars(caught.value), of_traceback(caught.value))

        async def enter() -> None:
            try:
                async with authority.lock("r", timeout=0):
                    pass
            finally:
                await authority.aio.close()

        with pytest.raises(FencelockError) as caught:
            asyncio.run(enter())
        assert clean(caught.value, of_traceback(caught.value))
    assert events
    assert clean(caplog.text, *events)


def test_a_login_to_zookeeper(zookeeper_url: str, caplog: pytest.LogCaptureFixture) -> None:
    """Kazoo logs each request at DEBUG, and the login is one."""
    caplog.set_level(logging.DEBUG)
    url = zookeeper_url.replace("://", f"://user:{SECRET}@")
    with factory_of(url)(url) as authority, authority.lock("r", ttl=4):
        assert clean(authority)
    assert "Auth(" in caplog.text
    assert clean(caplog.text)


def test_a_login_that_etcd_refuses(etcd_cluster: EtcdServer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    etcd_cluster.enable_auth()
    try:
        url = etcd_cluster.url.replace("://", f"://root:{SECRET}@")
        with factory_of(url)(url) as authority:

            async def acquire() -> None:
                await authority.lock("r", ttl=4, timeout=1).aio.acquire()

            for attempt in (authority.lock("r", ttl=4, timeout=1).acquire, lambda: asyncio.run(acquire())):
                with pytest.raises(AuthorityError, match="refuses the login") as caught:
                    attempt()
                assert clean(caught.value, of_traceback(caught.value))
    finally:
        etcd_cluster.disable_auth()
    assert clean(caplog.text)


@pytest.mark.parametrize("url", [f"sqlite:///file:/x?uri=true&password={SECRET}"])
def test_a_url_that_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="plain path") as caught:
        factory_of(url)(url)
    assert clean(caught.value)


def test_configure() -> None:
    for url in ("redis//:s3cr3t@h", "s3cr3t", "https://u:s3cr3t@h", "postgres://u:s3cr3t@h/x"):
        with pytest.raises(ValueError, match="names no authority") as caught:
            fencelock.configure(url)
        assert clean(caught.value)
