"""The shipped alerts fire, and the dashboard can be drawn, in a real Prometheus with a real program."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Final

import pytest
from prometheus_client import CollectorRegistry
from sqlalchemy import create_engine
from sqlalchemy.orm import Session

from fencelock import Redlock, claim
from fencelock.observe import prometheus
from proof.servers import Nodes
from tests.conftest import ROOT
from tests.observe.shop import Order
from tests.observe.stage import RULES, Server, heard, needs_prometheus, tell
from tests.polling import IMPATIENT, eventually

DASHBOARD: Final = ROOT / "docs" / "monitoring" / "dashboard.json"


@needs_prometheus
@pytest.mark.timeout(240)
def test_each_alert_fires(
    server: Server, shop: subprocess.Popen[str], own_nodes: Nodes, tmp_path: Path
) -> None:
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
        with Redlock(own_nodes.urls, **IMPATIENT) as rival, Session(engine) as session:
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
    own_nodes[0].kill()
    assert eventually(lambda: has_fired("FencelockNodeDoesNotVote"), 30)
    assert "FencelockNoMajority" not in fired
    own_nodes[1].kill()
    assert eventually(lambda: has_fired("FencelockNoMajority", "FencelockAuthorityErrors"), 30), fired
    assert fired == wanted


@pytest.mark.timed
@needs_prometheus
@pytest.mark.timeout(120)
def test_each_panel_of_the_dashboard_can_be_drawn(server: Server, shop: subprocess.Popen[str]) -> None:
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
def test_every_metric_that_is_asked_for_exists(file: Path, own_nodes: Nodes) -> None:
    registry = CollectorRegistry()
    metrics = prometheus.instrument(registry)
    with Redlock(own_nodes.urls, **IMPATIENT) as authority:
        end = prometheus.watch_nodes(authority, registry=registry)
        known = {metric.name for metric in registry.collect()}
        end()
    metrics.close()
    asked = set(re.findall(r"fencelock_\w+", file.read_text()))
    assert asked
    for name in asked:
        assert re.sub(r"_(total|bucket|count|sum)$", "", name) in known, name


@needs_prometheus
def test_rules_in_the_course_of_time(tmp_path: Path) -> None:
    if (promtool := shutil.which("promtool")) is None:
        pytest.skip("no promtool on PATH: Debian's prometheus has it")
    firing = 'ALERTS{alertname="Fencelock%s", alertstate="firing"}'
    lost, timeouts = f"expr: 'count({firing % 'LeasesLost'})'", f"expr: 'count({firing % 'Timeouts'})'"
    wait = 'fencelock_lock_wait_seconds_%s{lock="job", outcome="timeout"%s}'
    (tmp_path / "tests.yml").write_text(f"""
rule_files: [{RULES}]
tests:
  - interval: 15s
    input_series:
      - {{series: 'fencelock_leases_lost_total{{lock="order", reason="expired"}}', values: '_x40 1x160'}}
      - {{series: '{wait % ("count", "")}', values: '0+5x200'}}
      - {{series: '{wait % ("bucket", ', le="0.05"')}', values: '0+5x200'}}
    promql_expr_test:
      - {{eval_time: 10m, {lost}, exp_samples: [{{value: 1}}]}}
      - {{eval_time: 24m, {lost}, exp_samples: [{{value: 1}}]}}
      - {{eval_time: 26m, {lost}}}
      - {{eval_time: 30m, {timeouts}}}
""")
    for command in (("check", "rules", RULES), ("test", "rules", tmp_path / "tests.yml")):
        ran = subprocess.run([promtool, *command], check=False, capture_output=True, text=True)
        assert ran.returncode == 0, ran.stdout + ran.stderr
