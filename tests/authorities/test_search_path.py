"""PostgreSQL runs what was written here, though another role may create functions and operators.

It prefers one whose types match exactly to the one in `pg_catalog`, if a schema of the search path has it
(CVE-2018-1058). That would run with the rights of the role that locks or writes.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import psycopg
import pytest
from sqlalchemy import Engine, MetaData, create_engine
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from sqlalchemy.schema import CreateTable

from fencelock import AuthorityError, Database, FencedModel, lease_table
from fencelock.authority.database.statements import Statements
from fencelock.guard import triggers

#: Types for which decoys are created; functions of three arguments only for the first ones.
_TYPES: Final = ["text", "varchar", "name", "int4", "int8", "float8", "numeric", "timestamptz", "interval"]
_FEW: Final = 3
_OPERATORS: Final = ["=", "<>", "<", "<=", ">", ">=", "+", "-", "*", "||", "|", "&", "<<", ">>"]
_KEYWORDS: Final = {"in", "and", "values", "fencelock_leases", "varchar", "bit", "cast", "or", "not", "when"}
_DECOYS: Final = """
DO $decoys$
DECLARE
    types text[] := ARRAY[{types}];
    given text;
    a text; b text; c text; f text; o text;
BEGIN
    FOREACH f IN ARRAY ARRAY[{functions}] LOOP
        FOREACH a IN ARRAY types LOOP
            EXECUTE pg_catalog.format('CREATE FUNCTION public.%I(%s) RETURNS %s {body}', f, a, a);
            FOREACH b IN ARRAY types LOOP
                EXECUTE pg_catalog.format('CREATE FUNCTION public.%I(%s, %s) RETURNS %s {body}', f, a, b, a);
                FOREACH c IN ARRAY types[1:{few}] LOOP
                    CONTINUE WHEN NOT a = ANY (types[1:{few}]) OR NOT b = ANY (types[1:{few}]);
                    EXECUTE pg_catalog.format(
                        'CREATE FUNCTION public.%I(%s, %s, %s) RETURNS %s {body}', f, a, b, c, a);
                END LOOP;
            END LOOP;
        END LOOP;
    END LOOP;
    FOREACH a IN ARRAY types LOOP
        FOREACH b IN ARRAY types LOOP
            EXECUTE pg_catalog.format(
                'CREATE FUNCTION public.decoy_of_comparison(%s, %s) RETURNS bool {body}', a, b);
            EXECUTE pg_catalog.format(
                'CREATE FUNCTION public.decoy_of_value(%s, %s) RETURNS %s {body}', a, b, a);
        END LOOP;
    END LOOP;
    FOREACH o IN ARRAY ARRAY[{operators}] LOOP
        f := CASE WHEN o IN ('=', '<>', '<', '<=', '>', '>=') THEN 'comparison' ELSE 'value' END;
        FOREACH a IN ARRAY types LOOP
            FOREACH b IN ARRAY types LOOP
                EXECUTE pg_catalog.format(
                    'CREATE OPERATOR public.%s (LEFTARG = %s, RIGHTARG = %s, PROCEDURE = public.decoy_of_%s)',
                    o, a, b, f);
            END LOOP;
        END LOOP;
    END LOOP;
