"""The node of `model.py` answers as the scripts do on a real server, whatever it is asked in which order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from fencelock.authority.redlock.protocol import (
    Answer,
    Bid,
    Command,
    _acquire_command,
    _extend_command,
    _pairs,
)
from fencelock.authority.redlock.redlock import Redlock
from fencelock.embedded import Node
from fencelock.token import MAX_COUNTER
from tests.redlock.model import Lock, ModelNode, lock_key
from tests.redlock.stage import NODE_KEY, RealNode, fleet_of

#: The first two share a stripe.
RESOURCES = ("a", "b6", "c")
NONCES = ("n1", "n2", "n3")


@dataclass(frozen=True)
class Operation:
    """Something that happens to a node; a command if `script` is the name of one."""

    script: str
    resources: tuple[str, ...]
    nonce: str
    epoch: int
    numbers: tuple[int, ...]
    stranger: bool

    def command(self, fingerprint: str) -> Command:
        """Return the command, as it goes to a node of that fingerprint."""
        fleet = fleet_of("another list" if self.stranger else fingerprint, 1)
        bid = Bid.of(fleet, self.resources, self.nonce, 60.0)
        if self.script == "extend":
            each = [
                Bid.of(fleet, (name,), nonce, 60.0)
                for name, nonce in zip(self.resources, NONCES, strict=False)
            ]
            return _extend_command(fleet, [bid, *each], [self.epoch] * (1 + len(each)))
        pairs = _pairs(bid.stripes, self.numbers[: len(self.resources)])
        arguments: dict[str, list[str | int]] = {
            "acquire": [60_000, self.epoch, *pairs],
            "confirm": [self.epoch, *pairs],
            "release": [self.epoch, *pairs],
        }
        if self.script == "remint":
            old = NONCES[(NONCES.index(self.nonce) + 1) % len(NONCES)]
            hints = self.numbers[: len(self.resources)]
            return _acquire_command(replace(bid, hint_epoch=self.epoch, hints=hints, instead_of=old), fleet)
        return Command(
            self.script, self.nonce, bid.keys, (fleet.fingerprint, self.nonce, *arguments[self.script])
        )


numbers = st.one_of(st.integers(0, 12), st.integers(MAX_COUNTER - 3, MAX_COUNTER))
operations = st.builds(
    Operation,
    script=st.sampled_from(
        ["acquire"] * 5 + ["remint"] * 2 + ["confirm"] * 3 + ["release", "extend", "expire", "raise", "blank"]
    ),
    resources=st.lists(st.sampled_from(RESOURCES), min_size=1, max_size=3, unique=True).map(
        lambda names: tuple(sorted(names))
    ),
    nonce=st.sampled_from(NONCES),
    epoch=st.integers(0, 2),
    numbers=st.tuples(numbers, numbers, numbers),
    stranger=st.sampled_from([False] * 9 + [True]),
)


@pytest.fixture(scope="module")
def real(shared_nodes: list[Node]) -> Iterator[RealNode]:
    """A real node."""
    node = shared_nodes[4]
    if not node.is_running:
        node.restart(keep_data=False)
    node.resume()
    made = RealNode(node.url)
    yield made
    made.close()


def test_two_of_the_resources_share_a_stripe() -> None:
    """The conformance test is to meet two locks of one command on one counter."""
    stripes = Bid.of(fleet_of("", 1), RESOURCES, "n", 1.0).stripes
    assert stripes[0] == stripes[1] != stripes[2]


@example(
    base=0,
    history=[
        Operation("acquire", ("a",), "n1", 0, (0, 0, 0), stranger=False),
        Operation("release", ("a",), "n1", 0, (2, 0, 0), stranger=True),
    ],
)
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(base=st.sampled_from([0, 5, MAX_COUNTER - 2]), history=st.lists(operations, min_size=1, max_size=25))
def test_model_answers_as_the_scripts_do(real: RealNode, base: int, history: list[Operation]) -> None:
    """Same operations, same answers, and in the end the same counters and locks."""
    real.client.flushall()
    with Redlock(real.node.name) as authority:
        authority.init(base=base)
    fingerprint = str(real.client.hget(NODE_KEY, "cfg"))
    model = ModelNode(fingerprint, base)
    for operation in history:
        if operation.script in {"expire", "raise", "blank"}:
            happen(operation, real, model)
        else:
            command = operation.command(fingerprint)
            assert comparable(real.execute(command)) == comparable(model.execute(command)), operation
    assert state_of(real) == (model.epoch, model.counters, model.locks)


def comparable(answer: Answer) -> Answer:
    """Return an answer without what only time decides."""
    return answer._replace(ttl=0.0)


def happen(operation: Operation, real: RealNode, model: ModelNode) -> None:
    """Do to both what no command does."""
    if operation.script == "expire":
        real.expire(operation.resources[0])
        model.expire(lock_key(operation.resources[0]))
    elif operation.script == "raise" and model.epoch is not None:
        model.epoch += 1
        real.client.hset(NODE_KEY, "e", str(model.epoch))
    elif operation.script == "blank" and operation.numbers[0] == 0:
        model.epoch, model.counters = None, {}
        real.client.delete(NODE_KEY)


def state_of(real: RealNode) -> tuple[int | None, dict[int, int], dict[str, Lock]]:
    """Return what a real node keeps, as the model keeps it."""
    fields: dict[str, str] = real.client.hgetall(NODE_KEY)  # type: ignore[assignment]
    epoch = int(fields["e"]) if "e" in fields else None
    counters = {int(name[1:]): int(value) for name, value in fields.items() if name[1:].isdigit()}
    locks = {}
    for key in real.client.keys(f"{NODE_KEY}:l:*"):
        nonce, its_epoch, counter = str(real.client.get(key)).split("|")
        locks[str(key)] = Lock(nonce, int(its_epoch), int(counter) if counter.isdigit() else None)
    return epoch, counters, locks
