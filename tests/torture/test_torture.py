"""`python -m proof.torture`, in short: each fault, all of them together, and the controls that must fail."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import redis
from sqlalchemy import create_engine, inspect
from typer.testing import CliRunner

from proof.servers import Nodes
from proof.torture.__main__ import app
from proof.torture.checker import Rule
from proof.torture.faults import LANES
from proof.torture.history import Fault, Outcome, Record, Style, read_records
from proof.torture.run import Result, run, skipped_faults
from proof.torture.settings import FAULTS, NODES, Settings, default_faults
from tests.polling import eventually

SHORT: dict[str, Any] = {
    "duration": 2.5,
    "ttl": 0.5,
    "pause": 1.0,
    "every": 0.2,
    "workers": 4,
    "tasks": 6,
    "database": "sqlite",
    "seed": 7,
}


def torture(folder: Path, faults: Sequence[str], seen: Callable[[Result], bool], **settings: Any) -> Result:
    """Make a short run, or a longer one where the machine was too slow for what is to be seen."""
    short = {**SHORT, **settings}
    for longer in (1, 4):
        output = folder / str(longer)
        output.mkdir()
        duration = short["duration"] * longer
        result = run(Settings(output, faults=tuple(faults), **{**short, "duration": duration}))
        assert result.trouble == ()
        promised = short.get("styles") != (Style.CORE,)
        if promised and short.get("guard", True) and short.get("quorum", True):
            assert_right(result)
        if seen(result):
            return result
    raise AssertionError(f"not seen in {duration:g} s: {result.verdict}")


def faults_in(result: Result) -> list[Fault]:
    """Return the faults that are in the history."""
    with result.history.open() as lines:
        records: list[Record] = list(read_records(lines))
    return [record for record in records if isinstance(record, Fault)]


def assert_right(result: Result) -> None:
    """Check that nothing went wrong, and that something was done."""
    assert result.verdict.violations == ()
    assert result.verdict.acquisitions > 0
    assert result.verdict.acknowledged > 0
    assert result.verdict.lost_updates == 0


def some_in_doubt(result: Result) -> bool:
    """Whether there were COMMITs without an answer."""
    return result.verdict.outcomes.get(Outcome.UNKNOWN, 0) > 0


def some_admitted_again(result: Result) -> bool:
    """Whether a node that had lost its memory has voted again, in another epoch."""
    return any("votes again in epoch" in fault.detail for fault in faults_in(result))


#: What must have been seen of some of the faults, beyond that they happened.
SIGNS: dict[str, Callable[[Result], bool]] = {
    "node-blank": some_admitted_again,
    "node-rolling": some_admitted_again,
    "node-rollback": some_admitted_again,
    "node-replica": some_admitted_again,
    "node-flush": some_admitted_again,
    "database-kill": some_in_doubt,
}


@pytest.mark.parametrize("fault", default_faults(NODES))
def test_each_fault_alone_breaks_no_promise(fault: str, tmp_path: Path) -> None:
    """It is seen in the history, and nothing else is broken; the journals have gone into it."""
    database = "postgresql" if fault == "database-kill" else "sqlite"
    if why := skipped_faults(Settings(tmp_path, (fault,), database=database)):
        pytest.skip(why[fault])

    def seen(result: Result) -> bool:
        return set(result.verdict.faults) == {fault} and (fault not in SIGNS or SIGNS[fault](result))

    result = torture(tmp_path, [fault], seen, database=database)
    assert {path.name for path in result.history.parent.iterdir()} == {"history.jsonl"}


def test_all_faults_together_break_no_promise(tmp_path: Path) -> None:
    """At once, as far as fewer than a majority of the nodes is without memory at a time."""

    def seen(result: Result) -> bool:
        return all(result.verdict.faults.keys() & lane for lane in LANES) and some_in_doubt(result)

    torture(tmp_path, list(FAULTS), seen, duration=7.0, database="postgresql", workers=6)


def test_without_the_guard_updates_are_lost(tmp_path: Path) -> None:
    """The control: the same locks, the same pauses, an ordinary table."""

    def seen(result: Result) -> bool:
        return result.verdict.lost_updates > 0 and result.verdict.broken[Rule.NO_LOST_UPDATE] > 0

    settings = {"resources": 2, "tasks": 0, "writes": 1.0, "think": 0.02, "ttl": 0.2, "every": 0.1}
    result = torture(tmp_path, ["worker-pause"], seen, guard=False, pause=2.0, duration=8.0, **settings)
    assert not result.verdict.broken.keys() & {Rule.UNIQUE_TOKENS, Rule.ORDERED_TOKENS}


def test_statements_that_know_no_object_lose_updates(tmp_path: Path) -> None:
    """The control of the styles: under the guard, but nothing says what was read."""

    def seen(result: Result) -> bool:
        return result.verdict.lost_updates > 0 and result.verdict.broken[Rule.NO_LOST_UPDATE] > 0

    settings = {"resources": 1, "tasks": 0, "writes": 1.0, "think": 0.02, "ttl": 0.2, "every": 0.05}
    more = {"styles": (Style.CORE,), "database": "postgresql", "pause": 0.5, "duration": 6.0}
    result = torture(tmp_path, ["worker-pause"], seen, **settings, **more)
    assert set(result.verdict.broken) == {Rule.NO_LOST_UPDATE}


def test_naive_tokens_are_given_twice(tmp_path: Path) -> None:
    """The control: the largest counter of a majority, and nodes that forget theirs."""

    def seen(result: Result) -> bool:
        broken = result.verdict.broken
        return broken[Rule.UNIQUE_TOKENS] > 0 and broken[Rule.ORDERED_TOKENS] > 0

    settings = {"resources": 4, "tasks": 0, "writes": 0.0, "quorum": False}
    torture(tmp_path, ["node-blank", "worker-pause"], seen, **settings)


def command(*arguments: str | Path) -> list[str]:
    """Return the command line of a run."""
    return [sys.executable, "-m", "proof.torture", *map(str, arguments)]


def terminal() -> dict[str, str]:
    """Return the environment of a wide terminal without colours."""
    return {**os.environ, "COLUMNS": "160", "TERM": "dumb"}


def fencelock(*arguments: str | Path, shell: str = 'exec "$@"') -> subprocess.CompletedProcess[str]:
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


@pytest.mark.parametrize("shell", ['exec "$@"', 'exec "$@" <&-'], ids=["/dev/null", "closed"])
def test_servers_of_the_user_are_not_touched_without_a_word(nodes: Nodes, tmp_path: Path, shell: str) -> None:
    """No terminal is there to confirm it on: nothing is written, anywhere."""
    database = tmp_path / "mine.sqlite"
    result = fencelock(
        *("--nodes", nodes.url, "--database", f"sqlite:///{database}", "--output", tmp_path / "out"),
        shell=shell,
    )
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
    settings = ("--duration", "3", "--ttl", "0.5", "--every", "0.2", "--workers", "3")
    with redis.Redis.from_url(nodes[0].url) as client:
        client.set("mine", "still there")
        result = fencelock(
            *("--nodes", nodes.url, "--database", database_url, "--output", tmp_path / "out", "--yes"),
            *(*faults, *settings),
        )
        assert result.returncode == 0, result.stderr
        assert client.keys() == [b"mine"]
    assert "without node-blank: the nodes were not started by this run" in result.stderr
    assert "RIGHT: every promise was kept" in result.stdout
    engine = create_engine(database_url)
    assert inspect(engine).get_table_names() == []
    engine.dispose()
    history = (tmp_path / "out" / "history.jsonl").read_text()
    assert all(f'"fault":"{fault}"' in history for fault in ("worker-pause", "partition"))


@contextmanager
def under_way(out: Path, *options: str) -> Iterator[subprocess.Popen[str]]:
    """Start a run that would last for long, and yield it when its two workers work."""
    arguments = ("--duration", "1000", "--ttl", "0.5", "--database", "sqlite", "--workers", "2", *options)
    with subprocess.Popen(
        command("--output", out, *arguments),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=terminal(),
    ) as process:
        journals = [out / f"worker{number}-0.jsonl" for number in range(2)]
        assert eventually(lambda: all(map(_has_lines, journals)), 60)
        yield process


def test_ctrl_c_ends_a_run_with_a_verdict_about_what_there_is(tmp_path: Path) -> None:
    """Within seconds, with status 0 where that was right, and with a history that can be judged again."""
    out = tmp_path / "out"
    with under_way(out, "--fault", "node-pause") as process:
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        said, complaints = process.communicate(timeout=100)
    assert process.returncode == 0, complaints
    assert "Interrupted: the verdict is about what there is" in complaints
    assert "RIGHT: every promise was kept" in said
    check = [sys.executable, "-m", "proof.torture.checker", str(out / "history.jsonl")]
    assert subprocess.run(check, stdout=subprocess.DEVNULL, check=False, timeout=60).returncode == 0


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
    assert eventually(lambda: not any(_lives(member) for member in family), 60)


def _is(process: psutil.Process, status: str) -> bool:
    with suppress(psutil.NoSuchProcess):
        return bool(process.status() == status)
    return False


def _lives(process: psutil.Process) -> bool:
    return process.is_running() and not _is(process, psutil.STATUS_ZOMBIE)


def _has_lines(path: Path) -> bool:
    return path.exists() and path.stat().st_size > 0


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
