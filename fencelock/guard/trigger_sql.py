"""The SQL of the triggers for each family of databases; `triggers` fills in the names in braces.

On MariaDB and SQLite a trigger is one statement; on PostgreSQL it calls a function.
"""

# ruff: noqa: S608 - names are quoted by the dialect, and the rest is written here

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal

from fencelock.guard.tables import FENCE_COLUMN, WRITE_COLUMN

TRIGGERS: Final = ("fence", "ids", "strict", "inner")
Form = Literal["fence", "ids", "strict", "inner", "refuse", "renew"]

_MASK: Final = 2**53 - 2  # the modulus or bit mask with which random write ids stay below 2**53

#: Whether only columns of `__fence_excluded__`, which are the trigger's arguments, have changed. A BEFORE
#: trigger does not see generated columns yet.
_EXCLUDED: Final = """TG_NARGS > 0 AND (
        SELECT to_jsonb(NEW) - ignored = to_jsonb(OLD) - ignored
        FROM (SELECT TG_ARGV || array_agg(CAST(attname AS TEXT)) AS ignored FROM pg_attribute
              WHERE attrelid = TG_RELID AND attgenerated <> '') AS its)"""
#: Without the path, a function would run what the writer's search path has: another role's `concat`, say.
#: Without `pg_temp` at its end, PostgreSQL looks there first for types and tables. JSON shows all digits.
_PINNED: Final = "LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET extra_float_digits = 1"
_POSTGRESQL_FUNCTION: Final = f"""
CREATE FUNCTION {{refuse}}() RETURNS trigger {_PINNED} AS $fencelock$
BEGIN
    IF NEW.{FENCE_COLUMN} < OLD.{FENCE_COLUMN} THEN
        RAISE EXCEPTION USING ERRCODE = '23000', TABLE = TG_TABLE_NAME, SCHEMA = TG_TABLE_SCHEMA,
            MESSAGE = concat('fencelock: token ', NEW.{FENCE_COLUMN}, ' < ', OLD.{FENCE_COLUMN},
                             ' in ', TG_TABLE_NAME);
    END IF;
    IF {_EXCLUDED} THEN
        RETURN NEW;
    END IF;
    RAISE EXCEPTION USING ERRCODE = '23000', TABLE = TG_TABLE_NAME, SCHEMA = TG_TABLE_SCHEMA,
        MESSAGE = concat('fencelock: UPDATE without a token in ', TG_TABLE_NAME);
END $fencelock$
"""

_MARIADB_STALE: Final = f"""
    IF COALESCE(NEW.{FENCE_COLUMN}, -1) < OLD.{FENCE_COLUMN} THEN
        SET refusal = CONCAT('fencelock: token ', COALESCE(NEW.{FENCE_COLUMN}, -1), ' < ',
                             OLD.{FENCE_COLUMN}, ' in ', {{label}});
        SIGNAL SQLSTATE '23000' SET MESSAGE_TEXT = refusal;
    END IF;
"""

_SQLITE_STALE: Final = f"""
    SELECT RAISE(ABORT, {{stale}}) WHERE COALESCE(NEW.{FENCE_COLUMN}, -1) < OLD.{FENCE_COLUMN};
"""

#: Whether this transaction has written the row, and another trigger changes it now: the row keeps its id.
_OWN: Final = (
    "(pg_catalog.pg_trigger_depth() > 0 AND OLD.xmin = CAST(pg_catalog.pg_current_xact_id() AS XID))"
)

