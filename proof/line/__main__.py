"""Random histories of the line, to see which of its rules it needs.

    python -m proof.line --seeds 4000
"""

from __future__ import annotations

import sys
import time
from collections import Counter

from .etcd import Etcd, EtcdClient, EtcdOperator
from .rules import SHIPPED
from .world import World

if __name__ == "__main__":
    total = Counter()
    t = time.time()
    g = 0
    first = {}
    for seed in range(int(sys.argv[1])):
        w = World(seed, Etcd(SHIPPED), SHIPPED, skew=499, loses_base=False)
        j = w.play(EtcdClient, EtcdOperator)
        g += j.grants
        for k, v in j.broken.items():
            if v:
                total[k] += 1
                first.setdefault(k, []).append(seed)
    print(total, g, time.time() - t, {k: v[:5] for k, v in first.items()})
