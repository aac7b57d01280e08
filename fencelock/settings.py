"""The settings of a lock; and its authority unless it names one: `configure()`, or FENCELOCK_URL."""

from __future__ import annotations

import importlib
import os
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, Literal, TypedDict, TypeVar, overload

from sqlalchemy import URL, Engine

from fencelock._engines import is_async_engine
from fencelock.authority.base import Authority
from fencelock.errors import AuthorityError

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncEngine

    from fencelock.authority.database.database import Database
    from fencelock.authority.redlock.redlock import Redlock
    from fencelock.authority.redlock.transport.endpoints import Source

_Authority = TypeVar("_Authority", bound=Authority)

IfLost = Literal["raise", "warn"]
DEFAULT_TTL: Final = 30.0


class LockSettings(TypedDict, total=False):
    """The settings of a lock, save its authority; `fenced_lock` says what they mean, and their defaults."""

    ttl: float
    timeout: float | None
    renew: bool
    max_hold: float | None
    fair: bool
    reentrant: bool
    if_lost: IfLost


class AllLockSettings(LockSettings, total=False):
    """The settings of a lock, and its authority."""

    authority: Authority | None


_REDLOCK: Final = "fencelock.authority.redlock.redlock:Redlock"
DATABASE: Final = "fencelock.authority.database.database:Database"
#: What makes an authority of a URL, by its scheme before any `+`. It is imported when it is first needed.
FACTORIES: Final[dict[str, str]] = {
    **dict.fromkeys(("redis", "rediss", "valkey", "valkeys", "unix"), _REDLOCK),
    **dict.fromkeys(("postgresql", "mysql", "mariadb", "sqlite"), DATABASE),
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
    with _lock:
        _default = made
    return made


def factory_of(url: str) -> str:
    """Return which of the factories makes an authority of a URL; ValueError where none does."""
    before, mark, _ = url.strip().partition("://")
    scheme = before.partition("+")[0].lower()
    if scheme not in FACTORIES:
        shown = repr(scheme) if mark else "a text without ://"  # which may have a password
        raise ValueError(
            f"{shown} names nothing that grants leases: write a URL such as sqlite:///app.db, "
            "postgresql+psycopg://user@host/name, mysql+pymysql://user@host/name or redis://host:6379"
        )
    return FACTORIES[scheme]


def _make(source: object, options: dict[str, Any]) -> Authority:
    if isinstance(source, str):
        factory = factory_of(source)
    elif isinstance(source, URL | Engine) or is_async_engine(source):
        factory = DATABASE
    elif isinstance(source, Sequence) or callable(getattr(source, "execute_command", None)):
        factory = _REDLOCK
    else:
        raise TypeError(
            "what grants leases is made of a URL, an engine of SQLAlchemy or clients of redis-py, and not of "
            f"{type(source).__name__}"
        )
    module, _, name = factory.partition(":")
    made: Authority = getattr(importlib.import_module(module), name)(source, **options)
    return made


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
