"""A plugin for pytest that puts the guard in place for SQLAlchemy's own tests.

FENCELOCK_SUITE is `guard` (as one fenced model does), `plain` (it is not), `fenced` (each table that can be
fenced is, and one lease is bound to all sessions and connections) or `columns` (such tables have the two
columns, and no fence). The outcomes go to the file FENCELOCK_SUITE_REPORT, by pytest's names of the tests.
"""

from __future__ import annotations

import json
import os
import re
from functools import wraps
from pathlib import Path
from typing import Any, Final
from unittest import mock

import pytest

_MODE: Final = os.environ["FENCELOCK_SUITE"]
_outcomes: Final[dict[str, set[str]]] = {"passed": set(), "failed": set(), "skipped": set()}
_reasons: Final[dict[str, str]] = {}

#: Why a test that fails on fenced tables is not judged, by what its report says.
UNJUDGED: Final = {
    "it compares SQL text": r"assertsql\.py|assert_compile|^E +.*(INSERT INTO|UPDATE|SELECT) ",
    "it compares what a statement has": r"^E +.*(fencelock_guarded|'last_write_id'\])",
    "it counts statements": r"assert_sql_count|assert_statement_count|profiling\.py",
    "it writes by text": r"this statement may write to the fenced table",
    "the guard refuses this form of INSERT or UPDATE": (
        r"only a plain INSERT into|takes no prefix_with|an UPDATE of several tables|could cut off"
    ),
    "the guard refuses this mapping": (
        r"maps the column 'last_fencing_token' under another name|names its rows by|is to be fenced, but"
        r"|cannot be pickled|Implicitly combining column|already has a primary mapper defined"
    ),
    "it writes to a part of a row": r"holds part of the rows of|a relationship with post_update writes to",
    "it commits each statement": r"needs a transaction: on an AUTOCOMMIT connection",
    "it expects SQLAlchemy's own error for a row that is gone": r"BasicStaleChecksTest",
    "its connection is no connection": r"'Mock' object",
}


def reason_of(report: str) -> str:
    """Return why a failure is not judged, or an empty text."""
    return next((why for why, words in UNJUDGED.items() if re.search(words, report, re.MULTILINE)), "")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Note what became of a test; setting it up and taking it down count, if they fail."""
    if report.when == "call" or not report.passed:
        _outcomes[report.outcome].add(report.nodeid)
        if report.failed:
            _reasons[report.nodeid] = reason_of(f"{report.nodeid}\n{report.longrepr}")


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write the outcomes down, where no worker of another run does."""
    if not hasattr(session.config, "workerinput"):
        found: dict[str, Any] = {outcome: sorted(names) for outcome, names in _outcomes.items()}
        Path(os.environ["FENCELOCK_SUITE_REPORT"]).write_text(json.dumps({**found, "reasons": _reasons}))


def pytest_sessionstart() -> None:
    """Define a fenced model, now that SQLAlchemy's test configuration has said which SQLAlchemy it is."""
    if _MODE in {"plain", "columns"}:
        return
    from sqlalchemy import Column, Integer  # noqa: PLC0415 - not before that
    from sqlalchemy.orm import declarative_base  # noqa: PLC0415 - the same

    from fencelock import FencedModel  # noqa: PLC0415 - the same

    attributes = {
        "__tablename__": "fencelock_bystander",
        "__fence_resource__": "bystander",
        "id": Column(Integer, primary_key=True),
    }
    type("Bystander", (FencedModel, declarative_base()), attributes)
    if _MODE == "fenced":
        _bypass_fixtures()


def _bypass_fixtures() -> None:
    """Let the fixtures fill the tables as they like, which are emptied in text and filled part by part."""
    from sqlalchemy.testing.fixtures import sql  # noqa: PLC0415 - as above

    from fencelock.testing import unfenced  # noqa: PLC0415 - as above

    def bypassing(function: Any) -> Any:
        @wraps(function)
        def filling(*given: Any) -> Any:
            with unfenced():
                return function(*given)

        return filling

    tables: Any = sql.TablesTest
    for name in ("_load_fixtures", "_setup_once_inserts"):
        setattr(tables, name, classmethod(bypassing(getattr(tables, name).__func__)))
    for name in ("_setup_each_inserts", "_teardown_each_tables"):
        setattr(tables, name, bypassing(getattr(tables, name)))


def pytest_runtest_setup() -> None:
    """Put back what the test before has cleared, which may be some of the listeners or all."""
    if _MODE == "plain":
        return
    from sqlalchemy import Table, event  # noqa: PLC0415 - as above
    from sqlalchemy.engine import Engine  # noqa: PLC0415 - the same
    from sqlalchemy.orm import Session  # noqa: PLC0415 - the same

    from fencelock.guard import _install, text  # noqa: PLC0415 - the same

    if _MODE in {"fenced", "columns"} and not event.contains(Table, "after_parent_attach", _add_columns):
        event.listen(Table, "after_parent_attach", _add_columns)
    if _MODE == "fenced" and not event.contains(Engine, "begin", _bind):
        event.listen(Engine, "begin", _bind)
        event.listen(Session, "after_begin", lambda session, *_: _bind(session))
    if _MODE == "columns" or event.contains(Engine, "do_execute", text.do_execute):
        return
    listen = event.listen

    def listen_once(target: Any, identifier: str, listener: Any, **options: Any) -> None:
        if not event.contains(target, identifier, listener):
            listen(target, identifier, listener, **options)

    with mock.patch.object(event, "listen", listen_once):
        _install.listen()


def _add_columns(table: Any, _metadata: Any) -> None:
    """Give a table the two columns, unless its key refers to another table, whose rows it completes."""
    from sqlalchemy import BigInteger, Column, text  # noqa: PLC0415 - as above

    keys = list(table.primary_key)
    if not keys or any(key.foreign_keys for key in keys) or "last_write_id" in table.c:
        return
    if _MODE == "columns":
        for name in ("last_fencing_token", "last_write_id"):
            table.append_column(Column(name, BigInteger, nullable=False, server_default=text("0")))
        return
    from fencelock.guard import fence_column, write_id_column  # noqa: PLC0415 - as above

    table.append_column(fence_column(resource="all"))
    table.append_column(write_id_column())


def _bind(target: Any) -> None:
    from fencelock import Lease, bind  # noqa: PLC0415 - as above

    bind(target, Lease("all", 7))
