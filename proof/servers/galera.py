"""Three nodes of MariaDB Galera as child processes, with the server's default settings.

`proof/servers/__init__.py` says what holds for all servers. The library of Galera and the server come from
the system, not from a wheel: `missing()` names the missing parts.
"""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import psutil
import pymysql
from sqlalchemy import URL

from proof.servers.workspace import (
    POLL_SECONDS,
    ServerError,
    Servers,
    Workspace,
    end,
    free_ports,
    tail,
)

_LIBRARIES: Final = tuple(
    Path(folder) / "libgalera_smm.so" for folder in ("/usr/lib/galera", "/usr/lib64/galera-4", "/usr/lib")
)
_PROGRAMS: Final = ("mariadbd", "mariadb-install-db", "rsync")
_SETTINGS: Final = """
[mysqld]
datadir={folder}/data
socket={folder}/socket
pid-file={folder}/pid
log-error={folder}/log.err
port={port}
bind-address=127.0.0.1
server_id={number}
skip-name-resolve
binlog_format=ROW
default_storage_engine=InnoDB
innodb_autoinc_lock_mode=2
innodb_buffer_pool_size=64M
innodb_log_file_size=32M
innodb_flush_log_at_trx_commit=2
performance_schema=OFF
max_connections=300
wsrep_on=ON
wsrep_provider={library}
wsrep_cluster_name=fencelock
wsrep_cluster_address=gcomm://{peers}
wsrep_node_name=n{number}
wsrep_node_address=127.0.0.1:{base}
wsrep_node_incoming_address=127.0.0.1:{port}
wsrep_sst_method=rsync
wsrep_sst_receive_address=127.0.0.1:{transfer}
wsrep_provider_options="base_host=127.0.0.1;base_port={base};gmcast.listen_addr=tcp://127.0.0.1:{base};\
ist.recv_addr=127.0.0.1:{increment};gcache.size=32M"
"""


def missing() -> str:
    """Return what a cluster needs and this machine lacks; nothing where all is there."""
    lacks = [program for program in _PROGRAMS if shutil.which(program) is None]
    if not any(library.exists() for library in _LIBRARIES):
        lacks.append("the library of Galera (Debian: galera-4)")
    if os.geteuid() == 0 and not _has_account("mysql"):
        lacks.append("an account mysql, because the server does not run as root")
    return ", ".join(lacks)


def _has_account(name: str) -> bool:
    try:
        pwd.getpwnam(name)
    except KeyError:
        return False
    return True


