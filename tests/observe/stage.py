"""A shop, and a Prometheus that scrapes it."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import urllib.parse
import urllib.request
from typing import Any, Final

import pytest

from tests.conftest import ROOT

RULES: Final = ROOT / "docs" / "monitoring" / "alerts.yml"

needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="no prometheus on PATH: Debian's package has it"
)


class Server:
    """A Prometheus, and the program that it scrapes."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}/api/v1/"

    def ask(self, path: str, **parameters: str) -> Any:
        query = f"{self._url}{path}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(query, timeout=10) as answer:  # noqa: S310 - it is ours
            return json.load(answer)["data"]

    def firing(self) -> set[str]:
        return {
            alert["labels"]["alertname"]
            for alert in self.ask("alerts")["alerts"]
            if alert["state"] == "firing"
        }

    def is_up(self) -> bool:
        try:
            return bool(self.ask("query", query="up == 1")["result"])
        except OSError:
            return False


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def tell(program: subprocess.Popen[str], line: str) -> None:
    assert program.stdin is not None
    program.stdin.write(f"{line}\n")
    program.stdin.flush()


def heard(program: subprocess.Popen[str]) -> str:
    assert program.stdout is not None
    return program.stdout.readline().strip()
