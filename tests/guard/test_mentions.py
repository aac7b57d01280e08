"""Text that mentions a fenced table is not refused for that, and text that writes to one is."""

from __future__ import annotations

import pytest
from sqlalchemy import Engine, String, text
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from fencelock.errors import UnfencedWriteError
from fencelock.guard import FencedModel, _text, bind, refusal, textual
from fencelock.lease import Lease


class Base(DeclarativeBase):
    """The models of this file."""


class Event(FencedModel, Base):
    """Called like much else."""

    __tablename__ = "events"
    __fence_resource__ = "event:{id}"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)


class Order(FencedModel, Base):
    """Called like a word of SQL."""

    __tablename__ = "order"
    __fence_resource__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)


class Audit(Base):
    """Not fenced."""

    __tablename__ = "me_audit"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    msg: Mapped[str] = mapped_column(String(80), default="none")


@pytest.fixture(params=[True, False], ids=["parser", "no parser"])
def parser(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the parser is installed."""
    there: bool = request.param
    if not there:
        for module in (_text, refusal, textual):
            monkeypatch.setattr(module, "HAS_PARSER", there)
        for cached in (_text.only_reads, _text.guarded):
            cached.cache_clear()
    return there


MENTIONING = [
    "INSERT INTO me_audit (id, msg) VALUES (2, 'no new events; delete')",
    "INSERT INTO me_audit (id, msg) SELECT id, 'seen' FROM events",
    "DELETE FROM me_audit WHERE id NOT IN (SELECT id FROM events)",
    "UPDATE me_audit SET msg = 'x' /* events */",
    "UPDATE me_audit SET msg = 'x' WHERE id IN (SELECT a.id FROM (SELECT id FROM me_audit ORDER BY id) a)",
    "SELECT id, 'update' FROM events",
]
WRITING = [
    "UPDATE events SET id = 2",
    "UPDATE me_audit SET msg = 'x'; UPDATE events SET id = 2",
    "UPDATE me_audit, events SET events.id = 2",
    "UPDATE me_audit JOIN events SET events.id = 2",
    "DELETE events FROM me_audit, events",
    "DELETE FROM e USING me_audit, events AS e",
    "WITH gone AS (DELETE FROM events RETURNING id) INSERT INTO me_audit (id) SELECT id FROM gone",
    "INSERT INTO me_audit (id) WITH gone AS (DELETE FROM events RETURNING id) SELECT id FROM gone",
    'UPDATE "events" SET id = 2',
    "INSERT INTO events (id) SELECT id FROM me_audit",
]
EXECUTED_COMMENT = "UPDATE me_audit SET msg = 'x' /*! ; UPDATE events SET id = 2 */"
"""By MariaDB alone."""


@pytest.mark.usefixtures("parser", "_tables")
def test_text_that_mentions_a_fenced_table_passes(shared_engine: Engine) -> None:
    """In a string, a comment, a subquery, or as the word that it is."""
    with shared_engine.connect() as connection:
        for sql in MENTIONING:
            connection.execute(text(sql.replace(":", "\\:")))


@pytest.mark.usefixtures("parser", "_tables")
def test_text_that_writes_to_a_fenced_table_is_refused(shared_engine: Engine) -> None:
    """However it is written, and beside whatever else."""
    with shared_engine.connect() as connection:
        executed = [EXECUTED_COMMENT] if shared_engine.dialect.name == "mysql" else []
        for sql in WRITING + executed:
            with pytest.raises(UnfencedWriteError, match="events"):
                connection.exec_driver_sql(sql)
            connection.rollback()


@pytest.mark.usefixtures("_tables")
def test_text_that_needs_the_parser_says_so(shared_engine: Engine, *, parser: bool) -> None:
    """Before anybody asks for the token, which the guard would have filled in."""
    if parser:
        pytest.skip("it is there")
    sql = (
        "UPDATE events SET last_fencing_token = :fencing_token "
        "WHERE id = :id AND last_fencing_token <= :fencing_token"
    )
    given: list[dict[str, int]] = [{"id": 1}, {"id": 1, "fencing_token": 5}]
    for parameters in given:
        with Session(shared_engine) as session:
            bind(session, Lease("event:1", 5))
            with pytest.raises(UnfencedWriteError, match=r"pip install 'fencelock\[sql\]'"):
                session.execute(text(sql), parameters)
    with shared_engine.connect() as connection:  # what only reads is as good as ever
        read = text("SELECT id FROM events WHERE last_fencing_token <= :fencing_token")
        assert connection.execute(read, {"fencing_token": 5}).all() == []
