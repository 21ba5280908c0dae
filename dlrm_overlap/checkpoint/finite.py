"""Whether weights and optimizers' states are finite. A run whose state is not finite ends."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.keyed import CombinedOptimizer

from dlrm_overlap.config import Config, InputError


class NotFiniteError(InputError):
    """A loss or a weight is NaN or infinite. All ranks raise it at one step."""


def require_finite(finite: bool, otherwise: str, step: int, config: Config) -> None:
    """Raise `NotFiniteError` unless the state after `step` is `finite`, which is the same on all ranks."""
    if not finite:
        train, embedding = config.train, config.embedding
        raise NotFiniteError(
            f"step {step}: {otherwise} and must be finite, so the run ends here and does not save this state; "
            f"lower train.lr {train.lr:g} or embedding.lr {embedding.lr:g}, or raise train.warmup_steps "
            f"{train.warmup_steps}"
        )


def weights_are_finite(model: DistributedModelParallel, device: torch.device) -> bool:
    """Return whether all weights of all ranks are finite; a collective. It adds them up, which needs no memory."""
    return _sum_is_finite(model.state_dict(), device, torch.float32)


def state_is_finite(optimizer: CombinedOptimizer, device: torch.device) -> bool:
    """Return whether the state of `optimizer` is finite on all ranks; a collective.

    Infinity in Adagrad's sum of squares, from one gradient too large to be squared, gives finite weights and a finite
    loss: such a row is never updated again. The state is added up in float64, which needs no memory.
    """
    return _sum_is_finite(optimizer.state_dict()["state"], device, torch.float64)


def _sum_is_finite(tree: Any, device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether the sum in `dtype` of all floating-point tensors in `tree`, of all ranks, is finite."""
    total = torch.zeros((), dtype=dtype, device=device)
    for tensor in _tensors(tree):
        if tensor.is_floating_point():
            total += tensor.sum(dtype=dtype)
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
