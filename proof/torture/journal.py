"""What one worker writes down, at once and to a file of its own, so that its death takes nothing along.

A journal consists of the lines of a history, and of intentions: a write that is about to be sent. Where a
worker was killed before it knew what came of one, the history says that the outcome is unknown.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Self

from fencelock.lease import Lease
from proof.torture.history import (
    Acquisition,
    Cut,
    Failure,
    HistoryError,
    Left,
    Outcome,
    Record,
    Release,
    Write,
    line_of,
    read_records,
)

_INTENTION = '{"kind":"intention",'
_WRITE = f'{{"kind":"{Write.kind}",'
_KILLED = "WorkerKilled"


class Journal:
    """A file to which any thread of a worker appends lines, each with one system call; a context manager."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def note(self, record: Record) -> None:
        self._file.write(line_of(record).encode())

    def intend(self, write: Write) -> None:
        self._file.write(line_of(write).replace(_WRITE, _INTENTION, 1).encode())


@dataclass(frozen=True, slots=True)
class Notes:
    """What a worker notes of its leases, as soon as a call has returned."""

    worker: int
    journal: Journal

    def acquired(self, leases: Iterable[Lease], began: int, *, kept: bool = False) -> None:
        now = time.monotonic_ns()
        for lease in leases:
            valid_until = int(lease.expires_at * 1e9)
            facts = (lease.resource, began, now, lease.token, valid_until, kept)
            self.journal.note(Acquisition(self.worker, *facts))

    def failed(self, resources: Iterable[str], began: int, error: BaseException) -> None:
        now, name = time.monotonic_ns(), type(error).__name__
        for resource in resources:
            self.journal.note(Failure(self.worker, resource, began, now, name, str(error)))

    def left(self, resource: str) -> None:
        self.journal.note(Left(self.worker, resource, time.monotonic_ns()))

    def released(self, tokens: Mapping[str, int], worked_until: int, error: str = "") -> None:
        now = time.monotonic_ns()
        for resource, token in tokens.items():
            self.journal.note(Release(self.worker, resource, token, worked_until, now, error))


@dataclass(frozen=True, slots=True)
class Life:
    worker: int
    journal: Path
    ended: int


def history_lines(life: Life) -> Iterator[str]:
    """Yield the lines that a journal adds to the history."""
    intended: dict[tuple[str, int, int], Write] = {}
    with life.journal.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if not line.endswith("\n"):
                yield line_of(Cut(line, life.worker))
                continue
            if line.startswith((_INTENTION, _WRITE)):
                write = _read(line)
                key = (write.resource, write.token, write.began)
                if line.startswith(_INTENTION):
                    intended[key] = write
                    continue
                intended.pop(key, None)
            yield line
    for write in intended.values():
        yield line_of(replace(write, ended=life.ended, outcome=Outcome.UNKNOWN, error=_KILLED))


def _read(line: str) -> Write:
    facts = json.loads(line)
    (record,) = read_records([json.dumps({**facts, "kind": Write.kind}) + "\n"])
    if not isinstance(record, Write):
        raise HistoryError(f"it is no write: {line}")
    return record
