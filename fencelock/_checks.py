"""Refusing settings that cannot work, in words that say what would."""

from __future__ import annotations

import math
from typing import TypeVar

_Choice = TypeVar("_Choice", bound=str)

MIN_TTL = 0.01


def check_seconds(name: str, value: object, *, zero: bool = False) -> float:
    """Return `value` if it is a positive, finite number of seconds (or 0, where `zero` allows it).

    Raises:
        TypeError: if it is no number.
        ValueError: if it is out of range.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} is a number of seconds, not {value!r}")
    if not math.isfinite(value) or value < 0 or (value == 0 and not zero):
        raise ValueError(f"{name} is a {'' if zero else 'positive '}number of seconds, not {value!r}")
    return float(value)


def check_ttl(value: object) -> float:
    """Return `value` if a lease can last so many seconds.

    Raises:
        TypeError: if it is no number.
        ValueError: if it is not positive and finite, or too short to leave any validity.
    """
    ttl = check_seconds("ttl", value)
    if ttl < MIN_TTL:
        raise ValueError(f"a ttl of {ttl:g} s leaves no time to work: use at least {MIN_TTL:g} s")
    return ttl


def check_timeout(value: object) -> float | None:
    """Return `value` if it says how long to wait: seconds, 0 for one try, None for ever.

    Raises:
        TypeError: if it is no number.
        ValueError: if it is negative or not finite.
    """
    if value is None:
        return None
    try:
        return check_seconds("timeout", value, zero=True)
    except ValueError:
        raise ValueError(f"timeout is 0 seconds or more, or None to wait for ever; not {value!r}") from None


def check_max_hold(value: object, ttl: float) -> float | None:
    """Return `value` if a lease of `ttl` seconds can be held for so long; None is for ever.

    Raises:
        TypeError: if it is no number.
        ValueError: if it is not positive and finite, or shorter than the ttl.
    """
    if value is None:
        return None
    try:
        max_hold = check_seconds("max_hold", value)
    except ValueError:
        raise ValueError(
            f"max_hold is a positive number of seconds, or None for no limit; not {value!r}"
        ) from None
    if max_hold < ttl:
        raise ValueError(
            f"max_hold of {max_hold:g} s is shorter than the ttl of {ttl:g} s: make the ttl shorter, "
            "or max_hold longer"
        )
    return max_hold


def check_choice(name: str, value: _Choice, choices: tuple[_Choice, ...]) -> _Choice:
    """Return `value` if it is one of the choices.

    Raises:
        ValueError: if it is not.
    """
    if value not in choices:
        raise ValueError(f"{name} is one of {', '.join(map(repr, choices))}; not {value!r}")
    return value
