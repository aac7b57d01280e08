"""Sockets that nobody here needs any more, but that a node still has to read.

A server that answers to a socket which has been closed gives the connection up, with all that it has not
read yet; it reads some kilobytes at a time. Of what a hung node was sent it would execute the ACQUIREs, and
not the RELEASEs behind them. So only the half that is written to is closed, and the other when the server has
read everything: then it closes its own.
"""

from __future__ import annotations

import os
import socket
from collections import deque
from contextlib import suppress

#: How many are kept; beyond that the oldest is closed: its server is not coming back.
MOST = 64
#: By number: what is left when the interpreter ends is the operating system's to close. Changed by single
#: steps that need no lock, which a forked child could inherit from a thread that it does not have.
_kept: deque[int] = deque()


def close_when_read(sock: socket.socket) -> None:
    """Close a non-blocking socket once its server has read what was sent."""
    sweep()
    try:
        sock.shutdown(socket.SHUT_WR)
    except OSError:  # the connection is broken
        sock.close()
        return
    _kept.append(sock.detach())
    if len(_kept) > MOST:
        with suppress(IndexError):
            os.close(_kept.popleft())


def sweep() -> None:
    """Close those whose server has read everything."""
    for _ in range(len(_kept)):
        try:
            descriptor = _kept.popleft()
        except IndexError:  # another thread is at it
            return
        if _is_over(descriptor):
            os.close(descriptor)
        else:
            _kept.append(descriptor)


def _is_over(descriptor: int) -> bool:
    try:
        while os.read(descriptor, 65536):
            pass
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True
