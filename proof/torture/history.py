"""What a run of `python -m proof.torture` writes down: a line of JSON for each thing that happened.

Facts only: a history says nothing about right and wrong, and a checker or a report needs nothing else. All
times are nanoseconds on one monotonic clock that all processes on the machine share, taken *outside* the
calls that they enclose: an acquisition had begun before `acquire` was called, and was complete after it
had returned. Lines may come in any order.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any, ClassVar

#: Of the format; the first line of a history names it.
VERSION = 1
#: The fault that ends a process, and with it its holds.
WORKER_KILL = "worker-kill"
#: The fault that makes a second primary of a database, beside one that lives on.
TWO_PRIMARIES = "two-primaries"
#: What an odd value is written into, of which no node can make a token meanwhile.
COUNTER = "a counter"
#: The error of a call that a signal handler has ended.
STRUCK = "Struck"
#: What stands for the error where a lease was lost while its process was held up by the machine's other work.
HELD_UP = "HeldUp"


@dataclass(frozen=True, slots=True)
class Run:
    """The first line: which run this is."""

    kind: ClassVar[str] = "run"
    version: int  #: of this format
    fencelock: str  #: version of the library
    started: str  #: date and time, ISO 8601 with the offset
    began: int  #: the same moment on the clock of all other lines
    settings: Mapping[str, Any] = field(default_factory=dict)  #: by the names of the command line's options
    servers: Mapping[str, str] = field(default_factory=dict)  #: for a person: `valkey 8.1.1`


@dataclass(frozen=True, slots=True)
class Acquisition:
    kind: ClassVar[str] = "acquisition"
    worker: int
    resource: str
    began: int
    completed: int  #: when the holder knew that it had the lock
    token: int
    valid_until: int  #: until then the holder has been promised to be alone, where the lease is not renewed
    kept: bool = False  #: whether the lease is renewed until it is released, and nothing else is done


@dataclass(frozen=True, slots=True)
class Failure:
    """An attempt that ended without the lock, by an error of this class."""

    kind: ClassVar[str] = "failure"
    worker: int
    resource: str
    began: int
    ended: int
    error: str
    message: str = ""


@dataclass(frozen=True, slots=True)
class Release:
    """The end of a hold; one that is missing ended with its process."""

    kind: ClassVar[str] = "release"
    worker: int
    resource: str
    token: int
    worked_until: int  #: when the holder stopped working, before it released
    ended: int
    error: str = ""  #: name of its class, such as `LockLostError`; empty for none


@dataclass(frozen=True, slots=True)
class Left:
    """A lock of this worker that was there when it had given back all, and their leases were over."""

    kind: ClassVar[str] = "left"
    worker: int
    resource: str
    at: int


class Manner(StrEnum):
    QUICK = "quick"  #: and well-behaved
    OVERSTAYING = "overstaying"  #: works on after its lease has ended
    BRIEF = "brief"  #: with a lease about as long as a round of votes, which may end before the last vote
    RENEWED = "renewed"  #: works for longer than its first lease, and is extended
    SEVERAL = "several"  #: locks two to four resources together
    FAIR = "fair"  #: waits in turn
    LARGE = "large"  #: locks so many more that its commands are too much for one write


class Style(StrEnum):
    CLAIM = "claim"  #: claimed it, then read
    GATE = "gate"  #: passed the resource's gate in the same transaction, then read
    GET = "get"  #: read under the lock, and claimed nothing
    BEFORE = "before"  #: read before it asked for the lock, and kept the object
    VERSIONED = "versioned"  #: as GET, in a table that has a `version_id_col` beside the fence
    CORE = "core"  #: the control: as GET, written back by a statement that knows no object


class Outcome(StrEnum):
    ACKNOWLEDGED = "acknowledged"  #: the COMMIT returned
    REFUSED = "refused"  #: the guard refused it, or `version_id_col`: the error says which
    UNKNOWN = "unknown"  #: the connection was lost during the COMMIT
    FAILED = "failed"  #: something else went wrong before the COMMIT, and nothing was written


@dataclass(frozen=True, slots=True)
class Write:
    """A write of value + 1 to the row of a resource, in the transaction that has read the value."""

    kind: ClassVar[str] = "write"
    worker: int
    resource: str
    token: int
    began: int  #: when the statement was about to be sent, after the row had been read
    ended: int  #: when its outcome was known
    outcome: Outcome
    read: int | None = None  #: the value that the row had when it was read; None where nothing was read
    error: str = ""
    style: Style = Style.CLAIM
    fence: int | None = None  #: which the row had when it was read, where the writer knows it
    read_at: int = 0  #: when it was about to be read; 0 where that is not known


@dataclass(frozen=True, slots=True)
class Fault:
    kind: ClassVar[str] = "fault"
    fault: str  #: its name on the command line
    target: str  #: `worker 3`, `node 0`, `database`
    began: int
    ended: int
    detail: str = ""  #: for a person


@dataclass(frozen=True, slots=True)
class Row:
    """A row as it was found in the database when everything was over."""

    kind: ClassVar[str] = "row"
    resource: str
    value: int  #: how many additions it has seen
    fence: int | None  #: None in the control, which has no guard


@dataclass(frozen=True, slots=True)
class Cut:
    """The rest of a line that a worker was writing when it was killed."""

    kind: ClassVar[str] = "cut"
    text: str
    worker: int | None = None


Record = Run | Acquisition | Failure | Release | Left | Write | Fault | Row | Cut
_KINDS: Mapping[str, type[Record]] = {
    record.kind: record for record in (Run, Acquisition, Failure, Release, Left, Write, Fault, Row, Cut)
}
_NUMBERS: Mapping[str, tuple[str, ...]] = {
    kind: tuple(each.name for each in fields(record) if each.type == "int") for kind, record in _KINDS.items()
}


class HistoryError(ValueError):
    """A file is no history, or its facts contradict themselves."""


def line_of(record: Record) -> str:
    # Not asdict: it copies what it finds, which takes longer than all the rest.
    facts = {name: getattr(record, name) for name in record.__slots__}
    return json.dumps({"kind": record.kind, **facts}, separators=(",", ":")) + "\n"


def read_records(lines: Iterable[str]) -> Iterator[Record]:
    """Yield the records of a history, or of what one process has written of it.

    A last line without an end is what a killed process leaves: where it is no record, it is a `Cut`.

    Raises:
        HistoryError: if another line is none of this format; it says which, and why.
    """
    for number, line in enumerate(lines, 1):
        try:
            record = _record(json.loads(line))
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            if line.endswith("\n"):
                raise HistoryError(f"line {number} is no record of a history: {error!r}") from error
            record = Cut(line)
        yield record


def _record(facts: dict[str, Any]) -> Record:
    kind = facts.pop("kind")
    for name in _NUMBERS[kind]:
        if type(facts[name]) is not int:
            raise TypeError(f"{name} is a number, not {facts[name]!r}")
    if (resource := facts.get("resource")) is not None:
        facts["resource"] = sys.intern(resource)
    if kind == Write.kind:
        facts["outcome"] = Outcome(facts["outcome"])
        facts["style"] = Style(facts.get("style", Style.CLAIM))
    record = _KINDS[kind](**facts)
    if isinstance(record, Run) and record.version != VERSION:
        raise ValueError(f"it is of version {record.version}, and this fencelock reads version {VERSION}")
    return record
