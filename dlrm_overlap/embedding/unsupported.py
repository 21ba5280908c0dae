"""Why tables stay with TorchRec; identical on every rank."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.types import (
    CommOp,
    NoOpQuantizedCommCodec,
    QuantizedCommCodecs,
    ShardingEnv,
    ShardingEnv2D,
    ShardingStrategy,
    ShardingType,
)
from torchrec.modules.embedding_configs import DataType, PoolingType, data_type_to_dtype

from dlrm_overlap.embedding.options import WIRE_DTYPES
from dlrm_overlap.embedding.shardings import TAKEN, UNPOOLED, groups_of, output_types
from dlrm_overlap.embedding.tables import max_gradients
from dlrm_overlap.torchrec_private import QuantizedCommCodec, WeightDecayMode
from dlrm_overlap.torchrec_private.attributes import loss_scale_of, precision_of
from dlrm_overlap.torchrec_private.fbgemm import OPTIMIZERS

_MAX_COLUMNS = 1024  # of a shard; a program holds whole rows in registers
UNPOOLED_OPS = (CommOp.SEQUENCE_EMBEDDINGS_ALL_TO_ALL,)
POOLED_OPS = CommOp.POOLED_EMBEDDINGS_ALL_TO_ALL, CommOp.POOLED_EMBEDDINGS_REDUCE_SCATTER
_OUTPUT_TYPES = SparseType.FP32, SparseType.BF16, SparseType.FP16
_WEIGHT_DECAYS = WeightDecayMode.NONE, WeightDecayMode.L2, WeightDecayMode.DECOUPLE, WeightDecayMode.COUNTER
_UPDATED_IN_BACKWARD = (
    EmbeddingComputeKernel.FUSED,
    EmbeddingComputeKernel.FUSED_UVM,
    EmbeddingComputeKernel.FUSED_UVM_CACHING,
)


def unsupported_by_exchange(
    shardings: Mapping[str, Any],
    env: ShardingEnv,
    wire_dtype: torch.dtype,
    cached: Collection[str] = (),
    device: torch.device | None = None,
) -> dict[str, str | None]:
    """Return by sharding type why tables of a module stay with TorchRec; None if they are exchanged."""
    whole, on_cpu = None, device is not None and device.type == "cpu"
    if isinstance(env, ShardingEnv2D) and env.sharding_strategy == ShardingStrategy.FULLY_SHARDED:
        whole = "2D parallelism with fully sharded rows"
    elif on_cpu and any(_decays_unpooled(group) for each in shardings.values() for group in groups_of(each)):
        whole = "rows that decay, which FBGEMM updates feature by feature on a CPU"
    elif any(
        _is_stashed(table)
        for each in shardings.values()
        for group in groups_of(each)
        for table in group.embedding_tables
    ):
        whole = "rows that TorchRec stashes in host memory during a step"
    found = {kind: next(_of_sharding(each, wire_dtype, cached), whole) for kind, each in shardings.items()}
    alone = _why_not_together([shardings[kind] for kind, reason in found.items() if reason is None])
    return {kind: reason or alone for kind, reason in found.items()}


def _is_stashed(table: Any) -> bool:
    return getattr(table, "stash_weights", False)


def _decays_unpooled(group: Any) -> bool:
    params = group.fused_params or {}
    return group.pooling == PoolingType.NONE and bool(params.get("weight_decay") or params.get("max_norm"))


def _of_sharding(sharding: Any, wire_dtype: torch.dtype, cached: Collection[str]) -> Iterator[str]:
    if type(sharding) not in TAKEN:
        yield f"shards of type {type(sharding).__name__} are not exchanged"
        return
    ops = UNPOOLED_OPS if isinstance(sharding, UNPOOLED) else POOLED_OPS
    if asked := precisions(sharding.qcomm_codecs_registry, ops):
        if {WIRE_DTYPES.get(precision) for precision in asked} != {wire_dtype}:
            yield f"quantised communication: {' and '.join(sorted(asked))}"
        elif outputs := output_types(sharding) - {SparseType.FP32}:  # TorchRec's codecs decode to float32
            yield f"quantised communication of output of type {outputs.pop().value}"
    for group in groups_of(sharding):
        yield from _of_lookup(group, wire_dtype, cached)


def precisions(registry: Mapping[str, QuantizedCommCodecs] | None, ops: Sequence[CommOp]) -> set[str]:
    """Return the precisions in which the collectives `ops` send embeddings and gradients; empty without codecs."""
    if registry is None or not any(op.name in registry for op in ops):
        return set()
    codecs = [registry.get(op.name, QuantizedCommCodecs()) for op in ops]
    return {_precision(codec) for each in codecs for codec in (each.forward, each.backward)}


def _precision(codec: Any) -> str:
    if isinstance(codec, NoOpQuantizedCommCodec):
        return "fp32"
    if type(codec) is not QuantizedCommCodec:  # a user's class
        return type(codec).__name__
    return precision_of(codec) + (" with a loss scale" if loss_scale_of(codec) is not None else "")


def _of_lookup(group: Any, wire_dtype: torch.dtype, cached: Collection[str]) -> Iterator[str]:
    kernels = {table.compute_kernel for table in group.embedding_tables if table.name not in cached}
    if kernels - {EmbeddingComputeKernel.FUSED}:
        yield f"compute kernel {' '.join(sorted(kernel.value for kernel in kernels))}"
    if group.has_feature_processor:
        yield "feature processors"
    if max(table.local_cols for table in group.embedding_tables) > _MAX_COLUMNS:
        yield f"shards of more than {_MAX_COLUMNS} columns"
    if data_type_to_dtype(group.data_type) not in WIRE_DTYPES.values():
        yield f"rows of type {group.data_type.value}"
    features = [table.feature_names for table in group.embedding_tables]
    if group.pooling == PoolingType.NONE and any(len(set(names)) < len(names) for names in features):
        yield "an unpooled table lists a feature twice"
    params = group.fused_params or {}
    if (output := params.get("output_dtype", SparseType.FP32)) not in _OUTPUT_TYPES:
        yield f"output of type {output.value}"
    elif output != SparseType.FP32 and wire_dtype not in (torch.float32, output.as_dtype()):
        yield f"output of type {output.value}: leave wire_dtype out"
    if (optimizer := params.get("optimizer", EmbOptimType.EXACT_SGD)) not in OPTIMIZERS:
        yield f"optimizer {optimizer}"
    extra, counter = params.get("extra_optimizer_config"), params.get("counter_based_regularization")
    if getattr(extra, "use_writeback_bwd_prehook", False):
        yield "a writeback hook"
    if getattr(extra, "use_rowwise_bias_correction", False):
        yield "row-wise bias correction"
    if params.get("optimizer_state_dtypes"):
        yield "optimizer states of given types"
    if (decay := WeightDecayMode(params.get("weight_decay_mode", WeightDecayMode.NONE))) not in _WEIGHT_DECAYS:
        yield f"weight decay {decay.name}"
    if counter is not None and counter.learning_rate_mode >= 0:
        yield f"learning rates by a counter, {counter.learning_rate_mode.name}"


def _why_not_together(shardings: Sequence[Any]) -> str | None:
    types = {output.value for sharding in shardings for output in output_types(sharding)}
    if len(types) > 1:
        return f"outputs of types {' and '.join(sorted(types))}"
    params = [group.fused_params or {} for sharding in shardings for group in groups_of(sharding)]
    if len(bounds := max_gradients(params)) > 1:
        return f"gradients clipped to {' and '.join(sorted(map(str, bounds)))}"
    return None


def unsupported_by_graphs(shardings: Mapping[str, Any], unsupported_reasons: Mapping[str, str | None]) -> str | None:
    """Return why captured steps cannot work with the tables that are not exchanged, or None if they can."""
    for kind, sharding in shardings.items():
        if (why := unsupported_reasons[kind]) is None:
            continue
        for group in groups_of(sharding):
            for table in group.embedding_tables:
                if _is_stashed(table):
                    return f"table {table.name} stays with TorchRec, which stashes its rows during a step"
                if kind == ShardingType.DATA_PARALLEL.value:
                    if (reason := next(_of_replicated(group, table), None)) is not None:
                        return f"data-parallel table {table.name} stays with TorchRec: {reason}"
                elif table.pooling == PoolingType.NONE:
                    return f"unpooled table {table.name} stays with TorchRec: {why}"
                elif table.compute_kernel not in _UPDATED_IN_BACKWARD:
                    return f"table {table.name} stays with TorchRec, with compute kernel {table.compute_kernel.value}"
    return None


def _of_replicated(group: Any, table: Any) -> Iterator[str]:
    if table.compute_kernel != EmbeddingComputeKernel.DENSE:
        yield f"compute kernel {table.compute_kernel.value}"
    if group.has_feature_processor:
        yield "feature processors"
    if group.data_type != DataType.FP32:
        yield f"rows of type {group.data_type.value}"
    if (group.fused_params or {}).get("output_dtype", SparseType.FP32) != SparseType.FP32:
        yield "output of another type than fp32"
    if table.local_cols % 4 or table.local_cols > _MAX_COLUMNS:
        yield f"a dim that is not a multiple of 4, or more than {_MAX_COLUMNS}"
