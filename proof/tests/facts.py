"""Records for the tests of the readers of histories: made by hand, with times that are small numbers."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from proof.torture.history import (
    VERSION,
    Acquisition,
    Outcome,
    Record,
    Release,
    Row,
    Run,
    Style,
    Write,
    line_of,
)

RUN = Run(VERSION, "0.0", "2020-01-01T00:00:00+00:00", 0)


def acquisition(
    token: int,
    began: int,
    completed: int,
    *,
    resource: str = "r",
    worker: int = 0,
    valid_until: int = 1_000_000,
) -> Acquisition:
    """Make one; the promise lasts for long unless told otherwise."""
    return Acquisition(worker, resource, began, completed, token, valid_until)


def release(token: int, worked_until: int, *, worker: int = 0, error: str = "") -> Release:
    """Make the end of a hold."""
    return Release(worker, "r", token, worked_until, worked_until, error)


def write(
    token: int,
    began: int,
    ended: int,
    read: int | None,
    outcome: Outcome = Outcome.ACKNOWLEDGED,
    *,
    resource: str = "r",
    error: str = "",
    style: Style = Style.CLAIM,
    fence: int | None = None,
    read_at: int = 0,
) -> Write:
    return Write(0, resource, token, began, ended, outcome, read, error, style, fence, read_at)


def row(value: int, fence: int | None, *, resource: str = "r") -> Row:
    """Make a row as it is found at the end."""
    return Row(resource, value, fence)


def save(path: Path, records: Iterable[Record]) -> Path:
    """Write a history to a file."""
    path.write_text("".join(map(line_of, records)), encoding="utf-8")
    return path
