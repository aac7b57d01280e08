"""The tests of examples/sqlmodel_shop pass; the blocks of its page run it on a server."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.shops import Shop

pytestmark = pytest.mark.long


def test_its_own_tests_pass(tmp_path: Path) -> None:
    """Those that a reader copies."""
    Shop("sqlmodel_shop", tmp_path / "shop").check()
