"""What an authority tells of a lock that is held: by which process, since when, for how long still."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime


def printable(text: str) -> str:
    r"""Return text that others have written as it may be shown: `\n` and the like for control characters."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


@dataclass(frozen=True, slots=True)
class Holder:
    """The process that holds a lock, as it has called itself.

    Attributes:
        host: name of its machine; empty where nothing tells which process it is.
        pid: its id there.
        program: name of what it runs.
        since: when it acquired the lock, in Unix time, by its own clock or by that of the database.
    """

    host: str
    pid: int
    program: str
    since: float

    def __str__(self) -> str:
        process = f"{self.program} (process {self.pid} on {self.host})" if self.host else "an unknown process"
        return f"{process} since {datetime.fromtimestamp(self.since, UTC):%Y-%m-%d %H:%M:%S} UTC"

    @classmethod
    def of(cls, text: str, since: float) -> Holder:
        """Read what `name_of_process` has written, or something else."""
        host, pid, program = (*printable(text).split(" ", 2), "", "")[:3]
        return cls(host, int(pid) if re.fullmatch("[0-9]{1,10}", pid) else 0, program, since)


@dataclass(frozen=True, slots=True)
class LockInfo:
    """A lock that is held at this moment.

    Attributes:
        resource: its name.
        token: the holder's fencing token; None where nodes have made the lock again, and do not know it.
        holder: which process, and since when; None where something else than fencelock has made the lock.
        remaining: seconds until it ends unless it is extended; infinite for what ends never.
        waiters: how many wait in line, as far as the authority can tell; None where it cannot.
    """

    resource: str
    token: int | None
    holder: Holder | None
    remaining: float
    waiters: int | None
