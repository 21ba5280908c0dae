"""The tables of a module that stay with TorchRec, where an exchange takes the ids of the others."""

from collections.abc import Sequence
from typing import Any

import torch
from torchrec.distributed.embedding_sharding import EmbeddingShardingContext, KJTListSplitsAwaitable
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionContext, ShardedEmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor


class TorchRecTables:
    """Shardings that TorchRec serves: it sends their ids, looks them up and sends pooled embeddings, and back.

    Its collectives and numbers on the host have no place in a CUDA graph. So a captured step reads their pooled
    embeddings in memory that stays, and leaves their gradients there: `look_up` comes before the graph, `update` after.

    Example: of tables a and b the exchange takes a. A captured step is `look_up(ids)`, then the graph, in which the
    module's `forward` takes a from the exchange and b from `pooled`, then `update()`, which updates rows of b.
    """

    def __init__(self, module: ShardedEmbeddingBagCollection, numbers: Sequence[int]) -> None:
        """Take some of a module's shardings, by number."""
        self.numbers = numbers
        self._module = module
        self._memory: list[torch.Tensor] = []
        """of each sharding, what captured steps read: [b, D], with its gradient"""
        self._looked_up: list[torch.Tensor] = []
        """of each sharding, the pooled embeddings of the captured step under way; empty outside of one"""

    def pooled(self, features: KeyedJaggedTensor) -> list[torch.Tensor]:
        """Return the pooled embeddings [b, D] of each sharding: those looked up before, or else now."""
        if not self._looked_up:
            return self._pool(features)
        for memory in self._memory:
            assert memory.grad is not None
            memory.grad.zero_()
        return self._memory

    def look_up(self, features: KeyedJaggedTensor) -> None:
        """Look up the ids of a captured step, which comes next; waits for the host as TorchRec does."""
        self._looked_up = self._pool(features)
        if not self._memory:
            for pooled in self._looked_up:
                memory = torch.empty_like(pooled).detach().requires_grad_()
                memory.grad = torch.zeros_like(memory)
                self._memory.append(memory)
        with torch.no_grad():
            for memory, pooled in zip(self._memory, self._looked_up, strict=True):
                memory.copy_(pooled)

    def update(self) -> None:
        """Update the rows by the gradients that the captured step has left."""
        looked_up, self._looked_up = self._looked_up, []
        trained = [(p, memory.grad) for p, memory in zip(looked_up, self._memory, strict=True) if p.requires_grad]
        torch.autograd.backward([pooled for pooled, _ in trained], [gradient for _, gradient in trained])

    def forget_memory(self) -> None:
        """Forget what captured steps read, none of which will be launched any more: batches may have other sizes."""
        self._memory = []

    def _pool(self, features: KeyedJaggedTensor) -> list[torch.Tensor]:
        """Do what the module's own `input_dist` and `compute_and_output_dist` do, for these shardings alone."""
        module: Any = self._module
        features = exact(features)
        if module._has_uninitialized_input_dist:
            module._create_input_dist(features.keys())
            module._has_uninitialized_input_dist = False
        context, awaitables = EmbeddingBagCollectionContext(), []
        with torch.no_grad():
            if module._has_features_permute:
                features = features.permute(module._features_order, module._features_order_tensor)
            by_sharding = features.split(module._feature_splits)
            for number in self.numbers:
                ids = by_sharding[number]
                awaitables.append(module._input_dists[number](ids))
                context.sharding_contexts.append(
                    EmbeddingShardingContext(batch_size_per_feature_pre_a2a=ids.stride_per_key())
                )
            arrived = KJTListSplitsAwaitable(awaitables, context).wait().wait()
        pooled = [
            module._output_dists[number](module._lookups[number](arrived[i]), context.sharding_contexts[i])
            for i, number in enumerate(self.numbers)
        ]
        return [each.wait() for each in pooled]


def exact(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """Return ids without the room that a captured step's have behind theirs; reads their number from the device.

    Raises:
        ValueError: if the lengths say more ids than there are, as those of a batch beyond its bound do.
    """
    lengths, values = features.lengths(), features.values()
    total = int(lengths.sum())
    if total > values.numel():
        raise ValueError(f"ids: a batch of {total} ids, beyond the {values.numel()} of its bounds; raise its bag_sizes")
    weights = features.weights_or_none()
    weights = weights if weights is None else weights[:total]
    return KeyedJaggedTensor(features.keys(), values[:total], weights, lengths=lengths, stride=features.stride())
