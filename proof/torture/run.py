"""One run, from the start of its servers to its verdict."""

from __future__ import annotations

import random
import secrets
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import redis
from sqlalchemy import Engine, make_url

from fencelock.authority.database.database import Database
from fencelock.authority.redlock.redlock import Redlock
from proof.servers import Etcd, Nodes, Postgres, ZooKeeper
from proof.servers.galera import Galera
from proof.servers.members import Members
from proof.servers.patroni import Patroni
from proof.torture import clocks, table
from proof.torture.checker import Verdict, check_file
from proof.torture.clocks import Clocks
from proof.torture.clusters import CLUSTER_FAULTS
from proof.torture.crew import Crew
from proof.torture.doubt import Doubt
from proof.torture.edges import weaken
from proof.torture.faults import start_lanes
from proof.torture.history import VERSION, Row, Run, Style, line_of
from proof.torture.journal import Journal, history_lines
from proof.torture.lease_connections import LeaseConnections
from proof.torture.lies import Liar
from proof.torture.naive import NaiveLeases
from proof.torture.plan import names
from proof.torture.proxy import Proxies
from proof.torture.service import Service
from proof.torture.settings import CLUSTERS, ETCD, Settings
from proof.torture.stage import Stage
from proof.torture.worker import IMPATIENT, Places, store_on

#: Seconds after which a run in which nothing is acquired is given up.
STALLED_AFTER: Final = 120.0
_TICK: Final = 0.1
_NODE_SETTINGS: Final = {"auto-aof-rewrite-min-size": "16mb"}


@dataclass(frozen=True, slots=True)
class Result:
    verdict: Verdict
    history: Path
    skipped: dict[str, str]
    trouble: tuple[str, ...]
    interrupted: bool


def skipped_faults(settings: Settings) -> dict[str, str]:
    """Return which faults cannot be had with these settings on this machine, and why."""
    skipped = settings.skipped()
    if "clock" in settings.faults and clocks.find_library() is None:
        skipped.setdefault("clock", clocks.MISSING)
    return skipped


def run(settings: Settings, tell: Callable[[float, int], None] = lambda *_: None) -> Result:
    """Make a run, and judge it; KeyboardInterrupt ends it before its time.

    Args:
        settings: of the run. The folder for its output must exist.
        tell: is called now and then, with the seconds since the start and the number of acquisitions.

    Raises:
        ServerError: a server could not be started.
        FencelockError: the nodes could not be initialised.
        sqlalchemy.exc.SQLAlchemyError: the database cannot be used.
    """
    skipped = skipped_faults(settings)
    faults = [fault for fault in settings.faults if fault not in skipped]
    fault_journal = settings.output / "faults.jsonl"
    with _servers(settings, faults) as servers, Journal(fault_journal) as journal:
        began = _first_line(settings, servers)
        crew = Crew(settings, servers.places)
        stage = Stage(settings, crew, journal, servers.authority, servers.places.namespace, servers.tools)
        try:
            interrupted = _supervise(stage, faults, tell)
        finally:
            stage.over.set()
            crew.stop()
        if not interrupted:
            _await_healthy(servers.tools)
        servers.engine.dispose()  # connections that a fault has ended
        rows = table.read_rows(servers.engine, guard=settings.guard)
    history = settings.output / "history.jsonl"
    _merge(history, began, crew, fault_journal, rows)
    return Result(check_file(history), history, skipped, (*crew.broken, *stage.trouble), interrupted)


def _await_healthy(tools: Sequence[object]) -> None:
    """Wait until a cluster has got over its last fault."""
    deadline = time.monotonic() + STALLED_AFTER
    for cluster in tools:
        if isinstance(cluster, Galera | Patroni | Members):
            while not cluster.is_healthy() and time.monotonic() < deadline:
                time.sleep(_TICK)


def _merge(history: Path, began: Run, crew: Crew, faults: Path, rows: Sequence[Row]) -> None:
    with history.open("w", encoding="utf-8") as merged:
        merged.write(line_of(began))
        for life in crew.lives():
            merged.writelines(history_lines(life))
            life.journal.unlink()
        merged.write(faults.read_text(encoding="utf-8"))
        faults.unlink()
        merged.writelines(map(line_of, rows))
    for log in history.parent.glob("worker*.log"):
        if not log.stat().st_size:
            log.unlink()


def _supervise(stage: Stage, faults: Sequence[str], tell: Callable[[float, int], None]) -> bool:
    """Let workers work and faults happen until it is enough; return whether a user interrupted it."""
    lanes = []
    try:
        _wait_for_the_first(stage.crew)
        lanes = start_lanes(stage, faults)
        _watch(stage, CLUSTER_FAULTS.keys() & set(faults), tell)
    except KeyboardInterrupt:
        return True
    finally:
        stage.over.set()
        for lane in lanes:
            lane.join()
    return False


def _wait_for_the_first(crew: Crew) -> None:
    deadline = time.monotonic() + STALLED_AFTER
    while crew.check() and not crew.acquired and time.monotonic() < deadline:
        time.sleep(_TICK)


