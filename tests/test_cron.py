"""Each command of docs/cron.md works as a timer's job, also with `--if-held` and `--at-least`."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

from proof.pages.blocks import blocks, read
from proof.torture.clocks import MISSING, find_library

#: Stands for a machine of the page: it has the command on its path, and a script of its own.
SCRIPT = "#!/bin/sh\necho ran >> runs\nexit ${STATUS:-0}\n"


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    script = tmp_path / "report.sh"
    script.write_text(SCRIPT)
    script.chmod(0o755)
    (tmp_path / "runs").touch()
    monkeypatch.setenv("FENCELOCK_URL", f"sqlite:///{tmp_path / 'jobs.db'}")
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    run(tmp_path, "fencelock init")
    return tmp_path


def run(folder: Path, command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["/bin/sh", "-c", command],
        cwd=folder,
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def runs(folder: Path) -> int:
    return len((folder / "runs").read_text().splitlines())


def commands_of_timers() -> list[str]:
    found = []
    for block in blocks(read("docs/cron.md")):
        if block.language == "ini":
            found += re.findall(r"^(?:\S+ \S+ \S+ \* \* |ExecStart=)(.+)$", block.text, re.MULTILINE)
        elif block.language == "yaml":
            found += [
                shlex.join(json.loads(each))
                for each in re.findall(r"^ *command: (\[.+\])$", block.text, re.MULTILINE)
            ]
    return [command.replace("/opt/shop/bin/", "") for command in found]  # the test has a path of its own


def test_page_has_a_command_for_each_timer() -> None:
    assert len(commands_of_timers()) == 3


@pytest.mark.parametrize("command", commands_of_timers())
def test_command_of_a_timer_runs_once_in_its_slot(machine: Path, command: str) -> None:
    first, second = run(machine, command), run(machine, command)
    assert (first.returncode, first.stderr) == (0, "")
    assert second.returncode == 0
    assert re.fullmatch("skipped: held by .+ since .+, or kept for it by --at-least\n", second.stderr)
    assert runs(machine) == 1


@pytest.mark.long
@pytest.mark.skipif(find_library() is None, reason=MISSING)
def test_second_machine_has_a_clock_that_is_twenty_seconds_behind(machine: Path) -> None:
    slot = int(time.time()) + 3
    wait = f"while [ $(date +%s) -lt {slot} ]; do sleep 0.1; done; "
    command = f"{wait}exec fencelock run job --if-held skip --at-least 40s -- ./report.sh"
    behind = {"LD_PRELOAD": str(find_library()), "FAKETIME": "-20s", "FAKETIME_DONT_FAKE_MONOTONIC": "1"}
    late = subprocess.Popen(["/bin/sh", "-c", command], cwd=machine, env={**os.environ, **behind})
    assert run(machine, command).returncode == 0
    assert runs(machine) == 1
    assert late.wait(60) == 0
    assert time.time() >= slot + 20
    assert runs(machine) == 1


#: Wrong options of `fencelock run`, and a part of the sentence about each.
WRONG = {
    "--at-least soon": "'soon' is no time such as",
    "--at-least 0": "at_least is a positive number of seconds",
    "--at-least 8d": "longer than a week",
    "--if-held never": "never",
    "--if-hold skip": "no option --if-hold",
}


def test_options_that_are_wrong(machine: Path) -> None:
    for option, says in WRONG.items():
        ended = run(machine, f"fencelock run job {option} -- ./report.sh")
        assert (ended.returncode, runs(machine)) == (2, 0), (option, ended.stderr)
        assert says in ended.stderr, option
    ended = run(machine, "fencelock run --if-hold skip job -- ./report.sh")
    assert (ended.returncode, runs(machine), "no option --if-hold" in ended.stderr) == (2, 0, True)


@pytest.mark.parametrize("text", ["90", "90s", "1.5m"])
def test_times_are_written_with_or_without_a_unit(machine: Path, text: str) -> None:
    assert run(machine, f"fencelock run job --at-least {text} -- ./report.sh").returncode == 0
    (info,) = json.loads(run(machine, "fencelock inspect --json").stdout)
    assert 60 < info["remaining"] < 90
