"""The worker processes, from their start to their end; some are killed on the way, and replaced."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path

from proof.torture.journal import Life
from proof.torture.settings import Settings
from proof.torture.worker import Assignment, Board, Places, work

_PATIENCE = 60.0
#: One worker in so many sees the nodes through the proxies, the last of each such group.
_PROXIED = 3


class Crew:
    def __init__(self, settings: Settings, places: Places) -> None:
        # Not fork: threads of this process may hold locks. Not spawn: each worker would import everything
        # again.
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([work.__module__])
        self._settings = settings
        self._places = places
        self._board = Board(
            self._context.Array("Q", settings.workers, lock=False),
            self._context.Array("q", settings.workers, lock=False),
            self._context.Array("b", 1, lock=False),
        )
        self._lock = threading.Lock()
        self._workers: dict[int, BaseProcess] = {}
        self._lives: list[list[Life]] = [[] for _ in range(settings.workers)]
        self.broken: list[str] = []
        for number in range(settings.workers):
            self._start(number)

    def __len__(self) -> int:
        return self._settings.workers

    @property
    def acquired(self) -> int:
        return sum(self._board.acquired)

    @property
    def thinking(self) -> list[int]:
        """Return which workers have a holder that has read and not yet written, as far as can be told."""
        return [number for number, holders in enumerate(self._board.thinking) if holders > 0]

    def pid(self, number: int) -> int:
        pid = self._workers[number].pid
        assert pid is not None
        return pid

    @property
    def pids(self) -> list[int]:
        return [worker.pid for worker in list(self._workers.values()) if worker.pid is not None]

    def replace(self, number: int) -> None:
        with self._lock:
            worker = self._workers.pop(number)
            worker.kill()
            worker.join()
            self._note_end(number)
            self._start(number)

    def check(self) -> bool:
        with self._lock:
            for number, worker in self._workers.items():
                if worker.exitcode is not None:
                    self.broken.append(self._obituary(number, f"ended with status {worker.exitcode}"))
        return not self.broken

    def stop(self) -> None:
        self._board.over[0] = 1
        deadline = time.monotonic() + _PATIENCE
        for number, worker in self._workers.items():
            worker.join(max(0.0, deadline - time.monotonic()))
            if worker.exitcode is None:
                self.broken.append(self._obituary(number, "hung and had to be killed"))
                worker.kill()
                worker.join()
            self._note_end(number)
        self._workers.clear()

    def lives(self) -> Iterator[Life]:
        for lives in self._lives:
            yield from lives

    def _start(self, number: int) -> None:
        proxied = bool(self._places.proxies) and number % _PROXIED == min(_PROXIED, len(self)) - 1
        life = len(self._lives[number])
        assignment = Assignment(
            number=number,
            life=life,
            settings=self._settings,
            places=self._places,
            proxied=proxied,
            journal=self._journal(number, life),
            log=self._log(number),
            tasks=0 if number in self._settings.blocking_workers else self._settings.tasks,
        )
        worker = self._context.Process(target=work, args=(assignment, self._board), daemon=True)
        worker.start()
        self._workers[number] = worker

    def _note_end(self, number: int) -> None:
        lives = self._lives[number]
        journal = self._journal(number, len(lives))
        journal.touch()  # one that was killed at once has not even begun it
        lives.append(Life(number, journal, time.monotonic_ns()))

    def _journal(self, number: int, life: int) -> Path:
        return self._places.folder / f"worker{number}-{life}.jsonl"

    def _log(self, number: int) -> Path:
        return self._places.folder / f"worker{number}.log"

    def _obituary(self, number: int, what: str) -> str:
        last = ""
        if self._log(number).exists():
            last = os.linesep.join(self._log(number).read_text(errors="replace").splitlines()[-3:])
        return f"worker {number} {what}: {last}" if last else f"worker {number} {what}"
