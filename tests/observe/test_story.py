"""docs/operations.md tells a night on call, with the text that its commands print.

    FENCELOCK_WRITE_DOCS=1 python -m pytest tests/observe/test_story.py

writes the page. Numbers, times and names of machines differ from run to run, and are not compared.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from proof.servers import Nodes
from tests.conftest import ROOT
from tests.observe.stage import Server, heard, needs_prometheus, tell
from tests.polling import eventually

PAGE: Final = ROOT / "docs" / "operations.md"
BEGINNING: Final = "<!-- What follows is written by tests/observe/test_story.py. -->\n"
END: Final = "<!-- The end of the story. -->\n"


@pytest.fixture
def victim(own_nodes: Nodes, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    command = [
        sys.executable,
        "-m",
        "tests.observe.shop",
        ",".join(own_nodes.urls),
        f"sqlite:///{tmp_path / 'shop.db'}",
    ]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as program:
        heard(program)
        yield program
        program.kill()


class Story:
    """Collects the acts of the story, and their results."""

    def __init__(self, urls: str, database: str) -> None:
        self.urls = urls
        self.database = database
        self.parts: list[str] = []

    def say(self, *sentences: str) -> None:
        self.parts.append(" ".join(sentences) + "\n")

    def show(self, text: str) -> None:
        shown = text.replace(self.urls, "$FENCELOCK_URL").replace(self.database, "sqlite:///shop.db")
        self.parts.append(f"```text\n{shown.strip()}\n```\n")

    def type(self, *arguments: str, status: int = 0) -> str:
        ran = subprocess.run(
            [sys.executable, "-m", "fencelock", *arguments],
            capture_output=True,
            text=True,
            check=False,
            env=os.environ | {"FENCELOCK_URL": self.urls, "COLUMNS": "100", "TERM": "dumb"},
        )
        assert ran.returncode == status, ran.stderr
        typed = " ".join(f"'{each}'" if " " in each else each for each in arguments)
        said = [piece for line in ran.stderr.splitlines() for piece in textwrap.wrap(line, 100)]
        output = "\n".join([*filter(None, [ran.stdout.strip()]), *said])
        self.show(f"$ fencelock {typed}\n{output}")
        return output


def words_of(text: str) -> set[str]:
    """Return the words of a text without numbers and names of machines, wherever the lines break."""
    text = re.sub(r"[\s─━┳┬┃│┏┓┗┛┡╇┩└┴┘]+", " ", text)
    text = re.sub(r"\d[\d.,:]*( (s|min|h|d)\b)?", "0", text)
    text = re.sub(r" on [\w.-]+", " on HOST", text)
    return set(re.sub(r"[\w.-]+ 0 (shop\.py|fencelock)", r"HOST 0 \1", text).split(" "))


@needs_prometheus
@pytest.mark.timeout(240)
def test_the_page_tells_what_happens(
    server: Server,
    shop: subprocess.Popen[str],
    victim: subprocess.Popen[str],
    own_nodes: Nodes,
    tmp_path: Path,
) -> None:
    story = Story(",".join(own_nodes.urls), f"sqlite:///{tmp_path / 'shop.db'}")
    tell(victim, "pay 60")
    assert heard(victim) == "loaded"
    victim.send_signal(signal.SIGSTOP)
    tell(shop, "want")
    story.say(
        "Two workers of a shop pay orders. One has locked `order:1` and loaded the row; then its machine",
        "stands still. The other one wants the same order. Its log says who is in the way:",
    )
    story.show("\n".join(textwrap.wrap(heard(shop), 100)))

    story.say("The metrics show it, and after a while an alert fires:")
    assert eventually(lambda: "FencelockTimeouts" in server.firing(), 60)
    lines = metrics_of(server).splitlines()
    wanted = [line for line in lines if re.match(r".*(waiters|wait_seconds_count)\{.*order", line)]
    assert any('outcome="timeout"' in line for line in wanted)
    firing = sorted(server.firing() & {"FencelockTimeouts"})
    story.show("\n".join([*wanted, *(f"ALERT {name} firing" for name in firing)]))

    story.say("Which process holds it, since when, and until when?")
    found = story.type("inspect", "order:1")
    assert str(victim.pid) in found
    assert "shop.py" in found

    story.say(
        "That process does not answer. `release --force` takes the lock from it. With `--database` it also",
        "passes the gate with the next token; with `--claim` it claims the row. Both refuse the old",
        "token from then on.",
    )
    story.type(
        *("release", "order:1", "--force", "--reason", "worker stands still"),
        *("--database", story.database, "--claim", "orders:id=1"),
    )
    story.say("The work goes on:")
    while (line := heard(shop)) != "paid by the second worker":
        assert "held by" in line
    story.show(line)

    story.say("The first worker wakes up, knows nothing of all that, and writes. The database refuses it:")
    victim.send_signal(signal.SIGCONT)
    tell(victim, "go on")
    refused = heard(victim)
    assert refused == "StaleTokenError"
    story.show(refused)

    story.say("So the row has the second worker's payment only. The history tells all of it:")
    assert eventually(lambda: {"refused", "lost"} <= set(story_of(story).split()))
    story.type("history", "order:1", "--database", story.database)
    page = "\n".join(story.parts)
    before, _, rest = PAGE.read_text().partition(BEGINNING)
    told, _, after = rest.partition(END)
    if os.environ.get("FENCELOCK_WRITE_DOCS"):
        PAGE.write_text(f"{before}{BEGINNING}\n{page}\n{END}{after}")
    else:
        assert words_of(page) == words_of(told)


def metrics_of(server: Server) -> str:
    (target,) = server.ask("targets")["activeTargets"]
    with urllib.request.urlopen(target["scrapeUrl"], timeout=10) as answer:  # noqa: S310 - it is ours
        return str(answer.read().decode())


def story_of(story: Story) -> str:
    command = [sys.executable, "-m", "fencelock", "history", "order:1", "--database", story.database]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout
