"""Turns a history into `trace.json`, which Perfetto opens, and returns the numbers that `picture.py` draws.

The history is read line by line, for its faults, for its writes, and for everything. In memory stays what has
not ended yet, and a few numbers for each attempt to get a lock.
"""

from __future__ import annotations

import json
import re
from array import array
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any, Final, TextIO

from proof.torture.checker import Gap, gaps
from proof.torture.history import (
    WORKER_KILL,
    Acquisition,
    Failure,
    Fault,
    HistoryError,
    Outcome,
    Record,
    Release,
    Run,
    Write,
    read_records,
)
from proof.torture.table import name_of_versioned

#: A shorter wait is not drawn, nor is a shorter time in which no client got a lock.
SHORTEST_WAIT: Final = 1_000_000
SHORTEST_GAP: Final = 250_000_000
_FOREVER: Final = 1 << 63
_RUN_AND_FAULTS: Final = (f'{{"kind":"{Run.kind}"', f'{{"kind":"{Fault.kind}"')
_WRITE: Final = re.compile(f'{{"kind":"{Write.kind}"')
_SERVERS: Final = "nodes and database"
_PROCESSES: Final = {"the run": 1, _SERVERS: 2}
_RUN: Final = ("the run", "settings")
_REFUSALS: Final = ("the run", "refused writes")
_GAPS: Final = ("the run", "unavailable")


@dataclass(slots=True)
class Hold:
    lease: Acquisition
    lane: int
    worked_until: int = 0
    writes: list[Write] = field(default_factory=list)


def _numbers() -> array[int]:
    return array("q")


