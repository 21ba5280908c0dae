"""FBGEMM's fused lookups (`SplitTableBatchedEmbeddingBagsCodegen`, TBE): optimizers, states, backward operators."""

from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType

from dlrm_overlap.kernels.optimizer_params import STATES
from dlrm_overlap.torchrec_private import (
    ComputeDevice,
    CounterBasedRegularizationDefinition,
    EmbeddingLocation,
    PoolingMode,
    SplitTableBatchedEmbeddingBagsCodegen,
    WeightDecayMode,
)

OPTIMIZERS = {
    EmbOptimType.EXACT_SGD: "sgd",
    EmbOptimType.EXACT_ADAGRAD: "adagrad",
    EmbOptimType.EXACT_ROWWISE_ADAGRAD: "rowwise_adagrad",
    EmbOptimType.ADAM: "adam",
    EmbOptimType.PARTIAL_ROWWISE_ADAM: "partial_rowwise_adam",
    EmbOptimType.LAMB: "lamb",
    EmbOptimType.PARTIAL_ROWWISE_LAMB: "partial_rowwise_lamb",
}
_WITH_COUNTER = "rowwise_adagrad_with_counter"
STATE_BUFFERS = {name: ("momentum1", "momentum2")[: len(states)] for name, states in STATES.items()}
STATE_BUFFERS[_WITH_COUNTER] = "momentum1", "prev_iter", "row_counter"
"""names of FBGEMM's state buffers by optimizer; optimizers with more than one count their steps"""

LOOKUP_OPTIMIZERS = (*OPTIMIZERS.values(), _WITH_COUNTER)
ON_CPUS = "sgd", "adagrad", "rowwise_adagrad"
_SEGMENT_LENGTH = 32  # ids of one row that a warp sums; FBGEMM's autograd function passes the same on NVIDIA GPUs


def optimizer_of(tbe: Any) -> str:
    """Return a lookup's optimizer, by FBGEMM's operator name."""
    counter = tbe.optimizer == EmbOptimType.EXACT_ROWWISE_ADAGRAD and tbe.weight_decay_mode == WeightDecayMode.COUNTER
    return _WITH_COUNTER if counter else OPTIMIZERS.get(tbe.optimizer, str(tbe.optimizer))


def counts(tbe: Any) -> bool:
    return len(STATE_BUFFERS.get(optimizer_of(tbe), ())) > 1


def backward_operator(optimizer: str, weighted: bool) -> Any:
    """Return the operator that updates rows; an AttributeError if FBGEMM has none, as for Adam on a CPU."""
    name = f"split_embedding_backward_codegen_{optimizer}_{'weighted' if weighted else 'unweighted'}_pt2_wrapper"
    return getattr(torch.ops.fbgemm, name).default


def backward_arguments(
    tbe: Any,
    gradient: torch.Tensor,
    indices: torch.Tensor,
    offsets: torch.Tensor,
    weights: torch.Tensor | None,
    learning_rate: float,
    count: int,
    optimizer_args: Any,
) -> dict[str, Any]:
    """Return the arguments of a lookup's backward operator by name, except those that are attributes of the lookup.

    Args:
        gradient: [B, sum of dims] float32, of the pooled embeddings.
        indices: [n] ids.
        offsets: [T * B + 1] first id of each bag.
        weights: [n] float32, weight of each id, or None.
        count: the lookup's `iter`.
        optimizer_args: FBGEMM's OptimizerArgs.
    """
    bits, mask = torch.ops.fbgemm.get_infos_metadata(tbe.D_offsets, gradient.shape[0], tbe.D_offsets.numel() - 1)
    arguments: dict[str, Any] = {
        "grad_output": gradient,
        "indices": indices.to(tbe.embedding_table_index_type),
        "offsets": offsets.to(tbe.embedding_table_index_type),
        "indice_weights": gradient.new_empty(0) if weights is None else weights,
        "pooling_mode": int(PoolingMode.SUM if tbe.pooling_mode == PoolingMode.NONE else tbe.pooling_mode),
        "lxu_cache_locations": tbe.lxu_cache_locations_empty,
        "use_uniq_cache_locations": tbe.use_uniq_cache_locations_bwd,
        "BT_block_size": _SEGMENT_LENGTH,
        "max_segment_length_per_warp": _SEGMENT_LENGTH,
        "info_B_num_bits": bits,
        "info_B_mask_int64": mask,
        "output_dtype": tbe.output_dtype,
        "learning_rate_tensor": torch.full_like(tbe.learning_rate_tensor, learning_rate),
        "iter": count,
        "max_counter": 1.0,  # read only by learning rates by counter, which stay with TorchRec
        **optimizer_args._asdict(),
    }
    if optimizer_of(tbe) == "adam":  # its row-wise bias correction is off, but the types of its state are checked
        arguments |= {f"row_counter_{memory}": gradient.new_empty(0) for memory in ("host", "dev", "uvm")}
        arguments["row_counter_placements"] = gradient.new_empty(0, dtype=torch.int32)
        arguments["row_counter_offsets"] = gradient.new_empty(0, dtype=torch.int64)
    for memory in ("host", "dev", "uvm"):
        arguments[f"{memory}_weights"] = getattr(tbe, f"weights_{memory}")
    # FBGEMM 1.9 packs these tensors into two lists, on a GPU with the memories that a CPU does not have.
    placed = [tbe.weights_placements, tbe.weights_offsets]
    arguments["weights"] = (
        [tbe.weights_host, *placed]
        if tbe.use_cpu
        else [tbe.weights_dev, *placed, tbe.weights_uvm, tbe.lxu_cache_weights]
    )
    arguments["aux_tensor_bwd"] = [tbe.lxu_cache_locations_empty]
    return arguments


def argument_names(operator: Any) -> list[str]:
    return [argument.name for argument in operator._schema.arguments]


def lookup_without_memory(optimizer: str) -> Any:
    """Return a lookup of one row on the device "meta"; it has all attributes of a lookup on a GPU."""
    kinds = {name: kind for kind, name in OPTIMIZERS.items()} | {_WITH_COUNTER: EmbOptimType.EXACT_ROWWISE_ADAGRAD}
    counter: dict[str, Any] = {}
    if optimizer == _WITH_COUNTER:
        counter["weight_decay_mode"] = WeightDecayMode.COUNTER
        counter["counter_based_regularization"] = CounterBasedRegularizationDefinition()
    return SplitTableBatchedEmbeddingBagsCodegen(
        [(1, 4, EmbeddingLocation.DEVICE, ComputeDevice.CUDA)],
        optimizer=kinds[optimizer],
        device=torch.device("meta"),
        **counter,
    )


def unknown_arguments(tbe: Any, operator: Any) -> list[str]:
    """Return the arguments of a backward operator that are not in `backward_arguments`, nor attributes of `tbe`.

    `tbe` is a `lookup_without_memory`.
    """
    gradient, ids = torch.empty(1, 4, device="meta"), torch.empty(2, dtype=torch.int64, device="meta")
    known = backward_arguments(tbe, gradient, ids, ids, None, 0.0, 0, tbe.optimizer_args)
    return [name for name in argument_names(operator) if name not in known and not hasattr(tbe, name)]
