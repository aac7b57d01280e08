"""Semaphores, readers and writers while workers are killed and paused; then controls that must fail.

python -m proof.slots                          # a minute on each authority
python -m proof.slots --seconds 15

Workers take slots of a semaphore, and read and write a row under a lock with readers. They are killed with
SIGKILL, and paused beyond their ttl. The judge reads what they have noted. By their own clocks no slot is
held twice, and no reader is beside a writer. In the database no acknowledged update is lost. The controls
write past the guard, and read on after their lease has ended. They end when something is broken.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, TextIO

from sqlalchemy import create_engine, insert, select
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from fencelock import (
    FencedModel,
    FencelockError,
    Redlock,
    configure,
    fenced_lock,
    fenced_semaphore,
    lease_table,
)
from proof.servers import Nodes, Postgres
from proof.servers.mariadb import mariadb

SLOTS, READERS, WORKERS, TTL = 3, 4, 8, 0.6
_PATIENCE = 60.0
#: Seconds after which the notes of a control are read again.
_PORTION = 3.0


class Base(DeclarativeBase):
    """The models of this proof."""


class Slot(FencedModel, Base):
    """A row for each slot, guarded by its lease."""

    __tablename__ = "slots_slots"
    __fence_resource__ = "gpu#{id}"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    value: Mapped[int] = mapped_column(default=0)


class Pair(FencedModel, Base):
    """What readers and writers share."""

    __tablename__ = "slots_pairs"
    __fence_resource__ = "pair"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    value: Mapped[int] = mapped_column(default=0)


lease_table(Base.metadata)


class Worker:
    """Takes locks until it is killed, and notes what it has seen in a file of its own."""

    def __init__(self, url: str, database: str, notes: TextIO, *, control: bool) -> None:
        configure(url)
        options = {"fencelock": "bypass"} if control else {}
        self.engine = create_engine(database, execution_options=options)
        self.control = control
        self._notes = notes
        self._random = random.Random()

    def note(self, what: str, **facts: Any) -> None:
        self._notes.write(json.dumps({"what": what, "at": time.monotonic(), **facts}) + "\n")

    def pause(self) -> None:
        time.sleep(self._random.uniform(0.001, 0.08))

    def run(self) -> None:
        acts = (self.use_a_slot, self.use_a_slot, self.read, self.read, self.write)
        while True:
            try:
                self._random.choice(acts)()
            except FencelockError as error:
                self.note("refused", error=type(error).__name__)
            except Exception as error:  # noqa: BLE001 - a database in the way of another
                self.note("error", error=type(error).__name__)

    def use_a_slot(self) -> None:
        lock = fenced_semaphore("gpu", SLOTS, ttl=TTL, timeout=5, if_lost="warn")
        with lock as (slot, token):
            lease, began = lock.lease, time.monotonic()
            with Session(self.engine) as session:
                row = session.get_one(Slot, slot)
                session.rollback()
                self.pause()
                row.value += 1
                value = row.value
                session.commit()
            self.note("wrote", row=f"slot {slot}", value=value, token=token)
            self.note("held", name=f"gpu#{slot}", began=began, end=min(time.monotonic(), lease.expires_at))

    def write(self) -> None:
        lock = fenced_lock("pair", readers=READERS, ttl=TTL, timeout=5, if_lost="warn")
        with lock as token:
            lease, began = lock.lease, time.monotonic()
            with Session(self.engine) as session:
                row = session.get_one(Pair, 1)
                session.rollback()
                self.pause()
                row.value += 1
                value = row.value
                session.commit()
            self.note("wrote", row="pair", value=value, token=token)
            self.note("held", name="pair", began=began, end=min(time.monotonic(), lease.expires_at))

    def read(self) -> None:
        lock = fenced_lock("pair", shared=True, readers=READERS, ttl=TTL, timeout=5, if_lost="warn")
        with lock, Session(self.engine) as session:
            lease, began = lock.lease, time.monotonic()
            session.scalars(select(Pair.value)).one()
            session.rollback()
            self.pause()
            end = time.monotonic() if self.control else min(time.monotonic(), lease.expires_at)
            self.note("held", name=lease.resource, began=began, end=end)


class Notes:
    """What all workers have noted."""

    def __init__(self, folder: Path) -> None:
        self.counts: Counter[str] = Counter()
        self.held: dict[str, list[tuple[float, float]]] = defaultdict(list)
        self.written: dict[str, list[tuple[int, int]]] = defaultdict(list)
        for path in folder.glob("notes-*"):
            for line in path.read_text().splitlines():
                with suppress(ValueError):  # it was killed in this line
                    self._add(json.loads(line))

    def _add(self, entry: dict[str, Any]) -> None:
        what = entry["what"]
        self.counts[entry.get("error", what)] += 1
        if what == "held":
            self.held[entry["name"]].append((entry["began"], entry["end"]))
        elif what == "wrote":
            self.written[entry["row"]].append((entry["value"], entry["token"]))

    def broken(self) -> list[str]:
        """Return the promises that were broken."""
        found = [f"{name} is held twice" for name, spans in self.held.items() if _overlap(sorted(spans))]
        for row, entries in self.written.items():
            values, tokens = zip(*sorted(entries), strict=True)
            if len({*values}) < len(values):
                found.append(f"{row}: an acknowledged update was lost")
            if list(tokens) != sorted(tokens):
                found.append(f"{row}: tokens against the order of values")
        readers = [span for name, spans in self.held.items() if name.startswith("pair#") for span in spans]
        pairs = itertools.product(self.held["pair"], readers)
        if any(one[0] < other[1] and other[0] < one[1] for one, other in pairs):
            found.append("a reader was beside a writer")
        return found


def _overlap(spans: list[tuple[float, float]]) -> bool:
    return any(later[0] < earlier[1] for earlier, later in itertools.pairwise(spans))


def run(url: str, database: str, seconds: float, *, control: bool) -> tuple[Counter[str], list[str]]:
    """Let workers work while some are killed and paused; return what the judge says."""
    engine = create_engine(database)
    Base.metadata.create_all(engine)
    with engine.execution_options(fencelock="bypass").begin() as connection:
        for model, count in ((Slot, range(SLOTS)), (Pair, (1,))):
            connection.execute(model.__table__.delete())  # type: ignore[attr-defined]
            connection.execute(insert(model), [{"id": number, "value": 0} for number in count])
    engine.dispose()
    with tempfile.TemporaryDirectory() as folder:
        crew = Crew(Path(folder), [url, database, *(["--control"] if control else [])])
        given_up = time.monotonic() + _PATIENCE
        try:
            crew.wait_until_all_work()
            crew.disturb(min(seconds, _PORTION) if control else seconds)
            while control and not Notes(crew.folder).broken() and time.monotonic() < given_up:
                crew.disturb(_PORTION)
        finally:
            crew.end()
        notes = Notes(crew.folder)
    return notes.counts + crew.faults, notes.broken()


class Crew:
    """Worker processes, some of which are killed and paused."""

    def __init__(self, folder: Path, words: list[str]) -> None:
        self.folder = folder
        self.faults: Counter[str] = Counter()
        self._words = words
        self._numbers = itertools.count()
        self._workers = [self._start() for _ in range(WORKERS)]

    def _start(self) -> subprocess.Popen[bytes]:
        url, database, *control = self._words
        notes = str(self.folder / f"notes-{next(self._numbers)}")
        command = [sys.executable, "-m", "proof.slots", "worker", url, database, notes, *control]
        return subprocess.Popen(command)

    def wait_until_all_work(self) -> None:
        end = time.monotonic() + _PATIENCE
        while len([*self.folder.glob("notes-*")]) < WORKERS and time.monotonic() < end:
            time.sleep(0.1)

    def disturb(self, seconds: float) -> None:
        paused: dict[int, float] = {}
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            time.sleep(random.uniform(0.02, 0.2))
            for at in [at for at, until in paused.items() if until < time.monotonic()]:
                self._workers[at].send_signal(signal.SIGCONT)
                del paused[at]
            at = random.randrange(WORKERS)
            if at not in paused and random.random() < 0.1:
                self._workers[at].kill()
                self._workers[at].wait()
                self._workers[at] = self._start()
                self.faults["SIGKILL"] += 1
            elif at not in paused and len(paused) < WORKERS // 2:
                self._workers[at].send_signal(signal.SIGSTOP)
                paused[at] = time.monotonic() + random.uniform(1.2, 3) * TTL
                self.faults["pauses"] += 1
        for at in paused:
            self._workers[at].send_signal(signal.SIGCONT)
        time.sleep(2 * TTL)

    def end(self) -> None:
        for worker in self._workers:
            worker.kill()
            worker.wait()


def authorities(stack: ExitStack) -> Iterator[tuple[str, str, str]]:
    """Yield what grants the leases, its URL, and the URL of the database that is written to."""
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    postgres = stack.enter_context(Postgres())
    nodes = stack.enter_context(Nodes(5))
    url = postgres.create_database()
    with Redlock(nodes.urls) as quorum:
        quorum.init()
    yield "five nodes", ",".join(nodes.urls), url
    yield "PostgreSQL", url, url
    yield "SQLite", f"sqlite:///{folder / 'slots.db'}", f"sqlite:///{folder / 'slots.db'}"
    if (found := mariadb(stack)) is not None:
        shown = found.render_as_string(hide_password=False)
        yield "MariaDB", shown, shown


def main() -> int:
    if sys.argv[1:2] == ["worker"]:
        url, database, notes, *words = sys.argv[2:]
        with Path(notes).open("w", buffering=1) as file:
            Worker(url, database, file, control=bool(words)).run()
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=60.0, help="on each authority")
    seconds = parser.parse_args().seconds
    right = True
    with ExitStack() as stack:
        for name, url, database in authorities(stack):
            for control in (False, True):
                counts, broken = run(url, database, seconds, control=control)
                title = "control" if control else "with the guard"
                print(f"{name}, {title}: {dict(counts)}; broken: {broken or 'nothing'}", flush=True)
                right &= bool(broken) if control else not broken and counts["wrote"] > 0
    print("as it should be" if right else "NOT as it should be")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
