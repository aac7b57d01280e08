"""Judges a history: were the tokens unique and in order, and was no acknowledged write lost?

Apart from the workload, of which it knows nothing but the format of what it has written: it would judge any
other lock's history the same way. It judges what the holders saw: times were taken outside their
calls, so that "completed before this one began" is certain wherever it is said here. All of it is sorting
and sweeping, O(n log n).

    python -m proof.torture.checker history.jsonl

Exit status 0 if every promise was kept, 1 if one was broken, 2 for a file that cannot be judged.
"""

from __future__ import annotations

import itertools
import sys
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar

from fencelock import errors
from proof.torture.history import (
    COUNTER,
    STRUCK,
    TWO_PRIMARIES,
    WORKER_KILL,
    Acquisition,
    Cut,
    Failure,
    Fault,
    HistoryError,
    Left,
    Outcome,
    Record,
    Release,
    Row,
    Run,
    Style,
    Write,
    read_records,
)
from proof.torture.settings import GENTLE

#: How many violations are printed; all of them are counted.
SHOWN = 20
#: Faults that leave a majority of nodes, all clocks and the network well. Others may cost a lease.
_BEARABLE = frozenset(
    {"node-blank", "node-rolling", "node-rollback", "node-flush", "database-kill", WORKER_KILL}
)
_SECOND = 1_000_000_000
#: Names of what a call may end with.
_ERRORS = frozenset({*errors.__all__, STRUCK})
#: Those that say of nodes that something is wrong with them.
_OF_NODES = {"QuorumError", "AuthorityError", "CountersExhaustedError"}
#: Seconds that one frozen process may hold up a line, beyond a lease of its own.
_LINE_SECONDS = 2.0
_R = TypeVar("_R", Run, Acquisition, Failure, Release, Left, Write, Fault, Row, Cut)
_Named = TypeVar("_Named", Acquisition, Write)


class Rule(StrEnum):
    """What must hold, whatever happens to processes, nodes, clocks and messages."""

    UNIQUE_TOKENS = "P1"  #: no two acquisitions of one resource have the same token
    ORDERED_TOKENS = "P2"  #: a token exceeds those whose acquisition had completed before this one began
    NO_LOST_UPDATE = "lost update"  #: each acknowledged addition is in the row, and no more than was sent
    NO_STALE_ACCEPT = "stale accept"  #: nothing was written below a token that the row had seen
    LEASE_KEPT = "lost lease"  #: a lease that is renewed ends only with its holder, while a majority is well
    RIGHT_LIST = "wrong list"  #: no client with the right list of nodes is told that it is wrong
    OUR_ERRORS = (
        "error"  #: each error is the library's own; none says of nodes that are well that they are not
    )
    MOVING_LINE = "line"  #: a process that does not answer holds up a waiter only for a moment
    NOTHING_LEFT = "left"  #: a released, interrupted or refused acquisition leaves no lock beyond its ttl
    FENCE_ABOVE = "fence"  #: at the end, the row's fence is not below any token that was written with


@dataclass(frozen=True, slots=True)
class Violation:
    rule: Rule
    resource: str
    at: int
    sentence: str

    def __str__(self) -> str:
        return f"{self.rule}: {self.resource}: {self.sentence}"


@dataclass(frozen=True, slots=True)
class Gap:
    began: int
    ended: int

    @property
    def seconds(self) -> float:
        return (self.ended - self.began) / _SECOND


