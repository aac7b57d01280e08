"""What this project does: it charges a card and books the payment."""

from __future__ import annotations

from collections.abc import Callable

from sqlalchemy import Engine
from sqlalchemy.orm import Session

from models import Invoice


def pay(engine: Engine, invoice_id: int, cents: int, charge: Callable[[int], None]) -> None:
    """Charge a card, which may take a while, and book what was paid."""
    with Session(engine) as session:
        invoice = session.get_one(Invoice, invoice_id)
        charge(cents)
        invoice.paid_cents += cents
        session.commit()
