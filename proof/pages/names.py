"""The public names, by the pages of the API on which the site shows them."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import ModuleType
from typing import Final, NamedTuple

import fencelock
import fencelock.guard
import fencelock.observe
from fencelock import holder, testing
from fencelock.authority.redlock import admin
from fencelock.guard import triggers
from fencelock.integrations import asgi, celery, fastapi, flask, header, httpx
from fencelock.observe import history, otel, prometheus
from fencelock.stores import file, redis

LOCKS: Final = (
    *("fenced_lock", "take_over", "fenced_transaction", "fenced", "configure", "exit_on_signals"),
    *("assert_held", "Database", "lease_table", "Redlock", "Etcd", "ZooKeeper", "leader"),
    *("fenced_semaphore",),
)
MODELS: Final = ("FencedModel", "FencedDataclassModel", "fence_table")
WRITING: Final = (
    *("claim", "claim_all", "gate", "bind", "bypass", "upsert"),
    *("fenced_text", "conditional_update", "conditional_delete"),
    *("once", "fenced_once", "receipt_table", "prune_receipts"),
    *("is_retryable", "http_status"),
)
WATCHING: Final = ("on_event", "forget")
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
        "token",
        "to_header",
        "from_header",
        "expires_at",
        "remaining",
        "lost",
        "why_lost",
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


def errors() -> Iterator[str]:
    """Yield the names of the errors, each below its parents."""
    ours = [name for name in fencelock.__all__ if name.endswith("Error")]
    yield from sorted(ours, key=lambda name: [one.__name__ for one in getattr(fencelock, name).__mro__[::-1]])


def members(kind: type) -> Iterator[str]:
    """Yield the public methods of a class."""
    bases = kind.__mro__[::-1] if kind.__name__ in MEMBERS else (kind,)
    for name, member in {name: member for one in bases for name, member in vars(one).items()}.items():
        if name not in MEMBERS.get(kind.__name__, (name,)) or name.startswith("_"):
            continue
        member = getattr(member, "__func__", member)  # noqa: PLW2901 - of a static method
        if inspect.isfunction(member):
            yield name


class Group(NamedTuple):
    """Names that a page of the API shows together, below a heading if there is a title."""

    page: str
    title: str
    module: ModuleType
    names: tuple[str, ...]

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
    Group("models", "", fencelock.guard, ("fence_column", "write_id_column")),
    Group("triggers", "", triggers, ("create", "drop", "installed")),
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
