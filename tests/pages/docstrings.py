"""The docstrings of the public names: their examples, and what they take over from a relative.

`claim_async` says that it is `claim`, for an `AsyncSession`: its errors are those of `claim`, and are written
once. The site shows them at both, and the tests look for them there.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Final, NamedTuple

from fencelock.observe import Event
from tests.pages import names
from tests.pages.blocks import Block, blocks

_SECTION: Final = re.compile(r"^(?:Args|Attributes|Returns|Yields|Raises|Example):$", re.MULTILINE)
_NAME: Final = re.compile(r"`([\w.]+)(?:\(\))?`")
_REFERRING: Final = re.compile(r"\b(?:errors|rest|see|for|beside)\b")
_RETURNED: Final = re.compile(r"(?:^|[;,:] |\band )(?:return|yield)s? (.+?)[.:;]?$", re.IGNORECASE)


#: Ends of the paths of functions that raise no error of fencelock.
SILENT: Final = (
    *(
        "lease_table",
        "receipt_table",
        "history_table",
        "write_id_column",
        "on_stale",
        "on_unfenced",
        "on_claim",
    ),
    *(".close", ".status", ".cancel", "Lease.to_header", "Term.wait", "Term.wait_async", ".forget"),
    *("triggers.installed", "FencedValue.get", "FencedFile.read"),
)


class Public(NamedTuple):
    """A public function, class or method."""

    page: str
    path: str
    thing: Any

    @property
    def text(self) -> str:
        """Its docstring."""
        return inspect.getdoc(self.thing) or ""

    @property
    def is_function(self) -> bool:
        """Whether it is called, and no class."""
        return inspect.isfunction(self.thing)


def public() -> Iterator[Public]:
    """Yield all public names but errors, events, and properties."""
    for group in names.GROUPS:
        for name, path in zip(group.names, group.paths(), strict=True):
            thing = getattr(group.module, name)
            if not inspect.isclass(thing):
                yield Public(group.page, path, thing)
            elif not issubclass(thing, Exception | Event):
                yield Public(group.page, path, thing)
                for member, _ in names.members(thing):
                    if member.endswith("()"):
                        its = member.rpartition(".")[2][:-2]
                        yield Public(group.page, f"{path}.{its}", function(thing, its))


def function(kind: type, name: str) -> Any:
    """Return a method as its class, or a base of it, has it."""
    found = inspect.getattr_static(kind, name)
    return getattr(found, "__func__", found)


def returned(text: str) -> str:
    """Return what the first sentence of a docstring says of the result."""
    found = _RETURNED.search(text.partition("\n")[0])
    return found[1] if found else ""


def relative(path: str, text: str, known: Collection[str]) -> str:
    """Return the path of the public name that a docstring refers to; nothing if it refers to none."""
    summary, *sentences = re.split(r"(?<=[.:])\s", _SECTION.split(text)[0])
    for named in _NAME.findall(" ".join([summary, *filter(_REFERRING.search, sentences)])):
        before = path
        while before := before.rpartition(".")[0]:
            if (found := f"{before}.{named}") in known and found != path:
                return found
        (*others,) = (each for each in known if each.endswith(f".{named}"))
        if len(others) == 1:
            return others[0]
    return ""


def family(path: str, known: Mapping[str, Public]) -> list[Public]:
    """Return a public name, that to which its docstring refers, and so on."""
    found: list[Public] = []
    while path and known[path] not in found:
        found.append(known[path])
        path = relative(path, known[path].text, known)
    return found


def examples(page: str) -> list[Block]:
    """Return the examples on a page of the API; those that need ZooKeeper are on a page of their own."""
    found = [(each.page, block) for each in public() for block in blocks(each.text)]
    return [
        block
        for where, block in found
        if block.language == "python" and page == ("zookeeper" if "zookeeper://" in block.text else where)
    ]
