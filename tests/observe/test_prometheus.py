"""Each metric for Prometheus has the value that the events before give it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from sqlalchemy import create_engine, update
from sqlalchemy.orm import Session

from fencelock import Database, Lease, LockTimeoutError, QuorumError, Redlock, _events, bind, claim
from fencelock.errors import StaleTokenError, UnfencedWriteError
from fencelock.observe import Event, LockReleased, prometheus
from proof.servers import Nodes
from tests.observe.shop import Base, Order
from tests.polling import IMPATIENT, eventually

Value = Callable[..., float | None]


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def value(registry: CollectorRegistry) -> Iterator[Value]:
    metrics = prometheus.instrument(registry, textbook_names=True)

    def find(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(name, labels)

    yield find
    metrics.close()
    assert generate_latest(registry) == b""


ITS = {"authority": "Redlock", "lock": "order"}


def test_lock_that_is_held_and_released(authority: Redlock, value: Value) -> None:
    with (lock := authority.lock("order:1")):
        assert value("fencelock_locks_held", **ITS) == 1
        assert value("fencelock_lock_waiters", **ITS) == 0
        lock.remint()
    assert value("fencelock_remints_total", authority="Redlock") == 1
    assert value("fencelock_lock_wait_seconds_count", **ITS, outcome="acquired") == 1
    assert value("fencelock_lock_hold_seconds_count", **ITS, end="released") == 1
    assert value("fencelock_locks_held", **ITS) == 0
    assert value("distributed_lock_wait_seconds_count", lock="order") == 1


def test_lock_that_is_waited_for(authority: Redlock, rival: Redlock, value: Value) -> None:
    lock = authority.lock("order:1")
    with rival.lock("order:1"):
        thread = threading.Thread(target=wait_in_vain_for, args=(lock,))
        thread.start()
        assert eventually(lambda: value("fencelock_lock_waiters", **ITS) == 1)
        thread.join()
    assert value("fencelock_lock_waiters", **ITS) == 0
    assert value("fencelock_lock_wait_seconds_count", **ITS, outcome="timeout") == 2
    assert value("distributed_lock_failures_total", lock="order", outcome="timeout") == 2


@pytest.mark.parametrize("source", ["node", "database"])
def test_connections_that_are_opened(nodes: Nodes, tmp_path: Path, value: Value, source: str) -> None:
    with Redlock(nodes.urls) if source == "node" else Database(f"sqlite:///{tmp_path}/app.db") as authority:
        its, counts = type(authority).__name__, set[float | None]()
        authority.init()
        for _ in range(3):
            with authority.lock("order:1"):
                pass
            counts.add(value("fencelock_connections_opened_total", authority=its))
    assert counts == {10.0 if source == "node" else 1.0}  # init has its own


def wait_in_vain_for(lock: Any) -> None:
    assert lock.try_acquire() is None
    with suppress(LockTimeoutError):
        lock.acquire(timeout=0.3)


@pytest.mark.timed
def test_lease_that_is_extended_and_lost(authority: Redlock, value: Value) -> None:
    with authority.lock("order:1", ttl=2, max_hold=3, if_lost="warn"):
        assert eventually(lambda: value("fencelock_leases_lost_total", lock="order", reason="max_hold") == 1)
    extended = value("fencelock_renewals_total", outcome="extended")
    assert extended
    assert value("fencelock_renewal_lateness_seconds_count") == extended
    assert value("fencelock_lock_hold_seconds_count", **ITS, end="max_hold") == 1


def test_what_the_guard_refuses(value: Value) -> None:
    engine = create_engine("sqlite://")
    Base.metadata.create_all(engine)
    with Session(engine) as session:
        bind(session, Lease("order:1", 5))
        session.add(Order(id=1))
        session.commit()
        claim(session, Order, 1)
        session.commit()
    with Session(engine) as session:
        bind(session, Lease("order:1", 4))
        with pytest.raises(StaleTokenError):
            claim(session, Order, 1)
    with Session(engine) as session, pytest.raises(UnfencedWriteError):
        session.execute(update(Order).values(paid=2))
    for name in ("claims", "stale_writes_refused", "unfenced_writes_refused"):
        assert value(f"fencelock_{name}_total", table="orders") == 1, name
    engine.dispose()


def test_a_million_resources_are_one_series(registry: CollectorRegistry, authority: Redlock) -> None:
    metrics = prometheus.instrument(registry)
    for number in range(210):
        with authority.lock(f"order:{number}"), authority.lock(f"random-{number}:1"):
            pass
        with authority.lock(f"alice-{number}@example.org"):
            pass
    text = generate_latest(registry).decode()
    metrics.close()
    assert text.count("fencelock_lock_hold_seconds_count{") == 201
    assert 'lock="other"' in text
    assert "alice" not in text


def test_lock_that_was_held_before_is_not_counted_below_zero(
    registry: CollectorRegistry, authority: Redlock, events: list[Event]
) -> None:
    """Something else listened already, so that its release is told."""
    with authority.lock("order:1"):
        metrics = prometheus.instrument(registry)
    assert isinstance(events[-1], LockReleased)
    assert registry.get_sample_value("fencelock_locks_held", ITS) == 0
    metrics.close()


def test_child_counts_that_was_forked_in_the_midst_of_counting(authority: Redlock, value: Value) -> None:
    (metrics,) = (each for each in _events.listeners if isinstance(each, prometheus.Metrics))
    _events._telling[threading.get_ident()] = []
    with metrics._mutex:
        child = os.fork()
        if child == 0:
            with suppress(BaseException), authority.lock("order:1"):
                pass
            os._exit(int(value("fencelock_lock_hold_seconds_count", **ITS, end="released") != 1))
    _events._telling.clear()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_label_of_the_users_own(registry: CollectorRegistry, authority: Redlock) -> None:
    metrics = prometheus.instrument(registry, label=lambda event: event.resources[0].upper())
    with authority.lock("order:1"):
        pass
    its = {"authority": "Redlock", "lock": "ORDER:1", "end": "released"}
    assert registry.get_sample_value("fencelock_lock_hold_seconds_count", its) == 1
    metrics.close()


def test_threads_and_signal_handlers_are_counted_to_the_last(authority: Redlock, value: Value) -> None:
    struck = 0

    def handler(*_: object) -> None:
        nonlocal struck
        with suppress(RuntimeError), authority.lock(f"signal:{struck}"):  # inside a lock call it is refused
            struck += 1
        signal.setitimer(signal.ITIMER_REAL, 0.01)

    def work(number: int) -> None:
        for _ in range(50):
            with authority.lock(f"order:{number}"):
                pass

    before = signal.signal(signal.SIGALRM, handler)
    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    signal.setitimer(signal.ITIMER_REAL, 0.01)
    try:
        for thread in threads:
            thread.start()
        work(4)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    for thread in threads:
        thread.join()
    assert value("fencelock_lock_hold_seconds_count", **ITS, end="released") == 250
    assert value("fencelock_lock_hold_seconds_count", **ITS | {"lock": "signal"}, end="released") == struck
    for lock in ("order", "signal"):
        assert value("fencelock_locks_held", **ITS | {"lock": lock}) == 0
        assert value("fencelock_lock_waiters", **ITS | {"lock": lock}) == 0


def test_nodes_are_watched_and_their_lack_is_an_error(
    make_nodes: Callable[..., Nodes], registry: CollectorRegistry
) -> None:
    nodes = make_nodes(3)
    with Redlock(nodes.urls, **IMPATIENT) as authority:
        authority.init()
        end = prometheus.watch_nodes(authority, 0.1, registry=registry)

        def state(node: int, name: str) -> float | None:
            its = {"node": authority.nodes[node], "state": name}
            return registry.get_sample_value("fencelock_node_state", its)

        assert eventually(lambda: [state(node, "admitted") for node in range(3)] == [1, 1, 1])
        its = {"node": authority.nodes[0]}
        assert registry.get_sample_value("fencelock_node_epoch", its) == 0
        assert registry.get_sample_value("fencelock_node_recovery_remaining_seconds", its) == 0
        nodes[1].kill()
        assert eventually(lambda: state(1, "unreachable") == 1)
        assert (state(1, "admitted"), state(0, "admitted")) == (0, 1)
        end()
        assert generate_latest(registry) == b""
        metrics = prometheus.instrument(registry)
        nodes[2].kill()
        with pytest.raises(QuorumError):
            authority.lock("order:1").acquire(timeout=1)
    for name, its in (
        ("fencelock_lock_wait_seconds_count", ITS | {"outcome": "error"}),
        ("fencelock_authority_errors_total", {"authority": "Redlock", "error": "QuorumError"}),
    ):
        assert registry.get_sample_value(name, its) == 1
    metrics.close()


def test_instrumented_twice_says_so(registry: CollectorRegistry, value: Value) -> None:
    """Everything would be counted twice."""
    assert value("fencelock_commits_in_doubt_total") == 0
    with pytest.raises(ValueError, match="Duplicated"):
        prometheus.instrument(registry)


# Several processes, as gunicorn and Celery have them.


@contextmanager
def running(*command: str, folder: Path, **variables: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program of several processes until the block is left."""
    environment = os.environ | {"PROMETHEUS_MULTIPROC_DIR": str(folder / "metrics")} | variables
    (folder / "metrics").mkdir()
    with subprocess.Popen(
        [sys.executable, "-m", *command], cwd=folder, env=environment, start_new_session=True
    ) as program:
        try:
            yield program
        finally:
            os.killpg(program.pid, signal.SIGTERM)
            try:
                program.wait(20)
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(program.pid, signal.SIGKILL)