END $decoys$
"""
_BODY: Final = "LANGUAGE plpgsql AS $body$ BEGIN RAISE EXCEPTION ''a decoy ran''; END $body$"


class Base(DeclarativeBase):
    """The models."""


class Order(FencedModel, Base):
    __tablename__ = "decoy_orders"
    __fence_resource__ = "order:{id}"
    __fence_trigger__ = True
    id: Mapped[int] = mapped_column(primary_key=True)
    status: Mapped[str]


class Parcel(FencedModel, Base):
    __tablename__ = "decoy_parcels"
    __fence_resource__ = "parcel:{id}"
    __fence_trigger__ = "strict"
    id: Mapped[int] = mapped_column(primary_key=True)
    status: Mapped[str]


def _create_decoys(engine: Engine) -> None:
    """Create them for all functions that the library names."""
    made = Statements("postgresql", "fencelock_leases", engine.dialect)
    said = [str(each) for each in vars(made).values()]
    said += [str(each.compile(dialect=engine.dialect)) for each in triggers.create(Order, "postgresql")]
    names = {each.lower() for each in re.findall(r"\b([A-Za-z_]+)\(", " ".join(said))} - _KEYWORDS
    names -= {each for each in names if each.startswith("fencelock_") or each in _TYPES}
    assert {"pg_notify", "replace", "concat", "set_config"} <= names
    quoted = {"types": _TYPES, "functions": sorted(names), "operators": _OPERATORS}
    listed = {key: ", ".join(f"'{each}'" for each in values) for key, values in quoted.items()}
    with as_administrator(engine) as connection:
        connection.execute(_DECOYS.format(**listed, few=_FEW, body=_BODY))


def as_administrator(engine: Engine) -> psycopg.Connection[Any]:
    """Connect without the guard."""
    return psycopg.connect(
        engine.url.set(drivername="postgresql").render_as_string(hide_password=False), autocommit=True
    )


@pytest.fixture(scope="module")
def engine(postgres: Any) -> Iterator[Engine]:
    """Return an engine on a database whose schema `public` has decoys."""
    engine = create_engine(postgres.create_database())
    lease_table(Base.metadata)
    Base.metadata.create_all(engine)
    with as_administrator(engine) as connection:
        for table in ("decoy_orders", "decoy_parcels"):
            connection.execute(f"INSERT INTO {table} VALUES (1, 'new', 1000, 7)")  # noqa: S608
    _create_decoys(engine)
    yield engine
    engine.dispose()


def test_decoys_are_run_where_types_are_not_exact(engine: Engine) -> None:
    """The control."""
    for sql in (
        "SELECT CAST('a' AS VARCHAR) = CAST('b' AS VARCHAR)",
        "SELECT concat(CAST('a' AS VARCHAR), 1)",
    ):
        with engine.connect() as connection, pytest.raises(DBAPIError, match="a decoy ran"):
            connection.exec_driver_sql(sql)


@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
def test_the_authority_runs_no_decoy(engine: Engine, driver: str) -> None:
    """Each statement of a life of leases: on either driver, which give their parameters different types."""
    url = engine.url.set(drivername=f"postgresql+{driver}")
    if driver == "asyncpg":
        pytest.importorskip("asyncpg")
    _live(Database(url)) if driver == "psycopg" else _live_in_a_loop(Database(url))


def _live(authority: Database) -> None:
    with authority:
        assert authority.init() is False
        held = authority.lock("order:1", "order:2", ttl=5, renew=False)
        held.acquire()
        held.extend(6)
        held.remint()
        assert {each.resource for each in authority.inspect()} == {"order:1", "order:2"}
        with ThreadPoolExecutor() as threads:
            waiter = threads.submit(authority.lock("order:1", timeout=5, ttl=5, renew=False).acquire)
            time.sleep(0.3)
            held.release()
            waiter.result()
        assert authority.force_release("order:1")
        assert authority.prune(7200) == 0


def _live_in_a_loop(authority: Database) -> None:
    async def live() -> None:
        assert await authority.aio.init() is False
        async with authority.lock("order:1", ttl=5) as token:
            assert token
            assert await authority.aio.inspect("order:1")
        await authority.aio.close()

    asyncio.run(live())


def test_triggers_run_no_decoy(engine: Engine) -> None:
    """Not even for an administrator that writes by SQL."""
    with as_administrator(engine) as connection:
        connection.execute("UPDATE decoy_orders SET status = 'x'")
        with pytest.raises(psycopg.Error, match="fencelock: token 5 < 1000 in decoy_orders"):
            connection.execute("UPDATE decoy_orders SET last_fencing_token = 5")
        with pytest.raises(psycopg.Error, match="fencelock: UPDATE without a token in decoy_parcels"):
            connection.execute("UPDATE decoy_parcels SET status = 'x'")
    with engine.connect() as connection:
        assert triggers.installed(connection, "decoy_orders") is True
        assert triggers.installed(connection, "decoy_parcels") == "strict"


@pytest.fixture
def owned(postgres: Any) -> Iterator[Engine]:
    """Return an engine on a database of its own, where `mallory` is a role that may create there."""
    engine = create_engine(postgres.create_database())
    with as_administrator(engine) as connection:
        connection.execute("DROP ROLE IF EXISTS mallory")
        connection.execute("CREATE ROLE mallory")
        connection.execute("CREATE SCHEMA AUTHORIZATION mallory; GRANT CREATE ON SCHEMA public TO mallory")
    yield engine
    with as_administrator(engine) as connection:
        connection.execute("DROP OWNED BY mallory CASCADE; DROP ROLE mallory")
    engine.dispose()


_DOMAIN: Final = """
SET ROLE mallory;
CREATE TABLE mallory.seen (role TEXT);
CREATE FUNCTION mallory.look(given pg_catalog.text) RETURNS bool LANGUAGE plpgsql AS
    $$ BEGIN INSERT INTO mallory.seen VALUES (current_user); RETURN true; END $$;
