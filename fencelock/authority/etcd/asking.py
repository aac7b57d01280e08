"""Asks one member of a cluster at a time, and the next one after a failure."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from fencelock.authority.etcd import messages
from fencelock.authority.etcd.aio import LoopLink, LoopWatch
from fencelock.authority.etcd.blocking import Link, Watch
from fencelock.authority.etcd.members import Members
from fencelock.authority.etcd.messages import Answer, Call
from fencelock.authority.hosts import shown
from fencelock.authority.line.entries import Exchange
from fencelock.authority.line.line import ANSWER, LineAuthority
from fencelock.authority.loops import LoopEnd
from fencelock.errors import AuthorityError

#: Codes of gRPC (4 is DEADLINE_EXCEEDED), and texts of errors, of a member that cannot work now.
_AWAY: Final = frozenset({4, messages.UNAVAILABLE})
_AWAY_WORDS: Final = ("not a primary lessor", "leader changed", "too many requests", "lost leader")
#: Texts of errors about a login that is too old.
_LOGIN_WORDS: Final = ("invalid auth token", "revision in header is old")


class Watching(NamedTuple):
    """A step (see `_generators.py`): watch until `ended(answer)`.

    Its result is a wakeup, or None if there are too many watches.
    """

    call: Call
    ended: Callable[[Answer], bool]


class LoopState:
    """The connection of an event loop."""

    def __init__(self) -> None:
        self.link: LoopLink | None = None
        self.opening: asyncio.Lock = asyncio.Lock()

    async def close(self) -> None:
        link, self.link = self.link, None
        if link is not None:
            link.lose("it was closed")


class Asking(LineAuthority):
    """An authority whose steps are calls of etcd."""

    def __init__(self, url: str) -> None:
        self._members = Members(url)
        self._shown = str(self._members.hosts)
        super().__init__()

    def _start_over(self) -> None:
        super()._start_over()
        self._link: Link | None = None
        self._opening = threading.RLock()  # reentrant, because a signal handler may interrupt its owner

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
        return _why_to_log_in(answer)

    def checked(self, answer: Answer) -> bytes:
        """Return the first message of an answer; raise AuthorityError if etcd has refused the call."""
        if answer.status != messages.OK or not answer.messages:
            raise AuthorityError(f"{self._shown} refuses: {answer.detail or f'status {answer.status}'}")
        return answer.messages[0]

    def work(self, step: Exchange | Watching) -> Any:
        link = self._opened(step.seconds if isinstance(step, Exchange) else ANSWER[1])
        if isinstance(step, Watching):
            return None if link.is_crowded else Watch(link, step.call, step.ended)
        try:
            answers = link.exchange(step.requests, time.monotonic() + step.seconds)
        except RuntimeError:  # raised for a signal handler's own call; the connection can still be used
            raise
        except BaseException as error:
            self._drop(link, str(error))
            raise
        if (reason := next(filter(None, map(_why_to_leave, answers)), "")) != "":
            self._drop(link, reason)
        return answers

    def _drop(self, link: Link | LoopLink, reason: str) -> None:
        link.lose(reason)
        self._members.leave(link.address, reason)

    def _opened(self, seconds: float) -> Link:
        if (link := self._link) is not None and not link.lost:
            return link
        with self._opening:
            if (link := self._link) is None or link.lost:
                address = self._members.address
                try:
                    link = self._link = Link(self._members, seconds)
                except OSError as error:
                    self._members.leave(address, str(error))
                    raise
            return link

    async def work_soon(self, step: Exchange | Watching) -> Any:
        state: LoopState = self.loop_end().kept
        link = await self._opened_soon(state, step.seconds if isinstance(step, Exchange) else ANSWER[1])
        if isinstance(step, Watching):
            return None if link.is_crowded else LoopWatch(link, step.call, step.ended)
        try:
            answers = await link.exchange(step.requests, step.seconds)
        except OSError as error:
            self._drop(link, str(error))
            raise
        if (reason := next(filter(None, map(_why_to_leave, answers)), "")) != "":
            self._drop(link, reason)
        return answers

    async def _opened_soon(self, state: LoopState, seconds: float) -> LoopLink:
        if (link := state.link) is not None and not link.lost:
            return link
        async with state.opening:
            if (link := state.link) is None or link.lost:
                address = self._members.address
                try:
                    link = state.link = await LoopLink.open(self._members, seconds)
                except OSError as error:
                    self._members.leave(address, str(error))
                    raise
            return link

    def open_in_loop(self) -> LoopEnd:
        state = LoopState()
        return LoopEnd(kept=state, close=state.close)


def _why_to_log_in(answer: Answer) -> str:
    return answer.detail if any(word in answer.detail for word in _LOGIN_WORDS) else ""


def _why_to_leave(answer: Answer) -> str:
    """Return why to drop the connection, for another member or a new login; an empty text to keep it."""
    if answer.status == messages.OK:
        return ""
    if answer.status == messages.UNAVAILABLE:
        return answer.detail or "unavailable"
    return _why_to_log_in(answer)
