"""A door before PostgreSQL that loses the answers to some COMMITs, in each way in which that happens."""

from __future__ import annotations

import contextlib
import random
import re
import socket
import time
from collections import Counter

from sqlalchemy import Engine

from tests.door import Door

_WAYS = ("committed", "committed late", "never committed")


class LossyDoor(Door):
    """Passes on what clients and a database say to each other, save some COMMITs or their answers."""

    def __init__(self, engine: Engine, random_: random.Random, *, chance: float) -> None:
        self.chance = chance
        self.lost: Counter[str] = Counter()
        self._random = random_
        super().__init__(engine)

    def _pass_on(self, client: socket.socket, server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := client.recv(65536):
                if re.search(rb"(?<!AUTO)COMMIT", data) and self._random.random() < self.chance:
                    self._lose(client, server, data)
                    break
                server.sendall(data)
        _close(client, server)

    def _lose(self, client: socket.socket, server: socket.socket, data: bytes) -> None:
        way = self._random.choice(_WAYS)
        self.lost[way] += 1
        client.shutdown(socket.SHUT_RDWR)
        if way == "never committed":
            return
        if way == "committed late":
            time.sleep(self._random.uniform(0.05, 0.8))
        server.sendall(data)
        time.sleep(0.2)  # the client is gone when the answer comes

    def _pass_back(self, client: socket.socket, server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := server.recv(65536):
                client.sendall(data)
        _close(client, server)


def _close(*sockets: socket.socket) -> None:
    for each in sockets:
        with contextlib.suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)
        each.close()
