"""`fencelock nodes`: shows the state of the nodes, and changes the list of nodes."""

from __future__ import annotations

import os
import sys
from dataclasses import asdict
from typing import Annotated

import typer
from rich.table import Table

from fencelock._locking import factory_of
from fencelock.authority.redlock.admin import NodeState, NodeStatus, change_nodes
from fencelock.authority.redlock.redlock import DEFAULT_NAMESPACE, Redlock
from fencelock.authority.redlock.transport.endpoints import split_urls
from fencelock.cli import shared

app: typer.Typer = typer.Typer(
    help="Show the state of the nodes, or change the list of nodes.", invoke_without_command=True
)

Current = Annotated[
    str, typer.Option(help="The present nodes, separated by commas; FENCELOCK_URL by default.")
]


@app.callback()
def nodes(
    context: typer.Context,
    *,
    current: Current = "",
    namespace: shared.Namespace = "",
    wait: Annotated[
        bool,
        typer.Option("--wait", help="First admit restarted nodes again; takes as long as the longest lease."),
    ] = False,
    as_json: shared.AsJson = False,
) -> None:
    """Show the state of the nodes. Status 0 if a majority votes, and these nodes are the whole list."""
    if context.invoked_subcommand is not None:
        context.obj = (current, namespace)
        return
    urls, namespace = _present(current), namespace or DEFAULT_NAMESPACE
    with shared.errors_as_sentences(), Redlock(urls, namespace=namespace, recover=False) as quorum:
        if wait:
            quorum.recover()
        found, (unnamed, strangers) = quorum.status(), quorum.compare_lists()
    voters = sum(status.state is NodeState.ADMITTED for status in found)
    if as_json:
        shared.print_json([{**asdict(each), "state": each.state.value} for each in found])
    else:  # in a pipe, with whole URLs
        shared.console(**({} if sys.stdout.isatty() else {"width": 500})).print(_table(found))
    if 2 * voters <= len(found):
        shared.fail(f"{voters} of {len(found)} nodes vote, which is no majority: no lock is granted")
    if unnamed or strangers:
        missing = f"{', '.join(unnamed)} belong to the list and are not named" if unnamed else ""
        other = f"{', '.join(strangers)} do not belong to it" if strangers else ""
        shared.fail(
            f"these are not the nodes that were initialised together: "
            f"{'; '.join(filter(None, (missing, other)))}. Every program needs the same list"
        )


def _present(current: str) -> list[str]:
    current = current or os.environ.get("FENCELOCK_URL", "")
    urls = split_urls(current)
    if not urls:
        shared.fail(
            "which nodes? Set FENCELOCK_URL, or name those in use: fencelock nodes --current "
            "redis://r1:6379,redis://r2:6379,redis://r3:6379"
        )
    with shared.errors_as_sentences():
        if factory_of(urls[0]) is not Redlock:
            shared.fail(f"{shared.without_password(urls[0])} is no Redis or Valkey, and has no nodes")
    return urls


def _table(found: tuple[NodeStatus, ...]) -> Table:
    table = Table("node", "state", "epoch", "longest ttl", "")
    for status in found:
        state = status.state.value
        if status.recovering_for:
            state += f" for another {status.recovering_for:.0f} s"
        colour = "green" if status.state is NodeState.ADMITTED else "yellow"
        epoch = "" if status.epoch is None else str(status.epoch)
        longest = "" if status.max_ttl is None else f"{status.max_ttl:g} s"
        name, detail = shared.shown(status.address), shared.shown(status.detail)
        table.add_row(name, f"[{colour}]{state}[/]", epoch, longest, detail)
    return table


@app.command("replace")
def replace_node(
    context: typer.Context,
    old: Annotated[str, typer.Argument(help="The node to remove, as in the present list.")],
    new: Annotated[str, typer.Argument(help="The blank node to put in its place.")],
    current: Current = "",
    namespace: shared.Namespace = "",
) -> None:
    """Replace a node, which may be gone, by another. Safe to run again."""
    present = _present(current or context.obj[0])
    with shared.errors_as_sentences():
        names = [_name_of(url) for url in present]
        if _name_of(old) not in names:
            shared.fail(f"{_name_of(old)} is none of the present nodes: {', '.join(names)}")
        wanted = [new if name == _name_of(old) else url for name, url in zip(names, present, strict=True)]
        _change(present, wanted, namespace or context.obj[1])


@app.command("set")
def set_nodes(
    context: typer.Context,
    urls: Annotated[
        list[str] | None, typer.Argument(help="All nodes of the new list; the present ones by default.")
    ] = None,
    *,
    current: Current = "",
    namespace: shared.Namespace = "",
    max_ttl: Annotated[
        float | None, typer.Option(help="The longest lease in seconds, from now on; unchanged by default.")
    ] = None,
) -> None:
    """Replace the present nodes by others, or change --max-ttl. Safe to run again."""
    present = _present(current or context.obj[0])
    with shared.errors_as_sentences():
        if not urls and max_ttl is None:
            shared.fail("what is to change? Name all nodes of the new list, or --max-ttl")
        _change(present, urls or present, namespace or context.obj[1], max_ttl)


def _name_of(url: str) -> str:
    with Redlock(url) as one:
        return one.nodes[0]


def _change(present: list[str], wanted: list[str], namespace: str, max_ttl: float | None = None) -> None:
    namespace = namespace or DEFAULT_NAMESPACE
    done = change_nodes(
        present, wanted, namespace=namespace, max_ttl=max_ttl, tell=lambda step: shared.say(f"… {step}")
    )
    if done.done:
        shared.say(f"{len(wanted)} nodes are in use now")
    else:
        shared.say("these nodes are in use already; nothing was changed")
    for address, what in done.left_out.items():
        shared.say(f"{address} does not vote yet: {what}", "yellow")
    shared.tell_programs(wanted, namespace)
