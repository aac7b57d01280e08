"""A lock whose keys another program has overwritten says so in its error. Other locks go on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import redis

from fencelock import CountersExhaustedError, LockTimeoutError, Redlock
from proof.servers import Nodes
from tests.redlock.stage import NODE_KEY, stripe_of

LOCK, QUEUE, SILENT = (f"{NODE_KEY}:{kind}:order:1" for kind in "lqs")
CLIENT = "0123456789abcdef"
NONCE = f"{CLIENT}0198765432a"

Write = Callable[[Any], object]

#: Values in the place of a lock.
HELD: dict[str, Write] = {
    "a list": lambda node: node.rpush(LOCK, "x"),
    "another value, and a queue that is none": lambda node: (node.set(QUEUE, "x"), node.set(LOCK, "someone")),
    "an epoch too large": lambda node: node.set(LOCK, f"{NONCE}|99999999|5"),
    "a counter of 0": lambda node: node.set(LOCK, f"{NONCE}|0|0"),
    "5000 digits": lambda node: node.set(LOCK, f"{NONCE}|1|{'9' * 5000}"),
    "no UTF-8": lambda node: node.set(LOCK, b"\xff\xfe\x00|\xff", px=60_000),
    "a value without an end": lambda node: node.set(LOCK, "plain"),
    "an end in three million years": lambda node: node.set(LOCK, "plain", px=10**17),
    "nothing": lambda node: node.set(LOCK, "", px=60_000),
    "a claim without an end": lambda node: node.set(LOCK, ">x.1"),
    "a client that is a list": lambda node: (
        node.set(LOCK, f"{NONCE}|0|1", px=60_000),
        node.rpush(f"{NODE_KEY}:w:{CLIENT}", "x"),
    ),
    "a process id of 5000 digits": lambda node: (
        node.set(LOCK, f"{NONCE}|0|1", px=60_000),
        node.set(f"{NODE_KEY}:w:{CLIENT}", f"host {'1' * 5000} program"),
    ),
}
#: Values in the place of the queue and of the silent clients.
FREE: dict[str, Write] = {
    "a queue that is a string": lambda node: node.set(QUEUE, "x"),
    "silent clients that are a list": lambda node: node.rpush(SILENT, "x"),
    "a queue of odd places": lambda node: node.zadd(QUEUE, {"": 1, "no dot": 2, b"\xff.\xff": 3}),
}
COUNTERS = ("abc", "-5", "1e300", "17592186044415", "1.5", "nan", "")


def write(nodes: Nodes, how: Write) -> None:
    for node in nodes:
        with redis.Redis.from_url(node.url) as client:
            how(client)


def take(authority: Redlock, name: str = "order:1", *, timeout: float = 30.0, fair: bool = False) -> int:
    with authority.lock(name, timeout=timeout, fair=fair) as token:
        return token


@pytest.mark.parametrize("what", HELD)
def test_what_is_in_the_place_of_a_lock(authority: Redlock, nodes: Nodes, what: str) -> None:
    """It holds the lock, for all that is known; a sentence says so, and it can be freed."""
    write(nodes, HELD[what])
    with pytest.raises(
        LockTimeoutError, match=r"no lease of fencelock|held for ever|an unknown process|program"
    ):
        take(authority, timeout=0.3)
    assert take(authority, "other")
    assert authority.lock("order:1").locked()
    (info,) = authority.inspect()
    again = authority.inspect("order:1")
    assert again is not None
    assert replace(info, remaining=0) == replace(again, remaining=0)
    assert info.resource == "order:1"
    assert authority.force_release("order:1") is not None
    assert authority.inspect() == []
    assert take(authority)


@pytest.mark.parametrize("what", FREE)
def test_what_is_in_the_place_of_what_helps(
    authority: Redlock, rival: Redlock, nodes: Nodes, what: str
) -> None:
    write(nodes, FREE[what])
    assert take(authority)
    assert authority.inspect() == []
    with rival.lock("order:1"), suppress(LockTimeoutError):
        take(authority, timeout=0.3)
    assert take(authority, fair=True)
    assert authority.inspect() == []


def test_what_is_in_the_place_of_a_counter(authority: Redlock, nodes: Nodes) -> None:
    stripe = f"c{stripe_of('order:1')}"
    for counter in COUNTERS:
        before = take(authority)
        write(nodes, lambda node, counter=counter: node.hset(NODE_KEY, stripe, counter))  # type: ignore[misc]
        with pytest.raises(CountersExhaustedError, match="another program has written"):
            take(authority)
        assert authority.inspect() == []
        assert take(authority, "other")
        write(nodes, lambda node, before=before: node.hset(NODE_KEY, stripe, before))  # type: ignore[misc]
        assert take(authority) > before


@pytest.mark.parametrize("what", [*list(HELD)[:2], *list(FREE)[:2]])
def test_no_other_lock_of_a_batch_hears_of_it(authority: Redlock, nodes: Nodes, what: str) -> None:
    write(nodes, {**HELD, **FREE}[what])

    async def one(number: int) -> object:
        try:
            async with authority.lock(f"order:{number}", timeout=0.5 if number == 1 else 60) as token:
                return token
        except LockTimeoutError as error:
            return error

    async def main() -> list[object]:
        async with authority.lock("warm"):
            pass
        return await asyncio.gather(*map(one, range(100)))

    found = asyncio.run(main())
    odd = [number for number, each in enumerate(found) if not isinstance(each, int)]
    assert odd == ([1] if what in HELD else [])
