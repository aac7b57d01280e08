"""Listeners for what the tests of this folder cause."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fencelock.observe import Event, forget, on_event


@pytest.fixture
def events() -> Iterator[list[Event]]:
    """What has been told since the test began."""
    found: list[Event] = []
    on_event(found.append)
    yield found
    forget(found.append)
