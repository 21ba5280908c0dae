"""The dense part of a step. Optimizers may be inside TorchRec's wrappers, such as `CombinedOptimizer` or a warm-up."""

from collections.abc import Iterator, Mapping
from inspect import unwrap
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import lr_scheduler
from torchrec.distributed.model_parallel import DMPCollection
from torchrec.optim.clipping import GradientClippingOptimizer
from torchrec.optim.fused import FusedOptimizer
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper, OptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.warmup import WarmupOptimizer

from dlrm_overlap.comm.order import CommunicationOrder
from dlrm_overlap.config import InputError
from dlrm_overlap.dense.cast import CastWeights
from dlrm_overlap.dense.flat import FlatParameters
from dlrm_overlap.dense.flat_steps import FlatSteps, take_steps, unsupported_by_flat_steps
from dlrm_overlap.dense.functions import StoreOptions
from dlrm_overlap.dense.gradients import GradientBuckets, OwnedSteps
from dlrm_overlap.dense.tensor_parallel import shards_of
from dlrm_overlap.embedding.replicated import unsynchronized_weights
from dlrm_overlap.torchrec_private import ShardedManagedCollisionCollection
from dlrm_overlap.torchrec_private.attributes import (
    adds_norms_over_ranks,
    holder_of,
    inner_optimizer,
    keeps_norms,
    set_optimizer,
)
from dlrm_overlap.train.graphs.stale_weights import StaleWeights

_WRAPPERS = (CombinedOptimizer, KeyedOptimizerWrapper, OptimizerWrapper, GradientClippingOptimizer, WarmupOptimizer)
_BUCKET_BYTES = 16 << 20  # smallest bucket of gradients