@dataclass(frozen=True, slots=True)
class Verdict:
    run: Run
    violations: tuple[Violation, ...]  #: in the order of time
    acquisitions: int
    resources: int
    overstayed: int  #: holds that lasted longer than their holder had been promised to be alone at first
    overlaps: int  #: holds that began while an earlier holder worked: tokens are for that, it is no violation
    valid_overlaps: int  #: those of them that began while the earlier holder had been promised to be alone
    lost_leases: int  #: holders that heard at their release that the lease had ended before
    failures: Mapping[str, int]  #: by their error
    outcomes: Mapping[Outcome, int]
    styles: Mapping[Style, Mapping[Outcome, int]]
    refusals: Mapping[str, int]  #: of writes, by their error
    lost_updates: int  #: acknowledged additions that are missing in the rows at the end
    rows: int  #: how many were looked at at the end
    faults: Mapping[str, int]  #: by their kind
    disorders: int  #: tokens below earlier ones while two primaries granted, which is no violation
    unavailable: Gap  #: the longest time in which clients wanted locks, and none of them got one
    lasted: Gap  #: from the first attempt to the end of the last one
    cut: int  #: lines that a killed worker left unfinished

    @property
    def right(self) -> bool:
        return not self.violations

    @property
    def broken(self) -> Mapping[Rule, int]:
        return Counter(violation.rule for violation in self.violations)

    @property
    def acknowledged(self) -> int:
        return self.outcomes.get(Outcome.ACKNOWLEDGED, 0)


class _Facts:
    def __init__(self, records: Iterable[Record]) -> None:
        self._lists: defaultdict[type[Record], list[Any]] = defaultdict(list)
        for record in records:
            _check_times(record)
            self._lists[type(record)].append(record)
        if len(self.of(Run)) != 1:
            raise HistoryError(f"a history is of one run, and says which: here are {len(self.of(Run))}")
        self.acquired = _by_resource(self.of(Acquisition))
        self.written = _by_resource(self.of(Write))
        self.rows = {row.resource: row for row in self.of(Row)}
        if len(self.rows) < len(self.of(Row)):
            raise HistoryError("a row is found twice at the end of the run")

    def of(self, kind: type[_R]) -> list[_R]:
        return self._lists[kind]


def check(records: Iterable[Record]) -> Verdict:
    """Return what can be said about a history, whose records may come in any order.

    Raises:
        HistoryError: its facts contradict themselves.
    """
    facts = _Facts(records)
    holds = _Holds(facts)
    found, disorders = _without_disorders(_violations(facts), _split_brains(facts))
    return Verdict(
        run=facts.of(Run)[0],
        violations=tuple(sorted(found, key=attrgetter("at"))),
        acquisitions=len(facts.of(Acquisition)),
        resources=len(facts.acquired),
        overstayed=holds.overstayed(),
        overlaps=holds.overlaps(holds.end),
        valid_overlaps=holds.overlaps(holds.promised_end),
        lost_leases=sum(release.error == "LockLostError" for release in facts.of(Release)),
        failures=Counter(failure.error for failure in facts.of(Failure)),
        outcomes=Counter(write.outcome for write in facts.of(Write)),
        styles=_styles(facts.of(Write)),
        refusals=Counter(write.error for write in facts.of(Write) if write.outcome is Outcome.REFUSED),
        lost_updates=sum(_missing(row, facts.written.get(name, [])) for name, row in facts.rows.items()),
        rows=len(facts.rows),
        faults=Counter(fault.fault for fault in facts.of(Fault)),
        disorders=disorders,
        unavailable=_unavailable(facts),
        lasted=_lasted(facts),
        cut=len(facts.of(Cut)),
    )


def check_file(path: Path) -> Verdict:
    """Return what can be said about the history in a file.

    Raises:
        HistoryError: it is none, or its facts contradict themselves.
    """
    with path.open(encoding="utf-8") as lines:
        try:
            return check(read_records(lines))
        except UnicodeDecodeError as error:
            raise HistoryError(f"it is no text: {error}") from error


def _check_times(record: Record) -> None:
    match record:
        case (
            Acquisition(began=before, completed=after)
            | Release(worked_until=before, ended=after)
            | Failure(began=before, ended=after)
            | Write(began=before, ended=after)
            | Fault(began=before, ended=after)
        ) if after < before:
            raise HistoryError(f"the times of a record go backwards: {record}")
        case _:
            pass


def _by_resource(records: Iterable[_Named]) -> dict[str, list[_Named]]:
    found: defaultdict[str, list[_Named]] = defaultdict(list)
    for record in records:
        found[record.resource].append(record)
    return found


