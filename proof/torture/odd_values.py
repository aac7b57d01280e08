"""The fault of another program that writes into the keys of a lock, on every node."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import redis

from fencelock.authority.redlock.protocol.attempts import names_of
from fencelock.errors import FencelockError
from proof.torture.history import COUNTER
from proof.torture.plan import names
from proof.torture.stage import Stage

#: What a counter is raised to afterwards, beyond all that it has granted.
_RAISED_BY: Final = 1_000_000
#: Meanwhile a node that voted may have been told a higher one than that.
_RAISE: Final = """
local counter = tonumber(redis.call('HGET', KEYS[1], ARGV[1]))
if counter and counter >= tonumber(ARGV[2]) and counter < 2^44 then return end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
"""
_COUNTERS: Final = ("abc", "-5", "1e300", "nan", "1.5", "")

Write = Callable[[Any, str], object]

#: Values that are written into a lock's key, and then hold the lock.
_LOCKS: Final[Mapping[str, Write]] = {
    "a list": lambda node, key: node.rpush(key, "x"),
    "a number": lambda node, key: node.set(key, "7"),
    "no UTF-8": lambda node, key: node.set(key, b"\xff\xfe\x00|\xff"),
    "an epoch too large": lambda node, key: node.set(key, "0123456789abcdef0198765432a|99999999|5"),
    "5000 digits": lambda node, key: node.set(key, f"0123456789abcdef0198765432a|1|{'9' * 5000}"),
    "a claim without an end": lambda node, key: node.set(key, ">x.1"),
}
#: Values in the place of a queue, and of the clients that were called in vain.
_LINES: Final[Mapping[str, Write]] = {
    "a text for a line": lambda node, key: node.set(key, "x"),
    "a line of odd places": lambda node, key: node.zadd(key, {"": 1, "no dot": 2, b"\xff.\xff": 3}),
}


def write_odd_values(stage: Stage, rng: random.Random) -> None:
    assert stage.authority is not None
    resource = rng.choice(names(stage.settings))
    seconds = rng.uniform(0.2, 1) * stage.settings.ttl
    # A large lock may share the counter by one of its hundreds of names.
    what = rng.choice([*_LOCKS, *_LINES, *([] if "partial-write" in stage.settings.faults else [COUNTER])])
    stripe = _stripe(resource)
    hit = [each for each in names(stage.settings) if _stripe(each) == stripe]
    with stage.fault("odd-value", *(f"resource {each}" for each in hit)) as note:
        note.detail = what
        key = f"{{{stage.namespace}}}"
        if what == COUNTER:
            found = _each(stage, lambda node: node.hmget(key, "b", f"c{stripe}"))
            above = max(int(each or 0) for numbers in found for each in numbers) + _RAISED_BY
            _each(stage, lambda node: node.hset(key, f"c{stripe}", rng.choice(_COUNTERS)))
            stage.sleep(seconds)
            _each(stage, lambda node: node.eval(_RAISE, 1, key, f"c{stripe}", above))
            return
        keys = [f"{key}:{kind}:{resource}" for kind in ("l" if what in _LOCKS else "qs")]
        _each(stage, lambda node: _replace(node, keys, what))
        stage.sleep(seconds)
        if what in _LOCKS:
            try:
                stage.authority.force_release(resource)
            except FencelockError as error:
                stage.trouble.append(f"{resource} with {what} could not be freed: {error}")
        else:
            _each(stage, lambda node: node.delete(*keys))


def _replace(node: redis.Redis, keys: Sequence[str], what: str) -> None:
    node.delete(*keys)
    for key in keys:
        {**_LOCKS, **_LINES}[what](node, key)


def _each(stage: Stage, do: Callable[[Any], Any]) -> list[Any]:
    done = []
    for each in stage.nodes:
        with redis.Redis.from_url(each.url, socket_timeout=10) as node:
            done.append(do(node))
    return done


def _stripe(resource: str) -> int:
    _, (stripe,) = names_of("", (resource,))
    return stripe
