"""Each example runs as a reader would run it: in a process of its own, on real servers."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from sqlalchemy import Engine, text

from fencelock import Redlock
from proof.servers import Nodes, Postgres
from tests.programs import python
from tests.shops import Shop

EXAMPLES = Path(__file__).parent.parent / "examples"


def run(example: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return python("-W", "error", str(EXAMPLES / example), *arguments)


def story(example: str, *arguments: str) -> str:
    ended = run(example, *arguments)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert not ended.stderr
    return ended.stdout


@pytest.fixture
def quorum_url(nodes: Nodes) -> str:
    with Redlock(nodes.url) as quorum:
        quorum.init()
    return nodes.url


def assert_both_payments_count(told: str) -> None:
    quick = int(re.findall(r"quick: token (\d+), wrote 50\.00", told)[0])
    late = int(re.findall(r"slow: token (\d+), 0\.00 are paid so far", told)[0])
    again = int(re.findall(r"slow: token (\d+), wrote 80\.00", told)[0])
    assert late < quick < again
    assert "slow: refused: the lease of 'order:1' ended before this statement" in told
    assert told.endswith("80.00 of 100.00 are paid\nnothing is lost\n")


def assert_stale_holder_got_nowhere(told: str) -> None:
    stale = int(re.findall(r"first worker has token (\d+)", told)[0])
    token = int(re.findall(r"second worker has token (\d+)", told)[0])
    assert stale < token
    assert re.findall(r"(Core|psycopg) took \d with token (\d+)", told) == [
        ("Core", str(token)),
        ("psycopg", str(token)),
    ]
    assert f"Core: token {stale} is stale" in told
    assert f"psycopg: no row for token {stale}" in told
    assert told.endswith("5 pieces are left\n")


@pytest.mark.long
def test_slow_worker_is_refused_and_pays_again(engine: Engine, database_url: str, quorum_url: str) -> None:
    assert_both_payments_count(story("order_payment.py", "--database", database_url, "--nodes", quorum_url))
    with engine.connect() as connection:
        assert connection.scalar(text("SELECT paid_cents FROM shop_orders")) == 80_00


FLASK = ("--allow-subclassing-any", "--no-warn-return-any", "--disable-error-code=name-defined")


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "options"),
    [("celery_shop", ()), ("fastapi_shop", ()), ("flask_shop", FLASK), ("sqlmodel_shop", ())],
)
def test_its_own_tests_pass(
    name: str, options: tuple[str, ...], postgres: Postgres, tmp_path: Path, installed_path: str
) -> None:
    """Those that a reader copies."""
    url = postgres.create_database().replace("+psycopg", "+asyncpg")
    environments = {
        "fastapi_shop": {"DATABASE_URL": url},
        "flask_shop": {"PYTHONPATH": installed_path, "FLASK_APP": "shop"},
    }
    Shop(name, tmp_path / "shop", environments.get(name, {})).check(*options)


@pytest.mark.long
def test_a_leader_that_is_told_to_end_resigns(tmp_path: Path) -> None:
    """So the next copy leads at once."""
    url = f"sqlite:///{tmp_path / 'daemon.db'}"
    command = [sys.executable, "-u", "-W", "error", str(EXAMPLES / "leader.py"), url]
    for _ in range(2):
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as copy:
            assert copy.stdout is not None
            told = next((line for line in copy.stdout if re.search("leads with token|Traceback", line)), "")
            copy.terminate()
            rest = copy.communicate(timeout=60)[0]
        assert "leads with token" in told
        assert (copy.returncode, "Traceback" in rest) == (128 + signal.SIGTERM, False), rest


def test_order_payment_brings_its_own_servers() -> None:
    assert_both_payments_count(story("order_payment.py"))


def test_raw_sql_brings_its_own_servers() -> None:
    assert_stale_holder_got_nowhere(story("raw_sql.py"))


def test_why_not_shows_what_each_way_accepts(postgres: Postgres) -> None:
    """docs/compared.md says the same."""
    told = story("why_not.py", postgres.create_database())
    shown = [re.sub(r" \(.*|, so .*", "", line).split(": ") for line in told.splitlines()]
    assert shown == [
        ["SERIALIZABLE, the transaction stays open", "refused"],
        ["SERIALIZABLE, a transaction for the read", "accepted"],
        ["pg_advisory_lock, its session ends", "accepted"],
        ["FOR UPDATE SKIP LOCKED, and a mark", "accepted"],
        ["fencelock", "refused"],
    ]


@pytest.mark.long
@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_story_that_does_not_come_true_ends_with_status_1(
    engine: Engine, database_url: str, quorum_url: str
) -> None:
    story("order_payment.py", "--database", database_url, "--nodes", quorum_url)
    forget = text("""
        CREATE TRIGGER forget AFTER UPDATE OF paid_cents ON shop_orders
        BEGIN UPDATE shop_orders SET paid_cents = 3000 WHERE paid_cents > 0; END
    """)
    with engine.begin() as connection:
        connection.execute(forget, execution_options={"fencelock": "bypass"})
    ended = run("order_payment.py", "--database", database_url, "--nodes", quorum_url)
    assert ended.returncode == 1
    assert ended.stdout.endswith("30.00 of 100.00 are paid\nthis is not what should have happened\n")


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_blank_nodes_are_named_with_the_command_to_run(database_url: str, node_urls: list[str]) -> None:
    ended = run("order_payment.py", "--database", database_url, "--nodes", ",".join(node_urls))
    assert ended.returncode == 1
    assert "NodesNotInitialisedError" in ended.stderr
    assert "fencelock init" in ended.stderr
