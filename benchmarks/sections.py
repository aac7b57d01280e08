"""What a whole section costs: lock, read, write, COMMIT, release, beside a lock of redis-py and a plain row.

In each round every program runs once, in random order. Ratios are taken within a round. CPU is that of this
process, in which nothing else runs. The database is PostgreSQL, the nodes are Valkey.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import redis
from rich.console import Console
from rich.progress import track
from sqlalchemy import Engine, create_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

from benchmarks.report import Goal, Section
from fencelock import FencedModel, Redlock, claim, fence_table, fenced_lock, fenced_transaction
from proof.servers import Nodes, Postgres

NODES = 5
_WARM_UP = 20
_PLAIN = "redis-py Lock, plain row"
#: The least rate, as a share of that.
_LIMITS = {
    "natural code, 1 node": 0.87,
    "natural code, 5 nodes": 0.82,
    "fenced_transaction, 1 node": 0.65,
    "fenced_lock and claim, 1 node": 0.7,
}


class Base(DeclarativeBase):
    """Tables of this benchmark."""


class Plain(Base):
    """What an application has without any protection."""

    __tablename__ = "sections_plain"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    value: Mapped[int]


class Guarded(FencedModel, Base):
    """The same with a fence."""

    __tablename__ = "sections_guarded"
    __fence_resource__ = "row:{id}"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    value: Mapped[int]


fence_table(Base.metadata)

Program = Callable[[], None]


@dataclass(slots=True)
class Measured:
    """What a program took in each round, in seconds: until it was done, and of the CPU."""

    elapsed: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)


def plain(engine: Engine, url: str) -> Program:
    """Lock by redis-py, and change a row of an ordinary table."""
    client = redis.Redis.from_url(url)

    def run() -> None:
        with client.lock("row:1", timeout=10), Session(engine) as session:
            session.get_one(Plain, 1).value += 1
            session.commit()

    return run


def natural(engine: Engine, authority: Redlock, row: int) -> Program:
    """Lock, get, change, commit."""

    def run() -> None:
        with fenced_lock(f"row:{row}", authority=authority), Session(engine) as session:
            session.get_one(Guarded, row).value += 1
            session.commit()

    return run


def claiming(engine: Engine, authority: Redlock, row: int) -> Program:
    """Claim what is changed."""

    def run() -> None:
        with fenced_lock(f"row:{row}", authority=authority), Session(engine) as session:
            claim(session, Guarded, row).value += 1
            session.commit()

    return run


def transaction(engine: Engine, authority: Redlock, row: int) -> Program:
    """Pass the gate first."""
    make_session = sessionmaker(engine)

    def run() -> None:
        with fenced_transaction(make_session, f"row:{row}", authority=authority) as session:
            session.get_one(Guarded, row).value += 1

    return run


@contextmanager
def programs() -> Iterator[dict[str, Program]]:
    """Return what is compared, on servers that end with the block."""
    with ExitStack() as stack:
        nodes = stack.enter_context(Nodes(NODES))
        engine = create_engine(stack.enter_context(Postgres()).create_database())
        stack.callback(engine.dispose)
        Base.metadata.create_all(engine)
        with Session(engine) as session, session.begin():
            session.connection(execution_options={"fencelock": "bypass"})
            session.add_all([Plain(id=1, value=0), Guarded(id=1, value=0), Guarded(id=NODES, value=0)])
        found: dict[str, Program] = {_PLAIN: plain(engine, nodes.urls[0])}
        for count in (1, NODES):
            authority = Redlock(nodes.urls[:count], namespace=f"sections-{count}")
            stack.enter_context(authority)
            authority.init()
            label = f"{count} node{'s' if count > 1 else ''}"
            found[f"natural code, {label}"] = natural(engine, authority, count)
            found[f"fenced_transaction, {label}"] = transaction(engine, authority, count)
            found[f"fenced_lock and claim, {label}"] = claiming(engine, authority, count)
        yield found


def measure(console: Console, rounds: int) -> tuple[Section, list[Goal]]:
    """Measure all programs, and say which goals they reach."""
    with programs() as found:
        measured = {name: Measured() for name in found}
        for turn in track(range(-_WARM_UP, rounds), "whole sections", console=console, transient=True):
            for name in random.sample(list(found), len(found)):
                began, used = time.perf_counter(), time.process_time()
                found[name]()
                if turn >= 0:
                    measured[name].cpu.append(time.process_time() - used)
                    measured[name].elapsed.append(time.perf_counter() - began)
    peer = measured[_PLAIN]
    rows, goals = [], []
    for name, own in measured.items():
        low, rate, high = statistics.quantiles(_ratios(peer.elapsed, own.elapsed), n=4)
        cpu = statistics.median(_ratios(own.cpu, peer.cpu))
        took = statistics.median(own.elapsed) * 1000
        rows.append((name, f"{took:.2f}", f"{rate:.2f}", f"{low:.2f} … {high:.2f}", f"{cpu:.2f}"))
        if name in _LIMITS:
            goals.append(Goal.at_least(f"whole section: {name} ÷ {_PLAIN}, rates", _LIMITS[name], rate))
    columns = (
        "lock, read, write, COMMIT, release",
        "ms",
        "rate ÷ first",
        "quartiles",
        "CPU ÷ first",
    )
    return Section("whole sections on PostgreSQL", columns, rows), goals


def _ratios(ones: Sequence[float], others: Sequence[float]) -> list[float]:
    return [one / other for one, other in zip(ones, others, strict=True)]
