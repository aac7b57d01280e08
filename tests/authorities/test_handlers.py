"""A signal handler that strikes at any moment spoils no lock.

Each runs in a process of its own: see `programs`.
"""

from __future__ import annotations

import pytest

from proof.servers import Nodes
from tests.authorities.children import run
from tests.authorities.kinds import IN_PROCESSES
from tests.authorities.stage import Stage


@pytest.mark.long
@pytest.mark.parametrize("stage", IN_PROCESSES, indirect=True)
def test_nothing_is_left_of_what_a_handler_interrupts(stage: Stage) -> None:
    said = run("interrupt", stage.kind.url)
    assert not said["odd"], "\n".join(said["odd"])
    assert said["left"] == []
    assert said["works"]
    assert said["interrupted"] > 5


@pytest.mark.long
def test_answers_stay_with_their_questions_while_a_handler_strikes_and_connections_open(
    nodes: Nodes,
) -> None:
    """40 threads share the connections.

    A handler that interrupts one thread spoils no other thread's answer.
    """
    said = run("connect_under_signals", ",".join(node.url for node in nodes))
    assert said["wrong"] == []
    assert not said["odd"], "\n".join(said["odd"])
    assert said["strikes"] > 20
    assert said["count"] > 200


@pytest.mark.long
@pytest.mark.timed
@pytest.mark.parametrize("stage", IN_PROCESSES, indirect=True)
def test_a_handler_that_locks_waits_for_nothing_that_it_has_interrupted(stage: Stage) -> None:
    said = run("lock_in_handlers", stage.kind.url)
    assert not said["odd"], "\n".join(said["odd"])
    assert said["longest"] < 0.9, "the handler waits for what it has interrupted until that is given up"
    assert said["handled"] > 5
    assert said["rounds"] > 2
    assert bool(said["refused"]) is stage.kind.url.startswith(("redis", "etcd"))
