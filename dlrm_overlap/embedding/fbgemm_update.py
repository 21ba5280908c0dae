"""The update of rows by FBGEMM's own operator."""

from collections.abc import Sequence
from typing import Any

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_common import PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_overlap.embedding.layout import FusedLookup
from dlrm_overlap.embedding.steps import UpdateRule
from dlrm_overlap.embedding.tables import optimizer_of

_SEGMENT_LENGTH = 32  # ids of one row that a warp sums; FBGEMM's autograd function passes the same on NVIDIA GPUs


class FbgemmUpdate:
    """FBGEMM's backward of one fused lookup without its forward; updates its rows in place by its optimizer."""

    def __init__(self, tbe: SplitTableBatchedEmbeddingBagsCodegen) -> None:
        name = f"split_embedding_backward_codegen_{optimizer_of(tbe)}_{{}}_pt2_wrapper"
        self._tbe = tbe
        self._operators = [getattr(torch.ops.fbgemm, name.format(kind)).default for kind in ("unweighted", "weighted")]

    def apply(self, gradient: torch.Tensor, ids: KeyedJaggedTensor, rule: UpdateRule) -> None:
        """Update each row that `ids` name once, by the sum of its bags' rows of `gradient` [B, sum of dims] float32."""
        if gradient.shape[0] == 0:
            return
        tbe, weights = self._tbe, ids.weights_or_none()
        operator = self._operators[weights is not None]
        # Arguments that are not attributes of the lookup, or differ from them.
        bits, mask = torch.ops.fbgemm.get_infos_metadata(tbe.D_offsets, gradient.shape[0], tbe.D_offsets.numel() - 1)  # type: ignore
        known: dict[str, Any] = {
            "grad_output": gradient,
            "indices": ids.values().to(tbe.embedding_table_index_type),
            "offsets": ids.offsets().to(tbe.embedding_table_index_type),
            "indice_weights": gradient.new_empty(0) if weights is None else weights,
            "pooling_mode": int(PoolingMode.SUM if tbe.pooling_mode == PoolingMode.NONE else tbe.pooling_mode),
            "lxu_cache_locations": tbe.lxu_cache_locations_empty,
            "use_uniq_cache_locations": tbe.use_uniq_cache_locations_bwd,
            "BT_block_size": _SEGMENT_LENGTH,
            "max_segment_length_per_warp": _SEGMENT_LENGTH,
            "info_B_num_bits": bits,
            "info_B_mask_int64": mask,
            "output_dtype": tbe.output_dtype,
            "learning_rate_tensor": torch.full_like(tbe.learning_rate_tensor, rule.lr),
            "iter": rule.count,
            "max_counter": 1.0,  # read only by learning rates by counter, which stay with TorchRec
            **rule.arguments._asdict(),
        }
        if optimizer_of(tbe) == "adam":  # its row-wise bias correction is off, but the types of its state are checked
            known |= {f"row_counter_{memory}": gradient.new_empty(0) for memory in ("host", "dev", "uvm")}
            known["row_counter_placements"] = gradient.new_empty(0, dtype=torch.int32)
            known["row_counter_offsets"] = gradient.new_empty(0, dtype=torch.int64)
        for memory in ("host", "dev", "uvm"):
            known[f"{memory}_weights"] = getattr(tbe, f"weights_{memory}")
        # FBGEMM 1.9 packs these tensors into two lists, on a GPU with the memories that a CPU does not have.
        placed = [tbe.weights_placements, tbe.weights_offsets]
        known["weights"] = (
            [tbe.weights_host, *placed]
            if tbe.use_cpu
            else [tbe.weights_dev, *placed, tbe.weights_uvm, tbe.lxu_cache_weights]
        )
        known["aux_tensor_bwd"] = [tbe.lxu_cache_locations_empty]
        # The operator's schema names all arguments; the rest are the lookup's attributes.
        names = [argument.name for argument in operator._schema.arguments]
        operator(*[known[name] if name in known else getattr(tbe, name) for name in names])


def bags_of(lookup: FusedLookup, inputs: Sequence[KeyedJaggedTensor]) -> KeyedJaggedTensor:
    ids = inputs[lookup.input]
    first, features, total = lookup.first_feature, len(lookup.shards), len(ids.keys())
    return ids if features == total else ids.split([first, features, total - first - features])[1]
