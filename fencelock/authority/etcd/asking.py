"""Asks one member of a cluster at a time, and the next one after a failure."""

from __future__ import annotations

import asyncio
import functools
import threading
import time
from typing import Any, Final, NamedTuple

from fencelock import _threads
from fencelock.authority.etcd import messages
from fencelock.authority.etcd.aio import LoopLink, LoopWatch
from fencelock.authority.etcd.blocking import Link, Watch
from fencelock.authority.etcd.members import Members
from fencelock.authority.etcd.messages import Answer, Call
from fencelock.authority.hosts import shown
from fencelock.authority.line.entries import Exchange
from fencelock.authority.line.line import ANSWER, LineAuthority
from fencelock.authority.loops import LoopEnd, ThreadWakeup
from fencelock.errors import AuthorityError

#: Codes of gRPC (4 is DEADLINE_EXCEEDED), and texts of errors, of a member that cannot work now.
_AWAY: Final = frozenset({4, messages.UNAVAILABLE})
_AWAY_WORDS: Final = ("not a primary lessor", "leader changed", "too many requests", "lost leader")
#: Texts of errors about a login that is too old, or from before authentication was enabled.
_LOGIN_WORDS: Final = ("invalid auth token", "revision in header is old", "user name is empty")


class Watching(NamedTuple):
    """A step (see `_generators.py`): watch a key until it is gone.

    Its result is a wakeup, or None if there are too many watches.
    """

    call: Call


class LoopState:
    """The connection of an event loop, and the task that opens it for all tasks."""

    def __init__(self) -> None:
        self.link: LoopLink | None = None
        self.opening: asyncio.Task[LoopLink] | None = None

    async def close(self) -> None:
        link, self.link = self.link, None
        if link is not None:
            link.lose("it was closed")


class _Opening:
    """A connection that threads open for all callers, one to each member; the first that is open is used."""

    def __init__(self, members: int) -> None:
        self.left: int = members  # how many may still be opened
        self.link: Link | None = None
        #: The last error; the callers get it if the login is refused, or no member is left.
        self.error: Exception | None = None
        self.mutex: threading.Lock = threading.Lock()
        self._waiting: list[ThreadWakeup] = []

    @property
    def over(self) -> bool:
        return self.link is not None or self.left <= 0

    def wake_all(self) -> None:
        for each in self._waiting if self.over else ():
            each.wake()

    def wait(self, until: float) -> Link:
        wakeup = ThreadWakeup()
        self._waiting.append(wakeup)
        while not self.over:
            if (left := until - time.monotonic()) <= 0:
                raise TimeoutError("no connection could be opened in time")
            wakeup.sleep(left)
        if self.link is None and isinstance(self.error, OSError):
            raise ConnectionError(str(self.error)) from self.error
        if self.link is None:
            raise self.error or AssertionError
        return self.link


