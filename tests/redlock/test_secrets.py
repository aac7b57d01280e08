"""No error shows a password."""

from __future__ import annotations

from typing import Any

import pytest

import fencelock


@pytest.mark.parametrize(
    "wrong", [{"url": "redis://:s3cr3t@h"}, {"redis://:s3cr3t@h"}, [{"redis://:s3cr3t@h"}]]
)
def test_wrong_type_is_named_by_its_type(wrong: Any) -> None:
    """It may hold anything."""
    with pytest.raises(TypeError) as refused:
        fencelock.configure(wrong)
    assert "s3cr3t" not in str(refused.value)
