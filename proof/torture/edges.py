"""What strikes at the edges of the library: signal handlers that raise, and sockets that take little.

`weaken` takes out of the library what it has against each of these faults: a control, which must end WRONG.
"""

from __future__ import annotations

import hashlib
import signal
import socket
import threading
from collections.abc import Callable, Generator, Iterable
from pathlib import Path
from typing import Any, Final, TypeVar

from fencelock.authority.redlock.protocol import inspecting
from fencelock.authority.redlock.transport import blocking, connector
from fencelock.authority.redlock.transport.polling import READ
from fencelock.authority.redlock.wire import codec, connection
from fencelock.authority.redlock.wire.nodes import NodeConnections
from proof.torture.history import STRUCK

_T = TypeVar("_T")
#: What a process that has no handler for it yet ignores.
STRIKE: Final = signal.SIGURG
#: Bytes that a socket takes at a time, where the loopback device takes anything at once.
_LITTLE: Final = 2048
_ETHERNET: Final = 1500
_MTU: Final = Path("/sys/class/net/lo/mtu")


class Struck(BaseException):
    """What the handler raises; no `Exception`, like Ctrl-C."""


assert Struck.__name__ == STRUCK


class Strikes:
    """Has the handler raise in calls of the library only: the rest of the worker is the evidence."""

    def __init__(self) -> None:
        self._is_exposed = False
        signal.signal(STRIKE, self._strike)

    def _strike(self, *_: object) -> None:
        if self._is_exposed:
            self._is_exposed = False
            raise Struck

    def expose(self, call: Callable[[], _T]) -> Callable[[], _T]:
        """Return the same call, within which the handler raises if this is the main thread."""
        if threading.current_thread() is not threading.main_thread():
            return call

        def exposed() -> _T:
            try:
                self._is_exposed = True
                return call()
            finally:
                self._is_exposed = False

        return exposed


def narrow_sockets() -> None:
    """Let the sockets to nodes take little at a time, unless the device cuts the data by itself."""
    if _MTU.exists() and int(_MTU.read_text()) <= _ETHERNET:
        return
    really_open = connector._open

    def open_narrowly(*arguments: Any, **options: Any) -> connector.Opened:
        opened = really_open(*arguments, **options)
        opened.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _LITTLE)
        return opened

    connector._open = open_narrowly


def weaken(faults: Iterable[str]) -> None:
    """Take out of the library of this process what it has against these faults."""
    for fault in faults:
        if fault in _WEAKER:
            _WEAKER[fault]()


def _trust_interrupted_connections() -> None:
    """Take the next answer for that of the next command, whatever was interrupted."""
    setattr(NodeConnections, "drop_dirty", lambda _: None)  # noqa: B010 - for mypy it is a method
    setattr(NodeConnections, "connection", lambda self, node: self._nodes[node].connection)  # noqa: B010
    connection._ONLY_TO.clear()


def _call_silent_clients() -> None:
    """Call the next place of a client that has not come."""
    _change_scripts("if silent[client or ''] then", "if false then")


def _stumble() -> None:
    """Let a value of another type end the script."""
    _change_scripts("redis.pcall", "redis.call")


def _believe() -> None:
    """Believe what a client says of tokens, and of locks that are not its own."""
    _change_scripts("return number - last <= 4294967296", "return true")
    _change_scripts("if is_decided_here and nonce == NONCE then", "if is_decided_here then")

    def vouch(*_: object) -> Generator[Any, Any, bool]:
        yield from ()
        return True

    setattr(inspecting, "vouch", vouch)  # noqa: B010 - for mypy it is a function


def _change_scripts(text: str, instead: str) -> None:
    assert any(text in script for script in codec.SCRIPTS.values()), f"no script has {text!r}"
    for name, script in codec.SCRIPTS.items():
        codec.SCRIPTS[name] = changed = script.replace(text, instead)
        codec.DIGESTS[name] = hashlib.sha1(changed.encode(), usedforsecurity=False).hexdigest()


def _continue_with_answers_only() -> None:
    """Write the rest of a command when the node has answered something."""
    setattr(blocking, "_BOTH", READ)  # noqa: B010 - for mypy it is Final


_WEAKER: Final[dict[str, Callable[[], None]]] = {
    "signal": _trust_interrupted_connections,
    "line-freeze": _call_silent_clients,
    "odd-value": _stumble,
    "partial-write": _continue_with_answers_only,
    "lie": _believe,
}
