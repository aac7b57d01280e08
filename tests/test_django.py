"""docs/django.md holds on PostgreSQL, too, also in its sentences about Django that no block shows."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import pytest
from sqlalchemy import make_url

from fencelock import Database
from proof.pages.blocks import Block
from proof.servers import Postgres
from tests.test_docs import play, to_run

pytestmark = pytest.mark.long

PAGE: Final = "docs/django.md"
SQLITE: Final = '{"ENGINE": "django.db.backends.sqlite3", "NAME": "db.sqlite3"}'
GROWS: Final = """
sed -i 's/max_length=20/max_length=30/' shop/models.py
django-admin makemigrations shop --name longer
django-admin migrate
"""
WRITES: Final = """
with fenced_lock("order:1") as token:
    write(Order, 1, token, status="shipped")
"""


def play_all(folder: Path, blocks: Iterable[Block], *more: Block) -> subprocess.CompletedProcess[str]:
    return play(PAGE, [*blocks, *more], folder, {})


def test_page_runs_on_postgresql(postgres: Postgres, tmp_path: Path) -> None:
    url = postgres.create_database()
    with Database(url) as authority:
        authority.init()
    parts = make_url(url)
    real = repr(
        {
            "ENGINE": "django.db.backends.postgresql",
            "NAME": parts.database,
            "USER": parts.username,
            "HOST": parts.query["host"],
            "PORT": parts.query.get("port", ""),
        }
    )
    blocks = []
    for block in to_run(PAGE):
        assert block.file != "settings.py" or block.text.count(SQLITE) == 1
        text = block.text.replace(SQLITE, real).replace("sqlite:///db.sqlite3", url)
        blocks.append(Block(block.language, block.line, text))
    ended = play_all(tmp_path, blocks, Block("sh", 1, GROWS), Block("python", 2, WRITES))
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_sqlite_loses_the_columns_when_django_copies_the_table(tmp_path: Path) -> None:
    ended = play_all(tmp_path, to_run(PAGE), Block("sh", 1, GROWS), Block("python", 2, WRITES))
    assert "no such column: last_fencing_token" in ended.stderr
    again = """
    sed 's/0001_orders/0003_longer/' shop/migrations/0002_fence.py > shop/migrations/0004_fence.py
    django-admin migrate
    """
    blocks = [*to_run(PAGE), Block("sh", 1, GROWS), Block("sh", 2, again), Block("python", 3, WRITES)]
    (tmp_path / "again").mkdir()
    ended = play_all(tmp_path / "again", blocks)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_what_the_page_says_of_tests(tmp_path: Path) -> None:
    tests = """
from fencelock import LockLostError
from fencelock.testing import lost_lease

for number in (2, 3):
    Order.objects.create(total_cents=500)
with fenced_lock("order:2") as token:
    write(Order, 2, token + (1 << 36))
try:
    pay(2, charge=print)
except Refused:
    print("refused")
try:
    with lost_lease("order:3"):
        pay(3, charge=lambda cents, key: None)
except LockLostError:
    print("lost, and", Order.objects.get(pk=3).status)
"""
    ended = play_all(
        tmp_path, to_run(PAGE), Block("python", 1, tests), Block("text", 2, "refused\nlost, and paid\n")
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
