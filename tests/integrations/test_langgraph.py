"""With the saver that docs/langgraph.md prints, the database refuses a checkpoint of an older writer."""

from __future__ import annotations

import sqlite3
import types
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from fencelock import Database, Lease, NotHeldError, StaleTokenError
from fencelock.lease import holding
from proof.pages.blocks import blocks, read


@pytest.fixture
def page() -> types.SimpleNamespace:
    found: dict[str, Any] = {"__name__": "page"}
    for block in blocks(read("docs/langgraph.md")):
        if block.file is not None:
            code = compile(block.text, block.file, "exec", dont_inherit=True)
            exec(code, found)  # noqa: S102 - this is what the page tells to do
    return types.SimpleNamespace(**found)


def chain(file: Path) -> list[tuple[str, str | None]]:
    connection = sqlite3.connect(file)
    found = connection.execute("SELECT checkpoint_id, parent_checkpoint_id FROM checkpoints").fetchall()
    connection.close()
    return found


def is_forked(file: Path) -> bool:
    return max(Counter(parent for _, parent in chain(file)).values()) > 1


def test_an_older_writer_is_refused_by_the_database(page: types.SimpleNamespace, tmp_path: Path) -> None:
    file = tmp_path / "one.db"
    saver = page.open_saver(page.OneWriter, file)
    with holding([Lease("thread:1", 5)]):
        page.say(saver, "hello")
    before = chain(file)
    with Database(f"sqlite:///{tmp_path / 'locks.db'}") as authority:
        newer = saver.only_writer("1", authority=authority)  # its token is a time, far above 6
        with holding([Lease("thread:1", 6)]), pytest.raises(StaleTokenError, match=r"token 6 is stale"):
            page.say(saver, "late", pause=lambda: page.in_thread(newer.__enter__))
        page.in_thread(lambda: newer.__exit__(None, None, None))
    with holding([Lease("thread:1", 5)]), pytest.raises(StaleTokenError, match=r"token 5 is stale"):
        page.say(saver, "late")
    with pytest.raises(NotHeldError, match="thread:1"):
        page.say(saver, "without a lock")
    saver.conn.close()
    assert set(before) < set(chain(file))  # "late" was saved as it came in; its answer was not
    assert not is_forked(file)


def test_without_it_the_chain_forks(page: types.SimpleNamespace, tmp_path: Path) -> None:
    """The control: the real saver, and two workers."""
    file = tmp_path / "forked.db"
    a, b = page.open_saver(page.SqliteSaver, file), page.open_saver(page.SqliteSaver, file)
    page.say(a, "hello")
    page.say(a, "Anton", pause=lambda: page.in_thread(page.say, b, "Berta"))
    assert "Berta" not in page.said(a)
    a.conn.close()
    b.conn.close()
    assert is_forked(file)
