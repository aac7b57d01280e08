"""The shipped alert rules and dashboard, in a real Prometheus that scrapes a real program which breaks."""

from __future__ import annotations

import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from prometheus_client import CollectorRegistry
from sqlalchemy import create_engine
from sqlalchemy.orm import Session

from fencelock import Redlock, claim
from fencelock.embedded import Nodes
from fencelock.observe import prometheus
from tests.conftest import ROOT
from tests.observe.shop import Base, Order
from tests.polling import IMPATIENT, eventually

RULES: Final = ROOT / "docs" / "monitoring" / "alerts.yml"
DASHBOARD: Final = ROOT / "docs" / "monitoring" / "dashboard.json"

needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="no prometheus on PATH: Debian's package has it"
)


class Server:
    """A Prometheus, and the program that it scrapes."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}/api/v1/"

    def ask(self, path: str, **parameters: str) -> Any:
        """Return the data of an answer of the API."""
        query = f"{self._url}{path}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(query, timeout=10) as answer:  # noqa: S310 - it is ours
            return json.load(answer)["data"]

    def firing(self) -> set[str]:
        """Return the names of the alerts that fire."""
        return {
            alert["labels"]["alertname"]
            for alert in self.ask("alerts")["alerts"]
            if alert["state"] == "firing"
        }

    def is_up(self) -> bool:
        """Whether it has scraped the program."""
        try:
            return bool(self.ask("query", query="up == 1")["result"])
        except OSError:
            return False


def free_port() -> int:
    """Return a port that nothing listens on at this moment."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@pytest.fixture
def nodes(make_nodes: Callable[..., Nodes]) -> Nodes:
    """Three that a test may end."""
    made = make_nodes(3)
    with Redlock(made.urls) as authority:
        authority.init()
    return made


@pytest.fixture
def shop(nodes: Nodes, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """The program; `ask` is to be called for its answers."""
    database = f"sqlite:///{tmp_path / 'shop.db'}"
    engine = create_engine(database)
    Base.metadata.create_all(engine)
    with Redlock(nodes.urls) as authority, authority.lock("order:1"), Session(engine) as session:
        session.add(Order(id=1))
        session.commit()
    engine.dispose()
    with subprocess.Popen(
        [sys.executable, "-m", "tests.observe.shop", ",".join(nodes.urls), database],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    ) as program:
        yield program
        program.kill()


def tell(program: subprocess.Popen[str], line: str) -> None:
    """Have the program do something."""
    assert program.stdin is not None
    program.stdin.write(f"{line}\n")
    program.stdin.flush()


def heard(program: subprocess.Popen[str]) -> str:
    """Return the next line that it prints."""
    assert program.stdout is not None
    return program.stdout.readline().strip()


@pytest.fixture
def server(shop: subprocess.Popen[str], tmp_path: Path) -> Iterator[Server]:
    """A Prometheus that scrapes the program twice a second, with the shipped rules and shorter windows."""
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


@needs_prometheus
@pytest.mark.timeout(240)
def test_each_alert_fires(server: Server, shop: subprocess.Popen[str], nodes: Nodes, tmp_path: Path) -> None:
    """A contended lock, a worker paused past its lease, a write without a lock, nodes that die."""
    wanted = set(re.findall(r"alert: (\w+)", RULES.read_text()))
    fired: set[str] = set()

    def has_fired(*names: str) -> bool:
        fired.update(server.firing())
        return set(names) <= fired

    assert server.firing() == set()
    tell(shop, "contend")
    tell(shop, "give_up")
    tell(shop, "forget")
    assert eventually(lambda: has_fired("FencelockWaitsAreLong", "FencelockTimeouts"), 60)
    assert has_fired("FencelockUnfencedWrites")

    engine = create_engine(f"sqlite:///{tmp_path / 'shop.db'}")
    for ttl, error in (("60", "StaleTokenError"), ("1", "LockLostError")):
        tell(shop, f"pay {ttl}")
        assert heard(shop) == "loaded"
        shop.send_signal(signal.SIGSTOP)
        with Redlock(nodes.urls, **IMPATIENT) as rival, Session(engine) as session:
            if ttl == "60":
                rival.force_release("order:1")
            with rival.lock("order:1"):
                claim(session, Order, 1)
                session.commit()
        shop.send_signal(signal.SIGCONT)
        tell(shop, "go on")
        assert heard(shop) == error
        assert eventually(lambda: has_fired("FencelockStaleWritesRefused"), 30), fired
    engine.dispose()
    assert eventually(lambda: has_fired("FencelockLeasesLost", "FencelockRenewalsAreLate"), 30), fired

    tell(shop, "ask")
    nodes[0].kill()
    assert eventually(lambda: has_fired("FencelockNodeDoesNotVote"), 30)
    assert "FencelockNoMajority" not in fired
    nodes[1].kill()
    assert eventually(lambda: has_fired("FencelockNoMajority", "FencelockAuthorityErrors"), 30), fired
    assert fired == wanted


@needs_prometheus
@pytest.mark.timeout(120)
def test_each_panel_of_the_dashboard_can_be_drawn(server: Server, shop: subprocess.Popen[str]) -> None:
    """Prometheus understands its query; those of what happens here have a result."""
    tell(shop, "contend")
    time.sleep(4)
    panels = json.loads(DASHBOARD.read_text())["panels"]
    empty = set()
    for panel in panels:
        for target in panel["targets"]:
            query = target["expr"].replace("$__rate_interval", "8s").replace("$lock", ".*")
            if not server.ask("query", query=query)["result"]:
                empty.add(panel["title"])
    drawn = {panel["title"] for panel in panels} - empty
    assert {"Nodes that vote", "Locks held", "Waiting now", "State of each node"} <= drawn
    assert {"Wait for a lock, p50 and p99", "Time held, p50 and p99"} <= drawn


@pytest.mark.parametrize("file", [RULES, DASHBOARD], ids=lambda path: path.name)
def test_every_metric_that_is_asked_for_exists(file: Path, nodes: Nodes) -> None:
    """Also without Prometheus: a metric that was renamed leaves an alert that never fires."""
    registry = CollectorRegistry()
    metrics = prometheus.instrument(registry)
    with Redlock(nodes.urls, **IMPATIENT) as authority:
        end = prometheus.watch_nodes(authority, registry=registry)
        known = {metric.name for metric in registry.collect()}
        end()
    metrics.close()
    asked = set(re.findall(r"fencelock_\w+", file.read_text()))
    assert asked
    for name in asked:
        assert re.sub(r"_(total|bucket|count|sum)$", "", name) in known, name


@needs_prometheus
@pytest.mark.skipif(
    shutil.which("promtool") is None, reason="no promtool on PATH: Debian's prometheus has it"
)
def test_rules_are_well_formed() -> None:
    """As shipped, by Prometheus' own tool."""
    promtool = shutil.which("promtool")
    assert promtool is not None
    subprocess.run([promtool, "check", "rules", str(RULES)], check=True, capture_output=True)
