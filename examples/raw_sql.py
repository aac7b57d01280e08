"""Fenced writes without the unit of work: SQLAlchemy Core, and a bare psycopg cursor.

Run `python examples/raw_sql.py`. Ten pieces are in stock. A worker takes the lock and is held up until its
lease has run out. Another one takes three pieces with Core, and then two with a cursor that no guard watches.
Then the first one wakes up and tries to write, in both ways, and gets nowhere: five pieces are left.

The condition is in the statement itself, so any language can join in: a program writes a row only with
`SET last_fencing_token = <token>, last_write_id = <a random number>` and `AND last_fencing_token <= <token>`.
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor

import psycopg
from sqlalchemy import Engine, select, update
from sqlalchemy.orm import Session

from fencelock import (
    LockLostError,
    StaleTokenError,
    conditional_update,
    fenced_lock,
)
from servers import shop_database
from shop import StockItem

ITEM = 7
RESOURCE = f"stock:{ITEM}"


def take_with_core(engine: Engine, pieces: int, token: int) -> None:
    """Take pieces with one Core statement, which reads and writes at once; nothing needs to be claimed.

    Raises:
        StaleTokenError: if a newer holder has been here.
    """
    take = (
        update(StockItem)
        .where(StockItem.id == ITEM, StockItem.quantity >= pieces)
        .values(quantity=StockItem.quantity - pieces)
    )
    with engine.begin() as connection:
        result = connection.execute(take, execution_options={"fencing_token": token})
        print(
            f"  Core took {pieces} with token {token}" if result.rowcount else "  Core: not enough in stock"
        )


def take_with_cursor(dsn: str, pieces: int, token: int) -> bool:
    """Take pieces with a bare cursor: claim, read, write; return whether the database let us.

    Nobody raises StaleTokenError here: look at the rowcount, and roll back if it is 0.
    """
    key = {"id": ITEM}
    with psycopg.connect(dsn) as connection, connection.cursor() as cursor:
        # Without values it only raises the fence and locks the row: a claim.
        cursor.execute(*conditional_update("shop_stock_items", {}, key, token))
        if cursor.rowcount == 0:
            connection.rollback()
            print(f"  psycopg: no row for token {token}, so it is stale (or the item is gone)")
            return False
        cursor.execute("SELECT quantity FROM shop_stock_items WHERE id = %(id)s", key)
        (quantity,) = cursor.fetchone() or (0,)
        cursor.execute(*conditional_update("shop_stock_items", {"quantity": quantity - pieces}, key, token))
        print(f"  psycopg took {pieces} with token {token}")
        return cursor.rowcount == 1


def work_meanwhile(engine: Engine, dsn: str) -> bool:
    """Do the second worker's job, in both ways; return whether the cursor wrote."""
    with fenced_lock(RESOURCE) as token:  # waits until the first worker's lease has run out
        print(f"the second worker has token {token}")
        take_with_core(engine, 3, token)
        return take_with_cursor(dsn, 2, token)


def main(engine: Engine) -> int:
    """Tell the story; return 0 if it went as told above."""
    dsn = engine.url.set(drivername="postgresql").render_as_string(hide_password=False)
    with fenced_lock(RESOURCE), Session(engine) as session:
        session.merge(StockItem(id=ITEM, name="tea pot", quantity=10))
        session.commit()

    # Not renewed, as in a process that is held up as a whole.
    slow = fenced_lock(RESOURCE, ttl=0.5, renew=False)
    stale = slow.acquire().token
    print(f"the first worker has token {stale}, and is held up")

    # In a thread of its own: this one would simply enter again what it holds.
    with ThreadPoolExecutor(1) as second_worker:
        written = second_worker.submit(work_meanwhile, engine, dsn).result()

    print("the first worker wakes up, and believes that it still holds the lock")
    refused = 0
    try:
        take_with_core(engine, 3, stale)
    except StaleTokenError as error:
        refused += 1
        print(f"  Core: {error}")
    refused += not take_with_cursor(dsn, 2, stale)
    try:
        slow.release()
    except LockLostError as error:
        print(f"  {error}")

    with engine.connect() as connection:
        left = connection.scalar(select(StockItem.quantity).where(StockItem.id == ITEM))
    print(f"{left} pieces are left")
    return 0 if (left, written, refused) == (5, True, 2) else 1


if __name__ == "__main__":
    with shop_database("Fenced writes with Core and with psycopg.") as shop:
        if shop.dialect.name != "postgresql":
            sys.exit("this example shows psycopg's cursor, so its --database has to be a PostgreSQL")
        sys.exit(main(shop))