def _split_brains(facts: _Facts) -> list[Fault]:
    """Return the faults in which two primaries granted beside each other.

    With synchronous replication the old one grants nothing, so that tokens have to be in order.
    """
    if facts.of(Run)[0].settings.get("synchronous"):
        return []
    return [fault for fault in facts.of(Fault) if fault.fault == TWO_PRIMARIES]


def _without_disorders(
    violations: Iterable[Violation], split_brains: Sequence[Fault]
) -> tuple[list[Violation], int]:
    """Leave out those of the order between two primaries, which is not promised; count them."""
    found, disorders = [], 0
    for each in violations:
        if each.rule is Rule.ORDERED_TOKENS and any(
            fault.began < each.at < fault.ended for fault in split_brains
        ):
            disorders += 1
        else:
            found.append(each)
    return found, disorders


def _violations(facts: _Facts) -> Iterator[Violation]:
    for acquired in facts.acquired.values():
        yield from _duplicates(acquired)
        yield from _regressions(acquired)
    for written in facts.written.values():
        yield from _read_twice(written)
        yield from _stale_accepts(written)
    for name, row in facts.rows.items():
        yield from _at_the_end(row, facts.written.get(name, []))
    yield from _lost_leases(facts)
    yield from _wrong_lists(facts)
    yield from _wrong_errors(facts)
    yield from _held_up_lines(facts)
    for left in facts.of(Left):
        yield Violation(
            Rule.NOTHING_LEFT, left.resource, left.at, f"worker {left.worker} had given it back, and holds it"
        )


def _duplicates(acquired: Sequence[Acquisition]) -> Iterator[Violation]:
    firsts: dict[int, Acquisition] = {}
    for second in sorted(acquired, key=attrgetter("completed")):
        first = firsts.setdefault(second.token, second)
        if first is not second:
            yield Violation(
                Rule.UNIQUE_TOKENS,
                second.resource,
                second.completed,
                f"token {second.token} was given twice, to workers {first.worker} and {second.worker}",
            )


def _regressions(acquired: Sequence[Acquisition]) -> Iterator[Violation]:
    """P2: compare each token with the largest of all that had completed before its acquisition began."""
    completed = deque(sorted(acquired, key=attrgetter("completed")))
    largest: Acquisition | None = None
    for later in sorted(acquired, key=attrgetter("began")):
        while completed[0].completed < later.began:  # ends at the latest with `later` itself
            earlier = completed.popleft()
            if largest is None or earlier.token > largest.token:
                largest = earlier
        if largest is not None and later.token <= largest.token:
            yield Violation(
                Rule.ORDERED_TOKENS,
                later.resource,
                later.completed,
                f"token {later.token} was asked for {_ms(later.began - largest.completed)} after "
                f"{largest.token} had been given",
            )


def _lost_leases(facts: _Facts) -> Iterator[Violation]:
    """Find leases that were kept, and lost while nothing was broken that may cost a lease."""
    ends = {
        (release.worker, release.resource, release.token): release
        for release in facts.of(Release)
        if release.error == "LockLostError"
    }
    unbearable = [fault for fault in facts.of(Fault) if fault.fault not in _BEARABLE]
    for hold in itertools.chain.from_iterable(facts.acquired.values()):
        end = ends.get((hold.worker, hold.resource, hold.token))
        if not hold.kept or end is None:
            continue
        # Before it was known that it is lost, it could not be extended for as long as it lasts.
        since = end.worked_until - 2 * (hold.valid_until - hold.began)
        if not any(
            fault.began < end.ended and fault.ended > since and _may_hit(fault, hold.worker)
            for fault in unbearable
        ):
            yield Violation(
                Rule.LEASE_KEPT,
                hold.resource,
                end.ended,
                f"worker {hold.worker} lost the lease with token {hold.token} "
                f"{_ms(end.worked_until - hold.completed)} after it had got it",
            )


def _may_hit(fault: Fault, worker: int) -> bool:
    """Whether a fault may have cost a worker a lease: its own, or one of nodes and network."""
    return fault.target == f"worker {worker}" or not fault.target.startswith("worker ")


