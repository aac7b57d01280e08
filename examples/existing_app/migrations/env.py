"""How Alembic reaches the database of this project."""

from __future__ import annotations

from alembic import context
from sqlalchemy import NullPool, create_engine

from models import Base

URL = context.get_x_argument(as_dictionary=True).get("url", "sqlite:///shop.db")

if context.is_offline_mode():
    context.configure(url=URL, target_metadata=Base.metadata, literal_binds=True, render_as_batch=True)
    with context.begin_transaction():
        context.run_migrations()
else:
    with create_engine(URL, poolclass=NullPool).connect() as connection:
        context.configure(connection=connection, target_metadata=Base.metadata, render_as_batch=True)
        with context.begin_transaction():
            context.run_migrations()
