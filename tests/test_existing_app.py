"""A project with a history is fenced as its owner would do it: edit, autogenerate, upgrade, one `with`."""

from __future__ import annotations

import os
import shlex
import shutil
from pathlib import Path

import pytest
from sqlalchemy import Engine, text

from fencelock import Redlock
from fencelock.guard import triggers
from proof.servers import Nodes
from tests.programs import printed

ROOT = Path(__file__).parent.parent
PROJECT = ROOT / "examples" / "existing_app"

#: What docs/migrating.md tells to do: in which file, what stands there, and what comes in its place. The page
#: itself runs in tests/test_docs.py; here it is done on every database, by a program that pays twice at once.
EDITS = [
    ("models.py", "from sqlalchemy import", "from fencelock import FencedModel\nfrom sqlalchemy import"),
    ("models.py", "class Invoice(Base):", "class Invoice(FencedModel, Base):"),
    (
        "models.py",
        '    __tablename__ = "invoices"\n',
        """\
    __tablename__ = "invoices"
    __fence_resource__ = "invoice:{id}"
    __fence_trigger__ = True
""",
    ),
    (
        "payments.py",
        "from sqlalchemy import",
        "from fencelock import claim, fenced_lock\nfrom sqlalchemy import",
    ),
    (
        "payments.py",
        "        invoice = session.get_one(Invoice, invoice_id)\n",
        "        invoice = claim(session, Invoice, invoice_id)\n        session.commit()\n",
    ),
    (
        "payments.py",
        "    with Session(engine) as session:",
        '    with fenced_lock(f"invoice:{invoice_id}"), Session(engine) as session:',
    ),
    (
        "migrations/env.py",
        "create_engine(URL, poolclass=NullPool)",
        'create_engine(URL, poolclass=NullPool, execution_options={"fencelock": "bypass"})',
    ),
]

#: While the bank takes its time, another caller pays too: in a fenced project, the next holder of the lock.
STORY = """
import sys
import fencelock
from fencelock.lease import held_leases
from models import Invoice
from payments import pay
from sqlalchemy import create_engine
from sqlalchemy.orm import Session

url, nodes = sys.argv[1:]
fencelock.configure(nodes)
engine = create_engine(url)

def another_pays(cents):
    with Session(engine) as session:
        for lease in held_leases():
            fencelock.bind(session, fencelock.Lease(lease.resource, lease.token + 1))
        session.get_one(Invoice, 1).paid_cents += 30
        session.commit()

try:
    pay(engine, 1, 50, charge=another_pays)
except fencelock.StaleTokenError as error:
    print("stale", error.table, error.identity)
    pay(engine, 1, 50, charge=lambda cents: None)
with Session(engine) as session:
    print(session.get_one(Invoice, 1).paid_cents)
"""

pytestmark = pytest.mark.long


class Copy:
    """A copy of the project, which a test may edit."""

    def __init__(self, folder: Path, site: str, url: str) -> None:
        self._folder = folder
        self._environment = {**os.environ, "PYTHONPATH": site}
        self._url = url
        shutil.copytree(PROJECT, folder, ignore=shutil.ignore_patterns("__pycache__"))

    def fence(self) -> None:
        for name, before, after in EDITS:
            path = self._folder / name
            source = path.read_text()
            assert source.count(before) == 1, (name, before)
            path.write_text(source.replace(before, after))

    def alembic(self, *commands: str) -> None:
        lines = [["-x", f"url={self._url}", *shlex.split(command)] for command in commands]
        self._run("-c", f"from alembic.config import main\nfor line in {lines!r}: main(line)")

    def story(self, nodes: str) -> list[str]:
        return self._run("-W", "error", "-c", STORY, self._url, nodes).splitlines()

    def migration(self) -> str:
        (written,) = self._folder.glob("migrations/versions/*_fence_invoices.py")
        return written.read_text()

    def _run(self, *arguments: str) -> str:
        return printed(*arguments, cwd=self._folder, env=self._environment)


@pytest.fixture
def node_url(nodes: Nodes) -> str:
    with Redlock(nodes.url) as quorum:
        quorum.init()
    return nodes.url


def paid(engine: Engine, cents: int | None = None) -> int:
    with engine.begin() as connection:
        if cents is not None:
            connection.execute(text("UPDATE invoices SET paid_cents = :cents"), {"cents": cents})
        return int(connection.scalar(text("SELECT paid_cents FROM invoices")) or 0)


@pytest.mark.timeout(300)
def test_existing_project_is_fenced(
    tmp_path: Path, installed_path: str, engine: Engine, database_url: str, node_url: str
) -> None:
    """It loses a payment before, and none afterwards; what it had stored is still there, and on the way back.

    Its history, which changes rows without any lease, still runs on an empty database.
    """
    project = Copy(tmp_path / "app", installed_path, database_url)
    project.alembic("upgrade 0002")
    with engine.begin() as connection:
        connection.execute(text("INSERT INTO customers VALUES (1, 'Ada')"))
        connection.execute(text("INSERT INTO invoices VALUES (1, 1, 10000, 0)"))
    project.alembic("upgrade head", "check")
    assert project.story(node_url) == ["50"]
    paid(engine, 0)

    project.fence()
    project.alembic("revision --autogenerate -m 'fence invoices'")
    assert "op.add_fence('invoices', trigger=True)" in project.migration()
    project.alembic("upgrade head", "check")
    with engine.connect() as connection:
        assert triggers.installed(connection, "invoices") is True

    assert project.story(node_url) == ["stale invoices (1,)", "80"]

    project.alembic("downgrade 0003")
    assert paid(engine) == 80
    project.alembic("downgrade base", "upgrade head", "check")
