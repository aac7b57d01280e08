"""A plugin for pytest that puts the guard in place for SQLAlchemy's own tests, as one fenced model does.

With FENCELOCK_SUITE=plain it is not. The outcomes go to the file FENCELOCK_SUITE_REPORT, by pytest's own
names of the tests.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Final
from unittest import mock

import pytest

_MODE: Final = os.environ["FENCELOCK_SUITE"]
_outcomes: Final[dict[str, set[str]]] = {"passed": set(), "failed": set(), "skipped": set()}


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Note what became of a test; setting it up and taking it down count, if they fail."""
    if report.when == "call" or not report.passed:
        _outcomes[report.outcome].add(report.nodeid)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write the outcomes down, where no worker of another run does."""
    if not hasattr(session.config, "workerinput"):
        found = {outcome: sorted(names) for outcome, names in _outcomes.items()}
        Path(os.environ["FENCELOCK_SUITE_REPORT"]).write_text(json.dumps(found))


def pytest_sessionstart() -> None:
    """Define a fenced model, now that SQLAlchemy's test configuration has said which SQLAlchemy it is."""
    if _MODE == "plain":
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


def pytest_runtest_setup() -> None:
    """Put back what the test before has cleared, which may be some of the listeners or all."""
    if _MODE == "plain":
        return
    from sqlalchemy import event  # noqa: PLC0415 - as above
    from sqlalchemy.engine import Engine  # noqa: PLC0415 - the same

    from fencelock.guard import _install, text  # noqa: PLC0415 - the same

    if event.contains(Engine, "do_execute", text.do_execute):
        return
    listen = event.listen

    def listen_once(target: Any, identifier: str, listener: Any, **options: Any) -> None:
        if not event.contains(target, identifier, listener):
            listen(target, identifier, listener, **options)

    with mock.patch.object(event, "listen", listen_once):
        _install.listen()
