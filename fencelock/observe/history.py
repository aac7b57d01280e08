"""A history of locks in a table: grants, losses, refused stale writes, `fencelock release --force`.

```python
from fencelock.observe import history

history.record(engine)
```

A background thread writes the history, with connections of the engine, in its own transactions. No lock waits
for it. If entries cannot be written, they are dropped, and their number is logged.
"""

from __future__ import annotations

import atexit
import logging
import math
import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.dialects.mysql import DATETIME

from fencelock import _events
from fencelock._databases import EVENT_TABLE, RESOURCE
from fencelock._events import Event, LeaseLost, LockAcquired, StaleWriteRefused
from fencelock._owners import name_of_process
from fencelock._process import start_over_in_children
from fencelock._workers import Worker

logger: logging.Logger = logging.getLogger("fencelock.observe")

_TIME: Final = sa.DateTime().with_variant(DATETIME(fsp=6), "mysql", "mariadb")
_DAY: Final = 86_400.0
#: Seconds between two writes, and between two deletions of old entries.
_PAUSE, _PRUNING_PAUSE = 0.5, 3600.0
#: The most entries that wait for a database that does not answer. Of more, the oldest are dropped unlogged.
_MOST_WAITING: Final = 10_000


def history_table(metadata: sa.MetaData, *, schema: str | None = None) -> sa.Table:
    """Return the table `fencelock_events` as part of `metadata`: for migrations.

    ```python
    history_table(Base.metadata)
    Base.metadata.create_all(engine)
    ```

    A row has its time in UTC (`at`), `what` happened (granted, lost, refused, forced), the `resource`, the
    `token`, the process (`holder`: host, process id, program), and a `detail` in words.
    """
    return sa.Table(
        EVENT_TABLE,
        metadata,
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True),
        sa.Column("at", _TIME, nullable=False, index=True),
        sa.Column("what", sa.String(16), nullable=False),
        sa.Column("resource", RESOURCE, nullable=False),
        sa.Column("token", sa.BigInteger),
        sa.Column("holder", sa.String(255), nullable=False),
        sa.Column("detail", sa.String(255), nullable=False),
        sa.Index(f"ix_{EVENT_TABLE}_of_resource", "resource", "at"),
        schema=schema,
        keep_existing=True,
    )


@dataclass(frozen=True, slots=True)
class Entry:
    """A row of the history; `at` is in UTC, without a time zone."""

    at: datetime
    what: str
    resource: str
    token: int | None
    holder: str
    detail: str = ""


class Recorder:
    """The listener that `record` returns: it writes the history until it is closed."""

    def __init__(self, engine: sa.Engine, keep: float, schema: str | None) -> None:
        if not isinstance(engine, sa.Engine):
            raise TypeError(f"the history is written through an Engine that blocks, not through {engine!r}")
        self._engine = engine
        self._keep = keep
        self._table = history_table(sa.MetaData(), schema=schema)
        self._table.create(engine, checkfirst=True)
        self._writes_at = self._pruned_at = -math.inf
        self._inherits = False
        self._waiting: deque[Entry] = deque(maxlen=_MOST_WAITING)
        self._worker = Worker("fencelock-history", self._turn)
        start_over_in_children(self)
        _events.on_event(self)
        atexit.register(self.close)

    def begin_in_child(self) -> None:
        self._inherits = True
        self._waiting.clear()

    def __call__(self, event: Event) -> None:
        if entries := list(_entries_of(event)):
            self._waiting.extend(entries)
            if self._worker.wakes_at == math.inf:
                self._writes_at = time.monotonic() + _PAUSE
                self._worker.wake()

    def close(self) -> None:
        """Stop listening, and write the remaining entries, if the database answers in time."""
        _events.forget(self)
        atexit.unregister(self.close)
        if self._worker.close(5) and self._waiting:  # a thread that has not ended waits for the database
            self._write()

    def _turn(self) -> float:
        if time.monotonic() >= self._writes_at:
            self._write()
            self._writes_at = time.monotonic() + _PAUSE
        return self._writes_at

    def _write(self) -> None:
        if self._inherits:  # the connections of the engine belong to the parent process
            self._engine.dispose(close=False)
            self._inherits = False
        entries: list[dict[str, Any]] = []
        with suppress(IndexError):
            while True:
                entries.append(asdict(self._waiting.popleft()))
        try:
            if entries:
                with self._engine.begin() as connection:
                    connection.execute(sa.insert(self._table), entries)
            if time.monotonic() >= self._pruned_at + _PRUNING_PAUSE:
                self._pruned_at = time.monotonic()
                with self._engine.begin() as connection:
                    oldest = datetime.fromtimestamp(time.time() - self._keep, UTC).replace(tzinfo=None)
                    connection.execute(sa.delete(self._table).where(self._table.c.at < oldest))
        except Exception as error:  # noqa: BLE001 - the user's own function may open the connections
            logger.warning("%d entries of the history could not be written: %s", len(entries), error)


def record(engine: sa.Engine, *, keep: float = 7 * _DAY, schema: str | None = None) -> Recorder:
    """Write the history of this process from now on.

    ```python
    recorder = record(engine)
    with fenced_lock("order:1"):
        ...
    recorder.close()
    ```

    Args:
        engine: an engine of the database; the table is created there if it is missing.
        keep: seconds after which an entry is deleted.
        schema: the table's; by default the connection's.

    Returns:
        The recorder; its `close()` ends the recording.

    Raises:
        TypeError: `engine` is no blocking engine.
        sqlalchemy.exc.SQLAlchemyError: the database does not answer, or the table cannot be created.
    """
    return Recorder(engine, keep, schema)


def read(engine: sa.Engine, resource: str, last: int = 50, *, schema: str | None = None) -> Sequence[Entry]:
    """Return the last entries of a resource, the oldest first.

    ```python
    for entry in read(engine, "order:1", last=10):
        print(entry.at, entry.what, entry.token, entry.holder)
    ```

    Raises:
        sqlalchemy.exc.SQLAlchemyError: the table cannot be read.
    """
    table = history_table(sa.MetaData(), schema=schema)
    columns = [table.c[name] for name in Entry.__slots__]
    by_age = table.c.at.desc(), table.c.id.desc()  # processes write later, so the ids are not in this order
    newest = sa.select(*columns).where(table.c.resource == resource).order_by(*by_age).limit(last)
    with engine.connect() as connection:
        return [Entry(*row) for row in reversed(connection.execute(newest).all())]


def note(engine: sa.Engine, what: str, resource: str, token: int | None, detail: str) -> None:
    """Write one entry now; the table must exist."""
    entry = asdict(_entry(what, resource, token, detail))
    with engine.begin() as connection:
        connection.execute(sa.insert(history_table(sa.MetaData())), [entry])


def _entry(what: str, resource: str, token: int | None, detail: str = "") -> Entry:
    at = datetime.now(UTC).replace(tzinfo=None)
    return Entry(at, what, resource, token, name_of_process(os.getpid()), detail[:255])


def _entries_of(event: Event) -> Iterator[Entry]:
    """Yield an entry for each resource of an event; none if the history does not record such events."""
    if isinstance(event, (LockAcquired, LeaseLost)):
        what, detail = ("lost", event.detail) if isinstance(event, LeaseLost) else ("granted", "")
        for resource, token in zip(event.resources, event.tokens, strict=True):
            yield _entry(what, resource, token, detail)
    elif isinstance(event, StaleWriteRefused) and event.resource is not None:
        detail = f"{event.table} {event.identity}: the fence is {event.fence}"
        yield _entry("refused", event.resource, event.token, detail)
