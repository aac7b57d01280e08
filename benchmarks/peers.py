"""Homes for peers that cannot live beside the redis-py that fencelock uses.

redlock-ng wants redis-py 5, mithril-locks at most 7, aioredlock the long abandoned aioredis 1, and `redlock`
has the import name that redlock-py has too. Each gets a virtual environment of its own; node-redlock gets a
folder of npm packages. They are installed once, when they are first needed, below a folder that may be thrown
away at any time. What cannot be installed, for want of a network, of node or of an old enough Python, does
not take part, and a line says so.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path

from benchmarks.contenders import Contender

_WORKER = ("-m", "benchmarks.worker")
_SCRIPT = Path(__file__).parent / "node_redlock.js"
_PATIENCE = 180.0

#: What is installed in the home of each: the newest release of each peer, with hiredis where it uses it.
PYTHON_HOMES = {
    "redlock-ng": ("redlock-ng==2.0.4", "hiredis"),
    "redlock": ("redlock==1.2.0", "hiredis"),
    "mithril-locks": ("mithril-locks[postgres]==0.1.0", "hiredis"),
    # Its client needs `distutils`, which setuptools brings where Python has none.
    "aioredlock": ("aioredlock==0.7.3", "setuptools<81"),
}
NODE_HOMES = {"node-redlock": ("redlock@5.0.0-beta.2", "ioredis@5")}


class NotInstalledError(Exception):
    """A peer has no home here; the message says why."""


@dataclass(frozen=True, slots=True)
class Homes:
    """Where the homes are.

    Attributes:
        folder: they are below it; None where nobody is to have one.
    """

    folder: Path | None

    def program(self, contender: Contender) -> list[str]:
        """Return what runs a worker for a contender; its home is installed first where it is not there.

        Raises:
            NotInstalledError: something is not there and cannot be installed.
        """
        home = contender.home
        if not contender.is_installed:
            raise NotInstalledError("it is not installed")
        if home is None:
            return [sys.executable, *_WORKER]
        if self.folder is None:
            raise NotInstalledError("it would need a home of its own")
        return (_node if home in NODE_HOMES else _python)(self.folder / home, home)


def _python(folder: Path, home: str) -> list[str]:
    python = folder / "bin" / "python"
    if not _is_complete(folder, PYTHON_HOMES[home]):
        venv.create(folder, clear=True, with_pip=True)
        command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        _install(folder, command, PYTHON_HOMES[home])
    return [str(python), *_WORKER]


def _node(folder: Path, home: str) -> list[str]:
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None:
        raise NotInstalledError("there is no node")
    if not _is_complete(folder, NODE_HOMES[home]):
        if npm is None:
            raise NotInstalledError("there is no npm")
        folder.mkdir(parents=True, exist_ok=True)
        command = [npm, "install", "--prefix", str(folder), "--no-audit", "--no-fund", "--silent"]
        _install(folder, command, NODE_HOMES[home])
    return ["env", f"NODE_PATH={folder / 'node_modules'}", node, str(_SCRIPT)]


def _is_complete(folder: Path, wanted: tuple[str, ...]) -> bool:
    mark = folder / "installed"
    return mark.exists() and mark.read_text() == _mark(wanted)


def _install(folder: Path, command: list[str], wanted: tuple[str, ...]) -> None:
    try:
        subprocess.run([*command, *wanted], check=True, capture_output=True, text=True, timeout=_PATIENCE)
    except subprocess.CalledProcessError as error:
        said = (error.stderr or error.stdout).strip().splitlines() or [f"exit status {error.returncode}"]
        raise NotInstalledError(f"it cannot be installed: {said[-1]}") from error
    except subprocess.TimeoutExpired as error:
        raise NotInstalledError("its installation took too long") from error
    (folder / "installed").write_text(_mark(wanted))


def _mark(wanted: tuple[str, ...]) -> str:
    """Return what a complete home says of itself: another Python needs another one."""
    return f"{sys.version_info[:2]} {' '.join(wanted)}"
