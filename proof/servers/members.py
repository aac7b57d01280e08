"""Servers of one group, each known by its number: what etcd and ZooKeeper have in common.

`proof/servers/__init__.py` says what holds for all servers.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from abc import abstractmethod
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil

from proof.servers.nodes import reserve_port
from proof.servers.workspace import POLL_SECONDS, ServerError, Servers, Workspace, end, pause, tail


def take_ports(workspace: Workspace, count: int) -> list[int]:
    """Return ports that stay these servers', also while one of them is away."""
    reservations = [reserve_port() for _ in range(count)]
    for reservation in reservations:
        if sys.platform == "linux":
            workspace.keep(reservation)
        else:
            reservation.close()  # BSD's SO_REUSEADDR would not let the server listen
    return [int(reservation.getsockname()[1]) for reservation in reservations]


class Members(Servers):
    """Some servers that elect a leader; numbered from 0. None may be touched by a forked child."""

    def __init__(self, count: int, start_timeout: float) -> None:
        if count < 1:
            raise ValueError(f"at least one server is needed, not {count}")
        self.count = count
        self._start_timeout = start_timeout
        self._processes: dict[int, subprocess.Popen[bytes]] = {}

    @property
    def folder(self) -> Path:
        return self._open_workspace().folder

    def process(self, member: int) -> psutil.Process:
        return psutil.Process(self._processes[member].pid)

    def is_running(self, member: int) -> bool:
        """Whether its process exists. A paused one does."""
        return self._workspace is not None and self._workspace.is_running(self._processes.get(member))

    def kill(self, member: int) -> None:
        self._end(member, signal.SIGKILL)

    def stop(self, member: int | None = None) -> None:
        """End a member in good order; without a number, end all in any way, and forget their data."""
        if member is None:
            super().stop()
        else:
            self._end(member, signal.SIGTERM)

    def pause(self, member: int) -> None:
        """SIGSTOP a member: it keeps its connections and answers nothing until `resume`."""
        self._open_workspace()
        pause(self._processes[member])

    def resume(self, member: int) -> None:
        self._open_workspace()
        self._processes[member].send_signal(signal.SIGCONT)

    def heal(self) -> None:
        """Resume paused members, start ended ones, and wait until all is well."""
        for member in range(self.count):
            if self.is_running(member):
                self.resume(member)
            else:
                self._spawn(self._open_workspace(), member)
        self.await_healthy()

    def await_healthy(self, seconds: float | None = None) -> None:
        """Return when each member takes part."""
        self._await(self._open_workspace(), self.is_healthy, "the members do not find together", seconds)

    @abstractmethod
    def is_healthy(self) -> bool:
        """Tell whether each member takes part, and one of them leads."""

    @abstractmethod
    def _spawn(self, workspace: Workspace, member: int) -> None:
        """Start a member with the data that it has, and do not wait for it."""

    def _open_workspace(self) -> Workspace:
        if self._workspace is None:
            raise ServerError("these servers have never been started")
        self._workspace.check()
        return self._workspace

    def _end(self, member: int, farewell: signal.Signals) -> None:
        self._open_workspace()
        end(self._processes[member], farewell)

    def _answering(self) -> list[int]:
        """Return the members that can be asked: a paused one would keep each caller waiting."""
        return list(filter(self._can_answer, range(self.count)))

    def _can_answer(self, member: int) -> bool:
        with suppress(psutil.NoSuchProcess):
            return self.is_running(member) and self.process(member).status() != psutil.STATUS_STOPPED
        return False

    def _await(
        self, workspace: Workspace, ready: Callable[[], bool], failure: str, seconds: float | None = None
    ) -> None:
        deadline = time.monotonic() + (self._start_timeout if seconds is None else seconds)
        while not ready():
            if time.monotonic() > deadline:
                logs = sorted(workspace.folder.glob("*/log"))
                raise ServerError(f"{failure}:\n" + "\n".join(tail(log, 8) for log in logs))
            time.sleep(POLL_SECONDS * 4)
