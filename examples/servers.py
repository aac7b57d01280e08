"""Where the examples find a database and nodes: embedded ones, unless the command line names others.

Apart from the scripts because it is the same for all, and what an application has in its configuration.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

from alembic import command
from alembic.config import Config
from sqlalchemy import Engine, create_engine

import fencelock
from proof.servers import Nodes, Postgres

MIGRATIONS: Final = Path(__file__).parent.parent / "alembic.ini"


@contextmanager
def shop_database(description: str) -> Iterator[Engine]:
    """Make the nodes this process' default, and yield an engine on a database with the shop's tables."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--database", metavar="URL", help="SQLAlchemy URL; an embedded PostgreSQL by default")
    parser.add_argument("--nodes", metavar="URL,URL,…", help="initialised nodes; three embedded by default")
    arguments = parser.parse_args()
    with ExitStack() as stack:
        if arguments.nodes is None:
            quorum = fencelock.Redlock(stack.enter_context(Nodes(3)).url)
            quorum.init()  # once in the life of nodes; for your own: fencelock init URL URL URL
        else:
            quorum = fencelock.Redlock(arguments.nodes)
        fencelock.configure(stack.enter_context(quorum))
        database = arguments.database or stack.enter_context(Postgres()).create_database()
        engine = create_engine(database)
        stack.callback(engine.dispose)
        command.upgrade(Config(MIGRATIONS, cmd_opts=argparse.Namespace(x=[f"url={database}"])), "head")
        yield engine
