"""Ids of 64 bits to the owners of tables of any id, which the samples' ranks find by the ids' buckets."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_overlap.comm.arena import open_arena
from dlrm_overlap.comm.reach import Reach
from dlrm_overlap.embedding.backends.ids import ArrivedIds, CpuIdExchange, IdExchange
from dlrm_overlap.embedding.exchange import Exchange
from dlrm_overlap.embedding.id_layout import BatchCapacity, IdLayout, joined
from dlrm_overlap.embedding.id_sender import IdSender
from dlrm_overlap.embedding.internode import arrival_regions
from dlrm_overlap.embedding.layout import FeatureShard, Layout
from dlrm_overlap.embedding.options import ExchangeContext, ExchangeOptions, StepCounters
from dlrm_overlap.embedding.windows import WindowPair
from dlrm_overlap.kernels.compiled import INTERPRETED
from dlrm_overlap.kernels.ids.id_map import Claims
from tests.agreement import assert_same
from tests.distributed.models import world
from tests.distributed.tiny_stage import CPU, ROWS, Stage
from tests.distributed.workers import cases_on_ranks

SAMPLES = 4
SIZE = 4
"""rows of a bucket"""
KEYS = {"rank0_0": (1, 2), "cut0": (0, 6), "unused": (0, 2)}
"""feature -> least and most ids of a bag"""
EXTREME = [-1, 2**63 - 1, -(2**63), 2**32, 3, 3, 3, 25, 2**31, -(2**31), 7]
TIMEOUT_S = {CpuIdExchange: 20.0, IdExchange: 1e-3}  # which the interpreter takes for a million turns


class AnyIdStage(Stage):
    """A stage with a table of any id, cut0, a table of rows of the same feature, cut1, and one that is whole."""

    def __init__(self, of_any_id: bool = True) -> None:
        ranks = range(dist.get_world_size())
        owners = [([8 * (rank == 0)], []) if rank == 0 else ([], []) for rank in ranks]
        super().__init__(owners, dist.get_rank(), BoundsCheckMode.IGNORE, cut=[(8, ranks), (4, ranks)])
        self.buckets = ROWS // SIZE * self.world_size
        shards = [self._changed(shard, of_any_id) for shard in self.shards]
        self.layout = Layout(shards, self.layout.names, self.world_size)

    def _changed(self, shard: FeatureShard, of_any_id: bool) -> FeatureShard:
        if of_any_id and shard.name == "cut1":
            return replace(shard, feature_name="cut0")
        return replace(shard, buckets=self.buckets) if of_any_id and shard.name == "cut0" else shard

    def first_bucket(self, rank: int) -> int:
        return self.buckets // self.world_size * rank


def _open(stage: AnyIdStage, kind: type[IdExchange], nodes: int = 1) -> IdExchange:
    layout, counters = joined(stage.layout), StepCounters(CPU)
    ids = IdLayout(layout, list(KEYS), BatchCapacity(SAMPLES, KEYS), weighted=True)
    assert ids.wide
    options = ExchangeOptions(wait_timeout_s=TIMEOUT_S[kind])
    context = ExchangeContext(layout, stage.tables, options, world(), CPU, SAMPLES, counters, ids=ids)
    of_node = stage.world_size // nodes
    on_nodes = tuple(range(node * of_node, (node + 1) * of_node) for node in range(nodes))
    reach = Reach(stage.rank, on_nodes, "emulated")
    regions = {**ids.windows.regions(stage.world_size), **arrival_regions(ids.windows, reach)}
    arena = open_arena(regions, world(), CPU, reach)
    return kind(context, ids, WindowPair(ids.windows, arena, counters.ids))


def _batch(step: int, rank: int, samples: int, dtype: torch.dtype = torch.int64) -> KeyedJaggedTensor:
    """Return ids, a third of them small; in step 0 the first ones of cut0 are extreme."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    lengths = [torch.randint(low, high + 1, (samples,), generator=generator) for low, high in KEYS.values()]
    count = int(torch.cat(lengths).sum())
    limits = torch.iinfo(dtype)
    any_id = torch.randint(limits.min, limits.max, (count,), generator=generator)
    values = any_id.where(any_id % 3 != 0, any_id % (4 * ROWS))
    fixed, end = int(lengths[0].sum()), int(lengths[0].sum() + lengths[1].sum())
    values[:fixed] %= ROWS
    extreme = torch.tensor(EXTREME)[: end - fixed]
    if step == 0:
        values[fixed : fixed + extreme.numel()] = extreme
    weights = torch.randint(-4, 5, (count,), generator=generator) / 4
    return KeyedJaggedTensor(list(KEYS), values.to(dtype), weights, lengths=torch.cat(lengths).int())