class Galera(Servers):
    """A cluster of three nodes with an empty database each client may write to, at any node.

    Attributes:
        urls: of the database at each node, for PyMySQL.
    """

    def __init__(self, *, start_timeout: float = 60.0) -> None:
        self._start_timeout = start_timeout
        self._account = "mysql" if os.geteuid() == 0 else None
        self._nodes: dict[int, subprocess.Popen[bytes]] = {}

    def _make_workspace(self) -> Workspace:
        program = shutil.which("mariadbd")
        if lacks := missing():
            raise ServerError(f"a cluster of Galera needs {lacks}")
        assert program is not None
        return Workspace(Path(tempfile.gettempdir()), [Path(program)])

    def _start(self, workspace: Workspace) -> None:
        workspace.folder.chmod(0o711)
        ports = free_ports(12)
        self._ports, bases = ports[:3], ports[3:6]
        for node in range(3):
            folder = workspace.folder / f"n{node}"
            folder.mkdir()
            settings = _SETTINGS.format(
                folder=folder,
                port=self._ports[node],
                number=node + 1,
                library=next(each for each in _LIBRARIES if each.exists()),
                peers=",".join(f"127.0.0.1:{base}" for base in bases),
                base=bases[node],
                transfer=ports[6 + node],
                increment=ports[9 + node],
            )
            (folder / "settings").write_text(settings)
            (folder / "accounts.sql").write_text(
                "CREATE USER IF NOT EXISTS app@'127.0.0.1' IDENTIFIED BY 'app';\n"
                "GRANT ALL ON *.* TO app@'127.0.0.1';\n"
            )
            self._make_data(folder)
            self._start_node(workspace, node, first=node == 0)
            self._await_synced(workspace, node)
        with self._connect(0) as connection, connection.cursor() as cursor:
            cursor.execute("CREATE DATABASE fencelock")
        self.urls = [
            URL.create("mysql+pymysql", "app", "app", "127.0.0.1", port, "fencelock").render_as_string(
                hide_password=False
            )
            for port in self._ports
        ]

    def _make_data(self, folder: Path) -> None:
        (folder / "data").mkdir()
        install = ["mariadb-install-db", f"--defaults-file={folder}/settings", "--wsrep-on=OFF"]
        install += ["--auth-root-authentication-method=normal", "--skip-test-db"]
        if self._account is not None:
            install.append(f"--user={self._account}")
        done = subprocess.run(install, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise ServerError(f"mariadb-install-db failed:\n{done.stdout}{done.stderr}")
        if self._account is not None:
            shutil.chown(folder, self._account)

    def _start_node(self, workspace: Workspace, node: int, *, first: bool = False) -> None:
        folder, program = workspace.folder / f"n{node}", shutil.which("mariadbd")
        assert program is not None
        command = [program, f"--defaults-file={folder}/settings"]
        if self._account is not None:
            command.append(f"--user={self._account}")
        if first:
            command += ["--wsrep-new-cluster", f"--init-file={folder}/accounts.sql"]
        self._nodes[node] = workspace.spawn(command, folder=folder, log=folder / "output")

    def _await_synced(self, workspace: Workspace, node: int) -> None:
        deadline = time.monotonic() + self._start_timeout
        while not self.is_synced(node):
            if time.monotonic() > deadline:
                folder = workspace.folder / f"n{node}"
                said = tail(folder / "log.err") + tail(folder / "output")
                raise ServerError(f"{folder.name} of the cluster did not join:\n{said}")
            time.sleep(POLL_SECONDS * 20)

    def _connect(self, node: int) -> pymysql.Connection[pymysql.cursors.Cursor]:
        return pymysql.connect(
            host="127.0.0.1",
            port=self._ports[node],
            user="app",
            password="app",  # noqa: S106 - of a server that is thrown away
            connect_timeout=2,
            read_timeout=10,
        )

    def is_synced(self, node: int) -> bool:
        """Tell whether a node is up to date, in a group of the majority."""
        status = "SELECT variable_value FROM information_schema.global_status WHERE variable_name = "
        found: list[tuple[object, ...]] = []
        with suppress(pymysql.Error), self._connect(node) as connection, connection.cursor() as cursor:
            for name in ("wsrep_local_state_comment", "wsrep_cluster_status"):
                cursor.execute(f"{status}'{name}'")
                found += cursor.fetchall()
        return found == [("Synced",), ("Primary",)]

    def is_healthy(self) -> bool:
        return all(map(self.is_synced, range(3)))

    def process(self, node: int) -> psutil.Process:
        return psutil.Process(self._nodes[node].pid)

    def end_node(self, node: int, farewell: signal.Signals) -> None:
        """Send a node this signal, and wait for its end."""
        end(self._nodes[node], farewell)

    def come_back(self, node: int, *, blank: bool = False) -> None:
        """Start a node that has ended, if wanted without its data, which it then takes from another."""
        assert self._workspace is not None
        if blank:
            folder = self._workspace.folder / f"n{node}"
            shutil.rmtree(folder / "data")
            self._make_data(folder)
        self._start_node(self._workspace, node)

    @contextmanager
    def isolated(self, node: int) -> Iterator[None]:
        """Cut a node off its group for as long as the block; clients still reach it."""
        said = "SET GLOBAL wsrep_provider_options = 'gmcast.isolate={:d}'"
        with self._connect(node) as connection, connection.cursor() as cursor:
            cursor.execute(said.format(1))
            try:
                yield
            finally:
                cursor.execute(said.format(0))
