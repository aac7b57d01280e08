"""What happened to a set of locks, and whether the tokens kept their promises.

Pure, and apart from the run that it judges: it knows nothing of fencelock, takes the log that the workers
wrote, and would judge any other lock's tokens the same way. All times are nanoseconds on one clock that
all who wrote the log share, taken outside the calls: an acquisition began before `acquire` was
called and completed after it had returned.
"""

from __future__ import annotations

import json
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO


@dataclass(frozen=True, slots=True)
class Acquisition:
    """A lock that was acquired, and how long its holder worked under it.

    Attributes:
        resource: what was locked.
        began: when it was asked for.
        completed: when the holder knew that it had the lock.
        token: what the holder was given.
        valid_until: until when the holder had been promised to be alone.
        worked_until: when the holder stopped working; overstaying, that is after `valid_until`.
        bids: how often votes were asked for.
        confirms: how often votes had to be confirmed, because they disagreed.
    """

    resource: str
    began: int
    completed: int
    token: int
    valid_until: int
    worked_until: int
    bids: int = 1
    confirms: int = 0

    def __post_init__(self) -> None:
        if not self.began <= self.completed <= self.worked_until:
            raise ValueError(f"the times of an acquisition go backwards: {self}")


@dataclass(frozen=True, slots=True)
class Failure:
    """An attempt that ended without the lock.

    Attributes:
        resource: what was to be locked.
        began: when it was asked for.
        ended: when the error came.
        error: name of the error's class.
        message: what it said.
    """

    resource: str
    began: int
    ended: int
    error: str
    message: str


@dataclass(frozen=True, slots=True)
class Duplicate:
    """Two acquisitions of one resource that carry the same token."""

    first: Acquisition
    second: Acquisition

    def __str__(self) -> str:
        return f"{self.first.resource}: token {self.first.token} was given twice"


@dataclass(frozen=True, slots=True)
class Regression:
    """A token that is not above one whose acquisition had completed before this one's began."""

    earlier: Acquisition
    later: Acquisition

    def __str__(self) -> str:
        gap = (self.later.began - self.earlier.completed) / 1e6
        return (
            f"{self.later.resource}: token {self.later.token} was asked for {gap:.3f} ms after "
            f"{self.earlier.token} had been given"
        )


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the log says about one run.

    Attributes:
        duplicates: each token that was given again.
        regressions: each acquisition whose token is too small, beside the largest that it should exceed.
        overlaps: how many acquisitions completed while an earlier holder of the resource still worked.
        valid_overlaps: how many of these while the earlier holder had still been promised to be alone.
    """

    duplicates: list[Duplicate]
    regressions: list[Regression]
    overlaps: int
    valid_overlaps: int

    @property
    def violations(self) -> list[Duplicate | Regression]:
        """What must never happen. Overlapping holders are not among it: against those there are tokens."""
        return [*self.duplicates, *self.regressions]


def judge(acquisitions: Iterable[Acquisition]) -> Verdict:
    """Return what can be said about the acquisitions, which may come in any order; in O(n log n)."""
    by_resource: defaultdict[str, list[Acquisition]] = defaultdict(list)
    for acquisition in acquisitions:
        by_resource[acquisition.resource].append(acquisition)
    histories = by_resource.values()
    return Verdict(
        duplicates=[found for ours in histories for found in _duplicates(ours)],
        regressions=[found for ours in histories for found in _regressions(ours)],
        overlaps=sum(_overlaps((one.completed, one.worked_until) for one in ours) for ours in histories),
        valid_overlaps=sum(
            _overlaps((one.completed, min(one.worked_until, one.valid_until)) for one in ours)
            for ours in histories
        ),
    )


def _duplicates(ours: list[Acquisition]) -> Iterator[Duplicate]:
    firsts: dict[int, Acquisition] = {}
    for acquisition in ours:
        first = firsts.setdefault(acquisition.token, acquisition)
        if first is not acquisition:
            yield Duplicate(first, acquisition)


def _regressions(ours: list[Acquisition]) -> Iterator[Regression]:
    completed = deque(sorted(ours, key=lambda one: one.completed))
    largest: Acquisition | None = None
    for later in sorted(ours, key=lambda one: one.began):
        while completed[0].completed < later.began:  # ends at the latest with `later` itself
            earlier = completed.popleft()
            if largest is None or earlier.token > largest.token:
                largest = earlier
        if largest is not None and later.token <= largest.token:
            yield Regression(largest, later)


def _overlaps(holds: Iterable[tuple[int, int]]) -> int:
    """Count the holds, each from when to when, that began while an earlier one lasted."""
    count = busy_until = 0
    for start, end in sorted(holds):
        count += start < busy_until
        busy_until = max(busy_until, end)
    return count


def write_line(log: TextIO, record: Acquisition | Failure) -> None:
    """Append a record to a log, as a line of JSON."""
    log.write(json.dumps(asdict(record)) + "\n")


def read_log(path: Path) -> Iterator[Acquisition | Failure]:
    """Yield the records of a log.

    Raises:
        TypeError: if a line is none of ours.
        ValueError: if a line is no JSON, or its times go backwards.
    """
    with path.open() as log:
        for line in log:
            facts = json.loads(line)
            yield Failure(**facts) if "error" in facts else Acquisition(**facts)
