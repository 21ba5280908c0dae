"""Whether what an optimizer keeps is finite: what it has seen lives on there, where no loss shows it."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torchrec.optim.keyed import CombinedOptimizer


def state_is_finite(optimizer: CombinedOptimizer, device: torch.device) -> bool:
    """Return whether the state of `optimizer` is finite on all ranks; a collective.

    Infinity in Adagrad's sum of squares, from one gradient too large to be squared, gives finite weights and a finite
    loss: such a row is never updated again. The state is added up in float64, which needs no memory.
    """
    total = torch.zeros((), dtype=torch.float64, device=device)
    for tensor in _tensors(optimizer.state_dict()["state"]):
        if tensor.is_floating_point():
            total += tensor.sum(dtype=torch.float64)
    dist.all_reduce(total)
    return bool(total.isfinite())


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    if isinstance(tree, ShardedTensor):
        yield from (shard.tensor for shard in tree.local_shards())
    elif isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from _tensors(value)
