"""Tables of any id whose rows are in host memory train with the bits of those whose rows are on the device."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import count
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec.distributed.model_parallel import DistributedModelParallel

from dlrm_overlap.embedding import cache
from dlrm_overlap.embedding.id_tables import id_map
from dlrm_overlap.embedding.sharded_module import exchanges
from dlrm_overlap.embedding.tables import LocalTables
from dlrm_overlap.kernels import reference
from dlrm_overlap.kernels.compiled import INTERPRETED
from dlrm_overlap.kernels.ids import reference as ids_reference
from dlrm_overlap.kernels.ids.id_map import Totals
from tests.distributed import any_ids
from tests.distributed.any_ids import batch_of, draw, own_module, shard, zch_module
from tests.distributed.captured import captures
from tests.distributed.workers import cases_on_ranks

STEPS, ROWS, POOL = 45, 512, 1200
BOTH = {"t0": 0.01, "t1": 0.01}


@contextmanager
def poisoned() -> Iterator[None]:
    """Make all host rows NaN while they are in a cache, unless they are never trained."""
    activate = LocalTables.activate

    def then_poison(tables: LocalTables, ids: Any) -> None:
        activate(tables, ids)
        for held, _ in tables._cached_features:
            rows = held._state.row_in
            for host in held.host_rows:
                host[rows[rows >= 0]] = torch.nan

    with patch.object(LocalTables, "activate", then_poison):
        yield


@contextmanager
def references() -> Iterator[None]:
    """Let maps and caches be without kernels, which take Triton's interpreter long."""
    def map_ids(state: Any, features: Any, _: Any, *given: Any) -> Any:
        return ids_reference.map_ids(state, features, *given)

    def fill_rows(tables: Any, claims: Any) -> None:
        ids_reference.fill_rows(tables.entries, claims)

    with (
        patch.multiple(id_map, map_ids=map_ids, fill_rows=fill_rows),
        patch.multiple(cache, find_slots=reference.find_slots, swap_rows=reference.swap_rows),
    ):
        yield


@contextmanager
def an_hour_a_step() -> Iterator[None]:
    hours = count(1)
    with patch.object(id_map.time, "time", lambda: 3600.0 * next(hours)):
        yield


def open_model(module: Any, memory: Mapping[str, float], rows: int = ROWS) -> DistributedModelParallel:
    """Return a model whose initial rows differ; rows that an id can have are NaN until it is filled."""
    torch.manual_seed(dist.get_rank())
    model = any_ids.Model(rows, module, partial(torch.nn.init.uniform_, a=0.05, b=0.15))
    sharded = shard(model, "pgas", memory, EmbOptimType.EXACT_ROWWISE_ADAGRAD)
    (exchange,) = exchanges(sharded)
    for name, rules in any_ids.Step([], sharded).id_map.rules.items():
        weights, *_ = exchange.tables.tensors_of(name)
        weights[torch.arange(len(weights)) % rules.size < rules.open_slots] = torch.nan
    return sharded


def rows_of(sharded: Any) -> dict[str, torch.Tensor]:
    """Return copies of this rank's rows, states of optimizers and maps, by name."""
    (exchange,) = exchanges(sharded)
    exchange.tables.write_back()
    states = {f"{name} {key}": each for name, of in sharded.fused_optimizer.state_dict()["state"].items()
              for key, each in of.items()}
    every = {**sharded.state_dict(), **states}
    shards = {name: each.local_shards() for name, each in every.items() if hasattr(each, "local_shards")}
    return {name: shard.tensor.clone() for name, of in shards.items() for shard in of}


def train(sharded: Any, steps: range, pipeline: str, hourly: bool = False, segment: int = 15) -> list[float]:
    """Take steps; return their losses, then the totals of the map."""
    rank, captured = dist.get_rank(), pipeline == "captured"
    batches = [batch_of(draw(rank, step, POOL)) for step in steps]
    with ExitStack() as stack:
        taken = stack.enter_context(captures() if captured else references())
        if hourly:
            stack.enter_context(an_hour_a_step())
        stack.enter_context(poisoned())
        step = any_ids.train(sharded, batches, "graph", segment)
    assert not captured or taken["replayed"] > 0, "steps are captured"
    return [*step.losses, *(step.id_map.total(which) for which in Totals)]


def _check(pipeline: str, module: Any, memory: Mapping[str, float] = BOTH, hourly: bool = False, rows: int = ROWS, steps: int = STEPS, segment: int = 15) -> None:
    plain, cached = (open_model(module, each, rows) for each in ({}, memory))
    expected, found = (train(each, range(steps), pipeline, hourly, segment) for each in (plain, cached))
    assert found == expected
    assert all(loss == loss for loss in found), "rows that nothing has filled are looked up"
    (exchange,) = exchanges(cached)
    caches = [each for each, _ in exchange.tables._cached_features]
    print([(each.slots, len(each.host_rows[0]), bool((each._state.row_in >= 0).all())) for each in caches], found[-5:], flush=True)
    assert all(each.slots <= len(each.host_rows[0]) // 2 and bool((each._state.row_in >= 0).all()) for each in caches)
    assert found[len(found) - len(Totals) + Totals.EVICTED] > 0, "no id has lost its row"
    ours, theirs = rows_of(cached), rows_of(plain)
    assert ours.keys() == theirs.keys()
    different = [name for name, each in theirs.items() if not torch.equal(ours[name].nan_to_num(-1), each.nan_to_num(-1))]
    assert not different


MODULES = {
    "lru": (own_module, {}),
    "lfu": (partial(own_module, eviction="lfu", admit_after=2), {}),
}
CASES: dict[str, Callable[[], None]] = {f"graph, {name}": partial(_check, "graph", module, **more) for name, (module, more) in MODULES.items()}
CASES["graph, zch"] = partial(_check, "graph", zch_module, hourly=True)
CASES["graph, zch reserved"] = partial(_check, "graph", partial(zch_module, percent_reserved_slots=10, opt_in_prob=80), hourly=True)
CASES["graph, one"] = partial(_check, "graph", own_module, {"t1": 0.3})
if INTERPRETED:
    CASES["captured, lfu"] = partial(_check, "captured", partial(own_module, eviction="lfu", admit_after=2), rows=256, steps=21, segment=7)


def _run_case(case: str) -> None:
    CASES[case]()


ended = cases_on_ranks(2, _run_case, list(CASES))


@pytest.mark.parametrize("case", CASES)
def test_two_ranks(ended: Callable[[str], None], case: str) -> None:
    ended(case)
