"""On the pages of the API, each public function has an example, its result and its errors."""

from __future__ import annotations

import dataclasses
import enum

from proof.pages import docstrings

KNOWN = {each.path: each for each in docstrings.public()}
FUNCTIONS = {path: each for path, each in KNOWN.items() if each.is_function}


def is_value(thing: object) -> bool:
    """Return whether users only read its attributes."""
    return dataclasses.is_dataclass(thing) or (isinstance(thing, type) and issubclass(thing, enum.Enum))


def has_example(path: str) -> bool:
    """Return whether it has one, or its class has one that calls it, or what its docstring refers to."""
    of_class, _, name = path.rpartition(".")
    texts = [each.text for each in docstrings.family(path, KNOWN)]
    if of_class in KNOWN:
        texts += [each.text for each in docstrings.family(of_class, KNOWN) if f".{name}(" in each.text]
    return any("```python\n" in text for text in texts)


def test_there_is_an_example() -> None:
    lacking = [path for path, each in KNOWN.items() if not is_value(each.thing) and not has_example(path)]
    assert lacking == []


def says_its_errors(path: str) -> bool:
    """Return whether its section says them, or that of what its docstring refers to."""
    if path.endswith(docstrings.SILENT):
        return "Raises:\n" not in KNOWN[path].text
    return any("Raises:\n" in each.text for each in docstrings.family(path, KNOWN))


def test_errors_are_said() -> None:
    assert [path for path in FUNCTIONS if not says_its_errors(path)] == []


def says_its_result(path: str) -> bool:
    """Return whether its section says it, its first sentence, or what its docstring refers to."""
    family = docstrings.family(path, KNOWN)
    return any("Returns:\n" in each.text or docstrings.returned(each.text) for each in family)


def test_result_is_said() -> None:
    returning = [path for path, each in FUNCTIONS.items() if docstrings.returns(each.thing)]
    assert [path for path in returning if not says_its_result(path)] == []
