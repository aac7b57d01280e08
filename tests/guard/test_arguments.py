"""Each mistake in a call is told by an error that names it, before anything is sent or changed.

The table has for each function rows of a call, its error, and a word of the message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from functools import partial
from typing import Any, TypeAlias

import pytest
import sqlalchemy as sa
from sqlalchemy import delete, orm, select, text, update
from sqlalchemy.orm import Mapped, Session, mapped_column, relationship

import fencelock
from fencelock import FencedModel, Lease, UnfencedWriteError, bind, claim, conditional_update, once
from fencelock.guard import fence_column, triggers
from fencelock.tokens import MAX_TOKEN
from tests.guard.marks import InMemory
from tests.guard.models import Account, Base, Free, Note, Order, Report, Task, fenced
from tests.guard.rows import holding, refill, rows_of

Case: TypeAlias = tuple[Callable[[Session], object], type[Exception], str]


class Page(FencedModel, Base):
    """Rows that a unique column tells apart; the database makes their keys."""

    __tablename__ = "ar_pages"
    __fence_resource__ = "page:{path}"
    id: Mapped[int] = mapped_column(primary_key=True)
    path: Mapped[str] = mapped_column(unique=True)
    hits: Mapped[int] = mapped_column(default=0)
    title: Mapped[str | None]


class Item(FencedModel, Base):
    __tablename__ = "ar_items"
    __fence_resource__ = "order:{order_id}"
    id: Mapped[int] = mapped_column(primary_key=True)
    line: Mapped[int] = mapped_column(primary_key=True)
    order_id: Mapped[int]


@pytest.fixture
def session(in_memory: InMemory) -> Iterator[Session]:
    engine = refill(in_memory(Base.metadata), fenced(Account, 1) | fenced(Order, 1))
    with holding(engine, Lease("account:1", 6), Lease("order:1", 6), Lease("page:/", 6)) as made:
        yield made


WHAT: Any = None  # of any type, for type checkers
PRINT: Any = "print"
NO_METADATA: Any = Base
NO_IDENTITY = [lambda s, key=key: claim(s, Account, key) for key in (None, (1, 2), {"other": 1}, ())]
NO_CLAIM: list[Any] = [Account, text("SELECT 1"), update(Account), "SELECT 1", select(Account.id)]
NO_CLAIM += [select(Account, Task)]
NO_TOKEN: list[tuple[Any, type[Exception]]] = [(each, ValueError) for each in (0, -1, MAX_TOKEN + 1)]
NO_TOKEN += [(each, TypeError) for each in (True, "7", 7.0)]
CLAIMS: list[Case] = [
    *((call, ValueError, "identified by id") for call in NO_IDENTITY),
    *(
        (lambda s, no=no: fencelock.claim_all(s, no), TypeError, "claim_all takes a SELECT of one model")
        for no in NO_CLAIM
    ),
    (lambda s: claim(s, Account, 1, nowait=True, skip_locked=True), ValueError, "choose one"),  # type: ignore[call-overload]
    (lambda s: claim(s, Note, 1), TypeError, "Note has no fence"),
    (lambda s: claim(s, str, 1), TypeError, "expected a mapped class"),
    (lambda s: claim(s, Base, 1), TypeError, "expected a mapped class"),
    (lambda _: claim(Session, Account, 1), TypeError, "a Session"),  # type: ignore[call-overload]
    (lambda s: claim(s.get_bind(), Account, 1), TypeError, "a Session"),  # type: ignore[call-overload]
    (lambda s: bind(s, "lease"), TypeError, "bind takes leases"),  # type: ignore[arg-type]
    (lambda _: bind(WHAT, Lease("a", 1)), TypeError, "session or a connection"),
    (lambda _: fencelock.bypass("engine").__enter__(), TypeError, "session or a connection"),  # type: ignore[arg-type]
    (lambda s: s.execute(update(Order).execution_options(fencelock="byepass")), ValueError, "'bypass'"),
]
PATH = {"index_elements": ["path"]}
UPSERTS: list[tuple[Any, Any, dict[str, Any], type[Exception], str]] = [
    (Order, {"status": "x"}, {}, ValueError, "whole key"),
    (Order, {"id": None, "status": "x"}, {}, ValueError, "whole key"),
    (Order, {"id": 1, "nonsense": 2}, {}, ValueError, "'nonsense' is no column"),
    (Order, {"id": 1, "last_fencing_token": 2}, {}, ValueError, "the guard's"),
    (Order, [{"id": 1}, {"id": 1}], {}, ValueError, "given twice"),
    (Item, {"id": 1, "line": 1}, {}, ValueError, "depends on order_id"),
    (Page, {"id": 1, "path": "/", "hits": Page.hits + 1}, {}, ValueError, "'hits' of a row to upsert is SQL"),
    (Page, {"path": "/"}, {"index_elements": ["title"]}, ValueError, "one unique constraint or index"),
    (Page, {"path": "/"}, {"index_elements": ["path", "title"]}, ValueError, "one unique constraint"),
    (Page, {"path": "/"}, {"index_elements": ["nonsense"]}, ValueError, "'nonsense' is no column"),
    (Page, {"path": "/"}, {**PATH, "set_": {"nonsense": 1}}, ValueError, "'nonsense' is no column"),
    (Page, {"path": "/"}, {**PATH, "set_": {"last_write_id": 1}}, ValueError, "the guard's"),
    (Page, {"path": "/"}, {**PATH, "set_": {"path": "/b"}}, ValueError, "'path' of a row .* must not change"),
    (Page, {"path": "/"}, {**PATH, "set_": {"id": 7}}, ValueError, "'id' of a row .* must not change"),
    (Page, {"path": "/"}, {**PATH, "set_": {"hits": text("1 --")}}, UnfencedWriteError, "could cut off"),
    (str, {"id": 1}, {}, TypeError, "expected a mapped class"),
    (Report, {"id": 1}, {}, TypeError, "in several tables"),
    *((Order, wrong, {}, TypeError, "a list of rows, each a dict") for wrong in ("pen", [Order(id=1)])),
    (Order, {"id": 2}, {}, UnfencedWriteError, "order:2"),  # of which the lease is needed
]


def upserting(model: Any, rows: Any, options: dict[str, Any]) -> Callable[[Session], object]:
    return lambda s: fencelock.upsert(s, model, [rows] if isinstance(rows, dict) else rows, **options)


UPDATED = (
    "UPDATE g_orders SET last_fencing_token = :fencing_token, last_write_id = :fencing_write_id"
    " WHERE id = :id AND last_fencing_token <= :fencing_token"
)
TEXTS: list[Case] = [
    *(
        (lambda _, sql=sql: fencelock.fenced_text(sql, Order), ValueError, "the text lacks :fencing_token")
        for sql in (UPDATED.replace(":fencing_token", "9"), "delete from g_orders", "UPDATE x SET a = 1")
    ),
    (
        lambda _: fencelock.fenced_text(UPDATED.replace(":fencing_write_id", "1"), Order),
        ValueError,
        "the text lacks :fencing_write_id",
    ),
    (lambda _: fencelock.fenced_text(UPDATED, sa.Table("plain", sa.MetaData())), ValueError, "is not fenced"),
    *(
        (lambda _, no=no: fencelock.fenced_text(UPDATED, Order, token=no), error, "token|int")
        for no, error in NO_TOKEN
    ),
]
ROW = {"id": 1}
ODD = ["select", "Robert'); DROP TABLE x;--", 'a"b', "", "a b", "é", "1a", "a;b", "a."]
#: Without a dialect the functions do not know the quotes.
UNQUOTED: list[Any] = [
    each for odd in ODD for each in ((odd, {"a": 1}, ROW), ("t", {odd: 1}, ROW), ("t", {"a": 1}, {odd: 1}))
]
CURSORS: list[Case] = [
    (lambda _: conditional_update("t", {"a": 1}, {}, 1), ValueError, "every row"),
    (lambda _: conditional_update("t", {"a": 1}, {"id": None}, 1), ValueError, "NULL"),
    *(
        (lambda _, own=own: conditional_update("t", own, ROW, 1), ValueError, "belong to the guard")
        for own in ({"last_fencing_token": 9}, {"last_write_id": 9})
    ),
    (
        lambda _: conditional_update("t", {"a": 1}, {"last_fencing_token": 9}, 1),
        ValueError,
        "belong to the guard",
    ),
    (lambda _: conditional_update("t", {"a": 1}, ROW, 1, "percent"), ValueError, "paramstyle"),
    (lambda _: conditional_update(5, {"a": 1}, ROW, 1), TypeError, "a Table or a model"),
    (lambda _: fencelock.conditional_delete("t", ROW, 1, dialect="oracle"), ValueError, "dialect"),
    (lambda _: fencelock.conditional_delete("t\0", ROW, 1, dialect="sqlite"), ValueError, "no name"),
    *((lambda _, no=no: conditional_update("t", {}, ROW, no), error, "token|int") for no, error in NO_TOKEN),
    *(
        (lambda _, no=no: conditional_update(no[0], no[1], no[2], 1), ValueError, "needs quotes|is no name")
        for no in UNQUOTED
    ),
]
PAID = update(Order).where(Order.id == 1).values(status="paid")
free = sa.Table("ar_free", sa.MetaData(), sa.Column("id", sa.Integer))
#: Has the column, and does not say what guards its rows, as a table does not that was reflected.
plain = sa.Table(
    "ar_plain", sa.MetaData(), sa.Column("id", sa.Integer), sa.Column("last_fencing_token", sa.Integer)
)


def given(token: object, **more: Any) -> dict[str, Any]:
    return {"fencing_token": token, **more}


def flush_with_option(session: Session) -> None:
    engine: Any = session.get_bind()
    with holding(engine.execution_options(**given(6)), Lease("order:1", 6)) as flushing:
        flushing.get_one(Order, 1).status = "x"
        flushing.flush()


def bypassed_three_ways(option: str) -> Callable[[Session], object]:
    past: dict[str, Any] = {"fencelock": "bypass"}

    def execute(session: Session) -> object:
        engine: Any = session.get_bind()
        if option == "engine":
            with Session(engine.execution_options(**past)) as other:
                return other.execute(delete(Order), execution_options=given(5))
        if option == "connection":
            connection = session.connection(execution_options=past)
            return connection.execute(PAID, execution_options=given(5))
        return session.execute(PAID.execution_options(**past), execution_options=given(5))

    return execute


TOKENS: list[Case] = [
    (lambda s: s.execute(sa.insert(free), execution_options=given(1)), ValueError, "'ar_free' is not fenced"),
    (lambda s: s.execute(delete(free).execution_options(**given(1))), ValueError, "'ar_free' is not fenced"),
    (
        lambda s: s.execute(update(plain).values(id=1), execution_options=given(6)),
        fencelock.FenceError,
        r"ar_plain is fenced .* fence_column\(resource=",
    ),
    (
        lambda s: s.connection().execution_options(**given(6)).execute(PAID),
        ValueError,
        "is for one statement",
    ),
    (
        lambda s: Session(s.get_bind().execution_options(**given(6))).execute(PAID),
        ValueError,
        "is for one statement",
    ),
    (flush_with_option, ValueError, "is for one statement"),
    *(
        (bypassed_three_ways(how), UnfencedWriteError, "bypass")
        for how in ("engine", "connection", "statement")
    ),
    *(
        (lambda s, no=no: s.execute(PAID, execution_options=given(no)), error, "token|int")
        for no, error in NO_TOKEN
    ),
]
ODD_DATA: list[Any] = [object(), float("nan"), {1, 2}, b"bytes"]


def assign_result(value: Any) -> Callable[[Session], object]:
    return lambda s: setattr(once(s, "k"), "result", value)


RECEIPTS: list[Case] = [
    *((lambda s, no=no: once(s, no), ValueError, "name") for no in ("", " k", "k" * 256, "a\nb")),
    *((lambda s, no=no: once(s, "k", fingerprint=no), TypeError, "is plain data") for no in ODD_DATA),
    *((assign_result(no), TypeError, "cannot be written as JSON") for no in (*ODD_DATA, datetime.now(UTC))),
    (assign_result("x" * 65_535), ValueError, "65537 bytes of JSON, and a receipt keeps 64 KiB"),
    (lambda s: bool(once(s, "k")), TypeError, r"ask receipt\.done"),
    (lambda s: once(s.get_bind(), "k"), TypeError, "once takes a Session or an AsyncSession, not Engine"),  # type: ignore[call-overload]
    (lambda _: fencelock.receipt_table(NO_METADATA), TypeError, r"a MetaData, such as Base\.metadata"),
    (lambda s: fencelock.prune_receipts(s, older_than=-1), ValueError, "number of seconds"),
    (lambda _: fencelock.fence_table(sa.MetaData(), trigger="strict"), ValueError, "False or True"),  # type: ignore[arg-type]
]


async def coroutine(_event: object) -> None:
    """Nothing would await it."""


def model(resource: Any = "order:{id}", base: Any = None, **attributes: Any) -> Any:
    """Map a fenced class, on a base of its own."""
    given = {"__tablename__": "ar_model", "id": mapped_column(sa.Integer, primary_key=True), **attributes}
    return type(
        "Order", (FencedModel, base or orm.declarative_base()), {"__fence_resource__": resource, **given}
    )


def two_choices(_session: Session) -> None:
    base: Any = orm.declarative_base()
    first = model(base=base, __fence_lease__="optional")
    given = {"__table__": first.__table__, "__fence_lease__": "required", "__fence_resource__": "order:{id}"}
    type("Second", (FencedModel, base), given)


COLUMNS = {"status": mapped_column(sa.String), "items": relationship("Item")}
TEMPLATES: list[tuple[Any, type[Exception], str]] = [
    ("order:{nmae}", ValueError, "names 'nmae', but the columns of its fenced table are"),
    ("order:{}", ValueError, "names ''"),
    ("order:{id.real}", ValueError, "names 'id.real'"),
    ("order:{id[0]}", ValueError, r"names 'id\[0\]'"),
    ("order:{items}", ValueError, "names 'items'"),
    ("order:{id", ValueError, "is no format string"),
    ("", ValueError, "empty"),
    (" order", ValueError, "white space"),
    (7, TypeError, "is a str"),
]


def with_template(template: Any, _session: Session) -> None:
    base: Any = orm.declarative_base()
    try:
        model(template, base, status=mapped_column(sa.String), items=relationship("Item"))
    finally:
        base.registry.dispose()


DEFINITIONS: list[Case] = [
    *((partial(with_template, template), error, match) for template, error, match in TEMPLATES),
    (lambda _: fence_column(trigger="Strict"), ValueError, "'Strict'"),  # type: ignore[arg-type]
    (lambda _: model(__fence_trigger__="always"), ValueError, "trigger"),
    (lambda _: triggers.create("orders", "oracle"), ValueError, "oracle"),
    (lambda _: triggers.create(7, "sqlite"), TypeError, "table"),
    (lambda _: fence_column(lease="perhaps"), ValueError, "'required' or 'optional', not 'perhaps'"),  # type: ignore[arg-type]
    (lambda _: model(__fence_lease__=False), ValueError, "not False"),
    (two_choices, ValueError, "differs from that of another model"),
    (lambda _: fencelock.on_event(PRINT), TypeError, "takes a plain function"),
    (lambda _: fencelock.on_event(coroutine), TypeError, "takes a plain function"),
]
FUNCTIONS: dict[str, list[Case]] = {
    "claim, bind, bypass": CLAIMS,
    "upsert": [(upserting(*row[:3]), *row[3:]) for row in UPSERTS],
    "fenced_text": TEXTS,
    "conditional_update": CURSORS,
    "fencing_token": TOKENS,
    "once": RECEIPTS,
    "definitions": DEFINITIONS,
}


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_mistake_is_told_by_an_error_that_names_it(session: Session, function: str) -> None:
    for number, (call, error, match) in enumerate(FUNCTIONS[function]):
        try:
            with pytest.raises(error, match=match):
                call(session)
        except BaseException as failure:
            failure.add_note(f"row {number} of {function!r}: {error.__name__}, {match!r}")
            raise
        session.rollback()
    engine: Any = session.get_bind()
    assert isinstance(engine, sa.Engine)
    assert rows_of(engine, select(Order.status, Order.last_fencing_token)) == [("new", 5)]
    assert rows_of(engine, select(Account.last_fencing_token)) == [5]
    assert rows_of(engine, select(Free.id)) == []