class DenseStep:
    """Clears, reduces and applies the dense gradients.

    A step calls `clear`, `begin`, forward and backward, `update`, `update_after`. The graph contains the calls from
    `begin` to `update`; `clear` and `update_after` are called outside of it.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any,
        casts: CastWeights | None,
        group: dist.ProcessGroup,
        order: CommunicationOrder,
        gradient_dtype: torch.dtype,
        stores: StoreOptions | None,
        *,
        dense_update: str = "all",
    ) -> None:
        """Copy rank 0's dense parameters to all ranks, except those that differ between ranks; a collective.

        Args:
            optimizer: optimizer of all parameters, including tables.
            casts: casts the dense parameters to bfloat16 for the model; None if it uses them in float32.
            gradient_dtype: type in which gradients are sent, float32 or bfloat16.
            stores: options of the reduction by stores; None reduces by a collective.
            dense_update: as `train.dense_update`; all ranks update if `why_not_by_owners` is not empty.
        """
        # Find the trained parameters, and which optimizers are captured. The others step after the graph.
        every = dict(in_backward_optimizer_filter(model.named_parameters()))
        self._every, self._trains = list(every.values()), [parameter.requires_grad for parameter in every.values()]
        trained, divided = dense_parameters(model), {*shards_of(model), *unsynchronized_weights(model)}
        self._flat = flat = casts.flat if casts is not None else FlatParameters(trained, divided)
        self._casts, optimizers = casts, dense_optimizers(optimizer)
        assert trained.keys() <= flat.named.keys(), "gradients of other parameters would not be averaged over the ranks"
        reasons = {id(each): why_after_the_graph(each, flat.named) for each in optimizers}
        self._after = [each for each in optimizers if reasons[id(each)] is not None]
        after = {id(holder_of(p)) for each in self._after for group in each.param_groups for p in group["params"]}
        self._may_be_kept = {name for name, parameter in flat.parameters.items() if id(parameter) in after}
        self.why_after = ", ".join(sorted({reason for reason in reasons.values() if reason is not None}))
        """why some optimizers step in `update_after` instead of `update`; empty if none does"""
        taken_after = [fused for each in self._after for fused in fused_optimizers(each)]
        self.fused = [each for each in fused_optimizers(optimizer) if each not in taken_after]
        """optimizers of tables, whose `step` sets learning rates, unless `update_after` steps them"""
        captured = [each for outer in optimizers if reasons[id(outer)] is None for each in _all_of(outer)]
        called = {id(each) for outer in self._after for each in _all_of(outer)}
        self._uncalled = [each for each in _all_of(optimizer) if id(each) not in called]
        """optimizers whose `step` no step calls"""
        self._steps = [FlatSteps(flat, each) for each in captured if not isinstance(each, (*_WRAPPERS, FusedOptimizer))]
        # The outer clipping comes before the inner one. A warm-up sets the next learning rate, on the CPU.
        self._clippings = [each for each in captured if isinstance(each, GradientClippingOptimizer)]
        self._warm_ups = [each for each in reversed(captured) if isinstance(each, WarmupOptimizer)]
        for each in captured:
            each._opt_called = True  # otherwise torch's schedulers warn that the optimizer takes no steps
        # Start all ranks from rank 0's weights.
        if group.size() > 1:
            ids = _ids_of_tables(model)
            for name, parameter in every.items():
                if not parameter.requires_grad and name not in divided and id(parameter) not in ids:
                    dist.broadcast(parameter.data, group=group, group_src=0)
            flat.adopt_weights()
            dist.broadcast(flat.weights.tensor[: flat.shared_end], group=group, group_src=0)
        # Choose who updates the weights, and make the buckets of gradients.
        self.why_not_by_owners = self._why_not_by_owners(model, group, stores)
        """why every rank updates all dense weights; empty if owners can update their shares"""
        owned = None
        if casts is not None and dense_update != "all" and not self.why_not_by_owners:
            owned = OwnedSteps(self._steps[0], casts.in_float32, defers_last=dense_update == "owner_deferred")
        self.buckets = GradientBuckets(flat, group, gradient_dtype, _BUCKET_BYTES, order, stores, owned)
        if casts is not None:
            casts.on_complete(self.buckets.complete)
            if self.buckets.deferred is not None:
                casts.on_read(self.buckets.deferred.wait)
        self._stale_weights: StaleWeights | None = None
        if (owners := self.buckets.owners) is not None:
            mine = [parameter for name, parameter in flat.parameters.items() if name not in flat.shards]
            guarded = {id(each): each for each in (optimizer, *captured)}
            self._stale_weights = StaleWeights(model, mine, guarded.values(), lambda: owners.is_stale)

    def _why_not_by_owners(self, model: nn.Module, group: dist.ProcessGroup, stores: StoreOptions | None) -> str:
        if group.size() == 1:
            return "there is one rank"
        if stores is None:
            return "dense gradients are averaged by a collective"
        if self._casts is None:
            return "the dense part does not use bfloat16 copies of its weights"
        if self._after:
            return self.why_after
        if self._clippings:
            return "gradients are clipped by their mean over the ranks"
        if len(self._steps) != 1:
            return f"the dense part has {len(self._steps)} optimizers"
        if isinstance(model, DMPCollection):
            return "TorchRec averages the weights of replicas of the model"
        return ""

    def trains_the_same(self) -> bool:
        """Return whether the same dense parameters require a gradient as when this object was made.

        Raises:
            InputError: if others do, but `casts` were made for the same ones.
        """
        is_same = [parameter.requires_grad for parameter in self._every] == self._trains
        if not is_same and self._casts is not None:
            raise InputError(
                "dense parameters: requires_grad has changed, but casts were made for those that required a gradient; "
                "make casts again, and another pipeline"
            )
        return is_same

    def clear(self) -> None:
        """Clear the dense gradients before a step.

        The backward adds to gradients that an optimizer of `update_after` keeps, as in TorchRec's pipelines.

        Raises:
            InputError: if an optimizer whose `step` is not called now has hooks, or its `step` was replaced.
        """
        for each in self._uncalled:
            if (reason := _why_called(each)) is not None:
                raise InputError(
                    f"dense optimizer: {reason} since the pipeline began, which does not call its step; change it "
                    f"before the first progress, or make another pipeline"
                )
        if self.buckets.owners is not None:
            self.refresh()  # on this stream: the owners' stream must not read memory that the host frees
            self.buckets.owners.is_stale = True
        if not self._after:
            return
        for optimizer in self._after:
            optimizer.zero_grad()
        every = self._flat.parameters
        kept = {name for name in self._may_be_kept if every[name].grad is not None}
        self._flat.adopt_gradients(kept)
        self._flat.zero(every.keys() - kept if kept else None)

    def begin(self) -> None:
        """Drop the dense gradients of earlier steps before a forward, except for gradients that `clear` has kept.

        Those of a deferred bucket are not dropped, but read from here on.
        """
        if self.buckets.deferred is not None:
            self.buckets.deferred.reduce()
        if self._casts is not None:
            self._casts.begin()
        elif not self._after:
            self._flat.drop_gradients()

    def update(self) -> None:
        if self._casts is not None:
            self._casts.finish()
        if self.buckets.owners is not None:
            self._update_shards()
        elif self._clippings:
            self.buckets.finish()
            self._flat.show_gradients()
            for clipping in self._clippings:
                step_alone(clipping)
            take_steps(self._steps, [(0, self._flat.weights.tensor.numel())])
        else:
            take_steps(self._steps, self.buckets.finish_in_ranges())

    @torch.no_grad()
    def _update_shards(self) -> None:
        """Wait for the weights that owners have updated, then update the shards."""
        for first, end in list(self.buckets.finish_in_ranges()):
            if first >= self._flat.shared_end:
                self._steps[0].update_range(first, end)

    def gather(self) -> None:
        """Make float32 weights and optimizer states the same on all ranks again, if owners have updated them.

        A collective.
        """
        if self.buckets.owners is not None:
            if self.buckets.deferred is not None:
                self.buckets.deferred.flush()
            self.buckets.owners.gather()

    def update_after(self) -> None:
        """Step optimizers that cannot be captured, and set the next learning rate of a warm-up."""
        if self.buckets.deferred is not None:
            self.buckets.deferred.step_is_issued()
        if self._after:
            # A replay runs no Python, so gradients are still None after `zero_grad`.
            self._flat.show_gradients()
            for optimizer in self._after:
                optimizer.step()
        for warm_up in self._warm_ups:
            step_alone(warm_up)

    def adopt_weights(self) -> None:
        """Continue from weights to which the program has given other memory since the last step."""
        if self._flat.adopt_weights() and self._stale_weights is not None:
            self._stale_weights.check()

    def cast_shadow(self) -> None:
        """Cast the dense weights to bfloat16 again, after a checkpoint may have changed them."""
        self._flat.cast_shadow()

    def refresh(self) -> None:
        """Copy changed learning rates to the memory that captured steps read."""
        for steps in self._steps:
            steps.refresh()

    def close(self) -> None:
        guard = self._stale_weights
        if guard is not None and not guard.are_stale():  # they are after a failed step
            guard.close()
        if self._casts is not None:
            self._casts.on_read(lambda: None)
        self.buckets.close()


def why_after_the_graph(optimizer: Any, trained: Mapping[str, nn.Parameter]) -> str | None:
    """Return why an optimizer's step cannot be captured, None if it can; `trained` has the dense parameters."""
    held = {id(parameter) for parameter in trained.values()}
    group_of: dict[int, int] = {}  # id of a parameter, or of a lookup of data-parallel tables -> id of its group
    for each in _all_of(optimizer):
        name = type(each).__name__
        if (reason := _why_called(each)) is not None:
            return reason
        if isinstance(each, GradientClippingOptimizer) and adds_norms_over_ranks(each):
            return f"{name} adds norms up over ranks"
        if isinstance(each, GradientClippingOptimizer) and keeps_norms(each):
            return f"{name} keeps the norm of each step"
        if type(each) in _WRAPPERS or isinstance(each, FusedOptimizer):
            continue
        if (reason := unsupported_by_flat_steps(each)) is not None:
            return reason
        for group in each.param_groups:
            for parameter in group["params"]:
                if parameter.requires_grad and id(parameter) not in held:
                    return f"{name} has parameters that the model does not train"
                lookup = id(holder_of(parameter))
                if group_of.setdefault(lookup, id(group)) != id(group):
                    return f"{name} has tables of one lookup in several groups"
    return None


