"""One connection to etcd for an event loop, which all its tasks share."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import cast

from fencelock.authority.etcd.channel import ChannelError
from fencelock.authority.etcd.members import Members
from fencelock.authority.etcd.messages import Answer, Call, watch_is_over
from fencelock.authority.hosts import shown
from fencelock.authority.loops import LoopWakeup


class LoopLink(asyncio.Protocol):
    """A connection to one member."""

    def __init__(self, members: Members, address: tuple[str, int]) -> None:
        self.address: tuple[str, int] = address
        self._members = members
        self._channel = members.new_channel(self.address)
        self._transport: asyncio.Transport | None = None
        self._flushes = False
        self.lost: str = ""  # why the connection is lost; empty if it is not

    @classmethod
    async def open(cls, members: Members, address: tuple[str, int], seconds: float) -> LoopLink:
        """Return a new connection; raise OSError if this fails, AuthorityError if the login is refused."""
        link = cls(members, address)
        host, port = link.address
        async with asyncio.timeout(seconds):
            try:
                await asyncio.get_running_loop().create_connection(lambda: link, host, port, ssl=members.tls)
                if (login := members.login) is not None:
                    (answer,) = await link.exchange([login], seconds)
                    members.log_in(link._channel, answer)
            except BaseException:
                link.lose("it could not be opened")
                raise
        return link

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._flush()

    def data_received(self, data: bytes) -> None:
        try:
            self._channel.receive(data)
        except ChannelError as error:
            self.lose(str(error))
        else:
            self._flush()

    def connection_lost(self, exc: Exception | None) -> None:
        self.lose(str(exc or "the server has closed the connection"))

    @property
    def is_crowded(self) -> bool:
        return self._channel.is_crowded

    def lose(self, reason: str) -> None:
        """Close the connection; all calls are over."""
        self.lost = self.lost or reason or "the connection is lost"
        if self._transport is not None:
            self._transport.abort()
        self._channel.lose(self.lost)

    def _flush(self) -> None:
        self._flushes = False
        data = self._channel.data_to_send()
        if data and self._transport is not None and not self.lost:
            self._transport.write(data)

    def flush_soon(self) -> None:
        """Send the requests of all calls in this turn of the loop, in one write."""
        if not self._flushes:
            asyncio.get_running_loop().call_soon(self._flush)
            self._flushes = True  # last, because `cancel` may find no running loop

    def start(self, call: Call) -> Answer:
        if self.lost:
            raise ChannelError(self.lost)
        answer = self._channel.start(call)
        self.flush_soon()
        return answer

    async def exchange(self, calls: Sequence[Call], seconds: float) -> list[Answer]:
        """Return the answers to calls; raise OSError if the connection is lost, or nothing came in time."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()
        answers = [self.start(call) for call in calls]

        def notify() -> None:
            if all(answer.is_over for answer in answers) and not done.done():
                done.set_result(None)

        def give_up() -> None:
            if not done.done():
                done.set_exception(TimeoutError(f"{shown(self.address)} did not answer in time"))

        for answer in answers:
            answer.notify = notify
        timer = loop.call_later(seconds, give_up)
        try:
            await done
        except BaseException:
            for answer in answers:
                self.cancel(answer)
            raise
        finally:
            timer.cancel()
        if self.lost and any(not answer.messages for answer in answers):
            raise ChannelError(self.lost)
        return answers

    def cancel(self, answer: Answer) -> None:
        if not self.lost and not answer.is_over:
            self._channel.cancel(answer)
            with contextlib.suppress(RuntimeError):  # no loop runs in this thread, so it is not sent
                self.flush_soon()


class LoopWatch:
    """The wakeup with which a task waits until a key is gone; the step `Wait` sleeps on it."""

    def __init__(self, link: LoopLink, call: Call) -> None:
        self._link = link
        self._wakeup = LoopWakeup()
        self._answer = link.start(call)
        self._answer.notify = self._wakeup.wake

    @property
    def over(self) -> bool:
        return bool(self._link.lost) or watch_is_over(self._answer)

    async def sleep(self, seconds: float) -> None:
        if not self.over:
            await self._wakeup.sleep(seconds)

    def close(self) -> None:
        self._link.cancel(self._answer)