CREATE DOMAIN pg_temp.text AS pg_catalog.text CHECK (mallory.look(VALUE));
CREATE TEMP TABLE pg_attribute AS
    SELECT 'status' AS attname, 's' AS attgenerated, oid AS attrelid FROM pg_catalog.pg_class;
RESET ROLE
"""


def test_triggers_use_nothing_temporary_of_a_writer(owned: Engine) -> None:
    """PostgreSQL looks for types and tables there first. The trigger may run as another role."""
    Base.metadata.create_all(owned)
    with as_administrator(owned) as connection:
        for table in ("decoy_orders", "decoy_parcels"):
            connection.execute(f"INSERT INTO {table} VALUES (1, 'new', 1000, 7)")  # noqa: S608
        connection.execute(_DOMAIN)
        connection.execute("CREATE FUNCTION pg_temp.control(text) RETURNS text LANGUAGE sql AS 'SELECT $1'")
        connection.execute("SELECT pg_temp.control('a')")
        assert connection.execute("DELETE FROM mallory.seen").rowcount, "the control runs the domain's code"
        connection.execute("UPDATE decoy_orders SET status = 'x'")
        with pytest.raises(psycopg.Error, match="UPDATE without a token in decoy_parcels"):
            connection.execute("UPDATE decoy_parcels SET status = 'x'")
        assert connection.execute("SELECT role FROM mallory.seen").fetchall() == []


def test_a_table_of_another_role_is_refused(owned: Engine) -> None:
    """Its triggers would run as each role that locks, and mint tokens twice."""
    with as_administrator(owned) as connection:
        connection.execute("SET ROLE mallory")
        connection.execute(
            str(CreateTable(lease_table(MetaData(), schema="public")).compile(dialect=owned.dialect))
        )
        connection.execute(
            "CREATE FUNCTION mallory.mint() RETURNS trigger LANGUAGE plpgsql AS "
            "$$ BEGIN NEW.token := 5; RETURN NEW; END $$"
        )
        connection.execute(
            "CREATE TRIGGER mint BEFORE INSERT ON public.fencelock_leases FOR EACH ROW "
            "EXECUTE FUNCTION mallory.mint()"
        )
    with Database(owned) as authority, pytest.raises(AuthorityError, match="see which role has made it"):
        authority.init()


def test_a_strict_trigger_gives_a_new_id_to_what_another_trigger_writes(owned: Engine) -> None:
    """So a holder that has read the row before notices it; foreign keys pass in the same way."""
    Base.metadata.create_all(owned)
    with as_administrator(owned) as connection:
        connection.execute("INSERT INTO decoy_parcels VALUES (1, 'new', 1000, 7)")
        connection.execute(
            "CREATE TABLE others (x INT); CREATE FUNCTION write() RETURNS trigger LANGUAGE plpgsql AS "
            "$$ BEGIN UPDATE decoy_parcels SET status = 'x'; RETURN NEW; END $$;"
            "CREATE TRIGGER t BEFORE INSERT ON others FOR EACH ROW EXECUTE FUNCTION write()"
        )
        connection.execute("INSERT INTO others VALUES (1)")
        found = connection.execute("SELECT status, last_write_id FROM decoy_parcels").fetchone()
        assert found is not None
        assert (found[0], found[1] == 7) == ("x", False)
        with connection.transaction():  # the transaction's own row keeps its id
            connection.execute("UPDATE decoy_parcels SET last_write_id = 8")
            connection.execute("INSERT INTO others VALUES (1)")
        assert connection.execute("SELECT last_write_id FROM decoy_parcels").fetchone() == (8,)
