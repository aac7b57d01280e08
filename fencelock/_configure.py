"""The authority of locks that name none: that of `configure()`, or of FENCELOCK_URL."""

from __future__ import annotations

import logging
import os
import re
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, overload

from sqlalchemy import URL, Engine

from fencelock._engines import is_async_engine
from fencelock.authority.base import Authority
from fencelock.authority.database.database import Database
from fencelock.authority.redlock.redlock import Redlock
from fencelock.authority.redlock.transport.endpoints import Source
from fencelock.errors import AuthorityError

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncEngine


_Authority = TypeVar("_Authority", bound=Authority)

logger = logging.getLogger("fencelock.authority")

#: What makes an authority of a URL, by its scheme before any `+`.
_FACTORIES: dict[str, Callable[..., Redlock | Database]] = {
    **dict.fromkeys(("redis", "rediss", "valkey", "valkeys", "unix"), Redlock),
    **dict.fromkeys(("postgresql", "mysql", "mariadb", "sqlite"), Database),
}

_lock = threading.RLock()  # for signal handlers that lock, and strike in the midst of it
_default: Authority | None = None


@overload
def configure(authority: str, **options: Any) -> Redlock | Database: ...
@overload
def configure(authority: Engine | AsyncEngine | URL, **options: Any) -> Database: ...
@overload
def configure(authority: Source | Sequence[Source], **options: Any) -> Redlock: ...
@overload
def configure(authority: _Authority) -> _Authority: ...
def configure(authority: Any, **options: Any) -> Any:
    """Make an authority the default of this process, and return it.

    Connections are opened when they are first needed. Without this call, FENCELOCK_URL is used.

    Args:
        authority: the URL of a database (`sqlite:///app.db`, `postgresql+psycopg://user@host/name`,
            `mysql+pymysql://user@host/name`) or an engine of SQLAlchemy; URLs of nodes (`redis://host:6379`,
            with commas between) or clients of redis-py; or a ready authority.
        **options: settings of `Database` or `Redlock`.

    Raises:
        ValueError: for a URL or a setting that cannot be understood.
        TypeError: for anything else, and for options beside a ready authority.
    """
    global _default  # noqa: PLW0603 - the process default is what this module is about
    ready = callable(getattr(authority, "acquire", None))
    if ready and options:
        raise TypeError(f"{authority!r} has its settings already; these belong to it: {', '.join(options)}")
    made = authority if ready else _make(authority, options)
    if (url := os.environ.get("FENCELOCK_URL", "")) and url != authority and _place(url) != _place(made):
        logger.warning(
            "configure() has named %r, and FENCELOCK_URL something else: it counts for commands, such as "
            "`fencelock run`, and not for this process",
            made,
        )
    with _lock:
        _default = made
    return made


def _place(authority: Any) -> object:
    """Return where an authority is, whatever its driver, user and settings."""
    if isinstance(authority, str):
        try:
            authority = _make(authority, {})
        except (ValueError, TypeError, ImportError):
            return None
    if isinstance(authority, Redlock):
        return {*authority.nodes}
    return re.sub(r"\+\w+(?=://)|(?<=//)[^@/]*@|:(?:5432|3306)(?=/)|\?.*|>$", "", repr(authority))


def factory_of(url: str) -> Callable[..., Redlock | Database]:
    """Return the class whose authorities have such a URL.

    Raises:
        ValueError: there is none.
    """
    before, mark, _ = url.strip().partition("://")
    scheme = before.partition("+")[0].lower()
    if scheme not in _FACTORIES:
        shown = repr(scheme) if mark else "a text without ://"  # which may have a password
        raise ValueError(
            f"{shown} names nothing that grants leases: write a URL such as sqlite:///app.db, "
            "postgresql+psycopg://user@host/name, mysql+pymysql://user@host/name or redis://host:6379"
        )
    return _FACTORIES[scheme]


def _make(source: Any, options: dict[str, Any]) -> Redlock | Database:
    if isinstance(source, str):
        return factory_of(source)(source, **options)
    if isinstance(source, URL | Engine) or is_async_engine(source):
        return Database(source, **options)
    if isinstance(source, Sequence) or callable(getattr(source, "execute_command", None)):
        return Redlock(source, **options)
    raise TypeError(f"an authority is a URL, an Engine or redis-py clients, not {type(source).__name__}")


def default_authority() -> Authority:
    """Return the default of this process; AuthorityError where none has been configured."""
    global _default  # noqa: PLW0603 - the process default is what this module is about
    with _lock:
        if _default is None:
            url = os.environ.get("FENCELOCK_URL", "")
            if not url.strip():
                raise AuthorityError(
                    "nothing is configured that grants leases. Add one line, with the database of this "
                    "project: fencelock.configure(engine), or fencelock.configure('sqlite:///app.db') where "
                    "all workers are on one machine. Nodes of Redis or Valkey do it, too: "
                    "fencelock.configure('redis://host:6379,…'). Or set the environment variable "
                    "FENCELOCK_URL to such a URL"
                )
            _default = _make(url, {})
        return _default
