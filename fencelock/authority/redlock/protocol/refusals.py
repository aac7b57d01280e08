"""Errors that list the answers of the nodes, and say what to do next."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import NoReturn

from fencelock import errors
from fencelock.authority.base import held_by_another, too_slow
from fencelock.authority.redlock.protocol.attempts import Failed, NodeSet
from fencelock.authority.redlock.protocol.messages import MISSING_RIGHT, VOTING, NodeReplies, ReplyKind


def raise_timeout(node_set: NodeSet, outcome: Failed) -> NoReturn:
    """Raise the reason why the time was over: other holders, slow nodes, or too few of them."""
    if not outcome.contended:
        raise_no_quorum(node_set, outcome.answers)
    if outcome.late:
        answers = by_name(node_set.names, outcome.answers)
        raise too_slow("the nodes", outcome.attempt.ttl, outcome.attempt.resources, answers)
    holder_ttl = outcome.holder_ttl
    if holder_ttl is None:
        raise errors.LockTimeoutError(
            f"{outcome.attempt.name} could not be acquired in time: contenders split the votes"
        )
    if holder_ttl == math.inf:
        raise errors.LockTimeoutError(
            f"{outcome.attempt.name} is held for ever: another program than fencelock has written its key "
            f"({', '.join(outcome.attempt.keys[1:])}) without an expiry; `fencelock release NAME --force "
            "--reason why` removes it",
            holder_ttl=holder_ttl,
        )
    raise held_by_another(outcome.attempt.resources, holder_ttl)


def raise_no_quorum(node_set: NodeSet, answers: NodeReplies) -> NoReturn:
    """Raise an error that says why too few nodes vote, and what to do about it."""
    said = Counter(answer.kind for answer in answers.values())
    spare = len(node_set.names) - node_set.quorum
    report = report_of(node_set, answers)
    if said[ReplyKind.AMNESIA] > spare:
        raise errors.NodesNotInitialisedError(_why_blank(node_set, said[ReplyKind.AMNESIA], report))
    if said[ReplyKind.CONFIG] + said[ReplyKind.CLOSED] > spare:
        raise errors.MembershipError(
            f"the nodes do not agree with this list of {len(node_set.names)} nodes: configure every client "
            f"with exactly the nodes that were initialised together ({report})"
        )
    if said[ReplyKind.FULL] > spare:
        raise errors.CountersExhaustedError(
            f"no tokens are left in this epoch: {report}; begin the next epoch, for which no restart is "
            f"needed: `{node_set.init_command} --after-loss --database URL` ({errors.PAGES}/recover/)"
        )
    voters = sum(answer.kind in VOTING for answer in answers.values())
    advice = "bring the others back, or correct their URLs"
    if said[ReplyKind.AMNESIA] or said[ReplyKind.RESTARTED]:
        advice = f"{_when_back(node_set, answers)}; `fencelock nodes` shows more ({errors.PAGES}/redis/)"
    elif any(MISSING_RIGHT in answer.detail for answer in answers.values()):
        advice = "give the user that right"
    raise errors.QuorumError(
        f"{voters} of {len(node_set.names)} nodes can vote, and a majority is {node_set.quorum}: {report}; "
        f"{advice}",
        nodes=by_name(node_set.names, answers),
    )


def _why_blank(node_set: NodeSet, blank: int, report: str) -> str:
    """Return the message for too many blank nodes: the likelier reason comes first."""
    new = f"Nodes that are used for the first time: `{node_set.init_command}`"
    used = (
        f"Nodes that were used before: `{node_set.init_command} --after-loss --database URL`, which starts "
        "above the tokens that the database has seen"
    )
    if blank < len(node_set.names):
        return (
            f"{blank} of {len(node_set.names)} nodes are blank, and may have forgotten tokens that they "
            f"granted ({report}). {used}. {new}"
        )
    if node_set.fingerprint:
        return f"no node is initialised any more: all have lost their data while in use. {used}. {new}"
    return f"no node is initialised. {new}. {used}"


def _when_back(node_set: NodeSet, answers: NodeReplies) -> str:
    """Return a text that says when restarted nodes vote again, as far as their answers tell."""
    waits = [answer.ttl for answer in answers.values() if answer.kind is ReplyKind.RESTARTED]
    if waits and not max(waits):
        return (
            "nodes that restarted vote again as soon as a client has admitted them, which begins now: try "
            "again"
        )
    if waits and max(waits) < math.inf:
        return (
            f"nodes that restarted vote again in {math.ceil(max(waits))} s, when the next client admits them"
        )
    longest = f", {node_set.max_ttl:g} s," if node_set.max_ttl < math.inf else ""
    return (
        f"nodes that restarted vote again when the longest lease{longest} has passed since a client met them"
    )


def raise_ttl_too_long(ttl: float, node_set: NodeSet) -> NoReturn:
    """Raise ValueError for a ttl above `max_ttl`: a node that lost its memory stays out for no longer."""
    raise ValueError(
        f"a ttl (or at_least) of {ttl:g} s is longer than the {node_set.max_ttl:g} s that these nodes "
        "allow, because a node that restarts stays out only for that time. Use a shorter one (leases are "
        "renewed), or run: "
        + node_set.init_command.replace("init", f"nodes set --max-ttl {math.ceil(ttl)}", 1)
    )


def by_name(names: Sequence[str], answers: NodeReplies) -> dict[str, str]:
    return {names[node]: str(answers[node]) for node in sorted(answers)}


def report_of(node_set: NodeSet, answers: NodeReplies) -> str:
    return "; ".join(f"{name}: {said}" for name, said in by_name(node_set.names, answers).items())
