"""Ids to the owners of their rows, between two processes: the ids that arrive, and errors of those that cannot."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_overlap.comm.arena import open_arena
from dlrm_overlap.config import InputError
from dlrm_overlap.embedding.backends.ids import ArrivedIds, CpuIdExchange, IdExchange
from dlrm_overlap.embedding.id_layout import BatchCapacity, IdLayout, joined
from dlrm_overlap.embedding.options import ExchangeContext, ExchangeOptions, StepCounters
from dlrm_overlap.embedding.windows import WindowPair
from dlrm_overlap.kernels.compiled import INTERPRETED
from tests.agreement import assert_same
from tests.conftest import refuses
from tests.distributed.models import world
from tests.distributed.tiny_stage import CPU, ROWS, Stage
from tests.distributed.workers import cases_on_ranks, logged_messages

BOTH = [([8, 4], [4]), ([8], [])]  # dims of each rank's tables: summed ones, averaged ones
ALONE = [([8, 4], [4]), ([], [])]  # rank 1 holds none
KEYS = ["rank1_0", "unused", "rank0_2", "rank0_0", "rank0_1"]  # in another order than the owners'
RANGES = {"rank1_0": (0, 3), "unused": (1, 1), "rank0_2": (0, 2), "rank0_0": (1, 1), "rank0_1": (2, 5)}
KNOWN = {"rank1_0": (3, 3), "unused": (1, 1), "rank0_2": (2, 2), "rank0_0": (1, 1), "rank0_1": (5, 5)}
SAMPLES = 4
"""capacity"""
Sizes = Mapping[str, tuple[int, int]]
TIMEOUT_S = {CpuIdExchange: 20.0, IdExchange: 1e-3}  # which the interpreter takes for a million turns


def _keys(stage: Stage) -> list[str]:
    owned = {shard.feature_name for shard in stage.shards}
    return [key for key in KEYS if key in owned or key == "unused"]


def _open(stage: Stage, sizes: Sizes, kind: type[IdExchange], **given: Any) -> IdExchange:
    """Return an exchange of ids only, for CPUs, or for GPUs by the interpreter."""
    layout = joined(stage.layout)
    ids = IdLayout(layout, _keys(stage), BatchCapacity(SAMPLES, {key: sizes[key] for key in _keys(stage)}))
    options = ExchangeOptions(wait_timeout_s=TIMEOUT_S[kind], aggregate_bytes=0)  # each part of a message by itself
    counters = StepCounters(CPU)
    context = ExchangeContext(layout, stage.tables, options, world(), CPU, SAMPLES, counters, ids=ids)
    arena = open_arena(ids.windows.regions(world().size()), world(), CPU)
    return kind(context, ids, WindowPair(ids.windows, arena, counters.ids), **given)


def _batch(stage: Stage, sizes: Sizes, step: int, rank: int, samples: int, dtype: torch.dtype) -> KeyedJaggedTensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    lengths = [torch.randint(sizes[k][0], sizes[k][1] + 1, (samples,), generator=generator) for k in _keys(stage)]
    values = torch.randint(0, ROWS, (int(torch.cat(lengths).sum()),), generator=generator)
    return KeyedJaggedTensor(_keys(stage), values.to(dtype), lengths=torch.cat(lengths).int())


def _mine(batches: Sequence[KeyedJaggedTensor]) -> KeyedJaggedTensor:
    return batches[dist.get_rank()]


def _assert_arrived(arrived: ArrivedIds, stage: Stage, batches: Sequence[KeyedJaggedTensor], what: str) -> None:
    """Check that the ids of this rank's shards have arrived, rank 0's samples first, then only zeros."""
    samples = batches[0].stride()
    assert arrived.batch.per_rank == (samples,) * len(batches)
    names = [shard.feature_name for shard in stage.layout.by_owner[stage.rank]]
    bags = [batch[name] for name in names for batch in batches]
    empty = torch.empty(0, dtype=torch.int32)
    values = torch.cat([empty, *(each.values().int() for each in bags)])
    lengths = torch.cat([empty, *(each.lengths().int() for each in bags)])
    assert_same(arrived.ids.values()[: values.numel()].int(), values, f"{what}: values")
    assert_same(arrived.ids.lengths()[: lengths.numel()].int(), lengths, f"{what}: lengths")
    padding = arrived.ids.values()[values.numel() :]
    assert not padding.any(), what
    assert int(arrived.ids.lengths()[lengths.numel() :].sum()) == padding.numel(), what
    assert len(arrived.ids.keys()) - len(names) in (0, 1), what


def _check_what_arrives(kind: type[IdExchange], owners: Any, sizes: Sizes, dtype: torch.dtype) -> None:
    stage = Stage(owners, dist.get_rank())
    exchange = _open(stage, sizes, kind)
    before: tuple[ArrivedIds, list[KeyedJaggedTensor]] | None = None
    for step, samples in enumerate((SAMPLES, SAMPLES, 2, 2, 3, SAMPLES, SAMPLES)):  # an evaluation's are fewer
        batches = [_batch(stage, sizes, step, rank, samples, dtype) for rank in range(2)]
        arrived = exchange.send(mine := _mine(batches), mine.stride())
        exchange.check()
        _assert_arrived(arrived, stage, batches, f"step {step}")
        if before is not None and before[0].batch == arrived.batch:
            _assert_arrived(before[0], stage, before[1], f"step {step - 1}, when the next has been sent")
        before = arrived, batches
    assert exchange.windows.epoch == 7
    exchange.close()


def _check_new_memory(kind: type[IdExchange], sizes: Sizes) -> None:
    """Ids in new memory stay, also one outside its table, which the lookup will find."""
    stage = Stage(BOTH, dist.get_rank(), BoundsCheckMode.FATAL)
    exchange = _open(stage, sizes, kind, in_new_memory=True)
    every = []
    for step, samples in enumerate((SAMPLES, 2, SAMPLES, SAMPLES)):
        batches = [_batch(stage, sizes, step, rank, samples, torch.int64) for rank in range(2)]
        batches[1].values()[-1] = 2 * ROWS
        every.append((exchange.send(_mine(batches), samples), batches))
        exchange.check()
    for step, (arrived, batches) in enumerate(every):
        _assert_arrived(arrived, stage, batches, f"step {step}, after all")
    exchange.close()


def _check_shapes_stay(kind: type[IdExchange], sizes: Sizes) -> None:
    """On a GPU every step has the same number of ids, and every other one the same addresses."""
    stage = Stage(BOTH, dist.get_rank())
    exchange = _open(stage, sizes, kind)
    found = []
    for step in range(4):
        batches = [_batch(stage, sizes, step, rank, SAMPLES, torch.int32) for rank in range(2)]
        ids = exchange.send(mine := _mine(batches), mine.stride()).ids
        found.append((ids.values().numel(), ids.keys(), ids.values().data_ptr(), ids.offsets().data_ptr()))
    assert found[2:] == found[:2]
    assert found[0][:2] == found[1][:2]
    assert found[0][2] != found[1][2]


def _check_padding(kind: type[IdExchange], sizes: Sizes) -> None:
    """A static batch has padding after its ids: lengths, or a count, say how many ids it has."""
    stage = Stage(BOTH, dist.get_rank())
    exchange = _open(stage, sizes, kind)
    batches = [_batch(stage, sizes, 0, rank, SAMPLES, torch.int64) for rank in range(2)]
    ids = _mine(batches)
    values = torch.cat([ids.values(), torch.full((500,), 7)])
    count = torch.tensor([ids.values().numel()], dtype=torch.int32)
    padded = KeyedJaggedTensor(ids.keys(), values, lengths=ids.lengths(), stride=SAMPLES)
    arrived = exchange.send(padded, SAMPLES, count)
    exchange.check()
    _assert_arrived(arrived, stage, batches, "with padding")


def _check_too_many(kind: type[IdExchange], sizes: Sizes, told: str) -> None:
    """Rank 1 has an id of a feature too many: every rank raises, whatever it owns."""
    stage = Stage(ALONE, dist.get_rank())
    exchange = _open(stage, sizes, kind)
    batches = [_batch(stage, sizes, 0, rank, SAMPLES, torch.int32) for rank in range(2)]
    _assert_arrived(exchange.send(mine := _mine(batches), mine.stride()), stage, batches, "a batch within its capacity")
    if stage.rank == 1:
        lengths = batches[1].lengths().clone()
        place = batches[1].keys().index("rank0_2") * SAMPLES
        lengths[place : place + SAMPLES] = 2
        lengths[place] = 3
        batches[1] = KeyedJaggedTensor(_keys(stage), torch.ones(int(lengths.sum())).int(), lengths=lengths)
    with pytest.raises(ValueError, match=told):  # noqa: PT012  a node raises in the first, a device in the second
        exchange.send(mine := _mine(batches), mine.stride())
        exchange.check()


TOO_MANY = {
    "ranges": "^the batch of rank 1 has 9 ids of feature rank0_2, beyond its capacity of 8; correct the capacity's",
    "known": "^the batch of rank 1 has 37 ids, but its capacity, with the same .* feature, gives 36; correct",
}


def _check_outside(kind: type[IdExchange], sizes: Sizes, mode: BoundsCheckMode) -> None:
    """Rank 1 has an id outside a table of rank 0, which reports it, and takes row 0."""
    for bad, said in ((ROWS, ROWS), (2**40, 2**31 - 1), (-1, -1), (-(2**40), -1)):
        stage = Stage(BOTH, dist.get_rank(), mode)
        exchange = _open(stage, sizes, kind)
        batches = [_batch(stage, sizes, 3, rank, SAMPLES, torch.int64) for rank in range(2)]
        ids = batches[1]
        first = int(ids.offset_per_key()[ids.keys().index("rank0_1")])
        ids.values()[first + 5] = bad
        where = "id 5 of feature rank0_1 in the batch of rank 1"
        told = f"{where}: rank0_1: id {said} is outside its table of {ROWS} rows; map ids into 0 .. {ROWS - 1}"
        stops = mode == BoundsCheckMode.FATAL and stage.rank == 0
        messages = logged_messages()
        with pytest.raises(ValueError, match=told) if stops else nullcontext():
            for _ in range(1 if mode == BoundsCheckMode.FATAL else 2):
                arrived = exchange.send(_mine(batches).to(CPU), SAMPLES)
                exchange.check()
        warned = mode == BoundsCheckMode.WARNING and stage.rank == 0
        assert [message[: len(told)] for message in messages] == [told] * warned, "once"
        if not stops:
            ids.values()[first + 5] = 0
            _assert_arrived(arrived, stage, batches, f"{bad} under {mode.name}")
        dist.barrier()  # the other rank may still read until here


def _check_refusals(kind: type[IdExchange]) -> None:
    """A batch is checked before anything is sent."""
    stage = Stage(BOTH, dist.get_rank())
    exchange = _open(stage, RANGES, kind)
    batches = [_batch(stage, RANGES, 0, rank, SAMPLES, torch.int32) for rank in range(2)]
    ids = _mine(batches)
    others = KeyedJaggedTensor([*ids.keys()[1:], "x"], ids.values(), lengths=ids.lengths())
    expected = f"ids: features {', '.join(others.keys())}, but every batch must have the same .*: {', '.join(KEYS)}$"
    with refuses(expected):
        exchange.send(others, SAMPLES)
    larger = _batch(stage, RANGES, 0, 0, SAMPLES + 1, torch.int32)
    with pytest.raises(
        InputError, match=r"a batch of 5 samples exceeds its capacity of 4; raise the capacity's samples, or"
    ):
        exchange.send(larger, SAMPLES + 1)
    assert exchange.windows.epoch == 0
    _assert_arrived(exchange.send(ids, SAMPLES), stage, batches, "the batch after")


HOST, DEVICE = CpuIdExchange, IdExchange
CASES: dict[str, Callable[[], None]] = {}
for _kind in (HOST, DEVICE) if INTERPRETED else (HOST,):
    _name = "host" if _kind is HOST else "device"
    CASES[f"{_name}: refusals"] = partial(_check_refusals, _kind)
    for _mode in ("FATAL", "WARNING", "IGNORE"):
        CASES[f"{_name}: outside {_mode}"] = partial(_check_outside, _kind, RANGES, BoundsCheckMode[_mode])
    for _lengths, _sizes in (("ranges", RANGES), ("known", KNOWN)):
        _of = f"{_name}, {_lengths}:"
        CASES[f"{_of} ids arrive"] = partial(_check_what_arrives, _kind, BOTH, _sizes, torch.int32)
        CASES[f"{_of} int64"] = partial(_check_what_arrives, _kind, BOTH, _sizes, torch.int64)
        CASES[f"{_of} a rank without tables"] = partial(_check_what_arrives, _kind, ALONE, _sizes, torch.int32)
        CASES[f"{_of} new memory"] = partial(_check_new_memory, _kind, _sizes)
        CASES[f"{_of} padding"] = partial(_check_padding, _kind, _sizes)
        CASES[f"{_of} too many"] = partial(_check_too_many, _kind, _sizes, TOO_MANY[_lengths])
        if _kind is DEVICE:
            CASES[f"{_of} shapes stay"] = partial(_check_shapes_stay, _kind, _sizes)


def _run(case: str) -> None:
    CASES[case]()


ended = cases_on_ranks(2, _run, list(CASES))


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_two_ranks(ended: Callable[[str], None], case: str) -> None:
    ended(case)
