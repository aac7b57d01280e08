"""`python -m proof.torture`: options, questions before it uses servers of yours, output."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from sqlalchemy import make_url
from sqlalchemy.exc import SQLAlchemyError

from fencelock._engines import blocking_engine
from proof.torture.history import Style
from proof.torture.picture import report
from proof.torture.settings import FAULTS, NODES, PROMISED, Settings, default_faults

if TYPE_CHECKING:
    from proof.torture.run import Progress as HowFar
    from proof.torture.run import Result

_RIGHT, _WRONG, _NO_RUN = 0, 1, 2
_MISSING = "a run with its own servers and a report needs pip install 'fencelock[torture]'"


def torture(
    *,
    fault: Annotated[
        list[str] | None,
        typer.Option(help=f"One kind of fault, may be given again; all by default: {', '.join(FAULTS)}."),
    ] = None,
    duration: Annotated[
        float | None, typer.Option(help="Seconds; 60 unless --acquisitions is given.")
    ] = None,
    acquisitions: Annotated[int | None, typer.Option(help="End after so many.")] = None,
    workers: Annotated[int, typer.Option(help="Worker processes; every other one runs asyncio tasks.")] = 6,
    tasks: Annotated[
        int, typer.Option(help="Tasks in each worker that has any; 0 for blocking workers only.")
    ] = 8,
    resources: Annotated[int, typer.Option(help="How many are locked; fewer are fought for more.")] = 20,
    ttl: Annotated[float, typer.Option(help="Seconds that a lease lasts.")] = 1.0,
    pause: Annotated[
        float | None,
        typer.Option(help="Longest pause of a worker, in seconds; the shortest is a ttl. Twice that."),
    ] = None,
    every: Annotated[
        float, typer.Option(help="Seconds between faults of one kind of target, on average.")
    ] = 1.0,
    writes: Annotated[
        float, typer.Option(help="Share of the holders that write to the database, from 0 to 1.")
    ] = 0.5,
    think: Annotated[float, typer.Option(help="Seconds between read and write, on average.")] = 0.01,
    authority: Annotated[
        str, typer.Option(help="What grants the leases: nodes, or database, which is that of the run.")
    ] = NODES,
    nodes: Annotated[
        list[str] | None,
        typer.Option(help="Your own nodes, once each, instead of embedded ones: redis://host:6379"),
    ] = None,
    nodes_count: Annotated[int, typer.Option(help="How many embedded nodes.")] = 5,
    database: Annotated[
        str, typer.Option(help="postgresql (embedded), sqlite, or the SQLAlchemy URL of your own.")
    ] = "postgresql",
    seed: Annotated[
        int | None, typer.Option(help="Of all that is chosen at random; random by default.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="A new folder for history and report; named by the time by default.")
    ] = None,
    style: Annotated[
        list[Style] | None,
        typer.Option(
            help="How writers come by what they write back, may be given again; by default all for which "
            "something is promised. core is a control, and must end WRONG."
        ),
    ] = None,
    without_guard: Annotated[
        bool, typer.Option("--without-guard", help="A control: the table has no fence. Must end WRONG.")
    ] = False,
    naive_tokens: Annotated[
        bool,
        typer.Option(
            "--naive-tokens", help="A control: tokens are minted in the obvious way. Must end WRONG."
        ),
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask before using servers of yours.")] = False,
) -> None:
    """Break things on purpose while workers lock and write, then check that every promise was kept.

    Exit status 0 if it was, 1 if one was broken, 2 if the run could not be made.
    """
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    try:
        settings = Settings(
            output=output or _new_folder(),
            faults=tuple(dict.fromkeys(fault or default_faults(authority))),
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
            guard=not without_guard,
            quorum=not naive_tokens,
        )
    except ValueError as error:
        _refuse(console, str(error))
    if settings.output.exists():
        _refuse(console, f"{output} exists already: name a new folder")
    if settings.nodes or not settings.embedded_database:
        _confirm(console, settings, yes=yes)
    result = _run(console, settings)
    _report(console, result)
    raise typer.Exit(_WRONG if not result.verdict.right else _NO_RUN if result.trouble else _RIGHT)


def _new_folder() -> Path:
    return Path(f"torture-{datetime.now(UTC).astimezone():%Y%m%d-%H%M%S}")


def _refuse(console: Console, sentence: str) -> NoReturn:
    console.print(sentence, style="red", markup=False)
    raise typer.Exit(_NO_RUN) from None


def _confirm(console: Console, settings: Settings, *, yes: bool) -> None:
    """Ask before anything is written to servers of the user.

    Raises:
        typer.Exit: the answer is no, or nobody is there to give one.
    """
    console.print("[bold red]This is going to use servers of yours.[/] It is for test deployments only:")
    if settings.nodes:
        console.print(
            "  nodes: keys of a new namespace fencelock-torture-… are written, and removed at the end; "
            "other keys are not touched, and the nodes are not broken",
            markup=False,
        )
    if not settings.embedded_database:
        console.print(
            "  database: the tables fencelock_torture_counters, …_versioned_counters and …_plain_counters "
            "are dropped, made anew, written to as fast as it goes, and dropped at the end; a fence table is "
            "made for that time where there is none",
            markup=False,
        )
        if settings.on_database:
            console.print(
                "  leases: the table fencelock_leases (or …_torture_naive_leases) is made, and dropped at "
                "the end; connections of this run's workers are ended, those of others are not",
                markup=False,
            )
    if yes:
        return
    if sys.stdin is None or not sys.stdin.isatty():  # None where a service manager has closed it
        _refuse(console, "no terminal is there to confirm it on: give --yes if that is what you want")
    if not typer.confirm("Go on?", err=True):
        _refuse(console, "Nothing was done")


def _run(console: Console, settings: Settings) -> Result:
    """Make the run; what keeps it from being made is said in a sentence."""
    try:
        from fencelock.errors import FencelockError  # noqa: PLC0415 - with it
        from proof.servers.workspace import EmbeddedServerError  # noqa: PLC0415 - what follows needs an extra
        from proof.torture.run import run, skipped_faults  # noqa: PLC0415 - with it
    except ImportError as error:
        _refuse(console, f"{error}: {_MISSING}")

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
    except ImportError as error:
        _refuse(console, f"{error}: {_MISSING}")
    except (FencelockError, EmbeddedServerError, SQLAlchemyError, ValueError, OSError) as error:
        _refuse(console, f"{type(error).__name__}: {str(error).splitlines()[0]}")


def _check_database(console: Console, url: str) -> None:
    """Refuse a database that cannot be reached, before anything is started.

    Raises:
        typer.Exit: it cannot.
    """
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
    from proof.torture.table import has_fence_table  # noqa: PLC0415 - the run has loaded it

    if Style.GATE not in settings.styles or not has_fence_table(settings.database):
        return settings
    console.print("without the style gate: the database has a fence table, which is yours", style="yellow")
    return replace(settings, styles=tuple(each for each in settings.styles if each is not Style.GATE))


@contextmanager
def _bar(console: Console, settings: Settings) -> Iterator[Callable[[HowFar], None]]:
    """Yield what moves a bar that shows how far the run has come."""
    columns = (
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TextColumn("{task.fields[acquired]:,} acquired"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=1.0, acquired=0)

        def tell(far: HowFar) -> None:
            shares = [0.0]
            if settings.duration is not None:
                shares.append(far.seconds / settings.duration)
            if settings.acquisitions is not None:
                shares.append(far.acquired / settings.acquisitions)
            progress.update(task, completed=max(shares), acquired=far.acquired)

        yield tell


def _report(console: Console, result: Result) -> None:
    from proof.torture.checker import describe  # noqa: PLC0415 - the run has loaded it

    if result.interrupted:
        console.print("Interrupted: the verdict is about what there is", style="yellow")
    out = Console(soft_wrap=True, highlight=False)
    for line in describe(result.verdict):
        out.print(line, markup=False)
    out.print(f"history         {result.history}", markup=False)
    trace, picture = report(result.history, result.verdict)
    out.print(f"trace           {trace}", markup=False)
    out.print(f"picture         {picture}", markup=False)
    for sentence in result.trouble:
        console.print(f"The run itself went wrong: {sentence}", style="red", markup=False)
