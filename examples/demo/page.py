"""Draws the demo: a timeline for each act while it plays, and at the end the claims and what was seen."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.table import Table


@dataclass(frozen=True, slots=True)
class Claim:
    """One thing that the demo says, and whether it was so."""

    says: str
    seen: str
    holds: bool


class Page:
    """Where the demo is drawn.

    Attributes:
        claims: what has been claimed and seen so far.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self.claims: list[Claim] = []
        self._act = Table()
        self._live: Live | None = None
        self._began = 0.0

    def say(self, text: str) -> None:
        """Print a paragraph."""
        self._console.print(text)

    @contextmanager
    def working(self, what: str) -> Iterator[None]:
        """Show that something takes a moment."""
        began = time.monotonic()
        with self._console.status(what):
            yield
        self._console.print(f"[dim]{what} {time.monotonic() - began:.1f} s[/]")

    @contextmanager
    def act(self, title: str, intent: str) -> Iterator[None]:
        """Draw a timeline, line by line, while the act plays."""
        self._act = Table(box=box.SIMPLE_HEAD, expand=True, pad_edge=False, show_edge=False)
        self._act.add_column("seconds", justify="right", width=7, style="dim")
        self._act.add_column("worker A", style="cyan", ratio=1)
        self._act.add_column("worker B", style="magenta", ratio=1)
        self._act.add_column("nodes and database", ratio=1)
        self._console.print()
        self._console.rule(f"[bold]{title}[/]", align="left")
        self._console.print(f"[dim]{intent}[/]\n")
        self._began = time.monotonic()
        with Live(self._act, console=self._console, refresh_per_second=8) as self._live:
            yield
        self._live = None
        self._console.print()

    def tell(self, who: str, when: float, what: str) -> None:
        """Add a line to the timeline: for worker A, worker B, or else for the servers."""
        lanes = {"A": (what, "", ""), "B": ("", what, "")}
        self._act.add_row(f"{when - self._began:.2f}", *lanes.get(who, ("", "", what)))

    def note(self, what: str) -> None:
        """Add a line about the servers, now."""
        self.tell("", time.monotonic(), what)

    def claim(self, says: str, seen: str, *, holds: bool) -> None:
        """Note a claim and what was seen of it."""
        self.claims.append(Claim(says, seen, holds))

    def verdict(self) -> bool:
        """Print the claims, and return whether all of them hold."""
        table = Table(
            title="What was claimed, and what was seen", box=box.ROUNDED, expand=True, title_style="bold"
        )
        table.add_column("claimed", ratio=3)
        table.add_column("seen", ratio=3)
        table.add_column("holds", width=5, justify="center")
        for claim in self.claims:
            table.add_row(claim.says, claim.seen, "[bold green]yes[/]" if claim.holds else "[bold red]NO[/]")
        self._console.print()
        self._console.print(table)
        failed = [claim for claim in self.claims if not claim.holds]
        if failed:
            self._console.print(
                Panel(f"[bold red]{len(failed)} of {len(self.claims)} claims do not hold.[/]")
            )
        else:
            self._console.print("To fence a project of your own: README.md, and docs/migrating.md.\n")
        return not failed
