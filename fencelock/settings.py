"""Which authority grants leases unless one is named: `configure()`, or the environment's FENCELOCK_URL."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from typing import Any, TypeVar, cast, overload

from fencelock.authority.base import Authority
from fencelock.authority.redlock.places import Source, is_source
from fencelock.authority.redlock.redlock import Redlock
from fencelock.errors import AuthorityError

_Authority = TypeVar("_Authority", bound=Authority)

_lock = threading.RLock()  # for signal handlers that lock, and strike in the midst of it
_default: Authority | None = None


@overload
def configure(authority: Source | Sequence[Source], **options: Any) -> Redlock: ...
@overload
def configure(authority: _Authority) -> _Authority: ...
def configure(authority: Source | Sequence[Source] | Authority, **options: Any) -> Authority:
    """Make an authority the default of this process, and return it.

    Connections are opened when they are first needed. Without this call, FENCELOCK_URL is used.

    Args:
        authority: URLs of the nodes (with commas between) or clients of redis-py, as `Redlock` takes them; or
            a ready authority.
        **options: settings of `Redlock`, where nodes are given.

    Raises:
        ValueError: for a URL or a setting that cannot be understood.
        TypeError: for options beside a ready authority.
    """
    global _default  # noqa: PLW0603 - the process default is what this module is about
    if is_source(authority) or isinstance(authority, Sequence):
        made: Authority = Redlock(cast("Source | Sequence[Source]", authority), **options)
    elif not callable(getattr(authority, "acquire", None)):
        raise TypeError(
            f"an authority is made of URLs or redis.Redis clients, and not of {type(authority).__name__}"
        )
    elif options:
        raise TypeError(f"{authority!r} has its settings already; these belong to it: {', '.join(options)}")
    else:
        made = cast("Authority", authority)
    with _lock:
        _default = made
    return made


def default_authority() -> Authority:
    """Return the default of this process.

    Raises:
        AuthorityError: if none has been configured.
    """
    global _default  # noqa: PLW0603 - the process default is what this module is about
    with _lock:
        if _default is None:
            url = os.environ.get("FENCELOCK_URL", "")
            if not url.strip():
                raise AuthorityError(
                    "no nodes are configured: call fencelock.configure('redis://host:6379,…') "
                    "or set the environment variable FENCELOCK_URL"
                )
            _default = Redlock(url)
        return _default
