"""The pages of the API: each public function has an example, says what it returns, and what it raises."""

from __future__ import annotations

import dataclasses
import enum

import pytest

from tests.pages import docstrings

KNOWN = {each.path: each for each in docstrings.public()}


def is_value(thing: object) -> bool:
    """Return whether users only read its attributes."""
    return dataclasses.is_dataclass(thing) or (isinstance(thing, type) and issubclass(thing, enum.Enum))


@pytest.mark.parametrize("path", [path for path, each in KNOWN.items() if not is_value(each.thing)])
def test_there_is_an_example(path: str) -> None:
    """Its own, that of its class, which calls it, or that of what its docstring refers to."""
    of_class, _, name = path.rpartition(".")
    texts = [each.text for each in docstrings.family(path, KNOWN)]
    if of_class in KNOWN:
        texts += [each.text for each in docstrings.family(of_class, KNOWN) if f".{name}(" in each.text]
    assert any("```python\n" in text for text in texts)


@pytest.mark.parametrize("path", [path for path, each in KNOWN.items() if each.is_function])
def test_errors_are_said(path: str) -> None:
    """In its section, or in that of what its docstring refers to."""
    if path.endswith(docstrings.SILENT):
        assert "Raises:\n" not in KNOWN[path].text
    else:
        assert any("Raises:\n" in each.text for each in docstrings.family(path, KNOWN))


@pytest.mark.parametrize(
    "path", [path for path, each in KNOWN.items() if each.is_function and docstrings.returns(each.thing)]
)
def test_result_is_said(path: str) -> None:
    """In its section, in its first sentence, or by what its docstring refers to."""
    assert any(
        "Returns:\n" in each.text or docstrings.returned(each.text) for each in docstrings.family(path, KNOWN)
    )
