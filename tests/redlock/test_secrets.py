"""No error shows a password."""

from __future__ import annotations

from typing import Any

import pytest

import fencelock
from fencelock.authority.redlock.transport.endpoints import endpoint_of


@pytest.mark.parametrize(
    "wrong", [{"url": "redis://:s3cr3t@h"}, {"redis://:s3cr3t@h"}, [{"redis://:s3cr3t@h"}]]
)
def test_wrong_type_is_named_by_its_type(wrong: Any) -> None:
    """It may hold anything."""
    with pytest.raises(TypeError) as refused:
        fencelock.configure(wrong)
    assert "s3cr3t" not in str(refused.value)


@pytest.mark.parametrize(
    "url",
    [
        "redis://user:s3cr3t",
        "redis://user:s3cr3t/0",
        "redis://user:s3cr3t@h:port",
        "redis+sentinel://user:s3cr3t,b:1/x",
        "redis+cluster://user:s3cr3t",
        "foo://user:s3cr3t@h",
        "user:s3cr3t@h",
        "redis://h?password=s3cr3t&x=1",
    ],
)
def test_url_that_was_typed_wrong_is_shown_without_it(url: str) -> None:
    """Also where the @ is missing, so that the password stands where the port does."""
    with pytest.raises((ValueError, TypeError)) as refused:
        fencelock.configure(url)
    assert "s3cr3t" not in str(refused.value)


def test_what_has_it_inside_does_not_show_it() -> None:
    """In a debugger, or in a traceback with local variables."""
    endpoint = endpoint_of("redis://user:s3cr3t@h", 1)
    assert "s3cr3t" not in repr(endpoint)
    assert "s3cr3t" not in repr(endpoint.named)
    assert repr(fencelock.Redlock.__new__(fencelock.Redlock))  # its constructor has failed
