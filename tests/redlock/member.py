"""The part of a node in memory that says who is a member, beside `model.py`, which has its locks.

It answers as the scripts in `scripts/membership` do; `test_members.py` holds it to that on a real server, and
lets the real generators of recovery and change run on such nodes, with everything going wrong that can.
"""

from __future__ import annotations

import itertools
from typing import Any

from fencelock.authority.redlock.protocol import Answer, Command, Said

_tickets = itertools.count(1)


class MemberNode:
    """A server process with a hash, or without one. `run` is its incarnation.

    Attributes:
        hash: what it stores; epochs are numbers, everything else is text.
        ever: 1 + the highest epoch in which it could vote, whatever it remembers of that.
        again: whether it could vote twice in one epoch, having forgotten the first time.
        out: whether it has lost memory, and not been admitted since.
    """

    def __init__(self) -> None:
        self.run = 1
        self.hash: dict[str, Any] = {}
        self.ever = 0
        self.again = self.out = False

    def execute(self, command: Command) -> Answer:
        """Answer a command as the script of its name does."""
        if command.script == "sync":
            return Answer(Said.ERROR, detail="there is no disk")
        if command.script == "leases":
            return Answer(Said.LEASES, facts=("0", "0"))
        answer: Answer = getattr(self, command.script)(*command.arguments)
        return answer

    @property
    def admitted(self) -> bool:
        """Whether it has its marker, and it is this process's."""
        return "e" in self.hash and self.hash["r"] == self.run

    def votes_in(self, fingerprint: str) -> bool:
        """Whether it votes in a list."""
        return self.admitted and "next" not in self.hash and self.hash["cfg"] == fingerprint

    def holds(self, ticket: str) -> bool:
        """Whether that is its ticket."""
        return bool(ticket) and self.hash.get("ticket") == (ticket, self.run)

    def _refusal(self, fingerprint: str, *, closed: bool) -> Answer | None:
        if "e" not in self.hash:
            return Answer(Said.AMNESIA)
        if self.hash["r"] != self.run:
            return Answer(Said.RESTARTED)
        if self.hash["cfg"] != fingerprint:
            return Answer(Said.CONFIG)
        return Answer(Said.CLOSED) if closed else None

    def _facts(self, *more: str) -> tuple[str, ...]:
        return (self.hash["id"], self.hash["members"], *more)

    def begin(self, _cfg: str, _word: str, max_ttl: int, seat: str) -> Answer:
        """BEGIN."""
        if self.admitted:
            return Answer(Said.ADMITTED, facts=self._facts("votes"))
        if "next" in self.hash:
            return Answer(Said.CLOSED)
        if "e" in self.hash and not seat:
            return Answer(Said.ADMITTED, facts=self._facts("restarted"))
        if "e" in self.hash and self.hash["id"] != seat:
            return Answer(Said.CONFIG)
        if self.hash.get("ticket", ("", 0))[1] != self.run:
            self.hash["ticket"] = (f"t{next(_tickets)}", self.run)
        return Answer(Said.TICKET, facts=(self.hash["ticket"][0], str(max_ttl)))

    def read(self, _cfg: str) -> Answer:
        """READ."""
        ticket, run = self.hash.get("ticket", ("", 0))
        told = (
            self.hash.get(name, "") for name in ("e", "p", "cfg", "id", "members", "next", "next_members")
        )
        mine = (ticket, "0") if run == self.run else ("", "")
        return Answer(Said.STANDING, facts=("1" if self.admitted else "", *map(str, told), *mine))

    def promise(self, cfg: str, epoch: int, ticket: str, mode: str) -> Answer:
        """PROMISE."""
        closed = self.hash.get("next")
        if self.admitted:
            counts = (self.hash["cfg"] == cfg and not closed) or (mode == "change" and closed == cfg)
        else:
            counts = self.holds(ticket) and not closed and self.hash.get("cfg", cfg) == cfg
        if not counts:
            refused = self._refusal(cfg, closed=bool(closed)) or Answer(Said.CONFIG)
            return Answer(Said.NO_TICKET) if ticket else refused
        if epoch > self.hash.get("p", 0):
            self.hash["p"] = epoch
        return Answer(Said.PROMISED)

    def raise_(self, cfg: str, epoch: int) -> Answer:
        """RAISE."""
        refused = self._refusal(cfg, closed="next" in self.hash)
        if refused is None and epoch > self.hash["e"]:
            self.hash["e"] = epoch
            self.hash["p"] = max(self.hash["p"], epoch)
            self.ever = max(self.ever, epoch + 1)
        return refused or Answer(Said.RAISED)

    def admit(self, cfg: str, epoch: int, ticket: str, seat: str, members: str) -> Answer:
        """ADMIT."""
        if self.admitted:
            return Answer(Said.ADMITTED, facts=self._facts())
        if "next" in self.hash:
            return Answer(Said.CLOSED)
        if not self.holds(ticket):
            return Answer(Said.NO_TICKET)
        self._let_vote(cfg, epoch, seat, members)
        return Answer(Said.ADMITTED, facts=self._facts())

    def close(self, cfg: str, following: str, members: str) -> Answer:
        """CLOSE."""
        refused = self._refusal(cfg, closed=self.hash.get("next", following) != following)
        if refused is None:
            self.hash |= {"next": following, "next_members": members}
        return refused or Answer(Said.SHUT)

    def open(self, cfg: str, epoch: int, node_id: str, _base: int, members: str) -> Answer:
        """OPEN."""
        awaits = self.admitted and self.hash.get("next") == cfg
        if "e" in self.hash and not awaits:
            return Answer(Said.ADMITTED, facts=self._facts())
        if not awaits and not self.holds(node_id):
            return Answer(Said.NO_TICKET)
        self._let_vote(cfg, epoch, node_id, members)
        return Answer(Said.OPENED, facts=self._facts())

    def _let_vote(self, cfg: str, epoch: int, node_id: str, members: str) -> None:
        promised = max(self.hash.get("p", 0), epoch)
        self.hash = {"e": epoch, "p": promised, "r": self.run, "cfg": cfg, "id": node_id, "members": members}
        self.again |= epoch < self.ever
        self.ever = max(self.ever, epoch + 1)
        self.out = False


setattr(MemberNode, "raise", MemberNode.raise_)  # a keyword of the language
