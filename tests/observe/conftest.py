"""Listeners for what the tests of this folder cause, and a shop with its Prometheus."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from sqlalchemy import create_engine
from sqlalchemy.orm import Session

from fencelock import Redlock, forget, on_event
from fencelock.observe import Event
from fencelock.observe.otel import FencelockInstrumentor
from proof.servers import Nodes
from tests.authorities.kinds import MAKERS, Kind
from tests.conftest import ROOT
from tests.observe.shop import Base, Order
from tests.observe.stage import RULES, Server, free_port, heard
from tests.polling import eventually

#: For what the lock or a command does itself, above the authority.
TWO_KINDS = pytest.mark.parametrize("kind", ["quorum", "sqlite"], indirect=True)
NAMES = ("quorum", "postgresql", "mariadb", "sqlite", "etcd", "zookeeper")


@pytest.fixture(params=NAMES)
def kind(request: pytest.FixtureRequest) -> Iterator[Kind]:
    with contextmanager(MAKERS[request.param])(request) as made:
        yield made


@pytest.fixture
def mine(kind: Kind) -> Iterator[Any]:
    made = kind.make()
    yield made
    made.close()


@pytest.fixture
def other(kind: Kind) -> Iterator[Any]:
    made = kind.make()
    yield made
    made.close()


@pytest.fixture
def events() -> Iterator[list[Event]]:
    found: list[Event] = []
    on_event(found.append)
    yield found
    forget(found.append)


@pytest.fixture
def own_nodes(make_nodes: Callable[..., Nodes]) -> Nodes:
    """Three that a test may end."""
    made = make_nodes(3)
    with Redlock(made.urls) as authority:
        authority.init()
    return made


@pytest.fixture
def shop(own_nodes: Nodes, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    database = f"sqlite:///{tmp_path / 'shop.db'}"
    engine = create_engine(database)
    Base.metadata.create_all(engine)
    with Redlock(own_nodes.urls) as authority, authority.lock("order:1"), Session(engine) as session:
        session.add(Order(id=1))
        session.commit()
    engine.dispose()
    with subprocess.Popen(
        [sys.executable, "-m", "tests.observe.shop", ",".join(own_nodes.urls), database],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    ) as program:
        yield program
        program.kill()


@pytest.fixture
def server(shop: subprocess.Popen[str], tmp_path: Path) -> Iterator[Server]:
    rules = RULES.read_text()
    rules = re.sub(r"\[\d+m\]", "[8s]", rules)
    rules = re.sub(r"offset \d+m", "offset 8s", rules)
    rules = re.sub(r"for: \d+m", "for: 1s", rules)
    (tmp_path / "alerts.yml").write_text(rules.replace("[8s]))) > 5", "[8s]))) > 0.5"))
    port = free_port()
    (tmp_path / "prometheus.yml").write_text(
        "global: {scrape_interval: 500ms, scrape_timeout: 400ms, evaluation_interval: 500ms}\n"
        "rule_files: [alerts.yml]\n"
        f"scrape_configs: [{{job_name: shop, static_configs: [{{targets: ['127.0.0.1:{heard(shop)}']}}]}}]\n"
    )
    command = [
        "prometheus",
        f"--config.file={tmp_path / 'prometheus.yml'}",
        f"--storage.tsdb.path={tmp_path / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--log.level=error",
    ]
    with subprocess.Popen(command) as process:
        made = Server(port)
        assert eventually(made.is_up, 30)
        yield made
        process.terminate()
        process.wait(20)


@dataclass
class Telemetry:
    reader: InMemoryMetricReader
    exporter: InMemorySpanExporter
    tracer: Any

    def value(self, name: str, **attributes: str) -> Any:
        wanted = {f"fencelock.{key}": value for key, value in attributes.items()}
        data = self.reader.get_metrics_data()
        for resource in data.resource_metrics if data is not None else ():
            for scope in resource.scope_metrics:
                for metric in scope.metrics:
                    for point in metric.data.data_points if metric.name == name else ():
                        if dict(point.attributes or {}) == wanted:
                            return getattr(point, "count", None) or getattr(point, "value", None)
        return None


@pytest.fixture
def telemetry() -> Iterator[Telemetry]:
    reader, exporter = InMemoryMetricReader(), InMemorySpanExporter()
    tracers, meters = TracerProvider(), MeterProvider([reader])
    tracers.add_span_processor(SimpleSpanProcessor(exporter))
    instrumentor = FencelockInstrumentor()
    instrumentor.instrument(tracer_provider=tracers, meter_provider=meters)
    yield Telemetry(reader, exporter, tracers.get_tracer("test"))
    instrumentor.uninstrument()
    meters.shutdown()
    tracers.shutdown()
