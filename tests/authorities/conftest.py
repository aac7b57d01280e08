"""The stage of each test: every sort of authority, half of them in asyncio."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.authorities.kinds import EACH_SORT, MAKERS
from tests.authorities.stage import Stage


@pytest.fixture(params=EACH_SORT)
def stage(request: pytest.FixtureRequest) -> Iterator[Stage]:
    """A kind and a world, as "quorum, blocking"; a test that needs others names them."""
    name, world = request.param.split(", ")
    with contextmanager(MAKERS[name])(request) as kind, Stage(kind, world) as made:
        yield made
