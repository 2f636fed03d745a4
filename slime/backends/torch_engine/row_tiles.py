"""Matrix products whose rows do not depend on how many other rows there are.

BLAS chooses its kernel by the shape, and kernels add in different orders, so the last bits of a row
change with the batch. Here a batch is cut into tiles of a few fixed sizes. When the model is
loaded, every weight shape is tried: a row must give the same bits at every place of a tile, beside
any neighbours, in every size. Sizes that fail are not used.
"""

from __future__ import annotations

import torch

from slime.exceptions import EngineError

SMALLEST_TILE = 32
TILE_SIZES = (512, 128, SMALLEST_TILE)


def round_up_to_tile(num_rows: int) -> int:
    """Returns `num_rows` rounded up to a multiple of the smallest tile."""
    return -(-num_rows // SMALLEST_TILE) * SMALLEST_TILE


def prove_tile_sizes(weights: list[torch.Tensor]) -> tuple[int, ...]:
    """Returns the sizes, largest first, in which every weight [out, in] gives equal bits for equal
    rows.

    EngineError if not even the smallest tile does: then this BLAS cannot serve deterministic
    inference.
    """
    distinct = {(tuple(weight.shape), weight.stride()): weight for weight in weights}
    sizes = list(TILE_SIZES)
    for weight in distinct.values():
        generator = torch.Generator().manual_seed(weight.shape[0] * 31 + weight.shape[1])
        row = torch.randn(1, weight.shape[1], generator=generator).to(weight)
        reference = _replicated(row, weight, SMALLEST_TILE)
        for size in list(sizes):
            if not _is_row_invariant(row, weight, size, reference):
                sizes.remove(size)
    if SMALLEST_TILE not in sizes:
        raise EngineError(
            "the matrix products of this machine give different bits for the same row at different "
            "places of a batch, so deterministic"
            " inference is not possible. Use one torch thread (--rollout-engine-threads 1) or "
            "another --sglang-dtype, or switch off"
            " --sglang-enable-deterministic-inference."
        )
    return tuple(sizes)


def _replicated(row: torch.Tensor, weight: torch.Tensor, size: int) -> torch.Tensor:
    return torch.mm(row.expand(size, -1).contiguous(), weight.t())[0]


def _is_row_invariant(
    row: torch.Tensor, weight: torch.Tensor, size: int, reference: torch.Tensor
) -> bool:
    everywhere = torch.mm(row.expand(size, -1).contiguous(), weight.t())
    if not bool((everywhere == reference).all()):
        return False
    generator = torch.Generator().manual_seed(size)
    mixed = torch.randn(size, row.shape[1], generator=generator).to(weight)
    places = torch.arange(0, size, 7)
    mixed[places] = row
    return bool((torch.mm(mixed, weight.t())[places] == reference).all())


def tiled_linear(
    rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, sizes: tuple[int, ...]
) -> torch.Tensor:
    """Returns rows @ weight.T + bias for `rows` [M, in], M a multiple of SMALLEST_TILE, computed in
    tiles of `sizes` (descending).
    """
    total = rows.shape[0]
    # The bias is added afterwards in every case: a fused one may be added at another point of the
    # sum.
    if total in sizes:
        output = torch.mm(rows, weight.t())
        return output if bias is None else output.add_(bias)
    output = rows.new_empty(total, weight.shape[0])
    start = 0
    for size in sizes:
        while total - start >= size:
            torch.mm(rows[start : start + size], weight.t(), out=output[start : start + size])
            start += size
    assert start == total, f"{total} rows are not a multiple of {SMALLEST_TILE}"
    return output if bias is None else output.add_(bias)
