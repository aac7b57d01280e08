"""Savepoints inside each other, at random: a COMMIT writes, and a session knows, what none of them undid."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test
from sqlalchemy import Engine, select, update
from sqlalchemy.orm import Session

from fencelock import Lease, bind, gate, once
from tests.guard.models import FENCE, RECEIPTS, Row, fenced, fences
from tests.guard.rows import bypassed, rows_of

ROWS = {**fenced(Row, 1), fences: [], RECEIPTS: []}
VALUES = st.integers(1, 9)


@dataclass
class Seen:
    """What a transaction sees: of the row, its fence, and the fence of its gate; and the results by key."""

    value: int = 0
    fence: int = FENCE
    gate: int = 0
    results: dict[str, int] = field(default_factory=dict)


class Savepoints(RuleBasedStateMachine):
    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self.engine = engine
        with bypassed(engine) as connection:
            connection.execute(update(Row).values(value=0, last_fencing_token=FENCE))
            connection.execute(fences.delete())
            connection.execute(RECEIPTS.delete())
        self.session = Session(engine)
        self.committed, self.token = Seen(), FENCE
        self.begin()

    def begin(self) -> None:
        self.token += 1
        bind(self.session, Lease("rows", self.token))
        self.seen = [deepcopy(self.committed)]
        self.savepoints: list[Any] = []

    @precondition(lambda self: len(self.savepoints) < 4)
    @rule()
    def open(self) -> None:
        self.savepoints.append(self.session.begin_nested())
        self.seen.append(deepcopy(self.seen[-1]))

    @precondition(lambda self: self.savepoints)
    @rule()
    def release(self) -> None:
        self.savepoints.pop().commit()
        self.seen[-2:] = self.seen[-1:]

    @precondition(lambda self: self.savepoints)
    @rule(data=st.data())
    def undo(self, data: st.DataObject) -> None:
        """Those inside are undone with it."""
        at = data.draw(st.integers(0, len(self.savepoints) - 1))
        self.savepoints[at].rollback()
        del self.savepoints[at:], self.seen[at + 1 :]

    @rule(value=VALUES)
    def write(self, value: int) -> None:
        row = self.session.get_one(Row, 1)
        assert row.value == self.seen[-1].value
        row.value = value
        self.session.flush()
        if value != self.seen[-1].value:
            self.seen[-1].value, self.seen[-1].fence = value, self.token

    @rule(value=VALUES)
    def write_by_a_statement(self, value: int) -> None:
        self.session.execute(update(Row).where(Row.id == 1).values(value=value))
        self.seen[-1].value, self.seen[-1].fence = value, self.token

    @rule()
    def pass_the_gate(self) -> None:
        gate(self.session)
        self.seen[-1].gate = self.token

    @rule(key=st.sampled_from("abc"), result=VALUES)
    def do_once(self, key: str, result: int) -> None:
        receipt = once(self.session, key)
        assert receipt.done == (key in self.seen[-1].results)
        if not receipt.done:
            receipt.result = self.seen[-1].results[key] = result
        assert receipt.result == self.seen[-1].results[key]

    @rule()
    def commit(self) -> None:
        for savepoint in reversed(self.savepoints):
            savepoint.commit()
        self.committed = self.seen[-1]
        self.session.commit()
        self.check()
        self.begin()

    @rule()
    def roll_back(self) -> None:
        self.session.rollback()
        self.check()
        self.begin()

    def check(self) -> None:
        (row,) = rows_of(self.engine, select(Row.value, Row.last_fencing_token))
        gates = rows_of(self.engine, select(fences.c.last_fencing_token))
        results = rows_of(self.engine, select(RECEIPTS.c.key, RECEIPTS.c.result))
        found = Seen(row[0], row[1], max(gates, default=0), dict(tuple(each) for each in results))
        assert found == self.committed

    def teardown(self) -> None:
        self.session.close()


def test_what_a_savepoint_undid_is_neither_written_nor_known(engine: Engine) -> None:
    rounds = settings(max_examples=40, stateful_step_count=25, deadline=None)
    machine: Any = partial(Savepoints, engine)
    run_state_machine_as_test(machine, settings=rounds)
