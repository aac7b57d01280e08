"""Metrics and spans for OpenTelemetry (the extra `fencelock[otel]`).

`opentelemetry-instrument python …` finds the instrumentor itself. Without this command, call:

```python
from fencelock.observe.otel import FencelockInstrumentor

FencelockInstrumentor().instrument()
```
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from typing import Any, Final

from opentelemetry import metrics, trace
from opentelemetry.instrumentation.instrumentor import BaseInstrumentor  # type: ignore[attr-defined]
from opentelemetry.metrics import Counter, Histogram, UpDownCounter
from opentelemetry.trace import SpanKind, Status, StatusCode

from fencelock import _events
from fencelock.errors import AuthorityError
from fencelock.observe.labels import LabelFunction, Labels, authority_of, kind_of_lock

_NAME: Final = "fencelock"
_GUARD: Final[dict[type[_events.GuardEvent], str]] = {
    _events.StaleWriteRefused: "fencelock.stale_writes.refused",
    _events.UnfencedWriteRefused: "fencelock.unfenced_writes.refused",
    _events.WrittenWithoutLease: "fencelock.writes.without_lease",
    _events.RowClaimed: "fencelock.claims",
}


class FencelockInstrumentor(BaseInstrumentor):  # type: ignore[misc]
    """Counts what locks and fences do, and makes a span of each acquisition.

    ```python
    FencelockInstrumentor().instrument()
    ```

    `instrument` takes `meter_provider` and `tracer_provider`, the global ones by default, and `label`, as
    `fencelock.observe.prometheus.instrument` does.
    """

    _listener: _Listener | None = None

    def instrumentation_dependencies(self) -> Collection[str]:
        """Return no packages, because this is a part of the instrumented package."""
        return ()

    def _instrument(self, **kwargs: Any) -> None:
        self._listener = _Listener(
            metrics.get_meter(_NAME, meter_provider=kwargs.get("meter_provider")),
            trace.get_tracer(_NAME, tracer_provider=kwargs.get("tracer_provider")),
            kwargs.get("label") or kind_of_lock,
        )
        _events.on_event(self._listener)

    def _uninstrument(self, **_kwargs: Any) -> None:
        if self._listener is not None:
            _events.forget(self._listener)
            self._listener = None


class _Listener:
    """A listener that makes metrics and spans of events."""

    def __init__(self, meter: metrics.Meter, tracer: trace.Tracer, label: LabelFunction) -> None:
        self._tracer = tracer
        self._label = Labels(label).of
        duration: Callable[[str, str], Histogram] = lambda name, text: meter.create_histogram(  # noqa: E731
            name, "s", text
        )
        number: Callable[[str, str], UpDownCounter] = meter.create_up_down_counter
        count: Callable[[str], Counter] = meter.create_counter
        self._wait = duration("fencelock.lock.wait.duration", "Until acquired or given up")
        self._hold = duration("fencelock.lock.hold.duration", "From acquired to released")
        self._late = duration("fencelock.renewal.lateness", "From planned to begun")
        self._held = number("fencelock.locks.held", "{lock}")
        self._waiters = number("fencelock.lock.waiters", "{acquisition}")
        self._lost = count("fencelock.leases.lost")
        self._renewals = count("fencelock.renewals")
        self._remints = count("fencelock.remints")
        self._errors = count("fencelock.authority.errors")
        self._opened = count("fencelock.connections.opened")
        self._doubts = count("fencelock.commits.in_doubt")
        self._guard = {kind: count(name) for kind, name in _GUARD.items()}
        self._notes: dict[type[_events.Event], Callable[[Any], object]] = {
            _events.LockWaiting: lambda event: self._waiters.add(1, self._its(event)),
            _events.LockAcquired: self._on_end,
            _events.LockNotAcquired: self._on_end,
            _events.LockReleased: self._on_released,
            _events.LeaseExtended: self._on_extended,
            _events.LeaseLost: self._on_lost,
            _events.TokenReminted: self._on_reminted,
            _events.CommitInDoubt: lambda _: self._doubts.add(1),
            _events.ConnectionOpened: lambda event: self._opened.add(
                1, {"fencelock.authority": event.authority}
            ),
            **dict.fromkeys(_GUARD, self._on_guard),
        }

    def __call__(self, event: _events.Event) -> None:
        if (note := self._notes.get(type(event))) is not None:
            note(event)

    def _its(self, event: _events.LockEvent) -> dict[str, str]:
        return {"fencelock.authority": authority_of(event), "fencelock.lock": self._label(event)}

    def _on_end(self, event: _events.LockAcquired | _events.LockNotAcquired) -> None:
        """Count an acquisition that has ended, and make its span, as a child of the current span."""
        its, now, error = self._its(event), time.time_ns(), getattr(event, "error", None)
        outcome = {"fencelock.outcome": getattr(event, "outcome", "acquired")}
        if event.had_to_wait:
            self._waiters.add(-1, its)
        if isinstance(event, _events.LockAcquired):
            self._held.add(1, its)
        self._wait.record(event.waited, its | outcome)
        self._count_error(event, error)
        span = self._tracer.start_span(
            f"fencelock acquire {self._label(event)}",
            kind=SpanKind.CLIENT,
            attributes={**its, **_facts(event), **outcome},
            start_time=now - int(event.waited * 1e9),
        )
        if error is not None:
            span.record_exception(error)
            span.set_status(Status(StatusCode.ERROR, type(error).__name__))
        span.end(now)

    def _on_released(self, event: _events.LockReleased) -> None:
        its = self._its(event)
        self._held.add(-1, its)
        self._hold.record(event.held, its | {"fencelock.end": event.end})
        self._count_error(event, event.error)
        _add_to_span("fencelock released", event, {"fencelock.end": event.end, "fencelock.held": event.held})

    def _on_extended(self, event: _events.LeaseExtended) -> None:
        self._renewals.add(1, {"fencelock.outcome": event.outcome})
        self._late.record(event.lateness)
        self._count_error(event, event.error)

    def _on_lost(self, event: _events.LeaseLost) -> None:
        self._lost.add(1, {"fencelock.lock": self._label(event), "fencelock.reason": event.reason})
        _add_to_span("fencelock lost", event, {"fencelock.reason": event.reason})

    def _on_reminted(self, event: _events.TokenReminted) -> None:
        self._remints.add(1, {"fencelock.authority": authority_of(event)})
        _add_to_span("fencelock reminted", event, {})

    def _on_guard(self, event: _events.GuardEvent) -> None:
        self._guard[type(event)].add(1, {"fencelock.table": event.table or ""})
        facts = {"table": event.table, "resource": event.resource, "token": event.token, "fence": event.fence}
        attributes = {f"fencelock.{name}": fact for name, fact in facts.items() if fact is not None}
        trace.get_current_span().add_event(_GUARD[type(event)], attributes)

    def _count_error(self, event: _events.LockEvent, error: BaseException | None) -> None:
        if isinstance(error, AuthorityError):
            its = {"fencelock.authority": authority_of(event), "fencelock.error": type(error).__name__}
            self._errors.add(1, its)


def _facts(event: _events.LockEvent) -> dict[str, Any]:
    """Return attributes for spans; a metric must not have them, because they have too many values."""
    return {"fencelock.resource": event.resources, "fencelock.token": getattr(event, "tokens", ())}


def _add_to_span(name: str, event: _events.LockEvent, facts: dict[str, Any]) -> None:
    trace.get_current_span().add_event(name, {**_facts(event), **facts})
