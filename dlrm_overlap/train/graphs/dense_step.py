"""The dense part of a captured step: its gradients, their mean over the ranks, and the update of its parameters."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from dlrm_overlap.comm.order import CommunicationOrder
from dlrm_overlap.dense.cast import CastWeights
from dlrm_overlap.dense.flat import FlatParameters
from dlrm_overlap.dense.flat_steps import take_steps
from dlrm_overlap.dense.gradients import GradientBuckets, StoreOptions
from dlrm_overlap.train.graphs.optimizers import DenseUpdates, fused_optimizers, parameters_of, why_after_the_graph

_BUCKET_BYTES = 16 << 20  # of gradients that are sent at once, at least


class DenseStep:
    """A step of the dense parameters: `begin`, forward and backward, `update`.

    Both may be captured; then `update_after` follows each launch of the graph.
    """

    def __init__(
        self,
        optimizers: Sequence[Any],
        flat: FlatParameters,
        casts: CastWeights | None,
        group: dist.ProcessGroup,
        order: CommunicationOrder,
        gradient_dtype: torch.dtype,
        stores: StoreOptions | None,
    ) -> None:
        """Take the parameters; all ranks start from rank 0's weights, but for shards, which is a collective.

        Args:
            optimizers: of dense parameters, maybe within TorchRec's wrappers.
            casts: through which the model gets its weights, if it does.
            order: of all that goes between the ranks in a captured step.
            gradient_dtype: in which gradients are sent, float32 or bfloat16.
            stores: how they are reduced by stores; None leaves that to the group's collective.
        """
        self._flat, self._casts = flat, casts
        reasons = {id(each): why_after_the_graph(each, flat.named) for each in optimizers}
        self._after = [each for each in optimizers if reasons[id(each)] is not None]
        after = {id(getattr(p, "_original_tensor", p)) for each in self._after for p in parameters_of(each)}
        self._may_be_kept = {name for name, parameter in flat.parameters.items() if id(parameter) in after}
        self.why_after = ", ".join(sorted({reason for reason in reasons.values() if reason is not None}))
        """why `update_after` takes the steps of some optimizers, and not `update`; empty if there are none"""
        self._updates = DenseUpdates([each for each in optimizers if reasons[id(each)] is None], flat)
        if group.size() > 1:
            dist.broadcast(flat.weights.tensor[: flat.shared_end], group=group, group_src=0)
        self.buckets = GradientBuckets(flat, group, gradient_dtype, _BUCKET_BYTES, order, stores)
        """the gradients, as they are reduced"""
        if casts is not None:
            casts.on_complete(self.buckets.complete)

    def steps_after(self, fused: Any) -> bool:
        """Return whether an optimizer of `update_after` holds a table's one, and so takes its steps."""
        return any(fused in fused_optimizers(each) for each in self._after)

    def clear(self) -> None:
        """Clear the gradients before a step, unless an optimizer that steps after the graph keeps them.

        Gradients that its `zero_grad` leaves are added to, as in a pipeline of TorchRec. They are the mean over the
        ranks already, and so stays what is added to them.
        """
        if not self._after:
            return
        for optimizer in self._after:
            optimizer.zero_grad()
        every = self._flat.parameters
        kept = {name for name in self._may_be_kept if every[name].grad is not None}
        self._flat.adopt_gradients(kept)
        self._flat.zero(every.keys() - kept if kept else None)

    def begin(self) -> None:
        """Begin a step, before its forward: no gradient of an earlier step is added to, but for those of `clear`."""
        if self._casts is not None:
            self._casts.begin()
        elif not self._after:
            self._flat.drop_gradients()

    def update(self) -> None:
        """Reduce the gradients that the backward has not handed on yet, and update the parameters."""
        if self._casts is not None:
            self._casts.finish()
        if self._updates.clips:
            self.buckets.finish()
            self._updates.clip()
            take_steps(self._updates.steps, [(0, self._flat.weights.tensor.numel())])
        else:
            take_steps(self._updates.steps, self.buckets.finish_in_ranges())

    def update_after(self) -> None:
        """Take the steps of optimizers that cannot be captured, and set the next learning rate of a warm-up."""
        if self._after:
            # A replay runs no Python: where `zero_grad` came since the last step, gradients are still None.
            self._flat.show_gradients()
            for optimizer in self._after:
                optimizer.step()
        for warm_up in self._updates.warm_ups:
            warm_up()

    def cast_shadow(self) -> None:
        """Write the shadow of the weights anew, where somebody may have changed weights since the last step."""
        self._flat.cast_shadow()

    def refresh(self) -> None:
        """Write learning rates that have changed to where captured steps read them."""
        for steps in self._updates.steps:
            steps.refresh()

    def close(self) -> None:
        """Let go of the parameters, and of memory that peers see."""
        self.buckets.close()
