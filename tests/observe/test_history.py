"""A table keeps the history of locks."""

from __future__ import annotations

import json
import logging
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import Engine, NullPool, create_engine, text
from sqlalchemy.orm import Session

from fencelock import Lease, Redlock, StaleTokenError, bind, claim
from fencelock.observe import history
from fencelock.observe.history import Recorder
from tests.observe.shop import Base, Order
from tests.polling import eventually
from tests.test_cli import fencelock, program


@pytest.fixture
def recorder(engine: Engine) -> Iterator[Recorder]:
    made = history.record(engine)
    yield made
    made.close()


def whats(engine: Engine, resource: str = "order:1") -> list[str]:
    return [entry.what for entry in history.read(engine, resource)]


@pytest.mark.long
def test_what_happens_to_a_lock_is_written(
    engine: Engine, recorder: Recorder, authority: Redlock, node_urls: list[str]
) -> None:
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
