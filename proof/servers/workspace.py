"""A temporary folder with the server processes that work in it, neither of which outlives its maker.

Apart from `nodes.py` and `postgres.py`, because ending processes for certain is a
subject of its own: on the way out of a `with` block, at interpreter exit, after SIGKILL (see
`reaper.py`), and never in a forked child.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Final, Self, cast, final

import psutil

from proof.servers import reaper

POLL_SECONDS: Final = 0.005
PATIENCE_SECONDS: Final = 10.0


class ServerError(RuntimeError):
    """A server could not be had: its program is missing, or it would not start. The message says why."""


@dataclass(frozen=True, slots=True)
class _Belongings:
    owner: int
    folder: Path
    reaper: subprocess.Popen[bytes]
    servers: dict[Path, tuple[subprocess.Popen[bytes], signal.Signals]] = field(default_factory=dict)
    reservations: list[socket.socket] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def is_ours(self) -> bool:
        return os.getpid() == self.owner

    def tell_reaper(self, message: Mapping[str, float]) -> None:
        cast("IO[bytes]", self.reaper.stdin).write(json.dumps(message).encode() + b"\n")

    def clean_up(self) -> None:
        """End the servers and the reaper, remove the folder. In a forked child: nothing."""
        if not self.is_ours:
            return
        with self.lock:
            for server, farewell in self.servers.values():
                server.send_signal(farewell)
            for server, farewell in self.servers.values():
                end(server, farewell)
            with suppress(BrokenPipeError):
                self.tell_reaper({})  # a goodbye, because a forked worker may keep the pipe open
            with suppress(subprocess.TimeoutExpired):
                self.reaper.wait(PATIENCE_SECONDS)
            self.reaper.kill()
            self.reaper.communicate()
            shutil.rmtree(self.folder, ignore_errors=True)
            for reservation in self.reservations:
                reservation.close()


@final
class Workspace:
    """A temporary folder, the servers that work in it, and the reaper that outlives a crash of ours.

    Closed by `close`, by the garbage collector, at interpreter exit and, where none of these happens, by the
    reaper, which also looks for `programs` that it was not told of. A forked child's copy does nothing.
    """

    def __init__(self, parent_folder: Path, programs: Sequence[Path]) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="fencelock-", dir=parent_folder)).resolve()
        try:
            started = _start_reaper(self.folder, programs)
        except OSError as error:
            shutil.rmtree(self.folder)
            raise ServerError(f"the reaper, a Python process, cannot be started: {error}") from error
        self._belongings = _Belongings(os.getpid(), self.folder, started)
        self._finalizer = weakref.finalize(self, self._belongings.clean_up)

    @property
    def is_open(self) -> bool:
        return self._finalizer.alive

    def close(self) -> None:
        """End the servers and remove the folder; twice is fine. In a forked child: nothing."""
        if self._belongings.is_ours:
            self._finalizer()

    def check(self) -> None:
        """Refuse to act on servers that are another process' business, or that are gone for good."""
        if not self._belongings.is_ours:
            raise ServerError(
                f"these servers belong to process {self._belongings.owner}; this process was forked from it "
                "and may use them, but not start, stop, pause or kill them"
            )
        if not self.is_open:
            raise ServerError("these servers have been stopped, and their folder is gone")

    def keep(self, reservation: socket.socket) -> None:
        self._belongings.reservations.append(reservation)

    def is_running(self, server: subprocess.Popen[bytes] | None) -> bool:
        """Whether a server exists; right also in a forked child, which cannot wait for it."""
        if server is None:
            return False
        if self._belongings.is_ours:
            return server.poll() is None
        try:
            process = psutil.Process(server.pid)
            return process.ppid() == self._belongings.owner and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    def spawn(
        self,
        command: Sequence[str | Path],
        *,
        folder: Path,
        log: Path,
        farewell: signal.Signals = signal.SIGKILL,
        **popen: Any,
    ) -> subprocess.Popen[bytes]:
        """Start a program in a session of its own and tell the reaper about it.

        One server at a time works in a `folder`. What outlives its `farewell` for long gets SIGKILL.
        """
        self.check()  # before the lock too: a forked child may have no thread that lets go of it
        with self._belongings.lock:
            self.check()
            server = _run(command, folder, log, popen)
            self._belongings.servers[folder] = server, farewell
            self._introduce(server, farewell)
        return server

    def _introduce(self, server: subprocess.Popen[bytes], farewell: signal.Signals) -> None:
        try:
            created = psutil.Process(server.pid).create_time()
            self._belongings.tell_reaper({"pid": server.pid, "created": created, "farewell": int(farewell)})
        except psutil.NoSuchProcess:
            pass  # it has ended already
        except BrokenPipeError as error:
            raise ServerError(
                f"the reaper, which cleans up after a crash, has ended:\n{tail(self.folder / 'reaper.log')}"
            ) from error


