"""The values that describe a held lock: which process holds it, since when, and for how long."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime


def printable(text: str) -> str:
    r"""Return `text` for display, with escapes such as `\n` for the characters that are not printable."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


@dataclass(frozen=True, slots=True)
class Holder:
    """The process that holds a lock, as the process described itself.

    Attributes:
        host: name of the machine; empty if the process is unknown.
        pid: the process id on that machine.
        program: name of the program that the process runs.
        since: when it acquired the lock: Unix time, by its own clock or the database's.
    """

    host: str
    pid: int
    program: str
    since: float

    def __str__(self) -> str:
        process = f"{self.program} (process {self.pid} on {self.host})" if self.host else "an unknown process"
        since = "an unknown time"
        with suppress(ValueError, OverflowError, OSError):  # another program may have written any number
            since = f"{datetime.fromtimestamp(self.since, UTC):%Y-%m-%d %H:%M:%S} UTC"
        return f"{process} since {since}"

    @classmethod
    def of(cls, text: str, since: float) -> Holder:
        """Return the holder that a text of `name_of_process` describes; any other text is accepted, too."""
        host, pid, program = (*printable(text).split(" ", 2), "", "")[:3]
        return cls(host, int(pid) if re.fullmatch("[0-9]{1,10}", pid) else 0, program, since)


@dataclass(frozen=True, slots=True)
class LockInfo:
    """A lock that is held at this moment.

    Attributes:
        resource: name of the resource.
        token: the holder's fencing token; None if it is unknown.
        holder: the holding process; None if another program than fencelock wrote the lock.
        remaining: seconds until the lock ends unless it is extended; infinite without an end.
        waiters: how many callers wait in line; None if the authority cannot tell.
    """

    resource: str
    token: int | None
    holder: Holder | None
    remaining: float
    waiters: int | None
