"""As README's picture says, a paused worker holds up no other, and is refused when it wakes up.

The program is the one of docs/open-transactions.md, as printed. Each worker is a process; the first one stops
itself by SIGSTOP where it would think, for longer than its lease lasts.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from sqlalchemy import create_engine, text

from fencelock import Redlock
from proof.pages.blocks import blocks, read
from proof.servers import Nodes
from tests.polling import eventually

PAGE = "docs/open-transactions.md"
WORKER = """
import os, signal, sys
import payments
from fencelock import FencelockError
from sqlalchemy.exc import DBAPIError

payments.TTL = 1
way, cents, paused = sys.argv[1:]
think = (lambda: os.kill(os.getpid(), signal.SIGSTOP)) if paused == "paused" else lambda: None
try:
    getattr(payments, way)(1, int(cents), think)
    print("paid")
except FencelockError as error:
    print(type(error).__name__)
except DBAPIError as error:
    print(type(error.orig).__name__)
payments.engine.dispose()
"""
BEGINNING = """
import payments
from fencelock import fenced_lock
from sqlalchemy.orm import Session

payments.Base.metadata.create_all(payments.engine)
with fenced_lock("order:1"), Session(payments.engine) as session:
    session.add(payments.Order(id=1, paid_cents=0))
    session.commit()
payments.engine.dispose()
"""
IN_A_TRANSACTION = """
def pay_in_a_transaction(number, cents, think):
    with fenced_lock(f"order:{number}", ttl=TTL), Session(engine) as session:
        order = claim(session, Order, number)
        think()
        order.paid_cents += cents
        session.commit()

def pay_after_reading(number, cents, think):
    with fenced_lock(f"order:{number}", ttl=TTL), Session(engine) as session:
        order = session.get_one(Order, number)
        think()
        order.paid_cents += cents
        session.commit()
"""


class Shop:
    """The program of the page in a folder, with a database and a node."""

    def __init__(self, folder: Path, database_url: str, node_url: str) -> None:
        self._folder = folder
        self._environment = {**os.environ, "DATABASE_URL": database_url, "FENCELOCK_URL": node_url}
        self._url = database_url
        program = next(block for block in blocks(read(PAGE)) if block.file)
        (folder / "payments.py").write_text(program.text + IN_A_TRANSACTION)
        beginning = self.begin(BEGINNING)
        beginning.communicate(timeout=60)
        assert beginning.returncode == 0

    def use(self, *settings: str) -> None:
        """Have the processes that begin from now on use settings of PostgreSQL."""
        options = "".join(f"&options=-c%20{setting.replace('=', '%3D')}" for setting in settings)
        self._environment["DATABASE_URL"] = self._url + options

    def begin(self, program: str, *arguments: str) -> subprocess.Popen[str]:
        """Start a process."""
        command = [sys.executable, "-W", "error", "-c", program, *arguments]
        return subprocess.Popen(
            command, cwd=self._folder, env=self._environment, stdout=subprocess.PIPE, text=True
        )

    def begin_paused(self, way: str) -> subprocess.Popen[str]:
        """Start a worker that pays 30 and stops where it thinks; return when it has stopped."""
        worker = self.begin(WORKER, way, "30", "paused")
        assert eventually(lambda: psutil.Process(worker.pid).status() == psutil.STATUS_STOPPED)
        return worker

    def paid(self) -> int:
        engine = create_engine(self._url)
        with engine.connect() as connection:
            cents = connection.scalar(text("SELECT paid_cents FROM orders"))
        engine.dispose()
        assert isinstance(cents, int)
        return cents


@pytest.fixture
def shop(tmp_path: Path, database_url: str, nodes: Nodes) -> Shop:
    """A shop with one order, of which nothing is paid."""
    with Redlock(nodes[0].url) as authority:
        authority.init()
    return Shop(tmp_path, database_url, nodes[0].url)


@pytest.mark.parametrize("way", ["pay_by_reading", "pay_by_claiming"])
@pytest.mark.parametrize("database_url", ["sqlite", "postgresql"], indirect=True)
def test_paused_worker_holds_up_nobody_and_is_refused(shop: Shop, way: str) -> None:
    """The next holder waits for the end of the lease, and not for the worker, which is still paused."""
    first = shop.begin_paused(way)
    try:
        second, _ = shop.begin(WORKER, way, "50", "at once").communicate(timeout=60)
        assert second == "paid\n"
        assert shop.paid() == 50
    finally:
        first.send_signal(signal.SIGCONT)
    said, _ = first.communicate(timeout=60)
    assert said == "LockLostError\n"
    assert shop.paid() == 50


@pytest.mark.long
@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
def test_worker_that_is_paused_inside_a_transaction_holds_up_the_next(shop: Shop) -> None:
    """One that has claimed keeps the row; one that has only read does not."""
    first = shop.begin_paused("pay_in_a_transaction")
    second = shop.begin(WORKER, "pay_by_claiming", "50", "at once")
    with pytest.raises(subprocess.TimeoutExpired):
        second.communicate(timeout=4)
    first.send_signal(signal.SIGCONT)
    assert first.communicate(timeout=60)[0] == "LockLostError\n"
    assert second.communicate(timeout=60)[0] == "paid\n"

    first = shop.begin_paused("pay_after_reading")
    assert shop.begin(WORKER, "pay_by_claiming", "20", "at once").communicate(timeout=60)[0] == "paid\n"
    first.send_signal(signal.SIGCONT)
    assert first.communicate(timeout=60)[0] == "LockLostError\n"
    assert shop.paid() == 70


@pytest.mark.long
@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
def test_database_ends_what_is_forgotten(shop: Shop) -> None:
    """`lock_timeout` ends the wait of the next holder, the idle timeout the transaction that it waits for."""
    first = shop.begin_paused("pay_in_a_transaction")
    shop.use("lock_timeout=1s")
    second = shop.begin(WORKER, "pay_by_claiming", "50", "at once")
    assert second.communicate(timeout=60)[0] == "LockNotAvailable\n"
    first.send_signal(signal.SIGCONT)
    assert first.communicate(timeout=60)[0] == "LockLostError\n"

    shop.use("idle_in_transaction_session_timeout=1s")
    first = shop.begin_paused("pay_in_a_transaction")
    assert shop.begin(WORKER, "pay_by_claiming", "20", "at once").communicate(timeout=60)[0] == "paid\n"
    first.send_signal(signal.SIGCONT)
    assert first.communicate(timeout=60)[0] == "IdleInTransactionSessionTimeout\n"
    assert shop.paid() == 20
