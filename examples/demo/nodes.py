"""The last act: nodes grant the leases from now on, and die."""

from __future__ import annotations

import time
from collections.abc import Mapping

import redis
from sqlalchemy import Engine

from demo.models import RESOURCE
from demo.page import Page
from demo.stage import Actor
from fencelock import Redlock
from fencelock.errors import QuorumError
from fencelock.max_fence import highest_fence
from proof.servers import Nodes


def let_nodes_die(page: Page, engine: Engine, b: Actor) -> None:
    """Move the lock from the database to five nodes, and kill some."""
    with page.working("Starting 5 Valkey nodes …"):
        nodes = Nodes(5).start()
    with nodes, Redlock(nodes.url) as quorum:
        with engine.connect() as connection:
            fence, _ = highest_fence(connection)
        quorum.init(above=fence)
        b.do("lock_with", nodes.url)
        _kill_some(page, nodes, quorum, b)


def _kill_some(page: Page, nodes: Nodes, quorum: Redlock, b: Actor) -> None:
    with page.act(
        "3  The lock moves to 5 nodes, and nodes die",
        "Their tokens begin above the fence. A majority is enough; less than that decides nothing.",
    ):
        for index in (0, 1):
            nodes[index].kill()
            page.note(f"node {index + 1} killed")
        before = b.do("add", 0).value
        began = time.monotonic()
        results = [b.do("add", 1) for _ in range(20)]
        took = time.monotonic() - began
        page.tell("B", time.monotonic(), f"20 fenced deposits of 1 in {took:.2f} s")
        after = results[-1].value
        nodes[2].kill()
        page.note("node 3 killed: 2 of 5 are left")
        without_quorum = _refusal(quorum)
        page.note(f"[yellow]QuorumError[/]: {_in_short(without_quorum)}")
        nodes[2].restart(keep_data=False)
        page.note("node 3 is back, [bold]blank[/]: it has forgotten which tokens it gave out")
        with_blank = _refusal(quorum)
        deadline = time.monotonic() + 10
        while "unreachable" in with_blank.get(quorum.nodes[2], "") and time.monotonic() < deadline:
            with_blank = _refusal(quorum)  # a node that was down is looked for every other second
        page.note(f"[yellow]QuorumError[/]: {_in_short(with_blank)}")
        with redis.Redis.from_url(nodes[2].url) as client:
            marked = client.hexists("{fencelock}", "e")
    page.claim(
        "Two of five nodes dead: work goes on",
        f"{sum(not result.error for result in results)} of 20 deposits, balance {before} → {after}",
        holds=after == before + len(results),
    )
    page.claim(
        "Three of five dead: a QuorumError that says which node said what",
        _in_short(without_quorum),
        holds=sum("unreachable" in text for text in without_quorum.values()) == 3,  # noqa: PLR2004 - 3 are dead
    )
    page.claim(
        "A node that came back blank does not vote",
        with_blank.get(quorum.nodes[2], "it voted"),
        holds="blank" in with_blank.get(quorum.nodes[2], "") and not marked,
    )


def _refusal(quorum: Redlock) -> dict[str, str]:
    """Try to get the lock, and return what each node said when that failed; nothing if it was granted."""
    try:
        with quorum.lock(RESOURCE, timeout=1):
            return {}
    except QuorumError as error:
        return dict(error.nodes)


def _in_short(nodes: Mapping[str, str]) -> str:
    """Return what the nodes said, with those together that said the same."""
    if not nodes:
        return "the lock was granted"
    numbers: dict[str, list[str]] = {}
    for number, said in enumerate(nodes.values(), 1):
        numbers.setdefault(said.partition(" (")[0].partition(":")[0], []).append(str(number))
    return "; ".join(
        f"{'nodes' if len(group) > 1 else 'node'} {', '.join(group)} "
        f"{'would grant' if said == 'granted' else said}"
        for said, group in numbers.items()
    )
