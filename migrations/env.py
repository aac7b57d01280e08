"""How Alembic reaches the database, and which models it compares the database with.

The URL comes with the command (`alembic -x url=… upgrade head`) or from FENCELOCK_DATABASE_URL, never from
a file: migrations run where a mistake in the URL costs most.

What a migration executes goes around the guard. One that changes the *rows* of a fenced table is run while no
worker is at work.
"""

from __future__ import annotations

import logging
import os
from typing import Any, Final

from alembic import context
from alembic.util import CommandError
from sqlalchemy import NullPool, create_engine

from shop import Base

OPTIONS: Final[dict[str, Any]] = {
    "target_metadata": Base.metadata,
    "compare_type": True,
    "compare_server_default": True,
    "render_as_batch": True,  # SQLite alters most things only by copying the table
}


def database_url() -> str:
    """Return the URL of the database to migrate.

    Raises:
        CommandError: if none was given.
    """
    given = context.get_x_argument(as_dictionary=True).get("url") or os.environ.get("FENCELOCK_DATABASE_URL")
    if not given:
        raise CommandError(
            "which database? Say `alembic -x url=postgresql+psycopg://user@host/name …`, "
            "or set FENCELOCK_DATABASE_URL"
        )
    return str(given)


def write_script() -> None:
    """Print the SQL instead of running it (`--sql`)."""
    # Named, because "pyformat" would double the percent signs of the script.
    context.configure(url=database_url(), literal_binds=True, dialect_opts={"paramstyle": "named"}, **OPTIONS)
    with context.begin_transaction():
        context.run_migrations()


def migrate() -> None:
    """Run the migrations on the database."""
    engine = create_engine(database_url(), poolclass=NullPool)
    with engine.connect() as connection:
        context.configure(connection=connection, **OPTIONS)
        with context.begin_transaction():
            context.run_migrations()


if hasattr(context.config.cmd_opts, "cmd"):  # Alembic's command line, not an example that migrates
    logging.basicConfig(format="%(message)s")
    logging.getLogger("alembic.runtime.migration").setLevel(logging.INFO)

if context.is_offline_mode():
    write_script()
else:
    migrate()
