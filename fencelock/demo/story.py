"""What the demo tells: the same pause twice, then nodes that die, then a node that forgets."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import redis
from rich.console import Console
from sqlalchemy import Engine, create_engine, make_url, select
from sqlalchemy.orm import Session

from fencelock import Redlock
from fencelock.demo.models import ACCOUNT, OPENING_BALANCE, RESOURCE, Account, Base, PlainAccount
from fencelock.demo.page import Page
from fencelock.demo.stage import Actor
from fencelock.embedded import Nodes, Postgres
from fencelock.errors import QuorumError
from fencelock.guard import bind
from fencelock.lease import Lease

TTL = 1.0
PAUSE = 1.6
WITHDRAWAL = 30
DEPOSIT = 50
EXPECTED = OPENING_BALANCE - WITHDRAWAL + DEPOSIT


def play(console: Console, database: str = "postgresql") -> bool:
    """Play the demo and return whether every claim was seen to hold.

    Args:
        console: where to draw.
        database: "postgresql" (embedded), "sqlite", or the SQLAlchemy URL of a database in which the demo
            may create, and drop, tables of its own.
    """
    page = Page(console)
    console.print(
        "\n[bold]A lock is not enough.[/] A worker takes a lock and is paused (a garbage collection, a page "
        "swapped out, a slow disk). Its lease ends, another worker takes over, and the first wakes up and "
        "writes.\n"
    )
    with page.working("Starting 5 Valkey nodes …"):
        nodes = Nodes(5).start()
    with nodes, _database(page, database) as url:
        engine = create_engine(url)
        _create_tables(engine)
        try:
            with page.working("Initialising the nodes, starting two workers …"):
                quorum = Redlock(nodes.url)
                quorum.init(base=0)
                actors = [Actor(name, url, nodes.url, page.tell) for name in "AB"]
            with quorum, actors[0] as a, actors[1] as b:
                _without_a_guard(page, engine, a, b)
                _with_fencelock(page, engine, a, b)
                _with_nodes_down(page, nodes, quorum, b)
        finally:
            Base.metadata.drop_all(engine)
            engine.dispose()
    return page.verdict()


@contextmanager
def _database(page: Page, database: str) -> Iterator[str]:
    if database == "postgresql":
        with page.working("Starting PostgreSQL …"):
            server = Postgres().start()
        with server:
            yield server.create_database()
    elif database == "sqlite":
        from tempfile import TemporaryDirectory  # noqa: PLC0415 - only this branch needs a folder

        with TemporaryDirectory(prefix="fencelock-demo-") as folder:
            yield f"sqlite:///{folder}/demo.sqlite"
    else:
        page.say(f"Using {make_url(database).render_as_string()}, in tables of the demo's own.")
        yield database


def _create_tables(engine: Engine) -> None:
    Base.metadata.drop_all(engine)
    Base.metadata.create_all(engine)
    with Session(engine) as session:
        bind(session, Lease(RESOURCE, 1))
        session.add(PlainAccount(id=ACCOUNT, balance=OPENING_BALANCE))
        session.add(Account(id=ACCOUNT, balance=OPENING_BALANCE))
        session.commit()


def _balance(engine: Engine, model: type[Account | PlainAccount]) -> int:
    with Session(engine) as session:
        return session.scalars(select(model.balance)).one()


def _without_a_guard(page: Page, engine: Engine, a: Actor, b: Actor) -> None:
    intent = (
        f"The balance is {OPENING_BALANCE}. A withdraws {WITHDRAWAL}, B deposits {DEPOSIT}: {EXPECTED} is "
        f"right. Lease {TTL:g} s, pause {PAUSE:g} s."
    )
    with page.act("1  The control: redis-py's Lock, an ordinary table", intent):
        a.do("lock_plainly", TTL, what="{value}")
        read = a.do("read_plainly", what="reads {value}").value
        a.freeze("[bold]paused[/] (SIGSTOP)")
        b.order("lock_plainly", TTL)
        b.outcome("{value}: A's lease has ended")
        theirs = b.do("read_plainly", what="reads {value}").value
        b.do("write_plainly", theirs + DEPOSIT, what="writes {value}")
        b.do("unlock_plainly", what="{value}")
        page.note(f"balance {_balance(engine, PlainAccount)}")
        time.sleep(max(0.0, PAUSE - TTL))
        a.wake("[bold]wakes up[/]")
        a.do("write_plainly", read - WITHDRAWAL, what="writes {value}, as if nothing had happened")
        a.do("unlock_plainly", what="{value}")
        final = _balance(engine, PlainAccount)
        page.note(f"balance [bold red]{final}[/]: B's {DEPOSIT} are gone")
    page.claim(
        "Control: without a guard, the paused holder destroys the other's update",
        f"balance {final} instead of {EXPECTED}",
        holds=final == OPENING_BALANCE - WITHDRAWAL,
    )


def _with_fencelock(page: Page, engine: Engine, a: Actor, b: Actor) -> None:
    intent = "The same pause. The lock is granted by 5 nodes and comes with a token; the table has a fence."
    with page.act("2  With fencelock", intent):
        token_a = a.do("lock", TTL, what="got the lock with token [bold]{value}[/]").value
        read = a.do("claim", what="claims the row, reads {value}").value
        a.order("write_slowly", read - WITHDRAWAL, PAUSE)
        page.tell("A", time.monotonic(), f"begins to write {read - WITHDRAWAL} over a slow network")
        time.sleep(TTL / 4)
        a.freeze("[bold]paused[/] (SIGSTOP)")
        token_b = b.do(
            "lock", 30.0, what="got the lock with token [bold]{value}[/]: A's lease has ended"
        ).value
        theirs = b.do("claim", what="claims the row, reads {value}").value
        b.do("write_with_orm", theirs + DEPOSIT, what="writes {value}")
        page.note(f"balance {_balance(engine, Account)}, fence {token_b}")
        time.sleep(max(0.0, PAUSE - TTL))
        a.wake("[bold]wakes up[/]")
        stale = a.outcome("ORM")
        core = a.do("write_with_core", read - WITHDRAWAL, what="Core")
        rows = a.do("write_with_cursor", read - WITHDRAWAL, what="raw cursor: {value} rows let through").value
        a.do("unlock", what="{value}")
        b.do("unlock", what="{value}")
        kept = _balance(engine, Account)
        page.note(f"balance {kept}: nothing is lost")
        a.do("add", -WITHDRAWAL, what="takes the lock anew, claims, withdraws: {value}")
        final = _balance(engine, Account)
        page.note(f"balance [bold green]{final}[/]")
    page.claim(
        "The paused holder's ORM write, under way since, is refused by the database",
        f"StaleTokenError: token {stale.stale[0]} below {stale.stale[1]}" if stale.stale else str(stale),
        holds=stale.stale == (token_a, token_b),
    )
    page.claim(
        "So is its Core statement",
        f"StaleTokenError: token {core.stale[0]} below {core.stale[1]}" if core.stale else str(core),
        holds=core.stale == (token_a, token_b),
    )
    page.claim("So is its raw cursor", f"{rows} rows let through", holds=rows == 0)
    page.claim(
        "Nothing is lost: both changes are in the balance",
        f"balance {kept} after the refusals, {final} after A's second try",
        holds=kept == OPENING_BALANCE + DEPOSIT and final == EXPECTED,
    )


def _with_nodes_down(page: Page, nodes: Nodes, quorum: Redlock, b: Actor) -> None:
    with page.act("3  Nodes die", "A majority of the 5 nodes is enough; less than that decides nothing."):
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
