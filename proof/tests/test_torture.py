"""`python -m proof.torture` finds its control wrong, spares a user's servers, and ends early with a verdict.

`test_trace.py` has a run that ends RIGHT; `make proof` has all faults, and each control.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
import redis
from sqlalchemy import create_engine, inspect
from typer.testing import CliRunner

from proof.servers import Nodes
from proof.torture.__main__ import app
from tests.polling import eventually

pytestmark = [pytest.mark.timed, pytest.mark.long]


def command(*arguments: str | Path) -> list[str]:
    """Return the command line of a run."""
    return [sys.executable, "-m", "proof.torture", *map(str, arguments)]


def terminal() -> dict[str, str]:
    """Return the environment of a wide terminal without colours."""
    return {**os.environ, "COLUMNS": "160", "TERM": "dumb"}


def torture(*arguments: str | Path, shell: str = 'exec "$@"') -> subprocess.CompletedProcess[str]:
    """Make a run as a user would, without a keyboard."""
    return subprocess.run(
        ["/bin/sh", "-c", shell, "sh", *command(*arguments)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env=terminal(),
    )


def test_naive_tokens_are_given_twice(tmp_path: Path) -> None:
    """The quickest control: the largest counter of a majority, and nodes that forget theirs."""
    faults = ("--fault", "node-blank", "--fault", "worker-pause", "--ttl", "0.5", "--every", "0.2")
    more = ("--naive-tokens", "--resources", "4", "--workers", "4", "--database", "sqlite")
    for seconds in ("3", "12"):  # the machine may be slow
        result = torture(*more, *faults, "--duration", seconds, "--output", tmp_path / seconds)
        if result.returncode == 1:
            break
    assert result.returncode == 1, result.stdout + result.stderr
    assert " P1" in result.stdout.rpartition("WRONG: ")[2]


@pytest.mark.parametrize("shell", ['exec "$@"', 'exec "$@" <&-'], ids=["/dev/null", "closed"])
def test_servers_of_the_user_are_not_touched_without_a_word(nodes: Nodes, tmp_path: Path, shell: str) -> None:
    """No terminal is there to confirm it on: nothing is written, anywhere."""
    database = tmp_path / "mine.sqlite"
    where = ("--nodes", nodes.url, "--database", f"sqlite:///{database}", "--output", tmp_path / "out")
    result = torture(*where, shell=shell)
    assert result.returncode == 2, result.stderr
    assert "servers of yours" in result.stderr
    assert "give --yes" in result.stderr
    assert not database.exists()
    for node in nodes:
        with redis.Redis.from_url(node.url) as client:
            assert client.dbsize() == 0


@pytest.mark.parametrize("database_url", ["postgresql", "mariadb"], indirect=True)
def test_servers_of_the_user_are_left_as_they_were(database_url: str, nodes: Nodes, tmp_path: Path) -> None:
    """With --yes: a right verdict, no key and no table left, and only faults that break nothing of theirs."""
    faults = ("--fault", "worker-pause", "--fault", "partition", "--fault", "node-blank")
    settings = ("--duration", "3", "--ttl", "0.5", "--every", "0.2", "--workers", "3", "--yes")
    with redis.Redis.from_url(nodes[0].url) as client:
        client.set("mine", "still there")
        where = ("--nodes", nodes.url, "--database", database_url, "--output", tmp_path / "out")
        result = torture(*where, *faults, *settings)
        assert result.returncode == 0, result.stderr
        assert client.keys() == [b"mine"]
    assert "without node-blank: the nodes were not started by this run" in result.stderr
    engine = create_engine(database_url)
    assert inspect(engine).get_table_names() == []
    engine.dispose()
    history = (tmp_path / "out" / "history.jsonl").read_text()
    assert all(f'"fault":"{fault}"' in history for fault in ("worker-pause", "partition"))


@contextmanager
def under_way(out: Path, *options: str) -> Iterator[subprocess.Popen[str]]:
    """Start a run that would last for long, and yield it when one of its two workers works."""
    arguments = ("--duration", "1000", "--ttl", "0.5", "--database", "sqlite", "--workers", "2", *options)
    with subprocess.Popen(
        command("--output", out, *arguments),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=terminal(),
    ) as process:
        try:
            assert eventually(lambda: any(path.stat().st_size for path in out.glob("worker?-0.jsonl")), 60)
            yield process
        finally:
            process.kill()


def test_ctrl_c_ends_a_run_with_a_verdict_about_what_there_is(tmp_path: Path) -> None:
    """Within seconds, with status 0 where that was right."""
    with under_way(tmp_path / "out", "--fault", "node-pause") as process:
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        said, complaints = process.communicate(timeout=100)
    assert process.returncode == 0, complaints
    assert "Interrupted: the verdict is about what there is" in complaints
    assert "RIGHT: every promise was kept" in said


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process that is paused")
def test_a_run_that_is_killed_leaves_no_process_behind(tmp_path: Path) -> None:
    """Neither servers nor workers, and not the worker that is paused at that moment."""
    options = ("--fault", "worker-pause", "--every", "0.01", "--ttl", "5", "--pause", "60")
    with under_way(tmp_path / "out", *options) as process:
        family = psutil.Process(process.pid).children(recursive=True)
        assert eventually(lambda: any(_is(member, psutil.STATUS_STOPPED) for member in family), 60)
        process.kill()
        process.communicate()
    assert len(family) > 7  # five nodes, two workers
    zombie = psutil.STATUS_ZOMBIE
    assert eventually(lambda: all(_is(each, zombie) or not each.is_running() for each in family), 60)


def _is(process: psutil.Process, status: str) -> bool:
    with suppress(psutil.NoSuchProcess):
        return bool(process.status() == status)
    return False


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--fault", "earthquake"), "there is no fault 'earthquake'; choose from worker-pause"),
        (("--ttl", "0"), "--ttl is more than 0, not 0"),
        (("--output", "."), ". exists already: name a new folder"),
        (("--fault", "database-kill", "--database", "sqlite"), "None of the faults can be had"),
        (("--database", "nonsense", "--yes"), "'nonsense' is no database that can be used"),
        (("--database", "sqlite:////nowhere/x", "--yes"), "sqlite:////nowhere/x is no database"),
    ],
)
def test_bad_input_gets_a_sentence(arguments: tuple[str, ...], sentence: str, tmp_path: Path) -> None:
    """And status 2, before anything is started."""
    out = tmp_path / "out"
    output = () if "--output" in arguments else ("--output", str(out))
    result = CliRunner().invoke(app, [*output, *arguments])
    assert result.exit_code == 2
    assert sentence in result.stderr
    assert not out.exists()
