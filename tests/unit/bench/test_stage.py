"""The contenders of the stage's forward: their order, and what they look up and send."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import ComputeDevice, SplitTableBatchedEmbeddingBagsCodegen

from dlrm_overlap.bench.figures.stage import make_contenders
from dlrm_overlap.bench.harness.contenders import split_lookup
from dlrm_overlap.bench.harness.workload import Workload, make_workload, read_ids
from dlrm_overlap.config import Config

STAGED = {"put": "staged", "slice_bags": 4, "schedule": "linear"}


@pytest.mark.parametrize(
    ("kind", "keys", "names"),
    [
        ("stage", {}, ["baseline", "torchrec", "nccl", "pgas", "fused", "pgas_copied"]),
        ("sweep", {}, ["baseline", "pgas", "fused"]),
        ("stage", STAGED, ["baseline", "torchrec", "nccl", "pgas", "fused_stores", "pgas_copied"]),
    ],
)
def test_each_figure_has_its_contenders_in_order(
    kind: str, keys: dict[str, Any], names: list[str], config: Config, workload: Workload
) -> None:
    made = make_contenders(kind, replace(config, embedding=replace(config.embedding, **keys)), workload)
    found = {contender.name: contender.columns for contender in made}
    for contender in made:
        contender.close()
    assert list(found) == names
    assert "put" not in found["pgas"]
    asked = {"put": "direct", "slice_bags": 32, "schedule": "balanced", "programs_per_sm": None} | keys
    assert found["fused_stores" if keys else "fused"] == asked


@pytest.mark.parametrize("delivered", [SparseType.FP32, SparseType.BF16])
def test_the_chunks_of_a_lookup_share_its_weights_and_its_output_type(delivered: SparseType) -> None:
    """In bf16, too: FBGEMM has no such lookup on CPUs, but is made as on a GPU."""
    lookup: Any = SplitTableBatchedEmbeddingBagsCodegen(
        [(5, 4 * (1 + table), EmbeddingLocation.HOST, ComputeDevice.CPU) for table in range(3)],
        optimizer=EmbOptimType.EXACT_SGD,
        output_dtype=delivered,
        device=torch.device("cpu"),
    )
    parts: Any = split_lookup(lookup, (0, 2, 3))
    assert [SparseType.from_int(part.output_dtype) for part in parts] == [delivered] * 2
    assert [part.weights_host.data_ptr() - lookup.weights_host.data_ptr() for part in parts] == [0, 5 * (4 + 8) * 4]


def test_torchrec_sends_the_type_that_the_exchanges_send(config: Config, world_of_one: dist.ProcessGroup) -> None:
    """FBGEMM delivers float32 on CPUs, so TorchRec casts before and after it sends bfloat16."""
    sparse, device = read_ids(config, world_of_one), torch.device("cpu")
    for precision, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        of_dense = replace(config, train=replace(config.train, precision=precision))
        workload = make_workload(of_dense, sparse, world_of_one, device, 1)
        assert workload.wire_dtype == dtype
        assert bool(workload.module.qcomm_codecs_registry) == (dtype == torch.bfloat16)
