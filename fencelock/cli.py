"""The command line: `fencelock init` and `nodes`; others are in `commands`."""

from __future__ import annotations

import os
import sys
from importlib.metadata import version
from typing import Annotated

try:
    import typer
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table
except ImportError:  # pragma: no cover - reached by a test in an environment of its own
    sys.exit("the command line needs two more packages: pip install 'fencelock[cli]'")

from sqlalchemy import make_url

from fencelock._configure import factory_of
from fencelock._engines import blocking_engine, for_blocking
from fencelock.authority.database.database import Database
from fencelock.authority.redlock.admin import NodeState, NodeStatus, change_nodes
from fencelock.authority.redlock.redlock import DEFAULT_NAMESPACE, Redlock
from fencelock.authority.redlock.transport.endpoints import split_urls
from fencelock.commands import act, doctor, look
from fencelock.commands.shared import (
    error_console,
    errors_as_sentences,
    fail,
    refusing_databases,
    without_password,
)
from fencelock.max_fence import highest_fence
from fencelock.tokens import epoch_above

app = typer.Typer(
    help="Locks that mint fencing tokens, and a database that refuses stale writers.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)


def _show_version(asked: bool) -> None:
    if asked:
        Console().print(f"fencelock {version('fencelock')}", highlight=False)
        raise typer.Exit


@app.callback()
def _fencelock(
    _version: Annotated[  # noqa: FBT002 - an option, not an argument
        bool,
        typer.Option("--version", help="Show the version, and exit.", callback=_show_version, is_eager=True),
    ] = False,
) -> None:
    """Locks that mint fencing tokens, and a database that refuses stale writers."""


nodes_app = typer.Typer(
    help="Show how the nodes stand, or change which they are.", invoke_without_command=True
)
app.add_typer(nodes_app, name="nodes")

Namespace = Annotated[str, typer.Option(help="Prefix of every key on the nodes: fencelock by default.")]
Current = Annotated[
    str, typer.Option(help="The nodes in use at present, with commas between: FENCELOCK_URL by default.")
]


@app.command()
def init(
    urls: Annotated[
        list[str],
        typer.Argument(
            help="A database (postgresql+psycopg://…), or every node, each once: redis://host:6379 …"
        ),
    ],
    *,
    base: Annotated[
        int | None,
        typer.Option(help="Where counters start: Unix milliseconds by default; 0 makes tokens 1, 2, 3 …"),
    ] = None,
    max_ttl: Annotated[
        float | None,
        typer.Option(
            help="Longest lease in seconds, 60 by default; a node that restarted stays out for so long."
        ),
    ] = None,
    after_loss: Annotated[
        bool,
        typer.Option(
            "--after-loss",
            help="What granted so far has lost its data, or something else is to grant: start above what the "
            "database has seen.",
        ),
    ] = False,
    database: Annotated[
        list[str] | None,
        typer.Option(help="SQLAlchemy URL of a database with fenced tables, for --after-loss; each once."),
    ] = None,
    yes: Annotated[
        bool, typer.Option("--yes", help="Do not ask before --after-loss deletes what is left on the nodes.")
    ] = False,
    allow_eviction: Annotated[
        bool,
        typer.Option("--allow-eviction", help="Also nodes that drop keys when their memory is full."),
    ] = False,
    namespace: Annotated[str, typer.Option(help="Prefix of every key on the nodes.")] = DEFAULT_NAMESPACE,
) -> None:
    """Make a database's table of leases, or initialise N blank nodes; once in their life.

    All nodes must be reachable.
    """
    console = error_console()
    if after_loss != bool(database):
        fail(
            "--after-loss and --database belong together: only the database knows which tokens have been "
            "used. Name every database with fenced tables, such as --database postgresql+psycopg://user@host/name"
        )
    with errors_as_sentences():
        above = _highest_fence(database or [], console) if after_loss else None
        if factory_of(urls[0]) is Database:
            if len(urls) > 1 or base is not None or max_ttl is not None or allow_eviction:
                fail("a database is named by one URL, and takes no option of nodes but --after-loss")
            _init_database(urls[0], above, console)
            return
        with Redlock(",".join(urls), namespace=namespace, recover=False) as quorum:
            if after_loss:
                _clear(quorum, console, yes=yes)
            done = quorum.init(base=base, max_ttl=max_ttl, above=above, allow_eviction=allow_eviction)
            count = len(quorum.nodes)
    said = "initialised" if done else "had been initialised before"
    said += "" if done or above is not None else "; nothing was changed"
    console.print(f"{count} {'node' if count == 1 else 'nodes'} {said}")
    _tell_what_next(urls, above, console, namespace)


def _init_database(url: str, above: int | None, console: Console) -> None:
    """Make the table of leases in a database."""
    with refusing_databases(without_password(url), "used"):
        authority = Database(for_blocking(make_url(url)))
    with authority:
        made = authority.init(above=above)
    console.print(f"the table of leases {'was made' if made else 'is there'}")
    _tell_what_next([url], above, console)


def _tell_what_next(
    urls: list[str], above: int | None, console: Console, namespace: str = DEFAULT_NAMESPACE
) -> None:
    if above:
        epoch = epoch_above(above)
        console.print(f"Tokens are of epoch {epoch} or later now, above all that was granted up to {above}")
    _tell_programs(urls, namespace, console)


def _tell_programs(urls: list[str], namespace: str, console: Console) -> None:
    setting = f"export FENCELOCK_URL={_shown(urls)}"
    if namespace != DEFAULT_NAMESPACE:
        setting = f'fencelock.configure("{_shown(urls)}", namespace="{namespace}")'
    console.print(f"Tell your programs: {setting}", markup=False)


def _shown(urls: list[str]) -> str:
    """Return URLs as they can be shown; passwords are left for the operator to type."""
    return ",".join(map(without_password, urls))


def _clear(quorum: Redlock, console: Console, *, yes: bool) -> None:
    """Delete what is left on nodes of which too few vote, if the operator agrees."""
    left = quorum.remains()
    if not left:
        return
    console.print(
        f"{', '.join(left)} still {'holds' if len(left) == 1 else 'hold'} what is left", markup=False
    )
    others = sorted({address for addresses in left.values() for address in addresses} - set(quorum.nodes))
    if others:
        console.print(f"{', '.join(others)} must be gone for good", style="yellow", markup=False)
    if not yes:
        question = "Delete it, and no other key? No program may use these nodes now (--yes does not ask)"
        typer.confirm(question, abort=True, err=True)
    console.print(f"{quorum.clear()} keys deleted")


def _highest_fence(databases: list[str], console: Console) -> int:
    """Return the largest token that any of the databases has seen."""
    highest = 0
    for url in databases:
        shown = without_password(url)
        with refusing_databases(shown, "read"), blocking_engine(url).connect() as connection:
            fence, tables = highest_fence(connection)
        if not tables:
            fail(
                f"{shown} has no table with a column last_fencing_token: it cannot tell which tokens have "
                "been used. Name the database that holds the fenced tables"
            )
        console.print(f"{shown}: the highest fence of {tables} fenced tables is {fence}", markup=False)
        highest = max(highest, fence)
    return highest


@nodes_app.callback()
def nodes(
    context: typer.Context,
    *,
    current: Current = "",
    namespace: Namespace = "",
    wait: Annotated[
        bool, typer.Option("--wait", help="First admit again what can be, which takes the longest lease.")
    ] = False,
) -> None:
    """Show how the nodes stand. Status 0 if a majority votes, and the list is that of the members."""
    if context.invoked_subcommand is not None:
        context.obj = (current, namespace)
        return
    urls, namespace = _present(current), namespace or DEFAULT_NAMESPACE
    with errors_as_sentences(), Redlock(urls, namespace=namespace, recover=False) as quorum:
        if wait:
            quorum.recover()
        found, (unnamed, strangers) = quorum.status(), quorum.compare_lists()
    voters = sum(status.state is NodeState.ADMITTED for status in found)
    Console().print(_table(found))
    if 2 * voters <= len(found):
        fail(f"{voters} of {len(found)} nodes vote, which is no majority: nobody gets a lock")
    if unnamed or strangers:
        missing = f"{', '.join(unnamed)} belong to the list and are not named" if unnamed else ""
        other = f"{', '.join(strangers)} do not belong to it" if strangers else ""
        fail(
            f"these are not the nodes that were initialised together: "
            f"{'; '.join(filter(None, (missing, other)))}. Every program needs the same list"
        )


def _present(current: str) -> list[str]:
    current = current or os.environ.get("FENCELOCK_URL", "")
    urls = split_urls(current)
    if not urls:
        fail(
            "which nodes? Set FENCELOCK_URL, or name those in use: fencelock nodes --current "
            "redis://r1:6379,redis://r2:6379,redis://r3:6379"
        )
    with errors_as_sentences():
        if factory_of(urls[0]) is Database:
            fail(f"{without_password(urls[0])} is a database, which has no nodes")
    return urls


def _table(found: tuple[NodeStatus, ...]) -> Table:
    table = Table("node", "state", "epoch", "")
    for status in found:
        state = status.state.value
        if status.recovering_for:
            state += f" for another {status.recovering_for:.0f} s"
        colour = "green" if status.state is NodeState.ADMITTED else "yellow"
        epoch = "" if status.epoch is None else str(status.epoch)
        table.add_row(escape(status.address), f"[{colour}]{state}[/]", epoch, escape(status.detail))
    return table


@nodes_app.command("replace")
def replace_node(
    context: typer.Context,
    old: Annotated[str, typer.Argument(help="The node that goes, as in the present list.")],
    new: Annotated[str, typer.Argument(help="The blank node that takes its place.")],
    current: Current = "",
    namespace: Namespace = "",
) -> None:
    """Let one node take the place of another, which may be gone. Safe to run again."""
    present = _present(current or context.obj[0])
    with errors_as_sentences():
        names = [_name_of(url) for url in present]
        if _name_of(old) not in names:
            fail(f"{_name_of(old)} is none of the present nodes: {', '.join(names)}")
        wanted = [new if name == _name_of(old) else url for name, url in zip(names, present, strict=True)]
        _change(present, wanted, namespace or context.obj[1])


@nodes_app.command("set")
def set_nodes(
    context: typer.Context,
    urls: Annotated[list[str], typer.Argument(help="Every node that is to be in use, each once.")],
    current: Current = "",
    namespace: Namespace = "",
) -> None:
    """Let other nodes take the place of the present ones; some may stay. Safe to run again."""
    present = _present(current or context.obj[0])
    with errors_as_sentences():
        _change(present, urls, namespace or context.obj[1])


def _name_of(url: str) -> str:
    with Redlock(url) as one:
        return one.nodes[0]


def _change(present: list[str], wanted: list[str], namespace: str) -> None:
    console = error_console()
    done = change_nodes(
        present,
        wanted,
        namespace=namespace or DEFAULT_NAMESPACE,
        tell=lambda sentence: console.print(f"… {sentence}"),
    )
    console.print(
        f"{len(wanted)} nodes are in use now"
        if done.done
        else "these nodes are in use already; nothing was changed"
    )
    for address, what in done.left_out.items():
        console.print(f"{address} does not vote yet: {what}", style="yellow", markup=False)
    _tell_programs(wanted, namespace or DEFAULT_NAMESPACE, console)


app.command()(doctor.doctor)
app.command()(look.inspect)
app.command()(look.leaks)
app.command()(look.top)
app.command()(look.history)
app.command()(act.release)
app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(act.run)


def main() -> None:
    """Run the command line."""
    app()


if __name__ == "__main__":
    main()
