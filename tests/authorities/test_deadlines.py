"""An acquisition ends with its timeout, whatever its servers do, and however many callers wait with it."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, Final

import pytest

from fencelock import QuorumError
from fencelock._locking import factory_of

#: Seconds beyond the timeout: half a second is promised, and the rest is for a busy machine.
LATE: Final = 0.5 + 1.5
CALLERS: Final = 30
URLS: Final = (
    "redis://A,redis://B,redis://C",
    "etcd://A,B,C",
    "etcd://user:password@A,B,C",
    "zookeeper://A,B,C",
    "postgresql+psycopg://user@A/shop",
    "postgresql+asyncpg://user@A/shop",
    "mysql+pymysql://user:password@A/shop",
    "mysql+aiomysql://user:password@A/shop",
)


#: How a dripping server begins: a long message of the protocol, or a TLS record. Zeros follow, one by one.
RECORD: Final = b"\x16\x03\x03\x40\x00\x02\x00\x3f\xf0"
DRIPPING: Final = {
    "redis://A,redis://B,redis://C": b"$9999\r\n",
    "rediss://A,rediss://B,rediss://C": RECORD,
    "etcd://A,B,C": b"\x00\x3f\xf0\x04\x00\x00\x00\x00\x00",
    "etcds://A,B,C": RECORD,
    # Not zookeepers://, because kazoo closes no socket whose TLS handshake has failed, of which Python warns.
    "zookeeper://A,B,C": b"\x00\x00\x3f\xf0",
    "postgresql+psycopg://user@A/shop?sslmode=disable": b"R\x00\x00\x3f\xf0",
    "postgresql+psycopg://user@A/shop?sslmode=require": b"S" + RECORD,
    "postgresql+asyncpg://user@A/shop?ssl=require": b"S" + RECORD,
    "mysql+pymysql://user:password@A/shop": b"\xf0\x3f\x00\x00",
    "mysql+aiomysql://user:password@A/shop": b"\xf0\x3f\x00\x00",
}


@contextmanager
def dripping(opening: bytes) -> Iterator[str]:
    """The address of a server that says `opening`, and then a byte in each 0.05 seconds."""
    over = threading.Event()

    def drip(connection: socket.socket) -> None:
        with connection, suppress(OSError):
            connection.sendall(opening)
            while not over.wait(0.05):
                connection.sendall(b"\0")

    def serve() -> None:
        with suppress(OSError):
            while not over.is_set():
                threading.Thread(target=drip, args=listener.accept()[:1], daemon=True).start()

    with socket.create_server(("127.0.0.1", 0), backlog=1000) as listener:
        server = threading.Thread(target=serve, daemon=True)
        server.start()
        host, port = listener.getsockname()
        yield f"{host}:{port}"
        over.set()
        listener.shutdown(socket.SHUT_RDWR)
        server.join()


@contextmanager
def silent(*, accepts: bool) -> Iterator[str]:
    """The address of a server that says nothing; unless it `accepts`, it does not even connect."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=1000 if accepts else 0))
        for _ in range(0 if accepts else 4):  # they fill the queue, so that the system drops later packets
            client = stack.enter_context(socket.socket())
            client.setblocking(False)  # noqa: FBT003
            client.connect_ex(listener.getsockname())
        host, port = listener.getsockname()
        yield f"{host}:{port}"


def seconds_of_threads(authority: Any, timeout: float) -> list[float]:
    took = []

    def acquire(number: int) -> None:
        began = time.monotonic()
        with pytest.raises(QuorumError):
            authority.lock(f"r{number}", timeout=timeout).acquire()
        took.append(time.monotonic() - began)

    threads = [threading.Thread(target=acquire, args=(number,)) for number in range(CALLERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return took


def seconds_of_tasks(authority: Any, timeout: float) -> list[float]:
    """With the end of the loop as the last one."""

    async def acquire(number: int) -> float:
        began = time.monotonic()
        with pytest.raises(QuorumError):
            await authority.lock(f"r{number}", timeout=timeout).aio.acquire()
        return time.monotonic() - began

    async def main() -> list[float]:
        return await asyncio.gather(*map(acquire, range(CALLERS)))

    began = time.monotonic()
    return [*asyncio.run(main()), time.monotonic() - began]


def check(url: str) -> None:
    for timeout in (0.0, 0.5):
        for world in (seconds_of_threads, seconds_of_tasks):
            if world is seconds_of_threads and ("asyncpg" in url or "aiomysql" in url):
                continue
            authority = factory_of(url)(url)
            took = world(authority, timeout)
            began = time.monotonic()
            authority.close()
            assert len(took) >= CALLERS
            assert max(took) < timeout + LATE
            assert time.monotonic() - began < LATE


@pytest.mark.timed
@pytest.mark.parametrize("accepts", [True, False], ids=["silent", "drops packets"])
@pytest.mark.parametrize("url", URLS)
def test_an_acquisition_ends_with_its_timeout(url: str, *, accepts: bool) -> None:
    with ExitStack() as stack:
        for letter in "ABC":
            url = url.replace(letter, stack.enter_context(silent(accepts=accepts)), 1)
        check(url)


@pytest.mark.timed
@pytest.mark.parametrize("url", DRIPPING)
def test_an_acquisition_ends_while_servers_drip(url: str) -> None:
    """Each byte comes soon, and the message never ends: a limit for each read would not help."""
    opening = DRIPPING[url]
    with ExitStack() as stack:
        for letter in "ABC":
            url = url.replace(letter, stack.enter_context(dripping(opening)), 1)
        check(url)
