"""Kills a process before and after each statement and each COMMIT of `once`, tries again, and counts effects.

python -m proof.receipts                        # 1,000 runs on each database
python -m proof.receipts --runs 60

Each run has a key of its own. A process does the work, and is killed with SIGKILL at one of these places,
another one in each run; processes after it try again until one ends. Each fifth run is a call of
`fenced_once`, under a lock that the same database grants; the others are `once` in a plain transaction. The
control leaves the receipt out. Then `proof.bodies` does the work among disturbances. The exit status is 1 if
an effect is missing, or is there twice, and if a control has none twice.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
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

from sqlalchemy import Engine, NullPool, create_engine, event
from sqlalchemy.orm import Session

from fencelock import (
    Database,
    LockLostError,
    LockTimeoutError,
    fenced_once,
    once,
)
from proof import bodies
from proof.effects import effects_of, make_tables, work
from proof.servers import Postgres
from proof.servers.mariadb import mariadb

_TTL = 0.3
_LOCKED_EVERY = 5
_CONTROLS = 100


def _once(engine: Engine, key: str) -> None:
    with Session(engine) as session, session.begin():
        receipt = once(session, key, fingerprint=key)
        if not receipt.done:
            work(session, key)
            receipt.result = key


def _twice(engine: Engine, key: str) -> None:
    """The control."""
    with Session(engine) as session, session.begin():
        work(session, key)


def _locked(engine: Engine, key: str) -> None:
    with Database(engine.url) as authority:

        @fenced_once("{key}", "total:1", ttl=_TTL, timeout=10.0, authority=authority)
        def function(session: Session, key: str) -> str:
            work(session, key)
            return key

        assert function(engine, key) == key


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
    return counts + effects_of(url, runs)


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
    parser.add_argument("--seed", type=int, default=random.randrange(2**32), help="of the bodies")
    options = parser.parse_args()
    runs, seed = options.runs, options.seed
    print(f"seed of the bodies: {seed}")
    right = True
    with ExitStack() as stack:
        for name, url in databases(stack):
            for title, act in (("with a receipt", _once), ("control, without one", _twice)):
                began = time.monotonic()
                make_tables(url)
                wanted = runs if act is _once else min(runs, _CONTROLS)
                counts = run(url, wanted, act)
                print(f"{name}, {title}: {dict(counts)} in {time.monotonic() - began:.0f} s", flush=True)
                exactly_once = counts["once"] == counts["total"] == runs
                right &= exactly_once if act is _once else counts["more than once"] > 0
            right &= bodies.check(name, url, runs, seed)
    print("as it should be" if right else "NOT as it should be")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