def collected(folder: Path) -> dict[tuple[str, str], float]:
    code = """
import json
from prometheus_client import CollectorRegistry, multiprocess
registry = CollectorRegistry()
multiprocess.MultiProcessCollector(registry)
print(json.dumps([[s.name, s.labels, s.value] for m in registry.collect() for s in m.samples]))
"""
    environment = os.environ | {"PROMETHEUS_MULTIPROC_DIR": str(folder / "metrics")}
    run = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, env=environment)
    found: dict[tuple[str, str], float] = {}
    for name, labels, number in json.loads(run.stdout):
        key = name, labels.get("outcome") or labels.get("end") or ""
        if "le" not in labels:
            found[key] = found.get(key, 0) + number
    return found


APPLICATION = """
import os
from fencelock import Redlock
from fencelock.observe import prometheus

prometheus.instrument()
authority = Redlock(os.environ["NODES"])

def app(environ, start_response):
    with authority.lock(f"order:{environ['PATH_INFO']}"):
        start_response("200 OK", [("X-Process", str(os.getpid()))])
        return [b"done"]
"""


def test_workers_of_gunicorn_are_summed_up(authority: Redlock, node_urls: list[str], tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(APPLICATION)
    address = tmp_path / "port"
    configuration = f"""
import os
def post_worker_init(worker):
    host, port = worker.sockets[0].getsockname()
    open({str(address)!r} + str(os.getpid()), "w").write(f"http://{{host}}:{{port}}")
    os.replace({str(address)!r} + str(os.getpid()), {str(address)!r})
"""
    (tmp_path / "gunicorn.conf.py").write_text(configuration)
    command = ("gunicorn", "--bind", "127.0.0.1:0", "--workers", "2", "--preload", "shop:app")
    processes = set()
    with running(*command, folder=tmp_path, NODES=",".join(authority.nodes and node_urls)):
        assert eventually(address.exists)
        for number in range(200):
            with urllib.request.urlopen(f"{address.read_text()}/{number}") as answer:  # noqa: S310
                processes.add(answer.headers["X-Process"])
            if len(processes) == 2 and number > 20:
                break
        asked = number + 1
        found = collected(tmp_path)
    assert len(processes) == 2
    assert found["fencelock_lock_hold_seconds_count", "released"] == asked
    assert found["fencelock_lock_wait_seconds_count", "acquired"] == asked
    assert found["fencelock_locks_held", ""] == 0
    assert found["fencelock_lock_waiters", ""] == 0
