"""Tables of any id train as if each id had its own row, in every pipeline and on any number of ranks."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_training import WeightDecayMode
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig, get_qcomm_codecs_registry
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_overlap import GraphTrainPipeline, explain
from dlrm_overlap.data.batch import Batch
from dlrm_overlap.embedding.id_tables import id_map
from dlrm_overlap.embedding.id_tables.sharder import OverlapManagedCollisionEmbeddingBagCollectionSharder
from dlrm_overlap.kernels.compiled import INTERPRETED
from dlrm_overlap.kernels.ids.id_map import EMPTY, Totals, murmur, unsigned_remainder
from dlrm_overlap.torchrec_private import ShardedManagedCollisionCollection
from tests.conftest import PYTHON_PATH, ROOT, refuses
from tests.distributed import any_ids
from tests.distributed.any_ids import batch_of, draw, expected_losses, own_module, shard, zch_module
from tests.distributed.workers import cases_on_ranks, logged_messages

STEPS, ROWS = 6, 512
DECAY = {
    "optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
    "weight_decay": 0.1,
    "weight_decay_mode": WeightDecayMode.DECOUPLE,
}


def _check_losses(pipeline: str, make_module: Any, backend: str = "pgas") -> None:
    """Each id has its own row, whichever slot that is."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    drawn = [[draw(each, step) for each in range(ranks)] for step in range(STEPS)]
    sharded = shard(any_ids.Model(ROWS, make_module), backend)
    found = any_ids.train(sharded, [batch_of(of[rank]) for of in drawn], pipeline)
    assert found.losses == pytest.approx(expected_losses(drawn), rel=1e-5)
    assert found.id_map.total(Totals.NO_ROOM) == found.id_map.total(Totals.NOT_ADMITTED) == 0
    used = torch.tensor(found.id_map.used())
    dist.all_reduce(used)
    assert int(used) == len(
        {(f, id) for of in drawn for ids in of for f, bags in enumerate(ids) for bag in bags for id in bag}
    )


def _check_state_dict() -> None:
    rank = dist.get_rank()
    sharded = shard(any_ids.Model(ROWS, zch_module))
    any_ids.train(sharded, [batch_of(draw(rank, step)) for step in range(STEPS)])
    any_ids.check_torchrec_finds_ids(sharded.state_dict(), "t0", ROWS)


def _check_initial_rows() -> None:
    """Rows of new ids do not depend on the ranks that they come to, although the ranks' generators differ."""
    torch.manual_seed(dist.get_rank())
    pools = any_ids.Step([], shard(any_ids.Model(ROWS, zch_module, torch.nn.init.uniform_))).id_map._pools
    assert pools, "tables have initial rows"
    for mine in pools.values():
        rows = mine.clone()
        dist.broadcast(rows, src=0)
        assert torch.equal(rows, mine)
    assert len({pool.sum().item() for pool in pools.values()}) == len(pools), "tables' rows differ"


def _check_loading() -> None:
    """Ids that TorchRec has put into a state dict, by linear probing, have their rows after it is loaded."""
    rank, size = dist.get_rank(), ROWS // 4
    sharded: Any = shard(any_ids.Model(ROWS, zch_module))
    state = sharded.state_dict()
    (ids,) = state[f"{any_ids.MODULES}t0._hash_zch_identities"].local_shards()
    (rows,) = state["tables._embedding_module.embedding_bags.t0.weight"].local_shards()
    known = torch.randint(0, 2**62, (300,), generator=torch.Generator().manual_seed(3))
    first, slots = ids.metadata.shard_offsets[0], ids.tensor.flatten()
    for id, bucket, home in zip(known, known % 4, unsigned_remainder(murmur(known), torch.tensor(size)), strict=True):
        if int(bucket) * size // len(slots) == rank:
            place = next(p for p in range(size) if slots[int(bucket) * size - first + (int(home) + p) % size] == EMPTY)
            at = int(bucket) * size - first + (int(home) + place) % size
            ids.tensor[at], rows.tensor[at] = id, float(id % 1000)
    sharded.load_state_dict(state)
    sharded.eval()
    with torch.no_grad():
        pooled, _ = sharded.module.tables(batch_of([[[int(id)] for id in known[:6]], [[] for _ in range(6)]]).sparse)
    assert torch.equal(pooled.to_dict()["f0"][:, 0], (known[:6] % 1000).float())


