"""Nodes that keep one rule less than the scripts. They exist only here.

Each has the name of what is missing; `mutants.py` says which rule that is, and what finds it.
"""

from __future__ import annotations

from collections.abc import Sequence

from fencelock.authority.redlock.protocol import Answer, Said
from tests.simulation.node import Lock, ModelNode


class WithoutOwnership(ModelNode):
    """CONFIRM does not ask whose the lock is."""

    def is_ours(self, lock: Lock | None, nonce: str) -> bool:  # noqa: ARG002 - the mutation
        """Let anybody's lock do."""
        return lock is not None

    def is_higher(self, counters: Sequence[int], decided: Sequence[int]) -> bool:  # noqa: ARG002 - belongs to it
        """Compare nothing: the lock that is there is not the one that was granted."""
        return False


class WithoutComparison(ModelNode):
    """CONFIRM counts where the node itself had granted more."""

    def is_higher(self, counters: Sequence[int], decided: Sequence[int]) -> bool:  # noqa: ARG002 - the mutation
        """Never."""
        return False


class ForgetfulPromise(ModelNode):
    """PROMISE is acknowledged and forgotten."""

    def keep_promise(self, epoch: int) -> None:
        """Forget it."""


class ClosedForAnybody(ModelNode):
    """CLOSE takes any next list, also after another."""

    def may_close(self, following: str) -> bool:  # noqa: ARG002 - the mutation
        """Let any list do."""
        return True


class OpenAllTheTime(ModelNode):
    """A node that is closed votes on in its list, whatever it has been told."""

    def refusal(self, fingerprint: str) -> Answer | None:
        """Refuse nothing for being closed."""
        refused = super().refusal(fingerprint)
        return None if refused is not None and refused.said is Said.CLOSED else refused

    def votes_in(self, fingerprint: str) -> bool:
        """Vote in the list that it belongs to."""
        return self.admitted and bool(self.hash["cfg"] == fingerprint)
