"""What stays with TorchRec and why, by the description of a lookup alone."""

from collections.abc import Mapping
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    CounterBasedRegularizationDefinition,
    LearningRateMode,
    UserEnabledConfigDefinition,
    WeightDecayMode,
)
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.modules.embedding_configs import DataType, PoolingType
from torchrec.optim.keyed import CombinedOptimizer

from dlrm_overlap.embedding import unsupported
from dlrm_overlap.embedding.exchanging_module import ExchangingModule, _TableOptimizer
from dlrm_overlap.embedding.unsupported import unsupported_by_graphs
from tests.conftest import refuses

DENSE, FUSED, UVM = (
    EmbeddingComputeKernel.DENSE,
    EmbeddingComputeKernel.FUSED,
    EmbeddingComputeKernel.FUSED_UVM,
)
COUNTER_SGD = CounterBasedRegularizationDefinition(learning_rate_mode=LearningRateMode.COUNTER_SGD)
BIAS_CORRECTION = UserEnabledConfigDefinition(use_rowwise_bias_correction=True)
UNPOOLED = {"pooling": PoolingType.NONE}


def _group(params: Mapping[str, Any], **changes: Any) -> Any:
    """Return the description of a lookup of one table t; `changes` are of the table or of the lookup."""
    pooling = changes.get("pooling", PoolingType.SUM)
    table = {"name": "t", "compute_kernel": FUSED, "local_cols": 64, "feature_names": ["f"], "pooling": pooling}
    group = {"has_feature_processor": False, "data_type": DataType.FP32, "pooling": pooling, "fused_params": params}
    for name, value in changes.items():
        (table if name in table else group)[name] = value
    return SimpleNamespace(**group, embedding_tables=[SimpleNamespace(**table)])


@pytest.mark.parametrize(
    ("changes", "params", "reason"),
    [
        ({}, {}, None),
        (UNPOOLED, {}, None),
        ({"local_cols": 1024, "data_type": DataType.FP16}, {"optimizer": EmbOptimType.LAMB}, None),
        ({}, {"weight_decay_mode": WeightDecayMode.L2, "extra_optimizer_config": UserEnabledConfigDefinition()}, None),
        ({"compute_kernel": UVM}, {}, "compute kernel fused_uvm"),
        ({"has_feature_processor": True}, {}, "feature processors"),
        ({"local_cols": 1028}, {}, "shards of more than 1024 columns"),
        ({"data_type": DataType.INT8}, {}, "rows of type INT8"),
        ({**UNPOOLED, "feature_names": ["f", "g", "f"]}, {}, "an unpooled table lists a feature twice"),
        ({}, {"output_dtype": SparseType.INT8}, "output of type int8"),
        ({}, {"output_dtype": SparseType.FP16}, "output of type fp16: leave wire_dtype out"),
        ({}, {"optimizer": EmbOptimType.LARS_SGD}, "optimizer lars_sgd"),
        ({}, {"extra_optimizer_config": BIAS_CORRECTION}, "row-wise bias correction"),
        ({}, {"optimizer_state_dtypes": {"momentum1": SparseType.BF16}}, "optimizer states of given types"),
        ({}, {"weight_decay_mode": WeightDecayMode.COWCLIP}, "weight decay COWCLIP"),
        ({}, {"counter_based_regularization": COUNTER_SGD}, "learning rates by a counter, COUNTER_SGD"),
    ],
)
def test_what_the_kernels_cannot_do_stays_with_torchrec(
    changes: dict[str, Any], params: dict[str, Any], reason: str | None
) -> None:
    assert list(unsupported._of_lookup(_group(params, **changes), torch.bfloat16, cached=())) == [reason] * bool(reason)


@pytest.mark.parametrize(
    ("kind", "changes", "reason"),
    [
        ("table_wise", {}, None),
        ("table_wise", {"compute_kernel": UVM}, None),
        ("table_wise", {"compute_kernel": DENSE}, "table t stays with TorchRec, with compute kernel dense"),
        ("table_wise", UNPOOLED, "unpooled table t stays with TorchRec: int8"),
        ("data_parallel", {"compute_kernel": DENSE}, None),
        ("data_parallel", {}, "data-parallel table t stays with TorchRec: compute kernel fused"),
        ("data_parallel", {"compute_kernel": DENSE, "local_cols": 6}, "table t stays with TorchRec: a dim that is not"),
        ("data_parallel", {"compute_kernel": DENSE, "data_type": DataType.FP16}, "TorchRec: rows of type FP16"),
        ("data_parallel", {"compute_kernel": DENSE, "has_feature_processor": True}, "TorchRec: feature processors"),
    ],
)
def test_tables_that_stay_keep_steps_from_being_captured(
    kind: str, changes: dict[str, Any], reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unsupported, "groups_of", lambda sharding: [_group({}, **changes)])
    found = unsupported_by_graphs({kind: None}, {kind: "int8"})
    assert (found is None) if reason is None else (reason in (found or ""))
    assert unsupported_by_graphs({kind: None}, {kind: None}) is None, "if it is exchanged"


@pytest.mark.parametrize(
    ("marks", "trains", "refused"), [(True, True, True), (True, False, False), (False, True, False)]
)
def test_steps_of_torchrec_are_refused_while_updates_are_marked(marks: bool, trains: bool, refused: bool) -> None:
    """Else a delta would lack their rows. Before others, rows of caches are written back."""
    module: Any = Mock(training=True)
    module.exchange.tables.marks = object() if marks else None
    with torch.set_grad_enabled(trains), refuses("whose updates are not marked") if refused else nullcontext():
        assert ExchangingModule._look_up_by_torchrec(module, lambda: module.note_writes.call_count) == 1


def test_states_of_optimizers_are_read_after_caches_are_written_back() -> None:
    module: Any = Mock()
    optimizer = _TableOptimizer(CombinedOptimizer([]), module)
    assert not module.note_writes.called
    assert optimizer.state == {}
    module.note_writes.assert_called_once_with()
