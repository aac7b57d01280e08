"""What a receipt costs, and how fast a semaphore's slots change hands beside plain locks.

python -m benchmarks.jobs
"""

from __future__ import annotations

import argparse
import functools
import itertools
import random
import statistics
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from sqlalchemy import Engine, create_engine, insert
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from fencelock import (
    Database,
    FencedModel,
    Redlock,
    fence_table,
    fenced_semaphore,
    fenced_transaction,
    lease_table,
    once,
    receipt_table,
)
from proof.servers import Nodes, Postgres

SLOTS, WORKERS = 4, 16
#: Seconds for which a worker holds a slot.
HOLD = 0.002
_numbers = itertools.count()


class Base(DeclarativeBase):
    """The models of this benchmark."""


class Account(FencedModel, Base):
    """The row that is paid into."""

    __tablename__ = "accounts"
    __fence_resource__ = "account:{id}"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    balance: Mapped[int]


fence_table(Base.metadata)
lease_table(Base.metadata)
receipt_table(Base.metadata)


def rate(enter: Callable[[int], Any], seconds: float) -> float:
    """Return how often 16 threads together entered and left their locks in a second."""
    counts = [0] * WORKERS
    end = time.monotonic() + seconds

    def work(number: int) -> None:
        lock = enter(number)
        while time.monotonic() < end:
            with lock:
                time.sleep(HOLD)
            counts[number] += 1

    threads = [threading.Thread(target=work, args=(number,)) for number in range(WORKERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(counts) / seconds


def semaphores(name: str, authority: Any, rounds: int, seconds: float) -> None:
    ways: dict[str, Callable[[int], Any]] = {
        "plain": lambda number: authority.lock(f"lock:{number % SLOTS}", timeout=60),
        "semaphore": lambda _: fenced_semaphore("gpu", SLOTS, timeout=60, authority=authority),
    }
    found = _in_turn({title: functools.partial(rate, way, seconds) for title, way in ways.items()}, rounds)
    ratios = [one / other for one, other in zip(found["semaphore"], found["plain"], strict=True)]
    print(
        f"{name}: a semaphore of {SLOTS}, {WORKERS} threads {statistics.median(found['semaphore']):,.0f}/s, "
        f"{SLOTS} locks of {WORKERS // SLOTS} threads each {statistics.median(found['plain']):,.0f}/s, "
        f"ratio {statistics.median(ratios):.2f} ({min(ratios):.2f} … {max(ratios):.2f})"
    )


def receipts(engine: Engine, authority: Any, rounds: int, seconds: float) -> None:
    def deposit(*, with_receipt: bool) -> float:
        """Return the milliseconds of one transaction."""
        count, began = 0, time.monotonic()
        while time.monotonic() < began + seconds:
            count += 1
            with fenced_transaction(engine, "account:1", authority=authority) as session:
                receipt = (
                    once(session, f"deposit {next(_numbers)}", fingerprint=500) if with_receipt else None
                )
                account = session.get_one(Account, 1)
                account.balance += 500
                if receipt is not None:
                    receipt.result = {"balance": account.balance}
        return 1000 * (time.monotonic() - began) / count

    ways = {"without": lambda: deposit(with_receipt=False), "with": lambda: deposit(with_receipt=True)}
    found = _in_turn(ways, rounds)
    ratios = [one / other for one, other in zip(found["with"], found["without"], strict=True)]
    print(
        f"PostgreSQL: a transaction with a receipt {statistics.median(found['with']):.2f} ms, without "
        f"{statistics.median(found['without']):.2f} ms, ratio {statistics.median(ratios):.2f} "
        f"({min(ratios):.2f} … {max(ratios):.2f})"
    )


def _in_turn(ways: dict[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {title: [] for title in ways}
    for _ in range(rounds):
        for title, way in random.sample(list(ways.items()), len(ways)):
            found[title].append(way())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=1.0, help="of one turn")
    given = parser.parse_args()
    turns = given.rounds, given.seconds
    with ExitStack() as stack:
        postgres = stack.enter_context(Postgres(settings={"fsync": "on", "synchronous_commit": "on"}))
        engine = create_engine(postgres.create_database())
        stack.callback(engine.dispose)
        Base.metadata.create_all(engine)
        with engine.execution_options(fencelock="bypass").begin() as connection:
            connection.execute(insert(Account), {"id": 1, "balance": 0})
        nodes = stack.enter_context(Redlock(stack.enter_context(Nodes(5)).urls))
        nodes.init()
        database = stack.enter_context(Database(engine))
        receipts(engine, nodes, *turns)
        receipts(engine, database, *turns)
        semaphores("five nodes", nodes, *turns)
        semaphores("PostgreSQL", database, *turns)


if __name__ == "__main__":
    main()
