"""`FusedTables` against FBGEMM's own lookup: our update by Triton's interpreter, without streams, or FBGEMM's on CPUs."""

import copy
import logging
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode, EmbeddingLocation, PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    CounterBasedRegularizationDefinition,
    LearningRateMode,
    SplitTableBatchedEmbeddingBagsCodegen,
    WeightDecayMode,
)

from dlrm_overlap import FusedTables
from dlrm_overlap.torchrec_private.check import check_private_api
from tests.agreement import assert_near, assert_same
from tests.conftest import refuses
from tests.distributed.interpreted import without_streams
from tests.kernels.emulation import interpreted

SAMPLES = 6
TABLES, FEATURES = [(9, 8), (5, 12), (7, 8)], [0, 0, 1, 2]  # two features of the first table
SAME_DIM = [(9, 8), (5, 8), (7, 8)]
OPTIMIZERS = [EmbOptimType.EXACT_SGD, EmbOptimType.EXACT_ADAGRAD, EmbOptimType.EXACT_ROWWISE_ADAGRAD]


def _make(kind: Any, tables: list[tuple[int, int]] = TABLES, **options: Any) -> Any:
    specs = [(*table, EmbeddingLocation.HOST, ComputeDevice.CPU) for table in tables]
    known: dict[str, Any] = {"feature_table_map": FEATURES, "learning_rate": 0.5, "eps": 0.25, "device": "cpu"}
    tbe = kind(specs, **(known | options))
    torch.manual_seed(0)
    for rows in tbe.split_embedding_weights():
        rows.normal_()
    return tbe


def _interpreted(tables: Any) -> Any:
    """Let a lookup on a CPU update its rows by our kernels, interpreted, as on a GPU; use it in `without_streams`."""
    tables.weights_dev = tables.weights_host
    if hasattr(tables, "momentum1_host"):
        tables.momentum1_dev = tables.momentum1_host
    tables._updates = True
    return tables


def _batch(step: int, weighted: bool = False, tables: list[tuple[int, int]] = TABLES) -> tuple[torch.Tensor, ...]:
    """Return ids of bags of 0 to 3 ids; one feature has none, and one bag 20 ids, many of one row."""
    generator = torch.Generator().manual_seed(step)
    lengths = torch.randint(0, 4, (len(FEATURES), SAMPLES), generator=generator)
    lengths[2], lengths[3, 1] = 0, 20
    counts = lengths.sum(1).tolist()
    ids = [
        torch.randint(0, tables[table][0], (count,), generator=generator)
        for table, count in zip(FEATURES, counts, strict=True)
    ]
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.flatten().cumsum(0)])
    values = torch.cat(ids)
    if not weighted:
        return values, offsets
    return values, offsets, torch.randint(-4, 5, values.shape, generator=generator) / 4


def _train(tbe: Any, batch: tuple[torch.Tensor, ...], step: int = 0) -> torch.Tensor:
    output = tbe(*[each.clone() for each in batch])
    generator = torch.Generator().manual_seed(100 + step)
    output.backward((torch.randint(-16, 17, output.shape, generator=generator) / 8).to(output.dtype))
    return output.detach()


def _assert_equal(ours: Any, theirs: Any, tolerance: float = 1e-5) -> None:
    every = [[*tbe.split_embedding_weights(), *sum(tbe.split_optimizer_states(), [])] for tbe in (ours, theirs)]
    for number, (actual, expected) in enumerate(zip(*every, strict=True)):
        assert_near(actual, expected, tolerance, f"rows or states {number}")


@pytest.fixture
def no_streams() -> Iterator[None]:
    check_private_api()  # looks at FBGEMM's own operators, once
    with without_streams():
        yield


@interpreted
@pytest.mark.usefixtures("no_streams")
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(
    ("pooling", "weighted"),
    [(PoolingMode.SUM, False), (PoolingMode.SUM, True), (PoolingMode.MEAN, True), (PoolingMode.NONE, False)],
)
def test_rows_and_states_are_those_of_fbgemm_after_several_steps(
    optimizer: EmbOptimType, pooling: PoolingMode, weighted: bool
) -> None:
    """Bags are empty or name a row twice; the learning rate changes after a forward, which keeps the old one."""
    tables = SAME_DIM if pooling == PoolingMode.NONE else TABLES
    options: dict[str, Any] = {"tables": tables, "optimizer": optimizer, "pooling_mode": pooling}
    theirs = _make(SplitTableBatchedEmbeddingBagsCodegen, **options)
    ours = _interpreted(_make(FusedTables, **options))
    start = theirs.split_embedding_weights()[0].clone()
    for step in range(3):
        batch = _batch(step, weighted, tables)
        assert_near(_train(ours, batch, step), _train(theirs, batch, step), 1e-5, f"output of step {step}")
        for tbe in (ours, theirs):
            tbe.set_learning_rate(0.25 * (step + 1))
    assert ours.row_update._known is not None, "our kernels have updated the rows"
    assert not torch.equal(theirs.split_embedding_weights()[0], start)
    _assert_equal(ours, theirs)
