"""With TLS as the page says, a foreign server gets no lock: another name or authority, or no TLS at all.

Servers of TLS are fronts here, apart from MariaDB, which begins TLS in the middle of its greeting.
"""

from __future__ import annotations

import asyncio
import gc
import os
import select
import shutil
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pymysql
import pytest
import redis
from sqlalchemy import create_engine, make_url
from sqlalchemy.ext.asyncio import create_async_engine

import fencelock
from fencelock import Database, FencelockError
from fencelock._locking import factory_of
from fencelock.authority.redlock.transport.endpoints import endpoint_of
from proof.servers import Etcd as EtcdServer
from proof.servers import Nodes, Postgres
from proof.servers.certificates import Certificate, Certificates
from proof.servers.nodes import Node
from proof.servers.workspace import free_ports

#: `SSLRequest` of PostgreSQL's protocol.
_SSL_REQUEST: Final = bytes.fromhex("0000000804d2162f")
_PROGRAMS: Final = ("mariadbd", "mariadb-install-db")


def context_of(made: Certificates) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=made.ca)


#: For each line of the table in docs/security.md: how to make an authority for an address.
LINES: Final[dict[str, Callable[[str, Certificates], Any]]] = {
    "Redis": lambda at, made: fencelock.Redlock(f"rediss://{at}?ssl_ca_certs={made.ca}", outage_grace=0),
    "etcd": lambda at, made: factory_of("etcds://")(f"etcds://{at}?ca={made.ca}"),
    "ZooKeeper": lambda at, made: factory_of("zookeepers://")(f"zookeepers://{at}?ca={made.ca}"),
    "psycopg": lambda at, made: Database(
        f"postgresql+psycopg://postgres@{at}/postgres?sslmode=verify-full&sslrootcert={made.ca}"
    ),
    "asyncpg": lambda at, made: Database(
        create_async_engine(
            f"postgresql+asyncpg://postgres@{at}/postgres", connect_args={"ssl": context_of(made)}
        )
    ),
    **{
        driver: lambda at, made, driver=driver: Database(  # type: ignore[misc]
            f"mysql+{driver}://root:pw@{at}/mysql?ssl_ca={made.ca}&ssl_check_hostname=true"
        )
        for driver in ("pymysql", "asyncmy")
    },
    "aiomysql": lambda at, made: Database(
        create_async_engine(f"mysql+aiomysql://root:pw@{at}/mysql", connect_args={"ssl": context_of(made)})
    ),
}


@dataclass(slots=True)
class Front:
    """A server that takes TLS off, or leaves plain connections as they are, and passes everything on."""

    upstream: Callable[[], socket.socket]
    certificate: Certificate | None
    protocols: tuple[str, ...] = ()
    asks: bytes = b""  # what a client says before TLS; the server answers S, or N without TLS
    listener: socket.socket = field(init=False)

    def __enter__(self) -> str:
        self.listener = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self._serve, daemon=True).start()
        return f"localhost:{self.listener.getsockname()[1]}"

    def __exit__(self, *_: object) -> None:
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=self._pass_on, args=self.listener.accept()[:1], daemon=True).start()

    def _pass_on(self, client: socket.socket) -> None:
        with suppress(OSError), closing(client), closing(self.upstream()) as server:
            if self.asks and client.recv(len(self.asks), socket.MSG_PEEK | socket.MSG_WAITALL) == self.asks:
                client.recv(len(self.asks))
                client.sendall(b"S" if self.certificate else b"N")
            if self.certificate is not None:
                context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
                context.load_cert_chain(self.certificate.certificate, self.certificate.key)
                if self.protocols:
                    context.set_alpn_protocols(self.protocols)
                with closing(context.wrap_socket(client, server_side=True)) as secure:
                    _pump(secure, server)
            else:
                _pump(client, server)


def _pump(client: socket.socket, server: socket.socket) -> None:
    """Pass bytes on both ways, in one thread, because two must not use one socket with TLS."""
    while True:
        waits = not (isinstance(client, ssl.SSLSocket) and client.pending())
        ready = select.select([client, server], [], [])[0] if waits else [client]
        for one, other in ((client, server), (server, client)):
            if one in ready:
                if not (data := one.recv(65536)):
                    return
                other.sendall(data)


