"""Every authority on every server there is: how a test makes clients of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import pytest

from fencelock import Redlock
from fencelock.embedded import Nodes
from tests.authorities.faces import Client


@dataclass(frozen=True, slots=True)
class Kind:
    """One authority on one server.

    Attributes:
        name: of the authority, its server and its driver.
        make: returns a new client, with connections of its own, on the same server.
        url: what `fencelock.configure` takes in a child process.
    """

    name: str
    make: Callable[[], Client]
    url: str


def _quorum(request: pytest.FixtureRequest, count: int) -> Iterator[Kind]:
    nodes: Nodes = request.getfixturevalue("nodes")
    urls = nodes.urls[:count]
    with Redlock(urls) as first:
        first.init(base=0)
    yield Kind(f"quorum of {count}", lambda: Redlock(urls), ",".join(urls))


def _five(request: pytest.FixtureRequest) -> Iterator[Kind]:
    return _quorum(request, 5)


def _one(request: pytest.FixtureRequest) -> Iterator[Kind]:
    return _quorum(request, 1)


#: How each kind is made, with the fixtures of real servers.
MAKERS: Final[dict[str, Callable[[pytest.FixtureRequest], Iterator[Kind]]]] = {
    "quorum": _five,
    "one-node": _one,
}

#: The kinds that blocking code can use.
BLOCKING: Final = tuple(f"{name}, blocking" for name in MAKERS)
#: The kinds that asyncio can use.
ASYNCIO: Final = tuple(f"{name}, asyncio" for name in MAKERS)
EVERYWHERE: Final = (*BLOCKING, *ASYNCIO)
