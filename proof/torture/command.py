"""`python -m proof.torture`: options, a question before it uses servers of yours, output."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from sqlalchemy import make_url
from sqlalchemy.exc import SQLAlchemyError
from typer import Option

from fencelock._engines import blocking_engine
from fencelock.errors import FencelockError
from proof.servers import ServerError
from proof.torture.checker import describe
from proof.torture.history import Manner, Style
from proof.torture.picture import report
from proof.torture.run import Result, run, skipped_faults
from proof.torture.settings import FAULTS, NODES, PROMISED, Settings, default_faults
from proof.torture.table import has_fence_table

_RIGHT, _WRONG, _NO_RUN = 0, 1, 2
_FAULT = (
    f"One kind of fault, may be given again; all by default: {', '.join(FAULTS)}, and those of a cluster."
)
_STYLE = (
    "How writers come by what they write back, may be given again; by default all for which something is "
    "promised. core is a control, and must end WRONG."
)
_DATABASE = (
    "postgresql (embedded), sqlite, galera or patroni (three nodes that are set up), or the SQLAlchemy URL "
    "of your own."
)
_MANNER = (
    "How holders behave, may be given again; each as often as the others. By default most are quick. large "
    "comes with the fault partial-write only."
)
_USE = "[bold red]This is going to use servers of yours.[/] It is for test deployments only:"
_USE_NODES = (
    "  nodes: keys of a new namespace fencelock-torture-… are written, and removed at the end; other keys "
    "are not touched, and the nodes are not broken"
)
_USE_DATABASE = (
    "  database: the tables fencelock_torture_counters, …_versioned_counters and …_plain_counters are "
    "dropped, made again, written to as fast as it goes, and dropped at the end; a fence table is made for "
    "that time where there is none"
)
_USE_LEASES = (
    "  leases: the table fencelock_leases (or …_torture_naive_leases) is made, and dropped at the end; "
    "connections of this run's workers are ended, those of others are not"
)


def torture(
    *,
    fault: Annotated[list[str] | None, Option(help=_FAULT)] = None,
    duration: Annotated[float | None, Option(help="Seconds; 60 unless --acquisitions is given.")] = None,
    acquisitions: Annotated[int | None, Option(help="End after so many.")] = None,
    workers: Annotated[int, Option(help="Worker processes; every other one runs asyncio tasks.")] = 6,
    tasks: Annotated[int, Option(help="Tasks in each of these; 0 for blocking workers only.")] = 8,
    resources: Annotated[int, Option(help="How many are locked; fewer are fought for more.")] = 20,
    ttl: Annotated[float, Option(help="Seconds that a lease lasts.")] = 1.0,
    pause: Annotated[
        float | None, Option(help="Longest pause of a worker, in seconds; the shortest is a ttl. Twice that.")
    ] = None,
    every: Annotated[float, Option(help="Seconds between faults of one kind of target, on average.")] = 1.0,
    writes: Annotated[
        float, Option(help="Share of the holders that write to the database, from 0 to 1.")
    ] = 0.5,
    think: Annotated[float, Option(help="Seconds between read and write, on average.")] = 0.01,
    authority: Annotated[
        str,
        Option(help="What grants the leases: nodes; database, that of the run; etcd or zookeeper."),
    ] = NODES,
    nodes: Annotated[
        list[str] | None,
        Option(help="Your own nodes, once each, instead of embedded ones: redis://host:6379"),
    ] = None,
    nodes_count: Annotated[int, Option(help="How many embedded nodes.")] = 5,
    database: Annotated[str, Option(help=_DATABASE)] = "postgresql",
    seed: Annotated[int | None, Option(help="Of all that is chosen at random; random by default.")] = None,
    output: Annotated[Path | None, Option(help="A new folder; named by the time by default.")] = None,
    style: Annotated[list[Style] | None, Option(help=_STYLE)] = None,
    manner: Annotated[list[Manner] | None, Option(help=_MANNER)] = None,
    without_mends: Annotated[
        bool,
        Option("--without-mends", help="A control: the library lacks what it has against the chosen faults."),
    ] = False,
    without_guard: Annotated[
        bool, Option("--without-guard", help="A control: the table has no fence. Must end WRONG.")
    ] = False,
    naive_tokens: Annotated[
        bool, Option("--naive-tokens", help="A control: tokens are minted the obvious way. Must end WRONG.")
    ] = False,
    synchronous: Annotated[
        bool, Option("--synchronous", help="With --database patroni: synchronous_mode on.")
    ] = False,
    yes: Annotated[bool, Option("--yes", help="Do not ask before using servers of yours.")] = False,
) -> None:
    """Break things on purpose while workers lock and write, then check that every promise was kept.

    Exit status 0 if it was, 1 if one was broken, 2 if the run could not be made.
    """
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    try:
        settings = Settings(
            output=output or Path(f"torture-{datetime.now(UTC).astimezone():%Y%m%d-%H%M%S}"),
            faults=tuple(dict.fromkeys(fault or default_faults(authority, database))),
            duration=60.0 if duration is None and acquisitions is None else duration,
            acquisitions=acquisitions,
            workers=workers,
            tasks=0 if naive_tokens else tasks,
            authority=authority,
            nodes=tuple(url for each in nodes or () for url in each.split(",")),
            nodes_count=nodes_count,
            database=database,
            resources=resources,
            ttl=ttl,
            pause=2 * ttl if pause is None else pause,
            every=every,
            writes=0.0 if naive_tokens else writes,
            think=think,
            seed=random.SystemRandom().randrange(1_000_000) if seed is None else seed,
            styles=tuple(dict.fromkeys(style or PROMISED)),
            manners=tuple(dict.fromkeys(manner or Manner)),
            mends=not without_mends,
            guard=not without_guard,
            quorum=not naive_tokens,
            synchronous=synchronous,
        )
    except ValueError as error:
        _refuse(console, str(error))
    if settings.output.exists():
        _refuse(console, f"{output} exists already: name a new folder")
    if settings.nodes or not settings.embedded_database:
        _confirm(console, settings, yes=yes)
    result = _run(console, settings)
    _tell(console, result)
    raise typer.Exit(_WRONG if not result.verdict.right else _NO_RUN if result.trouble else _RIGHT)


def _refuse(console: Console, sentence: str) -> NoReturn:
    console.print(sentence, style="red", markup=False)
    raise typer.Exit(_NO_RUN) from None


def _confirm(console: Console, settings: Settings, *, yes: bool) -> None:
    console.print(_USE)
    if settings.nodes:
        console.print(_USE_NODES, markup=False)
    if not settings.embedded_database:
        console.print(_USE_DATABASE, markup=False)
        if settings.on_database:
            console.print(_USE_LEASES, markup=False)
    if yes:
        return
    if sys.stdin is None or not sys.stdin.isatty():  # None where a service manager has closed it
        _refuse(console, "no terminal is there to confirm it on: give --yes if that is what you want")
    if not typer.confirm("Go on?", err=True):
        _refuse(console, "Nothing was done")


def _run(console: Console, settings: Settings) -> Result:
    skipped = skipped_faults(settings)
    for fault, why in skipped.items():
        console.print(f"without {fault}: {why}", style="yellow", markup=False)
    faults = [fault for fault in settings.faults if fault not in skipped]
    if not faults:
        _refuse(console, "None of the faults can be had, so that there is nothing to see")
    console.print(f"seed {settings.seed}, faults: {', '.join(faults)}", markup=False)
    console.print(f"writing to {settings.output}; Ctrl-C ends it, with a verdict", markup=False)
    if not settings.embedded_database:
        _check_database(console, settings.database)
        settings = _without_gates_of_others(console, settings)
    try:
        settings.output.mkdir(parents=True)
        with _bar(console, settings) as tell:
            return run(settings, tell)
    except KeyboardInterrupt:
        _refuse(console, "Interrupted before there was anything to judge")
    except (FencelockError, ServerError, SQLAlchemyError, ValueError, OSError) as error:
        _refuse(console, f"{type(error).__name__}: {str(error).splitlines()[0]}")


def _check_database(console: Console, url: str) -> None:
    shown = repr(url)
    try:
        shown = make_url(url).render_as_string(hide_password=True)
        blocking_engine(url).connect().close()
    except (SQLAlchemyError, ImportError) as error:
        _refuse(
            console,
            f"{shown} is no database that can be used: {str(error).splitlines()[0]}\n"
            "Name one of: postgresql, sqlite, or a SQLAlchemy URL such as postgresql+psycopg://user@host/name",
        )


def _without_gates_of_others(console: Console, settings: Settings) -> Settings:
    """Leave a fence table alone that is there already."""
    if Style.GATE not in settings.styles or not has_fence_table(settings.database):
        return settings
    console.print("without the style gate: the database has a fence table, which is yours", style="yellow")
    return replace(settings, styles=tuple(each for each in settings.styles if each is not Style.GATE))


@contextmanager
def _bar(console: Console, settings: Settings) -> Iterator[Callable[[float, int], None]]:
    columns = (
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TextColumn("{task.fields[acquired]:,} acquired"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=1.0, acquired=0)

        def tell(seconds: float, acquired: int) -> None:
            of_time = seconds / settings.duration if settings.duration else 0.0
            of_count = acquired / settings.acquisitions if settings.acquisitions else 0.0
            progress.update(task, completed=max(of_time, of_count), acquired=acquired)

        yield tell


def _tell(console: Console, result: Result) -> None:
    if result.interrupted:
        console.print("Interrupted: the verdict is about what there is", style="yellow")
    trace, picture = report(result.history, result.verdict)
    files = {"history": result.history, "trace": trace, "picture": picture}
    out = Console(soft_wrap=True, highlight=False)
    for line in (*describe(result.verdict), *(f"{name:<16}{path}" for name, path in files.items())):
        out.print(line, markup=False)
    for sentence in result.trouble:
        console.print(f"The run itself went wrong: {sentence}", style="red", markup=False)
