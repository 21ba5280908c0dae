"""Tables of any id whose rows are in host memory train with the bits of those whose rows are on the device."""

import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec.distributed.model_parallel import DistributedModelParallel

from dlrm_overlap.checkpoint.checkpoint import Checkpointer, extents_to_store
from dlrm_overlap.data.batch import Batch
from dlrm_overlap.embedding import cache
from dlrm_overlap.embedding.cache import RowCache
from dlrm_overlap.embedding.id_tables import id_map
from dlrm_overlap.embedding.sharded_module import exchanges
from dlrm_overlap.embedding.tables import LocalTables
from dlrm_overlap.kernels import reference
from dlrm_overlap.kernels.compiled import INTERPRETED
from dlrm_overlap.kernels.ids import reference as ids_reference
from dlrm_overlap.kernels.ids.id_map import Totals
from dlrm_overlap.train.trainer import Trainer
from tests.agreement import assert_all_near
from tests.distributed import any_ids
from tests.distributed.any_ids import batch_of, draw, own_module, shard, zch_module
from tests.distributed.captured import captures
from tests.distributed.models import local_tensors
from tests.distributed.workers import cases_on_ranks, make_trainer, quickstart

ROWS, POOL, SAMPLES = 512, 1200, 16
BOTH = {"t0": 0.01, "t1": 0.01}
OPTIONS = ["--train.batch_size", str(SAMPLES), "--train.steps", "100", "--data.eval_samples", "80"]
OPTIONS += ["--model.dim", "8", "--model.bottom_mlp", "[16,8]", "--model.top_mlp", "[16,1]", "--embedding.lr", "1.0"]
OPTIONS += ["--data.tables.ids", "any", "--data.tables.drift", "200", "--embedding.id_tables.rows", "256"]
OPTIONS += ["--embedding.id_tables.admit_after", "2", "--embedding.backend", "pgas", "--train.pipeline", "graph"]
IN_HOST_MEMORY = ["--embedding.memory", "cached", "--embedding.cache_fraction", "0.001"]  # and the ids of two steps


@contextmanager
def _poisoned() -> Iterator[None]:
    """Make host rows NaN while they are in a cache, but for rows that are never trained."""
    activate = LocalTables.activate

    def then_poison(tables: LocalTables, ids: Any) -> None:
        activate(tables, ids)
        for each, _ in tables._cached_features:
            rows = each._state.row_in
            for host in each.host_rows:
                host[rows[rows >= 0]] = torch.nan

    with patch.object(LocalTables, "activate", then_poison):
        yield


@contextmanager
def _references() -> Iterator[None]:
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
def _an_hour_a_step() -> Iterator[None]:
    hours = count(1)
    with patch.object(id_map.time, "time", lambda: 3600.0 * next(hours)):
        yield


def _open(module: Any, memory: Mapping[str, float], rows: int) -> DistributedModelParallel:
    """Return a model whose initial rows differ; rows that ids may have are NaN until they are filled."""
    torch.manual_seed(dist.get_rank())
    model = any_ids.Model(rows, module, partial(torch.nn.init.uniform_, a=0.05, b=0.15))
    sharded = shard(model, "pgas", memory, EmbOptimType.EXACT_ROWWISE_ADAGRAD)
    (exchange,) = exchanges(sharded)
    for name, rules in any_ids.Step([], sharded).id_map.rules.items():
        weights, *_ = exchange.tables.tensors_of(name)
        weights[torch.arange(len(weights)) % rules.size < rules.open_slots] = torch.nan
    return sharded


def _train(sharded: Any, steps: int, segment: int, captured: bool, hourly: bool) -> list[float]:
    """Take steps; return their losses, then the totals of the map."""
    batches = [batch_of(draw(dist.get_rank(), step, POOL)) for step in range(steps)]
    with ExitStack() as stack:
        taken: Any = stack.enter_context(captures() if captured else _references())
        stack.enter_context(_poisoned())
        if hourly:
            stack.enter_context(_an_hour_a_step())
        step = any_ids.train(sharded, batches, "graph", segment)
    assert not captured or taken["replayed"] > 0, "steps are captured"
    return [*step.losses, *(step.id_map.total(which) for which in Totals)]


def _caches(model: DistributedModelParallel) -> list[RowCache]:
    return [each for exchange in exchanges(model) for each, _ in exchange.tables._cached_features]


def _rows_of(sharded: DistributedModelParallel) -> dict[str, torch.Tensor]:
    """Return copies of this rank's rows, states of optimizers and maps, by name."""
    kept = sharded.fused_optimizer.state_dict()["state"]
    states = {f"{name} {key}": each for name, of in kept.items() for key, each in of.items()}
    every = {**dict(local_tensors(sharded.state_dict())), **dict(local_tensors(states))}
    return {name: each.nan_to_num(-1) for name, each in every.items()}


