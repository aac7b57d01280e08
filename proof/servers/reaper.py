"""Cleans up behind a process that may be killed at any moment.

Apart because it runs as a program of its own, in its own session, and imports nothing of ours: it has to be
there early, stay small, and outlive the process that it watches. Its standard input tells it, a JSON object a
line, which processes to end when that process is gone. Gone means that its end of the pipe is closed, or that
this program has got another parent: a worker that was forked from the watched process may hold the pipe open
for long.

A process is remembered by its pid together with the time of its creation, never by the pid alone.
"""

import json
import os
import select
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress

import psutil

POLL_SECONDS = 0.25
PATIENCE_SECONDS = 5.0


def listen(parent: int) -> Iterator[dict[str, float]]:
    """Yield what the parent tells, until it says goodbye or is gone."""
    unread = b""
    while os.getppid() == parent or select.select([0], [], [], 0)[0]:
        if not select.select([0], [], [], POLL_SECONDS)[0]:
            continue
        received = os.read(0, 65536)
        if not received:
            return
        *lines, unread = (unread + received).split(b"\n")
        for line in lines:
            message = json.loads(line)
            if not message:
                return
            yield message


def identify(message: dict[str, float]) -> psutil.Process | None:
    """Return the process that the parent means, unless its pid has gone to another one since."""
    with suppress(psutil.Error):
        process = psutil.Process(int(message["pid"]))
        # Both readings go back to the same kernel counter; they differ by rounding only.
        if abs(process.create_time() - message["created"]) < 1.0:
            return process
    return None


def working_in(folder: str, programs: set[str]) -> Iterator[psutil.Process]:
    """Yield what runs our programs in our folder.

    A parent can die between the start of a server and the telling, and a server before its children.
    """
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            program = process.exe()
            if lies_in(folder, process.cwd()) and (program in programs or lies_in(folder, program)):
                yield process


def lies_in(folder: str, path: str) -> bool:
    return (path + os.sep).startswith(folder + os.sep)


def still_alive(processes: set[psutil.Process]) -> set[psutil.Process]:
    """Wait for processes to end, up to a limit, and return those that have not."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while (alive := {process for process in processes if lives(process)}) and time.monotonic() < deadline:
        time.sleep(0.01)
    return alive


def lives(process: psutil.Process) -> bool:
    """Whether a process can still do anything: a zombie cannot, and init may be slow to wait for it."""
    with suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def end(farewells: dict[psutil.Process, int]) -> None:
    """Send each process its farewell signal, and kill it if that is not enough."""
    for process, farewell in farewells.items():
        with suppress(psutil.Error):
            process.send_signal(farewell)
            process.resume()
    stubborn = still_alive(set(farewells))
    for process in stubborn:
        with suppress(psutil.Error):
            process.kill()
    still_alive(stubborn)


def main(parent: int, folder: str, programs: set[str]) -> None:
    for harmless in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(harmless, signal.SIG_IGN)
    farewells: dict[psutil.Process, int] = {}
    for message in listen(parent):
        farewells = {process: signum for process, signum in farewells.items() if process.is_running()}
        if process := identify(message):
            farewells[process] = int(message["farewell"])
    end(farewells)
    end(dict.fromkeys(working_in(folder, programs), signal.SIGKILL))
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], set(sys.argv[3:]))
