"""Orders with SQLModel and FastAPI in blocking code, on SQLite, which is the authority, too."""

import os
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar

from fastapi import Depends, FastAPI, HTTPException
from sqlmodel import Field, Session, SQLModel, create_engine

from fencelock import (
    configure,
    fence_table,
    fenced_lock,
    lease_table,
)
from fencelock.guard import fence_column, write_id_column
from fencelock.integrations.fastapi import answer_errors


class Fenced(SQLModel):
    last_fencing_token: ClassVar[Any] = fence_column()
    last_write_id: ClassVar[Any] = write_id_column()


class OrderChange(SQLModel):
    status: str = "new"


class Order(OrderChange, Fenced, table=True):
    __tablename__ = "orders"
    __fence_resource__ = "order:{id}"
    id: int | None = Field(default=None, primary_key=True)


fence_table(SQLModel.metadata)  # for fenced_transaction and gate
lease_table(SQLModel.metadata)  # needed by every database but SQLite
engine = create_engine(os.environ.get("DATABASE_URL", "sqlite:///shop.db"))
configure(engine)  # this database is the authority


def get_session() -> Iterator[Session]:
    with Session(engine) as session:
        yield session


SessionDep = Annotated[Session, Depends(get_session)]
app = FastAPI()
answer_errors(app)


@app.post("/orders")
def add(change: OrderChange, session: SessionDep) -> Order:
    with fenced_lock("new order", timeout=2):  # any name will do, because the database makes the key
        order = Order.model_validate(change)
        session.add(order)
        session.commit()
        session.refresh(order)
    return order


@app.patch("/orders/{number}")
def edit(number: int, change: OrderChange, session: SessionDep) -> Order:
    session.rollback()  # ends the transaction that another dependency has begun
    with fenced_lock(f"order:{number}", timeout=2):  # here, and not in a dependency
        order = session.get(Order, number)
        if order is None:
            raise HTTPException(404)
        order.sqlmodel_update(change)
        session.commit()
        session.refresh(order)
    return order


if __name__ == "__main__":  # once; a real project migrates instead
    SQLModel.metadata.create_all(engine)
