"""The pytest plugin: each function of `fencelock.testing` as a fixture."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from fencelock import testing
from fencelock.authority.database.database import Database

_SCOPE = "fencelock_scope"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the setting `fencelock_scope`."""
    text = "how long the fixture fencelock_authority lives: function, class, module, package or session"
    parser.addini(_SCOPE, text, default="function")


def _scope(fixture_name: str, config: pytest.Config) -> Any:  # noqa: ARG001 - pytest calls it by keyword
    return config.getini(_SCOPE)


@pytest.fixture(scope=_scope)
def fencelock_authority(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Database]:
    """Let a temporary SQLite file grant the locks, for one test, or for the scope in `fencelock_scope`."""
    with testing.temporary_authority(tmp_path_factory.mktemp("fencelock")) as authority:
        yield authority


@pytest.fixture
def unfenced() -> Callable[..., Any]:
    """Return `fencelock.testing.unfenced`: in its block, writes need no lock."""
    return testing.unfenced


@pytest.fixture
def stale_writer(fencelock_authority: Database) -> Callable[..., Any]:  # noqa: ARG001
    """Return `fencelock.testing.stale_writer`: in its block, each write of a row is stale."""
    return testing.stale_writer


@pytest.fixture
def lost_lease(fencelock_authority: Database) -> Callable[..., Any]:  # noqa: ARG001
    """Return `fencelock.testing.lost_lease`: in its block, each lease of a resource is lost."""
    return testing.lost_lease


@pytest.fixture
def held_elsewhere(fencelock_authority: Database) -> Callable[..., Any]:  # noqa: ARG001
    """Return `fencelock.testing.held_elsewhere`: in its block, another thread holds a lock."""
    return testing.held_elsewhere
