"""What the demo tells: the same pause twice, over one database. Then nodes that die, where there are any."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from tempfile import TemporaryDirectory

from rich.console import Console
from sqlalchemy import Engine, create_engine, make_url, select
from sqlalchemy.orm import Session

from demo.models import ACCOUNT, OPENING_BALANCE, RESOURCE, Account, Base, PlainAccount
from demo.nodes import let_nodes_die
from demo.page import Page
from demo.stage import Actor
from fencelock import Database
from fencelock.authority.database.table import LEASE_TABLE
from fencelock.guard import bind
from fencelock.lease import Lease
from proof.servers import Postgres

TTL = 1.0
PAUSE = 1.6
WITHDRAWAL = 30
DEPOSIT = 50
EXPECTED = OPENING_BALANCE - WITHDRAWAL + DEPOSIT


def play(console: Console, database: str = "sqlite") -> bool:
    """Play the demo and return whether every claim was seen to hold.

    Args:
        console: where to draw.
        database: "sqlite", "postgresql" (embedded), or the SQLAlchemy URL of a database in which the demo
            may create, and drop, tables of its own.
    """
    page = Page(console)
    console.print(
        "\n[bold]A lock is not enough.[/] A worker takes a lock and is paused (a garbage collection, a page "
        "swapped out, a slow disk). Its lease ends, another worker takes over, and the first wakes up and "
        "writes.\n"
    )
    with _database(page, database) as url, _tables(url) as engine:
        with page.working("Starting two workers …"):
            actors = [Actor(name, url, page.tell) for name in "AB"]
        with actors[0] as a, actors[1] as b:
            _without_a_guard(page, engine, a, b)
            _with_fencelock(page, engine, a, b)
            let_nodes_die(page, engine, b)
    return page.verdict()


@contextmanager
def _database(page: Page, database: str) -> Iterator[str]:
    if database == "postgresql":
        with page.working("Starting PostgreSQL …"):
            server = Postgres().start()
        with server:
            yield server.create_database()
    elif database == "sqlite":
        with TemporaryDirectory(prefix="fencelock-demo-") as folder:
            yield f"sqlite:///{folder}/demo.sqlite"
    else:
        page.say(f"Using {make_url(database).render_as_string()}, in tables of the demo's own.")
        yield database


@contextmanager
def _tables(url: str) -> Iterator[Engine]:
    """Make the tables of the accounts, and that of the leases where there is none; drop what was made."""
    engine = create_engine(url)
    Base.metadata.drop_all(engine)
    with Database(engine) as authority:
        made = authority.init()
    try:
        Base.metadata.create_all(engine)
        with Session(engine) as session:
            bind(session, Lease(RESOURCE, 1))
            session.add(PlainAccount(id=ACCOUNT, balance=OPENING_BALANCE))
            session.add(Account(id=ACCOUNT, balance=OPENING_BALANCE))
            session.commit()
        yield engine
    finally:
        Base.metadata.drop_all(engine)
        if made and engine.dialect.name != "sqlite":
            with engine.begin() as connection:
                connection.exec_driver_sql(f"DROP TABLE {LEASE_TABLE}")
        engine.dispose()


def _balance(engine: Engine, model: type[Account | PlainAccount]) -> int:
    with Session(engine) as session:
        return session.scalars(select(model.balance)).one()


def _without_a_guard(page: Page, engine: Engine, a: Actor, b: Actor) -> None:
    intent = (
        f"The balance is {OPENING_BALANCE}. A withdraws {WITHDRAWAL}, B deposits {DEPOSIT}: {EXPECTED} is "
        f"right. Lease {TTL:g} s, pause {PAUSE:g} s."
    )
    with page.act("1  The control: a lock, and an ordinary table", intent):
        a.do("lock", TTL, what="got the lock")
        read = a.do("read_plainly", what="reads {value}").value
        a.freeze("[bold]paused[/] (SIGSTOP)")
        b.do("lock", 30.0, what="got the lock: A's lease has ended")
        theirs = b.do("read_plainly", what="reads {value}").value
        b.do("write_plainly", theirs + DEPOSIT, what="writes {value}")
        b.do("unlock", what="{value}")
        page.note(f"balance {_balance(engine, PlainAccount)}")
        time.sleep(max(0.0, PAUSE - TTL))
        a.wake("[bold]wakes up[/]")
        a.do("write_plainly", read - WITHDRAWAL, what="writes {value}, as if nothing had happened")
        a.do("unlock", what="{value}")
        final = _balance(engine, PlainAccount)
        page.note(f"balance [bold red]{final}[/]: B's {DEPOSIT} are gone")
    page.claim(
        "Control: without a guard, the paused holder destroys the other's update",
        f"balance {final} instead of {EXPECTED}",
        holds=final == OPENING_BALANCE - WITHDRAWAL,
    )


def _with_fencelock(page: Page, engine: Engine, a: Actor, b: Actor) -> None:
    intent = "The same lock and the same pause. The lock has come with a token; now the table has a fence."
    with page.act("2  The same lock, and a fenced table", intent):
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
