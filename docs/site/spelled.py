"""An extension of griffe for the pages of the API, where docstrings stand alone.

- The settings of a lock are spelled out where the signature has `**settings`.
- What a docstring takes over from a relative is copied: see proof/pages/docstrings.py.
- Names and pages become links, constants of signatures their values, and overloads the signature of all.
"""

from __future__ import annotations

import contextlib
import importlib
import re
from typing import Any, Final

from proof.pages import docstrings

griffe: Any = importlib.import_module("griffe")  # of the extra `docs`, which mypy may lack

_SETTINGS: Final = re.compile(r"(?ms)^ +\*\*settings: (.*?)(?=^ {0,4}\S|^$|\Z)")
_CODE: Final = re.compile(r"(?ms)^ *```.*?^ *```$")
_PAGE: Final = re.compile(r"\bdocs/([\w-]+)\.md")
_SEVERAL: Final = re.compile(r"(?m)^( +)(\w+), (\w+): (.*)$")


class Spelled(griffe.Extension):  # type: ignore[misc]
    """Changes what mkdocstrings is going to show."""

    def on_package(self, *, pkg: Any, **_: Any) -> None:
        """Change the public names of the package."""
        if pkg.path != "fencelock":
            return
        known = {each.path: each for each in docstrings.public()}
        lock: Any = pkg["_locking.fenced_lock"]
        settings = [each for each in lock.parameters if each.kind is griffe.ParameterKind.keyword_only]
        entries = docstrings.entries(docstrings.sections(known["fencelock.fenced_lock"].text)["Args"])
        for path in known:
            thing = _final(pkg[path.removeprefix("fencelock.")])
            text = docstrings.completed(path, known)
            if thing.is_function:
                thing.overloads = None
                if "settings" in thing.parameters:
                    said, at = _SETTINGS.search(text), "\n\nArgs:\n"
                    there = {each.name for each in thing.parameters} | _without(
                        thing, said[1] if said else ""
                    )
                    more = [each for each in settings if each.name not in there]
                    if said:
                        text = text.replace(said[0], "".join(entries[each.name] for each in more))
                        text = text.replace(at, f"\n\n`**settings`: {' '.join(said[1].split())}{at}")
                    del thing.parameters["settings"]
                    for each in more:
                        thing.parameters.add(each)
            for function in (thing, thing.members.get("__init__")):
                for parameter in function.parameters if function and function.is_function else ():
                    parameter.default = _value(parameter.default, pkg)
            if thing.docstring is not None:
                thing.docstring.value = _with_links(path, text, known)


def _final(thing: Any) -> Any:
    return thing.final_target if thing.is_alias else thing


def _without(function: Any, said: str) -> set[str]:
    """Return the settings of a lock that a function does not take, by its signature and by what it says."""
    annotation = next(str(each.annotation) for each in function.parameters if each.name == "settings")
    exceptions = re.findall(r"`(\w+)`", said.partition("except")[2].partition(".")[0])
    return {*exceptions, *(() if "AllLockSettings" in annotation else ("authority",))}


def _value(default: Any, pkg: Any) -> Any:
    """Return the value of a constant that is a default: readers do not know its name."""
    if isinstance(default, griffe.ExprName):
        with contextlib.suppress(KeyError, griffe.GriffeError):
            constant = _final(pkg.modules_collection[default.canonical_path])
            return constant.value if constant.is_attribute else default
    return default


def _with_links(path: str, text: str, known: dict[str, docstrings.Public]) -> str:
    """Return a docstring whose names and pages are links, outside of code."""

    def link(found: re.Match[str]) -> str:
        to = docstrings.resolved(path, found[1], known)
        return f"[{found[0]}][{to}]" if to else found[0]

    def change(prose: str) -> str:
        prose = _SEVERAL.sub(r"\1\2: \4\n\1\3: \4", prose)
        return _PAGE.sub(r"[docs/\1.md](../\1.md)", docstrings.NAME.sub(link, prose))

    parts, at = [], 0
    for code in _CODE.finditer(text):
        parts += [change(text[at : code.start()]), code[0]]
        at = code.end()
    return "".join([*parts, change(text[at:])])