def _check(
    module: Any,
    memory: Mapping[str, float] = BOTH,
    captured: bool = False,
    hourly: bool = False,
    rows: int = ROWS,
    steps: int = 45,
    segment: int = 15,
) -> None:
    """Ids and rows are evicted, and come back, in steps of several segments."""
    plain, cached = (_open(module, each, rows) for each in ({}, memory))
    expected, found = (_train(each, steps, segment, captured, hourly) for each in (plain, cached))
    assert found == expected
    assert not any(loss != loss for loss in found), "rows that nothing has filled were looked up"
    for each in _caches(cached):
        assert each.slots <= len(each.host_rows[0]) // 2
        assert bool((each._state.row_in >= 0).all()), "every slot was taken, and some again"
    assert found[steps + Totals.EVICTED] > each.slots // 8, "ids have lost their rows"
    assert_all_near(_rows_of(cached), _rows_of(plain), 0.0, "after the last step")


def _batches_of(trainer: Trainer, steps: range) -> Iterator[Batch]:
    for step in steps:
        yield trainer.train_data.read((step * trainer.world.world_size + trainer.world.rank) * SAMPLES, SAMPLES)


def _evaluated(trainer: Trainer) -> list[float]:
    """Return the losses of batches that are evaluated between two steps, with ids under way."""
    trainer.model.eval()
    with torch.no_grad():
        batches = _batches_of(trainer, range(1000, 1003))
        losses = [float(trainer.pipeline.progress(batches)[0]) for _ in range(3)]
    trainer.model.train()
    return losses


def _check_runs() -> None:
    """A run that evaluates and saves, and two that resume from the save, with and without rows in host memory."""
    names: list[Any] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(names)
    checkpointer = Checkpointer(Path(names[0]), keep=1, shape={})
    with _references(), _poisoned():
        memory = [], IN_HOST_MEMORY, [], IN_HOST_MEMORY
        trainers = [make_trainer(quickstart(Path("unused"), "run", *OPTIONS, *each)) for each in memory]
        found = list[list[float]]()
        for trainer in trainers[:2]:
            batches = _batches_of(trainer, range(16))
            losses = [float(trainer.step(batches)) for _ in range(8)]
            losses += _evaluated(trainer)
            found.append([*losses, *(float(trainer.step(batches)) for _ in range(8)), trainer.evaluate()["loss"]])
        assert found[1] == found[0]
        checkpointer.write(16, extents_to_store(trainers[1].model, trainers[1].optimizer))
        for trainer, before in zip(trainers[2:], (0, 4), strict=True):
            batches = _batches_of(trainer, range(100, 104))
            assert len([trainer.step(batches) for _ in range(before)]) == before  # then overwritten
            trainer.pipeline.reset()
            assert checkpointer.load(Path(names[0]) / "step_16", trainer.model, trainer.optimizer) == 16
        of_steps = [(trainer, _batches_of(trainer, range(16, 24))) for trainer in trainers]
        expected, *others = [[float(trainer.step(batches)) for _ in range(8)] for trainer, batches in of_steps]
        assert others == [expected] * 3
        for trainer in trainers[1::2]:
            assert [each.slots < len(each.host_rows[0]) for each in _caches(trainer.model)] == [True]
        dist.barrier()
        for trainer in trainers:
            trainer.close()


LFU = partial(own_module, eviction="lfu", admit_after=2, admit_memory=4.0)
CASES: dict[str, Callable[[], None]] = {
    "lru": partial(_check, own_module),
    "lfu, ids that are not admitted": partial(_check, LFU),
    "one table of two": partial(_check, own_module, {"t1": 0.3}),
    "mpzch": partial(_check, zch_module, hourly=True),
    "mpzch, reserved slots": partial(
        _check, partial(zch_module, percent_reserved_slots=10, opt_in_prob=80), hourly=True
    ),
    "runs": _check_runs,
}
if INTERPRETED:
    CASES["captured"] = partial(_check, LFU, captured=True, rows=256, steps=21, segment=7)
QUICK = ["lru", "lfu, ids that are not admitted"]
SLOW = [case for case in CASES if case not in QUICK]


def _run_case(case: str) -> None:
    CASES[case]()


quick = cases_on_ranks(2, _run_case, QUICK)
slow = cases_on_ranks(2, _run_case, SLOW)


@pytest.mark.parametrize("case", QUICK)
def test_two_ranks(quick: Callable[[str], None], case: str) -> None:
    quick(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", SLOW)
def test_two_ranks_more(slow: Callable[[str], None], case: str) -> None:
    slow(case)