CREATE: Final[Mapping[str, Mapping[Form, str]]] = {
    "postgresql": {
        "refuse": _POSTGRESQL_FUNCTION,
        "renew": f"""
CREATE FUNCTION {{renew}}() RETURNS trigger {_PINNED} AS $fencelock$
BEGIN
    IF {_EXCLUDED} THEN
        RETURN NEW;
    END IF;
    NEW.{WRITE_COLUMN} := 1 + CAST(
        CAST('x' || right(CAST(gen_random_uuid() AS TEXT), 12) AS BIT(48)) AS BIGINT);
    RETURN NEW;
END $fencelock$
""",
        "ids": f"""
CREATE TRIGGER {{ids}} BEFORE UPDATE ON {{table}} FOR EACH ROW
WHEN (NEW.{WRITE_COLUMN} = OLD.{WRITE_COLUMN} AND NOT {_OWN})
EXECUTE FUNCTION {{renew}}({{excluded}})
""",
        # A strict trigger lets foreign keys, and triggers of other tables, write.
        "inner": f"""
CREATE TRIGGER {{inner}} BEFORE UPDATE ON {{table}} FOR EACH ROW
WHEN (NEW.{WRITE_COLUMN} = OLD.{WRITE_COLUMN} AND pg_catalog.pg_trigger_depth() > 0 AND NOT {_OWN})
EXECUTE FUNCTION {{renew}}({{excluded}})
""",
        "fence": f"""
CREATE TRIGGER {{fence}} BEFORE UPDATE ON {{table}} FOR EACH ROW
WHEN (NEW.{FENCE_COLUMN} < OLD.{FENCE_COLUMN})
EXECUTE FUNCTION {{refuse}}()
""",
        "strict": f"""
CREATE TRIGGER {{strict}} BEFORE UPDATE ON {{table}} FOR EACH ROW
WHEN (
    NEW.{FENCE_COLUMN} < OLD.{FENCE_COLUMN}
    OR NEW.{FENCE_COLUMN} = OLD.{FENCE_COLUMN} AND NEW.{WRITE_COLUMN} = OLD.{WRITE_COLUMN}
    AND pg_catalog.pg_trigger_depth() = 0
)
EXECUTE FUNCTION {{refuse}}({{excluded}})
""",
    },
    "mysql": {
        # With a random part, because UUID_SHORT() is unique within one node only.
        "ids": f"""
CREATE TRIGGER {{ids}} BEFORE UPDATE ON {{table}} FOR EACH ROW SET NEW.{WRITE_COLUMN} =
    IF(NEW.{WRITE_COLUMN} = OLD.{WRITE_COLUMN}{{changed}},
       1 + MOD(UUID_SHORT() ^ (FLOOR(RAND() * 1073741824) << 23), {_MASK}), NEW.{WRITE_COLUMN})
""",
        "fence": f"""
CREATE TRIGGER {{fence}} BEFORE UPDATE ON {{table}} FOR EACH ROW BEGIN
    DECLARE refusal VARCHAR(128) CHARACTER SET utf8mb4;{_MARIADB_STALE}END
""",
        "strict": f"""
CREATE TRIGGER {{strict}} BEFORE UPDATE ON {{table}} FOR EACH ROW BEGIN
    DECLARE refusal VARCHAR(128) CHARACTER SET utf8mb4;{_MARIADB_STALE}
    IF NEW.{FENCE_COLUMN} = OLD.{FENCE_COLUMN} AND NEW.{WRITE_COLUMN} = OLD.{WRITE_COLUMN}{{changed}} THEN
        SIGNAL SQLSTATE '23000' SET MESSAGE_TEXT = {{unfenced_update}};
    END IF;
END
""",
    },
    "sqlite": {
        "ids": f"""
CREATE TRIGGER {{ids}} AFTER UPDATE ON {{bare_table}} FOR EACH ROW
WHEN NEW.{WRITE_COLUMN} = OLD.{WRITE_COLUMN}{{changed}} BEGIN
    UPDATE {{bare_table}} SET {WRITE_COLUMN} = 1 + (random() & {_MASK}) WHERE rowid = NEW.rowid;
END
""",
        "fence": f"""
CREATE TRIGGER {{fence}} BEFORE UPDATE ON {{bare_table}} FOR EACH ROW BEGIN{_SQLITE_STALE}END
""",
        "strict": f"""
CREATE TRIGGER {{strict}} BEFORE UPDATE ON {{bare_table}} FOR EACH ROW BEGIN{_SQLITE_STALE}
    SELECT RAISE(ABORT, {{unfenced_update}})
    WHERE NEW.{FENCE_COLUMN} = OLD.{FENCE_COLUMN} AND NEW.{WRITE_COLUMN} = OLD.{WRITE_COLUMN}{{changed}};
END
""",
    },
}

DROP: Final = {
    "postgresql": "DROP TRIGGER IF EXISTS {{{form}}} ON {{table}}",
    "mysql": "DROP TRIGGER IF EXISTS {{{form}}}",
    "sqlite": "DROP TRIGGER IF EXISTS {{{form}}}",
}

#: Whether a column has changed. MariaDB and SQLite have no value for a whole row, so all columns are listed.
CHANGED: Final = {
    # `<=>` compares text as its collation does; as text, numbers have few digits.
    "mysql": "NOT (NEW.{0} <=> OLD.{0} AND CAST(NEW.{0} AS BINARY) <=> CAST(OLD.{0} AS BINARY))",
    "sqlite": "NEW.{0} IS NOT OLD.{0} COLLATE BINARY",
}

#: The triggers of a table, whether each is of this version, and its arguments or its SQL.
LOOK: Final = {
    "postgresql": """
        SELECT tgname, COALESCE(proconfig[1], '') = 'search_path=pg_catalog, pg_temp', tgargs
        FROM pg_catalog.pg_trigger
        JOIN pg_catalog.pg_class ON pg_class.oid = tgrelid
        JOIN pg_catalog.pg_namespace ON pg_namespace.oid = relnamespace
        JOIN pg_catalog.pg_proc ON pg_proc.oid = tgfoid
        WHERE relname = CAST(:table AS TEXT) AND tgenabled IN ('O', 'A') AND NOT tgisinternal AND CASE
            WHEN CAST(:schema AS TEXT) IS NULL THEN pg_catalog.pg_table_is_visible(pg_class.oid)
            ELSE nspname = CAST(:schema AS TEXT) END
    """,
    "mysql": """
        SELECT trigger_name, TRUE, action_statement FROM information_schema.triggers
        WHERE event_object_table = :table AND event_object_schema = COALESCE(:schema, DATABASE())
    """,
    "sqlite": "SELECT name, 1, sql FROM {schema}sqlite_master WHERE type = 'trigger' AND tbl_name = :table",
}
