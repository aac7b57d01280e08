"""A program with metrics, for the tests to break: it locks, writes, waits and forgets, one line a thing.

    python -m tests.observe.shop NODES DATABASE

It prints the port of its metrics. Lines on its standard input say what to do.
"""

from __future__ import annotations

import sys
import threading
import time
from contextlib import suppress

from prometheus_client import start_http_server
from sqlalchemy import Engine, create_engine, update
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from fencelock import FencedModel, FencelockError, Redlock, claim, fence_table
from fencelock.observe import history, prometheus


class Base(DeclarativeBase): ...


class Order(FencedModel, Base):
    __tablename__ = "orders"
    __fence_resource__ = "order:{id}"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    paid: Mapped[int] = mapped_column(default=0)


fence_table(Base.metadata)


class Wanting(DeclarativeBase): ...


class Watched(FencedModel, Wanting):
    __tablename__ = "orders"
    __fence_resource__ = "order:{id}"
    __fence_trigger__ = True
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)


class Shop:
    """What it does: `main` calls a method for each line."""

    def __init__(self, nodes: str, engine: Engine) -> None:
        self.authority = Redlock(nodes, node_timeout=0.3, connect_timeout=0.5, outage_grace=0.3)
        self.engine = engine

    def contend(self) -> None:
        def work() -> None:
            while True:
                with suppress(FencelockError), self.authority.lock("slow:1", timeout=60):
                    time.sleep(1.2)

        for _ in range(4):
            threading.Thread(target=work, daemon=True).start()

    def give_up(self) -> None:
        def keep() -> None:
            with self.authority.lock("kept:1", max_hold=None):
                while True:
                    time.sleep(1)

        def work() -> None:
            while True:
                with suppress(FencelockError), self.authority.lock("kept:1", timeout=0.1):
                    pass

        for each in (keep, work):
            threading.Thread(target=each, daemon=True).start()
            time.sleep(0.1)

    def pay(self, ttl: str) -> None:
        with Session(self.engine) as session:
            try:
                with self.authority.lock("order:1", ttl=float(ttl), if_lost="warn"):
                    order = claim(session, Order, 1)
                    session.commit()
                    say("loaded")
                    sys.stdin.readline()
                    order.paid += 1
                    session.commit()
                    say("paid")
            except FencelockError as error:
                say(type(error).__name__)

    def want(self) -> None:
        """Try to pay the order until it is paid, and print each error on the way."""
        while True:
            try:
                with self.authority.lock("order:1", timeout=0.5), Session(self.engine) as session:
                    claim(session, Order, 1).paid += 1
                    session.commit()
                    say("paid by the second worker")
                    return
            except FencelockError as error:
                say(error)

    def forget(self) -> None:
        """Write without a lock."""
        with Session(self.engine) as session, suppress(FencelockError):
            session.execute(update(Order).values(paid=7))

    def ask(self) -> None:
        def work() -> None:
            while True:
                with suppress(FencelockError), self.authority.lock("any:1", timeout=0.2):
                    pass
                time.sleep(0.1)

        threading.Thread(target=work, daemon=True).start()


def say(word: object) -> None:
    sys.stdout.write(f"{word}\n")
    sys.stdout.flush()


def main(nodes: str, database: str) -> None:
    prometheus.instrument()
    engine = create_engine(database)
    Base.metadata.create_all(engine)
    recorder = history.record(engine)
    shop = Shop(nodes, engine)
    prometheus.watch_nodes(shop.authority, 0.3)
    server, _ = start_http_server(0, "127.0.0.1")
    say(server.server_address[1])
    for line in iter(sys.stdin.readline, ""):
        word, *arguments = line.split()
        if word == "want":
            threading.Thread(target=shop.want, daemon=True).start()
        else:
            getattr(shop, word)(*arguments)
    recorder.close()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
