"""The settings of a lock."""

from __future__ import annotations

from typing import Final, Literal, TypedDict

from fencelock.authority.base import Authority

IfLost = Literal["raise", "warn"]
IfHeld = Literal["wait", "skip"]
DEFAULT_TTL: Final = 30.0


class LockSettings(TypedDict, total=False):
    """The settings of a lock, except its authority; `fenced_lock` documents them, and their defaults."""

    ttl: float
    timeout: float | None
    renew: bool
    max_hold: float | None
    fair: bool
    reentrant: bool
    if_lost: IfLost
    if_held: IfHeld
    at_least: float | None
    shared: bool
    readers: int | None


class AllLockSettings(LockSettings, total=False):
    """The settings of a lock, and its authority."""

    authority: Authority | None
