"""examples/flask_shop counts each request once, with three gunicorn workers, Flask-Admin and a pause."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Final

import httpx
import pytest

from fencelock import Database
from tests.polling import eventually
from tests.shops import Server, Shop

pytestmark = [pytest.mark.long]

GUNICORN: Final = ["gunicorn", "--workers", "3", "--bind", "127.0.0.1:PORT", "shop:create_app()"]


@pytest.fixture
def shop(tmp_path: Path, installed_path: str) -> Shop:
    environment = {
        "PYTHONPATH": installed_path,
        "FLASK_APP": "shop",
        "FLASK_SECRET_KEY": "of the tests",
        "LOCK_TTL": "2",
        "SHELF_SECONDS": "1.5",
    }
    return Shop("flask_shop", tmp_path / "shop", environment)


@pytest.fixture
def server(shop: Shop) -> Iterator[Server]:
    for command in (["init"], ["migrate", "-m", "all tables"], ["upgrade"]):
        shop.python("-m", "flask", "db", *command)
    with sqlite(shop) as database:
        database.execute("INSERT INTO articles (id, stock) VALUES (1, 100)")
        database.commit()
    with shop.serving(*GUNICORN) as made:
        yield made


def sqlite(shop: Shop) -> closing[sqlite3.Connection]:
    return closing(sqlite3.connect(shop.folder / "instance" / "shop.db", timeout=20))


def stock(shop: Shop) -> int:
    with sqlite(shop) as database:
        return int(database.execute("SELECT stock FROM articles").fetchone()[0])


def form(server: Server) -> dict[str, str]:
    found = re.search(r'name="last_write_id" type="hidden" value="(\d+)"', server.get(EDIT).text)
    assert found is not None
    return {"stock": "20", "last_write_id": found[1]}


EDIT: Final = "/admin/article/edit/?id=1"


def edit(server: Server, data: dict[str, str]) -> httpx.Response:
    return httpx.post(server.url + EDIT, data=data, timeout=20, trust_env=False)


def test_edit_waits_for_a_holder_and_is_refused(server: Server, shop: Shop) -> None:
    opened = form(server)
    with closing(server.begin("/articles/1/count", "c")) as counting, locks(shop) as authority:
        assert eventually(lambda: authority.inspect("article:1") is not None)
        refused = edit(server, opened)
        assert (refused.status_code, refused.text) == (409, "Conflict")
        with counting.getresponse() as answer:
            assert answer.status == 200
    assert stock(shop) == 7
    assert edit(server, form(server)).status_code == 302
    assert stock(shop) == 20


def locks(shop: Shop) -> Database:
    return Database(f"sqlite:///{shop.folder}/instance/shop.db")


def test_flask_migrate_fences_what_was_not(shop: Shop) -> None:
    path = shop.folder / "shop.py"
    fenced = path.read_text()
    before = re.sub(r".*(__fence_resource__ =|_table\(db\.metadata\)).*\n", "", fenced)
    path.write_text(before.replace("(FencedModel, db.Model)", "(db.Model)"))
    for command in (["init"], ["migrate", "-m", "before"], ["upgrade"], ["check"]):
        shop.python("-m", "flask", "db", *command)
    path.write_text(fenced)
    shop.python("-m", "flask", "db", "migrate", "-m", "fences")
    (written,) = shop.folder.glob("migrations/versions/*_fences.py")
    migration = written.read_text()
    for operation in ("add_fence('articles')", "create_fence_table()", "create_receipt_table()"):
        assert f"op.{operation}" in migration
    for command in (["upgrade"], ["check"]):
        shop.python("-m", "flask", "db", *command)