def _check_training_after_loading(pipeline: str) -> None:
    """A model that has loaded the ids of each rank trains on with them, in a new pipeline."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    drawn = [[draw(each, step) for each in range(ranks)] for step in range(STEPS)]
    batches, half = [batch_of(of[rank]) for of in drawn], STEPS // 2
    first = shard(any_ids.Model(ROWS, own_module))
    any_ids.train(first, batches[:half])
    second = shard(any_ids.Model(ROWS, own_module))
    state: Any = second.state_dict()
    for name, tensor in first.state_dict().items():
        parts = [(each.local_shards()[0].tensor if name in _sharded(state) else each) for each in (state[name], tensor)]
        parts[0].detach().copy_(parts[1])
    second.load_state_dict(state)
    found = any_ids.train(second, batches[half:], pipeline)
    assert found.losses == pytest.approx(expected_losses(drawn)[half:], rel=1e-5)


def _sharded(state: dict[str, Any]) -> list[str]:
    return [name for name, tensor in state.items() if isinstance(tensor, ShardedTensor)]


def _check_loads_between_steps() -> None:
    batches = [batch_of(draw(dist.get_rank(), step, pool=400)) for step in range(10)]
    any_ids.check_loads_between_steps(lambda: shard(any_ids.Model(64, zch_module)), batches)


def _check_full(**fused: Any) -> None:
    """Where every slot is in use, ids are served by the reserved row, which is not trained, and counted."""
    rank, rows = dist.get_rank(), 128 * dist.get_world_size()
    sharded = shard(any_ids.Model(rows, partial(own_module, eviction="none")), **fused)
    before = _reserved(sharded)
    ids = [[[[1000 * step + 100 * sample + k for k in range(25)] for sample in range(6)]] * 2 for step in range(2)]
    found = any_ids.train(sharded, [batch_of(each) for each in ids])
    assert found.id_map.total(Totals.NO_ROOM) > 0
    assert found.id_map.used() == 2 * 127
    assert torch.equal(_reserved(sharded), before)
    assert rank < 2


def _reserved(sharded: Any) -> torch.Tensor:
    (mine,) = sharded.state_dict()["tables._embedding_module.embedding_bags.t0.weight"].local_shards()
    return mine.tensor[127::128].clone()


def _check_evaluation() -> None:
    """An evaluation changes nothing, and unknown ids read their first row."""
    rank = dist.get_rank()
    sharded = shard(any_ids.Model(ROWS, own_module))
    found = any_ids.train(sharded, [batch_of(draw(rank, step)) for step in range(2)])
    before = [each.clone() for each in found.id_map.state]
    sharded.eval()
    with torch.no_grad():
        sharded(batch_of(draw(rank, 5, seed=1)))
    assert all(torch.equal(*pair) for pair in zip(before, found.id_map.state, strict=True))


def _check_pipelines_in_turns() -> None:
    """A pipeline begins with equal dense parameters on all ranks, but each rank keeps the ids of its own rows."""
    rank = dist.get_rank()
    sharded = shard(any_ids.Model(ROWS, own_module))
    ids = any_ids.train(sharded, [batch_of(draw(rank, 0))], "graph").id_map.state.ids
    before = ids.clone()
    any_ids.train(sharded, [batch_of(draw(rank, 0))], "graph")
    assert torch.equal(ids, before)


def _check_segments() -> None:
    """A replay at the end of a segment sends ids that no step looks up: they are not counted, and get no rows."""
    rank, found, sketches = dist.get_rank(), list[list[float]](), list[torch.Tensor]()
    rules = partial(own_module, eviction="lfu", admit_after=2)
    batches = [batch_of(draw(rank, step, pool=400)) for step in range(15)]
    for pipeline in ("graph", "captured"):
        sharded = shard(any_ids.Model(128 * dist.get_world_size(), rules))
        step = any_ids.train(sharded, batches, pipeline, segment=5)
        found.append([*step.losses, *(step.id_map.total(which) for which in Totals)])
        sketches.append(step.id_map.state.sketch)
    assert found[0] == found[1]
    assert torch.equal(*sketches)
    assert 0 < sketches[0].sum() < step.id_map.total(Totals.NOT_ADMITTED), "halved, since a sighting adds 1 or 2"


def _check_clock() -> None:
    """Hours pass between the steps, also between replays: ids whose hour has passed lose their rows."""
    hours, found, progress = [0], list[list[float]](), GraphTrainPipeline.progress
    batches = [batch_of(draw(dist.get_rank(), step, pool=400)) for step in range(10)]

    def an_hour_later(*given: Any) -> Any:
        hours[0] += 1
        return progress(*given)

    for pipeline in ("graph", "captured"):
        with (
            patch.object(GraphTrainPipeline, "progress", an_hour_later),
            patch.object(id_map.time, "time", lambda: 3600.0 * hours[0]),
        ):
            step = any_ids.train(shard(any_ids.Model(64, zch_module)), batches, pipeline)
        found.append([*step.losses, *(step.id_map.total(which) for which in Totals)])
    assert found[0] == found[1]
    assert found[0][len(batches) + Totals.EVICTED] > 64


def _check_variable_batches(pipeline: str) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    drawn = [[any_ids.draw_shared(each, step) for each in range(ranks)] for step in range(STEPS)]
    expected = expected_losses([[ids for ids, _ in of] for of in drawn])
    found = any_ids.train(shard(any_ids.Model(ROWS, zch_module)), [of[rank][1] for of in drawn], pipeline)
    assert found.losses == pytest.approx(expected, rel=1e-5)


def _check_unused_inverse_indices() -> None:
    """Inverse indices of a batch that is not variable change nothing, as in TorchRec."""
    rank, ranks, batches = dist.get_rank(), dist.get_world_size(), list[Batch]()
    drawn = [[draw(each, step) for each in range(ranks)] for step in range(2)]
    for of in drawn:
        batch = batch_of(of[rank])
        ids, inverse = batch.sparse, torch.zeros(2, any_ids.SAMPLES, dtype=torch.int64)
        given = KeyedJaggedTensor(
            ids.keys(), ids.values(), lengths=ids.lengths(), stride=ids.stride(), inverse_indices=(ids.keys(), inverse)
        )
        batches.append(Batch(batch.dense, given, batch.labels))
    found = any_ids.train(shard(any_ids.Model(ROWS, zch_module)), batches)
    assert found.losses == pytest.approx(expected_losses(drawn), rel=1e-5)


def _check_not_exchanged() -> None:
    """Tables whose rows the exchange does not send stay with TorchRec, and GraphTrainPipeline says why."""
    rank, ranks, reason = dist.get_rank(), dist.get_world_size(), "quantised communication: bf16 and fp16"
    precisions = QCommsConfig(forward_precision=CommType.FP16, backward_precision=CommType.BF16)
    fused = {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": any_ids.LR}
    sharder = OverlapManagedCollisionEmbeddingBagCollectionSharder(fused, get_qcomm_codecs_registry(precisions))
    drawn, messages = [[draw(each, step) for each in range(ranks)] for step in range(STEPS)], logged_messages()
    for pipeline in ("none", "graph"):
        sharded = any_ids.shard_by(sharder, any_ids.Model(ROWS, zch_module))
        found = any_ids.train(sharded, [batch_of(of[rank]) for of in drawn], pipeline)
        assert found.losses == pytest.approx(expected_losses(drawn), rel=5e-3)
        assert found.id_map.total(Totals.NO_ROOM) == 0 < found.id_map.used()
    assert {table.why_not for table in explain(sharded).tables} == {reason}
    assert rank or messages[-1].endswith(f"cannot be captured: tables of any id stay with TorchRec: {reason}")
    with refuses("FBGEMM would train these rows"):
        any_ids.shard_by(sharder, any_ids.Model(ROWS, own_module))


def _check_refusals() -> None:
    """FBGEMM's update would train the initial rows; remapped features are not returned by captured steps.

    A tracker of raw ids would see none.
    """
    with refuses("nccl updates rows by FBGEMM"):
        shard(any_ids.Model(ROWS, own_module), "nccl")
    sharded = shard(any_ids.Model(ROWS, zch_module))
    (collection,) = (each for each in sharded.modules() if isinstance(each, ShardedManagedCollisionCollection))
    with refuses("call no tracker"):
        collection.register_post_lookup_tracker_fn(lambda *_: None)
    model = any_ids.Model(ROWS, zch_module)
    model.tables._return_remapped_features = True
    assert {table.why_not for table in explain(shard(model)).tables} == {"a collection returns remapped features"}


CASES: dict[str, Callable[[], None]] = {
    f"{pipeline}, {module.__name__}": partial(_check_losses, pipeline, module)
    for pipeline in ("none", "sparse_dist", "graph", *["captured"] * INTERPRETED)
    for module in (zch_module, own_module)
}
CASES |= {
    "nccl": partial(_check_losses, "none", zch_module, "nccl"),
    **({"segments": _check_segments, "clock": _check_clock} if INTERPRETED else {}),
    "pipelines in turns": _check_pipelines_in_turns,
    **{f"variable batches, {name}": partial(_check_variable_batches, name) for name in ("sparse_dist", "graph")},
    "unused inverse indices": _check_unused_inverse_indices,
    "not exchanged": _check_not_exchanged,
    "refusals": _check_refusals,
    "state dict": _check_state_dict,
    "initial rows": _check_initial_rows,
    "loading": _check_loading,
    **{f"{name} after loading": partial(_check_training_after_loading, name) for name in ("none", "graph")},
    "loads between steps": _check_loads_between_steps,
    "full": _check_full,
    "full, with weight decay": partial(_check_full, **DECAY),
    "evaluation": _check_evaluation,
}


def _run_case(case: str) -> None:
    CASES[case]()


# These differ little from others.
MORE = ["none, own_module", "sparse_dist, own_module", "graph, zch_module", "variable batches, sparse_dist"]
MORE += ["unused inverse indices", "none after loading", "full"]
QUICK = [case for case in CASES if case not in MORE]
ended, more_ended = cases_on_ranks(2, _run_case, QUICK), cases_on_ranks(2, _run_case, MORE)


@pytest.mark.parametrize("case", QUICK)
def test_two_ranks(ended: Callable[[str], None], case: str) -> None:
    ended(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", MORE)
def test_two_ranks_more(more_ended: Callable[[str], None], case: str) -> None:
    more_ended(case)


_TRAIN = ("train", "--config", "quickstart", "--data.tables.ids", "any", "--embedding.id_tables.rows", "512")
_TRAIN = (*_TRAIN, "--embedding.backend", "pgas", "--train.global_batch_size", "512", "--log.every", "5")


@pytest.mark.slow
def test_a_run_resumes_on_fewer_ranks(tmp_path: Path) -> None:
    counted = ("--embedding.id_tables.eviction", "lfu", "--embedding.id_tables.admit_after", "2")
    any_ids.check_resumes_on_fewer_ranks(tmp_path, *_TRAIN, *counted)


@pytest.mark.slow
def test_the_example_learns_while_ids_come_and_go() -> None:
    agent = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    without_interpreter = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, *agent, "examples/any_ids.py", "--steps", "100"],
        cwd=ROOT,
        env=without_interpreter | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONPATH": PYTHON_PATH},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "backend pgas: 2 of 2 tables exchanged, update by push" in done.stderr
    losses = [float(loss) for loss in re.findall(r"^step \d+: loss (\S+)$", done.stdout, re.MULTILINE)]
    assert len(losses) == 5
    assert losses[-1] < 0.05
