"""A short form of `python -m benchmarks.locks` runs with real nodes, real workers and few turns."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import closing
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks import authorities, contenders, on_consensus, on_databases, rates
from benchmarks.arena import NODES, Arena, NodesArena
from benchmarks.contenders import Setting
from benchmarks.handovers import Relay
from benchmarks.on_consensus import ETCD, ZOOKEEPER
from benchmarks.on_databases import SQLITE
from benchmarks.peers import Homes
from benchmarks.report import Report
from benchmarks.worker import Play, Worker, WorkerError
from fencelock import Database
from proof.servers import Nodes, Postgres
from proof.servers.zookeeper import missing

pytestmark = [pytest.mark.timed, pytest.mark.long]


@pytest.fixture(scope="module")
def arena() -> Iterator[NodesArena]:
    """Five nodes, two short rounds, nothing installed."""
    with Nodes(NODES) as nodes:
        arena = NodesArena(
            nodes.urls, Console(file=StringIO()), rounds=2, seconds=0.05, homes=Homes(None), nodes=nodes
        )
        arena.initialise()
        yield arena


def test_all_who_take_part_are_measured_in_each_round(arena: NodesArena) -> None:
    """Blocking and asyncio contenders and the floor work in processes of their own, and are in the table."""
    entered = (
        *(rates.OURS, rates.OURS_ASYNCIO, contenders.BARE_AUTHORITY),
        *(contenders.ANEW, contenders.REDIS_PY, contenders.REDIS_ASYNCIO, contenders.FLOOR),
    )
    results = rates.measure(arena, "in short", entered, width=3, seconds=arena.seconds)
    assert {one.contender for one in results} == set(entered), arena.report.absent
    assert all(len(one.rates) == arena.rounds and min(one.rates) > 0 for one in results)
    assert all(min(one.costs) > 0 for one in results)
    table = rates.section_of("in short", results, rates.OURS).markdown()
    assert all(f"| {one.name} | {one.nodes} |" in table for one in entered)


def test_who_cannot_take_part_is_named(arena: NodesArena) -> None:
    """A peer without the home that it needs is left out, with a sentence that says why."""
    (peer,) = (one for one in contenders.REDLOCKS if one.name == "redlock-ng")
    assert rates.measure(arena, "alone", [peer], seconds=arena.seconds) == []
    assert "redlock-ng does not take part: it would need a home of its own" in arena.report.absent


def test_a_worker_that_ends_leaves_its_last_words() -> None:
    """The error has the worker's last words, and the benchmark does not wait for its answer."""
    worker = Worker(
        rates.OURS, Setting([]), [sys.executable, "-c", "raise SystemExit('something is missing')"]
    )
    with closing(worker), pytest.raises(WorkerError, match="something is missing"):
        worker.prepare(["r"])


def test_a_handover_is_an_acquisition_by_another_process() -> None:
    """What a process takes back from itself is none, and the longest wait is that of all of them."""
    plays = [
        Play([(0.0, 1.0, 1.5), (1.5, 2.0, 2.5)], 0.0, 5.0, 0.1, 0, None),
        Play([(0.0, 3.0, 3.5), (3.5, 5.0, 5.0)], 0.0, 5.0, 0.1, 0, None),
    ]
    relay = Relay(rates.OURS)
    relay.note(plays)
    assert relay.handovers == [1 / 4]
    assert relay.acquisitions == [3 / 4]
    assert relay.longest == [3.0]


def test_databases_are_measured_beside_bare_transactions(tmp_path: Path) -> None:
    """On SQLite, which is always there: rates with goals, and hand-overs."""
    url = f"sqlite:///{tmp_path / 'app.db'}"
    with Database(url) as authority:
        authority.init()
    report = Report("in short", "")
    arena = Arena([url], Console(file=StringIO()), rounds=2, seconds=0.05, homes=Homes(None), report=report)
    authorities.alone(arena, SQLITE)
    authorities.hand_over(arena, SQLITE)
    assert report.absent == []
    assert [len(section.rows) for section in report.sections] == [len(on_databases.ALONE[SQLITE]), 2]
    assert len(report.goals) == 4


@pytest.mark.parametrize("place", [ETCD, ZOOKEEPER])
def test_consensus_is_measured_beside_its_peers(place: str, postgres: Postgres) -> None:
    """Rates of one caller and of tasks, hand-overs and whole sections, with the goals of the first three."""
    if place == ZOOKEEPER and (lacks := missing()):
        pytest.skip(f"ZooKeeper needs {lacks}")
    for peer in ("grpc", "etcd3gw") if place == ETCD else ():
        pytest.importorskip(peer, reason="the peers of etcd come with pip install --group bench")
    options = argparse.Namespace(
        quick=True, no_homes=True, only=[place], postgresql=postgres.create_database(), rounds=0, seconds=0.0
    )
    report = authorities.run(options, Console(file=StringIO()))
    assert report.absent == []
    cases = (on_consensus.ALONE, on_consensus.TASKS, on_consensus.CONTENDING, on_consensus.SECTIONS)
    assert [len(section.rows) for section in report.sections] == [len(case[place]) for case in cases]
    assert len(report.goals) == {ETCD: 4 + 1 + 1, ZOOKEEPER: 2 + 1 + 1}[place]