class Asking(LineAuthority):
    """An authority whose steps are calls of etcd."""

    def __init__(self, url: str) -> None:
        self._members = Members(url)
        self._shown = str(self._members.hosts)
        super().__init__()

    def _start_over(self) -> None:
        super()._start_over()
        self._link: Link | None = None
        self._opening: _Opening | None = None

    def close(self) -> None:
        """Close the connections. Held leases end with their ttl; the next use connects again."""
        super().close()
        link, self._link = self._link, None
        if link is not None:
            link.lose("it was closed")

    @property
    def _asked(self) -> str:
        return shown(self._members.address)

    def _why_again(self, answer: Answer) -> str:
        if answer.status == messages.OK:
            return ""
        if answer.status in _AWAY or any(word in answer.detail for word in _AWAY_WORDS):
            return answer.detail or "unavailable"
        return self._why_to_log_in(answer)

    def _why_to_log_in(self, answer: Answer) -> str:
        """Return why another login is needed; an empty text if none is."""
        words = _LOGIN_WORDS if self._members.hosts.user else ()
        return answer.detail if any(word in answer.detail for word in words) else ""

    def _why_to_leave(self, answer: Answer) -> str:
        """Return why to drop the connection, for another member or a new login; an empty text to keep it."""
        if answer.status in {messages.OK, messages.UNAVAILABLE}:
            return self._why_again(answer)
        return self._why_to_log_in(answer)

    def checked(self, answer: Answer) -> bytes:
        """Return the first message of an answer; raise AuthorityError if etcd has refused the call."""
        if answer.status != messages.OK or not answer.messages:
            raise AuthorityError(f"{self._shown} refuses: {answer.detail or f'status {answer.status}'}")
        return answer.messages[0]

    def work(self, step: Exchange | Watching) -> Any:
        until = time.monotonic() + (step.seconds if isinstance(step, Exchange) else ANSWER[1])
        link = self._opened(until)
        if isinstance(step, Watching):
            return None if link.is_crowded else Watch(link, step.call)
        try:
            answers = link.exchange(step.requests, until)
        except RuntimeError:  # raised for a signal handler's own call; the connection can still be used
            raise
        except BaseException as error:
            self._drop(link, str(error))
            raise
        if (reason := next(filter(None, map(self._why_to_leave, answers)), "")) != "":
            self._drop(link, reason)
        return answers

    def _drop(self, link: Link | LoopLink, reason: str) -> None:
        link.lose(reason)
        self._members.leave(link.address, reason)

    def _opened(self, until: float) -> Link:
        if (link := self._link) is not None and not link.lost:
            return link
        # No mutex: a signal handler may interrupt this. Of two that begin at the same time, one is used.
        if (opening := self._opening) is None or opening.over:
            places = self._members.to_try()
            opening = self._opening = _Opening(len(places))
            try:
                for place in places:
                    run = functools.partial(self._open, opening, *place)
                    _threads.start(threading.Thread(target=run, name="fencelock-etcd", daemon=True))
            except BaseException:  # no thread can be started, or a signal handler has raised
                opening.error, opening.left = ConnectionError("no connection could be begun"), 0
                opening.wake_all()
                raise
        return opening.wait(until)

    def _open(self, opening: _Opening, after: float, address: tuple[str, int]) -> None:
        time.sleep(after)
        link: Link | None = None
        try:
            if not opening.over:
                link = Link(self._members, address, time.monotonic() + ANSWER[0])
        except Exception as error:  # noqa: BLE001 - the callers get it
            if isinstance(error, OSError):
                self._members.leave(address, str(error))
            with opening.mutex:
                opening.error = error
                opening.left = opening.left - 1 if isinstance(error, OSError) else 0
        with opening.mutex:
            if link is not None and opening.link is None:
                self._members.prefer(address)
                self._link = opening.link = link
            elif link is not None:
                link.lose("another member was faster")
        opening.wake_all()

    async def work_soon(self, step: Exchange | Watching) -> Any:
        state: LoopState = self.loop_end().kept
        until = time.monotonic() + (step.seconds if isinstance(step, Exchange) else ANSWER[1])
        link = await self._opened_soon(state, until)
        if isinstance(step, Watching):
            return None if link.is_crowded else LoopWatch(link, step.call)
        try:
            answers = await link.exchange(step.requests, max(0.0, until - time.monotonic()))
        except OSError as error:
            self._drop(link, str(error))
            raise
        if (reason := next(filter(None, map(self._why_to_leave, answers)), "")) != "":
            self._drop(link, reason)
        return answers

    async def _opened_soon(self, state: LoopState, until: float) -> LoopLink:
        if (link := state.link) is not None and not link.lost:
            return link
        if (opening := state.opening) is None or opening.done():
            end = self.loop_end()
            opening = state.opening = end.begin(self._open_soon(state))
            end.later.add(opening)
        await asyncio.wait([opening], timeout=max(0.0, until - time.monotonic()))
        if not opening.done():
            raise TimeoutError("no connection could be opened in time")
        return opening.result()

    async def _open_soon(self, state: LoopState) -> LoopLink:
        async def open_one(after: float, address: tuple[str, int]) -> LoopLink:
            await asyncio.sleep(after)
            try:
                return await LoopLink.open(self._members, address, ANSWER[0])
            except OSError as error:
                self._members.leave(address, str(error))
                raise

        tasks = [asyncio.ensure_future(open_one(*place)) for place in self._members.to_try()]
        error: BaseException = AssertionError()
        try:
            for done in asyncio.as_completed(tasks):
                try:
                    state.link = await done
                except OSError as caught:
                    error = caught
                else:
                    self._members.prefer(state.link.address)
                    return state.link
            raise error
        finally:
            for task in tasks:
                task.cancel()
            for each in await asyncio.gather(*tasks, return_exceptions=True):
                if isinstance(each, LoopLink) and each is not state.link:
                    each.lose("another member was faster")

    def open_in_loop(self) -> LoopEnd:
        state = LoopState()
        return LoopEnd(kept=state, close=state.close)
