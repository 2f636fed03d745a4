"""How well and how fast batches are packed: first fit at scale, and balanced packing against its
lower bound.

    python tools/bench/schedule.py
"""

from __future__ import annotations

import math
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from slime.data.flops import FlopsModel  # noqa: E402
from slime.data.packing import minimum_bins, pack_balanced  # noqa: E402
from slime.data.partitioning import first_fit_pack  # noqa: E402


def make_lengths(count: int, seed: int) -> np.ndarray:
    """Lognormal, mean about 2000, at most 8192 tokens."""
    return np.clip(
        np.random.default_rng(seed).lognormal(np.log(2000) - 0.32, 0.8, count), 16, 8192
    ).astype(int)


def main() -> None:
    times = {}
    for count in (8192, 16384, 65536, 262144):
        lengths = make_lengths(count, 0).tolist()
        start = time.process_time()
        bins = first_fit_pack(lengths, 16384)
        times[count] = time.process_time() - start
        print(f"first_fit  {count:7d} samples: {times[count]:.3f} s, {len(bins)} bins")
    exponent = math.log(times[262144] / times[16384]) / math.log(262144 / 16384)
    print(f"first_fit  growth exponent {exponent:.2f} (target < 1.2)\n")
    model = FlopsModel(linear=1.0, quadratic=2e-5)
    for count in (256, 1024):
        for cap in (9216, 16384, 32768):
            worst, slowest, extra = 0.0, 0.0, 0
            for seed in range(20):
                lengths = make_lengths(count, seed)
                work = model.of(lengths)
                start = time.process_time()
                ranks = pack_balanced(lengths, work, cap=cap, num_ranks=8, align=8)
                slowest = max(slowest, time.process_time() - start)
                loads = [sum(work[items].sum() for items in rank) for rank in ranks]
                worst = max(worst, max(loads) / (sum(loads) / 8))
                extra += sum(map(len, ranks)) - max(8, -(-minimum_bins(lengths, cap=cap) // 8) * 8)
            print(
                f"balanced   n {count:5d} cap {cap:6d}: work max/mean {worst:.4f}, {extra} bins "
                f"over the bound in 20 batches, {slowest:.2f} s"
            )


if __name__ == "__main__":
    main()