def _wrong_lists(facts: _Facts) -> Iterator[Violation]:
    """Find workers that were told that the list of nodes is wrong, which it never is."""
    for failure in facts.of(Failure):
        if failure.error == "MembershipError":
            yield Violation(
                Rule.RIGHT_LIST,
                failure.resource,
                failure.ended,
                f"worker {failure.worker} was told: {failure.message}",
            )


def _wrong_errors(facts: _Facts) -> Iterator[Violation]:
    """Find errors that are not the library's, and those that say of nodes which are well that they are not.

    A value that is no counter hits the callers that asked for its resource, also together with others. A
    handler that raises has its worker's connections closed.
    """
    hit = [
        fault
        for fault in facts.of(Fault)
        if fault.fault in {"signal", "line-freeze"} or fault.detail == COUNTER
    ]
    asked: defaultdict[tuple[int, int], set[str]] = defaultdict(set)
    for failure in facts.of(Failure):
        asked[failure.worker, failure.began].add(failure.resource)
    expected = _ERRORS - _OF_NODES if _is_gentle(facts) else _ERRORS
    for failure in facts.of(Failure):
        if failure.error in expected:
            continue
        targets = {f"worker {failure.worker}"}
        targets |= {f"resource {resource}" for resource in asked[failure.worker, failure.began]}
        is_hit = failure.error in _ERRORS and any(
            fault.target in targets and fault.began < failure.ended and fault.ended + _SECOND > failure.began
            for fault in hit
        )
        if not is_hit:
            yield Violation(
                Rule.OUR_ERRORS,
                failure.resource,
                failure.ended,
                f"worker {failure.worker} got {failure.error}: {failure.message}",
            )


def _held_up_lines(facts: _Facts) -> Iterator[Violation]:
    """Find resources that no worker got although others than the frozen one waited."""
    if not _is_gentle(facts):
        return
    longest = int((facts.of(Run)[0].settings["ttl"] + _LINE_SECONDS) * _SECOND)
    waits: defaultdict[str, list[tuple[int, int, int]]] = defaultdict(list)
    for one in facts.of(Acquisition):
        waits[one.resource].append((one.began, one.completed, one.worker))
    for failure in facts.of(Failure):
        waits[failure.resource].append((failure.began, failure.ended, failure.worker))
    for fault in facts.of(Fault):
        if fault.fault != "line-freeze":
            continue
        for resource, acquired in facts.acquired.items():
            got = sorted(one.completed for one in acquired if fault.began < one.completed < fault.ended)
            for start, end in itertools.pairwise([fault.began, *got, fault.ended]):
                if end - start > longest and any(
                    began <= start and ended >= start + longest and fault.target != f"worker {worker}"
                    for began, ended, worker in waits[resource]
                ):
                    yield Violation(
                        Rule.MOVING_LINE, resource, end, f"no worker got it for {_ms(end - start)}"
                    )


def _is_gentle(facts: _Facts) -> bool:
    return GENTLE.issuperset(facts.of(Run)[0].settings.get("faults", ("none",)))


def _acknowledged(written: Iterable[Write]) -> list[Write]:
    return [write for write in written if write.outcome is Outcome.ACKNOWLEDGED]


def _styles(written: Iterable[Write]) -> dict[Style, Counter[Outcome]]:
    found: defaultdict[Style, Counter[Outcome]] = defaultdict(Counter)
    for write in written:
        found[write.style][write.outcome] += 1
    return dict(sorted(found.items()))


def _read_twice(written: Sequence[Write]) -> Iterator[Violation]:
    """Find lost updates by their reads: a second write on the same value undoes the addition of the first."""
    firsts: dict[int | None, Write] = {}
    for second in sorted(_acknowledged(written), key=attrgetter("ended")):
        first = firsts.setdefault(second.read, second)
        if first is not second and second.read is not None:
            yield Violation(
                Rule.NO_LOST_UPDATE,
                second.resource,
                second.ended,
                f"two acknowledged additions had read {second.read}: of worker {first.worker} with token "
                f"{first.token}, and of worker {second.worker} with token {second.token}",
            )


