"""Telling SQLAlchemy's engines for coroutines apart, without loading them for those who have none.

They need greenlet, which SQLAlchemy brings along only when asked to (`sqlalchemy[asyncio]`). Who has such
an engine has loaded it.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, TypeGuard

from sqlalchemy import Engine, NullPool, create_engine, make_url
from sqlalchemy.exc import ArgumentError

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncEngine, async_scoped_session, async_sessionmaker

_MODULE = "sqlalchemy.ext.asyncio"


def is_async_engine(thing: object) -> TypeGuard[AsyncEngine]:
    """Whether it is an `AsyncEngine`."""
    return _is(thing, "AsyncEngine")


def is_async_maker(thing: object) -> TypeGuard[async_sessionmaker[Any]]:
    """Whether it is an `async_sessionmaker`."""
    return _is(thing, "async_sessionmaker")


def is_async_scoped(thing: object) -> TypeGuard[async_scoped_session[Any]]:
    """Whether it is an `async_scoped_session`."""
    return _is(thing, "async_scoped_session")


def blocking_engine(url: str) -> Engine:
    """Return an engine for one short look into a database, which keeps no connection.

    Raises:
        SQLAlchemyError: the URL cannot be understood, or its driver is one for coroutines.
        ImportError: the driver is not installed.
    """
    made = make_url(url)
    if made.get_dialect().is_async:
        raise ArgumentError(
            f"the driver {made.get_driver_name()} is for coroutines: write postgresql+psycopg://, "
            "mysql+pymysql:// or sqlite:// instead"
        )
    return create_engine(made, poolclass=NullPool)


def _is(thing: object, name: str) -> bool:
    module = sys.modules.get(_MODULE)
    return module is not None and isinstance(thing, getattr(module, name, ()))
