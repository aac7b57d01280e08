"""The stores, and the controls, which compare nothing. Run as a program, it races.

A place is a text that names one: `redis redis://host:port`, `file /folder`, or with `naive-` before it.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any, Protocol

import redis

from fencelock import StaleTokenError
from fencelock.stores.file import FencedFile
from fencelock.stores.redis import FencedValue

RESOURCE = "report:1"


class Store(Protocol):
    def read(self) -> bytes | None: ...

    def write(self, content: bytes, *, token: int | None = None) -> None: ...


class Value(FencedValue):
    read = FencedValue.get
    write = FencedValue.set


class NaiveValue:
    """A value in Redis without a token."""

    def __init__(self, client: redis.Redis) -> None:
        self._client = client

    def read(self) -> Any:
        return self._client.get("naive")

    def write(self, content: bytes, *, token: int | None = None) -> None:
        del token
        self._client.set("naive", content)


class NaiveFile:
    """A file that is replaced, as one does it: without a token."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self._path = folder / "naive"

    def read(self) -> bytes | None:
        return self._path.read_bytes() if self._path.exists() else None

    def write(self, content: bytes, *, token: int | None = None) -> None:
        new = self._path.with_suffix(f".{token}")
        new.write_bytes(content)
        new.replace(self._path)


def store_at(place: str) -> Store:
    kind, _, where = place.partition(" ")
    match kind:
        case "redis":
            return Value(redis.Redis.from_url(where), "a key", resource=RESOURCE)
        case "naive-redis":
            return NaiveValue(redis.Redis.from_url(where))
        case "file":
            return FencedFile(where, resource=RESOURCE)
        case _:
            return NaiveFile(Path(where))


def race(place: str, seed: int, count: int) -> None:
    store, tokens = store_at(place), list(range(seed + 1, 4 * count + 1, 4))
    random.Random(seed).shuffle(tokens)
    for token in tokens:
        try:
            store.write(b"%d" % token, token=token)
        except StaleTokenError as error:
            if (error.current or 0) <= token:
                raise
        else:
            assert int(store.read() or b"") >= token, f"token {token} was accepted and is lost"
    assert int(store.read() or b"") >= max(tokens), "an older value is back"


if __name__ == "__main__":
    race(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
