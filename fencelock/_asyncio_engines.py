"""Telling SQLAlchemy's engines for coroutines apart, without loading them for those who have none.

They need greenlet, which SQLAlchemy brings along only when asked to (`sqlalchemy[asyncio]`). Who has such
an engine has loaded it.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, TypeGuard

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


def _is(thing: object, name: str) -> bool:
    module = sys.modules.get(_MODULE)
    return module is not None and isinstance(thing, getattr(module, name, ()))
