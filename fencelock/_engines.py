"""SQLAlchemy's engines: blocking or for coroutines, and engines that fencelock makes for itself.

Nothing here imports SQLAlchemy's asyncio part, which needs greenlet (`sqlalchemy[asyncio]`). A program that
has an `AsyncEngine` has imported it.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeGuard

from sqlalchemy import URL, Engine, MetaData, NullPool, create_engine, make_url
from sqlalchemy.exc import ArgumentError, NoSuchModuleError

from fencelock._checks import IN_URLS

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_scoped_session, async_sessionmaker

#: The blocking drivers; for SQLite, SQLAlchemy's default is one.
_FOR_BLOCKING = {"postgresql": "postgresql+psycopg", "mysql": "mysql+pymysql", "mariadb": "mariadb+pymysql"}
_MODULE = "sqlalchemy.ext.asyncio"


def shown(url: URL) -> str:
    """Return a URL without its password, which some drivers also take in its query."""
    hidden = {name: "PASSWORD" for name in url.query if "pass" in name.lower()}
    return url.update_query_dict(hidden).render_as_string()


def is_async_engine(thing: object) -> TypeGuard[AsyncEngine]:
    return _is(thing, "AsyncEngine")


def is_async_maker(thing: object) -> TypeGuard[async_sessionmaker[Any]]:
    return _is(thing, "async_sessionmaker")


def is_async_scoped(thing: object) -> TypeGuard[async_scoped_session[Any]]:
    return _is(thing, "async_scoped_session")


def is_async_session(thing: object) -> TypeGuard[AsyncSession]:
    return _is(thing, "AsyncSession")


def blocking_engine(url: str) -> Engine:
    """Return an engine for short work on a database; it keeps no connection open."""
    return create_engine(with_blocking_driver(url_of(url)), poolclass=NullPool)


def check_metadata(function: str, metadata: object) -> None:
    if not isinstance(metadata, MetaData):
        raise TypeError(f"{function} takes a MetaData, such as Base.metadata, not {metadata!r}")


def url_of(source: object) -> URL:
    """Return the URL of an engine, or `source` itself as a URL; raise TypeError or ValueError for others."""
    if isinstance(source, Engine) or is_async_engine(source):
        return source.url
    if not isinstance(source, str | URL):
        raise TypeError(f"a database is named by a URL or an Engine, not by {type(source).__name__}")
    with suppress(ArgumentError, ValueError):  # whose text could show a part of a password
        url = make_url(source.strip() if isinstance(source, str) else source)
        if "@" not in (url.host or ""):
            return url
    raise ValueError(
        "this is no URL of a database, such as postgresql+psycopg://user@host:5432/name or sqlite:///app.db; "
        f"{IN_URLS}"
    )


def for_blocking(url: URL) -> URL:
    name = url.get_backend_name()
    return url.set(drivername=_FOR_BLOCKING.get(name, name))


def with_blocking_driver(url: URL) -> URL:
    """Return the URL; if its driver is for coroutines, with a blocking driver instead."""
    with suppress(NoSuchModuleError):  # it is refused where the URL is used
        if url.get_dialect().is_async:
            return for_blocking(url)
    return url


def _is(thing: object, name: str) -> bool:
    module = sys.modules.get(_MODULE)
    return module is not None and isinstance(thing, getattr(module, name, ()))
