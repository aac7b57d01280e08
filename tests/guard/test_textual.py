"""Textual SQL writes to a fenced table by `fenced_text` alone, which gives it a token and a new write id."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import Engine, select, text

from fencelock import Lease, StaleTokenError, UnfencedWriteError, fenced_text
from tests.guard.marks import on_sqlite_alone
from tests.guard.models import Order, fenced, standing
from tests.guard.rows import holding, rows_of

UPDATED = (
    "UPDATE g_orders SET status = :status, last_fencing_token = :fencing_token,"
    " last_write_id = :fencing_write_id"
    " WHERE id = :id AND last_fencing_token <= :fencing_token"
)
DELETED = "DELETE FROM g_orders WHERE id = :id AND last_fencing_token <= :fencing_token"
PAID = {"id": 1, "status": "paid"}
ROWS = fenced(Order, 1, 2)


NEW = {1: ("new", 5), 2: ("new", 5)}


def execute(engine: Engine, statement: Any, *rows: dict[str, Any], leases: tuple[Lease, ...] = ()) -> int:
    """Execute a statement for each of the parameters, commit, and return how many rows it has written."""
    with holding(engine, *leases) as session, session.begin():
        written: int = session.execute(statement, [*rows] if len(rows) > 1 else dict(*rows)).rowcount  # type: ignore[attr-defined]
    return written


def test_text_writes_with_its_token(engine: Engine) -> None:
    seen = set()
    for status in ("paid", "sent"):
        assert execute(engine, fenced_text(UPDATED, Order, token=6), {"id": 1, "status": status}) == 1
        seen.update(rows_of(engine, select(Order.last_write_id).where(Order.id == 1)))
    assert standing(engine) == {1: ("sent", 6), 2: ("new", 5)}
    assert len(seen) == 2
    assert execute(engine, fenced_text(DELETED, Order, token=6), {"id": 1}) == 1
    assert standing(engine) == {2: ("new", 5)}


@on_sqlite_alone
@pytest.mark.parametrize(
    ("resource", "row"),
    [("order:1", PAID), (None, PAID), (None, {"number": 1, "status": "paid"})],
    ids=["given", "by the parameters", "the only lease"],
)
def test_token_is_that_of_the_lease_that_is_held(
    engine: Engine, resource: str | None, row: dict[str, Any]
) -> None:
    sql = UPDATED if "id" in row else UPDATED.replace(":id", ":number")
    statement = fenced_text(sql, Order, resource=resource)
    assert execute(engine, statement, row, leases=(Lease("order:1", 7),)) == 1
    assert standing(engine)[1] == ("paid", 7)


@on_sqlite_alone
def test_lease_is_asked_for(engine: Engine) -> None:
    statement = fenced_text(UPDATED, Order)
    with pytest.raises(UnfencedWriteError, match=r"no lease is held.*fenced_lock\('order:1'\)"):
        execute(engine, statement, PAID)
    with pytest.raises(
        UnfencedWriteError, match="needs the lease of 'order:1', and the held leases are 'order:2'"
    ):
        execute(engine, statement, PAID, leases=(Lease("order:2", 7),))
    both = (Lease("order:1", 7), Lease("order:2", 7))
    by_number = fenced_text(UPDATED.replace(":id", ":number"), Order)
    with pytest.raises(UnfencedWriteError, match=r"'order:1', 'order:2' are held.*resource="):
        execute(engine, by_number, {"number": 1, "status": "x"}, leases=both)
    assert standing(engine) == NEW


def test_stale_text_is_told(engine: Engine) -> None:
    for sql, row in ((UPDATED, PAID), (DELETED, {"id": 1})):
        with pytest.raises(StaleTokenError) as caught:
            execute(engine, fenced_text(sql, Order, token=4), row)
        assert (caught.value.identity, caught.value.token, caught.value.current) == ((1,), 4, 5)
    assert execute(engine, fenced_text(DELETED, Order, token=4), {"id": 7}) == 0
    unknown = fenced_text(DELETED.replace(":id", ":number"), Order, token=4)
    assert execute(engine, unknown, {"number": 1}) == 0
    known = fenced_text(DELETED.replace(":id", ":number"), Order, token=4, resource="order:1")
    with pytest.raises(StaleTokenError):
        execute(engine, known, {"number": 1})
    assert standing(engine) == NEW


def test_each_execution_has_its_own_row_and_token(engine: Engine) -> None:
    leases = (Lease("order:1", 6), Lease("order:2", 4))
    rows = [{"id": 1, "status": "x"}, {"id": 2, "status": "y"}]
    with pytest.raises(StaleTokenError, match=r"g_orders\(2,\)"):
        execute(engine, fenced_text(UPDATED, Order), *rows, leases=leases)
    assert standing(engine) == NEW


@on_sqlite_alone
def test_other_text_is_refused_whatever_it_looks_like(engine: Engine) -> None:
    for sql in (UPDATED, "UPDATE g_orders SET status = 'x'"):
        given = {**PAID, "fencing_token": 9, "fencing_write_id": 9}
        row = {name: value for name, value in given.items() if f":{name}" in sql}
        with pytest.raises(UnfencedWriteError, match=r"fenced_text\('UPDATE g_orders SET"):
            execute(engine, text(sql), row)
    assert standing(engine) == NEW


@on_sqlite_alone
def test_going_around_the_guard_with_a_token_is_refused(engine: Engine) -> None:
    statement = fenced_text(UPDATED, Order, token=6).execution_options(fencelock="bypass")
    with pytest.raises(UnfencedWriteError, match="bypass"):
        execute(engine, statement, PAID)
