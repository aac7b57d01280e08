"""No output shows a password, for each place of a URL that may have one."""

from __future__ import annotations

import asyncio
import logging
import traceback

import pytest

import fencelock
from fencelock import Database, FencelockError, Redlock
from fencelock.observe import Event

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
DATABASES = (
    f"postgresql+psycopg://user:{SECRET}@{HOST}/shop",
    f"postgresql+psycopg://{HOST}/shop?user=u&password={SECRET}",
    f"postgresql+psycopg://{HOST}/shop?user=u&sslpassword={SECRET}",
    f"mysql+pymysql://user:{SECRET}@{HOST}/shop",
    f"mysql+pymysql://{HOST}/shop?user=u&password={SECRET}",
)


def clean(*shown: object) -> bool:
    return all(SECRET not in f"{each} {each!r}" for each in shown)


@pytest.mark.parametrize("url", [*NODES, *DATABASES])
def test_a_program(url: str, events: list[Event], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "fencelock")
    made: Redlock | Database = Database(url) if url in DATABASES else Redlock(url, outage_grace=0)
    with made as authority:
        lock = authority.lock("r", timeout=0)
        assert clean(authority, authority.aio, lock)
        with pytest.raises(FencelockError) as caught:
            lock.acquire()
        shown = "".join(traceback.format_exception(caught.value))
        assert clean(caught.value, vars(caught.value), shown)

        async def enter() -> None:
            try:
                async with authority.lock("r", timeout=0):
                    pass
            finally:
                await authority.aio.close()

        with pytest.raises(FencelockError) as caught:
            asyncio.run(enter())
        assert clean(caught.value, "".join(traceback.format_exception(caught.value)))
    assert events
    assert clean(caplog.text, *events)


def test_configure() -> None:
    for url in ("redis//:s3cr3t@h", "s3cr3t", "https://u:s3cr3t@h", "postgres://u:s3cr3t@h/x"):
        with pytest.raises(ValueError, match="names no authority") as caught:
            fencelock.configure(url)
        assert clean(caught.value)
