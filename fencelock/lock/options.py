"""The settings of a lock, as `fenced_lock` and `configure` take them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal, TypedDict

from fencelock.authority.base import Authority

if TYPE_CHECKING:
    from sqlalchemy import Engine
    from sqlalchemy.ext.asyncio import AsyncEngine

IfLost = Literal["raise", "warn"]


DEFAULT_TTL: Final = 30.0


class LockSettings(TypedDict, total=False):
    """The settings of a lock, save its authority; `fenced_lock` says what they mean, and their defaults."""

    ttl: float
    timeout: float | None
    renew: bool
    max_hold: float | None
    fair: bool
    if_lost: IfLost
    seal: Engine | AsyncEngine | None


class AllLockSettings(LockSettings, total=False):
    """The settings of a lock, and its authority."""

    authority: Authority | None
