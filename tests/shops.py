"""The examples with a framework, as programs: copied, checked, tested, served, and asked by many clients."""

from __future__ import annotations

import http.client
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx
import psutil

from proof.servers.workspace import free_ports
from tests.polling import eventually

ROOT: Final = Path(__file__).parent.parent
#: What docs/errors.md says of statuses: the same request may be sent again, with the same key.
AGAIN: Final = frozenset({409, 423, 503, 504})
_MYPY: Final = ("--strict", "--allow-untyped-calls", "--ignore-missing-imports", "--allow-untyped-decorators")


@dataclass
class Shop:
    """A copy of an example.

    Attributes:
        folder: where it is.
        environment: of its programs, beside that of the tests.
    """

    name: str
    folder: Path
    environment: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        ignored = shutil.ignore_patterns("__pycache__", "instance", ".*_cache")
        shutil.copytree(ROOT / "examples" / self.name, self.folder, ignore=ignored)
        self.environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            **self.environment,
        }

    def python(self, *arguments: str) -> str:
        ended = subprocess.run(
            [sys.executable, *arguments],
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=100,
            check=False,
        )
        assert ended.returncode == 0, ended.stdout
        return ended.stdout

    def check(self, *options: str) -> None:
        assert " passed" in self.python("-m", "pytest", "-q", "-W", "error", "-p", "no:cacheprovider")
        modules = [path.name for path in self.folder.glob("*.py")]
        self.python(
            "-m", "mypy", *_MYPY, *options, "--cache-dir", str(ROOT / ".mypy_cache" / self.name), *modules
        )

    @contextmanager
    def running(self, *command: str, **environment: str) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
        log = self.folder / f"{command[0]}{random.getrandbits(32):x}.log"
        with log.open("wb") as output:
            program = subprocess.Popen(
                [sys.executable, "-m", *command],
                cwd=self.folder,
                env=self.environment | environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        try:
            yield program, log
        except BaseException as error:
            error.add_note(log.read_text()[-5000:])
            raise
        finally:
            with suppress(psutil.NoSuchProcess):
                for worker in psutil.Process(program.pid).children(recursive=True):
                    worker.send_signal(signal.SIGCONT)
            program.terminate()
            program.wait(timeout=30)

    @contextmanager
    def serving(self, *command: str, **environment: str) -> Iterator[Server]:
        """Serve on a free port, which stands for `PORT` in the command, until it answers."""
        (port,) = free_ports(1)
        real = [part.replace("PORT", str(port)) for part in command]
        with self.running(*real, **environment) as (program, log):
            server = Server(port, program.pid, log)
            assert eventually(server.answers, 30.0)
            yield server


@dataclass(frozen=True)
class Server:
    port: int
    pid: int
    log: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def answers(self) -> bool:
        with suppress(httpx.TransportError):
            return bool(self.get("/alive").status_code)
        return False

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, timeout=20, trust_env=False)

    def post(self, path: str, key: str) -> httpx.Response:
        return httpx.post(self.url + path, headers={"Idempotency-Key": key}, timeout=20, trust_env=False)

    def begin(self, path: str, key: str) -> http.client.HTTPConnection:
        """Send a POST without waiting for its answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request("POST", path, headers={"Idempotency-Key": key})
        return connection

    def worker_of(self, connection: http.client.HTTPConnection) -> psutil.Process:
        ours = connection.sock.getsockname()
        found: list[psutil.Process] = []

        def has_accepted() -> bool:
            workers = psutil.Process(self.pid).children(recursive=True)
            found[:] = [w for w in workers if any(c.raddr == ours for c in w.net_connections("tcp"))]
            return bool(found)

        assert eventually(has_accepted)
        return found[0]

    def insist(self, path: str, key: str, *, seconds: float = 60.0) -> Any:
        """Send a POST until it is answered for good, and return the answer: pauses grow, and are random."""
        end, pause = time.monotonic() + seconds, 0.05
        while True:
            with suppress(httpx.TransportError):
                answer = self.post(path, key)
                if answer.status_code not in AGAIN:
                    assert answer.is_success, answer.text
                    return answer.json()
                assert answer.headers["Retry-After"] == "1"
            assert time.monotonic() < end, f"{path} with {key} got no answer for good"
            time.sleep(pause * random.random())
            pause = min(2 * pause, 1.0)
