"""The entries of a line (see `line.py`), the mark with its last token, and their texts in the store."""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple
from urllib.parse import quote

from fencelock._owners import name_of_process
from fencelock.authority.base import Grant, named
from fencelock.errors import LockLostError
from fencelock.holder import Holder, LockInfo
from fencelock.lease import validity
from fencelock.tokens import MAX_TOKEN

SHIFT: Final = 10  # bits by which the time is shifted in a token
#: The most seconds between two checks by a waiter, because its connection may be dead without an error.
_PATIENCE: Final = 10.0
_MARK: Final = re.compile(r"(?s)([0-9]{1,20})(?: ([0-9a-f]{16,32}))?(?: ([0-9]{1,20}) (.*))?")


class Mark(NamedTuple):
    """The last token of a resource, and which acquisition minted it."""

    token: int = 0
    nonce: str = ""
    #: Until when the holder keeps the resource without an entry, in Unix milliseconds; 0 if not at all.
    kept_until: int = 0
    text: str = ""  # the text that the holder's deleted entry had; empty if the resource is not kept

    @classmethod
    def read(cls, text: bytes) -> Mark | None:
        """Return the mark of a text; None for a text of another form."""
        found = _MARK.fullmatch(text.decode("utf-8", "replace"))
        if found is None or int(found[1]) > MAX_TOKEN:
            return None
        return cls(int(found[1]), found[2] or "", int(found[3] or 0), found[4] or "")

    def __str__(self) -> str:
        """Return the text of the mark. Texts compare as their tokens do, because each token has 20 digits."""
        kept = f" {self.kept_until} {self.text}" if self.kept_until else ""
        return f"{self.token:020d} {self.nonce}{kept}"

    @property
    def kept_for(self) -> float:
        """For how many seconds from now the resource is kept, by the clock of this client."""
        return self.kept_until / 1000.0 - time.time() if self.kept_until else 0.0


class View(NamedTuple):
    """The state of the lines, for an acquisition that does not hold them yet."""

    is_there: bool  # whether its own entries are in the lines
    #: The nearest earlier entry of each line that has one, as a key or a path; for a single try, any entries.
    ahead: Sequence[Any]
    kept_for: float = 0.0  # seconds for which the last holder still keeps the resources


@dataclass(eq=False, slots=True)
class Place:
    """An acquisition, and what the store has granted to it."""

    resources: tuple[str, ...]
    nonce: str
    ttl: float
    began: float = 0.0  # the time from which `granted` counts (`time.monotonic`)
    granted: float = 0.0  # seconds that the lease lasts from then on
    waits: bool = False  # whether it has begun to wait for entries ahead
    holds: bool = False  # whether it is known to be the first in all lines
    revision: int = 0  # etcd's revision of its entries; 0 if unknown
    seen: int = 0  # the revision of etcd at which the lines were read last

    @property
    def expires_at(self) -> float:
        return validity(self.began, min(self.ttl, self.granted))

    @property
    def extend_at(self) -> float:
        return self.began + min(self.granted / 3, _PATIENCE)


class Exchange(NamedTuple):
    """A step (see `_generators`): send requests to one server, which has to answer within `seconds`."""

    requests: Sequence[Any]
    seconds: float


class Head(NamedTuple):
    """The first entry of a line, with the mark and the number of waiters; `key` is a key or a path."""

    resource: str
    key: Any
    nonce: str
    text: str
    mark: Mark
    waiters: int
    #: The most seconds until the store deletes the entry; infinite if the store cannot tell.
    left: float = math.inf
    lease: int = 0  # the lease of etcd that the entry belongs to

    def info(self) -> LockInfo:
        ttl, since, holder = (*self.text.split(" ", 2), "", "", "")[:3]
        left = min(_number(ttl) or math.inf, self.left)
        process = Holder.of(holder, _number(since)) if holder else None
        token = self.mark.token if self.mark.nonce == self.nonce else None
        return LockInfo(self.resource, token, process, left, self.waiters)


def tokens_of_age(base: int, seconds: float) -> range:
    """Return the tokens that were minted with this base, so many seconds ago or earlier.

    A token below the base shows no age, because it was minted with an earlier base.
    """
    return range(base << SHIFT, (base + int((time.time() - seconds) * 1000)) << SHIFT)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0


def entry_text(ttl: float) -> str:
    """Return the text of an entry: its ttl, the Unix time, and the name of this process."""
    return f"{ttl:g} {time.time():.3f} {name_of_process(os.getpid())}"


def quoted(resource: str) -> str:
    """Return the name of a resource, quoted so that it is one part of a key or path."""
    return quote(resource, safe="").replace(".", "%2E")


def lost(grant: Grant) -> LockLostError:
    return LockLostError(
        f"the lease of {named(grant.resources)} has ended, and may have been given to another"
    )
