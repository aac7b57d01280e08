"""Kills a process before and after each statement and each COMMIT of `once`, tries again, and counts effects.

python -m proof.receipts                        # 1,000 runs on each database
python -m proof.receipts --runs 60

Each run has a key of its own. A process does the work, and is killed with SIGKILL at one of these places,
another one in each run; processes after it try again until one ends. Each fifth run is a call of
`fenced_once`, under a lock that the same database grants; the others are `once` in a plain transaction. The
control leaves the receipt out. The exit status is 1 if an effect is missing, or is there twice, and if the
control has none twice.
"""

from __future__ import annotations

import argparse
import itertools
import os
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from sqlalchemy import Engine, NullPool, String, create_engine, event, func, insert, select, update
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from fencelock import (
    Database,
    FencedModel,
    LockLostError,
    LockTimeoutError,
    fence_table,
    fenced_once,
    lease_table,
    once,
    receipt_table,
)
from proof.servers import Postgres
from proof.servers.mariadb import mariadb

_TTL = 0.3
_LOCKED_EVERY = 5
_CONTROLS = 100


class Base(DeclarativeBase):
    """The models of this proof."""


class Total(FencedModel, Base):
    """What the work adds to."""

    __tablename__ = "receipt_totals"
    __fence_resource__ = "total:{id}"
    __fence_lease__ = "optional"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    value: Mapped[int]


class Effect(Base):
    """What the work writes down: one row each time."""

    __tablename__ = "receipt_effects"
    id: Mapped[int] = mapped_column(primary_key=True)
    key: Mapped[str] = mapped_column(String(50))


fence_table(Base.metadata)
lease_table(Base.metadata)
receipt_table(Base.metadata)


def _work(session: Session, key: str) -> None:
    session.add(Effect(key=key))
    session.execute(update(Total).where(Total.id == 1).values(value=Total.value + 1))


def _once(engine: Engine, key: str) -> None:
    with Session(engine) as session, session.begin():
        receipt = once(session, key, fingerprint=key)
        if not receipt.done:
            _work(session, key)
            receipt.result = key


def _twice(engine: Engine, key: str) -> None:
    """The control."""
    with Session(engine) as session, session.begin():
        _work(session, key)


def _locked(engine: Engine, key: str) -> None:
    with Database(engine.url) as authority:

        @fenced_once("{key}", "total:1", ttl=_TTL, timeout=10.0, authority=authority)
        def work(session: Session, key: str) -> str:
            _work(session, key)
            return key

        assert work(engine, key) == key


class _Killer:
    """Kills this process at the place with a number: before or after a statement or a COMMIT."""

    def __init__(self, engine: Engine, place: int) -> None:
        self._left = place
        for name in ("before_cursor_execute", "after_cursor_execute"):
            event.listen(engine, name, self._pass)
        event.listen(engine, "commit", self._pass)
        dialect: Any = engine.dialect
        do_commit = dialect.do_commit

        def commit_and_pass(connection: Any) -> None:
            do_commit(connection)
            self._pass()

        dialect.do_commit = commit_and_pass

    def _pass(self, *_: Any) -> None:
        self._left -= 1
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)


def _in_child(url: str, act: Callable[[Engine, str], None], key: str, place: int) -> int:
    """Let a child do the work, with its death at a place, 0 for none; return how it ended."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            engine = create_engine(url, poolclass=NullPool)
            _Killer(engine, place)
            act(engine, key)
            status = 0
        except (LockTimeoutError, LockLostError):
            pass
        except BaseException:  # noqa: BLE001 - a child must not return into its parent's code
            traceback.print_exc()
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def run(url: str, runs: int, act: Callable[[Engine, str], None]) -> Counter[str]:
    """Do each work once, whatever is killed; return how often what happened."""
    counts: Counter[str] = Counter()
    for number, place in zip(range(runs), itertools.cycle(range(1, 18)), strict=False):
        chosen = _locked if act is _once and number % _LOCKED_EVERY == 0 else act
        tries = 0
        while (status := _in_child(url, chosen, f"run {number}", 0 if tries else place)) != 0:
            tries += 1
            counts["killed" if status == -signal.SIGKILL else "in the way"] += 1
            if tries > 20:
                raise RuntimeError(f"run {number} does not end")
    engine = create_engine(url, poolclass=NullPool)
    with Session(engine) as session:
        rows = session.execute(select(Effect.key, func.count().label("times")).group_by(Effect.key)).all()
        of_key = {row.key: row.times for row in rows}
        counts["once"] = sum(count == 1 for count in of_key.values())
        counts["more than once"] = sum(count > 1 for count in of_key.values())
        counts["never"] = runs - len(of_key)
        counts["total"] = session.get_one(Total, 1).value
    engine.dispose()
    return counts


def _empty(url: str) -> None:
    engine = create_engine(url, poolclass=NullPool)
    Base.metadata.drop_all(engine)
    Base.metadata.create_all(engine)
    with engine.execution_options(fencelock="bypass").begin() as connection:
        connection.execute(insert(Total), {"id": 1, "value": 0})
    engine.dispose()


def databases(stack: ExitStack) -> Iterator[tuple[str, str]]:
    """Yield the databases that are there, each with its URL."""
    folder = stack.enter_context(tempfile.TemporaryDirectory())
    yield "SQLite", f"sqlite:///{Path(folder) / 'receipts.sqlite'}"
    yield "PostgreSQL", stack.enter_context(Postgres()).create_database()
    if (url := mariadb(stack)) is not None:
        yield "MariaDB", url.render_as_string(hide_password=False)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--runs", type=int, default=1000, help="how many on each database")
    runs = parser.parse_args().runs
    right = True
    with ExitStack() as stack:
        for name, url in databases(stack):
            for title, act in (("with a receipt", _once), ("control, without one", _twice)):
                began = time.monotonic()
                _empty(url)
                wanted = runs if act is _once else min(runs, _CONTROLS)
                counts = run(url, wanted, act)
                print(f"{name}, {title}: {dict(counts)} in {time.monotonic() - began:.0f} s", flush=True)
                exactly_once = counts["once"] == counts["total"] == runs
                right &= exactly_once if act is _once else counts["more than once"] > 0
    print("as it should be" if right else "NOT as it should be")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
