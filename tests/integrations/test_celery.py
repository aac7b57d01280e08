"""Tasks run under the tokens of the code that called them: in real workers, and in the caller."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from celery import Celery  # type: ignore[import-untyped]

from fencelock import CommitInDoubtError, Lease, LockLostError, StaleReadError, StaleTokenError
from fencelock.integrations import header
from fencelock.lease import held_leases, holding
from proof.servers import Nodes
from tests.polling import eventually
from tests.programs import python

TASKS = """
from celery import Celery, chain
from fencelock import StaleTokenError
from fencelock.integrations import header

app = Celery("tasks", broker="URL/1", backend="URL/2", task_cls="fencelock.integrations.celery:FencedTask")
app.conf.update(broker_connection_retry_on_startup=True, worker_pool_restarts=False)

@app.task
def held():
    return header.held()

@app.task(bind=True, max_retries=1)
def held_by_retry(self):
    if not self.request.retries:
        self.retry(countdown=0)
    return [self.request.retries, header.held()]

@app.task
def calls_another():
    return held.delay().id

@app.task(bind=True)
def calls_itself(self, depth=1):
    return [header.held(), *(self(depth - 1) if depth else [])]

@app.task(autoretry_for=(StaleTokenError,), retry_backoff=True, max_retries=None)
def is_late():
    raise StaleTokenError("orders", (1,), 7, 9)

@app.task
def after(result):
    return [result, header.held()]
"""
CALLS = """
import json, sys
from celery import chain
from celery.result import AsyncResult
import tasks
from fencelock import Lease
from fencelock.lease import holding

def answer(result):
    return result.get(timeout=20)

none = answer(tasks.held.delay())
with holding([Lease("order:é", 7), Lease("b", 8)]):
    names = "held", "held_by_retry", "calls_another", "calls_itself"
    called = [getattr(tasks, name).delay() for name in names]
    late = tasks.is_late.delay()
    chained = chain(tasks.held.s(), tasks.after.s()).apply_async()
    called_with_headers = tasks.held.apply_async(headers={"x": "y"})
one, retried, another, itself = map(answer, called)
broken = tasks.held.apply_async(headers={"Fencing-Token": "order:1"})
broken.wait(timeout=20, propagate=False)
late.wait(timeout=20, propagate=False)
print(json.dumps({
    "none": none, "one": one, "retried": retried, "itself": itself,
    "another": answer(AsyncResult(another, app=tasks.app)),
    "chained": answer(chained), "headers": answer(called_with_headers), "broken": repr(broken.result),
    "late": repr(late.result),
    "afterwards": [answer(tasks.held.delay()) for _ in range(8)],
}))
"""


@contextmanager
def worker(folder: Path, pool: str) -> Iterator[None]:
    command = [sys.executable, "-m", "celery", "-A", "tasks", "worker", "-P", pool, "-c", "2", "-l", "INFO"]
    log = folder / "log"
    with (
        log.open("w") as output,
        subprocess.Popen(command, cwd=folder, stdout=output, stderr=output) as process,
    ):
        try:
            assert eventually(lambda: " ready." in log.read_text(), 30), log.read_text()
            yield
        finally:
            process.terminate()


@pytest.mark.timed
@pytest.mark.long
@pytest.mark.parametrize("pool", ["threads", "prefork", "solo"])
def test_tokens_travel_to_workers(nodes: Nodes, tmp_path: Path, pool: str) -> None:
    (tmp_path / "tasks.py").write_text(TASKS.replace("URL", nodes[0].url))
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    with worker(tmp_path, pool):
        calls = python("-W", "error", "-c", CALLS, cwd=tmp_path, env=environment)
    assert calls.returncode == 0, calls.stderr + (tmp_path / "log").read_text()
    tokens = {"Fencing-Token": "order:%C3%A9=7;b=8"}
    answers: dict[str, Any] = json.loads(calls.stdout)
    assert "a fencing token is written as" in answers.pop("broken")
    assert answers.pop("late").startswith("StaleTokenError")
    assert answers == {
        "none": {},
        "one": tokens,
        "retried": [1, tokens],
        "another": tokens,
        "itself": [tokens, tokens],
        "chained": [tokens, {}],
        "headers": tokens,
        "afterwards": [{}] * 8,
    }


def test_an_eager_task_has_the_leases_themselves() -> None:
    app = Celery("tasks", task_cls="fencelock.integrations.celery:FencedTask", set_as_current=False)
    app.conf.update(task_always_eager=True, task_eager_propagates=True)

    @app.task  # type: ignore[untyped-decorator]
    def held() -> tuple[Lease, ...]:
        return held_leases()

    lease = Lease("order:1", 7)
    with holding([lease]):
        assert held.delay().get() == held.apply().get() == held() == (lease,)
    assert held.delay().get() == ()


def test_a_task_whose_token_is_stale_is_not_retried() -> None:
    """Each try would have the same token, and be refused; under a lock of its own, the next one is larger."""
    app = Celery("tasks", task_cls="fencelock.integrations.celery:FencedTask", set_as_current=False)
    app.conf.update(task_always_eager=True)
    tried = []

    @app.task(autoretry_for=(StaleTokenError,), max_retries=2, retry_backoff=1)  # type: ignore[untyped-decorator]
    def write(token: int) -> None:
        tried.append(token)
        raise StaleTokenError("orders", (1,), token, 9)

    with holding([Lease("order:1", 7)]):
        received, own = write.delay(7), write.delay(8)
    assert [type(each.result) for each in (received, own, write.delay(7))] == [StaleTokenError] * 3
    assert tried == [7, 8, 8, 8, 7, 7, 7]


def test_a_task_that_has_read_old_rows_is_retried() -> None:
    """Its token is not stale, so the next try may read again under it."""
    app = Celery("tasks", task_cls="fencelock.integrations.celery:FencedTask", set_as_current=False)
    app.conf.update(task_always_eager=True)
    tried = []

    @app.task(autoretry_for=(StaleTokenError,), max_retries=2, retry_backoff=1)  # type: ignore[untyped-decorator]
    def write() -> int:
        tried.append(1)
        if len(tried) == 1:
            raise StaleReadError("orders", (1,), 7, None, None)
        return len(tried)

    with holding([Lease("order:1", 7)]):
        assert write.delay().result == 2


def test_no_task_is_called_under_a_lease_that_ended() -> None:
    app = Celery("tasks", broker="redis://127.0.0.1:1", task_cls="fencelock.integrations.celery:FencedTask")

    @app.task  # type: ignore[untyped-decorator]
    def nothing() -> None:
        pass

    with holding([Lease("order:1", 7, expires_at=0.0)]), pytest.raises(LockLostError):
        nothing.delay()
    doubtful = Lease("order:1", 7)
    doubtful._doubt()
    with holding([doubtful]), pytest.raises(CommitInDoubtError):
        nothing.delay()
    assert header.held() == {}
