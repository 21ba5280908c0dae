"""Unpooled tables of any id train as if each id had its own row, in every pipeline and on any number of ranks."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torchrec.distributed.types import ModuleSharder
from torchrec.modules.hash_mc_evictions import HashZchEvictionConfig, HashZchEvictionPolicyName

from dlrm_overlap import explain, get_default_sharders
from dlrm_overlap.embedding.id_tables.sharder import OverlapManagedCollisionEmbeddingCollectionSharder
from dlrm_overlap.embedding.unpooled import UnpooledIdSender
from dlrm_overlap.kernels.compiled import INTERPRETED
from dlrm_overlap.kernels.ids.id_map import Totals
from tests.conftest import refuses, run_cli
from tests.distributed import any_ids
from tests.distributed.any_ids import batch_of, own_module, zch_module
from tests.distributed.unpooled_any_ids import TABLES, Model, expected_losses, shard
from tests.distributed.workers import cases_on_ranks

STEPS, ROWS = 6, 512
draw = partial(any_ids.draw, features=3)


def _drawn() -> list[list[list[list[list[int]]]]]:
    """Return step -> rank -> ids; some are negative, and some are equal in their low words or in their high words."""
    drawn = [[draw(rank, step) for rank in range(dist.get_world_size())] for step in range(STEPS)]
    return [[_widened(ids) for ids in ranks] for ranks in drawn]


def _widened(ids: list[list[list[int]]]) -> list[list[list[int]]]:
    ways: Sequence[Callable[[int], int]] = (
        lambda id: id,
        lambda id: -2 - id,
        lambda id: (id % 7 << 32) + 5,
        lambda id: (5 << 32) + id % 7,
    )
    return [[[ways[id % 4](id) for id in bag] for bag in bags] for bags in ids]


def _check_losses(pipeline: str, make_module: Any, nodes: int = 1) -> None:
    """Each id has its own row, whichever slot that is, and is sent once to the owner of its bucket."""
    rank, drawn = dist.get_rank(), _drawn()
    sharded = shard(Model(ROWS, make_module), nodes=nodes)
    found = any_ids.train(sharded, [batch_of(of[rank]) for of in drawn], pipeline)
    assert found.losses == pytest.approx(expected_losses(drawn), rel=1e-5)
    senders = [getattr(each, "sender", None) for each in sharded.modules()]
    by_us = [each for each in senders if isinstance(each, UnpooledIdSender)]
    assert len(by_us) == (pipeline in ("graph", "captured")), "TorchRec sends the ids in its own pipelines"
    assert found.id_map.total(Totals.NO_ROOM) == found.id_map.total(Totals.NOT_ADMITTED) == 0
    used = torch.tensor(found.id_map.used())
    dist.all_reduce(used)
    looked_up = {
        (table, id)
        for ranks in drawn
        for ids in ranks
        for table, features in TABLES.items()
        for feature in features
        for bag in ids[int(feature[1])]
        for id in bag
    }
    assert int(used) == len(looked_up)


def _check_sightings() -> None:
    """Captured steps count an id once for each rank, however often its batch has it."""
    rank, ids = dist.get_rank(), [[[7, 7, 7]] * 6, [[7]] * 6, [[]] * 6]
    rules = partial(own_module, eviction="lfu")
    found = any_ids.train(shard(Model(ROWS, rules)), [batch_of(ids)] * 2, "graph")
    counts = torch.tensor([found.id_map.state.counts.max(), found.id_map.used()])
    dist.all_reduce(counts, dist.ReduceOp.MAX)
    assert counts.tolist() == [2 * dist.get_world_size(), 1]
    assert rank < 2


def _check_state_dict() -> None:
    rank = dist.get_rank()
    sharded = shard(Model(ROWS, zch_module))
    any_ids.train(sharded, [batch_of(draw(rank, step)) for step in range(STEPS)], "graph")
    state = sharded.state_dict()
    assert "tables._embedding_module.embeddings.t0.weight" in state
    any_ids.check_torchrec_finds_ids(state, "t0", ROWS)


def _check_resume() -> None:
    """A model that loads a state dict goes on with the same bits."""
    rank = dist.get_rank()
    batches = [batch_of(draw(rank, step)) for step in range(STEPS)]
    whole = shard(Model(ROWS, zch_module))
    any_ids.train(whole, batches[:3], "graph")
    kept = {name: _copied(value) for name, value in whole.state_dict().items()}
    expected = any_ids.train(whole, batches[3:], "graph").losses
    again: Any = shard(Model(ROWS, zch_module))
    state: dict[str, Any] = again.state_dict()
    for name, value in state.items():
        _tensor(value).copy_(kept[name])
    again.load_state_dict(OrderedDict(state))
    assert any_ids.train(again, batches[3:], "graph").losses == expected


def _tensor(value: Any) -> torch.Tensor:
    return value.local_shards()[0].tensor if hasattr(value, "local_shards") else value


def _copied(value: Any) -> torch.Tensor:
    return _tensor(value).detach().clone()


def _check_evaluation() -> None:
    """An evaluation changes nothing, and unknown ids read their first row, by TorchRec's steps and by ours."""
    rank, unknown = dist.get_rank(), batch_of(draw(dist.get_rank(), 5, seed=1))
    for pipeline, make_module in (("none", zch_module), ("graph", own_module)):
        sharded: Any = shard(Model(ROWS, make_module))
        found = any_ids.train(sharded, [batch_of(draw(rank, step)) for step in range(2)], pipeline)
        before = [each.clone() for each in found.id_map.state]
        sharded.eval()
        with torch.no_grad():
            rows, _ = sharded.module.tables(unknown.sparse)
        if make_module is own_module:  # else unknown ids share rows, as in TorchRec
            assert torch.equal(rows["f0"].values(), torch.full_like(rows["f0"].values(), any_ids.START))
        assert all(torch.equal(*pair) for pair in zip(before, found.id_map.state, strict=True))


