"""What a training step is made of, and whether it can be captured."""

from typing import Any

from torch import nn
from torchrec.distributed.types import ShardedModule
from torchrec.optim.fused import FusedOptimizer
from torchrec.optim.keyed import CombinedOptimizer
from torchrec.optim.optimizers import in_backward_optimizer_filter

from dlrm_overlap.embedding.exchange import Exchange
from dlrm_overlap.embedding.sharded_module import OverlapShardedEmbeddingBagCollection


def why_not_captured(model: nn.Module) -> str | None:
    """Return why the steps of a sharded model cannot be captured, alike on all ranks, or None if they can."""
    sharded = [module for module in model.modules() if isinstance(module, ShardedModule)]
    if not any(isinstance(module, OverlapShardedEmbeddingBagCollection) for module in sharded):
        return "no module was sharded by OverlapEmbeddingBagCollectionSharder"
    for module in sharded:
        if not isinstance(module, OverlapShardedEmbeddingBagCollection):
            return f"{type(module).__name__} is TorchRec's own, which waits for the host"
        if (reason := module.why_ids_are_not_taken()) is not None:
            return reason
    return None


def dense_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of a sharded model, by name, that no fused lookup updates in its backward.

    Data-parallel tables are among them, as slices of what holds them, see `FlatParameters`.
    """
    return dict(in_backward_optimizer_filter(model.named_parameters()))


def exchange_of(module: OverlapShardedEmbeddingBagCollection) -> Exchange:
    """Return the exchange of a module that has one."""
    assert module.exchange is not None
    return module.exchange


def split_optimizer(optimizer: Any) -> tuple[list[Any], list[Any]]:
    """Return the optimizers that `optimizer` is made of: those of dense parameters, those fused into the lookups."""
    if isinstance(optimizer, CombinedOptimizer):
        parts = [split_optimizer(each) for _, each in optimizer.optimizers]
        return [o for dense, _ in parts for o in dense], [o for _, fused in parts for o in fused]
    return ([], [optimizer]) if isinstance(optimizer, FusedOptimizer) else ([optimizer], [])


def innermost(optimizer: Any) -> Any:
    """Return the optimizer that TorchRec's wrappers hold."""
    while hasattr(optimizer, "_optimizer"):
        optimizer = optimizer._optimizer
    return optimizer
