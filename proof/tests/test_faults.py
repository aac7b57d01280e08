"""Each fault does what it says, to real servers and processes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis
from sqlalchemy import Engine, create_engine, select, update
from sqlalchemy.exc import DBAPIError

from proof.servers import Nodes, Postgres
from proof.torture import clocks
from proof.torture.clocks import Clocks
from proof.torture.doubt import Doubt
from proof.torture.faults import copy_of
from proof.torture.table import Base, PlainCounter, create_tables
from tests.polling import eventually

pytestmark = pytest.mark.timed


def test_the_wall_clock_of_a_node_is_stepped_and_its_keys_expire_by_it(tmp_path: Path) -> None:
    """Forwards and back again, on one node only."""
    if clocks.find_library() is None:
        pytest.skip(clocks.MISSING)
    stepped = Clocks(tmp_path / "clocks", 2)
    with Nodes(2, executable=stepped.program) as nodes:
        client, other = (redis.Redis.from_url(node.url) for node in nodes)
        with client, other:
            client.set("key", "value", ex=300)
            stepped.step(0, 600.0)
            assert eventually(lambda: client.time()[0] > time.time() + 500)
            assert client.get("key") is None
            assert abs(other.time()[0] - time.time()) < 100
            stepped.step(0, 0.0)
            assert eventually(lambda: client.time()[0] < time.time() + 100)


def test_a_node_goes_back_in_time_under_its_connections() -> None:
    """By following a server that has copied its data: the process is the same, and the connection lives."""
    with Nodes(2) as (node, other), redis.Redis.from_url(node.url) as client:
        client.set("key", "older")
        copy_of(node, other)
        client.set("key", "newer")
        run_id, connection = client.info("server")["run_id"], client.client_id()
        copy_of(other, node)
        assert client.get("key") == b"older"
        assert (client.info("server")["run_id"], client.client_id()) == (run_id, connection)
        client.set("key", "its own again")


@pytest.fixture
def engine(postgres: Postgres) -> Iterator[Engine]:
    """An engine on a counter of 0, whose COMMITs can be held up."""
    url = postgres.create_database()
    made = create_engine(url, connect_args={"options": "-c synchronous_commit=on"})
    create_tables(made, ["r"])
    Doubt(url).prepare(Base.metadata.tables)
    yield made
    made.dispose()
    postgres.drop_database(url)


def add(engine: Engine, errors: list[DBAPIError]) -> None:
    """Add 1 to the counter, and keep the error."""
    try:
        with engine.begin() as connection:
            connection.execute(update(PlainCounter).values(value=PlainCounter.value + 1))
    except DBAPIError as error:
        errors.append(error)


@pytest.mark.parametrize(("when", "value"), [("end_before", 0), ("end_after", 1)])
def test_a_connection_is_ended_before_or_after_its_commit(engine: Engine, when: str, value: int) -> None:
    """The client learns the same in both cases: that it has lost its connection. Others commit afterwards."""
    doubt = Doubt(engine.url.render_as_string(hide_password=False))
    end: Callable[[Callable[[], bool], float], int] = getattr(doubt, when)
    ended: list[int] = []
    injector = threading.Thread(target=lambda: ended.append(end(lambda: False, 30.0)))
    errors: list[DBAPIError] = []
    injector.start()
    while not errors:  # a COMMIT before the injector is there passes
        before = _value(engine)
        add(engine, errors)
    injector.join()
    assert ended == [1]
    assert [error.connection_invalidated for error in errors] == [True]
    assert _value(engine) == before + value
    add(engine, errors)
    assert (_value(engine), len(errors)) == (before + value + 1, 1)


def _value(engine: Engine) -> int:
    with engine.connect() as connection:
        return connection.scalars(select(PlainCounter.value)).one()


def test_nobody_in_a_commit_is_waited_for_in_vain(engine: Engine) -> None:
    """Until the time is up, or the run is over; no connection is ended."""
    doubt = Doubt(engine.url.render_as_string(hide_password=False))
    assert doubt.end_before(lambda: False, 0.1) == 0
    assert doubt.end_after(lambda: True, 60.0) == 0
