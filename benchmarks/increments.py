"""Many processes add 1 to one row while they are paused at random for longer than their leases last.

Each worker repeats: take the lock, claim the row, add 1, commit; and counts the commits that were
acknowledged. A fault injector stops random workers (SIGSTOP) for longer than the ttl. In the end the row
must hold exactly as many as were acknowledged, and at no time may its fence have gone down. With `--control`
the same workers use the same lock on an ordinary table: then updates must be lost.

    python benchmarks/increments.py --database postgresql      # embedded; or sqlite, or a SQLAlchemy URL
    python benchmarks/increments.py --database sqlite --control
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter as Tally
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Self

from rich.console import Console
from rich.table import Table
from sqlalchemy import Engine, create_engine, select
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from fencelock import Redlock
from fencelock.embedded import Nodes, Postgres
from fencelock.errors import FencelockError
from fencelock.guard import FencedModel, bind, claim
from fencelock.lease import Lease

RESOURCE = "counter:1"


class Base(DeclarativeBase):
    """Tables of this benchmark."""


class Counter(FencedModel, Base):
    """The row that everybody adds to."""

    __tablename__ = "fencelock_bench_counters"
    __fence_resource__ = "counter:{id}"

    id: Mapped[int] = mapped_column(primary_key=True)
    value: Mapped[int]


class PlainCounter(Base):
    """The same without a fence: the control."""

    __tablename__ = "fencelock_bench_plain_counters"

    id: Mapped[int] = mapped_column(primary_key=True)
    value: Mapped[int]


def work(arguments: argparse.Namespace) -> None:
    """Be one worker: add 1 until enough additions are acknowledged, then print what happened."""
    engine = create_engine(arguments.database)
    quorum = Redlock(arguments.nodes)
    seen: Tally[str] = Tally()
    acknowledged = 0
    while acknowledged < arguments.increments:
        try:
            with (
                quorum.lock(RESOURCE, ttl=arguments.ttl, timeout=60, renew=False),
                Session(engine) as session,
            ):
                if arguments.control:
                    plain = session.get_one(PlainCounter, 1)
                    time.sleep(arguments.think)
                    plain.value += 1
                else:
                    row = claim(session, Counter, 1)
                    time.sleep(arguments.think)
                    row.value += 1
                session.commit()
                acknowledged += 1
        except FencelockError as error:
            seen[type(error).__name__] += 1
    print(json.dumps({"acknowledged": acknowledged, "seen": seen}), flush=True)


def pause_at_random(
    workers: list[subprocess.Popen[str]], pause: float, every: float, rng: random.Random
) -> int:
    """Stop random workers for `pause` seconds each until all have ended; return how often."""
    stopped: dict[int, float] = {}
    pauses = 0
    next_at = time.monotonic()
    while True:
        running = [worker for worker in workers if worker.poll() is None]
        now = time.monotonic()
        for worker in running:
            if stopped.get(worker.pid, now) < now:
                worker.send_signal(signal.SIGCONT)
                del stopped[worker.pid]
        if not running:
            return pauses
        if now >= next_at:
            victim = rng.choice(running)
            if victim.pid not in stopped:
                victim.send_signal(signal.SIGSTOP)
                stopped[victim.pid] = now + pause
                pauses += 1
            next_at = now + rng.uniform(0.5, 1.5) * every
        time.sleep(0.002)


class FenceWatch:
    """Reads the row's fence all the time, and notes whether it ever went down."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self.readings = 0
        self.went_down: tuple[int, int] | None = None

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        highest = 0
        while not self._stop.wait(0.005):
            with self._engine.connect() as connection:
                fence = connection.scalars(select(Counter.last_fencing_token)).one()
            self.readings += 1
            if fence < highest:
                self.went_down = (highest, fence)
            highest = max(highest, fence)


