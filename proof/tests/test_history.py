"""A history is read as it was written. A text that is no history is refused with the number of the line."""

from __future__ import annotations

from pathlib import Path

import pytest

from proof.tests.facts import RUN, acquisition, save
from proof.torture.history import (
    Acquisition,
    Cut,
    Failure,
    Fault,
    HistoryError,
    Outcome,
    Record,
    Release,
    Row,
    Run,
    Write,
    line_of,
    read_records,
)

RECORDS: list[Record] = [
    Run(1, "1.2", "2020-01-01T00:00:00+00:00", 5, {"ttl": 0.5, "fault": ["a", "b"]}, {"nodes": "valkey 8"}),
    Acquisition(3, "order:é — ü", 1, 2, 1 << 62, 9),
    Failure(3, "r", 3, 4, "QuorumError", 'two "quoted"\nlines'),
    Release(3, "r", 7, 8, 9, "LockLostError"),
    Write(3, "r", 7, 8, 9, Outcome.REFUSED, None, "StaleTokenError"),
    Write(3, "r", 7, 8, 9, Outcome.ACKNOWLEDGED, 0),
    Fault("node-blank", "node 0", 1, 2, "killed"),
    Row("r", 3, None),
    Row("s", 3, 1 << 61),
    Cut('{"kind":"acq', 4),
]


def test_what_was_written_is_read(tmp_path: Path) -> None:
    """Each kind of record survives the way through the file."""
    with save(tmp_path / "history", RECORDS).open(encoding="utf-8") as lines:
        assert list(read_records(lines)) == RECORDS


def test_a_last_line_that_was_cut_off_is_told_apart() -> None:
    """It is what a killed worker leaves, at whatever character it was killed."""
    whole = line_of(acquisition(1, 2, 3))
    for length in range(1, len(whole) - 1):
        assert list(read_records([line_of(RUN), whole[:length]])) == [RUN, Cut(whole[:length])]
    assert list(read_records([whole.removesuffix("\n")])) == [acquisition(1, 2, 3)]


@pytest.mark.parametrize(
    "line",
    [
        "nonsense",
        "[]",
        "{}",
        '{"kind":"surprise"}',
        '{"kind":"row","resource":"r","value":1}',
        '{"kind":"row","resource":"r","value":"1","fence":null}',
        '{"kind":"row","resource":7,"value":1,"fence":null}',
        '{"kind":"row","resource":"r","value":1,"fence":null,"colour":"red"}',
        '{"kind":"write","worker":1,"resource":"r","token":1,"began":1,"ended":2,"outcome":"perhaps"}',
        line_of(RUN).strip().replace('"version":1', '"version":99'),
    ],
)
def test_a_line_that_is_no_record_is_refused(line: str) -> None:
    """Also the last one, where it has an end; the error names the line."""
    with pytest.raises(HistoryError, match="line 2 is no record of a history"):
        list(read_records([line_of(RUN), line + "\n"]))
