"""Reads from and writes to a socket that does not block, also with TLS."""

from __future__ import annotations

import socket
import ssl
from contextlib import suppress
from typing import Final

from fencelock.authority.redlock.protocol.messages import Answer, Said
from fencelock.authority.redlock.wire.connection import Connection

#: Bytes that are read at first: mostly enough, and room for them is quickly made.
READ_SIZE: Final = 1024
_MUCH: Final = 65536
_NOTHING: Final = (BlockingIOError, ssl.SSLWantReadError)


def read_from(sock: socket.socket) -> bytes | None:
    """Return what has arrived; None where that is nothing.

    Raises:
        OSError: the connection is broken.
    """
    try:
        data = sock.recv(READ_SIZE)
    except _NOTHING:
        return None
    if not data:
        raise ConnectionResetError("closed by the node")
    # With TLS, data may wait inside the socket object where no poll sees it.
    if len(data) == READ_SIZE or isinstance(sock, ssl.SSLSocket):
        with suppress(*_NOTHING):
            while more := sock.recv(_MUCH):
                data += more
    return data


def write_to(sock: socket.socket, connection: Connection) -> bool:
    """Write as much as the socket takes; return whether that was all.

    Raises:
        OSError: the connection is broken.
    """
    outgoing = connection.outgoing
    try:
        del outgoing[: sock.send(outgoing)]
    except (BlockingIOError, ssl.SSLWantWriteError, ssl.SSLWantReadError):
        return False
    return not outgoing


def broken_by(error: OSError) -> Answer:
    """Return what to report for a node whose connection an error has ended."""
    return Answer(Said.UNREACHABLE, detail=f"the connection broke: {error}")
