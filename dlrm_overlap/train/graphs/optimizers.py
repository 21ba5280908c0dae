"""The optimizers within TorchRec's wrappers: those of tables, and what of the dense ones a graph can hold."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torchrec.optim.clipping import GradientClippingOptimizer
from torchrec.optim.fused import FusedOptimizer
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper, OptimizerWrapper
from torchrec.optim.warmup import WarmupOptimizer

from dlrm_overlap.dense.flat import FlatParameters
from dlrm_overlap.dense.flat_steps import FlatSteps, why_no_flat_steps

_WRAPPERS = (CombinedOptimizer, KeyedOptimizerWrapper, OptimizerWrapper, GradientClippingOptimizer, WarmupOptimizer)


def why_after_the_graph(optimizer: Any, trained: Mapping[str, nn.Parameter]) -> str | None:
    """Return why the step of an optimizer cannot be part of a captured one, or None if it can.

    Args:
        trained: the model's dense parameters that take a gradient.
    """
    held = {id(parameter) for parameter in trained.values()}
    group_of: dict[int, int] = {}  # parameter, or lookup of data-parallel tables -> its group
    for each in _all_of(optimizer):
        name = type(each).__name__
        if getattr(each, "_optimizer_step_pre_hooks", None) or getattr(each, "_optimizer_step_post_hooks", None):
            return f"{name} has hooks of its steps"
        if isinstance(each, GradientClippingOptimizer) and each._sharded_params:
            return f"{name} adds norms up over ranks"
        if isinstance(each, GradientClippingOptimizer) and getattr(each, "_track_grad_norm", False):
            return f"{name} keeps the norm of each step"
        if type(each) in _WRAPPERS or isinstance(each, FusedOptimizer):
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


class DenseUpdates:
    """The steps of optimizers that a graph can hold: `clip`, then `steps`; and `warm_ups` after each launch."""

    def __init__(self, optimizers: Iterable[Any], flat: FlatParameters) -> None:
        """Take over the optimizers, which `why_after_the_graph` finds nothing against."""
        self._flat, self._every = flat, [each for optimizer in optimizers for each in _all_of(optimizer)]
        self.clips = any(isinstance(each, GradientClippingOptimizer) for each in self._every)
        """whether some gradients are clipped, so that all of them come before the first update"""
        self.steps: Sequence[FlatSteps] = [
            FlatSteps(flat, each) for each in self._every if not isinstance(each, (*_WRAPPERS, FusedOptimizer))
        ]
        """of the optimizers within the wrappers"""
        self.warm_ups = [partial(_step_alone, each) for each in self._every[::-1] if isinstance(each, WarmupOptimizer)]
        """to be called after a step: each sets the next learning rate, on the CPU"""
        for each in self._every:
            setattr(each, "_opt_called", True)  # noqa: B010  or torch's schedulers would warn that it takes no steps

    def clip(self) -> None:
        """Clip the gradients, which are all there, on the current stream."""
        self._flat.show_gradients()
        for each in self._every:  # the outer wrapper before the inner
            if isinstance(each, GradientClippingOptimizer):
                _step_alone(each)


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
    return [each for each in _all_of(optimizer) if isinstance(each, FusedOptimizer)]


def parameters_of(optimizer: Any) -> list[torch.Tensor]:
    """Return the parameters of an optimizer, within whatever wrappers."""
    return [p for each in _all_of(optimizer) for group in each.param_groups for p in group["params"]]


def _all_of(optimizer: Any) -> Iterator[Any]:
    """Yield an optimizer, and those that it holds, from outside to inside."""
    yield optimizer
    if isinstance(optimizer, CombinedOptimizer):
        for _, each in optimizer.optimizers:
            yield from _all_of(each)
    elif not isinstance(optimizer, FusedOptimizer) and hasattr(optimizer, "_optimizer"):
        yield from _all_of(optimizer._optimizer)


class _NoStep:
    def step(self, closure: Any = None) -> None:
        pass


def _step_alone(wrapper: Any) -> None:
    """Take the step of a wrapper, without that of the optimizer that it holds."""
    held, wrapper._optimizer = wrapper._optimizer, _NoStep()
    try:
        with torch.no_grad():
            wrapper.step()
    finally:
        wrapper._optimizer = held
