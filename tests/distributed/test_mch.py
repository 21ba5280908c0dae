"""Tables with TorchRec's MCH module train as under TorchRec's sharder, through intervals that evict ids."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.mc_embeddingbag import ManagedCollisionEmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.modules.mc_modules import (
    DistanceLFU_EvictionPolicy,
    LFU_EvictionPolicy,
    LRU_EvictionPolicy,
    MCHManagedCollisionModule,
    average_threshold_filter,
    dynamic_threshold_filter,
    probabilistic_threshold_filter,
)

from dlrm_overlap.embedding.exchanging_module import ExchangingModule
from dlrm_overlap.kernels.compiled import INTERPRETED
from tests.distributed import any_ids
from tests.distributed.any_ids import CPU, batch_of, draw
from tests.distributed.captured import captures
from tests.distributed.workers import cases_on_ranks

ROWS, STEPS, INTERVAL, POOL = 32, 14, 3, 60
SGD, ADAGRAD = EmbOptimType.EXACT_SGD, EmbOptimType.EXACT_ROWWISE_ADAGRAD
POLICIES: dict[str, Callable[[], Any]] = {
    "lfu": LFU_EvictionPolicy,
    "lru": LRU_EvictionPolicy,
    "distance_lfu": partial(DistanceLFU_EvictionPolicy, decay_exponent=0.5),
    "lfu, average": partial(LFU_EvictionPolicy, threshold_filtering_func=average_threshold_filter),
    "lru, dynamic": partial(
        LRU_EvictionPolicy,
        threshold_filtering_func=partial(dynamic_threshold_filter, threshold_skew_multiplier=0.8),
    ),
    "distance_lfu, probabilistic": partial(
        DistanceLFU_EvictionPolicy,
        threshold_filtering_func=partial(probabilistic_threshold_filter, per_id_probability=0.3),
    ),
}


class _StockSharder(ManagedCollisionEmbeddingBagCollectionSharder):
    """TorchRec's sharder, which its planner takes on CPUs, too."""

    def sharding_types(self, compute_device_type: str) -> list[str]:
        return ["row_wise"]

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        return ["fused"]


def _mch(name: str, rows: int, policy: str, **given: Any) -> MCHManagedCollisionModule:
    arguments: dict[str, Any] = {"input_hash_size": 2**62, "eviction_interval": INTERVAL, "buckets": 4} | given
    return MCHManagedCollisionModule(
        zch_size=rows, device=CPU, eviction_policy=POLICIES[policy](), name=name, **arguments
    )


def _model(policy: str, **given: Any) -> any_ids.Model:
    model = any_ids.Model(ROWS, partial(_mch, policy=policy, **given))
    for config in model.tables._managed_collision_collection.embedding_configs():
        config.init_fn = _random_rows  # evicted rows are drawn by the ranks' generators
    return model


