"""A leader gets a successor, with every authority that can grant the terms."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from fencelock import leader
from tests.authorities.kinds import MAKERS, SORTS, Kind


@pytest.fixture(params=SORTS)
def kind(request: pytest.FixtureRequest) -> Iterator[Kind]:
    yield from MAKERS[request.param](request)


@pytest.mark.timed
@pytest.mark.long
def test_successor_leads_with_a_larger_token(kind: Kind) -> None:
    """It waits for the end of the term, and is told when that was released."""
    first: Any = kind.make()
    second: Any = kind.make()
    terms: list[tuple[float, int]] = []

    def follow() -> None:
        with leader("boss", ttl=3.0, authority=second) as term:
            assert term.is_current
            terms.append((time.monotonic(), term.token))

    follower = threading.Thread(target=follow)
    with leader("boss", ttl=3.0, authority=first) as term:
        follower.start()
        time.sleep(4.0)  # it is renewed
        assert term.is_current
        assert not terms
        token = term.token
    ended = time.monotonic()
    follower.join(20.0)
    ((began, later),) = terms
    assert later > token
    assert began - ended < 2.0
    for each in (first, second):
        each.close()
