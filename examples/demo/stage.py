"""Starts the worker processes, directs them step by step, and stops one dead where the story wants it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of one step of a worker.

    Attributes:
        at: when it was done, on the clock of `time.monotonic`, which all processes share.
        value: what the step returned.
        stale: the refused token and the row's fence, where the database refused the write.
        error: what else went wrong.
    """

    at: float
    value: Any = None
    stale: tuple[int, int] | None = None
    error: str = ""


class Actor:
    """A worker process.

    Args:
        name: how the timeline calls it.
        database: SQLAlchemy URL.
        tell: called with (name, when, what) for every step that is worth a line.
    """

    def __init__(self, name: str, database: str, tell: Callable[[str, float, str], None]) -> None:
        self.name = name
        self._tell = tell
        self._process = subprocess.Popen(  # noqa: S603 - this very program
            [sys.executable, "-m", "demo.worker", database],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is the director's to handle
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._process.send_signal(signal.SIGCONT)
        self._process.kill()
        self._process.communicate()

    def order(self, step: str, *arguments: object) -> None:
        """Tell the worker to take a step; `outcome` waits for it."""
        assert self._process.stdin is not None  # noqa: S101 - it is a pipe
        self._process.stdin.write(json.dumps({"step": step, "arguments": arguments}) + "\n")
        self._process.stdin.flush()

    def outcome(self, what: str = "") -> Outcome:
        """Wait for the step that was ordered. `what` tells it; `{value}` stands for what it returned.

        Raises:
            RuntimeError: the worker process has ended.
        """
        assert self._process.stdout is not None  # noqa: S101 - it is a pipe
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"worker {self.name} ended with status {self._process.wait()}")
        facts = json.loads(line)
        stale = facts.get("stale")
        error = f"{facts['error']}: {facts['message']}" if "error" in facts else ""
        outcome = Outcome(facts["at"], facts.get("value"), tuple(stale) if stale else None, error)
        if stale:
            what = f"{what}: [bold green]refused[/] by the database: token {stale[0]} is below {stale[1]}"
        elif error:
            what = f"[bold red]{error}[/]"
        if what:
            self._tell(self.name, outcome.at, what.format(value=outcome.value))
        return outcome

    def do(self, step: str, *arguments: object, what: str = "") -> Outcome:
        """Tell the worker to take a step, and wait for it."""
        self.order(step, *arguments)
        return self.outcome(what)

    def freeze(self, what: str) -> None:
        """Stop the process dead, as a long garbage collection or a suspended machine would."""
        self._process.send_signal(signal.SIGSTOP)
        self._tell(self.name, time.monotonic(), what)

    def wake(self, what: str) -> None:
        """Let the process run on. It has no means of knowing that time has passed."""
        self._tell(self.name, time.monotonic(), what)
        self._process.send_signal(signal.SIGCONT)
