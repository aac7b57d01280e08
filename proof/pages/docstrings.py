"""The docstrings of the public names: their examples, and what they take over from a relative.

`claim` says that it is `claim`, for an `AsyncSession`: its errors are those of `claim`, and are written
once. The site shows them at both, and the tests look for them there.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Final, NamedTuple

from fencelock.observe import Event
from proof.pages import names
from proof.pages.blocks import Block, blocks

_SECTIONS: Final = "Args|Attributes|Returns|Yields|Raises|Example"
_SECTION: Final = re.compile(rf"^(?:{_SECTIONS}):$", re.MULTILINE)
NAME: Final = re.compile(r"`([\w.]+)(?:\(\))?`")
_REFERRING: Final = re.compile(r"\b(?:errors|rest|see|for|beside)\b")
_RETURNED: Final = re.compile(r"(?:^|[;,:] |\band )(?:return|yield)s? (.+?)[.:;]?$", re.IGNORECASE)


#: Ends of the paths of functions that raise no error of fencelock.
SILENT: Final = (
    *(
        "lease_table",
        "receipt_table",
        "history_table",
        "write_id_column",
    ),
    *(".close", ".status", ".cancel", "Lease.to_header", "Term.wait", "Term.wait_async", ".forget"),
    *("triggers.installed", "FencedValue.get"),
    *(".is_retryable", ".http_status"),
    *("testing.temporary_authority", "testing.unfenced", "testing.lost_lease"),
)


class Public(NamedTuple):
    """A public function, class or method."""

    page: str
    path: str
    thing: Any

    @property
    def text(self) -> str:
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
                for its in names.members(thing):
                    yield Public(group.page, f"{path}.{its}", function(thing, its))


def function(kind: type, name: str) -> Any:
    """Return a method as its class, or a base of it, has it."""
    found = inspect.getattr_static(kind, name)
    return getattr(found, "__func__", found)


def returned(text: str) -> str:
    """Return what the first sentence of a docstring says of the result."""
    found = _RETURNED.search(text.partition("\n")[0])
    return found[1] if found else ""


def resolved(path: str, name: str, known: Collection[str]) -> str:
    """Return the path of another public name that the docstring of `path` calls `name`, or nothing."""
    before = path
    while before := before.rpartition(".")[0]:
        if (found := f"{before}.{name}") in known:
            return "" if found == path else found
    (*others,) = (each for each in known if each.endswith(f".{name}"))
    return others[0] if len(others) == 1 else ""


def relative(path: str, text: str, known: Collection[str]) -> str:
    """Return the path of the public name that a docstring refers to; nothing if it refers to none."""
    summary, *sentences = re.split(r"(?<=[.:])\s", _SECTION.split(text)[0])
    referring = " ".join([summary, *filter(_REFERRING.search, sentences)])
    return next(filter(None, (resolved(path, name, known) for name in NAME.findall(referring))), "")


def family(path: str, known: Mapping[str, Public]) -> list[Public]:
    """Return a public name, that to which its docstring refers, and so on."""
    found: list[Public] = []
    while path and known[path] not in found:
        found.append(known[path])
        path = relative(path, known[path].text, known)
    return found


def returns(thing: Any) -> bool:
    """Whether a function has a result; a `contextmanager` that yields None has none to speak of."""
    return str(inspect.signature(thing).return_annotation) not in {
        "None",
        "Iterator[None]",
        "AbstractContextManager[None]",
    }


def _result(text: str) -> str:
    """Return what a docstring says of the result, in its section or its first sentence."""
    told = returned(text).partition(": ")[0]
    return sections(text).get("Returns", "").strip() or (told and f"{told[0].upper()}{told[1:]}.")


def sections(text: str) -> dict[str, str]:
    """Return the sections of a docstring; what stands before them is called ""."""
    found = ["", *(heading[:-1] for heading in _SECTION.findall(text))]
    return dict(zip(found, _SECTION.split(text), strict=True))


def completed(path: str, known: Mapping[str, Public]) -> str:
    """Return a docstring with what it takes over: the site shows it by itself."""
    each, *others = family(path, known)
    head, *rest = re.split(rf"(?=^(?:{_SECTIONS}):$)", each.text, maxsplit=1, flags=re.MULTILINE)
    text = "".join(rest)
    if "```" not in each.text and path.rpartition(".")[0] not in known:
        for other in others:
            if found := next((block for block in blocks(other.text) if block.language == "python"), None):
                head += (
                    f"\n\nFrom `{other.path.removeprefix('fencelock.')}`:\n\n```python\n{found.text}```\n\n"
                )
                break
    taken = ""
    if each.is_function and returns(each.thing) and "Returns:\n" not in each.text:
        told = next(filter(None, (_result(other.text) for other in (*others, each))), "")
        taken += f"Returns:\n    {told}\n\n"
    if each.is_function and "Raises:\n" not in each.text and not path.endswith(SILENT):
        raised = next((other for other in others if "Raises:\n" in other.text), None)
        taken += f"Raises:{sections(raised.text)['Raises']}\n\n" if raised else ""
    at = text.find("Raises:\n") if "Raises:\n" in text else len(text)
    text = f"{text[:at].rstrip()}\n\n{taken}{text[at:]}"
    return f"{head.rstrip()}\n\n{text}"


def entries(section: str) -> dict[str, str]:
    found = re.split(r"(?m)^(?=    [\w*]+:)", section)[1:]
    return {entry.split(":")[0].strip(): entry.rstrip("\n") + "\n" for entry in found}


def examples(page: str) -> list[Block]:
    """Return the examples on a page of the API; those that need ZooKeeper are on a page of their own."""
    found = [(each.page, block) for each in public() for block in blocks(each.text)]
    return [
        block
        for where, block in found
        if block.language == "python" and page == ("zookeeper" if "zookeeper://" in block.text else where)
    ]
