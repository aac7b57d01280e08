"""Hears PostgreSQL's calls for a waiting world (see `queues`), on a connection that executes LISTEN.

PgBouncer in transaction mode passes no calls on, so a world calls itself at times to check that it hears.
"""

from __future__ import annotations

import asyncio
import selectors
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import util as sa_util

from fencelock._generators import Steps
from fencelock.authority.base import logger
from fencelock.authority.database.queues import NAME_LENGTH, WORLD_LENGTH, Queues

if TYPE_CHECKING:
    from sqlalchemy.pool import PoolProxiedConnection

    from fencelock.authority.database.connections import Connections

_IDLE: Final = 60.0  # seconds without a waiting caller, after which the connection is closed
_PROOF: Final = 2.0  # seconds in which a world's own call has to arrive
_AGAIN: Final = 20.0  # seconds until a world calls itself again
_LOOK: Final = 1.0  # the most seconds between two checks whether listening is over


class Ear:
    """A step (see `_generators`): hear a world's calls until it is idle, closed, or hears none."""

    def __init__(
        self,
        queues: Queues,
        calling: Callable[[str], Steps[Any]],
        passing_on: Callable[[str, str], Steps[Any]],
    ) -> None:
        self._queues = queues
        self._calling = calling  # makes the steps that call this world, over another connection
        #: Makes the steps that release a resource that is kept for this world, if no caller waits.
        self._passing_on = passing_on
        #: When this world called itself last, and whether it has heard that call.
        self._called_at = time.monotonic()
        self._heard = False
        self._wakeup: Any = queues.new_wakeup()
        self._channel = f"fencelock_{queues.name[:WORLD_LENGTH]}"
        self._hang_up: Callable[[], object] = lambda: None
        self._is_over = False
        self._thread: threading.Thread | None = None

    def close(self) -> None:
        """End the listening; wait briefly for its thread, which could otherwise open connections again."""
        self._is_over = True
        self._wakeup.wake()
        self._hang_up()
        if self._thread not in (None, threading.current_thread()):
            self._thread.join(_LOOK)

    def hear(self, connections: Connections, run: Callable[[Steps[Any]], object]) -> None:
        """Hear calls in this thread, with a driver that uses libpq."""
        self._thread = threading.current_thread()
        lent: PoolProxiedConnection | None = None
        try:
            if self._is_over:
                return
            lent, driver = connections.detached(self._listen)
            self._hang_up = lambda: connections.hang_up(driver)
            if not self._is_over:
                run(self._calling(self._channel))
            with selectors.DefaultSelector() as selector:
                selector.register(driver.fileno(), selectors.EVENT_READ)
                while self._goes_on(run):
                    if selector.select(_LOOK):
                        self._take(driver, run)
        except Exception as error:  # noqa: BLE001 - whatever a driver says of a lost connection
            self._note_loss(error)
        finally:
            self._hang_up = lambda: None
            self._queues.go_deaf()
            if lent is not None:
                lent.close()

    async def hear_in_loop(self, connections: Connections, run: Callable[[Steps[Any]], object]) -> None:
        try:
            _lent, driver = await sa_util.greenlet_spawn(connections.detached, self._listen)
        except Exception as error:  # noqa: BLE001 - whatever a driver says of a server that is away
            logger.info(
                "cannot listen for released locks (NOTIFY), so waiting callers ask again and again: %s", error
            )
            return
        loop = asyncio.get_running_loop()
        libpq = None if hasattr(driver, "add_listener") else driver.fileno()

        def take() -> None:
            try:
                self._take(driver, run)
            except Exception as error:  # noqa: BLE001 - whatever a driver says of a lost connection
                self._note_loss(error)
                self.close()

        try:
            if libpq is None:
                await driver.add_listener(self._channel, lambda *call: self._hear(call[-1], run))
                driver.add_termination_listener(lambda _: self.close())
            else:
                loop.add_reader(libpq, take)
            run(self._calling(self._channel))
            while self._goes_on(run):
                await self._wakeup.sleep(_LOOK)
        finally:
            self._queues.go_deaf()
            if libpq is not None:
                loop.remove_reader(libpq)
                await driver.close()
            else:
                driver.terminate()

    def _note_loss(self, error: Exception) -> None:
        if not self._is_over:
            logger.info(
                "listening for released locks (NOTIFY) has ended, so waiting callers ask again and again: %s",
                error,
            )

    def _listen(self, cursor: Any) -> None:
        cursor.execute(f'LISTEN "{self._channel}"')

    def _goes_on(self, run: Callable[[Steps[Any]], object]) -> bool:
        now = time.monotonic()
        if not self._heard and now > self._called_at + _PROOF:
            logger.info("no NOTIFY arrives, as behind PgBouncer, so waiting callers ask again and again")
            return False
        if self._is_over or self._queues.is_idle(_IDLE):
            return False
        if self._heard and now > self._called_at + _AGAIN:
            self._called_at, self._heard = now, False
            run(self._calling(self._channel))
        return True

    def _take(self, driver: Any, run: Callable[[Steps[Any]], object]) -> None:
        """Handle the calls that a driver of libpq has received."""
        if hasattr(driver, "pgconn"):
            driver.pgconn.consume_input()
            letters = "utf-8" if driver.info.encoding == "ascii" else driver.info.encoding
            while (call := driver.pgconn.notifies()) is not None:
                self._hear(call.extra.decode(letters), run)
        else:
            driver.poll()
            while driver.notifies:
                self._hear(driver.notifies.pop(0).payload, run)

    def _hear(self, call: str, run: Callable[[Steps[Any]], object]) -> None:
        name, resource = call[:NAME_LENGTH], call[NAME_LENGTH:]
        if not call:
            self._heard = self._queues.hears = True
        elif not self._queues.call(name, resource):
            run(self._passing_on(name, resource))
