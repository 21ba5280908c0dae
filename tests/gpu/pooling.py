"""The command: `python -m tests.gpu.pooling`: the zero-copy kernel's lookup alone on one GPU, by how a launch is cut.

For rows of each type and dim and each pooling factor L, bags have 0 to 2L ids, or all one where L is `one`, it prints
how long `store_pooled` takes with two bags side by side and four rows of each in flight, and the times of other cuts
over that time. Launches are replayed as CUDA graphs, cuts in turns, so no host has a part in the times. Every output
has to be that of the first cut, bit for bit. `*` is the cut that the exchange takes, see `tuning_for`.
"""

import sys
from itertools import product

import torch

from dlrm_overlap.kernels.arguments import Bags, FeatureTable, PoolingOptions, Tuning, Windows, tuning_for
from dlrm_overlap.kernels.forward.store_pooled import store_pooled
from tests.gpu.one_gpu import capture, times_us

TABLES, ROWS = 16, 250_000
SAMPLES = (16384, 2048)
POOLING_FACTORS = (0, 1, 2, 4, 8, 32, 128)
"""0: every bag has one id"""
ROW_TYPES = ((16, torch.float32), (32, torch.float32), (64, torch.float32), (128, torch.float32), (128, torch.bfloat16))
CUTS = ((2, 4), (1, 8), (2, 8), (4, 2), (4, 4), (4, 8), (8, 2), (8, 4))
"""bags side by side, and rows of each that are loaded at a time; the first is what others are held against"""


class _Lookup:
    """Tables of one type and dim, and bags of one pooling factor."""

    def __init__(self, rows: torch.Tensor, samples: int, pooling_factor: int, device: torch.device) -> None:
        """Draw the bags; `rows` [TABLES * ROWS, D] are the tables, one behind the other."""
        generator = torch.Generator(device).manual_seed(pooling_factor)
        high = 2 * pooling_factor + 1
        lengths = torch.randint(0, high, (TABLES * samples,), device=device, generator=generator)
        if pooling_factor == 0:
            lengths.fill_(1)
        offsets = torch.cat((torch.zeros(1, dtype=torch.int64, device=device), lengths.cumsum(0)))
        values = torch.randint(0, ROWS, (int(offsets[-1]),), device=device, generator=generator)
        dim, table_bytes = rows.shape[1], ROWS * rows.shape[1] * rows.itemsize
        entries = [[rows.data_ptr() + table * table_bytes, ROWS, table * dim, table, 0, 0] for table in range(TABLES)]
        first_sample = torch.tensor([0, samples], dtype=torch.int32, device=device)
        self._bags = Bags(values, offsets, first_sample, samples, samples)
        self._table = FeatureTable(
            torch.tensor(entries, device=device), dim, rows.dtype, alignment=16, column_alignment=16
        )
        self._output = torch.empty(samples, TABLES * dim, device=device)
        address = torch.tensor([self._output.data_ptr()], device=device)
        self._window = Windows(address, self._output.shape[1], self._output.dtype)
        self._status = torch.zeros(3, dtype=torch.int64, device=device)  # of no use: all ids are in their tables

    def output(self, tuning: Tuning) -> torch.Tensor:
        """Return the pooled embeddings, in memory of their own."""
        self._output.fill_(torch.nan)
        self._launch(tuning)
        return self._output.clone()

    def graph(self, tuning: Tuning) -> torch.cuda.CUDAGraph:
        """Return a launch as a graph."""
        return capture(lambda: self._launch(tuning))

    def _launch(self, tuning: Tuning) -> None:
        options = PoolingOptions(0, "balanced", tuning)
        store_pooled(self._bags, self._table, self._window, self._status, options)


def _line(lookup: _Lookup, chosen: Tuning) -> str:
    cuts = [Tuning(bags, unroll, num_warps=1) for bags, unroll in CUTS]
    expected = lookup.output(cuts[0]).view(torch.int32)
    same = [torch.equal(lookup.output(cut).view(torch.int32), expected) for cut in cuts]
    taken = times_us([lookup.graph(cut) for cut in cuts])
    shown = [f"{time / taken[0]:6.3f}" if right else " wrong" for time, right in zip(taken, same, strict=True)]
    marked = [f"{text}{'*' if cut == chosen else ' '}" for text, cut in zip(shown, cuts, strict=True)]
    return f"{taken[0]:8.1f} us" + " ".join(marked)


def main() -> int:
    """Print the table; return 2 where there is no GPU."""
    if not torch.cuda.is_available():
        print("tests.gpu.pooling: no GPU is there, and one must be", file=sys.stderr)
        return 2
    device = torch.device("cuda", 0)
    print(f"{torch.cuda.get_device_name(device)}, {TABLES} tables of {ROWS} rows")
    print(
        f"{'samples':>7} {'rows':>12} {'L':>4} {'2 x 4':>11} "
        + " ".join(f"{bags:3} x {rows:<2}" for bags, rows in CUTS)
    )
    for dim, dtype in ROW_TYPES:
        rows = torch.randn(TABLES * ROWS, dim, device=device).to(dtype)
        for samples, pooling_factor in product(SAMPLES, POOLING_FACTORS):
            line = _line(_Lookup(rows, samples, pooling_factor, device), tuning_for(dim, dtype.itemsize))
            print(f"{samples:7} {dim:4} {str(dtype)[6:]:>8} {pooling_factor or 'one':>4} {line}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
