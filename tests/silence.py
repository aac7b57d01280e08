"""A proxy before a database that can go silent: it keeps connections open, and passes nothing on."""

from __future__ import annotations

import contextlib
import socket
import threading

from sqlalchemy import URL

from tests.door import connect_to


class Proxy:
    """Passes on what clients and a server say to each other, unless it is told to be silent."""

    def __init__(self, url: URL) -> None:
        self._named = url
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._speaks = threading.Event()
        self._speaks.set()
        #: Of each connection that was open when the silence began.
        self._silenced: set[socket.socket] = set()
        self._clients: set[socket.socket] = set()
        self._sockets: list[socket.socket] = [self._listener]
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def url(self) -> URL:
        """The database, through this proxy."""
        port = self._listener.getsockname()[1]
        return self._named.difference_update_query(["host", "port"]).set(host="127.0.0.1", port=port)

    def silence_open(self) -> None:
        """Let the connections that are open be silent for ever. New ones work."""
        self._silenced |= self._clients

    def silence(self) -> None:
        """Let all connections be silent, and new ones too, until `speak`."""
        self._speaks.clear()

    def speak(self) -> None:
        """Pass on what was held back, and whatever comes."""
        self._speaks.set()

    def close(self) -> None:
        self._speaks.set()
        for each in self._sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = connect_to(self._named)
                self._clients.add(client)
                self._sockets += [client, server]
                for ends in ((client, server, client), (server, client, client)):
                    threading.Thread(target=self._pass_on, args=ends, daemon=True).start()

    def _pass_on(self, giver: socket.socket, taker: socket.socket, client: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := giver.recv(65536):
                self._speaks.wait()
                if client not in self._silenced:
                    taker.sendall(data)
            taker.shutdown(socket.SHUT_RDWR)
