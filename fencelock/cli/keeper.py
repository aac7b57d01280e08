"""A process between `fencelock run` and its command: it kills the command where `fencelock run` is killed."""

from __future__ import annotations

import ctypes
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final, NoReturn

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_CHILD_SUBREAPER: Final = 36
_IS_LINUX: Final = sys.platform == "linux"


class Keeper:
    """Starts a command in a forked child, and tells its status.

    On Linux the child becomes the parent of what the command has started and left (`PR_SET_CHILD_SUBREAPER`
    of prctl(2)), so that it finds each descendant.
    """

    def __init__(self, arguments: list[str], environment: Mapping[str, str], group: int | None) -> None:
        self.pid: int = 0  # of the command, once it runs
        self._channel, theirs = socket.socketpair()
        sys.stdout.flush()
        sys.stderr.flush()
        if os.fork() == 0:
            self._channel.close()
            _keep(theirs, arguments, environment, group)
        theirs.close()

    def start(self, environment: Mapping[str, str]) -> str:
        """Start the command with more variables; return why it cannot be started, or an empty text."""
        self._channel.sendall(json.dumps(environment).encode() + b"\n")
        self._answers = self._channel.makefile()
        said = json.loads(self._answers.readline() or '"the process that starts the command was killed"')
        self.pid = 0 if isinstance(said, str) else said
        return "" if self.pid else str(said)

    def wait(self, seconds: float) -> int | None:
        """Return the status of the command, negative after a signal; None if it runs on for `seconds`."""
        if not select.select([self._channel], [], [], seconds)[0]:
            return None
        return int(self._answers.readline() or -signal.SIGKILL)  # nothing: the keeper was killed


def _keep(
    channel: socket.socket, arguments: list[str], environment: Mapping[str, str], group: int | None
) -> NoReturn:
    """Start the command when it is asked for, and tell its end; kill it when the channel is closed."""
    try:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGCHLD):
            signal.signal(number, lambda *_: None)  # they are for `fencelock run`, and for the command
        if _IS_LINUX:
            ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
        if asked := channel.makefile().readline():
            answer = _run(channel, arguments, {**environment, **json.loads(asked)}, group)
            channel.sendall(json.dumps(answer).encode() + b"\n")
    finally:
        os._exit(0)


def _run(
    channel: socket.socket, arguments: list[str], environment: Mapping[str, str], group: int | None
) -> int | str:
    """Return the status of the command; or why it cannot be started."""
    ended, wakeup = os.pipe()
    os.set_blocking(wakeup, False)
    signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
    prepare = _dying_with_this_process() if _IS_LINUX else None
    try:
        program = subprocess.Popen(arguments, env=environment, process_group=group, preexec_fn=prepare)  # noqa: PLW1509, S603
    except OSError as error:
        return f"{arguments[0]}: {error.strerror}"
    with suppress(BrokenPipeError):
        channel.sendall(b"%d\n" % program.pid)
    while (status := _reap(program.pid)) is None:
        if channel.fileno() in select.select([channel.fileno(), ended], [], [])[0]:  # it was closed
            return _kill(program.pid, group)
        os.read(ended, 4096)
    return status


def _reap(pid: int) -> int | None:
    """Wait for all children that have ended; return the status of one of them, None if it still runs."""
    status = None
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            status = os.waitstatus_to_exitcode(ended[1]) if ended[0] == pid else status
    return status


def _kill(pid: int, group: int | None) -> int:
    """Kill the command and what it has started, until nothing is left that this process may kill."""
    with suppress(ProcessLookupError, PermissionError):
        (os.kill if group is None else os.killpg)(pid, signal.SIGKILL)
    spared: set[int] = set()
    while left := _descendants(os.getpid()) - spared:
        for each in left:
            try:
                os.kill(each, signal.SIGKILL)
            except ProcessLookupError:
                continue
            except PermissionError:  # it has become another user's
                spared.add(each)
        time.sleep(0.01)
        _reap(pid)
    return -signal.SIGKILL


def _descendants(pid: int) -> set[int]:
    """Return the processes below one, as Linux tells; none on other systems."""
    parents = {}
    for each in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            # After the name, which may have any character, come the state and the parent.
            if found := re.match(r"(\d+) .*\) [^ZX] (\d+)", each.read_text(errors="replace"), re.DOTALL):
                parents[int(found[1])] = int(found[2])
    below, size = {pid}, 0
    while len(below) > size:
        size = len(below)
        below |= {child for child, parent in parents.items() if parent in below}
    return below - {pid}


def _dying_with_this_process() -> Callable[[], None]:
    """Return a function for a new process: it makes Linux kill the new process when this process ends."""
    prctl, parent = ctypes.CDLL(None).prctl, os.getpid()

    def prepare() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)

    return prepare