@contextmanager
def mariadb(folder: Path, certificate: Certificate | None) -> Iterator[str]:
    """A MariaDB of our own, with this certificate, or without TLS."""
    if lacking := [each for each in _PROGRAMS if shutil.which(each) is None]:
        pytest.skip(f"this machine lacks {', '.join(lacking)}")
    data = folder / f"data-{time.monotonic_ns()}"
    (port,) = free_ports(1)
    account = ["--user=root"] if os.geteuid() == 0 else []
    common = ["--no-defaults", f"--datadir={data}", f"--tmpdir={folder}", *account]
    install = [
        shutil.which("mariadb-install-db") or "",
        *common,
        "--auth-root-authentication-method=normal",
        "--skip-test-db",
    ]
    done = subprocess.run(install, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"
    first = folder / "first.sql"
    first.write_text("ALTER USER root@localhost IDENTIFIED BY 'pw';\n")
    tls = (
        []
        if certificate is None
        else [f"--ssl-cert={certificate.certificate}", f"--ssl-key={certificate.key}"]
    )
    options = [f"--port={port}", "--bind-address=127.0.0.1", f"--socket={data}/s", f"--init-file={first}"]
    server = subprocess.Popen(
        [
            shutil.which("mariadbd") or "",
            *common,
            *options,
            *tls,
            "--innodb-buffer-pool-size=16M",
            "--skip-log-bin",
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        engine = create_engine(f"mysql+pymysql://root:pw@127.0.0.1:{port}/mysql")
        for _ in range(200):
            with suppress(Exception):
                engine.connect().close()
                break
            time.sleep(0.1)
        engine.dispose()
        yield f"localhost:{port}"
    finally:
        server.terminate()
        server.wait(20)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> tuple[Certificates, Certificates]:
    """Those of the program's authority, and of another one."""
    folder = tmp_path_factory.mktemp("tls")
    return Certificates.make(folder / "ours"), Certificates.make(folder / "theirs")


@pytest.fixture(scope="module", params=LINES)
def line(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def upstream(line: str, request: pytest.FixtureRequest) -> Iterator[Callable[..., Any]]:
    """Return a function that opens a front with a certificate; for MariaDB, a server with one."""
    with ExitStack() as stack:
        options: dict[str, Any] = {}
        if line in {"pymysql", "aiomysql", "asyncmy"}:
            folder = request.getfixturevalue("tmp_path_factory").mktemp("mariadb")
            yield lambda certificate: mariadb(folder, certificate)
            return
        if line in {"psycopg", "asyncpg"}:
            query = make_url(stack.enter_context(Postgres()).create_database()).query
            path = f"{query['host']}/.s.PGSQL.{query['port']}"
            options["asks"] = _SSL_REQUEST

            def opens() -> socket.socket:
                connection = socket.socket(socket.AF_UNIX)
                connection.connect(path)
                return connection
        else:
            if line == "etcd":
                options["protocols"] = ("h2",)
                at = stack.enter_context(EtcdServer(1)).url.partition("://")[2]
            elif line == "ZooKeeper":
                at = request.getfixturevalue("zookeeper_server").url.partition("://")[2]
            else:
                at = request.getfixturevalue("one_node").url.partition("://")[2]
            host, _, port = at.partition("/")[0].partition(":")

            def opens() -> socket.socket:
                return socket.create_connection((host, int(port)))

        yield lambda certificate: Front(opens, certificate, **options)


@pytest.fixture(scope="module")
def one_node() -> Iterator[Node]:
    with Nodes(1) as nodes:
        with fencelock.Redlock(nodes[0].url) as authority:
            authority.init()
        yield nodes[0]


def locks(authority: Any) -> bool:
    """Return whether the authority grants a lock; the reason of a refusal is an error of fencelock."""

    async def acquire() -> None:
        if isinstance(authority, Database):
            await authority.aio.init()
        async with authority.lock("r", ttl=5, timeout=5):
            pass
        await authority.aio.close()

    try:
        asyncio.run(acquire())
    except FencelockError:
        return False
    finally:
        authority.close()
    return True


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # aiomysql's, of its refusals
def test_only_the_right_server_grants(
    line: str,
    upstream: Callable[..., Any],
    certificates: tuple[Certificates, Certificates],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pymysql.connections, "SSL_ENABLED", True)  # other tests do without
    ours, theirs = certificates
    found = {}
    for name, certificate in {
        "good": ours.server,
        "another name": ours.make_client(f"{line.lower()}.example"),
        "another authority": theirs.server,
        "no TLS": None,
    }.items():
        with upstream(certificate) as address:
            found[name] = locks(LINES[line](address, ours))
        gc.collect()
    assert found == {"good": True, "another name": False, "another authority": False, "no TLS": False}


def test_a_client_of_an_older_redis_py_checks_the_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """There, False is what a client has by default."""
    monkeypatch.setattr(redis, "__version__", "5.2.1")
    client = redis.Redis(ssl=True, ssl_check_hostname=False)
    assert endpoint_of(client, 1.0).server.settings["ssl_check_hostname"] is True


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("mysql+aiomysql://u@h/x?ssl_ca=ca.pem", r"aiomysql takes no ssl_"),
        ("postgresql+asyncpg://u@h/x?sslmode=verify-full", r"write ssl=verify-full"),
        ("zookeeper://h?ca=ca.pem", r"certificates are for zookeepers://"),
        ("zookeepers://h?ca=/none.pem", r"cannot be read"),
    ],
)
def test_settings_that_would_do_nothing_are_refused(url: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        factory_of(url)(url)
