"""`fencelock init` and `fencelock nodes` make nodes usable, show them, recover them and change their list."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import redis
from sqlalchemy import create_engine, text
from typer.testing import CliRunner

from fencelock import Redlock, fenced_lock
from fencelock.cli.app import app
from proof.servers import Nodes
from tests.polling import eventually
from tests.programs import python
from tests.redlock.groups import Cluster


def fencelock(*arguments: str, typed: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the command line on a wide terminal, in this process: to start one takes a second.

    Not for `fencelock run`, which handles the signals of its process.
    """
    terminal = CliRunner(env={"COLUMNS": "160", "TERM": "dumb", **variables})
    result = terminal.invoke(app, arguments, input=typed)
    if not isinstance(result.exception, SystemExit | None):
        raise result.exception
    return subprocess.CompletedProcess(arguments, result.exit_code, result.stdout, result.stderr)


def program(*arguments: str, typed: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the program as a user would, on a wide terminal."""
    environment = {**os.environ, "COLUMNS": "160", "TERM": "dumb", **variables}
    return python("-m", "fencelock", *arguments, typed=typed, env=environment)


def test_init_makes_blank_nodes_usable(nodes: Nodes) -> None:
    first = fencelock("init", *nodes.urls, "--base", "0")
    assert (first.returncode, first.stderr.splitlines()[0]) == (0, "5 nodes initialised")
    assert f"FENCELOCK_URL={nodes.url}" in first.stderr
    with Redlock(nodes.url) as quorum:
        with fenced_lock("a", authority=quorum) as token:
            assert token == 1
        second = fencelock("init", *nodes.urls)
        assert (second.returncode, "nothing was changed" in second.stderr) == (0, True)
        with fenced_lock("a", authority=quorum) as token:
            assert token == 2


def test_init_tells_programs_the_namespace_that_is_not_the_default(nodes: Nodes) -> None:
    """FENCELOCK_URL does not carry it, so a program that has only that would find blank nodes."""
    url = nodes[0].url
    said = fencelock("init", url, "--namespace", "shop").stderr.replace("\n", "")
    assert f'fencelock.configure("{url}", namespace="shop")' in said
    assert "FENCELOCK_URL" not in said


def test_init_does_not_pass_over_a_node_that_restarted(make_nodes: Callable[..., Nodes]) -> None:
    """It has its data, but must not vote: that all is well would be the wrong answer."""
    nodes = make_nodes(1, appendfsync="always")
    assert fencelock("init", *nodes.urls).returncode == 0
    nodes[0].restart(keep_data=True)
    result = fencelock("init", *nodes.urls)
    assert result.returncode == 1
    assert "has restarted since" in result.stderr
    with redis.Redis.from_url(nodes.url) as client:
        client.flushall()
    assert fencelock("init", *nodes.urls).returncode == 0


def test_init_names_the_node_that_does_not_answer(make_nodes: Callable[..., Nodes]) -> None:
    """All nodes must be reachable when they are initialised; the error names the one that is not."""
    nodes = make_nodes(3)
    nodes[1].kill()
    result = fencelock("init", *nodes.urls)
    assert result.returncode == 1
    assert "QuorumError" in result.stderr
    assert nodes[1].url in result.stderr


def test_version_can_be_asked_for() -> None:
    assert program("--version").stdout.startswith("fencelock ")


def test_init_refuses_what_is_no_url() -> None:
    for url in ("localhost:6379", "http://localhost", "redis://", "redis://h:port"):
        result = fencelock("init", url)
        assert (result.returncode, "redis://host:6379" in result.stderr) == (1, True)
        assert "Traceback" not in result.stderr


@pytest.fixture
def three(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    urls = list(nodes.urls[:3])
    with Redlock(urls) as quorum:
        quorum.init(base=0, max_ttl=60)
    monkeypatch.setenv("FENCELOCK_URL", ",".join(urls))
    return urls


def test_nodes_shows_how_each_stands(nodes: Nodes, three: list[str]) -> None:
    nodes[2].kill()
    shown = fencelock("nodes")
    assert (shown.returncode, shown.stdout.count("admitted"), shown.stdout.count("unreachable")) == (0, 2, 1)
    with redis.Redis.from_url(three[1]) as client:
        client.flushall()
    shown = fencelock("nodes", "--current", ",".join(three))
    assert (shown.returncode, shown.stdout.count("blank")) == (1, 1)
    assert "no majority" in shown.stderr


def test_nodes_says_how_long_a_recovery_takes(nodes: Nodes, three: list[str]) -> None:
    with Redlock(three) as quorum:
        nodes[0].restart(keep_data=False)
        assert eventually(lambda: take(quorum) > 0 and quorum.status()[0].recovering_for is not None)
        assert "recovering for another" in fencelock("nodes").stdout


def test_nodes_can_be_recovered_by_hand(make_nodes: Callable[..., Nodes]) -> None:
    nodes = make_nodes(3)
    with Redlock(nodes.urls) as quorum:
        quorum.init(max_ttl=1)
    nodes[0].restart(keep_data=False)
    shown = fencelock("nodes", "--current", nodes.url, "--wait")
    assert (shown.returncode, shown.stdout.count("admitted")) == (0, 3)


def take(quorum: Redlock) -> int:
    with quorum.lock("r") as token:
        return token


def token_of(urls: list[str]) -> int:
    with Redlock(urls) as quorum:
        return take(quorum)


def test_nodes_may_have_several_hosts_each(nodes: Nodes) -> None:
    with Cluster(2) as cluster:
        urls = [cluster.url(), *nodes.urls[:2]]
        made = fencelock("init", *urls)
        assert made.stderr.splitlines()[0] == "3 nodes initialised"
        assert f"FENCELOCK_URL={','.join(urls)}" in made.stderr
        shown = fencelock("nodes", "--current", ",".join(urls))
        assert (shown.returncode, shown.stdout.count("admitted")) == (0, 3)
        replaced = fencelock("nodes", "--current", ",".join(urls), "replace", cluster.url(), nodes[2].url)
        assert replaced.returncode == 0, replaced.stderr
        assert "3 nodes are in use now" in replaced.stderr


def test_nodes_wants_to_know_which(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FENCELOCK_URL", raising=False)
    for command in (["nodes"], ["nodes", "set", "redis://h"], ["nodes", "replace", "redis://a", "redis://b"]):
        result = fencelock(*command)
        assert (result.returncode, "Set FENCELOCK_URL" in result.stderr) == (1, True)


def test_nodes_are_shown_whole_in_a_pipe_and_as_json(three: list[str]) -> None:
    token_of(three)
    piped = fencelock("nodes", COLUMNS="40")
    assert all(url in piped.stdout for url in three)
    found = json.loads(fencelock("nodes", "--json").stdout)
    assert [(each["address"], each["state"]) for each in found] == [(url, "admitted") for url in three]


@pytest.mark.long
def test_node_is_replaced(nodes: Nodes, three: list[str]) -> None:
    """A dead one gives its place to a blank one; tokens go on growing; running it again changes nothing."""
    before = token_of(three)
    nodes[2].kill()
    result = fencelock("nodes", "replace", three[2], nodes.urls[3])
    assert result.returncode == 0, result.stderr
    assert f"FENCELOCK_URL={three[0]},{three[1]},{nodes.urls[3]}" in result.stderr
    again = fencelock("nodes", "--current", ",".join(three), "replace", three[2], nodes.urls[3])
    assert (again.returncode, "nothing was changed" in again.stderr) == (0, True)
    nodes[1].kill()
    assert token_of([three[0], three[1], nodes.urls[3]]) > before


def test_list_of_nodes_is_set(nodes: Nodes, three: list[str]) -> None:
    """From three to five, of which none stays but one; the option may stand behind the command, too."""
    before = token_of(three)
    wanted = [three[0], *nodes.urls[3:]]
    result = fencelock("nodes", "set", *wanted, "--current", ",".join(three))
    assert result.returncode == 0, result.stderr
    assert token_of(wanted) > before
    assert fencelock("nodes", "--current", ",".join(wanted)).stdout.count("admitted") == 3
    closed = fencelock("nodes", "--current", ",".join(three))
    assert (closed.returncode, closed.stdout.count("closed")) == (1, 2)


def test_longest_lease_is_set_for_the_present_nodes(three: list[str]) -> None:
    assert fencelock("nodes", "set", "--max-ttl", "3600").returncode == 0
    with Redlock(three) as quorum:
        assert {each.max_ttl for each in quorum.status()} == {3600}
    nothing = fencelock("nodes", "set")
    assert (nothing.returncode, "or --max-ttl" in nothing.stderr) == (1, True)


def test_change_of_nodes_refuses_before_it_closes_anything(nodes: Nodes, three: list[str]) -> None:
    with Redlock(nodes.urls[4]) as other:
        other.init()
    elsewhere = fencelock("nodes", "replace", three[2], nodes.urls[4])
    assert (elsewhere.returncode, "in use in another list" in elsewhere.stderr) == (1, True)
    nodes[3].kill()
    silent = fencelock("nodes", "replace", three[2], nodes.urls[3])
    assert (silent.returncode, f"{nodes.urls[3]} does not" in silent.stderr) == (1, True)
    stranger = fencelock("nodes", "replace", nodes.urls[3], nodes.urls[4])
    assert (stranger.returncode, "none of the present nodes" in stranger.stderr) == (1, True)
    twice = fencelock("nodes", "set", three[0], three[0])
    assert (twice.returncode, "named 2 times" in twice.stderr) == (1, True)
    assert token_of(three) > 0


def test_init_after_loss_starts_above_the_database(three: list[str], database_url: str) -> None:
    engine = create_engine(database_url, execution_options={"fencelock": "bypass"})  # models of other tests
    high = 5 << 44 | 77
    with engine.begin() as connection:
        for table in ("fencelock_fences", "orders", "stock"):
            connection.exec_driver_sql(f"CREATE TABLE {table} (id INTEGER, last_fencing_token BIGINT)")
        connection.exec_driver_sql("CREATE TABLE plain (id INTEGER)")
        connection.exec_driver_sql("INSERT INTO orders VALUES (1, 12), (3, NULL)")
        connection.execute(text("INSERT INTO orders VALUES (2, :high)"), {"high": high})
    engine.dispose()
    for url in three:
        with redis.Redis.from_url(url) as client:
            client.flushall()
    words = f"New tokens are larger than {high}, the largest that the databases have seen"
    for plain_first in (False, True):
        if plain_first:
            for url in three:
                with redis.Redis.from_url(url) as client:
                    client.flushall()
            assert fencelock("init", *three).returncode == 0
            assert token_of(three) >> 44 == 0
        result = fencelock("init", *three, "--after-loss", "--database", database_url)
        assert result.returncode == 0, result.stderr
        assert f"the highest fence of 3 fenced tables is {high}" in result.stderr
        assert ("3 nodes had been initialised before\n" in result.stderr) is plain_first
        assert words in result.stderr
        assert token_of(three) >> 44 == 6


STRANGERS = ("cache:1", "{fencelock}", "{fencelock}x", "{fencelock}:x:r", "{sh*p}x", "{shop}", "{shop}:l:r")


@pytest.fixture
def lost(nodes: Nodes, tmp_path: Path) -> tuple[list[str], str]:
    urls = list(nodes.urls[:3])
    with Redlock(urls, namespace="sh*p") as quorum:
        quorum.init(base=0)
        for name in ("r", "s"):
            quorum.acquire((name,), ttl=30, timeout=0)
    for url in urls:
        with redis.Redis.from_url(url) as client:
            for name in STRANGERS:
                client.set(name, "mine")
            client.zadd("{sh*p}:q:r", {"a.1": 1})
            if url != urls[0]:
                client.delete("{sh*p}")
    database = f"sqlite:///{tmp_path}/shop.db"
    engine = create_engine(database, execution_options={"fencelock": "bypass"})
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE orders (id INTEGER, last_fencing_token BIGINT)")
        connection.exec_driver_sql("INSERT INTO orders VALUES (1, 12)")
    engine.dispose()
    return urls, database


def after_loss(lost: tuple[list[str], str], *more: str, typed: str = "") -> subprocess.CompletedProcess[str]:
    urls, database = lost
    options = ("--namespace", "sh*p", "--after-loss", "--database", database)
    return fencelock("init", *urls, *options, *more, typed=typed)


def keys(url: str) -> set[str]:
    with redis.Redis.from_url(url, decode_responses=True) as client:
        return set(map(str, client.keys("*")))


@pytest.mark.parametrize(("typed", "option"), [("y\n", []), ("", ["--yes"])])
def test_init_after_loss_clears_what_is_left(
    lost: tuple[list[str], str], typed: str, option: list[str]
) -> None:
    result = after_loss(lost, *option, typed=typed)
    assert result.returncode == 0, result.stderr
    assert "keys deleted" in result.stderr
    for url in lost[0]:
        assert keys(url) == {*STRANGERS, "{sh*p}", "{sh*p}:m"}
    with Redlock(lost[0], namespace="sh*p") as quorum, quorum.lock("r", ttl=1, timeout=0) as token:
        assert token >> 44 == 1


@pytest.mark.parametrize("kept", [1, 0])
def test_init_after_loss_keeps_the_longest_lease(lost: tuple[list[str], str], kept: int) -> None:
    """Of the node that still knows it; else the command says that it has taken the default."""
    urls, database = lost
    with Redlock(urls, namespace="long") as quorum:
        quorum.init(max_ttl=3600)
    for url in urls[kept:]:
        with redis.Redis.from_url(url) as client:
            client.flushall()
    options = ("--after-loss", "--database", database, "--namespace", "long", "--yes")
    result = fencelock("init", *urls, *options)
    assert result.returncode == 0, result.stderr
    assert ("The longest lease stays 3600 s" if kept else "60 s is the default") in result.stderr
    with Redlock(urls, namespace="long") as quorum:
        assert {each.max_ttl for each in quorum.status()} == {3600 if kept else 60}


def test_init_after_loss_takes_the_url_of_a_program_for_coroutines(lost: tuple[list[str], str]) -> None:
    """It uses the other driver of the same database."""
    urls, database = lost
    result = after_loss((urls, database.replace("sqlite:", "sqlite+aiosqlite:")), "--yes")
    assert result.returncode == 0, result.stderr
    assert "the highest fence of 1 fenced tables is 12" in result.stderr


@pytest.mark.parametrize("typed", ["n\n", ""])
def test_init_after_loss_asks_first(lost: tuple[list[str], str], typed: str) -> None:
    before = [keys(url) for url in lost[0]]
    result = after_loss(lost, typed=typed)
    assert (result.returncode, f"{lost[0][0]} still" in result.stderr) == (1, True)
    assert [keys(url) for url in lost[0]] == before


def test_init_after_loss_clears_nothing_where_a_node_is_down(
    nodes: Nodes, lost: tuple[list[str], str]
) -> None:
    before = keys(lost[0][0])
    nodes[2].kill()
    result = after_loss(lost, "--yes")
    assert (result.returncode, "needs a usable answer" in result.stderr) == (1, True)
    assert keys(lost[0][0]) == before


def test_init_after_loss_names_nodes_that_must_be_gone(nodes: Nodes, lost: tuple[list[str], str]) -> None:
    """One that is left out may live on with the rest of its list."""
    urls, database = lost
    result = after_loss(([urls[0], urls[1], nodes.urls[3]], database), typed="n\n")
    assert f"{urls[2]} must be gone for good" in result.stderr


def test_init_after_loss_clears_nothing_where_a_majority_votes(three: list[str], tmp_path: Path) -> None:
    database = f"sqlite:///{tmp_path}/shop.db"
    engine = create_engine(database, execution_options={"fencelock": "bypass"})
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE orders (id INTEGER, last_fencing_token BIGINT)")
    engine.dispose()
    with Redlock(three) as quorum, quorum.lock("held", ttl=10):
        assert fencelock("init", *three, "--after-loss", "--database", database).returncode == 0
        assert all("{fencelock}:l:held" in keys(url) for url in three)


def test_init_after_loss_needs_a_database_that_knows(tmp_path: Path) -> None:
    """Without --database, without --after-loss, with a database that cannot be read or has no fences."""
    for options, sentence in (
        (["--after-loss"], "belong together"),
        (["--database", "sqlite://"], "belong together"),
        (["--after-loss", "--database", "oracel://x"], "cannot be read"),
        (["--after-loss", "--database", f"sqlite:///{tmp_path}/no/such.db"], "there is no file"),
        (["--after-loss", "--database", "sqlite://"], "no table with a column last_fencing_token"),
        (["--after-loss", "--database", "postgresql+asyncpg://u:secret@127.0.0.1:1/x"], "cannot be read"),
        (["--after-loss", "--database", "mysql+aiomysql://u:secret@127.0.0.1:1/x"], "cannot be read"),
    ):
        result = fencelock("init", "redis://h", *options)
        assert (result.returncode, sentence in result.stderr) == (1, True), result.stderr
        assert "Traceback" not in result.stderr
        assert "secret" not in result.stderr
        assert "never awaited" not in result.stderr
