"""A plugin for pytest that puts the guard in place for SQLAlchemy's own tests, as one fenced model does.

With FENCELOCK_SUITE=listeners there are listeners for the same events that do nothing: what fails with these,
too, fails because anybody listens at all.
"""

from __future__ import annotations

import os
from typing import Any


def pytest_sessionstart() -> None:
    """Define a fenced model, now that SQLAlchemy's test configuration has said which SQLAlchemy it is."""
    from sqlalchemy import Column, Integer  # noqa: PLC0415 - not before that
    from sqlalchemy.orm import declarative_base  # noqa: PLC0415 - the same

    from fencelock import FencedModel  # noqa: PLC0415 - the same

    if os.environ.get("FENCELOCK_SUITE") != "listeners":
        attributes = {"__tablename__": "fencelock_bystander", "id": Column(Integer, primary_key=True)}
        type("Bystander", (FencedModel, declarative_base()), attributes)


def pytest_runtest_setup() -> None:
    """Put it back where the test before has cleared all listeners."""
    from sqlalchemy import event  # noqa: PLC0415 - as above
    from sqlalchemy.engine import Engine  # noqa: PLC0415 - the same

    from fencelock.guard import _install, rewrite  # noqa: PLC0415 - the same

    if os.environ.get("FENCELOCK_SUITE") == "listeners":
        if not event.contains(Engine, "before_execute", _nothing):
            event.listen(Engine, "before_execute", _nothing, retval=True)
            event.listen(Engine, "after_execute", _nothing_after)
    elif not event.contains(Engine, "before_execute", rewrite.before_execute):
        _install._installed = False
        _install.install()


def _nothing(
    _connection: Any, statement: Any, multiparams: Any, params: Any, _options: Any
) -> tuple[Any, Any, Any]:
    return statement, multiparams, params


def _nothing_after(
    _connection: Any, _statement: Any, _multiparams: Any, _params: Any, _options: Any, _result: Any
) -> None:
    return
