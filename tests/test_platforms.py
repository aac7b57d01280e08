"""The library works on systems that have no fork, no poll and few signals: the tests take these away."""

from __future__ import annotations

import asyncio
import subprocess
import textwrap
from pathlib import Path

import pytest

from fencelock import Redlock
from proof.servers import Nodes
from tests.programs import python
from tests.test_first_file import LATE, PROGRAM

#: Run by Python before anything else.
WITHOUT = """
    import os, select, signal, sys

    for library, names in {
        os: ["fork", "forkpty", "register_at_fork", "killpg", "setsid", "getppid", "geteuid", "uname"],
        select: ["poll", "epoll", "POLLIN", "POLLOUT"],
        signal: ["SIGALRM", "SIGKILL", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "setitimer"],
    }.items():
        for name in names:
            vars(library).pop(name, None)
    for name in ("fcntl", "grp", "pwd", "resource", "termios", "uvloop"):
        sys.modules[name] = None
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "sitecustomize.py").write_text(textwrap.dedent(WITHOUT))
    (tmp_path / "refused.py").write_text(PROGRAM + LATE)
    return tmp_path


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return python("-W", "error", *arguments, cwd=folder, env={"PYTHONPATH": str(folder), "PATH": ""})


def test_readmes_program_runs_over_sqlite(folder: Path) -> None:
    done = run(folder, "refused.py")
    assert done.returncode == 0, done.stderr
    assert "StaleTokenError: token" in done.stdout


@pytest.mark.parametrize("is_asyncio", [False, True])
def test_readmes_program_runs_over_a_node(folder: Path, nodes: Nodes, *, is_asyncio: bool) -> None:
    with Redlock(nodes[0].url) as authority:
        authority.init()
    page = (folder / "refused.py").read_text()
    page = page.replace("configure(engine)", f"configure({nodes[0].url!r})")
    if is_asyncio:
        page += textwrap.dedent(
            """
            async def wait():
                import asyncio
                async def one():
                    async with fenced_lock("hot", timeout=20):
                        await asyncio.sleep(0.01)
                await asyncio.gather(*(one() for _ in range(20)))

            if __name__ == "__main__":
                import asyncio
                asyncio.run(wait())
            """
        )
    (folder / "refused.py").write_text(page)
    done = run(folder, "refused.py")
    assert done.returncode == 0, done.stderr
    assert "StaleTokenError: token" in done.stdout


@pytest.mark.parametrize("command", ["init", "inspect", "nodes", "doctor"])
def test_commands_run(folder: Path, nodes: Nodes, command: str) -> None:
    with Redlock(nodes[0].url) as authority:
        authority.init()
    given = {"init": [nodes[0].url], "nodes": ["--current", nodes[0].url]}
    done = run(folder, "-m", "fencelock", command, *given.get(command, ["--url", nodes[0].url]))
    assert "Traceback" not in done.stderr, done.stderr
    assert done.returncode in {0, 3}, done.stderr


def test_run_says_what_it_needs(folder: Path) -> None:
    done = run(folder, "-m", "fencelock", "run", "job", "--url", "sqlite:///x.db", "--", "true")
    assert (done.returncode, "process groups" in done.stderr) == (74, True), done.stderr


class Proactor(asyncio.BaseEventLoop): ...


def test_a_loop_that_tells_of_no_sockets_is_named(nodes: Nodes) -> None:
    loop = Proactor()
    asyncio._set_running_loop(loop)
    try:
        with (
            Redlock(nodes.urls) as authority,
            pytest.raises(RuntimeError, match=r"Proactor .*SelectorEventLoop"),
        ):
            authority.lock("r").aio.acquire().send(None)
    finally:
        asyncio._set_running_loop(None)
        loop.close()