def _bags(batch: KeyedJaggedTensor, key: str) -> list[list[tuple[int, float]]]:
    """Return the ids of each sample with their weights."""
    of = batch[key]
    pairs = list(zip(of.values().tolist(), of.weights().tolist(), strict=True))
    ends = of.offsets().tolist()
    return [pairs[begin:end] for begin, end in pairwise(ends)]


def _expected(stage: AnyIdStage, shard: FeatureShard, bag: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """Return what a shard is sent of a bag: ids of its buckets, or rows; for ids outside the last takes row 0."""
    found = []
    (first_row, end_row), is_last = shard.rows, stage.rank == stage.world_size - 1
    for id, weight in bag:
        if shard.buckets:
            if stage.first_bucket(stage.rank) <= id % 2**64 % stage.buckets < stage.first_bucket(stage.rank + 1):
                found.append((id, weight))
        elif not shard.is_cut_by_rows or first_row <= id < end_row:
            found.append((id - first_row, weight))
        elif is_last and not 0 <= id < end_row:
            found.append((0, weight))
    return found


def _arrived(arrived: ArrivedIds) -> list[list[tuple[int, float]]]:
    """Return the bags that have arrived; those of padding come last."""
    assert arrived.high is not None
    words = zip(arrived.high.tolist(), arrived.ids.values().tolist(), strict=True)
    pairs = list(zip((high * 2**32 + low % 2**32 for high, low in words), arrived.ids.weights().tolist(), strict=True))
    ends = arrived.ids.offsets().tolist()
    return [pairs[begin:end] for begin, end in pairwise(ends)]


def _check_ids_arrive(kind: type[IdExchange], nodes: int = 1) -> None:
    """Two steps' ids stay valid; later steps have fewer samples, then ids of 32 bits."""
    stage = AnyIdStage()
    exchange, ranks = _open(stage, kind, nodes), range(stage.world_size)
    before: tuple[ArrivedIds, list[Any]] | None = None
    for step, (samples, dtype) in enumerate([(4, torch.int64), (4, torch.int64), (2, torch.int64), (4, torch.int32)]):
        batches = [_batch(step, rank, samples, dtype) for rank in ranks]
        arrived = exchange.send(batches[stage.rank], samples)
        exchange.check()
        shards = exchange.layout.by_owner[stage.rank]
        expected = [
            _expected(stage, shard, bag)
            for shard in shards
            for batch in batches
            for bag in _bags(batch, shard.feature_name)
        ]
        for of, bags in [(arrived, expected), *([before] if step == 1 and before else [])]:
            found = _arrived(of)
            assert found[: len(bags)] == bags, f"step {step}"
            assert not any(id for bag in found[len(bags) :] for id, _ in bag), "padding"
        before = arrived, expected
    exchange.close()


class FixedRows:
    """Tables of any id in which an id always has the same row of its bucket."""

    def __init__(self, stage: AnyIdStage, layout: Layout) -> None:
        self._stage, self._shards = stage, layout.by_owner[stage.rank]
        self.steps = 0

    def activate(self, arrived: ArrivedIds) -> None:
        assert arrived.high is not None
        ids, bags = arrived.ids, sum(arrived.batch.per_rank)
        for number, shard in enumerate(self._shards):
            if shard.buckets:
                first, end = ids.offsets()[[number * bags, (number + 1) * bags]].tolist()
                words = zip(arrived.high[first:end].tolist(), ids.values()[first:end].tolist(), strict=True)
                rows = [self.row(high * 2**32 + low % 2**32) - shard.rows[0] for high, low in words]
                ids.values()[first:end] = torch.tensor(rows, dtype=torch.int32)
        self.steps += 1

    def prepare_step(self) -> None:
        """Do nothing: all rows are known."""

    def fill(self, claims: Claims) -> None:
        raise AssertionError("no id is new")

    def row(self, id: int) -> int:
        """Return the row in the whole table."""
        rest, bucket = divmod(id % 2**64, self._stage.buckets)
        return bucket * SIZE + rest % SIZE


def _check_lookup_and_update() -> None:
    """Pooled embeddings and rows are those of a table of rows, looked up by the rows that the ids have."""
    rank = dist.get_rank()
    capacity = BatchCapacity(SAMPLES, {**KEYS, "cut1": KEYS["cut0"]})
    stages = AnyIdStage(), AnyIdStage(of_any_id=False)
    senders = []
    for stage, keys in zip(stages, ([*KEYS], [*KEYS, "cut1"]), strict=True):
        options = ExchangeOptions("pgas", wait_timeout_s=20.0, copy_output=True)
        exchange = Exchange(stage.layout, stage.tables, options, world(), CPU)
        senders.append(IdSender(exchange, keys, capacity, weighted=True))
    rows = FixedRows(stages[0], senders[0].exchange.layout)
    senders[0].exchange.id_tables = rows
    before = {name: each.clone() for name, each in stages[0].rows_and_states().items()}
    for step in range(3):
        batch = _batch(step, rank, SAMPLES)
        first, end = batch.offset_per_key()[1:3]
        values = batch.values().clone()
        values[first:end] = torch.tensor([rows.row(id) for id in values[first:end].tolist()])
        cut1 = batch["cut0"]
        as_rows = KeyedJaggedTensor(
            [*KEYS, "cut1"],
            torch.cat([values, cut1.values()]),
            torch.cat([batch.weights(), cut1.weights()]),
            lengths=torch.cat([batch.lengths(), cut1.lengths()]),
        )
        of_ids, of_rows = (sender.start(ids).wait() for sender, ids in zip(senders, (batch, as_rows), strict=True))
        assert_same(of_ids.detach(), of_rows.detach(), f"pooled embeddings of step {step}")
        for each in (of_ids, of_rows):
            (each * (1 + torch.arange(each.shape[1]) % 5)).sum().backward()
    ours, expected = (stage.rows_and_states() for stage in stages)
    for name, weight in ours.items():
        assert_same(weight, expected[name], name)
        assert not torch.equal(weight, before[name]), f"{name} are updated"
    assert rows.steps == 3
    for sender in senders:
        sender.exchange.close()


CASES: dict[str, Callable[[], None]] = {
    "host: ids arrive": partial(_check_ids_arrive, CpuIdExchange),
    "host: ids arrive between nodes": partial(_check_ids_arrive, CpuIdExchange, nodes=2),
    "host: lookup and update": _check_lookup_and_update,
}
if INTERPRETED:
    CASES["device: ids arrive"] = partial(_check_ids_arrive, IdExchange)


def _run(case: str) -> None:
    CASES[case]()


ended_on_2, ended_on_4 = (cases_on_ranks(ranks, _run, list(CASES)) for ranks in (2, 4))


@pytest.mark.parametrize("case", CASES)
def test_two_ranks(ended_on_2: Callable[[str], None], case: str) -> None:
    ended_on_2(case)


@pytest.mark.parametrize("case", CASES)
def test_four_ranks(ended_on_4: Callable[[str], None], case: str) -> None:
    ended_on_4(case)
