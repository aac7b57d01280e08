"""Errors that say which node said what, and what to do next."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import NoReturn

from fencelock.authority.base import held_by_another
from fencelock.authority.redlock.protocol.bids import Failed
from fencelock.authority.redlock.protocol.messages import VOTING, Answers, Said
from fencelock.authority.redlock.protocol.nodeset import Fleet
from fencelock.errors import LockTimeoutError, MembershipError, NodesNotInitialisedError, QuorumError


def raise_timeout(fleet: Fleet, outcome: Failed) -> NoReturn:
    """Say why the time was over: other holders, slow nodes, or too few of them."""
    if not outcome.contended:
        raise_no_quorum(fleet, outcome.answers)
    if outcome.late:
        raise QuorumError(
            f"the nodes answer too slowly for a ttl of {outcome.bid.ttl:g} s: a majority granted "
            f"{outcome.bid.name}, but no validity was left; use a longer ttl",
            nodes=by_name(fleet.names, outcome.answers),
        )
    holder_ttl = outcome.holder_ttl
    if holder_ttl is None:
        raise LockTimeoutError(
            f"{outcome.bid.name} could not be acquired in time: contenders split the votes"
        )
    if holder_ttl == math.inf:
        raise LockTimeoutError(
            f"{outcome.bid.name} is held for ever: something else than fencelock has written its key "
            f"({', '.join(outcome.bid.keys[1:])}) without an end; remove it on the nodes",
            holder_ttl=holder_ttl,
        )
    raise held_by_another(outcome.bid.resources, holder_ttl)


def raise_no_quorum(fleet: Fleet, answers: Answers) -> NoReturn:
    """Say why too few nodes vote, and what to do about it."""
    said = Counter(answer.said for answer in answers.values())
    spare = len(fleet.names) - fleet.quorum
    report = report_of(fleet, answers)
    if said[Said.AMNESIA] > spare:
        raise NodesNotInitialisedError(_why_blank(fleet, said[Said.AMNESIA], report))
    if said[Said.CONFIG] + said[Said.CLOSED] > spare:
        raise MembershipError(
            f"the nodes do not agree with this list of {len(fleet.names)} nodes: configure every client with "
            f"exactly the nodes that were initialised together ({report})"
        )
    voters = sum(answer.said in VOTING for answer in answers.values())
    advice = "bring the others back, or mend their URLs"
    if said[Said.AMNESIA] or said[Said.RESTARTED]:
        advice = f"{_when_back(fleet, answers)}; `fencelock nodes` tells more (docs/redis.md)"
    raise QuorumError(
        f"{voters} of {len(fleet.names)} nodes can vote, and a majority is {fleet.quorum}: {report}; "
        f"{advice}",
        nodes=by_name(fleet.names, answers),
    )


def _why_blank(fleet: Fleet, blank: int, report: str) -> str:
    """Return what to say where too many nodes are blank: what is likelier comes first."""
    new = f"Nodes that are used for the first time: `{fleet.init_command}`"
    used = (
        f"Nodes that were used before: `{fleet.init_command} --after-loss --database URL`, which starts "
        "above the tokens that the database has seen"
    )
    if blank < len(fleet.names):
        return (
            f"{blank} of {len(fleet.names)} nodes are blank, and may have forgotten tokens that they gave "
            f"out ({report}). {used}. {new}"
        )
    if fleet.fingerprint:
        return f"no node is initialised any more: they have lost their memory in use. {used}. {new}"
    return f"no node is initialised. {new}. {used}"


def _when_back(fleet: Fleet, answers: Answers) -> str:
    """Return when nodes that restarted vote again, as far as they have said it."""
    waits = [answer.ttl for answer in answers.values() if answer.said is Said.RESTARTED]
    if waits and not max(waits):
        return "what restarted votes again as soon as a client has admitted it, which begins now: try again"
    if waits and max(waits) < math.inf:
        return f"what restarted votes again in {math.ceil(max(waits))} s, when the next client admits it"
    longest = f", {fleet.max_ttl:g} s," if fleet.max_ttl < math.inf else ""
    return f"what restarted votes again when the longest lease{longest} has passed since a client met it"


def by_name(names: Sequence[str], answers: Answers) -> dict[str, str]:
    """Return what each node said, by its address."""
    return {names[node]: str(answers[node]) for node in sorted(answers)}


def report_of(fleet: Fleet, answers: Answers) -> str:
    """Return the same in one line."""
    return "; ".join(f"{name}: {said}" for name, said in by_name(fleet.names, answers).items())
