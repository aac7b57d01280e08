"""The shop of docs/errors.md, with worker processes that are paused and killed while they pay.

Each order is delivered twice at once, as by a queue that delivers at least once, and again where a worker has
died or given up. In the end each order is to be paid exactly once.
"""

from __future__ import annotations

import json
import os
import queue
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import psycopg
from sqlalchemy import create_engine

from fencelock import Redlock
from proof.pages.blocks import ROOT, blocks, read
from proof.retries.lossy import LossyDoor
from proof.servers import Nodes, Postgres

PAGE: Final = "docs/errors.md"
FILES: Final = ("payments.py", "again.py", "persistent.py")
LOOK: Final = "        receipt = once("
#: Before it, for the control: each try has a key of its own.
NO_LOOK: Final = "        key += f' {os.urandom(8).hex()}'\n"
CENTS: Final = 500
TTL: Final = 1.0
WORKERS: Final = 6
#: How many orders are being paid at a time: few, so that workers meet.
OPEN: Final = 4


@dataclass
class Result:
    orders: int = 0
    deliveries: int = 0  #: an order has at least two
    once: int = 0  #: how many orders were paid exactly once
    more: int = 0
    never: int = 0
    receipts: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    gave_up: Counter[str] = field(default_factory=Counter)

    def is_right(self) -> bool:
        return self.orders > 0 and self.once == self.receipts == self.orders

    def lines(self) -> Iterator[str]:
        yield (
            f"{self.orders} orders, {self.deliveries} deliveries: {self.once} paid exactly once, "
            f"{self.more} more than once, {self.never} never"
        )
        for title, counted in (("faults", self.faults), ("errors", self.errors), ("gave up", self.gave_up)):
            yield f"{title}: " + (", ".join(f"{n} × {what}" for what, n in counted.most_common()) or "none")


