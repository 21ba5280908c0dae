"""Tables that every rank holds: pooled into its own window, gradients added to those of the dense lookups' weights."""

import weakref
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode, PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import DenseTableBatchedEmbeddingBagsCodegen
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_overlap.comm.arena import Region, open_arena
from dlrm_overlap.comm.counters import Counter
from dlrm_overlap.embedding.backends.ids import CpuIdExchange, IdExchange
from dlrm_overlap.embedding.backends.local import CpuLocalLookup, DeviceLocalLookup, LocalLookup, LocalState
from dlrm_overlap.embedding.id_layout import BatchCapacity, IdLayout
from dlrm_overlap.embedding.layout import EVERY_RANK, FeatureShard, Layout
from dlrm_overlap.embedding.options import ExchangeContext, ExchangeOptions, StepCounters
from dlrm_overlap.embedding.replicated import ReplicatedTables
from dlrm_overlap.embedding.steps import BatchSizes, Step
from dlrm_overlap.embedding.tables import LocalTables
from dlrm_overlap.embedding.windows import WindowPair, WindowSpec
from dlrm_overlap.kernels import reference
from tests.agreement import assert_near
from tests.distributed.interpreted import without_streams
from tests.unit.embedding.shards import make_shard

SAMPLES, CPU = 12, torch.device("cpu")
LOOKUPS = [([(9, 8), (5, 12)], PoolingMode.SUM), ([(7, 8)], PoolingMode.MEAN)]
# Two features of a table, tables of two dims, a mean; between them a feature whose table another rank may hold.
FEATURES = [("a", 0, 0, 8, False), ("b", 0, 0, 8, False), ("c", 0, 1, 12, False), ("d", 1, 0, 8, True)]
NAMES = ["d", "other", "b", "c", "a"]


def _context(group: dist.ProcessGroup, *others: FeatureShard) -> ExchangeContext:
    shards = [
        FeatureShard(name, EVERY_RANK, 0, feature, lookup, table, 0, dim, mean, torch.float32, name)
        for feature, (name, lookup, table, dim, mean) in enumerate(FEATURES)
    ]
    lookups = [
        DenseTableBatchedEmbeddingBagsCodegen(
            specs,
            feature_table_map=[table for _, lookup, table, _, _ in FEATURES if lookup == number],
            pooling_mode=pooling,
            use_cpu=True,
        )
        for number, (specs, pooling) in enumerate(LOOKUPS)
    ]
    names = [name for name in NAMES if name != "other" or others]
    layout = Layout([*others, *shards], names, world_size=1)
    ids = IdLayout(layout, names, BatchCapacity(SAMPLES, dict.fromkeys(names, (0, 40))))
    options = ExchangeOptions(wait_timeout_s=1.0)
    replicated = ReplicatedTables(lookups, [BoundsCheckMode.FATAL] * len(lookups))
    known = layout, LocalTables([]), options, group, CPU, SAMPLES, StepCounters(CPU)
    return ExchangeContext(*known, ids=ids, replicated=replicated)


def _windows(context: ExchangeContext, spec: WindowSpec, counter: Counter) -> WindowPair:
    return WindowPair(spec, open_arena(spec.regions(1), context.group, CPU), counter)


def _open(kind: type[LocalLookup], group: dist.ProcessGroup) -> LocalLookup:
    context = _context(group, make_shard("other", 0, 4))
    spec = WindowSpec("outputs", Region((SAMPLES, context.layout.total_dim), torch.float32), 1)
    return kind(context, _windows(context, spec, context.counters.forward))


def _ids(padding: int, samples: int = SAMPLES, seed: int = 1, weighted: bool = False) -> KeyedJaggedTensor:
    """Return bags of 0 to 40 ids, and of one feature more, all 0, that no lookup knows; weights are fourths up to 1."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 4, (len(FEATURES), samples), generator=generator)
    lengths[2, 3] = 40  # a row's ids have a program to themselves
    rows = [LOOKUPS[lookup][0][table][0] for _, lookup, table, _, _ in FEATURES]
    values = [
        torch.randint(0, n, (int(bags.sum()),), generator=generator) for n, bags in zip(rows, lengths, strict=True)
    ]
    keys = [feature[0] for feature in FEATURES]
    if padding:
        keys.append("padding")
        values.append(torch.zeros(padding * samples, dtype=torch.int64))
        lengths = torch.cat([lengths, torch.full((1, samples), padding)])
    ids = torch.cat(values).int()
    weights = torch.randint(-4, 5, ids.shape, generator=generator) / 4 if weighted else None
    return KeyedJaggedTensor(keys, ids, weights, lengths=lengths.flatten().int(), stride=samples)


def _step(ids: KeyedJaggedTensor, samples: int) -> Step:
    return Step([], BatchSizes.of((samples,)), replicated=ids)


def _bag(ids: KeyedJaggedTensor, shard: FeatureShard, sample: int, samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows that a bag names, and by what each is multiplied."""
    bag = shard.feature * samples + sample
    begin, end = ids.offsets()[bag : bag + 2].tolist()
    weights = ids.weights_or_none()
    scales = torch.ones(end - begin) if weights is None else weights[begin:end]
    return ids.values()[begin:end].long(), scales / max(1, end - begin) if shard.mean else scales


