"""examples/fastapi_shop counts each deposit once, with two uvicorn workers, a pause and an outage."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Final

import psycopg
import pytest
from psycopg.sql import SQL, Identifier
from sqlalchemy import make_url

from proof.servers import Postgres
from tests.polling import eventually
from tests.shops import Server, Shop

pytestmark = [pytest.mark.long]

UVICORN: Final = (
    "uvicorn",
    "app:app",
    "--workers",
    "2",
    "--timeout-worker-healthcheck",
    "60",
    "--port",
    "PORT",
)


@pytest.fixture
def database(postgres: Postgres) -> str:
    return postgres.create_database().replace("+psycopg", "")


@pytest.fixture
def shop(database: str, tmp_path: Path) -> Shop:
    metrics = tmp_path / "metrics"
    metrics.mkdir()
    environment = {
        "DATABASE_URL": database.replace("postgresql", "postgresql+asyncpg"),
        "LOCK_TTL": "2",
        "BANK_SECONDS": "1.5",
        "PROMETHEUS_MULTIPROC_DIR": str(metrics),
    }
    return Shop("fastapi_shop", tmp_path / "shop", environment)


@pytest.fixture
def server(shop: Shop) -> Iterator[Server]:
    shop.python("models.py")
    with shop.serving(*UVICORN) as made:
        assert eventually(lambda: made.log.read_text().count("startup complete") == 2)
        with psycopg.connect(shop.environment["DATABASE_URL"].replace("+asyncpg", "")) as connection:
            connection.execute("INSERT INTO accounts (id, balance) VALUES (1, 0)")
        yield made


def stored(database: str) -> tuple[int, int]:
    with psycopg.connect(database) as connection:
        row = connection.execute("SELECT balance, (SELECT count(*) FROM payments) FROM accounts").fetchone()
    assert row is not None
    return row[0], row[1]


def metric(text: str, name: str) -> float:
    return sum(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(name))


def test_parallel_deposits_add_up(server: Server, database: str) -> None:
    with ThreadPoolExecutor(12) as clients:
        for _ in clients.map(
            lambda n: server.insist("/accounts/1/deposits?cents=5", f"d{n % 60}"), range(120)
        ):
            pass
    assert stored(database) == (300, 0)
    metrics = server.get("/metrics").text
    assert metric(metrics, "fencelock_lock_wait_seconds_count") >= 120
    assert 'lock="account"' in metrics
    assert metric(metrics, "fencelock_locks_held{") == 0
    assert server.get("/health").status_code == 200


def test_worker_that_is_paused_while_the_bank_answers_is_refused(server: Server, database: str) -> None:
    server.insist("/accounts/1/deposits?cents=100", "d")
    before = fence(database)
    with closing(server.begin("/accounts/1/payments?cents=70", "p")) as late:
        worker = server.worker_of(late)
        assert eventually(lambda: fence(database) > before)  # it has committed its claim, and asks the bank
        worker.send_signal(signal.SIGSTOP)
        assert server.insist("/accounts/1/payments?cents=70", "p") == {"balance": 30}
        worker.send_signal(signal.SIGCONT)
        with late.getresponse() as answer:
            assert (answer.status, answer.read()) == (409, b"Conflict")
    assert stored(database) == (30, 1)
    assert metric(server.get("/metrics").text, "fencelock_leases_lost_total") == 1


def fence(database: str) -> int:
    with psycopg.connect(database) as connection:
        row = connection.execute("SELECT last_fencing_token FROM accounts").fetchone()
    assert row is not None
    return int(row[0])


def test_outage_is_told_without_names(server: Server, database: str, postgres: Postgres) -> None:
    server.insist("/accounts/1/deposits?cents=100", "d")
    name = make_url(database).database or ""
    allow = SQL("ALTER DATABASE {} ALLOW_CONNECTIONS {}")
    with psycopg.connect(postgres.dsn, autocommit=True) as connection:
        connection.execute(allow.format(Identifier(name), SQL("false")))
        connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s", [name]
        )
        for answer in (server.get("/health"), server.post("/accounts/1/deposits?cents=100", "e")):
            assert (answer.status_code, answer.text) == (503, "Service Unavailable")
        assert server.get("/alive").status_code == 200
        connection.execute(allow.format(Identifier(name), SQL("true")))
    server.insist("/accounts/1/deposits?cents=100", "e")
    assert eventually(lambda: server.get("/health").status_code == 200)
    assert stored(database) == (200, 0)
