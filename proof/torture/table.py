"""The tables that the workers write to: a counter for each resource, with a fence and without.

Beside them there is the fence table, whose name is not ours to choose. On a database of the user's it is made
only where there is none, and dropped at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from sqlalchemy import (
    BigInteger,
    Engine,
    MetaData,
    NullPool,
    String,
    Table,
    create_engine,
    insert,
    inspect,
    make_url,
    select,
)
from sqlalchemy.exc import InvalidRequestError
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from fencelock.authority.database.database import Database
from fencelock.authority.database.files import file_of
from fencelock.authority.database.table import LEASE_TABLE, lease_table
from fencelock.guard import FencedModel, fence_table
from fencelock.guard.sessions import BYPASS
from proof.torture.history import Row


class Base(DeclarativeBase):
    """The tables of a run."""


class Counter(FencedModel, Base):
    """How often something has been added, in a fenced table."""

    __tablename__ = "fencelock_torture_counters"
    __fence_resource__ = "{name}"

    name: Mapped[str] = mapped_column(String(40), primary_key=True)
    value: Mapped[int] = mapped_column(BigInteger, default=0)


class VersionedCounter(FencedModel, Base):
    """The same with a version beside the fence."""

    __tablename__ = "fencelock_torture_versioned_counters"
    __fence_resource__ = "{name}"

    name: Mapped[str] = mapped_column(String(40), primary_key=True)
    value: Mapped[int] = mapped_column(BigInteger, default=0)
    version: Mapped[int] = mapped_column(BigInteger)
    __mapper_args__ = {"version_id_col": version}  # noqa: RUF012 - as SQLAlchemy has it


class PlainCounter(Base):
    """The same in an ordinary table: the control."""

    __tablename__ = "fencelock_torture_plain_counters"

    name: Mapped[str] = mapped_column(String(40), primary_key=True)
    value: Mapped[int] = mapped_column(BigInteger, default=0)


FENCES = fence_table(Base.metadata)
#: What speaks asyncio where the blocking driver does not.
_ASYNC_DRIVERS = {"sqlite": "sqlite+aiosqlite", "mysql": "mysql+asyncmy", "mariadb": "mariadb+asyncmy"}
#: Where a driver has the same name in both worlds, its name in the one of coroutines.
_OF_COROUTINES = {"postgresql+psycopg": "postgresql+psycopg_async"}


def engine_on(url: str) -> Engine:
    """Return an engine; a worker that is paused in a transaction is waited for."""
    if make_url(url).get_backend_name() == "sqlite":
        return create_engine(url, connect_args={"timeout": 60})
    return create_engine(url)


def async_engine_on(url: str) -> AsyncEngine | None:
    """Return an engine for coroutines, or None where no driver for that is installed."""
    made = make_url(url)
    driver = _ASYNC_DRIVERS.get(made.get_backend_name(), made.drivername)
    options = {"connect_args": {"timeout": 60}} if made.get_backend_name() == "sqlite" else {}
    try:
        return create_async_engine(made.set(drivername=driver), **options)
    except (ImportError, InvalidRequestError):
        return None


def authority_on(url: str, *, for_tasks: bool) -> Database:
    made = make_url(url)
    driver = _ASYNC_DRIVERS.get(made.get_backend_name(), _OF_COROUTINES.get(made.drivername))
    if for_tasks and driver is not None:
        with suppress(ImportError):
            return Database(made.set(drivername=driver))
    return Database(url)


def has_lease_table(url: str) -> bool:
    named = make_url(url)
    if named.get_backend_name() == "sqlite":
        return Path(file_of(named, None).database or "").exists()
    return _has_table(url, LEASE_TABLE)


def drop_lease_table(url: str) -> None:
    named = make_url(url)
    if named.get_backend_name() == "sqlite":
        for end in ("", "-wal", "-shm"):
            Path(f"{file_of(named, None).database}{end}").unlink(missing_ok=True)
        return
    engine = create_engine(url, poolclass=NullPool)
    lease_table(MetaData()).drop(engine, checkfirst=True)


def has_fence_table(url: str) -> bool:
    return _has_table(url, FENCES.name)


def _has_table(url: str, name: str) -> bool:
    return inspect(create_engine(url, poolclass=NullPool)).has_table(name)


def create_tables(engine: Engine, resources: Sequence[str], *, fences: bool = True) -> None:
    """Make new tables, with a counter at 0 for each resource; and the fence table, if that is wanted."""
    drop_tables(engine, fences=fences)
    Base.metadata.create_all(engine, tables=tables(fences=fences))
    rows = [{"name": name, "value": 0} for name in resources]
    with engine.begin() as connection:
        for model, more in ((Counter, {}), (VersionedCounter, {"version": 1}), (PlainCounter, {})):
            values = [{**row, **more} for row in rows]
            connection.execute(insert(model), values, execution_options={"fencelock": BYPASS})


def drop_tables(engine: Engine, *, fences: bool = True) -> None:
    Base.metadata.drop_all(engine, tables=tables(fences=fences))


def tables(*, fences: bool) -> list[Table]:
    return [each for each in Base.metadata.sorted_tables if fences or each is not FENCES]


def name_of_versioned(row: str) -> str:
    """Return how a history names the versioned counter of a resource, which is another row."""
    return f"{row}/versioned"


def read_rows(engine: Engine, *, guard: bool) -> list[Row]:
    with Session(engine) as session:
        if guard:
            return [
                Row(one.name, one.value, one.last_fencing_token) for one in session.scalars(select(Counter))
            ] + [
                Row(name_of_versioned(one.name), one.value, one.last_fencing_token)
                for one in session.scalars(select(VersionedCounter))
            ]
        return [Row(one.name, one.value, None) for one in session.scalars(select(PlainCounter))]
