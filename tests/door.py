"""A door between a client and its database, which shuts in the client's face when it says COMMIT."""

from __future__ import annotations

import contextlib
import re
import socket
import threading
import time
from typing import Final

from sqlalchemy import URL, Engine, NullPool, create_engine

_PORTS: Final = {"postgresql": 5432, "mysql": 3306, "mariadb": 3306, "redis": 6379}


def connect_to(url: URL) -> socket.socket:
    """Return a socket to the server of a database."""
    host = str(url.query.get("host") or url.host)
    port = int(str(url.query.get("port") or url.port or _PORTS[url.get_backend_name()]))
    if host.startswith("/"):
        server = socket.socket(socket.AF_UNIX)
        server.connect(f"{host}/.s.PGSQL.{port}")
        return server
    return socket.create_connection((host, port))


class Door:
    """Passes on what a client and a database say to each other, until the client says COMMIT.

    Then the client loses its connection; the COMMIT waits here until it is let through. From the next
    connection on, everything passes.

    Attributes:
        opens_after: seconds after which the COMMIT is let through by itself; None for never.
        hangs: have the client keep its connection and wait for an answer, which never comes.
        loses_answers: let the COMMIT through at once, and only then have the client lose its connection.
    """

    def __init__(self, engine: Engine) -> None:
        self.opens_after: float | None = None
        self.loses_answers = False
        self.hangs = False
        self._engine = engine
        self._closed_once = False
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._let_through = threading.Event()
        self._threads = [threading.Thread(target=self._accept)]
        self._sockets: list[socket.socket] = [self._listener]
        self._threads[0].start()

    @property
    def engine(self) -> Engine:
        """An engine whose connections go through the door."""
        url = self._engine.url.difference_update_query(["host", "port"])
        return create_engine(
            url.set(host="127.0.0.1", port=self._listener.getsockname()[1]), poolclass=NullPool
        )

    def let_through(self) -> None:
        """Let the database have the COMMIT."""
        self._let_through.set()

    def close(self) -> None:
        """End whatever goes on."""
        self._let_through.set()
        for each in self._sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        for thread in self._threads:
            thread.join()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = connect_to(self._engine.url)
                self._sockets += [client, server]
                for run in (self._pass_on, self._pass_back):
                    thread = threading.Thread(target=run, args=(client, server))
                    self._threads.append(thread)
                    thread.start()

    def _pass_on(self, client: socket.socket, server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := client.recv(65536):
                if not self._closed_once and re.search(rb"(?<!AUTO)COMMIT", data):
                    self._closed_once = True
                    if self.loses_answers:
                        client.shutdown(socket.SHUT_WR)
                        server.sendall(data)
                        time.sleep(0.2)
                        client.shutdown(socket.SHUT_RD)
                        return
                    if not self.hangs:
                        client.shutdown(socket.SHUT_RDWR)
                    self._let_through.wait(self.opens_after)
                    server.sendall(data)
                    return
                server.sendall(data)

    def _pass_back(self, client: socket.socket, server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := server.recv(65536):
                client.sendall(data)
            client.shutdown(socket.SHUT_RDWR)  # some drivers wait for it when they say goodbye
