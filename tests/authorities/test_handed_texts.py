"""A text of `hand_over` that comes from outside does no harm to other names."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, cast

import pytest

from fencelock import LockLostError, take_over
from fencelock.errors import FencelockError
from fencelock.tokens import MAX_COUNTER, MAX_TOKEN
from tests.authorities.kinds import IN_PROCESSES
from tests.authorities.stage import Stage

HANDED = "fencelock lease 1"

pytestmark = pytest.mark.parametrize("stage", IN_PROCESSES, indirect=True)


def handed(stage: Stage, *names: str) -> dict[str, Any]:
    """Lock, hand over, and return what the text says."""
    client: Any = stage.new_client()
    lock = client.lock(*names, ttl=60, renew=False)
    with lock:  # so that there was a smaller token
        pass
    lock.acquire()
    its: dict[str, Any] = json.loads(lock.hand_over())[HANDED]
    return its


def enter(stage: Stage, its: object) -> object:
    """Take over what a text says, blocking; return the token."""
    lock = take_over(json.dumps({HANDED: its}), authority=cast("Any", stage.new_client()))
    with lock as token:
        return token


def test_the_text_itself_is_taken(stage: Stage) -> None:
    for names in (("a",), ("a", "b")):
        its = handed(stage, *names)
        token = enter(stage, its)
        assert its["tokens"] == ([token] if len(names) == 1 else list(token))  # type: ignore[call-overload]
        client: Any = stage.new_client()
        assert client.inspect() == []


OTHERS: dict[str, Callable[[int], int]] = {
    "one more": lambda it: it + 1,
    "one less": lambda it: it - 1,
    "the largest": lambda _: MAX_TOKEN,
    "the last of the epoch": lambda _: MAX_COUNTER,
}


def test_another_token_than_the_one_that_was_granted_is_refused(stage: Stage) -> None:
    its = handed(stage, "a", "b")
    first, second = its["tokens"]
    for other in OTHERS.values():
        with pytest.raises(LockLostError, match="not that of its lock"):
            enter(stage, {**its, "tokens": [other(first), second]})
    client: Any = stage.new_client()
    assert {info.resource for info in client.inspect()} == {"a", "b"}
    assert enter(stage, its) == (first, second)
    with client.lock("a", timeout=20) as token:
        assert first < token < first + 100_000_000_000_000


def test_a_forged_text_stops_no_lock_of_another(stage: Stage) -> None:
    its = handed(stage, "mine")
    names = [f"name:{number}" for number in range(50)]
    forged = {**its, "resources": names, "tokens": [MAX_COUNTER] * len(names)}
    with pytest.raises(FencelockError):
        enter(stage, forged)
    client: Any = stage.new_client()
    for name in names[:10]:
        with client.lock(name, timeout=20) as token:
            assert 0 < token < MAX_TOKEN // 1000
    assert [info.resource for info in client.inspect()] == ["mine"]


WRONG: dict[str, Callable[[dict[str, Any]], object]] = {
    "ttl of another type": lambda its: {**its, "ttl": "abc"},
    "ttl without an end": lambda its: {**its, "ttl": float("inf")},
    "no ttl": lambda its: {**its, "ttl": -1},
    "a nonce that is a list": lambda its: {**its, "proof": {**its["proof"], "nonce": [1]}},
    "a nonce that is an object": lambda its: {**its, "proof": {**its["proof"], "nonce": {}}},
    "a long nonce": lambda its: {**its, "proof": {**its["proof"], "nonce": "a" * 100_000}},
    "a short nonce": lambda its: {**its, "proof": {**its["proof"], "nonce": "a"}},
    "no nonce": lambda its: {**its, "proof": {}},
    "proof of another type": lambda its: {**its, "proof": "x"},
    "resources of another type": lambda its: {**its, "resources": [1]},
    "a text for resources": lambda its: {**its, "resources": "a"},
    "no resources": lambda its: {**its, "resources": [], "tokens": []},
    "one resource twice": lambda its: {**its, "resources": ["a", "a"], "tokens": its["tokens"] * 2},
    "a name that is none": lambda its: {**its, "resources": ["a\n"]},
    "too many names": lambda its: {**its, "resources": [f"{n}" for n in range(5001)], "tokens": [1] * 5001},
    "more tokens than names": lambda its: {**its, "tokens": [1, 2]},
    "a token that is none": lambda its: {**its, "tokens": [1 << 63]},
    "no object": lambda _: ["a"],
}


def is_refused(stage: Stage, text: str) -> bool:
    """Return whether a ValueError refuses a text, before anything is asked."""
    try:
        take_over(text, authority=cast("Any", stage.new_client()))
    except ValueError as error:
        return "made by hand_over" in str(error)
    return False


UNREADABLE = {
    "lists in lists": "[" * 200_000,
    "objects in objects": '{"a":' * 100_000,
    "a long number": '{"fencelock lease 1": {"tokens": [' + "9" * 100_000 + "]}}",
    "nothing": "",
    "null": "null",
}


def test_a_text_that_is_none_is_refused(stage: Stage) -> None:
    its = handed(stage, "a")
    texts = {wrong: json.dumps({HANDED: change(its)}) for wrong, change in WRONG.items()} | UNREADABLE
    assert [wrong for wrong, text in texts.items() if not is_refused(stage, text)] == []
