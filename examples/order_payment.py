"""Two workers take payments for one order, and the slow one loses its lease half way: the ORM way.

Run `python examples/order_payment.py`. An order of 100.00 gets one payment of 30.00 and one of 50.00. While
the slow worker waits for the card company, its lease runs out, and the quick worker does its whole job. Then
the slow one writes what it had computed before. With another lock that would erase the quick one's payment.
Here it is not even sent, and had it been under way already, the database would refuse it. The slow worker
begins again from the start, and both payments count.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from threading import Event, Thread

from sqlalchemy import Engine
from sqlalchemy.orm import Session

from fencelock import LockLostError, StaleTokenError, claim, fenced_lock
from servers import shop_database
from shop import Order

ORDER = 1
TOTAL, SLOW_PAYMENT, QUICK_PAYMENT = 100_00, 30_00, 50_00
slow_worker_waits = Event()
quick_worker_is_done = Event()
refusals: list[Exception] = []


def pay(engine: Engine, worker: str, cents: int, charge_card: Callable[[], object], lease: float) -> None:
    """Charge a card and add the payment to the order."""
    # Without renew=False the lease would be extended for as long as the process lives. A process that is held
    # up as a whole extends nothing; that is what this stands for.
    lock = fenced_lock(f"order:{ORDER}", ttl=lease, renew=False)
    with lock as token, Session(engine) as session:
        # Claim before reading: from here on nobody with a smaller token can write this order.
        order = claim(session, Order, ORDER)
        paid = order.paid_cents
        session.commit()  # keep no transaction open while waiting for somebody else
        print(f"{worker}: token {token}, {paid / 100:.2f} are paid so far")

        charge_card()  # with an idempotency key, so that beginning again does not charge twice

        # UPDATE … SET paid_cents = …, last_fencing_token = token, last_write_id = a new number WHERE id = 1
        # AND last_fencing_token <= token AND last_write_id = what the order was loaded with
        order.paid_cents = paid + cents
        session.commit()
        print(f"{worker}: token {token}, wrote {(paid + cents) / 100:.2f}")


def pay_whatever_comes(
    engine: Engine, worker: str, cents: int, charge_card: Callable[[], object], lease: float
) -> None:
    """Pay, and begin again where a newer holder has taken over meanwhile, or may have."""
    while True:
        try:
            return pay(engine, worker, cents, charge_card, lease)
        except (LockLostError, StaleTokenError) as error:
            # What it was computed from is out of date. So all of it again: the lock, which brings a new
            # token, then the claim, then the reading.
            print(f"{worker}: refused: {error}")
            refusals.append(error)
            lease = 30.0


def charge_slowly() -> None:
    """Take longer than the lease lasts: until the quick worker has done its job."""
    slow_worker_waits.set()
    quick_worker_is_done.wait(30)


def main(engine: Engine) -> int:
    """Tell the story; return 0 if it went as told above."""
    with fenced_lock(f"order:{ORDER}"), Session(engine) as session:
        session.merge(Order(id=ORDER, status="open", total_cents=TOTAL, paid_cents=0))
        session.commit()

    slow = Thread(target=pay_whatever_comes, args=(engine, " slow", SLOW_PAYMENT, charge_slowly, 0.5))
    slow.start()
    slow_worker_waits.wait(30)
    pay_whatever_comes(engine, "quick", QUICK_PAYMENT, charge_card=lambda: None, lease=30.0)
    quick_worker_is_done.set()
    slow.join()

    with Session(engine) as session:
        order = session.get_one(Order, ORDER)
        print(f"{order.paid_cents / 100:.2f} of {order.total_cents / 100:.2f} are paid")
        as_told = order.paid_cents == SLOW_PAYMENT + QUICK_PAYMENT and len(refusals) == 1
    print("nothing is lost" if as_told else "this is not what should have happened")
    return 0 if as_told else 1


if __name__ == "__main__":
    with shop_database("Two workers take payments for one order.") as shop:
        sys.exit(main(shop))
