"""`fencelock doctor`: problems of servers, databases and models, with advice."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from redis import Redis
from redis.exceptions import RedisError
from rich.padding import Padding
from sqlalchemy import Connection, MetaData, inspect

from fencelock.authority.database.database import Database
from fencelock.authority.database.statements import SERVER_BITS
from fencelock.authority.line.line import LineAuthority
from fencelock.authority.redlock.admin import NodeState
from fencelock.authority.redlock.redlock import DEFAULT_NAMESPACE, Redlock
from fencelock.authority.redlock.transport.endpoints import as_redis, split_urls
from fencelock.cli import shared
from fencelock.cli.database_settings import Finding, note, of_galera, of_granting, of_settings
from fencelock.errors import PAGES, FencelockError, LockTimeoutError
from fencelock.guard import triggers
from fencelock.guard.tables import FENCE_TABLE, fenced_table, trigger_of
from fencelock.max_fence import fenced_tables, highest_fence
from fencelock.tokens import split

if TYPE_CHECKING:
    from fencelock._locking import Shipped

_OLDEST_SERVER: Final = (6, 2)
#: Seconds for which clocks are compared, and the part of them that clocks may drift: see `lease.validity`.
_CLOCK_LOOK: Final = 1.0
_MOST_DRIFT: Final = 0.01
_PROBE: Final = "fencelock:doctor"


def doctor(
    *,
    url: shared.Url = "",
    namespace: shared.Namespace = DEFAULT_NAMESPACE,
    database: Annotated[
        list[str] | None, shared.database_option("SQLAlchemy URL of a database with fenced tables.")
    ] = None,
    models: Annotated[
        str, typer.Option(help="The metadata of the program's models, such as shop.models:Base.")
    ] = "",
    as_json: shared.AsJson = False,
) -> None:
    """Look for problems of the nodes, the databases and the models. Status 3: there are problems."""
    found: list[Finding] = []
    metadata = _metadata(models)
    given = split_urls(url or os.environ.get("FENCELOCK_URL", ""))
    with shared.authority_of(url, namespace) as authority:
        if isinstance(authority, Redlock):
            found += _of_nodes(authority, given)
        if isinstance(authority, LineAuthority):
            found += _of_line(given[0])
        where = "nodes" if isinstance(authority, Redlock) else shared.without_password(given[0])
        token = _new_token(authority, where, found)
        for its in database or ():
            is_above = _is_above_nodes if isinstance(authority, Redlock) else _is_above_times
            look = partial(_of_database, token=token, metadata=metadata, is_above=is_above)
            found += _look_into(its, look)
        if isinstance(authority, Database):
            found += of_galera(authority.url)
            found += _look_into(given[0], partial(of_granting, url=authority.url))
    if as_json:
        shared.print_json([asdict(each) for each in found])
    else:
        _show(found)
    if any(each.is_problem for each in found):
        raise typer.Exit(shared.FOUND_NOTHING)


def _show(found: list[Finding]) -> None:
    console = shared.console()
    places: dict[tuple[bool, str, str], dict[str, None]] = {}
    for each in sorted(found, key=lambda each: not each.is_problem):
        places.setdefault((each.is_problem, each.what, each.advice), {})[each.where] = None
    for (is_problem, what, advice), where in places.items():
        console.print("[red]problem[/]" if is_problem else "[yellow]note[/]", shared.shown(", ".join(where)))
        console.print(Padding("\n".join(map(shared.shown, [*what.split("\n"), f"→ {advice}"])), (0, 0, 1, 8)))
    if not found:
        console.print("nothing was found")


def _new_token(authority: Shipped, where: str, found: list[Finding]) -> int | None:
    """Return a new token; if none is granted, return None and add the reason to `found`."""
    try:
        with authority.lock(_PROBE, ttl=1, timeout=2, renew=False, if_lost="warn") as token:
            return token
    except LockTimeoutError as error:
        found.append(note(where, str(error), "another doctor is at work: try again"))
    except FencelockError as error:
        page = "recover" if isinstance(authority, Redlock) else "authorities"
        found.append(Finding(where, f"grants nothing: {error}", f"{PAGES}/{page}/, {PAGES}/errors/"))
    return None


# Nodes.


def _of_nodes(authority: Redlock, urls: list[str]) -> Iterator[Finding]:
    reached = []
    for url, node in zip(urls, authority.status(), strict=False):
        if node.state is not NodeState.UNREACHABLE:
            reached.append((url, node.address))
        if node.state is not NodeState.ADMITTED:
            detail = f", {node.detail}" if node.detail else ""
            advice = "it votes again by itself" if node.recovering_for else f"{PAGES}/recover/"
            yield Finding(node.address, f"does not vote: {node.state.value}{detail}", advice)
    if (count := len(authority.nodes)) % 2 == 0:
        yield note("nodes", f"{count} nodes survive no more losses than {count - 1}", "use 1, 3 or 5")
    with ThreadPoolExecutor() as threads:
        for findings in threads.map(lambda each: _of_url(*each), reached):
            yield from findings


def _of_url(url: str, name: str) -> list[Finding]:
    if "+" in url.partition("://")[0]:
        return [note(name, "is behind Sentinel or a cluster", "check its servers one by one")]
    try:
        with Redis.from_url(as_redis(url), socket_timeout=5, socket_connect_timeout=5) as node:
            return list(_of_node(node, name))
    except RedisError as error:
        return [Finding(name, f"cannot be asked: {error}", "check that it runs, and that its ACL has +info")]


def _of_node(node: Redis, name: str) -> Iterator[Finding]:
    info: dict[str, Any] = node.info()
    version = str(info.get("valkey_version") or info.get("redis_version", ""))
    if tuple(int(part) for part in version.split(".")[:2] if part.isdecimal()) < _OLDEST_SERVER:
        yield Finding(name, f"is version {version}", "use Redis 6.2 or later, or Valkey")
    policy = info.get("maxmemory_policy", "noeviction")
    if info.get("maxmemory") and policy != "noeviction":
        what = f"drops keys when its memory is full ({policy}): held locks, or the record of all tokens"
        advice = "CONFIG SET maxmemory-policy noeviction, and in its configuration file (or parameter group)"
        yield Finding(name, what, advice)
    if info.get("evicted_keys"):
        yield note(name, f"has dropped {info['evicted_keys']} keys since its start", "give it more memory")
    if not info.get("aof_enabled"):
        yield note(
            name,
            "writes no append-only file: after a restart it is blank",
            "appendonly yes; a single node needs it, of three or five each is admitted again by the others",
        )
    if info.get("connected_slaves") and "min_slaves_good_slaves" not in info:  # min-replicas-to-write is 0
        what = "has replicas, and may be replaced by one that has not heard of the last grants"
        yield note(name, what, "fencelock notices that and waits; independent nodes have no such outage")
    yield from _of_clock(node, name)


def _of_clock(node: Redis, name: str) -> Iterator[Finding]:
    first, asked_first, told_first = _time_of(node)
    time.sleep(_CLOCK_LOOK)
    second, asked, told = _time_of(node)
    passed, least, most = second - first, asked - told_first, told - asked_first  # it was read in between
    if not (1 - _MOST_DRIFT) * least <= passed <= (1 + _MOST_DRIFT) * most:
        yield Finding(
            name,
            f"its clock is {100 * (2 * passed / (least + most) - 1):+.1f} % off ours",
            "correct the clocks, with an NTP client that slews",
        )


def _time_of(node: Redis) -> tuple[float, float, float]:
    """Return what its clock says, and when it was asked and had answered by ours."""
    asked = time.monotonic()
    seconds, microseconds = node.time()
    return float(seconds + microseconds / 1e6), asked, time.monotonic()


# etcd and ZooKeeper.


def _of_line(url: str) -> Iterator[Finding]:
    """Yield findings about etcd or ZooKeeper. Each server is asked separately."""
    hosts = url.partition("://")[2].partition("/")[0].partition("?")[0].rpartition("@")[2].split(",")
    if len(hosts) % 2 == 0:
        survives = "no failure" if len(hosts) == 2 else f"no more failures than {len(hosts) - 1}"  # noqa: PLR2004
        yield note(shared.without_password(url), f"{len(hosts)} servers survive {survives}", "use 1, 3 or 5")
    for host in hosts:
        with shared.new_authority(url.replace(",".join(hosts), host, 1)) as one:
            try:
                one.inspect(_PROBE)
                version = str(getattr(one, "version", str)())
            except FencelockError as error:
                yield Finding(host, f"cannot be used: {error}", "check that it runs, and reaches the others")
                continue
        its = tuple(int(part) for part in version.split("-", maxsplit=1)[0].split(".") if part.isdecimal())
        if its and (its < (3, 4, 31) or (3, 5) <= its < (3, 5, 13)):
            what = f"is etcd {version}: a paused leader may revoke a renewed lease (etcd issue 15247)"
            yield Finding(host, what, "use 3.4.31, 3.5.23 or 3.6.5; until then two may hold a lock")
        elif its and (its < (3, 5, 23) or (3, 6) <= its < (3, 6, 5)):
            what = f"is etcd {version}: a lease that was revoked may be renewed (etcd issue 20813)"
            yield note(host, what, "use 3.5.23 or 3.6.5; until then a holder notices a forced release late")


# Databases.


def _look_into(url: str, look: Callable[[Connection, str], Iterable[Finding]]) -> list[Finding]:
    """Return the findings in a database. A database that cannot be read is a finding, too."""
    shown = shared.without_password(url)
    try:
        with shared.database_at(url) as engine, engine.connect() as connection:
            return list(look(connection, shown))
    except typer.Exit:  # the reason was printed
        return [Finding(shown, "cannot be read", "check that it runs, and that the URL is right")]


def _is_above_nodes(seen: int, token: int) -> bool:
    """Compare epochs only, because counters of other resources may be higher."""
    return split(seen)[0] > split(token)[0]


def _is_above_times(seen: int, token: int) -> bool:
    """Compare the times in tokens; a minute is allowed, because other programs go on locking."""
    return (seen >> SERVER_BITS) > (token >> SERVER_BITS) + 60_000


def _of_database(
    connection: Connection,
    shown: str,
    *,
    token: int | None,
    metadata: MetaData | None,
    is_above: Callable[[int, int], bool],
) -> Iterator[Finding]:
    highest, count = highest_fence(connection)
    if not count:
        yield Finding(shown, "has no fenced table", "add the columns: op.add_fence in a migration")
    if token is not None and is_above(highest, token):
        what = f"has seen token {highest}, and {token} is granted now: writes are refused"
        yield Finding(shown, what, "start the authority above this token: fencelock init --after-loss")
    of_models = list(_of_models(connection, metadata))
    named = {found.where for found in of_models}
    has_triggers = triggers.knows(connection.dialect.name)
    for each in fenced_tables(connection) if has_triggers else ():
        name = each.name
        if name not in {FENCE_TABLE, *named} and not triggers.installed(connection, name, schema=each.schema):
            what = (
                "has no trigger of this version: other programs can lower the fence by SQL, and the guard "
                "does not notice their changes"
            )
            yield note(name, what, f"op.create_fence_trigger, where others write: {PAGES}/existing-code/")
    yield from of_models
    yield from of_settings(connection, shown)


def _of_models(connection: Connection, metadata: MetaData | None) -> Iterator[Finding]:
    inspector = inspect(connection)
    for each in metadata.sorted_tables if metadata is not None else ():
        if (fenced := fenced_table(each)) is None:
            continue
        name, where = each.name, {"schema": each.schema}
        if not inspector.has_table(name, **where):
            yield Finding(name, "is not in the database", "migrate")
            continue
        columns = {column["name"] for column in inspector.get_columns(name, **where)}
        if lacking := {fenced.fence.name, fenced.write.name} - columns:
            what = f"has no column {' and no column '.join(sorted(lacking))}"
            yield Finding(name, what, "op.add_fence in a migration adds both columns of the guard")
        elif trigger_of(each) and not triggers.installed(connection, each):
            yield Finding(
                name,
                "lacks the trigger that its model wants, or has one of an earlier version",
                "alembic autogenerate adds it",
            )
        wanted = [column.name for column in fenced.template.columns.values()]
        indexed = [[*inspector.get_pk_constraint(name, **where)["constrained_columns"]]]
        indexed += [[*filter(None, its["column_names"])] for its in inspector.get_indexes(name, **where)]
        if wanted and not any(its[0] in wanted for its in indexed if its):
            what = f"has no index that begins with {' or '.join(wanted)}, which name its resource"
            yield note(name, what, "add an index: claim_all of one resource reads the whole table")


def _metadata(name: str) -> MetaData | None:
    """Return the metadata that a text such as `shop.models:Base` names; None for an empty text."""
    if not name:
        return None
    sys.path.insert(0, "")  # the current folder is mostly the program's
    try:
        found = resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        shared.fail(f"{name!r} cannot be imported: {error}; write --models shop.models:Base")
    metadata = getattr(found, "metadata", found)
    return metadata if isinstance(metadata, MetaData) else shared.fail(f"{name!r} has no metadata")