def _why_called(optimizer: Any) -> str | None:
    """Return why `optimizer.step` must be called: it has hooks, or was replaced; None if neither holds."""
    name = type(optimizer).__name__
    if getattr(optimizer, "_optimizer_step_pre_hooks", None) or getattr(optimizer, "_optimizer_step_post_hooks", None):
        return f"{name} has hooks of its steps"
    if (step := vars(optimizer).get("step")) is None:
        return None
    while getattr(step, "__globals__", {}).get("__name__") == lr_scheduler.__name__:  # torch's schedulers wrap it
        step = step.__wrapped__
    return None if step is type(optimizer).step else f"{name} has a step of its own"


def dense_optimizers(optimizer: Any) -> list[Any]:
    """Return the optimizers inside `optimizer` that update dense parameters.

    A wrapper counts as one, even if it also contains tables' optimizers, unless it is a `CombinedOptimizer` without a
    step of its own.
    """
    combines = isinstance(optimizer, CombinedOptimizer) and _why_called(optimizer) is None
    if combines and unwrap(type(optimizer).step) is unwrap(CombinedOptimizer.step):
        return [dense for _, each in optimizer.optimizers for dense in dense_optimizers(each)]
    return [] if isinstance(optimizer, FusedOptimizer) else [optimizer]


def fused_optimizers(optimizer: Any) -> list[Any]:
    return [each for each in _all_of(optimizer) if isinstance(each, FusedOptimizer)]


def _all_of(optimizer: Any) -> Iterator[Any]:
    yield optimizer
    if isinstance(optimizer, CombinedOptimizer):
        for _, each in optimizer.optimizers:
            yield from _all_of(each)
    elif not isinstance(optimizer, FusedOptimizer) and (inner := inner_optimizer(optimizer)) is not None:
        yield from _all_of(inner)


class _NoStep:
    def step(self, closure: Any = None) -> None:
        pass


def step_alone(wrapper: Any) -> None:
    """Call `step` of a wrapper, but not of the optimizer inside it."""
    held = inner_optimizer(wrapper)
    set_optimizer(wrapper, _NoStep())
    try:
        with torch.no_grad():
            wrapper.step()
    finally:
        set_optimizer(wrapper, held)


def _ids_of_tables(model: nn.Module) -> set[int]:
    """Return the `id` of each parameter that holds the ids of a rank's rows, of tables of any id."""
    maps = [each for each in model.modules() if isinstance(each, ShardedManagedCollisionCollection)]
    return {id(parameter) for each in maps for parameter in each.parameters()}


def dense_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of a sharded model that require a gradient and that no fused lookup updates, by name.

    They include data-parallel tables, see `FlatParameters`.
    """
    return {name: each for name, each in in_backward_optimizer_filter(model.named_parameters()) if each.requires_grad}
