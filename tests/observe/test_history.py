"""A table keeps the history of locks."""

from __future__ import annotations

import json
import logging
import os
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, NullPool, create_engine, text
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from fencelock import FencedModel, Lease, Redlock, StaleTokenError, _threads, bind, claim, fence_table
from fencelock.observe import history
from fencelock.observe.history import Recorder
from tests.polling import eventually
from tests.test_cli import fencelock, program


class Base(DeclarativeBase):
    """The models of this file."""


class Order(FencedModel, Base):
    __tablename__ = "hi_orders"
    __fence_resource__ = "order:{id}"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)


fence_table(Base.metadata)


@pytest.fixture
def recorder(engine: Engine) -> Iterator[Recorder]:
    """Writes the history of a test."""
    made = history.record(engine)
    yield made
    made.close()


def whats(engine: Engine, resource: str = "order:1") -> list[str]:
    """Return what the history says has happened."""
    return [entry.what for entry in history.read(engine, resource)]


@pytest.mark.long
def test_what_happens_to_a_lock_is_written(
    engine: Engine, recorder: Recorder, authority: Redlock, node_urls: list[str]
) -> None:
    """Granted, refused, lost, forced: each with the token and the process."""
    Base.metadata.create_all(engine)
    with authority.lock("order:1"):  # its token is 1, and stale from now on
        pass
    with authority.lock("order:1", "order:2") as (_, token), Session(engine) as session:
        session.add(Order(id=1))
        session.commit()
    with Session(engine) as session:
        bind(session, Lease("order:1", 1))
        with pytest.raises(StaleTokenError):
            claim(session, Order, 1)
    database = engine.url.render_as_string(hide_password=False)
    force = ("--force", "--reason", "a drill", "--url", ",".join(node_urls), "--database", database)
    with authority.lock("order:1", if_lost="warn"):
        assert program("release", "order:1", *force).returncode == 0
    assert eventually(lambda: len(whats(engine)) == 6)
    assert sorted(whats(engine)) == ["forced", "granted", "granted", "granted", "lost", "refused"]
    assert whats(engine, "order:2") == ["granted"]
    first = history.read(engine, "order:2")[0]
    assert first.token == token
    assert f" {os.getpid()} " in first.holder
    shown = fencelock("history", "order:1", "--database", database)
    assert shown.returncode == 0, shown.stderr
    assert "a drill" in shown.stdout
    found = json.loads(
        fencelock("history", "order:1", "--database", database, "--json", "--last", "1").stdout
    )
    assert len(found) == 1
    assert fencelock("history", "order:9", "--database", database).returncode == 3
    recorder.close()


def test_old_entries_are_deleted(engine: Engine, authority: Redlock) -> None:
    recorder = history.record(engine)
    with authority.lock("order:1"):
        pass
    recorder.close()
    with engine.begin() as connection:
        connection.execute(text("UPDATE fencelock_events SET at = '2001-01-01 00:00:00'"))
    assert whats(engine) == ["granted"]
    recorder = history.record(engine, keep=60)
    with authority.lock("order:1"):
        pass
    recorder.close()
    assert whats(engine) == ["granted"]
    assert history.read(engine, "order:1")[0].at.year > 2001


def test_child_process_writes_its_own(engine: Engine, recorder: Recorder, authority: Redlock) -> None:
    """A fork takes no thread along, and writes nothing twice."""
    with authority.lock("order:1"):
        pass
    if (child := os.fork()) == 0:
        try:
            with authority.lock("order:1"):
                pass
            recorder.close()
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    recorder.close()
    assert whats(engine) == ["granted", "granted"]
    assert len({entry.holder for entry in history.read(engine, "order:1")}) == 2


def test_database_that_is_gone_stops_no_lock(authority: Redlock, caplog: pytest.LogCaptureFixture) -> None:
    """What cannot be written is logged."""
    engine = create_engine("sqlite://")
    recorder = history.record(engine)
    with engine.begin() as connection:
        connection.execute(text("DROP TABLE fencelock_events"))
    with caplog.at_level(logging.WARNING, "fencelock.observe"):
        with authority.lock("order:1"):
            pass
        recorder.close()
    assert "could not be written" in caplog.text
    engine.dispose()


def test_history_goes_on_when_connections_can_be_made_again(authority: Redlock, tmp_path: Path) -> None:
    """Also where the program makes them itself, and something fails there that no driver knows."""
    wrong: list[Exception] = []

    def connect() -> sqlite3.Connection:
        if wrong:
            raise wrong.pop()
        return sqlite3.connect(tmp_path / "app.db", check_same_thread=False)

    engine = create_engine("sqlite://", creator=connect, poolclass=NullPool)
    recorder = history.record(engine)
    wrong.append(OSError("no password from the vault"))
    with authority.lock("order:1"):
        pass
    assert eventually(lambda: not wrong)
    with authority.lock("order:2"):
        pass
    assert eventually(lambda: whats(engine, "order:2") == ["granted"])
    recorder.close()


@pytest.mark.usefixtures("recorder")
def test_history_begins_when_a_thread_can_be_started(
    engine: Engine, authority: Redlock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process may be at its limit of threads for a moment."""
    start = _threads.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "fencelock-history":
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patched:
        patched.setattr(_threads, "start", refuse)
        with authority.lock("order:1"):
            pass
    with authority.lock("order:2"):
        pass
    assert eventually(lambda: whats(engine, "order:2") == ["granted"])
    assert whats(engine, "order:1") == ["granted"]


def test_engine_for_coroutines_is_refused(tmp_path: Path) -> None:
    """At once, and not in a thread."""
    engine: Any = create_async_engine(f"sqlite+aiosqlite:///{tmp_path}/none.db")
    with pytest.raises(TypeError, match="Engine that blocks"):
        history.record(engine)


def test_history_that_is_not_there(tmp_path: Path) -> None:
    """A sentence, not a traceback."""
    ran = fencelock("history", "order:1", "--database", f"sqlite:///{tmp_path}/none.db")
    assert ran.returncode == 1
    assert len(ran.stderr.strip().splitlines()) == 1
