"""Writes that the guard cannot guard with any lease. `test_write_table` takes them all."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from sqlalchemy import DDL, Column, MetaData, String, Table, delete, insert, lambda_stmt, select, text, update
from sqlalchemy.dialects import mysql, sqlite
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from fencelock import FencedModel
from tests.guard.marks import Act
from tests.guard.rows import acts, refill


class Base(DeclarativeBase): ...


class Order(FencedModel, Base):
    __tablename__ = "re_orders"
    __fence_resource__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)
    status: Mapped[str] = mapped_column(String(20), default="new")
    kind: Mapped[str] = mapped_column(String(20), default="order")
    __mapper_args__ = {"polymorphic_on": "kind", "polymorphic_identity": "order"}  # noqa: RUF012


class Gift(Order):
    __tablename__ = "re_gifts"
    id: Mapped[int] = mapped_column(sa.ForeignKey("re_orders.id"), primary_key=True)
    ribbon: Mapped[str] = mapped_column(String(20), default="none")
    __mapper_args__ = {"polymorphic_identity": "gift"}  # noqa: RUF012


class Free(Base):
    __tablename__ = "re_free"
    id: Mapped[int] = mapped_column(primary_key=True)
    note: Mapped[str] = mapped_column(String(20), default="none")


orders: Any = Order.__table__
gifts: Any = Gift.__table__
free: Any = Free.__table__
#: An order, a gift and something unfenced; the fences are 5.
ROWS: dict[Any, Any] = {
    Order: [
        {"id": 1, "last_fencing_token": 5, "kind": "order"},
        {"id": 2, "last_fencing_token": 5, "kind": "gift"},
    ],
    Gift: {"id": 2},
    Free: {"id": 1},
}


def seed(engine: sa.Engine) -> None:
    refill(engine, ROWS)


TEXTS = {
    "text UPDATE": "UPDATE re_orders SET status = 'x'",
    "text DELETE": "delete\nfrom re_orders where id = 1",
    "text INSERT": "INSERT INTO re_orders (id, status, kind) VALUES (9, 'x', 'y')",
    "text REPLACE": "REPLACE INTO re_orders (id) VALUES (1)",
    "text, quoted name": """UPDATE "re_orders" SET status = 'x'""",
    "text, upper case": "UPDATE RE_ORDERS SET status = 'x'",
    "text, sub-table": "UPDATE re_gifts SET ribbon = 'x'",
    "text with columns": text("UPDATE re_orders SET status = 'x' RETURNING id").columns(id=sa.Integer),
    "text, TRUNCATE": "TRUNCATE re_orders",
    "text, MERGE": "MERGE INTO re_orders USING re_free ON true WHEN MATCHED THEN DELETE",
    "text, WITH": "WITH gone AS (DELETE FROM re_orders RETURNING id) SELECT * FROM gone",
    "text, behind a comment that ends with FOR": "-- what we wait for\nUPDATE re_orders SET status = 'x'",
    "text, behind a SELECT": "SELECT 1; UPDATE re_orders SET status = 'x'",
    "text, behind a comment": "/* fast */ COPY re_orders FROM '/dev/null'",
}
written: Any = update(orders).values(status="x").returning(orders.c.id)
again: Any = {"id": 1, "status": "x"}
UNGUARDABLE: dict[str, Act] = acts(
    {
        **TEXTS,
        "driver SQL": lambda s: s.connection().exec_driver_sql("UPDATE re_orders SET status = 'x'"),
        "DDL": DDL("UPDATE re_orders SET status = 'x'"),  # type: ignore[no-untyped-call]
        "sqlalchemy.table()": update(sa.table("re_orders", sa.column("status"))).values(status="x"),
        "another Table object": update(Table("re_orders", MetaData(), Column("status"))).values(status="x"),
        "reflected Table": lambda s: s.execute(
            delete(Table("re_orders", MetaData(), autoload_with=s.connection())).where(sa.literal(value=True))
        ),
        "DML in a CTE of a SELECT": select(written.cte("gone")),
        "DML in a CTE of an UPDATE": update(free)
        .values(note="x")
        .where(free.c.id.in_(select(delete(orders).returning(orders.c.id).cte("gone")))),
        "DML in a CTE, through an alias": select(
            update(orders.alias("q")).values(status="x").returning(orders.c.id).cte("gone")
        ),
        "DML in an added CTE": select(free).add_cte(delete(orders).cte("gone")),
        "sub-table, UPDATE": update(gifts).values(ribbon="x"),
        "sub-table, DELETE": lambda s: s.connection().execute(delete(gifts).where(gifts.c.id == 2)),
        "sub-table, INSERT": lambda s: s.connection().execute(insert(gifts), {"id": 1}),
        "sub-table, bulk": lambda s: s.bulk_update_mappings(Gift, [{"id": 2, "ribbon": "x"}]),
        "sub-table, ORM UPDATE": update(Gift)
        .where(Gift.id == 2)
        .values(ribbon="x")
        .execution_options(synchronize_session=False),
        "ON CONFLICT": sqlite.insert(orders).values(again).on_conflict_do_update(set_={"status": "x"}),
        "ON DUPLICATE KEY": mysql.insert(orders).values(again).on_duplicate_key_update(status="x"),
        "OR REPLACE": insert(orders).prefix_with("OR REPLACE").values(again),
        "IGNORE": insert(orders).prefix_with("IGNORE").values(again),
        "INSERT … SELECT": insert(orders).from_select(
            ["id", "status", "kind"], select(free.c.id + 10, free.c.note, free.c.note)
        ),
        "insert().values([])": insert(orders).values([{"id": 8, "status": "x"}, {"id": 9, "status": "x"}]),
        "lambda statement, UPDATE": lambda_stmt(
            lambda: update(Order).where(Order.id == 1).values(status="x")
        ),
        "lambda statement, DELETE": lambda_stmt(lambda: delete(orders)),
        "lambda statement, INSERT": lambda s: s.execute(lambda_stmt(lambda: insert(orders)), [{"id": 8}]),
        "lambda statement, spoilt": lambda s: s.execute(
            lambda_stmt(lambda: update(orders).values(status="x")).spoil()
        ),
        "lambda statement, sub-table": lambda_stmt(lambda: update(gifts).values(ribbon="x")),
        "from_statement": select(Order).from_statement(update(Order).values(status="x").returning(Order)),
        "from_statement, sub-table": select(Gift).from_statement(delete(gifts).returning(gifts.c.id)),
        "from_statement in a lambda": lambda_stmt(
            lambda: select(Order).from_statement(insert(Order).values(id=8).returning(Order))
        ),
        "from_statement, textual": select(Order).from_statement(
            text("UPDATE re_orders SET status = 'x' WHERE id = 1 RETURNING *")
        ),
        "INSERT by position": lambda s: s.connection().execute(
            insert(orders).values([(8, "x", "y"), (9, "x", "y")])
        ),
        "AUTOCOMMIT": lambda s: s.connection(execution_options={"isolation_level": "AUTOCOMMIT"}).execute(
            update(orders).where(orders.c.id == 1).values(status="x")
        ),
    }
)