def _check_indices() -> None:
    """With need_indices the output has the 64-bit ids."""
    model, batch = Model(ROWS, zch_module, need_indices=True), batch_of(_drawn()[0][dist.get_rank()])
    sharded: Any = shard(model)
    any_ids.train(sharded, [batch], "graph")
    found, _ = sharded.module.tables(batch.sparse)
    assert torch.equal(found["f0"].weights(), batch.sparse["f0"].values())


def _check_refusals() -> None:
    """FBGEMM's update would train initial rows; what steps cannot do is told, and stays with TorchRec."""
    batch = batch_of(draw(dist.get_rank(), 0))
    with refuses("t0, t1: steps of TorchRec's pipelines .* set train.pipeline to graph"):
        any_ids.train(shard(Model(ROWS, own_module)), [batch])
    keep = HashZchEvictionConfig(features=["f0", "f1", "f2"], per_feature_ttl=[1, 2, 1])
    policy = HashZchEvictionPolicyName.PER_FEATURE_TTL_EVICTION
    sharded = shard(Model(ROWS, partial(_module_of, eviction_policy_name=policy, eviction_config=keep)))
    assert {table.why_not for table in explain(sharded).tables} == {
        "features of unpooled table t0 have rules of their own"
    }
    found = any_ids.train(sharded, [batch] * 2, "graph").losses
    assert found == pytest.approx(
        expected_losses([[draw(each, 0) for each in range(dist.get_world_size())]] * 2), rel=1e-5
    )
    model = Model(ROWS, zch_module)
    model.tables._return_remapped_features = True
    assert {table.why_not for table in explain(shard(model)).tables} == {"a collection returns remapped features"}


def _module_of(name: str, rows: int, **given: Any) -> Any:
    return any_ids.HashZchManagedCollisionModule(
        zch_size=rows, device=any_ids.CPU, name=name, total_num_buckets=4, **given
    )


CASES: dict[str, Callable[[], None]] = {
    f"{pipeline}, {module.__name__}": partial(_check_losses, pipeline, module)
    for pipeline, module in (
        ("none", zch_module),
        ("sparse_dist", zch_module),
        *[(each, module) for each in ("graph", *["captured"] * INTERPRETED) for module in (zch_module, own_module)],
    )
}
CASES |= {
    "two nodes": partial(_check_losses, "graph", zch_module, 2),
    "two nodes, mixed ids": partial(_check_losses, "graph", own_module, 2),
    "sightings": _check_sightings,
    "state dict": _check_state_dict,
    "resume": _check_resume,
    "evaluation": _check_evaluation,
    "indices": _check_indices,
    "refusals": _check_refusals,
}


def _run_case(case: str) -> None:
    CASES[case]()


ended = cases_on_ranks(2, _run_case, list(CASES))
alone = cases_on_ranks(1, _run_case, ["graph, zch_module", "none, zch_module"])


@pytest.mark.parametrize("case", CASES)
def test_two_ranks(ended: Callable[[str], None], case: str) -> None:
    ended(case)


@pytest.mark.parametrize("case", ["graph, zch_module", "none, zch_module"])
def test_one_rank(alone: Callable[[str], None], case: str) -> None:
    alone(case)


def test_default_sharders_have_ours() -> None:
    sharders: list[ModuleSharder[Any]] = get_default_sharders()
    assert any(isinstance(each, OverlapManagedCollisionEmbeddingCollectionSharder) for each in sharders)


_TRAIN = ("train", "--config", "configs/sequence.yaml", "--train.device", "cpu", "--data.tables.ids", "any")
_TRAIN = (*_TRAIN, "--embedding.id_tables.rows", "2048", "--embedding.backend", "pgas")
_TRAIN = (*_TRAIN, "--train.global_batch_size", "128", "--train.eval_every", "0")
_TRAIN = (*_TRAIN, "--data.eval_samples", "1000", "--log.every", "5")


@pytest.mark.slow
def test_histories_of_any_id_resume_on_fewer_ranks(tmp_path: Path) -> None:
    any_ids.check_resumes_on_fewer_ranks(tmp_path, *_TRAIN, "--train.pipeline", "graph")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ((), "set train.pipeline to graph"),
        (
            ("--embedding.backend", "nccl", "--data.tables.ids", "[rows,rows,any]"),
            "embedding.backend: nccl leaves histories",
        ),
    ],
)
def test_steps_that_would_train_initial_rows_are_refused(tmp_path: Path, keys: tuple[str, ...], told: str) -> None:
    result = run_cli(*_TRAIN, "--train.steps", "2", "--log.dir", str(tmp_path), "--nproc", "2", *keys)
    assert result.returncode != 0
    assert told in result.stderr
