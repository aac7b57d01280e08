"""A network between workers and nodes, or databases, that can be made bad: it delays, drops and duplicates.

A connection through it stays what TCP promises, a stream without holes: a proxy that drops something drops
all that follows, until the connection ends. What arrives twice arrives the second time on a connection of its
own, late, as from a network or a client that resends, and no client reads the answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Self
from urllib.parse import urlsplit, urlunsplit

_HOST: Final = "127.0.0.1"
_REDIS_PORT: Final = 6379
_REDIS: Final = ("redis", "rediss")
_READ_SIZE: Final = 65536
_VOTES: Final = (b"EVALSHA", b"EVAL")
#: Seconds after which the proxy waits for the answer to a duplicate no longer.
_GHOST_SECONDS: Final = 1.0


@dataclass(frozen=True, slots=True)
class Weather:
    delay: float = 0.0  #: seconds that each piece waits at most
    requests_pass: bool = True
    answers_pass: bool = True
    duplicates: float = 0.0  #: which share of the requests is sent a second time
    lateness: float = 0.0  #: seconds after which it is, at most
    drip: float = 0.0  #: seconds that each byte of an answer takes

    @property
    def drops(self) -> bool:
        return not (self.requests_pass and self.answers_pass)


FAIR: Final = Weather()
SILENT: Final = Weather(requests_pass=False, answers_pass=False)
DRIPPING: Final = Weather(drip=0.05)


class Proxy:
    def __init__(self, url: str, rng: random.Random) -> None:
        self._upstream = urlsplit(url)
        self._rng = rng
        self._weather = FAIR
        self._broken: set[asyncio.Task[None]] = set()
        self._running: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self.url = ""

    async def listen(self) -> None:
        self._server = await asyncio.start_server(self._serve, _HOST)
        port = self._server.sockets[0].getsockname()[1]
        login, at, _ = self._upstream.netloc.rpartition("@")
        self.url = urlunsplit(self._upstream._replace(netloc=f"{login}{at}{_HOST}:{port}"))

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in self._running:
            task.cancel()

    def change(self, weather: Weather) -> None:
        """Have other weather; connections that have lost something by then end."""
        for task in self._broken:
            task.cancel()
        self._broken.clear()
        self._weather = weather

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._running.add(task)
        try:
            await self._pass_on(reader, writer, task)
        except (OSError, asyncio.CancelledError):
            pass  # an end like any other, of a connection that is there to be broken
        finally:
            self._running.discard(task)
            self._broken.discard(task)
            writer.close()

    async def _pass_on(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, task: asyncio.Task[None]
    ) -> None:
        upstream = await self._connect()
        try:
            async with asyncio.TaskGroup() as group:
                there = group.create_task(self._requests(reader, upstream[1], task))
                back = group.create_task(self._answers(upstream[0], writer, task))
                await asyncio.wait([there, back], return_when=asyncio.FIRST_COMPLETED)
                there.cancel()
                back.cancel()
        except* OSError:
            pass
        finally:
            upstream[1].close()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self._upstream.scheme == "unix":
            return await asyncio.open_unix_connection(self._upstream.path)
        host, port = self._upstream.hostname or _HOST, self._upstream.port or _REDIS_PORT
        return await asyncio.open_connection(host, port)

    async def _requests(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, task: asyncio.Task[None]
    ) -> None:
        opening = b""
        voted, lost = self._upstream.scheme not in _REDIS, False
        while piece := await reader.read(_READ_SIZE):
            weather = self._weather
            await self._wait(weather)
            lost = lost or not weather.requests_pass
            if weather.drops:
                self._broken.add(task)
            if lost:
                continue
            voted = voted or any(name in piece for name in _VOTES)
            if not voted:
                opening += piece
            elif piece.startswith(b"*") and self._rng.random() < weather.duplicates:
                self._send_again(opening + piece, weather.lateness)
            writer.write(piece)
            await writer.drain()

    async def _answers(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, task: asyncio.Task[None]
    ) -> None:
        lost = False
        while piece := await reader.read(_READ_SIZE):
            weather = self._weather
            await self._wait(weather)
            lost = lost or not weather.answers_pass
            if lost:
                self._broken.add(task)
                continue
            for begin in range(0, len(piece), size := 1 if weather.drip else _READ_SIZE):
                writer.write(piece[begin : begin + size])
                await writer.drain()
                await asyncio.sleep(weather.drip if self._weather is weather else 0.0)

    async def _wait(self, weather: Weather) -> None:
        if weather.delay:
            await asyncio.sleep(self._rng.uniform(0, weather.delay))

    def _send_again(self, request: bytes, lateness: float) -> None:
        """Send a request once more, later, on a connection of its own with the same greetings."""
        ghost = asyncio.get_running_loop().create_task(self._haunt(request, lateness))
        self._running.add(ghost)
        ghost.add_done_callback(self._running.discard)

    async def _haunt(self, request: bytes, lateness: float) -> None:
        await asyncio.sleep(self._rng.uniform(0, lateness))
        with contextlib.suppress(OSError, TimeoutError):
            reader, writer = await self._connect()
            try:
                writer.write(request)
                await writer.drain()
                async with asyncio.timeout(_GHOST_SECONDS):
                    while await reader.read(_READ_SIZE):
                        pass
            finally:
                writer.close()


class Proxies:
    def __init__(self, urls: Sequence[str], rng: random.Random) -> None:
        self._proxies = [Proxy(url, rng) for url in urls]
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="fencelock-proxies", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    @property
    def urls(self) -> list[str]:
        return [proxy.url for proxy in self._proxies]

    def change(self, node: int, weather: Weather) -> None:
        self._loop.call_soon_threadsafe(self._proxies[node].change, weather)

    async def _listen(self) -> None:
        for proxy in self._proxies:
            await proxy.listen()

    async def _close(self) -> None:
        for proxy in self._proxies:
            proxy.close()
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)
