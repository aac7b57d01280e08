"""Metrics and spans for OpenTelemetry show the locks of a program, with the real SDK."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from opentelemetry.trace import SpanKind, StatusCode

from fencelock import Database, LockTimeoutError, Redlock
from fencelock.observe.otel import FencelockInstrumentor
from tests.observe.conftest import Telemetry
from tests.polling import eventually

ITS = {"authority": "Redlock", "lock": "order"}


def test_connections_that_are_opened(telemetry: Telemetry, tmp_path: Path) -> None:
    with Database(f"sqlite:///{tmp_path}/app.db") as authority, authority.lock("order:1"):
        pass
    assert telemetry.value("fencelock.connections.opened", authority="Database") == 1


def test_acquisition_is_a_span_and_two_metrics(authority: Redlock, telemetry: Telemetry) -> None:
    """The span has the resource and the token, which metrics must not have."""
    with telemetry.tracer.start_as_current_span("request"), authority.lock("order:1") as token:
        assert telemetry.value("fencelock.locks.held", **ITS) == 1
    acquire, request = telemetry.exporter.get_finished_spans()
    assert (acquire.name, acquire.kind) == ("fencelock acquire order", SpanKind.CLIENT)
    assert acquire.parent is not None
    assert acquire.parent.span_id == request.context.span_id
    assert acquire.attributes is not None
    assert acquire.attributes["fencelock.resource"] == ("order:1",)
    assert acquire.attributes["fencelock.token"] == (token,)
    assert acquire.attributes["fencelock.outcome"] == "acquired"
    assert acquire.start_time is not None
    assert acquire.end_time is not None
    assert 0 < acquire.end_time - acquire.start_time < 5e9
    (released,) = request.events
    assert released.name == "fencelock released"
    assert telemetry.value("fencelock.lock.wait.duration", **ITS, outcome="acquired") == 1
    assert telemetry.value("fencelock.lock.hold.duration", **ITS, end="released") == 1
    assert telemetry.value("fencelock.locks.held", **ITS) == 0


def test_task_that_waits_in_vain(authority: Redlock, rival: Redlock, telemetry: Telemetry) -> None:
    async def main() -> None:
        with telemetry.tracer.start_as_current_span("job"):
            await authority.lock("order:1").aio.acquire(timeout=0.1)

    with rival.lock("order:1"):
        telemetry.exporter.clear()
        with pytest.raises(LockTimeoutError):
            asyncio.run(main())
    acquire, job = telemetry.exporter.get_finished_spans()
    assert acquire.parent is not None
    assert acquire.parent.span_id == job.context.span_id
    assert acquire.status.status_code is StatusCode.ERROR
    assert acquire.events[0].name == "exception"
    assert telemetry.value("fencelock.lock.wait.duration", **ITS, outcome="timeout") == 1


@pytest.mark.timed
def test_what_becomes_of_a_lock_stands_on_the_span(authority: Redlock, telemetry: Telemetry) -> None:
    lock = authority.lock("order:1", ttl=2, renew=False, if_lost="warn")
    with telemetry.tracer.start_as_current_span("request"), lock:
        lock.remint()
        assert eventually(lambda: lock.lease.lost)
    request = telemetry.exporter.get_finished_spans()[-1]
    assert [event.name for event in request.events] == [
        "fencelock reminted",
        "fencelock lost",
        "fencelock released",
    ]
    assert telemetry.value("fencelock.remints", authority="Redlock") == 1
    assert telemetry.value("fencelock.leases.lost", lock="order", reason="expired") == 1


def test_uninstrumented_counts_no_more(authority: Redlock, telemetry: Telemetry) -> None:
    FencelockInstrumentor().uninstrument()
    with authority.lock("order:1"):
        pass
    assert telemetry.value("fencelock.locks.held", **ITS) is None
    assert not telemetry.exporter.get_finished_spans()


def test_opentelemetry_finds_it_by_itself() -> None:
    (found,) = entry_points(group="opentelemetry_instrumentor", name="fencelock")
    assert found.load() is FencelockInstrumentor
    code = "from fencelock import _events; print(len(_events.listeners))"
    from_scripts = ["-c", "from opentelemetry.instrumentation.auto_instrumentation import run; run()"]
    environment = os.environ | {"OTEL_TRACES_EXPORTER": "none", "OTEL_METRICS_EXPORTER": "none"}
    run = subprocess.run(
        [sys.executable, *from_scripts, sys.executable, "-c", code],
        check=True,
        capture_output=True,
        text=True,
        env=environment,
    )
    assert run.stdout.strip() == "1", run.stderr
