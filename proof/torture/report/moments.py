"""Which moments of a run are worth being shown lease by lease, and the sentence that says why.

A run of a million acquisitions cannot be drawn whole, and most of it is like the rest of it. What a reader
wants to see is the fence at work: writes that were refused, leases that overlapped, what each kind of fault
did, and the longest wait. Some of each, with room around them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from proof.torture.checker import Gap, Verdict, Violation
from proof.torture.history import Fault
from proof.torture.report.facts import Facts, Overlap, Refusal, worker_name
from proof.torture.report.scale import MILLISECOND, SECOND, Window, duration, since

#: So many of each sort, and so many in all.
VIOLATIONS, REFUSALS, OVERLAPS, MOMENTS = 4, 4, 3, 14
#: A run with no more leases than this is shown whole.
WHOLE = 120
#: How much of a run is seen at least and at most, apart from the room on either side.
SHORTEST, LONGEST = 20 * MILLISECOND, 20 * SECOND


@dataclass(frozen=True, slots=True)
class Moment:
    """A stretch of a run that is shown in full.

    Attributes:
        title: what it shows, in a few words.
        sentence: what happened.
        began: the left edge.
        ended: the right edge.
        focus: what must be seen if not all of it can be.
        resources: what it is about; none for everything.
    """

    title: str
    sentence: str
    began: int
    ended: int
    focus: int
    resources: tuple[str, ...] = ()


def choose(facts: Facts, verdict: Verdict) -> list[Moment]:
    """Return the moments that are shown, in the order of time."""
    if len(facts.holds) <= WHOLE:
        whole = Moment("Every lease of the run", "", facts.began, facts.ended, facts.began)
        return [whole] if facts.holds or facts.failures or facts.faults else []
    chosen: list[Moment] = []
    for candidates, most in _sorts(facts, verdict):
        shown = 0
        for moment in candidates:
            if shown == most or len(chosen) == MOMENTS:
                break
            if not any(_shows(other, moment) for other in chosen):
                chosen.append(moment)
                shown += 1
    return sorted(chosen, key=lambda moment: moment.focus)


def window_of(moment: Moment, origin: int) -> Window:
    """Return what is seen of a run: the moment with room around it; of a long one, what is near its focus."""
    length = min(max(moment.ended - moment.began, SHORTEST), LONGEST)
    began = max(moment.began, moment.focus - length)
    margin = length // 8
    return Window(origin, began - margin, began + length + margin)


def _shows(shown: Moment, other: Moment) -> bool:
    """Whether somebody who has seen one moment has seen the other's climax, too."""
    window = window_of(shown, shown.began)
    about = not shown.resources or (other.resources and set(other.resources) <= set(shown.resources))
    return bool(about) and window.began <= other.focus <= window.ended


def _sorts(facts: Facts, verdict: Verdict) -> Iterator[tuple[Iterable[Moment], int]]:
    """Yield the candidates sort by sort, each with the best ones first, and how many of them are shown."""
    yield (_violated(facts, violation) for violation in verdict.violations), VIOLATIONS
    stale = sorted(facts.refusals, key=lambda refusal: refusal.staleness, reverse=True)
    yield (_refused(facts, refusal) for refusal in stale), REFUSALS
    longest = sorted(facts.overlaps, key=lambda overlap: overlap.ended - overlap.began, reverse=True)
    yield (_overlapped(facts, overlap) for overlap in longest), OVERLAPS
    yield (_waited(facts, gap) for gap in facts.gaps), 1
    yield [_broken(facts, fault) for fault in _longest_of_each_kind(facts.faults)], MOMENTS


def _longest_of_each_kind(faults: Iterable[Fault]) -> Iterable[Fault]:
    by_kind: dict[str, Fault] = {}
    for fault in sorted(faults, key=lambda fault: fault.ended - fault.began):
        by_kind[fault.fault] = fault
    return by_kind.values()


def _violated(facts: Facts, violation: Violation) -> Moment:
    ended = violation.at or facts.ended
    sentence = f"In {violation.resource}, {violation.sentence}."
    resources = (violation.resource,)
    return Moment(f"Violation: {violation.rule}", sentence, ended - SECOND, ended, ended, resources)


def _refused(facts: Facts, refusal: Refusal) -> Moment:
    write, newer = refusal.write, refusal.successor
    sentence = (
        f"Worker {write.worker} sent a write to {write.resource} with token {write.token} at "
        f"{since(facts.began, write.began)}; the database refused it."
    )
    if newer is not None:
        sentence += (
            f" Worker {newer.worker} had been given token {newer.token} {duration(refusal.staleness)} before."
        )
    began = refusal.hold.began if refusal.hold else write.began
    return Moment(
        f"A stale write of worker {write.worker} is refused",
        sentence,
        began,
        write.ended,
        write.ended,
        (write.resource,),
    )


def _overlapped(facts: Facts, overlap: Overlap) -> Moment:
    earlier, later = overlap.earlier, overlap.later
    return Moment(
        f"Two holders of {earlier.resource}",
        f"Worker {earlier.worker} (token {earlier.token}) and worker {later.worker} (token {later.token}) "
        f"both worked for {duration(overlap.ended - overlap.began)}, "
        f"from {since(facts.began, overlap.began)} on. That is what tokens are for.",
        earlier.began,
        overlap.ended,
        overlap.ended,
        (earlier.resource,),
    )


def _waited(facts: Facts, gap: Gap) -> Moment:
    return Moment(
        f"Nobody got a lock for {duration(gap.ended - gap.began)}",
        f"The longest such time while somebody wanted one, from {since(facts.began, gap.began)} on.",
        gap.began,
        gap.ended,
        gap.began,
    )


def _broken(facts: Facts, fault: Fault) -> Moment:
    length = f"{duration(fault.ended - fault.began)}, from {since(facts.began, fault.began)} on"
    detail = f" ({fault.detail})" if fault.detail else ""
    return Moment(
        f"{fault.fault}: {fault.target}",
        f"The longest of its kind: {length}{detail}.",
        fault.began,
        fault.ended,
        fault.began,
        tuple(_held(facts, fault)),
    )


def _held(facts: Facts, fault: Fault) -> Iterator[str]:
    """Yield what a worker held when it was hit; nothing for other targets."""
    for hold in facts.holds_in(fault.began, fault.began):
        if worker_name(hold.worker) == fault.target:
            yield hold.resource
