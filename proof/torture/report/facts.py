"""What a history says, put together: each acquisition with its end, who overlapped, who was refused, when.

The verdict is the checker's, and nothing here judges. Everything is sorted once; a million acquisitions
take seconds.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from operator import attrgetter
from typing import TypeVar

from proof.torture.checker import Gap
from proof.torture.history import (
    WORKER_KILL,
    Acquisition,
    Failure,
    Fault,
    Outcome,
    Record,
    Release,
    Row,
    Run,
    Write,
)

_R = TypeVar("_R", Acquisition, Failure, Release, Write, Fault, Row, Run)
_WORKER = "worker "


@dataclass(frozen=True, slots=True)
class Hold:
    """A lease from the question to the last that is known of it.

    Attributes:
        acquisition: how it began.
        release: how it ended; None where its process ended before, or the run did.
        death: when the process was killed, if it was killed before a release.
    """

    acquisition: Acquisition
    release: Release | None = None
    death: int | None = None

    @property
    def worker(self) -> int:
        """Who had it."""
        return self.acquisition.worker

    @property
    def resource(self) -> str:
        """What was locked."""
        return self.acquisition.resource

    @property
    def token(self) -> int:
        """The fencing token."""
        return self.acquisition.token

    @property
    def asked(self) -> int:
        """When it was asked for."""
        return self.acquisition.began

    @property
    def began(self) -> int:
        """From when the holder worked."""
        return self.acquisition.completed

    @property
    def ended(self) -> int:
        """Until when the holder worked, as far as it is known."""
        end = self.release.worked_until if self.release else self.death
        return max(self.began, end or 0)

    @property
    def released(self) -> int:
        """When nothing more was done for it."""
        return self.release.ended if self.release is not None else self.ended

    def distance(self, moment: int) -> int:
        """Return how far a moment is from the time in which its holder worked."""
        return max(self.began - moment, moment - self.ended, 0)

    @property
    def latency(self) -> int:
        """How long it took to get."""
        return self.began - self.asked


@dataclass(frozen=True, slots=True)
class Overlap:
    """Two who worked under a lease of one resource at the same time.

    Attributes:
        earlier: who had it first.
        later: who was given it meanwhile, with a larger token.
    """

    earlier: Hold
    later: Hold

    @property
    def began(self) -> int:
        """From when there were two."""
        return self.later.began

    @property
    def ended(self) -> int:
        """Until when there were two."""
        return min(self.earlier.ended, self.later.ended)


@dataclass(frozen=True, slots=True)
class Refusal:
    """A write that the guard refused.

    Attributes:
        write: what was refused.
        hold: the lease under which it was sent, if the history has it.
        successor: the first lease of the resource with a larger token, if it was given before the refusal.
    """

    write: Write
    hold: Hold | None
    successor: Hold | None

    @property
    def staleness(self) -> int:
        """How long somebody else had had a larger token when the write was sent; 0 if nobody is known."""
        return max(0, self.write.began - self.successor.began) if self.successor else 0


def worker_name(worker: int) -> str:
    """Return how the target of a fault names a worker."""
    return f"{_WORKER}{worker}"


class Facts:
    """A history, put together.

    Attributes:
        holds: every lease, by the time at which it was given.
        failures: every attempt that ended without a lock, by the time of the error.
        writes: by the time at which their outcome was known.
        faults: what was broken on purpose, by the time at which it began.
        rows: what was found at the end; none where the run was interrupted.
        began: the beginning of the run, which its times are counted from.
        ended: the last moment that the history knows of.
    """

    def __init__(self, records: Iterable[Record]) -> None:
        found: defaultdict[type, list[Record]] = defaultdict(list)
        for record in records:
            found[type(record)].append(record)
        self.failures = _only(Failure, found, "ended")
        self.writes = _only(Write, found, "ended")
        self.faults = _only(Fault, found, "began")
        self.rows = _only(Row, found, "resource")
        acquisitions = _only(Acquisition, found, "completed")
        releases = _only(Release, found, "ended")
        times = [*_edges(acquisitions, self.failures, releases, self.writes, self.faults)]
        self.began = min(run.began for run in _only(Run, found, "began"))
        self.ended = max(times, default=self.began)
        self.holds = _join(acquisitions, releases, self.faults)

    @cached_property
    def by_resource(self) -> Mapping[str, Sequence[Hold]]:
        """The leases of each resource, in the order in which they were given."""
        found: defaultdict[str, list[Hold]] = defaultdict(list)
        for hold in self.holds:
            found[hold.resource].append(hold)
        return found

    @cached_property
    def workers(self) -> list[int]:
        """Everybody who ever had or wanted a lock, or wrote."""
        return sorted({one.worker for some in (self.holds, self.failures, self.writes) for one in some})

    @cached_property
    def overlaps(self) -> list[Overlap]:
        """Every lease that was given while an earlier holder of the resource still worked, by time."""
        found = [overlap for holds in self.by_resource.values() for overlap in _overlaps(holds)]
        return sorted(found, key=attrgetter("began"))

    @cached_property
    def refusals(self) -> list[Refusal]:
        """Every write that the guard refused, by time."""
        return [self._refusal(write) for write in self.writes if write.outcome is Outcome.REFUSED]

    @cached_property
    def gaps(self) -> list[Gap]:
        """The times in which nobody got a lock that somebody wanted, the longest first."""
        attempts = [(hold.asked, hold.began, True) for hold in self.holds]
        attempts += [(failure.began, failure.ended, False) for failure in self.failures]
        return sorted(_gaps(attempts), key=attrgetter("seconds"), reverse=True)

    def holds_in(self, began: int, ended: int) -> list[Hold]:
        """Return the leases of which anything lies in a stretch, waiting and release included."""
        first = bisect_left(self.holds, began - self._longest_hold, key=attrgetter("began"))
        last = bisect_right(self.holds, ended + self._longest_wait, key=attrgetter("began"))
        return [hold for hold in self.holds[first:last] if hold.asked <= ended and hold.released >= began]

    def writes_in(self, began: int, ended: int) -> list[Write]:
        """Return the writes whose outcome became known in a stretch."""
        first = bisect_left(self.writes, began, key=attrgetter("ended"))
        return self.writes[first : bisect_right(self.writes, ended, key=attrgetter("ended"))]

    @cached_property
    def _longest_hold(self) -> int:
        return max((hold.released - hold.began for hold in self.holds), default=0)

    @cached_property
    def _longest_wait(self) -> int:
        return max((hold.latency for hold in self.holds), default=0)

    def faults_of(self, worker: int) -> list[Fault]:
        """Return what hit one worker."""
        return [fault for fault in self.faults if fault.target == worker_name(worker)]

    @cached_property
    def common_faults(self) -> list[Fault]:
        """What hit nobody in particular: nodes, the network, the database."""
        return [fault for fault in self.faults if not fault.target.startswith(_WORKER)]

    @cached_property
    def interest(self) -> list[str]:
        """The resources, those first where most was refused, then overlapping, then locked."""
        refused = Counter(refusal.write.resource for refusal in self.refusals)
        overlapping = Counter(overlap.later.resource for overlap in self.overlaps)
        return sorted(
            self.by_resource,
            key=lambda name: (-refused[name], -overlapping[name], -len(self.by_resource[name]), name),
        )

    @cached_property
    def _hold_of(self) -> Mapping[tuple[int, str, int], Hold]:
        return {(hold.worker, hold.resource, hold.token): hold for hold in self.holds}

    def _refusal(self, write: Write) -> Refusal:
        holds = self.by_resource.get(write.resource, ())
        hold = self._hold_of.get((write.worker, write.resource, write.token))
        first = bisect_left(holds, hold.began, key=attrgetter("began")) if hold else 0
        later = (one for one in islice(holds, first, None) if one.token > write.token)
        successor = next(later, None)
        return Refusal(write, hold, successor if successor and successor.began <= write.ended else None)


def by_kind(faults: Iterable[Fault]) -> dict[str, list[Fault]]:
    """Return the faults of each kind."""
    found: defaultdict[str, list[Fault]] = defaultdict(list)
    for fault in faults:
        found[fault.fault].append(fault)
    return found


def _only(kind: type[_R], found: Mapping[type, list[Record]], order: str) -> list[_R]:
    return sorted((one for one in found[kind] if isinstance(one, kind)), key=attrgetter(order))


def _edges(
    acquisitions: list[Acquisition],
    failures: list[Failure],
    releases: list[Release],
    writes: list[Write],
    faults: list[Fault],
) -> Iterator[int]:
    """Yield the times that are earliest or latest among their kind."""
    for some in (failures, writes, faults):
        for one in some:
            yield from (one.began, one.ended)
    for acquisition in acquisitions:
        yield from (acquisition.began, acquisition.completed)
    for release in releases:
        yield release.ended


def _join(
    acquisitions: Iterable[Acquisition], releases: Iterable[Release], faults: Iterable[Fault]
) -> list[Hold]:
    """Give every acquisition its end. A broken lock may give one worker a token twice: in that order."""
    ends: defaultdict[tuple[int, str, int], deque[Release]] = defaultdict(deque)
    for release in releases:
        ends[release.worker, release.resource, release.token].append(release)
    deaths: defaultdict[str, list[int]] = defaultdict(list)
    for fault in faults:
        if fault.fault == WORKER_KILL:
            deaths[fault.target].append(fault.began)
    return [
        Hold(one, waiting.popleft())
        if (waiting := ends.get((one.worker, one.resource, one.token)))
        else Hold(one, death=_first_after(one.completed, deaths[worker_name(one.worker)]))
        for one in acquisitions
    ]


def _first_after(moment: int, times: Sequence[int]) -> int | None:
    """Return the first of the times, which are in order, that is later."""
    later = bisect_right(times, moment)
    return times[later] if later < len(times) else None


def _overlaps(holds: Sequence[Hold]) -> Iterator[Overlap]:
    """Yield those that began while the one who has worked longest so far still did."""
    standing: Hold | None = None
    for hold in holds:
        if standing is not None and hold.began < standing.ended:
            yield Overlap(standing, hold)
        if standing is None or hold.ended > standing.ended:
            standing = hold


def _gaps(attempts: Sequence[tuple[int, int, bool]]) -> Iterator[Gap]:
    """Yield the stretches in which attempts were under way and none succeeded.

    Attempts are (began, ended, whether it got the lock).
    """
    events = [(began, 1, False) for began, _, _ in attempts]
    events += [(ended, -1, success) for _, ended, success in attempts]
    waiting, since = 0, 0
    for time, change, success in sorted(events):
        if waiting > 0 and (success or waiting + change == 0) and time > since:
            yield Gap(since, time)
        if success or waiting <= 0:
            since = time
        waiting += change
