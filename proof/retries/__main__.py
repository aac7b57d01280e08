"""Has workers pay orders by the retry policy of docs/errors.md while everything breaks; then a control.

python -m proof.retries                  # ten minutes
python -m proof.retries --seconds 60 --seed 3

The exit status is 1 if an order was paid twice or never, if no answer to a COMMIT was lost, and if the
control, which does not look first, has paid none twice.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from proof.retries.shop import Shop


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=600.0, help="how long to take orders")
    parser.add_argument("--seed", type=int, default=0, help="of what goes wrong")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = Shop(Path(folder), seed=given.seed).run(given.seconds)
    _say(f"looks first, {given.seconds:g} s:", *result.lines())
    with tempfile.TemporaryDirectory() as folder:
        control = Shop(Path(folder), looks=False, chance=0.1, seed=given.seed).run(
            60.0, until=lambda so_far: so_far.more > 0
        )
    _say("control, does not look first:", *control.lines())
    lost = sum(count for what, count in result.faults.items() if "lost" in what)
    right = result.is_right() and lost > 0 and control.more > 0
    _say("as it should be" if right else "NOT as it should be")
    return 0 if right else 1


def _say(*lines: str) -> None:
    sys.stdout.write("\n  ".join(lines) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
