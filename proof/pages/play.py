"""Runs the blocks of one page in order, in the folder and the process that the page has for itself.

Run as a program by `tests/test_docs.py`, with the name of a file that lists the blocks. Python blocks share
one module, except for those that begin with `# name.py`: these are written to that file. Shell blocks share
what they export. A server that a shell block starts ends with the page.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import io
import json
import linecache
import os
import re
import signal
import socket
import subprocess
import sys
import time
import types
from ast import PyCF_ALLOW_TOP_LEVEL_AWAIT
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from proof.pages.blocks import Block

#: Commands that a page tells to type and that the tests only check: what to install is installed here, and
#: the long ones have tests of their own. With FENCELOCK_INSTALLS it is installed, and `fencelock` is this
#: checkout. `make -n` knows targets, and `--help` options.
PRELUDE: Final = """
set -euo pipefail
pip() {
    if [ -n "${FENCELOCK_INSTALLS-}" ]
    then
        for argument
        do
            shift
            case "$argument" in
                fencelock | "fencelock["*) set -- "$@" "$FENCELOCK_ROOT${argument#fencelock}" ;;
                *) set -- "$@" "$argument" ;;
            esac
        done
        command pip --quiet --disable-pip-version-check "$@"
    else python -m proof.pages.installed "$@"
    fi
}
make() { command make --no-print-directory -n -C "$FENCELOCK_ROOT" "$@" > /dev/null; }
python() {
    case "${1-} ${2-}" in
        "-m proof."* | "-m benchmarks."*) command python "$@" --help > /dev/null ;;
        "proof/"*) command python "$FENCELOCK_ROOT/$@" --help > /dev/null ;;
        # In the background, $! is the program itself, as for a reader, who may send it a signal.
        *) if [ "$BASHPID" != "$$" ]; then exec python "$@"; else command python "$@"; fi ;;
    esac
}
"""
#: Programs that serve until they are ended, and what each says when it is ready.
SERVERS: Final = {
    "celery -A tasks beat": "beat: Starting",
    "celery ": " ready.",
    "gunicorn ": "Listening at",
    "uvicorn ": "Uvicorn running on",
}
PATIENCE: Final = 300.0 if "FENCELOCK_INSTALLS" in os.environ else 30.0


class Page:
    """What the blocks of one page share.

    Args:
        name: which page it is; a traceback has its lines.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._module = types.ModuleType("page")
        sys.modules["page"] = self._module
        self._loop = asyncio.Runner()
        self._servers: list[subprocess.Popen[bytes]] = []
        self._printed = ""

    def play(self, block: Block) -> None:
        if block.language == "python":
            self._printed = self._file(block) if block.file else self._python(block)
        elif block.language == "sh":
            self._printed = self._shell(block)
        elif block.language == "text" and self._printed:
            self._compare(block)
            self._printed = ""

    def close(self) -> None:
        """End the servers that the page has started."""
        for server in self._servers:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(server.pid, signal.SIGTERM)
        for server in self._servers:
            server.wait(PATIENCE)
        self._loop.close()

    def _file(self, block: Block) -> str:
        path = Path(block.file or "")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(block.text)
        return ""

    def _python(self, block: Block) -> str:
        source = "\n" * (block.line - 1) + block.text
        linecache.cache[self._name] = (len(source), None, source.splitlines(keepends=True), self._name)
        code = compile(source, self._name, "exec", flags=PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            if code.co_flags & inspect.CO_COROUTINE:
                self._loop.run(self._awaited(code))
            else:
                exec(code, vars(self._module))  # noqa: S102 - this is what the page tells to do
        return printed.getvalue()

    async def _awaited(self, code: types.CodeType) -> None:
        await eval(code, vars(self._module))  # noqa: S307 - the same

    def _shell(self, block: Block) -> str:
        commands = [line for line in block.text.splitlines() if line and not line.startswith("#")]
        if commands[-1].startswith(tuple(SERVERS)):
            self._serve(commands.pop())
        exported = Path(os.environ["FENCELOCK_EXPORTED"])
        script = "\n".join([PRELUDE, *commands, 'env -0 > "$FENCELOCK_EXPORTED"'])
        ended = subprocess.run(
            ["bash", "-c", script],  # noqa: S607 - the reader's
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=PATIENCE,
        )
        if ended.returncode:
            raise SystemExit(f"{self._name}:{block.line} ended with {ended.returncode}:\n{ended.stdout}")
        for entry in filter(None, exported.read_text().split("\0")):
            name, _, value = entry.partition("=")
            os.environ[name] = value
        return ended.stdout

    def _serve(self, command: str) -> None:
        log = Path(f"server{len(self._servers)}.log").absolute()
        with log.open("wb") as output:
            server = subprocess.Popen(
                ["bash", "-c", f"exec {command}"],  # noqa: S607 - the same
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._servers.append(server)
        ready = next(said for start, said in SERVERS.items() if command.startswith(start))
        deadline = time.monotonic() + PATIENCE
        port = re.search(
            r"--(?:port |bind localhost:)(\d+)", command
        )  # workers listen later than their parent says so
        while ready not in log.read_text() or (port and not _listens(int(port[1]))):
            if server.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"{self._name}: {command} did not start:\n{log.read_text()}")
            time.sleep(0.05)

    def _compare(self, block: Block) -> None:
        """Check an output that the page shows: `…` stands for anything."""
        wanted = r"\s*\n".join(re.escape(line.rstrip()) for line in block.text.splitlines())
        if not re.search(wanted.replace("…", ".*") + r"\s*\Z", self._printed):
            raise SystemExit(
                f"{self._name}:{block.line} shows another output than this one:\n{self._printed}"
            )


def _listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("localhost", port), 1):
        return True
    return False


def play(job: dict[str, Any]) -> None:
    """Play the blocks of a page."""
    page = Page(job["page"])
    with contextlib.closing(page):
        for block in _blocks(job):
            page.play(block)


def _blocks(job: dict[str, Any]) -> Iterator[Block]:
    return (Block(*entry) for entry in job["blocks"])


if __name__ == "__main__":
    play(json.loads(Path(sys.argv[1]).read_text()))
