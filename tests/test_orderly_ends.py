"""A server of HTTP or of tasks that is told to end leaves no lock behind, however its program holds it.

Each run takes some of the cases. FENCELOCK_TEST_ENDS=99 takes all, in four minutes.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final

import httpx
import psutil
import pytest

from fencelock import Database, Redlock
from proof.servers import Nodes, Postgres
from proof.servers.workspace import free_ports
from tests.conftest import SEED
from tests.polling import eventually

pytestmark = [pytest.mark.long, pytest.mark.timeout(240)]

MOST = int(os.environ.get("FENCELOCK_TEST_ENDS", "2"))
TERM, INT, QUIT = signal.SIGTERM, signal.SIGINT, signal.SIGQUIT
_WAYS: Final = ("async", "session", "def", "leader")
_UVICORN: Final = "uvicorn --port PORT tests.orderly:app"
_GUNICORN: Final = "gunicorn --bind 127.0.0.1:PORT --graceful-timeout 20"
#: The command of each server, and the ways in which its program holds a lock.
SERVERS: Final = {
    "uvicorn": (_UVICORN, _WAYS),
    "uvicorn that cancels": (f"{_UVICORN} --timeout-graceful-shutdown 1", _WAYS),
    "uvicorn with workers": (f"{_UVICORN} --timeout-graceful-shutdown 1 --workers 2", _WAYS),
    "uvicorn that reloads": (f"{_UVICORN} --timeout-graceful-shutdown 1 --reload", _WAYS),
    "gunicorn with uvicorn": (f"{_GUNICORN} -k uvicorn_worker.UvicornWorker tests.orderly:app", _WAYS),
    "gunicorn": (f"{_GUNICORN} tests.orderly:site", ("def",)),
    "gunicorn with threads": (f"{_GUNICORN} -k gthread --threads 2 tests.orderly:site", ("def",)),
    "hypercorn": ("hypercorn --bind 127.0.0.1:PORT --graceful-timeout 1 tests.orderly:app", _WAYS),
    "granian": ("granian --interface asgi --port PORT tests.orderly:app", _WAYS),
    "granian of a site": ("granian --interface wsgi --port PORT tests.orderly:site", ("def",)),
}
_CELERY: Final = "celery -A tests.orderly:queue worker --concurrency 2 --pool"


@pytest.mark.parametrize("server", SERVERS)
def test_a_server_that_is_told_to_end_leaves_no_lock(
    server: str, nodes: Nodes, postgres: Postgres, tmp_path: Path
) -> None:
    command, ways = SERVERS[server]
    signals = [(TERM,), (TERM, TERM), *([] if "uvicorn_worker" in command else [(INT,)])]
    authorities = itertools.cycle(authorities_of(nodes, postgres))
    cases = [(way, sent, next(authorities)) for way in ways for sent in signals]
    check([partial(left_by, command, *case, folder=tmp_path) for case in cases])


@pytest.mark.parametrize("pool", ["prefork", "threads", "solo", "gevent"])
def test_a_worker_of_celery_that_is_told_to_end_leaves_no_lock(
    pool: str, nodes: Nodes, postgres: Postgres, tmp_path: Path
) -> None:
    cases = itertools.product([(TERM,), (TERM, QUIT), (QUIT,), (INT, INT)], authorities_of(nodes, postgres))
    run = partial(left_by, f"{_CELERY} {pool}", "task", folder=tmp_path)
    check([partial(run, *case, broker=f"{nodes[0].url}/{base}") for base, case in enumerate(cases, 1)])


def check(cases: list[Callable[[], str]]) -> None:
    """Run the cases, or some of them, at the same time."""
    chosen = random.Random(SEED).sample(cases, min(MOST, len(cases)))
    with ThreadPoolExecutor(4) as threads:
        assert [left for left in threads.map(lambda case: case(), chosen) if left] == []


def authorities_of(nodes: Nodes, postgres: Postgres) -> tuple[str, str]:
    """Return the URLs of a node and of a database, ready for locks."""
    with Redlock([nodes[0].url]) as quorum, Database(url := postgres.create_database()) as database:
        quorum.init()
        database.init()
    return nodes[0].url, url


def left_by(
    command: str,
    way: str,
    signals: tuple[signal.Signals, ...],
    authority: str,
    *,
    folder: Path,
    broker: str = "",
) -> str:
    """Start a program, end it while it holds the lock, and return the lock if it is left; "" if not."""
    (port,) = free_ports(1)
    home = folder / f"{port}"
    home.mkdir()
    is_for_coroutines = way not in {"def", "task"}
    environment = os.environ | {
        "AUTHORITY": authority.replace("+psycopg", "+asyncpg") if is_for_coroutines else authority,
        "BROKER": broker,
        "CLOSES": "1" if len(signals) > 1 else "",
        "HOME": str(home),
        "NAME": home.name,
        "SAID": str(home / "said"),
        "SECONDS": "3",
        "WAY": way,
    }
    log = home / "log"
    arguments = command.replace("PORT", str(port)).split()
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", *arguments], env=environment, stdout=output, stderr=output
        )
    try:
        if broker:
            call = "import tests.orderly; tests.orderly.hold_in_a_task.delay()"
            subprocess.run([sys.executable, "-c", call], env=environment, check=True)
        else:
            assert eventually(lambda: answers(port), 40), log.read_text()
            ThreadPoolExecutor(1).submit(httpx.post, f"http://127.0.0.1:{port}/{way}", timeout=30)
        assert eventually((home / "said").exists, 40), log.read_text()
        for sent in signals:
            with suppress(ProcessLookupError):
                process.send_signal(sent)
            time.sleep(0.3)
        process.wait(timeout=40)
    finally:
        with suppress(psutil.NoSuchProcess):
            for child in [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]:
                child.kill()
        process.wait()
    time.sleep(0.7)
    with Redlock([authority]) if "redis" in authority else Database(authority) as locks:
        found = locks.inspect(home.name)
    return f"{command}, {way}, {signals}: {found} is left; {log.read_text()[-2000:]}" if found else ""


def answers(port: int) -> bool:
    with suppress(httpx.TransportError):
        return httpx.get(f"http://127.0.0.1:{port}/").is_success
    return False
