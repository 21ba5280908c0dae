"""The rows' update: FBGEMM's own backward, run without its forward."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    SplitTableBatchedEmbeddingBagsCodegen,
    WeightDecayMode,
)
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_overlap.embedding.protocol.layout import Group
from dlrm_overlap.embedding.tables import OPTIMIZERS, UpdateRule

_WEIGHT_DECAYS = (WeightDecayMode.NONE, WeightDecayMode.L2, WeightDecayMode.DECOUPLE)
_SEGMENT_LENGTH = 32  # ids of one row that a warp sums; what FBGEMM's own autograd function passes on NVIDIA GPUs


def unsupported(fused_params: Mapping[str, Any]) -> str | None:
    """Return why `RowUpdate` cannot take the place of the backward of a lookup made with these, or None if it can."""
    optimizer = fused_params.get("optimizer", EmbOptimType.EXACT_SGD)
    decay = WeightDecayMode(fused_params.get("weight_decay_mode", WeightDecayMode.NONE))
    if optimizer not in OPTIMIZERS:
        return f"optimizer {optimizer}"
    if fused_params.get("gradient_clipping"):
        return "gradient clipping"
    if getattr(fused_params.get("extra_optimizer_config"), "use_writeback_bwd_prehook", False):
        return "a writeback hook"
    if decay not in _WEIGHT_DECAYS:
        return f"weight decay {decay.name}"
    return None


def only_fbgemm(fused_params: Mapping[str, Any], backward: str) -> str | None:
    """Return why the rows of a lookup made with these can be updated by `RowUpdate` alone, or None if not."""
    for name in ("weight_decay", "max_norm"):
        if fused_params.get(name):
            return f"{name} {fused_params[name]}"
    optimizer = fused_params.get("optimizer", EmbOptimType.EXACT_SGD)
    if backward == "atomic" and optimizer != EmbOptimType.EXACT_SGD:
        return f"optimizer {OPTIMIZERS[optimizer]} is no sum"
    return None


class RowUpdate:
    """Applies the gradients of pooled embeddings to the rows of one fused lookup, in place, by its own optimizer."""

    def __init__(self, tbe: SplitTableBatchedEmbeddingBagsCodegen) -> None:
        name = f"split_embedding_backward_codegen_{OPTIMIZERS[tbe.optimizer]}_unweighted_pt2_wrapper"
        self._tbe, self._operator = tbe, getattr(torch.ops.fbgemm, name).default
        self._names = [argument.name for argument in self._operator._schema.arguments]

    def apply(self, gradient: torch.Tensor, values: torch.Tensor, offsets: torch.Tensor, rule: UpdateRule) -> None:
        """Update the rows that `values` names, each once, by the sum of its bags' gradients.

        Args:
            gradient: [B, sum of the features' dims] float32, contiguous.
            values: [n] int, row ids.
            offsets: [features * B + 1] int, of the bags, from 0 to n.
            rule: of the lookup, at the forward.
        """
        if gradient.shape[0] == 0:
            return
        tbe = self._tbe
        bits, mask = torch.ops.fbgemm.get_infos_metadata(tbe.D_offsets, gradient.shape[0], tbe.D_offsets.numel() - 1)  # type: ignore
        known: dict[str, Any] = {
            "grad_output": gradient,
            "indices": values.to(tbe.embedding_table_index_type),
            "offsets": offsets.to(tbe.embedding_table_index_type),
            "indice_weights": gradient.new_empty(0),
            "pooling_mode": int(tbe.pooling_mode),
            "lxu_cache_locations": tbe.lxu_cache_locations_empty,
            "use_uniq_cache_locations": tbe.use_uniq_cache_locations_bwd,
            "BT_block_size": _SEGMENT_LENGTH,
            "max_segment_length_per_warp": _SEGMENT_LENGTH,
            "info_B_num_bits": bits,
            "info_B_mask_int64": mask,
            "output_dtype": tbe.output_dtype,
            "learning_rate_tensor": torch.full_like(tbe.learning_rate_tensor, rule.lr),
            **rule.arguments._asdict(),
        }
        for place in ("host", "dev", "uvm"):
            known[f"{place}_weights"] = getattr(tbe, f"weights_{place}")
        self._operator(*[known[name] if name in known else getattr(tbe, name) for name in self._names])


def bags_of(group: Group, inputs: Sequence[KeyedJaggedTensor]) -> KeyedJaggedTensor:
    """Return the ids of one fused lookup."""
    ids = inputs[group.source]
    first, features, total = group.first_position, len(group.shards), len(ids.keys())
    return ids if features == total else ids.split([first, features, total - first - features])[1]
