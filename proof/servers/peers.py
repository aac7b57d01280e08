"""A network between the members of a cluster, which can cut one off: what it says and hears is held back.

A program of its own, which imports nothing of ours, because the interpreter of the cluster's user may be
busy. A line of JSON on its first port says which member to cut off, and its process; it answers with a line.
Connections stay open, and say what was held back when the cut is over, as TCP does.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import psutil

_HOST: Final = "127.0.0.1"
_READ_SIZE: Final = 65536


@dataclass(eq=False, slots=True)
class Line:
    """A connection from some member, known by its port only, to another."""

    target: int
    source_port: int
    speaks: asyncio.Event = field(default_factory=asyncio.Event)


class Network:
    def __init__(self, ports: Sequence[int]) -> None:
        self._ports = ports
        self._lines: set[Line] = set()
        self._cut: tuple[int, int] | None = None  # the member, and its process

    async def obey(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while said := await reader.readline():
            self._cut = tuple(json.loads(said)) or None
            self._judge(self._lines)
            writer.write(b"done\n")
        writer.close()

    def _judge(self, lines: set[Line]) -> None:
        sources = set()
        if self._cut is not None:
            everybody = psutil.net_connections("tcp")
            sources = {each.laddr.port for each in everybody if each.pid == self._cut[1] and each.laddr}
        for line in lines:
            if self._cut is not None and (line.target == self._cut[0] or line.source_port in sources):
                line.speaks.clear()
            else:
                line.speaks.set()

    async def serve(self, target: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line = Line(target, writer.get_extra_info("peername")[1])
        self._judge({line})
        self._lines.add(line)
        upstream: asyncio.StreamWriter | None = None
        with contextlib.suppress(OSError):
            await line.speaks.wait()
            answers, upstream = await asyncio.open_connection(_HOST, self._ports[target])
            ways = [_pass_on(line, reader, upstream), _pass_on(line, answers, writer)]
            await asyncio.wait(map(asyncio.ensure_future, ways))
        self._lines.discard(line)
        for each in filter(None, (writer, upstream)):
            each.close()


async def _pass_on(line: Line, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(_READ_SIZE):
            await line.speaks.wait()
            writer.write(data)
            await writer.drain()
    await line.speaks.wait()
    writer.close()


async def main(control: int, doors: Sequence[int], ports: Sequence[int]) -> None:
    network = Network(ports)
    for member, door in enumerate(doors):
        await asyncio.start_server(functools.partial(network.serve, member), _HOST, door)
    server = await asyncio.start_server(network.obey, _HOST, control)
    await server.serve_forever()


if __name__ == "__main__":
    numbers = [int(argument) for argument in sys.argv[1:]]
    count = len(numbers) // 2
    asyncio.run(main(numbers[0], numbers[1 : count + 1], numbers[count + 1 :]))