class Servers(ABC):
    """Servers that share a workspace: a context manager, which may be started again after its end."""

    _workspace: Workspace | None = None

    def start(self) -> Self:
        """Start them, unless they have been. Where one does not start, none is left running."""
        if self._workspace is None or not self._workspace.is_open:
            workspace = self._make_workspace()
            try:
                self._start(workspace)
            except BaseException:
                workspace.close()
                raise
            self._workspace = workspace
        return self

    def stop(self) -> None:
        """End them, whatever state they are in, and forget their data. Twice is fine.

        In a forked child nothing happens: the servers belong to the parent.
        """
        if self._workspace is not None:
            self._workspace.close()

    @abstractmethod
    def _make_workspace(self) -> Workspace: ...

    @abstractmethod
    def _start(self, workspace: Workspace) -> None: ...

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def _start_reaper(folder: Path, programs: Sequence[Path]) -> subprocess.Popen[bytes]:
    interpreter = [sys.executable, "-W", "ignore", reaper.__file__]
    with (folder / "reaper.log").open("wb") as log:
        return subprocess.Popen(
            [*interpreter, str(os.getpid()), str(folder), *map(os.path.realpath, programs)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=log,
            bufsize=0,
            cwd="/",
            start_new_session=True,
        )


def _run(
    command: Sequence[str | Path], folder: Path, log: Path, popen: Mapping[str, Any]
) -> subprocess.Popen[bytes]:
    try:
        with log.open("wb") as out:
            return subprocess.Popen(
                command,
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                **popen,
            )
    except (OSError, subprocess.SubprocessError) as error:
        raise ServerError(f"{command[0]} cannot be run: {error}") from error


def end(server: subprocess.Popen[bytes], farewell: signal.Signals) -> None:
    """Ask a server to end, then make it. It has been waited for when this returns."""
    server.send_signal(farewell)
    server.send_signal(signal.SIGCONT)  # a paused process hears nothing but SIGKILL
    try:
        server.wait(PATIENCE_SECONDS)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()


def pause(server: subprocess.Popen[bytes]) -> None:
    """SIGSTOP a server. It has stopped when this returns."""
    server.send_signal(signal.SIGSTOP)
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        with suppress(psutil.NoSuchProcess):
            if psutil.Process(server.pid).status() == psutil.STATUS_STOPPED:
                return
        time.sleep(POLL_SECONDS)
    raise ServerError(f"process {server.pid} does not stop at SIGSTOP")


def free_ports(count: int) -> list[int]:
    """Return ports that nothing listens at, also while a server is away.

    They are below those that a system gives to clients.
    """
    found: list[int] = []
    for port in random.SystemRandom().sample(range(20_000, 32_000), 12_000):
        if len(found) == count:
            break
        with suppress(OSError):
            socket.create_server(("127.0.0.1", port)).close()
            found.append(port)
    return found


def tail(log: Path, lines: int = 20) -> str:
    try:
        return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])
    except OSError:
        return ""
