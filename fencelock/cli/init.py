"""`fencelock init`: prepares a database or nodes to grant locks."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import Annotated

import typer
from redis import Redis
from redis.exceptions import RedisError

from fencelock._engines import url_of, with_blocking_driver
from fencelock._locking import factory_of
from fencelock.authority.database.database import Database
from fencelock.authority.redlock.redlock import DEFAULT_NAMESPACE, Redlock
from fencelock.authority.redlock.transport.endpoints import as_redis, split_urls
from fencelock.cli import shared
from fencelock.max_fence import highest_fence


def init(
    urls: Annotated[
        list[str] | None,
        typer.Argument(
            help="The URL of a database (postgresql+psycopg://…), or of each node: redis://host:6379 … "
            "FENCELOCK_URL by default, which shows no password to other users of this machine."
        ),
    ] = None,
    *,
    base: Annotated[
        int | None,
        typer.Option(help="First value of the counters: Unix ms by default; 0 makes tokens 1, 2, 3 …"),
    ] = None,
    max_ttl: Annotated[
        float | None,
        typer.Option(
            help="Longest lease in seconds, 60 by default; a restarted node does not vote for that time."
        ),
    ] = None,
    after_loss: Annotated[
        bool,
        typer.Option(
            "--after-loss",
            help="Start above all tokens that the database has seen: after the loss of all data, or before "
            "another authority grants the locks.",
        ),
    ] = False,
    database: Annotated[
        list[str] | None,
        shared.database_option(
            "For --after-loss: URL of a database with fenced tables; repeat for each database."
        ),
    ] = None,
    yes: Annotated[
        bool, typer.Option("--yes", help="Do not ask before --after-loss deletes old keys on the nodes.")
    ] = False,
    allow_eviction: Annotated[
        bool,
        typer.Option("--allow-eviction", help="Accept nodes that drop keys when their memory is full."),
    ] = False,
    namespace: Annotated[str, typer.Option(help="Prefix of every key on the nodes.")] = DEFAULT_NAMESPACE,
) -> None:
    """Create a database's table of leases, or initialise N blank nodes; once in their life.

    All nodes must be reachable. etcd and ZooKeeper need this only for --after-loss.
    """
    urls = urls or split_urls(os.environ.get("FENCELOCK_URL", ""))
    if not urls:
        shared.fail("which database or nodes? Name them, or set FENCELOCK_URL")
    if after_loss != bool(database):
        shared.fail(
            "--after-loss and --database belong together: only the database knows which tokens have been "
            "used. Name every database with fenced tables, such as --database postgresql+psycopg://user@host/name"
        )
    with shared.errors_as_sentences():
        above = _highest_fence(database or []) if after_loss else None
        factory = factory_of(urls[0])
        if factory is not Redlock and (len(urls) > 1 or allow_eviction or (base, max_ttl) != (None, None)):
            shared.fail(
                "a database, etcd or ZooKeeper is named by one URL, and takes no option of nodes but "
                "--after-loss"
            )
        if factory is Database:
            with shared.refusing_databases(shared.without_password(urls[0]), "used"):
                authority = Database(with_blocking_driver(url_of(urls[0])))
            with authority:
                made = authority.init(above=above)
            shared.say(f"the table of leases {'was made' if made else 'is there'}")
        elif factory is not Redlock:
            with factory(urls[0]) as store:
                store.init(above=above)
            shared.say("it answers; locks need nothing more")
        else:
            with Redlock(",".join(urls), namespace=namespace, recover=False) as quorum:
                if after_loss:
                    max_ttl = max_ttl or _longest_lease(quorum, yes=yes)
                    _clear(quorum, yes=yes)
                done = quorum.init(base=base, max_ttl=max_ttl, above=above, allow_eviction=allow_eviction)
                count = len(quorum.nodes)
            said = "initialised" if done else "had been initialised before"
            said += "" if done or above is not None else "; nothing was changed"
            shared.say(f"{count} {'node' if count == 1 else 'nodes'} {said}")
            if count == 1:
                _warn_of_restarts(urls[0])
    if above:
        shared.say(f"New tokens are larger than {above}, the largest that the databases have seen")
    shared.tell_programs(urls, namespace)


def _warn_of_restarts(url: str) -> None:
    """Say that a single node is blank after a restart, if it writes no append-only file."""
    if "+" in url.partition("://")[0]:
        return  # the URL names Sentinel or a cluster, and not the node itself
    patience = {"socket_timeout": 2, "socket_connect_timeout": 2}
    with suppress(RedisError), Redis.from_url(as_redis(url), **patience) as node:
        if node.info("persistence").get("aof_enabled") == 0:
            shared.say(
                "It writes no append-only file, so after a restart it is blank, and grants nothing until "
                "you run `fencelock init --after-loss`: set appendonly yes"
            )


def _longest_lease(quorum: Redlock, *, yes: bool) -> float | None:
    """Return the longest lease that a node still knows, else that which an operator names."""
    known = [status.max_ttl for status in quorum.status() if status.max_ttl is not None]
    if known:
        shared.say(f"The longest lease stays {max(known):g} s")
        return max(known)
    said = "no node knows the longest lease; 60 s is the default, and --max-ttl names another"
    if yes or not sys.stdin.isatty():
        shared.say(said, "yellow")
        return None
    seconds = float(typer.prompt(f"{said}. How many seconds", default=60.0, type=float, err=True))
    return seconds if seconds > 0 else shared.fail("a lease lasts longer than 0 seconds")


def _clear(quorum: Redlock, *, yes: bool) -> None:
    """Delete the remaining keys on the nodes, if the operator agrees."""
    left = quorum.remains()
    if not left:
        return
    shared.say(f"{', '.join(left)} still {'holds' if len(left) == 1 else 'hold'} keys from before")
    others = sorted({address for addresses in left.values() for address in addresses} - set(quorum.nodes))
    if others:
        shared.say(f"{', '.join(others)} must be gone for good", "yellow")
    if not yes:
        question = "Delete these keys, and no others? No program may use these nodes now (--yes does not ask)"
        typer.confirm(question, abort=True, err=True)
    shared.say(f"{quorum.clear()} keys deleted")


def _highest_fence(databases: list[str]) -> int:
    highest = 0
    for url in databases:
        shown = shared.without_password(url)
        with shared.database_at(url) as engine, engine.connect() as connection:
            fence, tables = highest_fence(connection)
        if not tables:
            shared.fail(
                f"{shown} has no table with a column last_fencing_token: it cannot tell which tokens have "
                "been used. Name the database that holds the fenced tables"
            )
        shared.say(f"{shown}: the highest fence of {tables} fenced tables is {fence}")
        highest = max(highest, fence)
    return highest