def _stale_accepts(written: Sequence[Write]) -> Iterator[Violation]:
    """Compare each acknowledged write with the largest token that the row must have seen when it began.

    That is the token of a write that was acknowledged before, or one above that of a write that was refused.
    """
    seen = deque(
        sorted(
            (write for write in written if write.outcome is Outcome.ACKNOWLEDGED or _was_below(write)),
            key=attrgetter("ended"),
        )
    )
    fence = 0
    for write in sorted(_acknowledged(written), key=attrgetter("began")):
        while seen and seen[0].ended < write.began:
            earlier = seen.popleft()
            fence = max(fence, earlier.token + _was_below(earlier))
        if write.token < fence:
            yield Violation(
                Rule.NO_STALE_ACCEPT,
                write.resource,
                write.ended,
                f"a write of worker {write.worker} with token {write.token} was accepted; the row had been "
                f"seen with a fence of at least {fence}",
            )


def _was_below(write: Write) -> bool:
    """Whether a write was refused because the row's fence was above its token."""
    return write.outcome is Outcome.REFUSED and write.error in {"", "StaleTokenError"}


def _at_the_end(row: Row, written: Sequence[Write]) -> Iterator[Violation]:
    acknowledged = _acknowledged(written)
    unknown = sum(write.outcome is Outcome.UNKNOWN for write in written)
    if not len(acknowledged) <= row.value <= len(acknowledged) + unknown:
        yield Violation(
            Rule.NO_LOST_UPDATE,
            row.resource,
            0,
            f"the row holds {row.value} after {len(acknowledged)} acknowledged additions and {unknown} of "
            "which nobody knows",
        )
    read = max((write.read for write in acknowledged if write.read is not None), default=-1)
    if read >= row.value:
        yield Violation(
            Rule.NO_LOST_UPDATE,
            row.resource,
            0,
            f"the row holds {row.value}, and an acknowledged addition had read {read}",
        )
    largest = max((write.token for write in acknowledged), default=0)
    if row.fence is not None and row.fence < largest:
        yield Violation(
            Rule.FENCE_ABOVE,
            row.resource,
            0,
            f"the row's fence is {row.fence}, and token {largest} had written to it",
        )


def _missing(row: Row, written: Iterable[Write]) -> int:
    """Count acknowledged additions that are not in the row."""
    return max(0, len(_acknowledged(written)) - row.value)


class _Holds:
    def __init__(self, facts: _Facts) -> None:
        self._acquired = facts.acquired.values()
        self._releases = {
            (release.worker, release.resource, release.token): release.worked_until
            for release in facts.of(Release)
        }
        self._deaths: defaultdict[str, list[int]] = defaultdict(list)
        for fault in sorted(facts.of(Fault), key=attrgetter("began")):
            if fault.fault == WORKER_KILL:
                self._deaths[fault.target].append(fault.began)

    def end(self, hold: Acquisition) -> int:
        """Return until when the holder worked: to its release, or to the death of its process."""
        end = self._releases.get((hold.worker, hold.resource, hold.token))
        if end is None:
            deaths = self._deaths[f"worker {hold.worker}"]
            later = bisect_right(deaths, hold.completed)
            end = deaths[later] if later < len(deaths) else hold.completed
        return max(end, hold.completed)

    def promised_end(self, hold: Acquisition) -> int:
        """Return until when the holder is known to have worked while it had been promised to be alone.

        A killed worker may have released, and not have come to write it down.
        """
        released = self._releases.get((hold.worker, hold.resource, hold.token), hold.completed)
        return max(hold.completed, min(released, hold.valid_until))

    def overstayed(self) -> int:
        return sum(self.end(hold) > hold.valid_until for ours in self._acquired for hold in ours)

    def overlaps(self, end: Callable[[Acquisition], int]) -> int:
        count = 0
        for ours in self._acquired:
            busy_until = 0
            for hold in sorted(ours, key=attrgetter("completed")):
                count += hold.completed < busy_until
                busy_until = max(busy_until, end(hold))
        return count


def _attempts(facts: _Facts) -> tuple[list[int], list[int]]:
    """Return when attempts to get a lock began, and when they ended; both sorted, each by itself."""
    acquired, failed = facts.of(Acquisition), facts.of(Failure)
    began = sorted([*(one.began for one in acquired), *(one.began for one in failed)])
    return began, sorted([*(one.completed for one in acquired), *(one.ended for one in failed)])