def _added(
    local: LocalLookup, before: list[torch.Tensor], ids: KeyedJaggedTensor, gradient: torch.Tensor
) -> list[torch.Tensor]:
    """Return the gradient of each lookup's parameter as a step that finds `before` leaves it."""
    expected, samples = [each.clone() for each in before], gradient.shape[0]
    for shard in local.layout.replicated:
        sums, column = local.replicated.table_in(expected[shard.lookup], shard), local.layout.column(shard)
        for sample in range(samples):
            for row, scale in zip(*_bag(ids, shard, sample, samples), strict=True):
                sums[row] += gradient[sample, column : column + shard.dim] * scale
    return expected


@pytest.mark.parametrize(("padding", "weighted"), [(0, False), (2, False), (2, True)])
@pytest.mark.parametrize("kind", [CpuLocalLookup, DeviceLocalLookup])
def test_pooled_embeddings_and_gradients(
    world_of_one: dist.ProcessGroup, kind: type[LocalLookup], padding: int, weighted: bool
) -> None:
    with without_streams() if kind is DeviceLocalLookup else nullcontext():
        local = _open(kind, world_of_one)
        layout, ids = local.layout, _ids(padding, weighted=weighted)
        step = _step(ids, SAMPLES)
        local.windows.begin()
        local.windows.local.fill_(torch.nan)
        state = local.pool(step)
        # As autograd leaves it: columns of a wider tensor.
        gradient = (torch.randint(-64, 64, (SAMPLES, layout.total_dim + 12)) / 8)[:, 4:-8]
        before = [torch.randint(-64, 64, lookup.weights.shape) / 8 for lookup in local.replicated.lookups]
        for lookup, each in zip(local.replicated.lookups, before, strict=True):
            lookup.weights.grad = each.clone()
        local.start_backward(state, gradient)
        local.finish_backward()
        if isinstance(local, DeviceLocalLookup):
            assert local._input_rows().input_features.entries.shape[0] == len(FEATURES) + 1, (
                "one that pads is read, too"
            )

    for shard in layout.replicated:
        weight, column = local.replicated.weight(shard), layout.column(shard)
        for sample in range(SAMPLES):
            rows, scales = _bag(ids, shard, sample, SAMPLES)
            pooled = (weight[rows] * scales[:, None]).sum(0)
            assert_near(local.windows.local[sample, column : column + shard.dim], pooled, 1e-5, f"{shard.name}, pooled")
    for lookup, each in zip(local.replicated.lookups, _added(local, before, ids, gradient), strict=True):
        assert_near(lookup.weights.grad, each, 1e-6, "gradient")
    other = layout.column(layout.by_owner[0][0])
    assert local.windows.local[:, other : other + 4].isnan().all(), "the columns that the exchange fills"


def test_prepared_launches_serve_their_sizes_types_and_gradients_alone(world_of_one: dist.ProcessGroup) -> None:
    """Also where the parameters' gradients are moved, and the output's of the steps before are gone."""
    with without_streams():
        local: Any = _open(DeviceLocalLookup, world_of_one)
        lookups = local.replicated.lookups
        for lookup in lookups:
            lookup.weights.grad = torch.zeros_like(lookup.weights)
        steps = [(SAMPLES, torch.float32), (5, torch.float32), (SAMPLES, torch.bfloat16), (SAMPLES, torch.float32)]
        steps.append((5, torch.float32))
        launches = []
        for number, (samples, dtype) in enumerate(steps):
            moved = [lookup.weights.grad for lookup in lookups]
            if number == 4:
                for lookup in lookups:
                    lookup.weights.grad = lookup.weights.grad.clone()
                for each in moved:
                    each.fill_(torch.nan)
            before = [lookup.weights.grad.clone() for lookup in lookups]
            ids, generator = _ids(padding=0, samples=samples, seed=number), torch.Generator().manual_seed(number)
            drawn = torch.randint(-64, 64, (samples, local.layout.total_dim), generator=generator) / 8
            gradient, own = drawn.to(dtype, copy=True), Step([ids], BatchSizes.of((samples,)))
            local.start_backward(LocalState(own, torch.cuda.Event()), gradient)
            local.finish_backward()
            for lookup, expected in zip(lookups, _added(local, before, ids, drawn), strict=True):
                assert_near(lookup.weights.grad, expected, 1e-6, f"step {number}")
            gone = weakref.ref(gradient)
            del gradient
            assert gone() is None, "a launch holds the gradient"
            launches.append([len(each.update._launches) for each in local._rows.ranges])
    ranges = len(launches[0])
    assert launches == [[1] * ranges, [1] * ranges, [2] * ranges, [2] * ranges, [1] * ranges]


