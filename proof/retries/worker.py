"""A worker that pays orders by the files of docs/errors.md, as printed; they are in its working folder.

It reads deliveries, `[number, cents, key]`, and answers each with `[number, how it ended, errors of tries]`.
"""

from __future__ import annotations

import importlib
import json
import logging
import sys
from typing import Any

from fencelock import FencelockError


def name(error: Exception) -> str:
    """Return the name that counts an error: the driver's own class, or ours and its `written`."""
    if isinstance(error, FencelockError):
        return f"{type(error).__name__}, written {error.written}"
    return f"driver: {type(getattr(error, 'orig', error)).__name__}"


class _Noting(logging.Handler):
    """Notes the warnings, such as the one of a lease that has ended after the COMMIT."""

    def __init__(self, errors: list[str]) -> None:
        super().__init__(logging.WARNING)
        self._errors = errors

    def emit(self, record: logging.LogRecord) -> None:
        what = "lease ended" if "stays committed" in record.getMessage() else record.getMessage()
        self._errors.append(f"only logged: {what}")


def main(policy: str, ttl: float) -> None:
    payments: Any = importlib.import_module("payments")
    again: Any = importlib.import_module("again").again
    persistent: Any = importlib.import_module("persistent").persistent
    payments.TTL = ttl
    errors: list[str] = []
    logger = logging.getLogger("fencelock.lock")
    logger.addHandler(_Noting(errors))
    logger.propagate = False

    def pay(number: int, cents: int, key: str) -> None:
        try:
            payments.pay(number, cents, key)
        except Exception as error:
            errors.append(name(error))
            raise

    for line in sys.stdin:
        delivery = json.loads(line)
        errors.clear()
        ended = "paid"
        try:
            if policy == "tenacity":
                persistent(pay)(*delivery)
            else:
                again(pay, *delivery)
        except Exception as error:  # noqa: BLE001 - it is counted, and delivered again
            ended = f"gave up: {name(error)}: {error}"
        sys.stdout.write(json.dumps([delivery[0], ended, errors]) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