@dataclass(slots=True)
class Numbers:
    """What the picture shows."""

    run: Run
    faults: list[Fault]  #: in the order of their begin
    stale: Write | None = None  #: the write that was most out of date, a refused one if there is one
    holds: list[Hold] = field(default_factory=list)  #: leases of its resource at that time
    refused: array[int] = field(default_factory=_numbers)  #: when writes were refused, sorted
    began: array[int] = field(default_factory=_numbers)  #: when each acquisition began
    completed: array[int] = field(default_factory=_numbers)  #: when each was complete, in the same order
    failures: array[int] = field(default_factory=_numbers)  #: when failed attempts began and ended, in turn

    @property
    def around_stale(self) -> tuple[int, int]:
        """From when to when the leases beside `stale` are shown; nothing is where nothing was written."""
        if self.stale is None:
            return 0, 0
        room = max((self.stale.ended - self.stale.read_at) // 4, SHORTEST_WAIT * 20)
        return self.stale.read_at - room, self.stale.ended + room

    def unavailable(self) -> Iterator[Gap]:
        began = array("q", sorted([*self.began, *self.failures[0::2]]))
        ended = array("q", sorted([*self.completed, *self.failures[1::2]]))
        successes = array("q", sorted(self.completed))
        return (gap for gap in gaps(began, ended, successes) if gap.ended - gap.began >= SHORTEST_GAP)


def write_trace(history: Path, trace: Path) -> Numbers:
    """Write the trace of a history in which each lease stands before its end, as in those of `run.py`."""
    with history.open(encoding="utf-8") as lines:
        numbers = _run_and_faults(lines)
    with history.open(encoding="utf-8") as lines:
        numbers.stale = _most_stale(filter(_WRITE.match, lines), numbers.faults)
    with history.open(encoding="utf-8") as lines, trace.open("w", encoding="utf-8") as file:
        drawn = _Trace(file, numbers)
        for record in read_records(lines):
            drawn.take(record)
        drawn.finish()
    return numbers


def row_of(write: Write) -> str:
    return write.resource.removesuffix(name_of_versioned(""))


def _run_and_faults(lines: Iterable[str]) -> Numbers:
    runs: list[Run] = []
    faults: list[Fault] = []
    for record in read_records(line for line in lines if line.startswith(_RUN_AND_FAULTS)):
        if isinstance(record, Run):
            runs.append(record)
        elif isinstance(record, Fault):
            faults.append(record)
    if not runs:
        raise HistoryError("the line that says which run it was is missing")
    return Numbers(runs[0], sorted(faults, key=attrgetter("began")))


def _most_stale(lines: Iterable[str], faults: Iterable[Fault]) -> Write | None:
    """Return the write that is most worth a picture: refused for its token, after a pause of its worker."""
    pauses = defaultdict(list)
    for fault in faults:
        pauses[fault.target].append(fault)

    def worth(write: Write) -> tuple[bool, bool, int, int]:
        took = write.ended - write.read_at
        paused = sum(
            max(0, min(write.ended, pause.ended) - max(write.read_at, pause.began))
            for pause in (pauses[f"worker {write.worker}"] if took > SHORTEST_WAIT else ())
        )
        return write.error == "StaleTokenError", write.outcome is Outcome.REFUSED, paused, took

    writes = (record for record in read_records(lines) if isinstance(record, Write) and record.read_at)
    return max(writes, key=worth, default=None)


class _Trace:
    def __init__(self, file: TextIO, numbers: Numbers) -> None:
        self._numbers = numbers
        self._refusals: list[Write] = []
        self._held: defaultdict[int, dict[tuple[str, int], Hold]] = defaultdict(dict)
        self._busy: defaultdict[int, list[int]] = defaultdict(list)
        self._deaths: defaultdict[int, deque[int]] = defaultdict(deque)
        self._tracks: dict[tuple[str, str], dict[str, int]] = {}
        run = numbers.run
        self._file = file
        file.write('{"displayTimeUnit":"ms","traceEvents":[\n')
        self._slice(
            _RUN, "run", run.started, run.began, run.began, settings=run.settings, servers=run.servers
        )
        for fault in numbers.faults:
            hit_worker = fault.target.startswith("worker ")
            if fault.fault == WORKER_KILL:
                self._deaths[int(fault.target.removeprefix("worker "))].append(fault.ended)
            track = (fault.target, "faults") if hit_worker else (_SERVERS, fault.target)
            self._slice(track, "fault", fault.fault, fault.began, fault.ended, detail=fault.detail)

    def take(self, record: Record) -> None:
        match record:
            case Acquisition(worker, resource, began, completed, token):
                self._bury(worker, began)
                if twice := self._held[worker].pop((resource, token), None):
                    self._end(twice, twice.lease.completed)
                self._held[worker][resource, token] = Hold(record, self._lane(worker, began, _FOREVER))
                self._numbers.began.append(began)
                self._numbers.completed.append(completed)
            case Failure(worker, resource, began, ended, error):
                self._bury(worker, began)
                track = _track(worker, self._lane(worker, began, ended))
                self._slice(track, "failure", f"{resource}: {error}", began, ended, message=record.message)
                self._numbers.failures.extend((began, ended))
            case Release(worker, resource, token, worked_until):
                if hold := self._held[worker].pop((resource, token), None):
                    self._end(hold, worked_until, record)
            case Write():
                if hold := self._held[record.worker].get((row_of(record), record.token)):
                    hold.writes.append(record)
                if record.outcome is Outcome.REFUSED:
                    self._refusals.append(record)
            case _:
                pass

    def finish(self) -> None:
        for worker, held in self._held.items():
            self._bury(worker, _FOREVER)
            for hold in held.values():
                self._end(hold, hold.lease.completed)
        for gap in self._numbers.unavailable():
            self._slice(_GAPS, "unavailable", "nobody got a lock", gap.began, gap.ended)
        for write in sorted(self._refusals, key=attrgetter("ended")):
            self._numbers.refused.append(write.ended)
            facts = {"worker": write.worker, "token": str(write.token), "error": write.error}
            event = {"ph": "i", "s": "t", "cat": "refusal", "name": write.resource, "args": facts}
            self._put({**event, "ts": self._time(write.ended), **self._name(_REFUSALS)})
        self._put({"ph": "M", "pid": 1, "name": "process_labels", "args": {"labels": "fencelock"}}, "\n]}\n")

    def _bury(self, worker: int, now: int) -> None:
        """End the holds that a worker had when it was killed: the worker at `now` is another process."""
        while (deaths := self._deaths[worker]) and deaths[0] < now:
            death, held = deaths.popleft(), self._held[worker]
            for key in [key for key, hold in held.items() if hold.lease.completed <= death]:
                self._end(held.pop(key), death)

    def _lane(self, worker: int, began: int, ended: int) -> int:
        """Return a lane of a worker that is free from `began` on, and keep it until `ended`."""
        busy = self._busy[worker]
        lane = next((lane for lane, until in enumerate(busy) if until <= began), len(busy))
        busy[lane : lane + 1] = [ended]
        return lane

    def _end(self, hold: Hold, worked_until: int, release: Release | None = None) -> None:
        lease, hold.worked_until = hold.lease, worked_until
        track = _track(lease.worker, hold.lane)
        self._busy[lease.worker][hold.lane] = worked_until if release is None else release.ended
        if lease.completed - lease.began >= SHORTEST_WAIT:
            self._slice(track, "wait", f"wait for {lease.resource}", lease.began, lease.completed)
        facts = {"resource": lease.resource, "token": str(lease.token), "error": release and release.error}
        self._slice(track, "lease", lease.resource, lease.completed, worked_until, **facts)
        for write in hold.writes:
            began, ended = (min(max(at, lease.completed), worked_until) for at in (write.began, write.ended))
            facts = {"style": write.style, "read": str(write.read), "error": write.error}
            self._slice(track, "write", f"write {write.outcome}", began, ended, **facts)
        first, last = self._numbers.around_stale
        stale = self._numbers.stale
        if stale and lease.resource == row_of(stale) and lease.completed < last and worked_until > first:
            self._numbers.holds.append(hold)

    def _slice(
        self, track: tuple[str, str], kind: str, name: str, began: int, ended: int, **facts: Any
    ) -> None:
        times = {"ts": self._time(began), "dur": (ended - began) / 1000}
        self._put({"ph": "X", "cat": kind, "name": name, **times, **self._name(track), "args": facts})

    def _name(self, track: tuple[str, str]) -> dict[str, int]:
        """Return the numbers of a track; the first time, they are given to its names."""
        if track not in self._tracks:
            process, row = track
            pid = _PROCESSES.get(process) or 1000 + int(process.removeprefix("worker "))
            ids = self._tracks[track] = {"pid": pid, "tid": len(self._tracks) + 1}
            self._put({"ph": "M", "name": "process_name", **ids, "args": {"name": process}})
            self._put({"ph": "M", "name": "thread_name", **ids, "args": {"name": row}})
        return self._tracks[track]

    def _time(self, at: int) -> float:
        return (at - self._numbers.run.began) / 1000

    def _put(self, event: Mapping[str, Any], end: str = ",\n") -> None:
        self._file.write(json.dumps(event, separators=(",", ":")) + end)


def _track(worker: int, lane: int) -> tuple[str, str]:
    return f"worker {worker}", f"lane {lane}"
