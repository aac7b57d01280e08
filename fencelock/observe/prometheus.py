"""Metrics for Prometheus, by `prometheus_client` (the extra `fencelock[prometheus]`).

```python
from fencelock.observe import prometheus

prometheus.instrument()
```

This also works in the multiprocess mode of `prometheus_client` (gunicorn, Celery's prefork pool). Set
PROMETHEUS_MULTIPROC_DIR before anything imports `prometheus_client`, as its documentation says.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram, Metric

from fencelock import _events
from fencelock._process import start_over_in_children
from fencelock._workers import Worker
from fencelock.authority.redlock.admin import NodeState
from fencelock.errors import AuthorityError, FencelockError
from fencelock.observe.labels import LabelFunction, Labels, authority_of, kind_of_lock

if TYPE_CHECKING:
    from fencelock.authority.redlock.redlock import Redlock

logger: logging.Logger = logging.getLogger("fencelock.observe")

_M = TypeVar("_M", Counter, Gauge, Histogram)
#: In this mode another process reads the numbers, at any time.
_IS_MULTIPROCESS: Final = "PROMETHEUS_MULTIPROC_DIR" in os.environ
#: The number of events that are counted together, which takes half the time.
_BATCH: Final = 1 if _IS_MULTIPROCESS else 500

#: Seconds: a lock on nodes nearby takes one or two milliseconds, and a timeout is mostly 10 s.
BUCKETS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)

_GUARD: Final[dict[type[_events.GuardEvent], tuple[str, str]]] = {
    _events.StaleWriteRefused: ("stale_writes_refused", "Writes with an old token"),
    _events.UnfencedWriteRefused: ("unfenced_writes_refused", "Writes without a lease"),
    _events.WrittenWithoutLease: ("writes_without_lease", "Writes without a lease, to models that allow it"),
    _events.RowClaimed: ("claims", "Rows claimed and gates passed"),
}


class _OfLock:
    """The series of one class of authority and one kind of lock.

    To find a series by its labels costs as much as to count, so the most frequent ones are kept.
    """

    def __init__(self, metrics: Metrics, labels: tuple[str, str]) -> None:
        self.waiting = 0
        self.held = 0
        self._labels = labels
        self._wait, self._hold = metrics.wait, metrics.hold
        self.acquired = self.waited("acquired")
        self.released = self.held_until("released")
        self._gauges = metrics.waiters.labels(*labels), metrics.held.labels(*labels)
        if not _IS_MULTIPROCESS:
            self._gauges[0].set_function(lambda: self.waiting)
            self._gauges[1].set_function(lambda: self.held)

    def count(self, waiting: int, held: int) -> None:
        """Add to the number of waiting acquisitions, and to the number of held locks."""
        if self.waiting + waiting < 0 or self.held + held < 0:  # the lock is older than the metrics
            return
        self.waiting += waiting
        self.held += held
        if _IS_MULTIPROCESS:  # the numbers are in a file, which another process reads
            for gauge, number in zip(self._gauges, (waiting, held), strict=True):
                gauge.inc(number)

    def waited(self, outcome: str) -> Callable[[float], None]:
        """Return the function that counts the seconds of an acquisition with this outcome."""
        return self._wait.labels(*self._labels, outcome).observe

    def held_until(self, end: str) -> Callable[[float], None]:
        return self._hold.labels(*self._labels, end).observe


class Metrics:
    """The listener that `instrument` returns: it counts events until it is closed."""

    def __init__(
        self, registry: CollectorRegistry, label: LabelFunction, *, textbook_names: bool = False
    ) -> None:
        self._registry = registry
        self._later: deque[_events.Event] = deque()
        self.begin_in_child()
        start_over_in_children(self)
        registry.register(self)
        self._made: list[Any] = [self]
        self._name = label
        self._label = Labels(label).of
        self._series: dict[tuple[type, str], _OfLock] = {}

        def made(kind: Callable[..., _M], name: str, text: str, *labels: str, **options: Any) -> _M:
            metric = kind(f"fencelock_{name}", text, labels, registry=registry, **options)
            self._made.append(metric)
            return metric

        seconds = partial(made, Histogram, buckets=BUCKETS)
        gauge = partial(made, Gauge, multiprocess_mode="livesum")
        its = ("authority", "lock")
        self.wait: Histogram = seconds("lock_wait_seconds", "Until acquired or given up", *its, "outcome")
        self.hold: Histogram = seconds("lock_hold_seconds", "From acquired to released", *its, "end")
        self.held: Gauge = gauge("locks_held", "Locks that this process holds", *its)
        self.waiters: Gauge = gauge("lock_waiters", "Acquisitions that wait, after a first attempt", *its)
        self._lost = made(Counter, "leases_lost", "Leases that ended before their lock", "lock", "reason")
        self._renewals = made(Counter, "renewals", "Extensions in the background", "outcome")
        self._late = seconds("renewal_lateness_seconds", "From planned to begun")
        of_guard = {kind: made(Counter, *its, "table") for kind, its in _GUARD.items()}
        self._doubts = made(Counter, "commits_in_doubt", "COMMITs whose outcome is not known")
        self._remints = made(Counter, "remints", "Tokens exchanged for larger ones", "authority")
        self._errors = made(Counter, "authority_errors", "Undecided operations", "authority", "error")
        self._opened = made(Counter, "connections_opened", "Connections opened to the authority", "authority")
        self._notes: dict[type[_events.Event], Callable[[Any], object]] = {
            _events.LockWaiting: lambda event: self._of(event).count(1, 0),
            _events.LockAcquired: self._on_acquired,
            _events.LockNotAcquired: self._on_not_acquired,
            _events.LockReleased: self._on_released,
            _events.LeaseLost: lambda event: self._lost.labels(self._label(event), event.reason).inc(),
            _events.LeaseExtended: self._on_extended,
            **dict.fromkeys(_GUARD, lambda event: of_guard[type(event)].labels(event.table or "").inc()),
            _events.CommitInDoubt: lambda _: self._doubts.inc(),
            _events.TokenReminted: lambda event: self._remints.labels(authority_of(event)).inc(),
            _events.ConnectionOpened: lambda event: self._opened.labels(event.authority).inc(),
        }
        _events.on_event(self)
        if textbook_names:
            name, text = "distributed_lock_wait_seconds", "Until acquired"
            self._textbook_wait = Histogram(name, text, ("lock",), buckets=BUCKETS, registry=registry)
            name, text = "distributed_lock_failures", "Locks that were not acquired"
            self._textbook_failures = Counter(name, text, ("lock", "outcome"), registry=registry)
            self._made += [self._textbook_wait, self._textbook_failures]
            _events.on_event(self._count_by_textbook)

    def begin_in_child(self) -> None:
        """Make the mutex for counting; a forked child needs a new one, because its copy may be locked."""
        self._mutex = threading.Lock()

    def __call__(self, event: _events.Event) -> None:
        """Note an event; count when a batch is full, or after an error: its traceback keeps objects alive."""
        self._later.append(event)
        if len(self._later) < _BATCH and getattr(event, "error", None) is None:
            return
        # If the mutex is locked, its owner counts the new events, too. A signal handler may run in the owner.
        while self._later and self._mutex.acquire(blocking=False):
            try:
                self._count_all()
            finally:
                self._mutex.release()

    def collect(self) -> Iterable[Metric]:
        """Count the remaining events; the registry calls this before it reads the metrics."""
        with self._mutex:
            self._count_all()
        return ()

    def _count_all(self) -> None:
        while self._later:
            event = self._later.popleft()
            try:
                if (note := self._notes.get(type(event))) is not None:
                    note(event)
            except Exception:  # the user's `label` may raise any error
                logger.exception("an event could not be counted")

    def close(self) -> None:
        """Stop listening, and remove the metrics from the registry."""
        _events.forget(self)
        _events.forget(self._count_by_textbook)
        while self._made:
            self._registry.unregister(self._made.pop())

    def _of(self, event: _events.LockEvent) -> _OfLock:
        return self._series.get((type(event.authority), self._name(event))) or self._add(event)

    def _add(self, event: _events.LockEvent) -> _OfLock:
        key = type(event.authority), self._label(event)
        if key not in self._series:
            self._series[key] = _OfLock(self, (key[0].__name__, key[1]))
        return self._series[key]

    def _on_acquired(self, event: _events.LockAcquired) -> None:
        series = self._of(event)
        series.count(-1 if event.had_to_wait else 0, 1)
        series.acquired(event.waited)

    def _on_not_acquired(self, event: _events.LockNotAcquired) -> None:
        series = self._of(event)
        series.count(-1 if event.had_to_wait else 0, 0)
        series.waited(event.outcome)(event.waited)
        self._count_error(event, event.error)

    def _on_released(self, event: _events.LockReleased) -> None:
        series = self._of(event)
        series.count(0, -1)
        (series.released if event.end == "released" else series.held_until(event.end))(event.held)
        self._count_error(event, event.error)

    def _on_extended(self, event: _events.LeaseExtended) -> None:
        self._renewals.labels(event.outcome).inc()
        self._late.observe(event.lateness)
        self._count_error(event, event.error)

    def _count_by_textbook(self, event: _events.Event) -> None:
        if isinstance(event, _events.LockAcquired):
            self._textbook_wait.labels(self._label(event)).observe(event.waited)
        elif isinstance(event, _events.LockNotAcquired):
            self._textbook_failures.labels(self._label(event), event.outcome).inc()

    def _count_error(self, event: _events.LockEvent, error: BaseException | None) -> None:
        if isinstance(error, AuthorityError):
            self._errors.labels(authority_of(event), type(error).__name__).inc()


def instrument(
    registry: CollectorRegistry = REGISTRY,
    *,
    label: LabelFunction = kind_of_lock,
    textbook_names: bool = False,
) -> Metrics:
    """Count from now on what locks and fences do; call it once in a process, before the process forks.

    ```python
    metrics = instrument()                       # in the registry that prometheus_client serves
    metrics.close()                              # never, in most programs
    ```

    Args:
        registry: the registry of the metrics; by default, the default registry of `prometheus_client`.
        label: returns the value of the label `lock` for an event. By default this is the template that
            `@fenced` was given, or else the part of the resource before the first `:`. Without a `:`, it
            is the name of a semaphore, and `other` for other locks. After 200 values, each further one is
            `other`.
        textbook_names: count also as `distributed_lock_wait_seconds` and `distributed_lock_failures_total`.

    Returns:
        The metrics; their `close()` ends the counting.

    Raises:
        ValueError: the registry has these metrics already.
    """
    return Metrics(registry, label, textbook_names=textbook_names)


def watch_nodes(
    authority: Redlock, every: float = 15.0, *, registry: CollectorRegistry = REGISTRY
) -> Callable[[], None]:
    """Ask the nodes for their state in a thread, pausing `every` seconds; return a function to end it.

    ```python
    end = watch_nodes(Redlock("redis://r1:6379"), every=15)
    end()
    ```

    `fencelock_node_state` is 1 for the state that a node is in, and 0 for all others. One watching process
    of a program is enough.

    Raises:
        ValueError: the registry has these metrics already.
    """
    gauge = partial(Gauge, registry=registry, multiprocess_mode="mostrecent")
    state = gauge("fencelock_node_state", "Whether a node is in this state", ("node", "state"))
    epoch = gauge("fencelock_node_epoch", "The epoch that a node grants in", ("node",))
    left = gauge("fencelock_node_recovery_remaining_seconds", "Until a node may vote again", ("node",))

    def watch() -> float:
        try:
            found = authority.status()
        except FencelockError as error:
            logger.warning("the nodes could not be asked for their state: %s", error)
            found = ()
        for node in found:
            for each in NodeState:
                state.labels(node.address, each.value).set(each is node.state)
            epoch.labels(node.address).set(node.epoch or 0)
            left.labels(node.address).set(node.recovering_for or 0.0)
        return time.monotonic() + every

    def end() -> None:
        worker.close(threading.TIMEOUT_MAX)
        for metric in (state, epoch, left):
            registry.unregister(metric)

    worker = Worker("fencelock-watch-nodes", watch)
    worker.wake()
    return end
