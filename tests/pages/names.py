"""The page of public names, docs/names.md: each with the first sentence of its docstring.

`python -m tests.pages.names` writes it. A test compares.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import ModuleType
from typing import Any, Final, NamedTuple

import fencelock
import fencelock.guard
import fencelock.observe
from fencelock import holder, testing
from fencelock.authority.redlock import admin
from fencelock.guard import triggers
from fencelock.integrations import asgi, celery, fastapi, flask, header, httpx
from fencelock.observe import history, otel, prometheus
from fencelock.stores import file, redis
from tests.pages.blocks import ROOT

PAGE: Final = ROOT / "docs" / "names.md"

LOCKS: Final = (
    *("fenced_lock", "take_over", "fenced_transaction", "fenced", "configure", "exit_on_signals"),
    *("assert_held", "Database", "lease_table", "Redlock", "Etcd", "ZooKeeper", "leader"),
    *("fenced_semaphore",),
)
MODELS: Final = ("FencedModel", "FencedDataclassModel", "fence_table", "begin_immediate")
WRITING: Final = (
    *("claim", "claim_all", "gate", "bind", "bypass", "upsert"),
    *("fenced_text", "conditional_update", "conditional_delete"),
    *("claim", "claim_all", "gate"),
    *("once", "once", "fenced_once", "receipt_table", "prune_receipts"),
    *("is_retryable", "http_status"),
)
WATCHING: Final = ("on_stale", "on_unfenced", "on_claim", "GuardEvent")
OBJECTS: Final = (
    "FencedLock",
    "AsyncLock",
    "FencedTransaction",
    "AsyncFencedTransaction",
    "Lease",
    "Leader",
    "Term",
    "FencedSemaphore",
    "Receipt",
)
MEMBERS: Final = {
    "Lease": (
        "resource",
        "fencing_token",
        "token",
        "to_header",
        "from_header",
        "expires_at",
        "remaining",
        "lost",
        "in_doubt",
    ),
    "Database": ("lock", "inspect", "force_release", "init", "close"),
    "Etcd": ("lock", "inspect", "force_release", "init", "prune", "close"),
    "ZooKeeper": ("lock", "inspect", "force_release", "init", "prune", "close"),
    "FencelockInstrumentor": (),
    "Holder": (),
    "Metrics": ("close",),
    "Recorder": ("close",),
    "Redlock": ("nodes", "lock", "inspect", "force_release", "init", "status", "recover", "close"),
}
"""Of other classes all public members are shown; these have some that are for the library alone."""

HEAD: Final = """\
# Public names

Written by `python -m tests.pages.names` from the docstrings. `help(fencelock.claim)` shows all of one:
arguments, errors, examples. `authority.aio` can be relied on, too. A name that no page shows may change in
any release.
"""


def first_line(thing: Any) -> str:
    """Return the first sentence of a docstring."""
    (line, *_) = (inspect.getdoc(thing) or "").splitlines()
    return line.replace("|", "\\|")


def errors() -> Iterator[str]:
    """Yield the names of the errors, each below its parents."""
    ours = [name for name in fencelock.__all__ if name.endswith("Error")]
    yield from sorted(ours, key=lambda name: [one.__name__ for one in getattr(fencelock, name).__mro__[::-1]])


def members(kind: type) -> Iterator[tuple[str, str]]:
    """Yield the public members of a class that have something to say, and their first sentences."""
    bases = kind.__mro__[::-1] if kind.__name__ in MEMBERS else (kind,)
    for name, member in {name: member for one in bases for name, member in vars(one).items()}.items():
        if name not in MEMBERS.get(kind.__name__, (name,)) or name.startswith("_"):
            continue
        member = getattr(member, "__func__", member)  # noqa: PLW2901 - of a static method
        if inspect.isfunction(member) or isinstance(member, property):
            call = "()" if inspect.isfunction(member) else ""
            yield f"{kind.__name__}.{name}{call}", first_line(member)


def table(module: ModuleType, names: tuple[str, ...], prefix: str) -> Iterator[str]:
    """Yield the lines of a table of names, with the members of classes below them."""
    yield from ("", "| name | |", "|---|---|")
    for name in names:
        thing = getattr(module, name)
        yield f"| `{prefix}{name}` | {first_line(thing)} |"
        if inspect.isclass(thing) and not issubclass(thing, Exception):
            yield from (f"| `{prefix}{member}` | {line} |" for member, line in members(thing))


class Group(NamedTuple):
    """Names that a page lists together: docs/names.md below a heading, and the site on a page of its API."""

    page: str
    title: str
    module: ModuleType
    names: tuple[str, ...]
    prefix: str = ""

    def paths(self) -> Iterator[str]:
        """Yield the names in full."""
        yield from (f"{self.module.__name__}.{name}" for name in self.names)


GROUPS: Final = (
    Group("locks", "Locks", fencelock, LOCKS),
    Group("models", "Models", fencelock, MODELS),
    Group("writing", "Writing", fencelock, WRITING),
    Group("observing", "Watching", fencelock, WATCHING),
    Group("objects", "What the functions return", fencelock, OBJECTS),
    Group("objects", "", holder, ("LockInfo", "Holder")),
    Group("objects", "", admin, ("NodeStatus", "NodeState")),
    Group("errors", "Errors", fencelock, tuple(errors())),
    Group("models", "", fencelock.guard, ("fence_column", "write_id_column", "forget")),
    Group("triggers", "", triggers, ("create", "drop", "installed"), "triggers."),
    Group("observing", "", fencelock.observe, tuple(fencelock.observe.__all__)),
    Group("observing", "", prometheus, ("instrument", "watch_nodes", "Metrics")),
    Group("observing", "", otel, ("FencelockInstrumentor",)),
    Group("observing", "", history, ("record", "read", "history_table", "Recorder", "Entry")),
    Group("travelling", "", header, ("held", "bound", "to_header", "from_header")),
    Group("travelling", "", asgi, ("FencingTokenMiddleware",)),
    Group("travelling", "", httpx, ("send_tokens", "send_tokens_async")),
    Group("travelling", "", celery, ("FencedTask",)),
    Group("travelling", "", fastapi, ("answer_errors", "idempotency_key")),
    Group("travelling", "", flask, ("answer_errors",)),
    Group("stores", "", redis, ("FencedValue", "AsyncFencedValue")),
    Group("stores", "", file, ("FencedFile",)),
    Group("testing", "", testing, tuple(testing.__all__)),
)


def render() -> str:
    lines = [HEAD.rstrip()]
    for group in GROUPS:
        lines += ["", f"## {group.title or f'In `{group.module.__name__}`'}"]
        lines += table(group.module, group.names, group.prefix)
        if group.title == "Errors":
            lines += ["", "What each means, and what to do: [errors](errors.md)."]
    lines += ["", "Alembic's operations: [migrate](migrating.md#3-migrate)."]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(render())
