"""The members of a cluster: their addresses, how to log in, and which one to ask now."""

from __future__ import annotations

import random
import ssl
from typing import Final

from fencelock import _events
from fencelock._events import ConnectionFailed, ConnectionOpened
from fencelock.authority.etcd.channel import Channel
from fencelock.authority.etcd.messages import OK, UNAVAILABLE, Answer, Call, auth_token, authenticate
from fencelock.authority.hosts import Hosts, parse, shown, tls_of
from fencelock.errors import AuthorityError

_APART: Final = 0.25  # seconds between the beginnings of two connections; the first that opens is used
_PORT: Final = 2379
_SCHEMES: Final = ("etcd", "etcds")
_OPTIONS: Final = ("ca", "cert", "key")  # settings in the query of a URL: files in PEM


class Members:
    """The members that a URL names."""

    def __init__(self, url: str) -> None:
        self.hosts: Hosts = parse(url, _SCHEMES, _PORT, _OPTIONS)
        self.tls: ssl.SSLContext | None = tls_of(self.hosts, "h2")
        self._next = random.randrange(len(self.hosts.addresses))  # noqa: S311 - no secret

    @property
    def address(self) -> tuple[str, int]:
        """The host and port of the member to ask now."""
        return self.hosts.addresses[self._next]

    def to_try(self) -> list[tuple[float, tuple[str, int]]]:
        """Return the addresses to connect to, each with the seconds after which to begin with it."""
        its, first = self.hosts.addresses, self._next
        return [(number * _APART, each) for number, each in enumerate((*its[first:], *its[:first]))]

    def prefer(self, address: tuple[str, int]) -> None:
        """Note that a connection to this member was opened before those to others."""
        self._next = self.hosts.addresses.index(address)
        if _events.listeners:
            _events.tell(ConnectionOpened("Etcd", shown(address)))

    def leave(self, address: tuple[str, int], reason: str) -> None:
        """Note that a member has failed; if it is the one to ask now, ask the next one from now on."""
        if address == self.address:
            self._next = (self._next + 1) % len(self.hosts.addresses)
        if _events.listeners:
            _events.tell(ConnectionFailed("Etcd", shown(address), reason))

    def new_channel(self, address: tuple[str, int]) -> Channel:
        return Channel("http" if self.tls is None else "https", shown(address))

    @property
    def login(self) -> Call | None:
        return authenticate(self.hosts.user, self.hosts.password) if self.hosts.user else None

    def log_in(self, channel: Channel, answer: Answer) -> None:
        """Read the answer to `login`, so that later calls of the channel send its token."""
        if answer.status == UNAVAILABLE:
            raise ConnectionError(answer.detail)
        if "authentication is not enabled" in answer.detail:  # then calls need no token
            return
        if answer.status != OK:
            raise AuthorityError(f"{self.hosts} refuses the login of {self.hosts.user!r}: {answer.detail}")
        channel.authenticate(auth_token(answer.messages[0]))