class Worker:
    """A worker process, which is started again when it has died, and a thread that hands it deliveries."""

    def __init__(self, shop: Shop, policy: str) -> None:
        self._shop = shop
        self._command = [sys.executable, "-m", "proof.retries.worker", policy, str(TTL)]
        self._lock = threading.Lock()
        self._stopped = False
        self._process = self._start()
        self.thread = threading.Thread(target=self._hand_out)
        self.thread.start()

    def _start(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self._command,
            cwd=self._shop.folder,
            env=self._shop.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def _hand_out(self) -> None:
        while (order := self._shop.deliveries.get()) is not None:
            if not self._deliver(order):
                self._shop.deliveries.put(order)
            self._shop.deliveries.task_done()
        self._shop.deliveries.task_done()
        with self._lock:
            self._stopped = True
            self._end(self._process)

    def _deliver(self, order: int) -> bool:
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        answer = ""
        with suppress(BrokenPipeError):
            process.stdin.write(json.dumps([order, CENTS, f"order {order}"]) + "\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        if not answer.endswith("\n"):
            with self._lock:
                self._end(process)
                self._process = self._start()
            self._shop.note_delivery(order, "the worker died", [])
            return False
        _, ended, errors = json.loads(answer)
        self._shop.note_delivery(order, ended, errors)
        return bool(ended == "paid")

    @staticmethod
    def _end(process: subprocess.Popen[str]) -> None:
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()
        process.wait(60)

    def send(self, number: signal.Signals) -> None:
        with self._lock:
            if not self._stopped:
                self._process.send_signal(number)


class Shop:
    """Nodes, a PostgreSQL behind a lossy door, workers, and what goes wrong.

    The control, which does not look first, has each order delivered once, and nothing goes wrong but lost
    answers: these alone make it pay twice.
    """

    def __init__(self, folder: Path, *, looks: bool = True, chance: float = 0.03, seed: int = 0) -> None:
        self.folder = folder
        self.deliveries: queue.Queue[int | None] = queue.Queue()
        self.environment = dict(os.environ)
        self.result = Result()
        self._looks = looks
        self._copies = 2 if looks else 1
        self._chance = chance
        self._random = random.Random(seed)
        self._noting = threading.Lock()
        self._paid: Counter[int] = Counter()
        self._open = threading.Semaphore(OPEN)

    def run(self, seconds: float, *, until: Callable[[Result], bool] = lambda _: False) -> Result:
        """Take orders for some seconds, or until a condition holds.

        Then let all of them be paid, and look.
        """
        with ExitStack() as stack:
            url, door = self._prepare(stack)
            workers = [Worker(self, ("loop", "tenacity")[number % 2]) for number in range(WORKERS)]
            over = threading.Event()
            taking = threading.Thread(target=self._take_orders, args=(url, over))
            breaking = threading.Thread(target=self._break, args=(url, workers, over))
            background = (taking, breaking) if self._looks else (taking,)
            for thread in background:
                thread.start()
            end = time.monotonic() + seconds
            try:
                while time.monotonic() < end and not until(self._judge(url, door)):
                    time.sleep(0.5)
            finally:
                over.set()
                for thread in background:
                    thread.join()
                self.deliveries.join()
                for _ in workers:
                    self.deliveries.put(None)
                for worker in workers:
                    worker.thread.join()
            return self._judge(url, door)

    def note_delivery(self, order: int, ended: str, errors: list[str]) -> None:
        with self._noting:
            self.result.deliveries += 1
            self.result.errors.update(errors)
            if ended != "paid":
                self.result.gave_up[ended.partition("\n")[0][:120]] += 1
                return
            self._paid[order] += 1
            if self._paid[order] == self._copies:
                self._open.release()

    def _prepare(self, stack: ExitStack) -> tuple[str, LossyDoor]:
        """Start the servers, write the files, make the tables; return the database's URL, and the door."""
        nodes = stack.enter_context(Nodes(3))
        with Redlock(nodes.urls) as authority:
            authority.init()
        postgres = stack.enter_context(Postgres())
        url = postgres.create_database()
        door = LossyDoor(create_engine(url), self._random, chance=0.0)
        stack.callback(door.close)
        self.environment |= {
            "FENCELOCK_URL": ",".join(nodes.urls),
            "DATABASE_URL": door.engine.url.render_as_string(hide_password=False),
            "PYTHONPATH": f"{ROOT}{os.pathsep}.",
        }
        self._write_files()
        make = "import payments; payments.Base.metadata.create_all(payments.engine)"
        subprocess.run([sys.executable, "-c", make], cwd=self.folder, env=self.environment, check=True)
        dsn = f"{url.replace('+psycopg', '')}&application_name=shop"
        with psycopg.connect(dsn, autocommit=True) as connection:
            for setting in ("lock_timeout = '2s'", "idle_in_transaction_session_timeout = '3s'"):
                name = connection.info.dbname
                connection.execute(f"ALTER DATABASE {name} SET {setting}".encode())
        door.chance = self._chance
        return dsn, door

    def _write_files(self) -> None:
        printed = {block.file: block.text for block in blocks(read(PAGE)) if block.file}
        if not self._looks:
            assert printed["payments.py"].count(LOOK) == 1
            before, _, behind = printed["payments.py"].partition(LOOK)
            printed["payments.py"] = before + NO_LOOK + LOOK + behind
        for name in FILES:
            (self.folder / name).write_text(printed[name])

    def _take_orders(self, dsn: str, over: threading.Event) -> None:
        with psycopg.connect(dsn, autocommit=True) as connection:
            while not over.is_set():
                if not self._open.acquire(timeout=0.2):
                    continue
                self.result.orders += 1
                order = self.result.orders
                connection.execute("INSERT INTO orders VALUES (%s, 0, 0)", (order,))
                for _ in range(self._copies):
                    self.deliveries.put(order)

    def _break(self, dsn: str, workers: list[Worker], over: threading.Event) -> None:
        """Pause and kill workers, and end connections."""
        chosen = self._random
        faults = self.result.faults
        paused: dict[int, float] = {}
        with psycopg.connect(dsn, autocommit=True) as connection:
            while not over.wait(chosen.uniform(0.05, 0.5)):
                now = time.monotonic()
                for number in [number for number, end in paused.items() if end <= now]:
                    workers[number].send(signal.SIGCONT)
                    del paused[number]
                number = chosen.randrange(len(workers))
                fault = chosen.choice(("pause", "pause", "kill", "end", "end"))
                if fault == "pause" and len(paused) < len(workers) // 2 and number not in paused:
                    workers[number].send(signal.SIGSTOP)
                    paused[number] = now + chosen.uniform(1.2, 4.5) * TTL
                    faults[f"pause of {1.2 * TTL:g} to {4.5 * TTL:g} s"] += 1
                elif fault == "kill":
                    workers[number].send(signal.SIGKILL)
                    paused.pop(number, None)
                    faults["SIGKILL"] += 1
                elif fault == "end":
                    ended = connection.execute(
                        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE backend_type = "
                        "'client backend' AND datname = current_database() AND pid <> pg_backend_pid() "
                        "AND application_name <> 'shop' ORDER BY random() LIMIT 1"
                    )
                    faults["connection ended"] += ended.rowcount
        for number in paused:
            workers[number].send(signal.SIGCONT)

    def _judge(self, dsn: str, door: LossyDoor) -> Result:
        result = self.result
        with psycopg.connect(dsn, autocommit=True) as connection:
            paid = Counter[int]()
            for cents, orders in connection.execute("SELECT paid_cents, count(*) FROM orders GROUP BY 1"):
                paid[min(cents // CENTS, 2)] += orders
            noted = "SELECT count(*) FROM fencelock_receipts"
            (result.receipts,) = connection.execute(noted).fetchone() or (0,)
        result.never, result.once, result.more = paid[0], paid[1], paid[2]
        for way, lost in door.lost.items():
            result.faults[f"COMMIT's answer lost, {way}"] = lost
        return result
