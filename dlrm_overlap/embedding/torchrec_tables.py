"""The tables of a module that stay with TorchRec."""

from collections.abc import Sequence

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_overlap.torchrec_private import ShardedEmbeddingBagCollection
from dlrm_overlap.torchrec_private.attributes import look_up


class TorchRecTables:
    """The shardings `numbers` of a module, which TorchRec looks up and updates; an exchange serves the others.

    TorchRec's collectives and host synchronizations cannot be captured. So `look_up` runs before the graph and `update`
    after it; the captured step reads the pooled embeddings and writes their gradients in fixed buffers.
    """

    def __init__(self, module: ShardedEmbeddingBagCollection, numbers: Sequence[int]) -> None:
        self.numbers = numbers
        self._module = module
        self._buffers: list[torch.Tensor] = []
        """by sharding, the pooled embeddings [b, D] that captured steps read, each with its gradient"""
        self._looked_up: list[torch.Tensor] = []
        """pooled embeddings of the current captured step; empty outside of a captured step"""

    def pooled(self, features: KeyedJaggedTensor) -> list[torch.Tensor]:
        """Return the pooled embeddings [b, D] of each sharding: buffers that `look_up` has filled, or looked up now."""
        if not self._looked_up:
            return self._pool(features)
        for buffer in self._buffers:
            assert buffer.grad is not None
            buffer.grad.zero_()
        return self._buffers

    def look_up(self, features: KeyedJaggedTensor) -> None:
        self._looked_up = self._pool(features)
        if not self._buffers:
            for pooled in self._looked_up:
                buffer = torch.empty_like(pooled).detach().requires_grad_()
                buffer.grad = torch.zeros_like(buffer)
                self._buffers.append(buffer)
        with torch.no_grad():
            for buffer, pooled in zip(self._buffers, self._looked_up, strict=True):
                buffer.copy_(pooled)

    def update(self) -> None:
        looked_up, self._looked_up = self._looked_up, []
        trained = [(p, buffer.grad) for p, buffer in zip(looked_up, self._buffers, strict=True) if p.requires_grad]
        torch.autograd.backward([pooled for pooled, _ in trained], [gradient for _, gradient in trained])

    def forget_memory(self) -> None:
        """Drop the buffers of captured steps; none may be launched again, and batch sizes may change."""
        self._buffers = []

    def _pool(self, features: KeyedJaggedTensor) -> list[torch.Tensor]:
        return look_up(self._module, self.numbers, exact(features))


def exact(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """Return ids without padding; the host waits for their number. A ValueError if it exceeds the capacity."""
    lengths, values = features.lengths(), features.values()
    total = int(lengths.sum())
    if total > values.numel():
        raise ValueError(f"ids: a batch of {total} ids exceeds its capacity of {values.numel()}; raise its bag_sizes")
    weights = features.weights_or_none()
    weights = weights if weights is None else weights[:total]
    return KeyedJaggedTensor(features.keys(), values[:total], weights, lengths=lengths, stride=features.stride())