@pytest.mark.parametrize("kind", [CpuIdExchange, IdExchange])
def test_ids_of_this_rank_are_found_and_checked(world_of_one: dist.ProcessGroup, kind: type[IdExchange]) -> None:
    context, given = _context(world_of_one), _ids(padding=0)
    assert context.ids is not None
    exchange = kind(context, context.ids, _windows(context, context.ids.windows, context.counters.ids))
    names, by_name = list(context.ids.keys), given.to_dict()
    lengths, values = (torch.cat([getattr(by_name[name], what)() for name in names]) for what in ("lengths", "values"))
    arrived = exchange.send(KeyedJaggedTensor(names, values, lengths=lengths), SAMPLES).replicated
    assert arrived is not None
    assert arrived.values()[: given.values().numel()].tolist() == given.values().tolist()
    assert arrived.offsets()[: given.offsets().numel()].tolist() == given.offsets().tolist()
    values = values.clone()
    values[0] = 99  # of feature d, whose table has 7 rows
    wrong = KeyedJaggedTensor(names, values, lengths=lengths)
    with pytest.raises(ValueError, match="of feature d in the batch of rank 0: d: id 99 is outside its table"):
        _send_and_check(exchange, wrong)


@pytest.mark.parametrize("kind", [CpuIdExchange, IdExchange])
def test_ids_of_this_rank_beside_a_table_of_any_id(world_of_one: dist.ProcessGroup, kind: type[IdExchange]) -> None:
    """The table is on one rank, which has all of its buckets."""
    context, given = _context(world_of_one, make_shard("other", 0, 4, rows=(0, 12), buckets=3)), _ids(padding=0)
    assert context.ids is not None
    exchange = kind(context, context.ids, _windows(context, context.ids.windows, context.counters.ids))
    generator = torch.Generator().manual_seed(0)
    others = torch.randint(-(2**63), 2**63 - 1, (3 * SAMPLES,), generator=generator)
    others[:4] = torch.tensor([-1, 2**63 - 1, -(2**63), 2**31])
    keys, by_name = list(context.ids.keys), given.to_dict()
    lengths = {name: each.lengths() for name, each in by_name.items()} | {"other": torch.full((SAMPLES,), 3).int()}
    values = {name: each.values().long() for name, each in by_name.items()} | {"other": others}
    features = [torch.cat([of[name] for name in keys]) for of in (values, lengths)]
    arrived = exchange.send(KeyedJaggedTensor(keys, features[0], lengths=features[1]), SAMPLES)
    assert arrived.replicated is not None
    assert arrived.high is not None
    assert arrived.replicated.values()[: given.values().numel()].tolist() == given.values().tolist()
    found = reference.joined_words(arrived.ids.values(), arrived.high)
    assert found.tolist() == [*others.tolist(), *[0] * (found.numel() - others.numel())]
    assert arrived.ids.lengths()[:SAMPLES].tolist() == [3] * SAMPLES
    for wrong, told in ((7 + 2**32, 2**31 - 1), (-(2**40), -1), (-5, -5)):
        features[0][0] = wrong  # of feature d, whose table has 7 rows
        with pytest.raises(ValueError, match=f"in the batch of rank 0: d: id {told} is outside its table"):
            _send_and_check(exchange, KeyedJaggedTensor(keys, features[0], lengths=features[1]))
        exchange = kind(context, context.ids, _windows(context, context.ids.windows, context.counters.ids))


def _send_and_check(exchange: IdExchange, ids: KeyedJaggedTensor) -> None:
    exchange.send(ids, SAMPLES)
    exchange.check()