def _random_rows(rows: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return rows.uniform_(-0.2, 0.2)


def _stock(model: any_ids.Model) -> DistributedModelParallel:
    _seed()
    tables = EmbeddingBagCollectionSharder({"optimizer": SGD, "learning_rate": any_ids.LR})
    return any_ids.shard_by(_StockSharder(tables), model)


def _ours(model: any_ids.Model, **given: Any) -> DistributedModelParallel:
    _seed()
    return any_ids.shard(model, **given)


def _seed() -> None:
    """Seed initial rows and random filters."""
    torch.manual_seed(11 + dist.get_rank())


def _batches(first: int = 0, steps: int = STEPS) -> list[Any]:
    """Return batches whose ids drift, so that later ones evict earlier ones."""
    rank = dist.get_rank()
    return [batch_of(draw(rank, step, POOL, seed=step // 5)) for step in range(first, first + steps)]


def _trained(sharded: DistributedModelParallel, pipeline: str = "none", batches: Any = None) -> list[float]:
    _seed()
    return any_ids.train(sharded, _batches() if batches is None else batches, pipeline).losses


def _map_of(sharded: DistributedModelParallel) -> dict[str, torch.Tensor]:
    state: dict[str, Any] = sharded.state_dict()
    return {
        name: each.local_shards()[0].tensor.clone() if hasattr(each, "local_shards") else each.clone()
        for name, each in state.items()
        if "_managed_collision_modules" in name
    }


def _check(policy: str, pipeline: str) -> None:
    stock, ours, captured = _stock(_model(policy)), _ours(_model(policy)), pipeline == "captured"
    assert [each.exchange is not None for each in _exchanging(ours)] == [True]
    expected = _trained(stock, "graph" if captured else pipeline)
    losses = expected, _trained(ours, pipeline)
    assert all(each.takes_ids == (pipeline in ("graph", "captured")) for each in _exchanging(ours))
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    maps = _map_of(stock), _map_of(ours)
    assert maps[0].keys() == maps[1].keys()
    for name, each in maps[0].items():
        assert torch.equal(each, maps[1][name]), name
    first = {id for name in ("t0", "t1") for id in _ids(maps[1], name)}
    known = {id for batch in _batches(0, 5) for id in batch.sparse.values().tolist()}
    assert first - known, "later ids have replaced earlier ones"


def _exchanging(sharded: DistributedModelParallel) -> list[Any]:
    return [each for each in sharded.modules() if isinstance(each, ExchangingModule)]


def _ids(state: dict[str, torch.Tensor], table: str) -> list[int]:
    (ids,) = (each for name, each in state.items() if f".{table}._mch_sorted_raw_ids" in name)
    return ids[ids != torch.iinfo(torch.int64).max].tolist()


def _check_state_dict() -> None:
    """Each loads the other's state dict, and then trains as TorchRec's does that loads it."""
    for make in (_stock, _ours):
        before = make(_model("distance_lfu"))
        _trained(before, batches=_batches(0, 2 * INTERVAL))
        after = _stock(_model("distance_lfu")), _ours(_model("distance_lfu"))
        for each in after:
            saved: Any = before.state_dict()  # a load changes the dictionary
            each.load_state_dict(saved)
        follow = _batches(2 * INTERVAL, 2 * INTERVAL + 1)
        losses = [_trained(each, batches=follow) for each in after]
        assert losses[1] == pytest.approx(losses[0], rel=1e-6)
        maps = [_map_of(each) for each in after]
        assert all(torch.equal(each, maps[1][name]) for name, each in maps[0].items())


def _check_interruptions() -> None:
    """Ids that were sent ahead but not looked up count once, and an evaluation changes no map."""
    batches = _batches()
    losses, maps, evaluated = list[list[float]](), list[dict[str, torch.Tensor]](), list[torch.Tensor]()
    for make in (_stock, _ours):
        sharded: Any = make(_model("lru"))
        pipeline, segments = ("graph", (4, 3)) if make is _ours else ("none", (None, None))
        taken = captures() if make is _ours and INTERPRETED else nullcontext()
        _seed()
        with taken:
            found = any_ids.train(sharded, batches[:8], pipeline, segment=segments[0]).losses
            before = _map_of(sharded)
            sharded.eval()
            with torch.no_grad():
                _, output = sharded(_batches(STEPS, 1)[0])
            evaluated.append(output.clone())
            assert all(torch.equal(each, before[name]) for name, each in _map_of(sharded).items())
            sharded.train()
            found += any_ids.train(sharded, batches[8:], pipeline, segment=segments[1]).losses
        losses.append(found)
        maps.append(_map_of(sharded))
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    torch.testing.assert_close(evaluated[1], evaluated[0], rtol=1e-5, atol=1e-7)
    assert all(torch.equal(each, maps[1][name]) for name, each in maps[0].items())


def _check_pipelines_in_turns() -> None:
    """A pipeline goes on with the ids that another one has recorded within the interval."""
    losses, maps, half = list[list[float]](), list[dict[str, torch.Tensor]](), INTERVAL + 1
    for make, then in ((_stock, "none"), (_ours, "graph")):
        sharded = make(_model("lru"))
        found = _trained(sharded, batches=_batches(0, half))
        losses.append(found + _trained(sharded, then, _batches(half)))
        maps.append(_map_of(sharded))
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    assert all(torch.equal(each, maps[1][name]) for name, each in maps[0].items())


def _check_ranges() -> None:
    """Tables with other ranges of ids, ids beyond them and negative ids go to the same ranks as under TorchRec."""
    sizes = {"t0": 900, "t1": 0}
    models = [
        any_ids.Model(ROWS, lambda name, rows: _mch(name, rows, "lfu", input_hash_size=sizes[name])) for _ in "12"
    ]
    generator = torch.Generator().manual_seed(dist.get_rank())
    drawn = torch.randint(-60, 1200, (STEPS, 2, any_ids.SAMPLES, 2), generator=generator)
    batches = [batch_of(each.tolist()) for each in drawn]
    stock, ours = _stock(models[0]), _ours(models[1])
    losses = [_trained(each, "graph", batches) for each in (stock, ours)]
    assert all(each.takes_ids for each in _exchanging(ours))
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    maps = _map_of(stock), _map_of(ours)
    assert all(torch.equal(each, maps[1][name]) for name, each in maps[0].items())


def _check_reasons() -> None:
    """Steps that need the host in between stay with TorchRec's pipeline, exchange, and say why."""
    hashed: Any = lambda ids, size: ids % size  # noqa: E731
    for given, rows, reason in (
        ({"input_hash_func": hashed}, ROWS, "table t0 has an input_hash_func"),
        ({}, ROWS + 1, f"table t0 has {ROWS + 1} rows, no multiple of 2 ranks"),
    ):
        ours = _ours(any_ids.Model(rows, partial(_mch, policy="lfu", **given)))
        assert [each.why_ids_are_not_taken() for each in _exchanging(ours)] == [reason]
        _trained(ours, "graph", _batches(0, 4))
        assert not any(each.takes_ids for each in _exchanging(ours))


def _check_adagrad() -> None:
    """Row-wise Adagrad's state of evicted rows is 0, as TorchRec's operator, which only GPUs have, sets it."""
    sharded: Any = _ours(_model("lru", eviction_interval=1), optimizer=ADAGRAD)
    _trained(sharded, batches=_batches(0, 4))
    tables = sharded.module.tables
    rows = torch.tensor([3, 5])
    weights, states = tables.exchanging.exchange.tables.tensors_of("t0")
    assert states.count_nonzero() > 2
    states.fill_(7.0)
    tables._evict({"t0": rows, "t1": None})
    assert states.nonzero().flatten().tolist() == [row for row in range(len(states)) if row not in (3, 5)]
    assert weights[rows].abs().max() <= 0.2


def _check_variable_batches() -> None:
    """Each bag is recorded once, and its samples get its embedding."""
    drawn = [any_ids.draw_shared(dist.get_rank(), step) for step in range(STEPS)]
    every = {name: _ours(_model("lfu")) for name in ("sparse_dist", "graph")}
    losses = [_trained(each, name, [batch for _, batch in drawn]) for name, each in every.items()]
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    first = _trained(_stock(_model("lfu")), batches=[batch_of(ids) for ids, _ in drawn[: INTERVAL - 1]])
    assert losses[0][: INTERVAL - 1] == pytest.approx(first, rel=1e-5)
    maps = [_map_of(each) for each in every.values()]
    assert all(torch.equal(each, maps[1][name]) for name, each in maps[0].items())


_PIPELINES = {
    "lfu": ("graph",),
    "lru": ("graph",),
    "distance_lfu": ("none", "sparse_dist", "graph", *["captured"] * INTERPRETED),
}
CASES: dict[str, Callable[[], None]] = {
    f"{policy}; {pipeline}": partial(_check, policy, pipeline)
    for policy in POLICIES
    for pipeline in _PIPELINES.get(policy, ("sparse_dist",))
}
CASES |= {"interruptions": _check_interruptions, "ranges": _check_ranges, "reasons": _check_reasons}
CASES |= {"pipelines in turns": _check_pipelines_in_turns}
CASES |= {"variable batches": _check_variable_batches, "state dict": _check_state_dict, "adagrad": _check_adagrad}
CASES["loads between steps"] = lambda: any_ids.check_loads_between_steps(
    lambda: _ours(_model("lru")), _batches(steps=10)
)


def _run_case(case: str) -> None:
    CASES[case]()


ended = cases_on_ranks(2, _run_case, list(CASES))


@pytest.mark.parametrize("case", CASES)
def test_two_ranks(ended: Callable[[str], None], case: str) -> None:
    ended(case)
