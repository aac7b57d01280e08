"""Releases that a silent server missed: they are sent again until each is done, or its lease has ended."""

from __future__ import annotations

import abc
import logging
import math
import time
from typing import NamedTuple

from fencelock._generators import Steps
from fencelock.authority.base import named
from fencelock.authority.loops import Later, Wait, WithLoops, pauses
from fencelock.errors import AuthorityError, QuorumError

logger = logging.getLogger("fencelock.authority")


class Owed(NamedTuple):
    """A release that is still to be sent."""

    resources: tuple[str, ...]
    #: When the lease ends by itself, on the clock of `time.monotonic`.
    until: float
    #: The acquisition may still be on its way to the server, so a release that finds nothing came too early.
    in_doubt: bool


class Owing(WithLoops):
    """An authority that owes releases, each by its nonce."""

    #: A request that was sent before may still be executed after a later one.
    _comes_late = True

    def _start_over(self) -> None:
        super()._start_over()
        self._owed: dict[str, Owed] = {}
        self._settles = False

    @abc.abstractmethod
    def _giving_back(
        self, resources: tuple[str, ...], nonce: str, ends: float = math.inf
    ) -> Steps[bool | None]:
        """Release, as `release_gen` does; wait only briefly if the lease has ended already."""

    def _owe(self, nonce: str, owed: Owed) -> Steps[None]:
        """Release in the background, while the caller goes on."""
        self._owed[nonce] = owed
        if not self._settles:
            self._settles = True
            try:
                yield Later(self._settling)
            except RuntimeError:  # no thread can be started, as when the interpreter ends
                self._settles = False

    def _abandoning(self, resources: tuple[str, ...], nonces: list[str], until: float) -> Steps[None]:
        """Release what an interrupted operation may have left; later, if the server is silent now."""
        for nonce in nonces:
            try:
                yield from self._giving_back(resources, nonce)
            except QuorumError:
                yield from self._owe(nonce, Owed(resources, until, in_doubt=self._comes_late))

    def _settling(self) -> Steps[None]:
        """Send the releases that are owed, until each is done or its lease has ended."""
        looks = pauses(0.1, 1.0)
        try:
            while self._owed:
                yield Wait(time.monotonic() + next(looks), "")
                yield from self._settling_once()
        finally:  # also if its event loop ends: the next owed release starts this again
            self._settles = False

    def _settling_once(self) -> Steps[None]:
        for nonce, owed in list(self._owed.items()):
            if time.monotonic() < owed.until:
                try:
                    found = yield from self._giving_back(owed.resources, nonce)
                except QuorumError:
                    return
                except AuthorityError as error:
                    name = named(owed.resources)
                    logger.warning("%s could not be released and ends by itself: %s", name, error)
                else:
                    if owed.in_doubt and not found:
                        continue
            self._owed.pop(nonce, None)
