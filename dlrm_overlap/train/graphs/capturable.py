"""Whether a model's training step can be captured, and of which parameters and optimizers it is made."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ShardedModule
from torchrec.optim.fused import FusedOptimizer
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

from dlrm_overlap.config import InputError
from dlrm_overlap.dense.flat import FlatParameters, why_not_flat
from dlrm_overlap.dense.optimizer import FlatOptimizer
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


def check_all_held(flat: FlatParameters, trained: Mapping[str, nn.Parameter]) -> None:
    """Check that every parameter that is trained is in the flat tensor; no other gradients are summed over the ranks.

    Raises:
        InputError: if one is not.
    """
    held = {id(parameter) for parameter in flat.named.values()}
    if missing := [name for name, parameter in trained.items() if id(parameter) not in held]:
        raise InputError(
            f"GraphTrainPipeline: flat has no {', '.join(missing)}, whose gradients it would not sum over the ranks; "
            f"give it all dense parameters that take a gradient, or leave it out"
        )


def check_updates_reach(flat: FlatParameters | None, optimizer: Any) -> None:
    """Check that a flat optimizer is of `flat`, all of which it updates, and the only one that updates it.

    Where parameters move once more, the steps of a flat optimizer of others change nothing.

    Raises:
        InputError: if one is of other flat parameters, or was not given all of them, or another optimizer has some.
    """
    leaves = list(_leaves(optimizer))
    times = Counter(id(parameter) for _, given in leaves for parameter in given)
    for each, given in leaves:
        if not isinstance(each, FlatOptimizer):
            continue
        if each.flat is not flat:
            how = "flat is left out" if flat is None else "flat is another one"
            raise InputError(
                f"GraphTrainPipeline: {how}, and steps of the FlatOptimizer would not reach the model's parameters; "
                f"give as flat the FlatParameters that the optimizer was made of"
            )
        own = {id(parameter) for parameter in given}
        if wrong := [name for name, p in each.flat.named.items() if id(p) not in own or times[id(p)] > 1]:
            raise InputError(
                f"GraphTrainPipeline: a FlatOptimizer updates all of flat, but {', '.join(wrong)} are another "
                f"optimizer's too, or were not given to it; give it all dense parameters, or take optimizers of "
                f"torch.optim and leave flat out"
            )


def leave_ddp(model: DistributedModelParallel) -> None:
    """Take the model out of DDP, which would keep the nodes of autograd where it was made, a stream of no capture.

    `model.init_data_parallel` wraps it again.
    """
    if isinstance(model._dmp_wrapped_module, DistributedDataParallel):
        model._dmp_wrapped_module, model._ddp_wrapped = model.module, False


def split_optimizer(optimizer: Any) -> tuple[list[Any], list[Any]]:
    """Return the optimizers that `optimizer` is made of: those of dense parameters, those fused into the lookups.

    A wrapper that is no mere holder of one, such as a warm-up of all, counts as one of dense parameters, since it is
    its step that updates them; those fused that are within it are found all the same.
    """
    if isinstance(optimizer, CombinedOptimizer):
        parts = [split_optimizer(each) for _, each in optimizer.optimizers]
        return [o for dense, _ in parts for o in dense], [o for _, fused in parts for o in fused]
    if isinstance(optimizer, FusedOptimizer):
        return [], [optimizer]
    within = split_optimizer(optimizer._optimizer)[1] if hasattr(optimizer, "_optimizer") else []
    return [optimizer], within


def innermost(optimizer: Any) -> Any:
    """Return the optimizer that TorchRec's wrappers hold."""
    while hasattr(optimizer, "_optimizer"):
        optimizer = optimizer._optimizer
    return optimizer


def parameters_of(optimizer: Any) -> list[torch.Tensor]:
    """Return the parameters of an optimizer, within whatever wrappers."""
    return [parameter for _, given in _leaves(optimizer) for parameter in given]


def _leaves(optimizer: Any) -> Iterator[tuple[Any, list[torch.Tensor]]]:
    """Yield the optimizers that combined ones and TorchRec's wrappers hold, each with the parameters it was given."""
    if isinstance(optimizer, CombinedOptimizer):
        for _, each in optimizer.optimizers:
            yield from _leaves(each)
    elif isinstance(optimizer, KeyedOptimizerWrapper):
        yield optimizer._optimizer, list(optimizer.params.values())
    elif hasattr(optimizer, "_optimizer"):
        yield from _leaves(optimizer._optimizer)
    else:
        yield optimizer, [parameter for group in optimizer.param_groups for parameter in group["params"]]
