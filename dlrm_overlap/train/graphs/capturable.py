"""Whether a model's training step can be captured, and of which dense parameters it is made."""

from collections.abc import Iterable, Mapping

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ShardedModule
from torchrec.optim.optimizers import in_backward_optimizer_filter

from dlrm_overlap.dense.flat import why_not_flat
from dlrm_overlap.dense.tensor_parallel import shards_of
from dlrm_overlap.embedding.exchanging_module import ExchangingModule
from dlrm_overlap.embedding.sharded_module import exchanges


def why_not_captured(model: nn.Module) -> str | None:
    """Return why the steps of a sharded model cannot be captured, alike on all ranks, or None if they can."""
    sharded = {name: module for name, module in model.named_modules() if isinstance(module, ShardedModule)}
    if not any(isinstance(module, ExchangingModule) for module in sharded.values()):
        return "no module was sharded by OverlapEmbeddingBagCollectionSharder or OverlapEmbeddingCollectionSharder"
    reasons = (
        module.why_ids_are_not_taken()
        if isinstance(module, ExchangingModule)
        else why_left_alone(name, module, getattr(module, "module_sharding_plan", {}))
        for name, module in sharded.items()
    )
    return first_reason(reasons, bool(exchanges(model)), dense_parameters(model))


def why_left_alone(path: str, module: nn.Module, tables: Iterable[str]) -> str:
    """Return why a module that another sharder shards keeps the steps from being captured."""
    kind, which = type(module).__name__.removeprefix("Sharded"), ", ".join(tables)
    return f"{kind} {in_model(path)}, with tables {which}, stays with TorchRec, which waits for the host"


def in_model(path: str) -> str:
    """Return the path of a module without those of its wrappers: DistributedModelParallel, and DDP."""
    return path.replace("_dmp_wrapped_module.", "").removeprefix("module.")


def first_reason(modules: Iterable[str | None], exchanges_some: bool, dense: Mapping[str, nn.Parameter]) -> str | None:
    """Return why the steps of a model cannot be captured, or None if they can.

    Args:
        modules: of each module with tables why its tables keep the steps from it, or None.
        exchanges_some: whether some table is exchanged.
        dense: the dense parameters that take a gradient.
    """
    if (reason := next((each for each in modules if each is not None), None)) is not None:
        return reason
    if not exchanges_some:
        return "it exchanges nothing"
    if not dense:
        return "no dense parameter takes a gradient"
    reason = why_not_flat(dense)
    return reason and f"dense parameter {reason}"


def dense_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of a sharded model, by name, that take a gradient and that no fused lookup updates.

    Data-parallel tables are among them, as slices of their holders, see `FlatParameters`.
    """
    return {name: each for name, each in in_backward_optimizer_filter(model.named_parameters()) if each.requires_grad}


def frozen_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the dense parameters of a sharded model that take no gradient, and are alike on all ranks."""
    divided = shards_of(model)  # of which each rank has another part
    every = in_backward_optimizer_filter(model.named_parameters())
    return [parameter for name, parameter in every if not parameter.requires_grad and name not in divided]


def leave_ddp(model: DistributedModelParallel) -> None:
    """Take the model out of DDP, which would keep the nodes of autograd where it was made, a stream of no capture.

    `model.init_data_parallel` wraps it again.
    """
    if isinstance(model._dmp_wrapped_module, DistributedDataParallel):
        model._dmp_wrapped_module, model._ddp_wrapped = model.module, False
