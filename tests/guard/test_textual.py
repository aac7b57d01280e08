"""Textual SQL that carries the condition and is given its token is guarded; all other writes are refused."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import Engine, String, delete, insert, select, text
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from fencelock import FencedModel, UnfencedWriteError


class Base(DeclarativeBase):
    """Tables of these tests."""


class Order(FencedModel, Base):
    """Each row has a resource of its own."""

    __tablename__ = "tx_orders"
    __fence_resource__ = "order:{id}"
    id: Mapped[int] = mapped_column(primary_key=True)
    status: Mapped[str] = mapped_column(String(40))


UPDATED = (
    "UPDATE tx_orders SET status = :status, last_fencing_token = :fencing_token,"
    " last_write_id = :fencing_write_id"
    " WHERE id = :id AND last_fencing_token <= :fencing_token"
)
DELETED = "DELETE FROM tx_orders WHERE id = :id AND last_fencing_token <= :fencing_token"


@pytest.fixture
def engine(shared_engine: Engine, _tables: None) -> Engine:
    """An engine on a database whose rows have been fenced with 5."""
    with shared_engine.execution_options(fencelock="bypass").begin() as connection:
        connection.execute(delete(Order))
        for number in (1, 2):
            connection.execute(insert(Order), {"id": number, "status": "new", "last_fencing_token": 5})
    return shared_engine


def orders(engine: Engine) -> dict[int, tuple[str, int]]:
    """Return what the database has."""
    with engine.connect() as connection:
        found = connection.execute(select(Order.id, Order.status, Order.last_fencing_token))
        return {number: (status, fence) for number, status, fence in found}


NEW = {1: ("new", 5), 2: ("new", 5)}


def execute(engine: Engine, sql: str, *rows: dict[str, Any]) -> int:
    """Execute a text once for each of the parameters, commit, and return how many rows it has written."""
    with engine.begin() as connection:
        return connection.execute(text(sql), rows or None).rowcount


FORMS = {
    "plain": UPDATED,
    "spelt otherwise": UPDATED.lower().replace(" = :", "=:").replace(" <= ", "<="),
    "alias": UPDATED.replace("tx_orders", "tx_orders AS o").replace("AND last", "AND o.last"),
    "condition first": UPDATED.replace("id = :id AND", "(id = :id OR id = 7) AND"),
    "comments and strings": "/* OR */ "
    + UPDATED.replace("id = :id", "status <> 'or' AND id = :id -- OR\n")
    + ";",
}


@pytest.mark.parametrize("sql", [pytest.param(sql, id=name) for name, sql in FORMS.items()])
def test_text_with_the_condition_writes_with_its_token(engine: Engine, sql: str) -> None:
    """A token that is above the fence, and the same again."""
    for status in ("paid", "sent"):
        assert execute(engine, sql, {"id": 1, "status": status, "fencing_token": 6}) == 1
    assert orders(engine) == {1: ("sent", 6), 2: ("new", 5)}


def test_stale_text_writes_no_row(engine: Engine) -> None:
    """The rowcount says so, as for a row that is not there; nothing is raised."""
    assert execute(engine, UPDATED, {"id": 1, "status": "stale", "fencing_token": 4}) == 0
    assert execute(engine, DELETED, {"id": 1, "fencing_token": 4}) == 0
    assert execute(engine, DELETED, {"id": 7, "fencing_token": 6}) == 0
    assert orders(engine) == NEW
    assert execute(engine, DELETED, {"id": 1, "fencing_token": 6}) == 1


def test_parameters_may_come_with_the_text(engine: Engine) -> None:
    """`text(…).bindparams(…)` gives the token too."""
    with engine.begin() as connection:
        connection.execute(text(UPDATED).bindparams(id=1, status="paid", fencing_token=6))
    assert orders(engine)[1] == ("paid", 6)


def test_each_execution_has_its_own_token(engine: Engine) -> None:
    """The database compares each of them with the fence of its row."""
    rows = [{"id": 1, "status": "x", "fencing_token": 6}, {"id": 2, "status": "y", "fencing_token": 4}]
    execute(engine, UPDATED, *rows)
    assert orders(engine) == {1: ("x", 6), 2: ("new", 5)}


def test_token_is_always_given(engine: Engine) -> None:
    """The error says how; an invalid token is refused."""
    rows: list[dict[str, Any]] = [{"id": 1, "status": "x", "fencing_token": 6}, {"id": 2, "status": "x"}]
    for given in (rows[1:], rows):
        with pytest.raises(UnfencedWriteError, match=r"pass \{.fencing_token.: token\}"):
            execute(engine, UPDATED, *given)
    for wrong in (0, 2**63, True, "9"):
        with pytest.raises((ValueError, TypeError)):
            execute(engine, UPDATED, {**rows[0], "fencing_token": wrong})
    assert orders(engine) == NEW


NOT_GUARDED = {
    "no condition": "UPDATE tx_orders SET status = 'x', last_fencing_token = :fencing_token,"
    " last_write_id = :fencing_write_id WHERE id = 1",
    "fence not raised": UPDATED.replace(" last_fencing_token = :fencing_token,", ""),
    "no write id": UPDATED.replace(", last_write_id = :fencing_write_id", ""),
    "fence raised further": UPDATED.replace("token = :fencing_token", "token = :fencing_token + 1"),
    "condition beside an OR": UPDATED + " OR id = 1",
    "condition beside what MariaDB takes for an OR": UPDATED + " || id = 1",
    "condition as a bound of BETWEEN": UPDATED.replace("id = :id", "id BETWEEN 0"),
    "condition negated": UPDATED.replace("AND last", "AND NOT last"),
    "wrong way round": UPDATED.replace("<=", ">="),
    "never equal": UPDATED.replace("<=", "<"),
    "another parameter": UPDATED.replace("<= :fencing_token", "<= :other"),
    "token plus one": UPDATED + " + 1",
    "in a subquery": UPDATED.replace("AND last", "AND id IN (SELECT id FROM tx_orders WHERE last") + ")",  # noqa: S608  ours
    "in a comment": "UPDATE tx_orders SET status = 'x' -- last_fencing_token <= :fencing_token",
    "in a string": "UPDATE tx_orders SET status = 'last_fencing_token <= :fencing_token'",
    "in quotes, which are a string to MariaDB": DELETED.replace(
        "AND last_fencing_token", 'AND "last_fencing_token"'
    ),
    "of another table": UPDATED.replace("AND last", "AND tx_entries.last"),
    "two statements": f"{UPDATED}; {DELETED}",
    "behind a comment that is executed": f"/*! {DELETED} */ {UPDATED}",
    "INSERT": "INSERT INTO tx_orders (id, status, last_fencing_token) VALUES (3, 'x', :fencing_token)",
    "EXPLAIN": f"EXPLAIN ANALYZE {UPDATED}",
}


@pytest.mark.parametrize("sql", [pytest.param(sql, id=name) for name, sql in NOT_GUARDED.items()])
def test_text_that_lacks_the_condition_is_refused(engine: Engine, sql: str) -> None:
    """Whatever looks like it; and the error says what is missing."""
    row = {"id": 1, "status": "x", "fencing_token": 9, "other": 9}
    with pytest.raises(UnfencedWriteError, match="last_fencing_token <= :fencing_token"):
        execute(engine, sql, {name: value for name, value in row.items() if f":{name}" in sql})
    assert orders(engine) == NEW
