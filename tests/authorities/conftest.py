"""The stage of each test: every kind of authority, in each world that can use it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.authorities.kinds import EACH_SERVER, MAKERS
from tests.authorities.stage import Stage


@pytest.fixture(params=EACH_SERVER)
def stage(request: pytest.FixtureRequest) -> Iterator[Stage]:
    """A kind and a world, as "quorum, blocking"; a test for others than each server names them."""
    name, world = request.param.split(", ")
    with contextmanager(MAKERS[name])(request) as kind, Stage(kind, world) as made:
        yield made
