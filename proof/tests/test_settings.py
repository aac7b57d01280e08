"""Each setting that cannot be had is refused by a sentence that says what to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from proof.torture.clusters import CLUSTER_FAULTS
from proof.torture.history import Manner
from proof.torture.settings import CLUSTERS, DATABASE, FAULTS, STORES, Settings, default_faults


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"faults": ("earthquake",)}, "no fault 'earthquake'; choose from worker-pause,"),
        ({"duration": None}, "Give --duration, --acquisitions, or both"),
        ({"duration": 0.0}, "--duration is more than 0, not 0"),
        ({"duration": float("nan")}, "--duration is more than 0, not nan"),
        ({"acquisitions": -1}, "--acquisitions is more than 0"),
        ({"workers": 0}, "--workers is more than 0"),
        ({"nodes_count": 0}, "--nodes-count is more than 0"),
        ({"tasks": -1}, "--tasks is 0 or more, not -1"),
        ({"ttl": 0.0}, "--ttl is more than 0"),
        ({"pause": 0.5, "ttl": 1.0}, "--pause 0.5 is to outlast a lease of --ttl 1"),
        ({"writes": 1.5}, "--writes is a share, from 0 to 1, not 1.5"),
        ({"quorum": False}, "--tasks 0 --writes 0"),
        ({"authority": "oracle"}, "--authority is one of nodes, database, etcd, zookeeper, not 'oracle'"),
        ({"authority": "database", "nodes": ("redis://a",)}, "--nodes are for --authority nodes"),
        ({"authority": "etcd", "nodes": ("redis://a",)}, "with --authority etcd there are none"),
        ({"authority": "database", "manners": (Manner.FAIR,)}, "--manner fair and large are for"),
        ({"authority": "database", "synchronous": True}, "--synchronous is for --database patroni"),
    ],
)
def test_what_makes_no_sense_is_refused(wrong: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    """With the option's name, as it is typed."""
    with pytest.raises(ValueError, match=sentence):
        Settings(tmp_path, **wrong)


OF_NODES = {"node-pause", "node-blank", "node-rolling", "node-rollback", "node-replica", "node-flush"}
WITH_NODES = OF_NODES | {"clock", "partition", "line-freeze", "odd-value", "partial-write"}
OF_CONNECTIONS = {"connection-end", "lease-silence"}
SELDOM = {"odd-value", *OF_CONNECTIONS}


@pytest.mark.parametrize(
    ("settings", "skipped"),
    [
        ({}, SELDOM),
        ({"database": "sqlite"}, {"database-kill", *SELDOM}),
        ({"writes": 0.0}, {"database-kill", *SELDOM}),
        ({"workers": 1}, {"partition", *SELDOM}),
        ({"nodes_count": 2}, OF_NODES | SELDOM),
        ({"faults": ("signal", "odd-value")}, set()),
        ({"authority": "database"}, WITH_NODES),
        ({"authority": "database", "database": "sqlite"}, WITH_NODES | {"database-kill", *OF_CONNECTIONS}),
        ({"authority": "database", "database": "mysql+pymysql://b"}, WITH_NODES | {"database-kill"}),
        ({"authority": "zookeeper"}, WITH_NODES | OF_CONNECTIONS),
        (
            {"nodes": ("redis://a", "redis://b", "redis://c")},
            OF_NODES | {"clock", "odd-value", *OF_CONNECTIONS},
        ),
        (
            {"nodes": ("rediss://a",), "database": "postgresql+psycopg://b"},
            set(FAULTS) - {"worker-pause", "worker-kill", "signal", "line-freeze", "partial-write", "lie"},
        ),
    ],
)
def test_faults_that_cannot_be_had_are_skipped_with_a_reason(
    settings: dict[str, Any], skipped: set[str], tmp_path: Path
) -> None:
    """Faults break only servers of ours, and never a majority of the nodes."""
    found = Settings(tmp_path, **settings).skipped()
    assert set(found) == skipped
    assert all(found.values())


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_faults_of_a_cluster_are_for_that_cluster(cluster: str, tmp_path: Path) -> None:
    """There they are made by default; each has a function that makes it."""
    faults = default_faults(DATABASE, cluster)
    skipped = Settings(tmp_path, faults, authority=DATABASE, database=cluster).skipped()
    assert set(CLUSTERS[cluster]) <= set(faults) - set(skipped)
    elsewhere = Settings(tmp_path, faults, authority=DATABASE, database="postgresql").skipped()
    assert set(CLUSTERS[cluster]) <= set(elsewhere)
    assert set(CLUSTERS[cluster]) <= set(CLUSTER_FAULTS)


@pytest.mark.parametrize("store", STORES)
def test_faults_of_a_store_are_for_that_store(store: str, tmp_path: Path) -> None:
    """The same of what elects a leader and grants leases."""
    faults = default_faults(store)
    skipped = Settings(tmp_path, faults, authority=store).skipped()
    assert set(STORES[store]) <= set(faults) - set(skipped)
    assert set(STORES[store]) <= set(Settings(tmp_path, faults, authority=DATABASE).skipped())
    assert set(STORES[store]) <= set(CLUSTER_FAULTS)
