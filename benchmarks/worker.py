"""A process that takes locks at orders, and its handle: each contender of `benchmarks.locks` has its own.

So none is slowed down by what others have loaded, and peers that need another redis-py, or none, take part on
equal terms. An order and an answer are a line of JSON each. The answer tells of every turn when the lock was
asked for, acquired and released, on the clock of `time.monotonic`, which all processes of a machine share;
what that means is found out elsewhere. This file imports only the standard library, for it also runs in the
homes of peers; `node_redlock.js` understands the same orders.
"""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import os
import selectors
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks import contenders, on_consensus, on_databases
from benchmarks.contenders import AsyncLock, BlockingLock, Contender, Setting

ROOT = Path(__file__).parent.parent

Turn = tuple[float, float, float]


class WorkerError(Exception):
    """A worker does not answer, or has come to an end."""


@dataclass(frozen=True, slots=True)
class Play:
    """What came of one order.

    Attributes:
        turns: when the lock was asked for, acquired and released, each time.
        began: when the first turn could begin.
        ended: when the last one had ended.
        cpu: seconds that the processor worked for this process meanwhile: what other processes do at the same
            time hardly changes it.
        failures: how many turns ended in an error.
        error: the first of them.
    """

    turns: Sequence[Turn]
    began: float
    ended: float
    cpu: float
    failures: int
    error: str | None

    @property
    def rate(self) -> float:
        """How many turns there were a second."""
        return len(self.turns) / (self.ended - self.began)

    @property
    def cost(self) -> float:
        """Seconds of the processor for each turn."""
        return self.cpu / max(1, len(self.turns))


class Worker:
    """The handle of a process that works for one contender.

    Args:
        contender: whose lock it takes.
        setting: what it has to cope with.
        program: what runs it: a Python, or node.
    """

    def __init__(self, contender: Contender, setting: Setting, program: Sequence[str]) -> None:
        self.contender = contender
        self._buffer = b""
        self._prepared: set[str] = set()
        self._complaints = tempfile.TemporaryFile()  # noqa: SIM115 - `close` closes it
        self._process = subprocess.Popen(
            [*program, contender.key, json.dumps(asdict(setting))],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._complaints,
        )

    @property
    def is_closed(self) -> bool:
        """Whether its end has been noticed."""
        return self._process.returncode is not None

    def close(self) -> None:
        """End the process, at once if it does not end by itself."""
        if self._process.stdin is not None:
            with suppress(OSError):
                self._process.stdin.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._complaints.close()

    def play(self, resources: Sequence[str], seconds: float, patience: float = 60.0) -> Play:
        """Take each of the resources over and over, all at the same time, for so long.

        Raises:
            WorkerError: it has not answered so much later, or has come to an end.
        """
        self.prepare(resources, patience)
        now = time.monotonic()
        self.order(resources, now, now + seconds)
        return self.answer(seconds + patience)

    def prepare(self, resources: Sequence[str], patience: float = 60.0) -> None:
        """Wait until it has started and has made the locks of these resources.

        Raises:
            WorkerError: it does not, or not in time.
        """
        if not self._prepared.issuperset(resources):
            self.order(resources, 0.0, 0.0)
            self.answer(patience)
            self._prepared.update(resources)

    def order(self, resources: Sequence[str], since: float, until: float) -> None:
        """Tell it what to do from a moment to another, and do not wait."""
        line = json.dumps({"resources": list(resources), "since": since, "until": until})
        try:
            self._process.stdin.write(line.encode() + b"\n")  # type: ignore[union-attr] # it is a pipe
            self._process.stdin.flush()  # type: ignore[union-attr]
        except OSError as error:
            raise WorkerError(self._last_words()) from error

    def answer(self, timeout: float) -> Play:
        """Wait for its answer.

        Raises:
            WorkerError: there is none in time, or the process has come to an end.
        """
        descriptor = self._process.stdout.fileno()  # type: ignore[union-attr] # it is a pipe
        deadline = time.monotonic() + timeout
        with selectors.DefaultSelector() as selector:
            selector.register(descriptor, selectors.EVENT_READ)
            while b"\n" not in self._buffer:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise WorkerError(f"{self.contender.name} does not answer")
                if not (chunk := os.read(descriptor, 1 << 20)):
                    raise WorkerError(self._last_words())
                self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        facts = json.loads(line)
        facts["turns"] = [tuple(turn) for turn in facts["turns"]]
        return Play(**facts)

    def _last_words(self) -> str:
        self._complaints.seek(0)
        said = self._complaints.read().decode(errors="replace").strip().splitlines() or ["without a word"]
        return f"{self.contender.name} has come to an end: {said[-1]}"


