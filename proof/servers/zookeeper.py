"""Servers of ZooKeeper as child processes: one alone, or an ensemble.

`proof/servers/__init__.py` says what holds for all servers. Java and ZooKeeper come from the system, not from
a wheel: `missing()` names the missing parts. Nothing waits for the disk.
"""

from __future__ import annotations

import importlib
import os
import shutil
import socket
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

from proof.servers.members import Members, take_ports
from proof.servers.workspace import ServerError, Workspace

_JARS: Final = Path("/usr/share/java")
_NEEDED: Final = ("zookeeper", "zookeeper-jute", "slf4j-api", "netty-all", "snappy-java", "metrics-core")
# The first of these prints errors; some packages of ZooKeeper want the others.
_USEFUL: Final = ("slf4j-simple", "log4j-1.2", "commons-cli", "commons-io")
_MAIN: Final = "org.apache.zookeeper.server.quorum.QuorumPeerMain"
_FLAGS: Final = (
    "-Xmx64m",
    "-XX:TieredStopAtLevel=1",
    "-XX:+UseSerialGC",
    "-Xshare:auto",
    "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn",
    "-Dzookeeper.jmx.log4j.disable=true",
    "-Dzookeeper.forceSync=no",
    "-Dzookeeper.preAllocSize=1024",
)
_SETTINGS: Final = {
    "admin.enableServer": "false",
    "tickTime": "500",
    "initLimit": "20",
    "syncLimit": "10",
    "maxSessionTimeout": "400000",
    "maxClientCnxns": "0",
    "4lw.commands.whitelist": "*",
}
_SECONDS: Final = 1.0


def missing() -> str:
    """Return what a server needs and this machine lacks; nothing where all is there."""
    lacks = [] if shutil.which("java") else ["java on PATH (Debian: default-jre-headless)"]
    if jars := [f"{name}.jar" for name in _NEEDED if not (_JARS / f"{name}.jar").exists()]:
        lacks.append(f"{', '.join(jars)} in {_JARS} (Debian: libzookeeper-java)")
    return " and ".join(lacks)


class ZooKeeper(Members):
    """A ZooKeeper with nothing in it: a context manager. Servers are numbered from 0.

    Args:
        servers: how many; more than one are an ensemble.
        settings: more lines of zoo.cfg.
        start_timeout: seconds for the servers to find together.
    """

    def __init__(
        self, servers: int = 1, *, settings: Mapping[str, str] | None = None, start_timeout: float = 60.0
    ) -> None:
        super().__init__(servers, start_timeout)
        self._settings = {**_SETTINGS, **(settings or {})}
        self.client_ports: list[int] = []

    def _make_workspace(self) -> Workspace:
        if lacks := missing():
            raise ServerError(f"ZooKeeper needs {lacks}")
        return Workspace(Path(tempfile.gettempdir()), [_java()])

    def _start(self, workspace: Workspace) -> None:
        ports = take_ports(workspace, 3 * self.count)
        self.client_ports = ports[: self.count]
        fellows = [
            f"server.{server + 1}=127.0.0.1:{ports[self.count + server]}:{ports[2 * self.count + server]}\n"
            for server in range(self.count)
        ]
        for server, port in enumerate(self.client_ports):
            folder = workspace.folder / f"z{server}"
            folder.mkdir()
            lines = {
                "dataDir": str(folder / "data"),
                "clientPort": str(port),
                "clientPortAddress": "127.0.0.1",
                **self._settings,
            }
            said = "".join(f"{name}={value}\n" for name, value in lines.items())
            (folder / "zoo.cfg").write_text(said + ("".join(fellows) if self.count > 1 else ""))
            self._make_data(folder, server)
            self._spawn(workspace, server)
        self._await(workspace, self._all_serve, "the servers of ZooKeeper did not find together")

    def _make_data(self, folder: Path, server: int) -> None:
        (folder / "data").mkdir()
        (folder / "data" / "myid").write_text(str(server + 1))

    def _spawn(self, workspace: Workspace, member: int) -> None:
        folder = workspace.folder / f"z{member}"
        jars = [_JARS / f"{name}.jar" for name in (*_NEEDED, *_USEFUL)]
        path = os.pathsep.join(str(jar) for jar in jars if jar.exists())
        self._processes[member] = workspace.spawn(
            [_java(), *_FLAGS, "-cp", path, _MAIN, "./zoo.cfg"],
            folder=folder,
            log=folder / "log",
            env={name: value for name, value in os.environ.items() if "JAVA" not in name},
        )

    @property
    def url(self) -> str:
        return f"zookeeper://{self.hosts}"

    @property
    def urls(self) -> list[str]:
        """One URL for each server."""
        return [f"zookeeper://127.0.0.1:{port}" for port in self.client_ports]

    @property
    def hosts(self) -> str:
        """What other clients call a connection string."""
        return ",".join(f"127.0.0.1:{port}" for port in self.client_ports)

    def come_back(self, member: int, *, blank: bool = False) -> None:
        """Start a server that has ended, if wanted without its data. It serves when a majority is there."""
        workspace = self._open_workspace()
        if blank:
            self._forget(workspace, member)
        self._spawn(workspace, member)

    def wipe(self) -> None:
        """Kill all servers, and start them with nothing in them."""
        for server in range(self.count):
            self.kill(server)
        for server in range(self.count):
            self.come_back(server, blank=True)
        self.await_healthy()

    def _forget(self, workspace: Workspace, server: int) -> None:
        folder = workspace.folder / f"z{server}"
        shutil.rmtree(folder / "data")
        self._make_data(folder, server)

    def is_healthy(self) -> bool:
        """Tell whether each server serves, and one leads."""
        return len(self._answering()) == self.count and self._all_serve()

    def _all_serve(self) -> bool:
        """Whether the modes are those of a whole ensemble, or of one server alone."""
        modes = sorted(self.mode(server) for server in range(self.count))
        return modes == (["standalone"] if self.count == 1 else ["follower"] * (self.count - 1) + ["leader"])

    def leader(self) -> int:
        """Return the server that leads, once there is one; a server alone leads."""
        found: list[int] = []

        def look() -> bool:
            found[:] = [each for each in self._answering() if self.mode(each) in {"leader", "standalone"}]
            return len(found) == 1

        self._await(self._open_workspace(), look, "no server of ZooKeeper leads")
        return found[0]

    def mode(self, server: int) -> str:
        """Return leader, follower or standalone; nothing where a server does not serve."""
        lines = self.ask(server, "srvr").splitlines()
        return next((line.removeprefix("Mode: ") for line in lines if line.startswith("Mode: ")), "")

    def ask(self, server: int, word: str) -> str:
        """Return what a server says to a word of four letters; nothing where it does not answer."""
        said = b""
        address = ("127.0.0.1", self.client_ports[server])
        with suppress(OSError), socket.create_connection(address, _SECONDS) as connection:
            connection.sendall(word.encode())
            while piece := connection.recv(65536):
                said += piece
        return said.decode()

    def empty(self, path: str) -> None:
        """Delete a path and all below it."""
        # Not imported by name, because kazoo has no types.
        client = importlib.import_module("kazoo.client").KazooClient(self.hosts)
        client.start()
        try:
            client.delete(path, recursive=True)
        finally:
            client.stop()
            client.close()


def _java() -> Path:
    found = shutil.which("java")
    assert found is not None
    return Path(found).resolve()