@contextmanager
def database_of(name: str) -> Iterator[str]:
    """Yield the URL of the database that `name` asks for."""
    if name == "postgresql":
        with Postgres() as server:
            yield server.create_database()
    elif name == "sqlite":
        with tempfile.TemporaryDirectory() as folder:
            yield f"sqlite:///{folder}/increments.sqlite"
    else:
        yield name


def run(arguments: argparse.Namespace, console: Console) -> bool:
    """Run the workers and the pauses; print what came of it, and return whether it is as it must be."""
    with ExitStack() as stack:
        database = stack.enter_context(database_of(arguments.database))
        nodes = stack.enter_context(Nodes(5))
        stack.enter_context(Redlock(nodes.url)).init(base=0)
        engine = create_engine(database)
        stack.callback(engine.dispose)
        Base.metadata.drop_all(engine)
        Base.metadata.create_all(engine)
        stack.callback(Base.metadata.drop_all, engine)
        with Session(engine) as session:
            bind(session, Lease(RESOURCE, 1))
            session.add_all([Counter(id=1, value=0), PlainCounter(id=1, value=0)])
            session.commit()
        began = time.monotonic()
        workers = [
            subprocess.Popen(
                [
                    sys.executable,
                    __file__,
                    *("--work", "--nodes", nodes.url, "--database", database),
                    *("--increments", str(arguments.increments), "--ttl", str(arguments.ttl)),
                    *("--think", str(arguments.think), *(["--control"] if arguments.control else [])),
                ],
                stdout=subprocess.PIPE,
                text=True,
            )
            for _ in range(arguments.workers)
        ]
        rng = random.Random(arguments.seed)
        doing = f"{arguments.workers} workers × {arguments.increments} increments …"
        with FenceWatch(engine) as watch, console.status(doing):
            pauses = pause_at_random(workers, arguments.pause, arguments.every, rng)
        took = time.monotonic() - began
        reports = [worker.communicate()[0] for worker in workers]
        acknowledged = sum(json.loads(report)["acknowledged"] for report in reports if report)
        seen: Tally[str] = Tally()
        for report in reports:
            seen.update(json.loads(report)["seen"] if report else {"worker crashed": 1})
        with Session(engine) as session:
            model: Any = PlainCounter if arguments.control else Counter
            final: int = session.get_one(model, 1).value

    table = Table(
        title=f"{'Control: ordinary table' if arguments.control else 'Fenced'}, {engine.dialect.name}"
    )
    table.add_column("")
    table.add_column("", justify="right")
    for label, value in (
        ("acknowledged commits", acknowledged),
        ("final value", final),
        ("lost updates", acknowledged - final),
        ("pauses", pauses),
        *sorted(seen.items()),
        ("readings of the fence", watch.readings),
        ("the fence went down", watch.went_down or "never"),
        ("increments/s", f"{acknowledged / took:.0f}"),
        ("seconds", f"{took:.1f}"),
    ):
        table.add_row(label, str(value))
    console.print(table)
    complete = acknowledged == arguments.workers * arguments.increments and watch.went_down is None
    return complete and (final < acknowledged if arguments.control else final == acknowledged)


def main() -> None:
    """Read the command line, and exit with 1 if anything is not as it must be."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--database", default="postgresql", help="postgresql, sqlite, or a SQLAlchemy URL")
    parser.add_argument("--workers", type=int, default=20)
    parser.add_argument("--increments", type=int, default=200, help="by each worker")
    parser.add_argument("--ttl", type=float, default=0.3, help="of each lease, in seconds")
    parser.add_argument("--pause", type=float, default=0.5, help="of a worker, in seconds")
    parser.add_argument("--every", type=float, default=0.1, help="seconds between pauses, on average")
    parser.add_argument("--think", type=float, default=0.002, help="seconds between reading and writing")
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(4)))
    parser.add_argument("--control", action="store_true", help="an ordinary table: updates must be lost")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--nodes", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        work(arguments)
        return
    console = Console()
    console.print(f"seed {arguments.seed}")
    sys.exit(0 if run(arguments, console) else 1)


if __name__ == "__main__":
    main()