@dataclass(slots=True)
class _Score:
    """What the threads or tasks of this process have done."""

    turns: list[Turn]
    failures: int = 0
    error: str | None = None

    def fail(self, error: Exception) -> None:
        self.failures += 1
        self.error = self.error or f"{type(error).__name__}: {error}"[:300]


def _take_turns(lock: BlockingLock, until: float, score: _Score) -> None:
    note, clock = score.turns.append, time.monotonic
    asked = clock()
    while asked < until:
        try:
            with lock:
                acquired = clock()
            note((asked, acquired, clock()))
        except Exception as error:  # noqa: BLE001 - what peers raise is theirs
            score.fail(error)
        asked = clock()


async def _take_turns_async(lock: AsyncLock, until: float, score: _Score) -> None:
    note, clock = score.turns.append, time.monotonic
    asked = clock()
    while asked < until:
        try:
            async with lock:
                acquired = clock()
            note((asked, acquired, clock()))
        except Exception as error:  # noqa: BLE001 - what peers raise is theirs
            score.fail(error)
            await asyncio.sleep(0)
        asked = clock()


def _block(locks: Sequence[BlockingLock], until: float, score: _Score) -> None:
    if len(locks) == 1:
        _take_turns(locks[0], until, score)
        return
    threads = [threading.Thread(target=_take_turns, args=(lock, until, score)) for lock in locks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


async def _wait(locks: Sequence[AsyncLock], until: float, score: _Score) -> None:
    await asyncio.gather(*(_take_turns_async(lock, until, score) for lock in locks))


def main() -> None:
    """Take locks at orders, until there are none any more."""
    # What peers print is none of the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    logging.disable(logging.CRITICAL)
    contender = _find(sys.argv[1])
    setting = Setting(**json.loads(sys.argv[2]))
    if contender.make is None:
        raise SystemExit(f"{contender.name} is not written in Python")
    with asyncio.Runner() as runner:
        make_lock = functools.cache(runner.run(_prepare(contender.make, setting)))
        for line in sys.stdin:
            order = json.loads(line)
            locks = runner.run(_prepare(_make_each, make_lock, order["resources"]))
            score = _Score([])
            time.sleep(max(0.0, order["since"] - time.monotonic()))
            cpu_before, began = time.process_time(), time.monotonic()
            if contender.style == "asyncio":
                runner.run(_wait(locks, order["until"], score))
            else:
                _block(locks, order["until"], score)
            facts = {**asdict(score), "began": began, "ended": time.monotonic()}
            answers.write(json.dumps({**facts, "cpu": time.process_time() - cpu_before}) + "\n")
            answers.flush()
        os._exit(0)  # whatever peers leave behind


def _find(key: str) -> Contender:
    everybody = (*contenders.ALL, *on_databases.ALL, *on_consensus.ALL)
    return next(one for one in everybody if one.key == key)


async def _prepare(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function where a loop runs, which some peers need to make anything."""
    return function(*arguments)


def _make_each(make_lock: Callable[[str], Any], resources: Sequence[str]) -> list[Any]:
    return [make_lock(resource) for resource in resources]


if __name__ == "__main__":
    main()