def _watch(stage: Stage, awaited: set[str], tell: Callable[[float, int], None]) -> None:
    """Return when it is enough, or when something went wrong with the run itself.

    Acquisitions are enough when each of the awaited faults was made as well.
    """
    settings, crew = stage.settings, stage.crew
    began = last = time.monotonic()
    before = -1
    while crew.check() and not stage.trouble:
        now, acquired = time.monotonic(), crew.acquired
        tell(now - began, acquired)
        if acquired > before:
            before, last = acquired, now
        elif now - last > STALLED_AFTER:
            stage.trouble.append(f"nothing was acquired for {STALLED_AFTER:g} s")
        if settings.duration is not None and now - began >= settings.duration:
            return
        if settings.acquisitions is not None and acquired >= settings.acquisitions and awaited <= stage.made:
            return
        time.sleep(_TICK)


@dataclass(frozen=True, slots=True)
class _Servers:
    places: Places
    authority: Redlock | None
    engine: Engine
    tools: Sequence[object]


@contextmanager
def _servers(settings: Settings, faults: Sequence[str]) -> Iterator[_Servers]:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fencelock-")))
        tools: list[object] = []
        urls: Sequence[str] = settings.nodes
        behind: Sequence[str] = ()
        if settings.embedded_nodes:
            if "clock" in faults:
                tools.append(Clocks(folder / "clocks", settings.nodes_count))
            tools.append(nodes := stack.enter_context(_nodes(settings, faults, tools)))
            urls = nodes.urls
        namespace = f"fencelock-torture-{secrets.token_hex(4)}"
        authority = None
        if settings.on_nodes:
            authority = stack.enter_context(Redlock(urls, namespace=namespace, recover=False, **IMPATIENT))
            authority.init(max_ttl=settings.ttl)
            if settings.nodes:
                stack.callback(_remove_keys, urls, namespace)
        databases = stack.enter_context(_databases(settings, folder, faults, tools))
        database = databases[0]
        engine = table.engine_on(database)
        stack.callback(engine.dispose)
        fences = Style.GATE in settings.styles
        table.create_tables(engine, names(settings), fences=fences)
        stack.callback(table.drop_tables, engine, fences=fences)
        if "partition" in faults:
            proxies = stack.enter_context(Proxies(urls, random.Random(f"{settings.seed}/weather")))
            tools.append(proxies)
            behind = proxies.urls
        if "database-kill" in faults:
            tools.append(doubt := Doubt(database))
            doubt.prepare(each.name for each in table.tables(fences=fences))
        leases = _leases(settings, databases, namespace, faults, stack, tools)
        if "lie" in faults:
            tools.append(_liar(settings, urls, namespace, leases, stack))
        if settings.database in CLUSTERS and settings.quorum and settings.guard:
            tools.append(stack.enter_context(Service(databases, names(settings))))
        places = Places(urls, behind, namespace, databases, leases, settings.output)
        yield _Servers(places, authority, engine, tools)


def _leases(  # noqa: PLR0917
    settings: Settings,
    databases: Sequence[str],
    namespace: str,
    faults: Sequence[str],
    stack: ExitStack,
    tools: list[object],
) -> Sequence[str]:
    """Return by which URLs the workers ask for leases, in turn; add a store to the tools."""
    if settings.on_database:
        _prepare_leases(settings, databases[0], stack)
        return _ways_to_leases(settings, databases, faults, stack, tools)
    if settings.on_store:
        store: Etcd | ZooKeeper = Etcd(partitions=True) if settings.authority == ETCD else ZooKeeper(3)
        stack.enter_context(store)
        tools.append(store)
        direct = f"{store.url}/{namespace}"
        if f"{settings.authority}-silence" not in faults:
            return [direct]
        scheme, _, hosts = store.url.partition("://")
        servers = [f"tcp://{host}" for host in hosts.split(",")]
        tools.append(proxies := stack.enter_context(Proxies(servers, random.Random(settings.seed))))
        through = ",".join(url.removeprefix("tcp://") for url in proxies.urls)
        return [direct, f"{scheme}://{through}/{namespace}"]
    return ()


def _liar(
    settings: Settings, urls: Sequence[str], namespace: str, leases: Sequence[str], stack: ExitStack
) -> Liar:
    if not settings.mends:
        weaken(["lie"])
    authority: Any
    if settings.on_nodes:
        authority = Redlock(urls, namespace=namespace, recover=False)
    else:
        authority = Database(leases[0]) if settings.on_database else store_on(leases[0], settings)
    return Liar(stack.enter_context(authority))


def _ways_to_leases(
    settings: Settings, databases: Sequence[str], faults: Sequence[str], stack: ExitStack, tools: list[object]
) -> Sequence[str]:
    """Return by which URLs the workers ask for leases, in turn."""
    leases = databases
    if "connection-end" in faults:
        tools.append(connections := LeaseConnections(databases, ours=settings.database == "postgresql"))
        leases = connections.urls
    if "lease-silence" in faults:
        leases = [*leases, _that_falls_silent(leases[0], settings, stack, tools)]
    return leases


