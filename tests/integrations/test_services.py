"""The story of docs/services.md comes true with processes: one service calls another one, and is paused."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest

from proof.pages.blocks import blocks, read
from proof.servers import Postgres
from tests.polling import eventually
from tests.programs import printed

PAUSED = """
import os, signal, orders
print(orders.reserve("Anton", pause=lambda request: os.kill(os.getpid(), signal.SIGSTOP)))
"""
NEXT = "import orders; print(orders.reserve('Berta'))"


@contextmanager
def stock_service(folder: Path, url: str, *changes: tuple[str, str]) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    printed = {block.file: block.text for block in blocks(read("docs/services.md"))}
    for name in ("stock.py", "orders.py"):
        text = printed[name]
        for old, new in (("sqlite:///stock.db", url), ("localhost:8000", f"127.0.0.1:{port}"), *changes):
            text = text.replace(old, new)
        (folder / name).write_text(text)
    command = [sys.executable, "-m", "uvicorn", "stock:app", "--port", str(port)]
    with (
        (folder / "log").open("w") as log,
        subprocess.Popen(command, cwd=folder, stdout=log, stderr=log) as service,
    ):
        try:
            assert eventually(lambda: "Uvicorn running" in (folder / "log").read_text(), 30)
            yield f"http://127.0.0.1:{port}"
        finally:
            service.terminate()


def play(folder: Path, url: str) -> tuple[str, str, str]:
    environment = os.environ | {
        "FENCELOCK_URL": "sqlite:///orders.db",
        "no_proxy": "127.0.0.1",
        "NO_PROXY": "127.0.0.1",
    }
    first = subprocess.Popen(
        [sys.executable, "-c", PAUSED], cwd=folder, env=environment, stdout=subprocess.PIPE, text=True
    )
    with first:
        try:
            process = psutil.Process(first.pid)
            assert eventually(lambda: process.status() == psutil.STATUS_STOPPED, 30)
            answer = printed("-c", NEXT, cwd=folder, env=environment).strip()
        finally:
            first.send_signal(signal.SIGCONT)
        late = first.communicate(timeout=30)[0].strip()
    with httpx.Client(trust_env=False) as client:
        return answer, late, client.get(f"{url}/items/7").json()


@pytest.mark.parametrize("kind", ["sqlite", pytest.param("postgresql", marks=pytest.mark.long)])
def test_the_late_call_is_refused(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    if kind == "postgresql":
        postgres: Postgres = request.getfixturevalue("postgres")
        url = postgres.create_database()
    else:
        url = "sqlite:///stock.db"
    with stock_service(tmp_path, url) as service:
        assert play(tmp_path, service) == ("200", "409", "Berta")


@pytest.mark.long
def test_without_a_fence_the_late_call_wins(tmp_path: Path) -> None:
    """The control: the same two services, and a table without a fence."""
    changes = ("FencedModel, Base", "Base"), ('    __fence_resource__ = "item:{id}"\n', "")
    with stock_service(tmp_path, "sqlite:///stock.db", *changes) as service:
        assert play(tmp_path, service) == ("200", "200", "Anton")
