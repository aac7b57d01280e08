"""The part that runs inside pytest: it picks tests, writes down how each ends, and measures lines.

A copy of this file is on the path of the tests, without this project, so it imports nothing of it.
MUTATION_JOB names a file with the job; see `Job`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import pytest

#: A test may take so many times what it took before, and some seconds more.
SLOWER = 8


class Job(TypedDict):
    """What pytest is to do.

    Attributes:
        report: a file that gets two lines of JSON for each test: when it begins, and when it has ended.
        tests: the ids to run, and how long each is known to take; all where they are missing.
        patience: seconds that a test may take, beside `SLOWER` times what it is known to take.
        seconds: no test begins later than that after the first.
        lines: the file for the lines that each test runs.
        scope: the folders whose lines count.
    """

    report: str
    tests: NotRequired[dict[str, float]]
    patience: float
    seconds: float
    lines: NotRequired[str]
    scope: NotRequired[list[str]]


class _Lines:
    """Measures the lines that each test runs in this process, in all threads and greenlets."""

    def __init__(self, file: str, scope: list[str]) -> None:
        from coverage import Coverage  # noqa: PLC0415 - only this run needs it

        self._coverage = Coverage(
            data_file=file,
            config_file=False,
            include=[f"{folder}/*" for folder in scope],
            concurrency=["thread", "greenlet"],
        )
        options: dict[str, bool | str | list[str]] = {
            "run:relative_files": True,
            "run:core": "ctrace",
            "run:disable_warnings": ["trace-changed", "no-data-collected"],
        }
        for name, value in options.items():
            self._coverage.set_option(name, value)
        self._coverage.start()
        self._tracer = sys.gettrace()

    def switch(self, test: str) -> None:
        """Count lines for this test from now on. A test before may have taken the place of the tracer."""
        if sys.gettrace() is not self._tracer:
            self._coverage.stop()
            self._coverage.start()
            self._tracer = sys.gettrace()
        self._coverage.switch_context(test)

    def save(self) -> None:
        self._coverage.stop()
        self._coverage.save()


class Plugin:
    """Carries out a job."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._report = Path(job["report"]).open("a", encoding="utf-8")  # noqa: SIM115 - it ends with the process
        self._lines = _Lines(job["lines"], job["scope"]) if "lines" in job else None
        self._outcome, self._spent, self._end = "passed", 0.0, 0.0

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Keep the tests of the job, slow ones last, else in pytest's order, so that they share fixtures."""
        if self._lines is not None:  # a test that takes too long would end the process, and lose all lines
            for item in items:
                item.add_marker(pytest.mark.timeout(0), append=False)
        if "tests" not in self._job:
            return
        known = self._job["tests"]
        items[:] = [item for item in items if item.nodeid in known]
        items.sort(key=lambda item: int(known[item.nodeid]))
        for item in items:
            item.add_marker(
                pytest.mark.timeout(self._job["patience"] + SLOWER * known[item.nodeid]), append=False
            )

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """Note a test's beginning and end; behind the last one for which there is time, stop."""
        self._end = self._end or time.monotonic() + self._job["seconds"]
        self._note(begins=item.nodeid)
        self._outcome, self._spent = "passed", 0.0
        if self._lines is not None:
            self._lines.switch(item.nodeid)
        try:
            return (yield)
        finally:
            if self._lines is not None:
                self._lines.switch("")
            self._note(outcome=self._outcome, seconds=round(self._spent, 3))
            if time.monotonic() > self._end:
                item.session.shouldstop = "the time is over"

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Sum up a test's setup, call and teardown."""
        self._spent += report.duration
        if report.failed:
            self._outcome = "hung" if "Timeout (>" in report.longreprtext else "failed"
        elif report.skipped and not hasattr(report, "wasxfail"):
            self._outcome = "skipped"

    def pytest_sessionfinish(self) -> None:
        """Keep the lines."""
        if self._lines is not None:
            self._lines.save()

    def _note(self, **facts: Any) -> None:
        self._report.write(json.dumps(facts) + "\n")
        self._report.flush()


def pytest_configure(config: pytest.Config) -> None:
    """Carry out the job that the environment names."""
    config.pluginmanager.register(Plugin(json.loads(Path(os.environ["MUTATION_JOB"]).read_text())))
