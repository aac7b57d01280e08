"""The fixtures give each test servers and databases that know nothing of the test before."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import redis
from sqlalchemy import Engine, inspect, text

from proof.servers import Node, Nodes


def ask(node: Node, *command: str) -> Any:
    """Send one command over a connection of its own."""
    with redis.Redis.from_url(node.url, decode_responses=True) as connection:
        return connection.execute_command(*command)


@pytest.mark.parametrize("round_", [1, 2])
def test_nodes_are_blank_whatever_the_last_test_did(nodes: Nodes, round_: int) -> None:
    """Killed, paused and filled nodes come back running and blank, with no scripts."""
    digest = "e0e1f9fabfc9d4800c877a703b823ac0578ff8db"  # of `return 1`
    assert [ask(node, "DBSIZE") for node in nodes] == [0] * 5, round_
    assert not any(ask(node, "SCRIPT", "EXISTS", digest)[0] for node in nodes)
    for node in nodes:
        ask(node, "SET", "key", "value")
        assert ask(node, "SCRIPT", "LOAD", "return 1") == digest
    nodes[0].kill()
    nodes[1].pause()


@pytest.fixture
def late_cleanup() -> Iterator[ExitStack]:
    """Runs after the fixtures that are named behind it."""
    with ExitStack() as stack:
        yield stack


@pytest.mark.parametrize("round_", [1, 2])
def test_each_test_has_an_empty_database(late_cleanup: ExitStack, engine: Engine, round_: int) -> None:
    """What a test has created and left locked, the next one does not see, on any database."""
    assert inspect(engine).get_table_names() == [], round_
    leftover = engine.connect()
    late_cleanup.callback(leftover.invalidate)
    leftover.execute(text("CREATE TABLE t (id int)"))
    leftover.commit()
    leftover.execute(text("SELECT * FROM t"))
