"""A short real run keeps every promise. Violations in its history are found, its trace shows all of it."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest

from proof.tests.facts import RUN, acquisition, release, save, write
from proof.torture.checker import Rule, check, check_file
from proof.torture.history import Acquisition, Fault, Outcome, Record, Release, Row, Write, read_records
from proof.torture.picture import report

pytestmark = [pytest.mark.timed, pytest.mark.long]

RUNS = (
    *("--database", "sqlite", "--duration", "4", "--ttl", "0.3", "--pause", "1", "--every", "0.2"),
    *("--fault", "worker-pause", "--fault", "worker-kill", "--fault", "node-pause", "--fault", "node-flush"),
    *("--workers", "4", "--tasks", "4", "--resources", "4", "--writes", "1", "--think", "0.02"),
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a real run, whose verdict was right."""
    folder = tmp_path_factory.mktemp("run") / "out"
    done = subprocess.run(
        [sys.executable, "-m", "proof.torture", *RUNS, "--output", str(folder)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
        env={**os.environ, "COLUMNS": "160", "TERM": "dumb"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "RIGHT: every promise was kept" in done.stdout
    assert {path.name for path in folder.iterdir()} == {"history.jsonl", "trace.json", "picture.png"}
    return folder


def events_of(trace: Path) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = json.loads(trace.read_text())["traceEvents"]
    return events


def give_a_token_twice(history: list[Record]) -> list[Record]:
    """Another worker is given a token that was given already, at the same time."""
    return [*history, replace(last(history, Acquisition), worker=99)]


def give_a_smaller_token(history: list[Record]) -> list[Record]:
    """The last of all acquisitions is given a token below all others."""
    late = replace(last(history, Acquisition), began=LATE, completed=LATE, token=1)
    return [*history, late]


def build_on_an_old_value(history: list[Record]) -> list[Record]:
    """Another worker adds to a value to which one has added already; the row does not show it."""
    return [*history, replace(last(history, Write), worker=99)]


def write_with_an_old_token(history: list[Record]) -> list[Record]:
    """The last of all writes has the smallest token, and builds on the value that was there."""
    found = last(history, Row)
    late = Write(9, found.resource, 1, LATE, LATE, Outcome.ACKNOWLEDGED, found.value)
    return [late if record is found else record for record in history] + [
        replace(found, value=found.value + 1)
    ]


def lose_an_addition(history: list[Record]) -> list[Record]:
    """A row holds less than was acknowledged."""
    found = last(history, Row)
    return [replace(found, value=0) if record is found else record for record in history]


def lower_a_fence(history: list[Record]) -> list[Record]:
    """The fence of a row is below a token that has written to it."""
    found = last(history, Row)
    return [replace(found, fence=1) if record is found else record for record in history]


LATE = 1 << 62
R = TypeVar("R", Acquisition, Write, Row)


def last(history: list[Record], kind: type[R]) -> R:
    """Return the last record of a kind, of the resource to which most was written."""
    unwritten = {Outcome.REFUSED, Outcome.FAILED, Outcome.UNKNOWN}
    done = [one for one in history if not (isinstance(one, Write) and one.outcome in unwritten)]
    busy, _ = Counter(one.resource for one in done if isinstance(one, Write)).most_common(1)[0]
    return next(one for one in reversed(done) if isinstance(one, kind) and one.resource == busy)


@pytest.mark.parametrize(
    ("violate", "rule"),
    [
        (give_a_token_twice, Rule.UNIQUE_TOKENS),
        (give_a_smaller_token, Rule.ORDERED_TOKENS),
        (build_on_an_old_value, Rule.NO_LOST_UPDATE),
        (write_with_an_old_token, Rule.NO_STALE_ACCEPT),
        (lose_an_addition, Rule.NO_LOST_UPDATE),
        (lower_a_fence, Rule.FENCE_ABOVE),
    ],
)
def test_violation_in_a_real_history_is_found(
    run: Path, violate: Callable[[list[Record]], list[Record]], rule: Rule
) -> None:
    """That one, and none else, in whatever order the lines come."""
    with (run / "history.jsonl").open() as lines:
        history = list(read_records(lines))
    random.Random(1).shuffle(history)
    assert check(history).violations == ()
    assert set(check(violate(history)).broken) == {rule}


def test_each_acquisition_is_a_slice_and_each_refusal_an_instant(run: Path) -> None:
    """With its resource and its token; faults are slices, and all tracks have names."""
    events = events_of(run / "trace.json")
    verdict = check_file(run / "history.jsonl")
    drawn = Counter((event["ph"], event.get("cat")) for event in events)
    assert drawn["X", "lease"] == verdict.acquisitions > 0
    assert drawn["X", "failure"] == sum(verdict.failures.values())
    assert drawn["X", "fault"] == sum(verdict.faults.values()) > 0
    assert drawn["i", "refusal"] == verdict.outcomes.get(Outcome.REFUSED, 0)
    with (run / "history.jsonl").open() as lines:
        acquired = [record for record in read_records(lines) if isinstance(record, Acquisition)]
    leases = [event["args"] for event in events if event.get("cat") == "lease"]
    assert Counter((one["resource"], one["token"]) for one in leases) == Counter(
        (one.resource, str(one.token)) for one in acquired
    )
    named = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    assert named >= {(event["pid"], event["tid"]) for event in events if event["ph"] != "M"}
    assert {"worker 0", "worker 3", "the run", "nodes and database"} <= {
        event["args"]["name"] for event in events if event["name"] == "process_name"
    }


def test_slices_of_a_track_follow_each_other_or_lie_in_each_other(run: Path) -> None:
    """As the format asks for; their times are numbers from 0 on, in order."""
    tracks = defaultdict(list)
    for event in events_of(run / "trace.json"):
        if event["ph"] == "X":
            assert event["ts"] >= 0
            assert event["dur"] >= 0
            began, took = (round(event[name] * 1000) for name in ("ts", "dur"))
            tracks[event["pid"], event["tid"]].append((began, began + took))
    assert len(tracks) > 4
    for slices in tracks.values():
        assert slices == sorted(slices, key=lambda times: times[0])
        within: list[int] = []
        for began, ended in slices:
            while within and within[-1] <= began:
                within.pop()
            assert not within or ended <= within[-1]
            within.append(ended)


def test_picture_is_a_png_of_some_size(run: Path) -> None:
    """A person has to look at the content of the picture."""
    assert (run / "picture.png").read_bytes().startswith(b"\x89PNG")
    assert (run / "picture.png").stat().st_size > 30_000


def test_a_killed_holder_ends_with_its_process_and_leaves_its_lane(tmp_path: Path) -> None:
    """Its successor is drawn there. A token that was given twice is two leases; one without end is short."""
    history: list[Record] = [
        RUN,
        acquisition(1, 1000, 2000),
        write(1, 3000, 9000, 0, Outcome.UNKNOWN),
        acquisition(2, 8000, 9000),
        release(2, 10_000),
        acquisition(2, 11_000, 12_000),
        acquisition(2, 13_000, 14_000),
        Release(0, "r", 2, 15_000, 16_000),
        acquisition(3, 17_000, 18_000),
        Fault("worker-kill", "worker 0", 5000, 6000),
    ]
    trace, _ = report(save(tmp_path / "history", history), check(history))
    slices = [event for event in events_of(trace) if event.get("cat") in {"lease", "write"}]
    assert [(one["cat"], one["ts"], one["ts"] + one["dur"]) for one in slices] == [
        ("lease", 2, 6),
        ("write", 3, 6),
        ("lease", 9, 10),
        ("lease", 12, 12),
        ("lease", 14, 15),
        ("lease", 18, 18),
    ]
    assert len({one["tid"] for one in slices[:3]}) == 1
