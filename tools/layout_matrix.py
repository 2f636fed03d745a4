"""Runs the layout matrix: every parallel layout with every algorithm, in real processes, against
plain torch. `make test-layouts` ends with it.

    python tools/layout_matrix.py                                       # all cells, minutes
    python tools/layout_matrix.py --layout cp2 "tp2 sp" --algorithm gspo ppo
    python tools/layout_matrix.py --list

A line per cell: layout, algorithm, the largest relative difference of losses, metrics, per-token
fields and weights (at most 1e-5), and of gradients (at most 1e-4). The exit status is 1 when a cell
failed, 2 for an unknown name.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
import warnings
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MAX_FAILURE_CHARACTERS = 4000


def main(argv: list[str] | None = None) -> int:
    """Prints the table and returns the exit status."""
    os.environ.update(
        OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", SLIME_ACCELERATOR="cpu", TQDM_DISABLE="1"
    )
    os.environ["PYTHONWARNINGS"] = "ignore"
    warnings.simplefilter("ignore")
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    from support.layout_matrix import ALGORITHMS, LAYOUTS, Cell, Matrix, last_line

    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0], allow_abbrev=False)
    parser.add_argument(
        "--layout",
        nargs="+",
        default=list(LAYOUTS),
        metavar="NAME",
        help="Layouts to run; default: all.",
    )
    parser.add_argument(
        "--algorithm",
        nargs="+",
        default=list(ALGORITHMS),
        metavar="NAME",
        help="Algorithms; default: all.",
    )
    parser.add_argument(
        "--timeout", type=float, default=900, help="Seconds that one layout's processes may take."
    )
    parser.add_argument("--list", action="store_true", help="Print the names and stop.")
    options = parser.parse_args(argv)
    unknown = sorted(
        (set(options.layout) - set(LAYOUTS)) | (set(options.algorithm) - set(ALGORITHMS))
    )
    if options.list or unknown:
        print(f"layouts:    {', '.join(LAYOUTS)}\nalgorithms: {', '.join(ALGORITHMS)}")
        if unknown:
            print(f"unknown: {', '.join(unknown)}", file=sys.stderr)
        return 2 if unknown else 0
    cells: list[Cell] = []
    width = max(map(len, LAYOUTS)), max(map(len, ALGORITHMS))
    print(
        f"{'layout':{width[0]}}  {'algorithm':{width[1]}}  {'values':>7}  {'gradients':>9}",
        flush=True,
    )
    with tempfile.TemporaryDirectory(prefix="layout-matrix-") as root:
        matrix = Matrix(Path(root))
        for layout in options.layout:
            started, said = time.monotonic(), ""
            for cell in matrix.run([layout], options.algorithm, timeout=options.timeout):
                cells.append(cell)
                print(
                    f"{layout:{width[0]}}  {cell.algorithm:{width[1]}}  "
                    f"{cell.value_difference:7.1e}  {cell.gradient_difference:9.1e}"
                    f"  {'FAILED' if cell.failure else 'ok'}"
                )
                if cell.failure and cell.failure != said:
                    said = cell.failure
                    print(said[:MAX_FAILURE_CHARACTERS])
            print(
                f"{layout}: {LAYOUTS[layout].ranks} processes, {time.monotonic() - started:.0f} s",
                flush=True,
            )
    print(last_line(cells), flush=True)
    return int(any(cell.failure for cell in cells))


if __name__ == "__main__":
    raise SystemExit(main())
