from typing import NamedTuple

import pytest
import torch

from dlrm_overlap.comm.device_errors import DeviceErrorRecord
from dlrm_overlap.kernels.flags import Flags
from dlrm_overlap.kernels.gemm.product import Destinations, TileSignals, Tiling, product
from dlrm_overlap.kernels.schedule import staggered_peers
from tests.agreement import assert_near, assert_same
from tests.kernels.emulation import CPU, interpreted

EPOCH = 3
TILING = Tiling(block_m=16, block_n=32, block_k=16, group=2)
NEAR = {torch.bfloat16: 1e-2, torch.float16: 1e-3}


class Case(NamedTuple):
    """Sizes that are not multiples of the tiles', and a product's epilogue."""

    world_size: int
    shard_rows: int
    n: int
    k: int
    dtype: torch.dtype = torch.bfloat16
    by_k: bool = True
    bias: bool = True
    activation: str = "relu"
    slot_rows: int = 16
    tiling: Tiling = TILING
    order: str = "balanced"


CASES = {
    "two_ranks": Case(2, 21, 40, 24),
    "three_ranks_whole_tiles": Case(3, 16, 32, 16, torch.float16, bias=False, activation="none", order="remote_first"),
    "weight_by_rows_of_k": Case(2, 20, 40, 24, by_k=False, activation="none"),
    "slots_of_two_tiles": Case(2, 33, 40, 24, slot_rows=32, tiling=TILING._replace(group=8)),
    "one_rank": Case(1, 37, 8, 8, torch.float16, order="remote_first"),
}
_SLOW = {name: pytest.mark.slow for name in CASES if name != "two_ranks"}
every_case = pytest.mark.parametrize(
    "case", [pytest.param(case, id=name, marks=_SLOW.get(name, ())) for name, case in CASES.items()]
)


def exact(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str) -> torch.Tensor:
    """Return activation(x @ weight^T + bias), computed in float64, as float32."""
    total = torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    return (total.relu() if activation == "relu" else total).float()


class Ranks:
    """Ranks with flags and random matrices: shards of the rows of x, and parts of the sum over K."""

    def __init__(self, case: Case) -> None:
        generator = torch.Generator().manual_seed(case.shard_rows)
        self.case, self.m = case, case.world_size * case.shard_rows
        self.x = [self._random(generator, self.m, case.k) for _ in range(case.world_size)]
        self.weight = [self._weight(generator) for _ in range(case.world_size)]
        self.bias = torch.randn(case.n, generator=generator) if case.bias else None
        self.regions = -(-case.shard_rows // case.slot_rows)
        self.ready = [torch.zeros(case.world_size, self.regions + 1, dtype=torch.int64) for _ in range(case.world_size)]
        self.records = [DeviceErrorRecord(CPU) for _ in range(case.world_size)]
        self.clock = torch.tensor([EPOCH, 0])[:1]

    def _random(self, generator: torch.Generator, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(self.case.dtype)

    def _weight(self, generator: torch.Generator) -> torch.Tensor:
        n, k = self.case.n, self.case.k
        return self._random(generator, n, k) if self.case.by_k else self._random(generator, k, n).t()

    def signals(self, rank: int) -> TileSignals:
        addresses = torch.tensor([ready.data_ptr() for ready in self.ready])
        unused = torch.zeros(self.case.world_size, dtype=torch.int32)
        flags = Flags(addresses, self.clock, self.ready[rank], unused, 3, self.records[rank].status)
        return TileSignals(flags, self.case.slot_rows)

    def owners(self, rank: int, own_first: bool) -> torch.Tensor:
        """Return the ranks in order, with `rank` the first or the last."""
        turns = staggered_peers(rank, self.case.world_size)
        return torch.tensor([rank, *turns] if own_first else [*turns, rank], dtype=torch.int32)

    def assert_near(self, found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
        assert_near(found.float(), expected, NEAR[self.case.dtype] * expected.abs().max().item(), what)


@interpreted
@every_case
def test_a_gathered_product_is_that_of_all_rows(case: Case) -> None:
    ranks = Ranks(case)
    x, weight, rank = ranks.x[0], ranks.weight[0], case.world_size - 1
    ranks.ready[rank][:rank, : ranks.regions] = EPOCH  # its own rows and earlier ones have arrived
    out = torch.full((ranks.m, case.n), torch.nan, dtype=case.dtype)
    owners, signals = ranks.owners(rank, own_first=True), ranks.signals(rank)
    product(x, weight, out, rank, owners, signals, ranks.bias, case.activation, case.tiling)
    expected = exact(x, weight, ranks.bias, case.activation)
    ranks.assert_near(out, expected, "the gathered product")
    assert ranks.records[rank].expired() is None


@interpreted
def test_a_gathered_product_names_the_rows_that_do_not_arrive() -> None:
    ranks = Ranks(CASES["two_ranks"])
    ranks.ready[1][0, :2] = torch.tensor([EPOCH, EPOCH - 1])
    out = torch.empty(ranks.m, ranks.case.n, dtype=ranks.case.dtype)
    owners, signals = ranks.owners(1, own_first=True), ranks.signals(1)
    product(ranks.x[1], ranks.weight[1], out, 1, owners, signals, tiling=TILING)
    assert ranks.records[1].expired() == [1, 0, 1, EPOCH, EPOCH - 1]


@interpreted
@every_case
def test_a_scattered_product_is_stored_at_the_owners(case: Case) -> None:
    ranks = Ranks(case)
    shape = case.world_size, case.shard_rows, case.n
    windows = [torch.full(shape, torch.nan, dtype=case.dtype) for _ in range(case.world_size)]
    done = torch.zeros(case.world_size * ranks.regions, dtype=torch.int32)
    for rank in range(case.world_size):
        destinations = Destinations(torch.tensor([window[rank].data_ptr() for window in windows]), done, case.order)
        owners, signals = ranks.owners(rank, own_first=False), ranks.signals(rank)
        product(ranks.x[rank], ranks.weight[rank], destinations, rank, owners, signals, tiling=case.tiling)
        assert not done.any(), "the counts are ready for the next launch"
        for owner, ready in enumerate(ranks.ready):
            expected = torch.zeros_like(ready)
            expected[: rank + 1, : ranks.regions] = EPOCH
            assert_same(ready, expected, f"flags at rank {owner}")
    for owner, window in enumerate(windows):
        rows = slice(owner * case.shard_rows, (owner + 1) * case.shard_rows)
        for rank, part in enumerate(window):
            expected = exact(ranks.x[rank][rows], ranks.weight[rank], None, "none")
            ranks.assert_near(part, expected, f"part of rank {rank} at rank {owner}")
