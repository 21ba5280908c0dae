"""Row-wise tables that have no rows on some ranks train as a plain EmbeddingBagCollection does on one.

Not compared with TorchRec, which trains them wrongly on CPUs, see docs/torchrec.md.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_overlap.embedding.sharder import OverlapEmbeddingBagCollectionSharder
from dlrm_overlap.embedding.weights import initialise_tables
from tests.agreement import POOLED_TOLERANCE, assert_near
from tests.distributed.models import CPU, world
from tests.distributed.workers import run_ranks

_RANKS, _SAMPLES, _STEPS, _RATE = 4, 16, 6, 0.5


class Case(NamedTuple):
    rows: Sequence[int]
    dims: Sequence[int]
    pooling: PoolingType = PoolingType.SUM
    backend: str = "pgas"


_CASES = {
    "the first has few rows": Case([5, 11, 97], [8, 16, 4]),
    "the last has few rows": Case([97, 11, 5], [8, 16, 4], backend="fused"),
    "means": Case([5, 11, 97], [8, 16, 4], PoolingType.MEAN),
    "ranks without rows": Case([1], [8]),
}


def _collection(case: Case, device: str) -> EmbeddingBagCollection:
    configs = [
        EmbeddingBagConfig(
            name=f"t{i}", num_embeddings=rows, embedding_dim=dim, feature_names=[f"f{i}"], pooling=case.pooling
        )
        for i, (rows, dim) in enumerate(zip(case.rows, case.dims, strict=True))
    ]
    return EmbeddingBagCollection(configs, device=torch.device(device))


def _batch(case: Case, step: int, ranks: range) -> tuple[KeyedJaggedTensor, torch.Tensor]:
    """Return the ids of the samples of `ranks` in a step, and the targets of their embeddings."""
    lengths: list[list[torch.Tensor]] = [[] for _ in case.rows]
    values, wanted = [list[torch.Tensor]() for _ in case.rows], []
    for rank in ranks:
        generator = torch.Generator().manual_seed(100 * step + rank)
        for i, rows in enumerate(case.rows):
            lengths[i].append(torch.randint(0, 4, (_SAMPLES,), generator=generator))
            values[i].append(torch.randint(0, rows, (int(lengths[i][-1].sum()),), generator=generator))
        wanted.append(torch.randn(_SAMPLES, sum(case.dims), generator=generator))
    flat = [torch.cat([each for feature in parts for each in feature]) for parts in (values, lengths)]
    return KeyedJaggedTensor([f"f{i}" for i in range(len(case.rows))], flat[0], lengths=flat[1]), torch.cat(wanted)


def _train(_: Path, name: str) -> None:
    case, group = _CASES[name], world()
    sharder: Any = OverlapEmbeddingBagCollectionSharder(
        {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": _RATE}, backend=case.backend
    )
    collection, plain = _collection(case, "meta"), _collection(case, "cpu")
    ways = {f"t{i}": row_wise(compute_kernel="fused") for i in range(len(case.rows))}
    plan = construct_module_sharding_plan(collection, ways, sharder, _RANKS, _RANKS, "cpu")
    sharded = DistributedModelParallel(
        nn.Sequential(collection),
        env=ShardingEnv.from_process_group(group),
        device=CPU,
        plan=ShardingPlan({"0": plan}),
        sharders=[sharder],
        init_data_parallel=False,
    )
    initialise_tables(sharded, seed=0)
    for table, tensor in zip(plain.parameters(), sharded.state_dict().values(), strict=True):
        whole = torch.empty(tensor.size())
        tensor.gather(dst=0, out=whole if group.rank() == 0 else None)
        dist.broadcast(whole, 0)
        table.data.copy_(whole)
    optimizer = torch.optim.SGD(plain.parameters(), lr=_RATE)
    mine = slice(group.rank() * _SAMPLES, (group.rank() + 1) * _SAMPLES)
    for step in range(_STEPS):
        ids, wanted = _batch(case, step, range(group.rank(), group.rank() + 1))
        pooled = sharded(ids).values()
        (pooled - wanted).square().mean().backward()
        ids, wanted = _batch(case, step, range(_RANKS))
        expected = plain(ids).values()
        optimizer.zero_grad()
        (expected - wanted).square().mean().backward()
        optimizer.step()
        assert_near(pooled.detach(), expected.detach()[mine], POOLED_TOLERANCE["fp32"], f"{name}, step {step}")


@pytest.mark.parametrize("name", _CASES)
def test_as_a_plain_collection(name: str, tmp_path: Path) -> None:
    run_ranks(_train, _RANKS, tmp_path, name, timeout_s=60)
