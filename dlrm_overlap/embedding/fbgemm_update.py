"""The update of rows by FBGEMM's own operator."""

from collections.abc import Sequence

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_overlap.embedding.layout import FusedLookup
from dlrm_overlap.embedding.steps import UpdateRule
from dlrm_overlap.torchrec_private import SplitTableBatchedEmbeddingBagsCodegen
from dlrm_overlap.torchrec_private.fbgemm import argument_names, backward_arguments, backward_operator, optimizer_of


class FbgemmUpdate:
    """FBGEMM's backward of one fused lookup without its forward; updates its rows in place by its optimizer."""

    def __init__(self, tbe: SplitTableBatchedEmbeddingBagsCodegen) -> None:
        self._tbe = tbe
        self._operators = [backward_operator(optimizer_of(tbe), weighted) for weighted in (False, True)]

    def apply(self, gradient: torch.Tensor, ids: KeyedJaggedTensor, rule: UpdateRule) -> None:
        """Update each row that `ids` name once, by the sum of its bags' rows of `gradient` [B, sum of dims] float32."""
        if gradient.shape[0] == 0:
            return
        tbe, weights = self._tbe, ids.weights_or_none()
        operator = self._operators[weights is not None]
        given = ids.values(), ids.offsets(), weights
        known = backward_arguments(tbe, gradient, *given, rule.lr, rule.count, rule.arguments)
        operator(*[known[name] if name in known else getattr(tbe, name) for name in argument_names(operator)])


def bags_of(lookup: FusedLookup, inputs: Sequence[KeyedJaggedTensor]) -> KeyedJaggedTensor:
    ids = inputs[lookup.input]
    first, features, total = lookup.first_feature, len(lookup.shards), len(ids.keys())
    return ids if features == total else ids.split([first, features, total - first - features])[1]
