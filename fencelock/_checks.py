"""Checks of settings: they raise TypeError or ValueError, with a message that says which values work."""

from __future__ import annotations

import inspect
import math
from typing import Final, TypeVar

_R = TypeVar("_R")

MIN_TTL = 0.01
MAX_TTL = 604_800.0
HOUR = 3_600.0
EVER = 1e9  # seconds, more than fencelock exists
IN_URLS: Final = (
    "in the names and passwords of a URL, write % as %25, @ as %40, / as %2F, ? as %3F and : as %3A"
)


def check_seconds(name: str, value: object, *, zero: bool = False, more: str = "") -> float:
    """Return a positive, finite number of seconds, or 0 if `zero` allows it; a ValueError quotes `more`."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} is a number of seconds, not {value!r}")
    if not math.isfinite(value) or value < 0 or (value == 0 and not zero):
        raise ValueError(f"{name} is a {'' if zero else 'positive '}number of seconds{more}, not {value!r}")
    return float(value)


def check_flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{name} is True or False, not {value!r}")
    return value


def check_callback(name: str, argument: str, callback: object) -> None:
    """Raise TypeError unless `callback` can be called, and is no coroutine function."""
    if not callable(callback) or inspect.iscoroutinefunction(callback):
        raise TypeError(f"{name} takes a plain function of the {argument}, not {callback!r}")


def check_result(name: str, result: _R) -> _R:
    """Return the result of a plain function; raise TypeError for a coroutine, because it has not run yet."""
    if inspect.iscoroutine(result):
        result.close()
        raise TypeError(
            f"{name} returned a coroutine, which would run after the release: pass the coroutine function "
            "itself, or await it in an `async def`"
        )
    return result


def check_older_than(value: object) -> float:
    """Return `value` as an age in seconds: an hour at least, and at most longer than fencelock exists."""
    seconds = check_seconds("older_than", value, zero=True)
    if seconds < HOUR:
        raise ValueError(f"older_than is at least an hour, {HOUR:g} s, not {value!r}")
    return min(seconds, EVER)


def check_ttl(value: object) -> float:
    ttl = check_seconds("ttl", value)
    if ttl > MAX_TTL:
        raise ValueError(
            f"a ttl of {ttl:g} s is longer than a week, and after a crash the lock stays held for that "
            "time. Use a shorter ttl: the lease is renewed while its block lasts, up to max_hold"
        )
    if ttl < MIN_TTL:
        raise ValueError(f"a ttl of {ttl:g} s leaves no time to work: use at least {MIN_TTL:g} s")
    return ttl


def check_timeout(value: object) -> float | None:
    """Return `value` as the seconds to wait: 0 for one try, None for ever."""
    more = " (0 for one try), or None to wait for ever"
    return None if value is None else check_seconds("timeout", value, zero=True, more=more)


def check_at_least(value: object) -> float:
    seconds = check_seconds("at_least", value, more=", or None")
    if seconds > MAX_TTL:
        raise ValueError(
            f"at_least of {seconds:g} s is longer than a week, and for that time no other worker can have "
            "the lock: use a shorter one"
        )
    return seconds


def check_max_hold(value: object, ttl: float) -> float | None:
    """Return `value` as the longest hold in seconds, which is at least the ttl; None for no limit."""
    if value is None:
        return None
    max_hold = check_seconds("max_hold", value, more=", or None for no limit")
    if max_hold < ttl:
        shorter = f"max_hold of {max_hold:g} s is shorter than the ttl of {ttl:g} s"
        raise ValueError(f"{shorter}: make the ttl shorter, or max_hold longer")
    return max_hold
