"""Random histories of the line, to see that it breaks nothing, and that it needs each of its rules.

python -m proof.line --seeds 4000
python -m proof.line --seeds 0 --control "ZooKeeper: the whole session is valid"
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter

from .controls import CONTROLS, STORES, play

#: Histories in which each control has to break.
PATIENCE = 4000


def _shipped(store: str, seeds: range) -> bool:
    """Play the shipped protocol; return whether it kept everything."""
    found: Counter[str] = Counter()
    grants = 0
    for seed in seeds:
        judge = play(seed, store)
        grants += judge.grants
        for what in +judge.broken:
            found[what] += 1
            print(f"WRONG: {store}, seed {seed}: {what}")
    print(f"{store}: {len(seeds)} histories, {grants} tokens, broken: {dict(found) or 'nothing'}", flush=True)
    return not found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m proof.line", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seeds", type=int, default=4000, help="how many histories, half for each store")
    parser.add_argument("--control", action="append", help="only these controls")
    options = parser.parse_args()
    kept = [_shipped(store, range(options.seeds // 2)) for store in STORES]
    right = all(kept)
    for name in options.control or CONTROLS:
        found = CONTROLS[name].first(range(PATIENCE))
        right &= found is not None
        said = f"seed {found[0]}: {', '.join(found[1])}" if found else "NOTHING, so it is no control"
        print(f"control, {name}: {said}", flush=True)
    print("RIGHT: the shipped way never broke, and each control did" if right else "WRONG")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
