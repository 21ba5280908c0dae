"""The baseline in chunks: its lookups are the baseline's, cut."""

from typing import Any

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import ComputeDevice, SplitTableBatchedEmbeddingBagsCodegen

from dlrm_overlap.bench.harness.contenders import split_lookup


@pytest.mark.parametrize("delivered", [SparseType.FP32, SparseType.BF16])
def test_chunks_deliver_what_the_whole_lookup_does(delivered: SparseType) -> None:
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
