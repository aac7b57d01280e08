"""Metrics and commands show semaphores, readers and writers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from fencelock import LockTimeoutError, Redlock, fenced_lock, fenced_semaphore
from fencelock.observe import prometheus
from tests.authorities.kinds import Kind
from tests.test_cli import fencelock

ITS = {"authority": "Redlock", "lock": "gpu"}


@pytest.fixture
def registry() -> Iterator[CollectorRegistry]:
    registry = CollectorRegistry()
    metrics = prometheus.instrument(registry)
    yield registry
    metrics.close()


def lock_names(registry: CollectorRegistry) -> set[str]:
    samples = [sample for family in registry.collect() for sample in family.samples]
    return {sample.labels["lock"] for sample in samples if "lock" in sample.labels}


def use_all_slots(authority: Redlock) -> None:
    first, second = (fenced_semaphore("gpu", 2, authority=authority, reentrant=False) for _ in range(2))
    with first, second, pytest.raises(LockTimeoutError):
        fenced_semaphore("gpu", 2, authority=authority, reentrant=False).acquire(timeout=0.3)


def test_prometheus_counts_slots_under_the_name_of_the_semaphore(
    authority: Redlock, registry: CollectorRegistry
) -> None:
    use_all_slots(authority)

    def count(metric: str, **labels: str) -> float | None:
        return registry.get_sample_value(metric, ITS | labels)

    assert count("fencelock_lock_wait_seconds_count", outcome="acquired") == 2
    assert count("fencelock_lock_wait_seconds_count", outcome="timeout") == 1
    assert count("fencelock_lock_hold_seconds_count", end="released") == 2
    assert count("fencelock_locks_held") == 0
    assert count("fencelock_lock_waiters") == 0
    assert lock_names(registry) == {"gpu"}


@pytest.mark.parametrize("kind", ["sqlite"], indirect=True)
def test_commands_show_slots_and_readers(kind: Kind, mine: Any) -> None:
    url = ("--url", kind.url)
    gpus = [fenced_semaphore("gpu", 3, authority=mine, reentrant=False) for _ in range(2)]
    order = fenced_lock("order:1", readers=2, authority=mine)
    with gpus[0], gpus[1], fenced_lock("order:2", shared=True, readers=2, authority=mine) as reads, order:
        (gpu,) = [json.loads(fencelock("inspect", "gpu", "--json", *url).stdout)]
        (two,) = [json.loads(fencelock("inspect", "order:2", "--json", *url).stdout)]
        (one,) = [json.loads(fencelock("inspect", "order:1", "--json", *url).stdout)]
        shown, top = fencelock("inspect", "gpu", *url), fencelock("top", "--times", "1", *url)
        slots = sorted(lock.lease.resource for lock in gpus)
        tokens = {lock.lease.resource: lock.lease.token for lock in gpus}
    assert {each["resource"]: each["token"] for each in gpu} == tokens
    assert [(each["resource"].rpartition("#")[0], each["token"]) for each in two] == [("order:2", reads)]
    assert [each["resource"] for each in one] == ["order:1", "order:1#0", "order:1#1"]
    assert [name for name in ("gpu#0", "gpu#1", "gpu#2") if name in shown.stdout] == slots
    assert "order" not in shown.stdout
    assert "6 held" in top.stdout
    assert all(name in top.stdout for name in (*slots, "order:1#1"))
    free = fencelock("inspect", "gpu", *url)
    assert (free.returncode, free.stdout) == (3, "'gpu' is free\n")