def _that_falls_silent(database: str, settings: Settings, stack: ExitStack, tools: list[object]) -> str:
    """Return a URL for every second worker, which leads through a proxy."""
    url = make_url(database)
    socket = f"unix://{url.query.get('host')}/.s.PGSQL.{url.query.get('port')}"
    upstream = socket if url.host is None else f"tcp://{url.host}:{url.port or 3306}"
    tools.append(proxies := stack.enter_context(Proxies([upstream], random.Random(settings.seed))))
    through = url.difference_update_query(["host", "port"])
    through = through.set(host="127.0.0.1", port=urlsplit(proxies.urls[0]).port)
    return through.render_as_string(hide_password=False)


def _prepare_leases(settings: Settings, database: str, stack: ExitStack) -> None:
    if table.has_lease_table(database):
        raise ValueError("the database has a table of leases, which is yours: name a database without one")
    if not settings.quorum:
        NaiveLeases.prepare(database, names(settings))
        stack.callback(NaiveLeases.drop, database)
        return
    stack.callback(table.drop_lease_table, database)
    with Database(database) as authority:
        authority.init()


def _nodes(settings: Settings, faults: Sequence[str], tools: Sequence[object]) -> Nodes:
    return Nodes(
        settings.nodes_count,
        executable=next((tool.program for tool in tools if isinstance(tool, Clocks)), None),
        appendfsync="everysec" if "node-rollback" in faults else None,
        settings=_NODE_SETTINGS,
    )


@contextmanager
def _databases(
    settings: Settings, folder: Path, faults: Sequence[str], tools: list[object]
) -> Iterator[Sequence[str]]:
    """Yield URLs of the run's database, for the workers in turn; add the servers to break to the tools."""
    if settings.database == "postgresql":
        # So that a COMMIT can be held up after it has taken place: see `doubt`.
        with Postgres(settings={"synchronous_commit": "on"}) as server:
            yield [server.create_database()]
    elif settings.database == "sqlite":
        yield [f"sqlite:///{folder}/rows.sqlite"]
    elif settings.database == "galera":
        with Galera() as nodes:
            tools.append(nodes)
            yield nodes.urls
    elif settings.database == "patroni":
        with ExitStack() as stack:
            tools.append(cluster := stack.enter_context(Patroni(synchronous=settings.synchronous)))
            ports = cluster.ports
            if "silence" in faults:
                upstream = [f"tcp://127.0.0.1:{port}" for port in ports]
                tools.append(proxies := stack.enter_context(Proxies(upstream, random.Random(settings.seed))))
                ports = [urlsplit(url).port or 0 for url in proxies.urls]
            yield cluster.urls(ports)
    else:
        yield [settings.database]


def _remove_keys(urls: Sequence[str], namespace: str) -> None:
    """Leave nothing on the user's nodes, as far as they can be reached."""
    for url in urls:
        with suppress(redis.RedisError), redis.Redis.from_url(url, socket_timeout=10) as client:
            for key in client.scan_iter(f"{{{namespace}}}*"):
                client.delete(key)


def _first_line(settings: Settings, servers: _Servers) -> Run:
    return Run(
        VERSION,
        version("fencelock"),
        datetime.now(UTC).astimezone().isoformat(timespec="seconds"),
        time.monotonic_ns(),
        _for_json(settings),
        {
            **_about_nodes(servers.places.nodes),
            **_about_store(servers.tools),
            "database": _about_database(servers.engine),
        },
    )


def _for_json(settings: Settings) -> dict[str, Any]:
    """Return the settings without secrets, because URLs may hold passwords."""
    said = asdict(settings)
    said["nodes"] = list(Redlock(settings.nodes).nodes) if settings.nodes else []
    if not settings.embedded_database:
        said["database"] = table.engine_on(settings.database).url.render_as_string(hide_password=True)
    return {**said, "output": str(settings.output), "faults": list(settings.faults)}


def _about_nodes(urls: Sequence[str]) -> dict[str, str]:
    if not urls:
        return {}
    about: set[str] = set()
    for url in urls:
        with suppress(redis.RedisError), redis.Redis.from_url(url, socket_timeout=10) as client:
            info: Any = client.info("server")
            valkey = info.get("valkey_version")
            about.add(f"Valkey {valkey}" if valkey else f"Redis {info['redis_version']}")
    return {"nodes": f"{len(urls)} × {' and '.join(sorted(about))}"}


def _about_store(tools: Sequence[object]) -> dict[str, str]:
    for tool in tools:
        if isinstance(tool, Etcd):
            return {"store": f"{tool.count} × etcd {tool.ctl('version').split()[2]}"}
        if isinstance(tool, ZooKeeper):
            version = tool.ask(0, "srvr").partition(": ")[2].partition("-")[0]
            return {"store": f"{tool.count} × ZooKeeper {version}"}
    return {}


def _about_database(engine: Engine) -> str:
    with engine.connect() as connection:
        numbers = connection.dialect.server_version_info or ()
    return f"{engine.dialect.name} {'.'.join(map(str, numbers))}"