def _unavailable(facts: _Facts) -> Gap:
    successes = sorted(one.completed for one in facts.of(Acquisition))
    return max(gaps(*_attempts(facts), successes), default=Gap(0, 0), key=attrgetter("seconds"))


def gaps(began: Sequence[int], ended: Sequence[int], successes: Sequence[int]) -> Iterator[Gap]:
    """Yield the times between successes in which there was an attempt; each sequence is sorted by itself."""
    start = 0
    for at, end in enumerate(ended):
        # As many have ended as have begun before the next one: until then no client wants a lock.
        if at + 1 == len(began) or began[at + 1] > end:
            inside = successes[bisect_left(successes, began[start]) : bisect_right(successes, end)]
            for gap in itertools.pairwise([began[start], *inside, end]):
                yield Gap(*gap)
            start = at + 1


def _lasted(facts: _Facts) -> Gap:
    began, ended = _attempts(facts)
    start = facts.of(Run)[0].began
    return Gap(began[0], ended[-1]) if began else Gap(start, start)


def _ms(nanoseconds: int) -> str:
    return f"{nanoseconds / 1e6:.3f} ms"


def describe(verdict: Verdict) -> Iterator[str]:
    seconds = verdict.lasted.seconds
    rate = verdict.acquisitions / seconds if seconds else 0.0
    yield (
        f"acquisitions    {verdict.acquisitions:,} of {verdict.resources} resources in {seconds:.1f} s: "
        f"{rate:,.0f}/s"
    )
    yield f"failures        {_tally(verdict.failures)}"
    yield f"writes          {_tally(verdict.outcomes)}"
    for style, outcomes in verdict.styles.items():
        yield f"  {style:<14}{_tally(outcomes)}"
    if verdict.refusals:
        yield f"refusals        {_tally(verdict.refusals)}"
    yield f"faults          {_tally(verdict.faults)}"
    yield (
        f"leases          {verdict.overstayed:,} holders worked longer than their first lease, "
        f"{verdict.lost_leases:,} heard that it had ended"
    )
    yield (
        f"overlaps        {verdict.overlaps:,} began while another still worked (no violation), "
        f"{verdict.valid_overlaps:,} of them within the other's lease"
    )
    if verdict.disorders:
        yield (
            f"disorders       {verdict.disorders:,} tokens were below earlier ones of the other primary (no "
            "violation)"
        )
    yield f"unavailable     {verdict.unavailable.seconds:.1f} s at most without any acquisition"
    if verdict.acknowledged and verdict.rows:
        share = verdict.lost_updates / verdict.acknowledged
        yield (
            f"lost updates    {verdict.lost_updates:,} of {verdict.acknowledged:,} acknowledged ({share:.1%})"
        )
    elif verdict.acknowledged:
        yield "lost updates    the run was cut short: nobody looked at the rows at its end"
    if verdict.cut:
        yield f"cut lines       {verdict.cut:,}, of workers that were killed while writing them"
    for violation in verdict.violations[:SHOWN]:
        yield f"  {violation}"
    if len(verdict.violations) > SHOWN:
        yield f"  … and {len(verdict.violations) - SHOWN:,} more"
    broken = _tally(verdict.broken)
    yield "RIGHT: every promise was kept" if verdict.right else f"WRONG: {broken}"


def _tally(counts: Mapping[Any, int]) -> str:
    most = sorted(counts.items(), key=lambda item: -item[1])
    return ", ".join(f"{count:,} {name}" for name, count in most) or "none"


def main(arguments: Sequence[str]) -> int:
    if len(arguments) != 1:
        sys.stderr.write("usage: python -m proof.torture.checker HISTORY\n")
        return 2
    try:
        verdict = check_file(Path(arguments[0]))
    except (HistoryError, OSError) as error:
        sys.stderr.write(f"{arguments[0]} cannot be judged: {error}\n")
        return 2
    sys.stdout.writelines(f"{line}\n" for line in describe(verdict))
    return 0 if verdict.right else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
