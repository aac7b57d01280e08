"""examples/celery_shop with a real worker and two beats goes on after an outage of the locks' server."""

from __future__ import annotations

import re
import time
from contextlib import ExitStack
from pathlib import Path

import psycopg
import pytest

from fencelock import Redlock
from proof.servers import Nodes, Postgres
from tests.polling import eventually
from tests.shops import Shop

pytestmark = [pytest.mark.long]

ORDERS = 20
SEED = f"""
from fencelock import bypass
from sqlalchemy.orm import Session
from tasks import Base, Order, engine

Base.metadata.create_all(engine)
with Session(engine) as session, bypass(session):
    session.add_all([Order(id=number) for number in range({ORDERS})])
    session.commit()
"""
SEND = f"import tasks; [tasks.ship.delay(number) for number in range({ORDERS}) for _ in range(2)]"


@pytest.fixture
def shop(nodes: Nodes, postgres: Postgres, tmp_path: Path) -> Shop:
    with Redlock(nodes[0].url) as authority:
        authority.init()
    environment = {
        "FENCELOCK_URL": nodes[0].url,
        "BROKER_URL": f"{nodes[1].url}/1",
        "RESULT_URL": f"{nodes[1].url}/2",
        "DATABASE_URL": postgres.create_database(),
    }
    made = Shop("celery_shop", tmp_path / "shop", environment)
    file = made.folder / "tasks.py"
    text = file.read_text()
    for shown, shorter in (
        ("import crontab", "import schedule"),
        ("crontab()", "schedule(1, relative=True)"),
        ("%H:%M}", "%H:%M:%S}"),
    ):
        assert text.count(shown) == 1
        text = text.replace(shown, shorter)
    file.write_text(text)
    return made


@pytest.mark.timed
def test_two_beats_and_an_outage(shop: Shop, nodes: Nodes) -> None:
    shop.python("-c", SEED)
    database = shop.environment["DATABASE_URL"].replace("+psycopg", "")
    with ExitStack() as stack, psycopg.connect(database, autocommit=True) as connection:

        def count(query: str) -> int:
            row = connection.execute(query.encode()).fetchone()
            assert row is not None
            return int(row[0])

        def run(*arguments: str) -> Path:
            return stack.enter_context(shop.running("celery", "-A", "tasks", *arguments, "-l", "INFO"))[1]

        log = run("worker", "--concurrency", "4")
        assert eventually(lambda: " ready." in log.read_text(), 60)
        for beat in ("one", "two"):
            run("beat", "--schedule", beat)
        assert eventually(lambda: count("SELECT count(*) FROM reports") >= 3, 60)
        nodes[0].pause()
        try:
            shop.python("-c", SEND)
            assert eventually(lambda: "QuorumError" in log.read_text(), 30)
            time.sleep(1)
        finally:
            nodes[0].resume()
        shipped = "SELECT count(*) FROM orders WHERE parcel IS NOT NULL"
        assert eventually(lambda: count(shipped) == ORDERS, 60)
        before = count("SELECT count(*) FROM reports")
        assert eventually(lambda: count("SELECT count(*) FROM reports") > before, 60)
        assert count("SELECT count(*) - count(DISTINCT slot) FROM reports") == 0
        received = len(re.findall(r"Task tasks\.report\[\S+\] received", log.read_text()))
        assert received > 1.5 * count("SELECT count(*) FROM reports")  # as both beats have sent them
