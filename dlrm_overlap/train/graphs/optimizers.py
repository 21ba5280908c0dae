"""The optimizers within TorchRec's wrappers: those of tables, and what of the dense ones a graph can hold."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torchrec.optim.clipping import GradientClippingOptimizer
from torchrec.optim.fused import FusedOptimizer
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper, OptimizerWrapper
from torchrec.optim.warmup import WarmupOptimizer

from dlrm_overlap.dense.flat_steps import why_no_flat_steps

WRAPPERS = (CombinedOptimizer, KeyedOptimizerWrapper, OptimizerWrapper, GradientClippingOptimizer, WarmupOptimizer)


def why_after_the_graph(optimizer: Any, trained: Mapping[str, nn.Parameter]) -> str | None:
    """Return why the step of an optimizer cannot be part of a captured one, or None if it can.

    Args:
        trained: the model's dense parameters that take a gradient.
    """
    held = {id(parameter) for parameter in trained.values()}
    group_of: dict[int, int] = {}  # parameter, or lookup of data-parallel tables -> its group
    for each in all_of(optimizer):
        name = type(each).__name__
        if getattr(each, "_optimizer_step_pre_hooks", None) or getattr(each, "_optimizer_step_post_hooks", None):
            return f"{name} has hooks of its steps"
        if isinstance(each, GradientClippingOptimizer) and each._sharded_params:
            return f"{name} adds norms up over ranks"
        if isinstance(each, GradientClippingOptimizer) and getattr(each, "_track_grad_norm", False):
            return f"{name} keeps the norm of each step"
        if type(each) in WRAPPERS or isinstance(each, FusedOptimizer):
            continue
        if (reason := why_no_flat_steps(each)) is not None:
            return reason
        for group in each.param_groups:
            for parameter in group["params"]:
                if parameter.requires_grad and id(parameter) not in held:
                    return f"{name} has parameters that the model does not train"
                lookup = id(getattr(parameter, "_original_tensor", parameter))
                if group_of.setdefault(lookup, id(group)) != id(group):
                    return f"{name} has tables of one lookup in several groups"
    return None


def dense_optimizers(optimizer: Any) -> list[Any]:
    """Return the optimizers of dense parameters that `optimizer` is made of.

    A wrapper that is no mere holder of several counts as one of dense parameters, since it is its step that updates
    them, also where it is a warm-up of all.
    """
    if isinstance(optimizer, CombinedOptimizer):
        return [dense for _, each in optimizer.optimizers for dense in dense_optimizers(each)]
    return [] if isinstance(optimizer, FusedOptimizer) else [optimizer]


def fused_optimizers(optimizer: Any) -> list[Any]:
    """Return the optimizers that are fused into lookups, within whatever wrappers."""
    return [each for each in all_of(optimizer) if isinstance(each, FusedOptimizer)]


def parameters_of(optimizer: Any) -> list[torch.Tensor]:
    """Return the parameters of an optimizer, within whatever wrappers."""
    return [p for each in all_of(optimizer) for group in each.param_groups for p in group["params"]]


def all_of(optimizer: Any) -> Iterator[Any]:
    """Yield an optimizer, and those that it holds, from outside to inside."""
    yield optimizer
    if isinstance(optimizer, CombinedOptimizer):
        for _, each in optimizer.optimizers:
            yield from all_of(each)
    elif not isinstance(optimizer, FusedOptimizer) and hasattr(optimizer, "_optimizer"):
        yield from all_of(optimizer._optimizer)


class _NoStep:
    def step(self, closure: Any = None) -> None:
        pass


def step_alone(wrapper: Any) -> None:
    """Take the step of a wrapper, without that of the optimizer that it holds."""
    held, wrapper._optimizer = wrapper._optimizer, _NoStep()
    try:
        with torch.no_grad():
            wrapper.step()
    finally:
        wrapper._optimizer = held
