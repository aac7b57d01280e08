"""The policy that docs/celery.md prints holds in its outage: the only Redis has lost its memory."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import redis
from sqlalchemy import create_engine, func, select, table
from sqlalchemy.sql import column

from fencelock import Redlock
from proof.pages.blocks import blocks, read
from proof.servers import Nodes, Postgres
from tests.polling import eventually

pytestmark = [pytest.mark.long]

TASKS = 12
SEED = f"""
from fencelock import fenced_lock
from sqlalchemy.orm import Session
from tasks import Base, Order, engine

Base.metadata.create_all(engine)
for number in range({TASKS}):
    with fenced_lock(f"order:{{number}}"), Session(engine) as session:
        session.add(Order(id=number))
        session.commit()
"""
SEND = f"import tasks; [tasks.ship.delay(number) for number in range({TASKS})]"


@pytest.mark.timed
@pytest.mark.timeout(180)
def test_no_task_is_lost_while_the_only_node_is_blank(
    nodes: Nodes, postgres: Postgres, tmp_path: Path
) -> None:
    """The tasks wait in the queue until an operator has started above what the database has seen."""
    locks, broker, database = nodes[0], nodes[1], postgres.create_database()
    with Redlock(locks.url) as authority:
        authority.init()
    (printed,) = (block.text for block in blocks(read("docs/celery.md")) if block.file == "tasks.py")
    for shown, real in (
        ("redis://localhost:6379/1", f"{broker.url}/1"),
        ("redis://localhost:6379/2", f"{broker.url}/2"),
        ("postgresql+psycopg://user@host/shop", database),
    ):
        assert shown in printed
        printed = printed.replace(shown, real)
    (tmp_path / "tasks.py").write_text(printed)
    environment = os.environ | {"FENCELOCK_URL": locks.url}

    def python(*arguments: str) -> None:
        subprocess.run([sys.executable, *arguments], cwd=tmp_path, env=environment, check=True, timeout=60)

    python("-c", SEED)
    with redis.Redis.from_url(locks.url) as client:
        client.flushall()
    log = tmp_path / "log"
    command = [
        sys.executable,
        "-m",
        "celery",
        "-A",
        "tasks",
        "worker",
        "-P",
        "threads",
        "-c",
        "4",
        "-l",
        "INFO",
    ]
    with log.open("w") as output:
        worker = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=output, stderr=output)
    engine = create_engine(database)
    shipped = select(func.count(column("parcel"))).select_from(table("orders"))

    def count() -> int:
        with engine.connect() as connection:
            return int(connection.execute(shipped).scalar_one())

    try:
        python("-c", SEND)
        assert eventually(lambda: log.read_text().count("NodesNotInitialisedError") >= TASKS, 30)
        time.sleep(1)
        assert count() == 0
        python("-m", "fencelock", "init", locks.url, "--after-loss", "--database", database, "--yes")
        assert eventually(lambda: count() == TASKS, 90)
    except BaseException as error:
        error.add_note(log.read_text()[-3000:])
        raise
    finally:
        engine.dispose()
        worker.terminate()
        worker.wait(timeout=30)
