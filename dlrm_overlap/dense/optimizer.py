"""An optimizer that updates all dense parameters by one kernel."""

from collections.abc import Iterable
from typing import Any

import torch

from dlrm_overlap.dense.flat import FlatParameters
from dlrm_overlap.dense.flat_steps import FlatSteps, take_steps

_BETAS = 0.9, 0.999  # of Adam


class FlatOptimizer(torch.optim.Optimizer):
    """torch.optim's SGD, Adagrad or Adam over flat parameters.

    The arithmetic is torch.optim's, and so are the names and shapes of a parameter's state: under TorchRec's
    `KeyedOptimizerWrapper`, checkpoints of either load into the other. Two things differ. Every parameter is updated at
    every step, by a gradient of zero where there was none, while torch.optim passes over parameters without one: only
    Adam shows it, by the weights of a parameter that had a gradient before. And all parameters share one count of
    steps.

    The learning rate is `param_groups[0]["lr"]`, as everywhere. A GPU reads it from its memory, so that a CUDA graph
    which holds `step` follows a schedule: call `refresh` before each replay.
    """

    def __init__(
        self,
        flat: FlatParameters,
        kind: str,
        lr: float,
        eps: float,
        shadow_dtype: torch.dtype | None = None,
    ) -> None:
        """Make the state of the parameters of `flat`, which others may share.

        Args:
            kind: sgd | adagrad | adam.
            eps: of Adagrad and Adam.
            shadow_dtype: float16 or bfloat16 of a copy of the weights that each step writes along, see `shadow`.
        """
        self.flat = flat
        """the parameters that `step` updates"""
        super().__init__(list(flat.named.values()), {"lr": lr, "eps": eps, "betas": _BETAS})
        self.steps = FlatSteps(flat, self, kind, shadow_dtype)
        """how it updates them"""
        self.cast_shadows()

    def refresh(self) -> None:
        """Copy the numbers of `param_groups` that have changed to device memory, see `FlatSteps.refresh`."""
        self.steps.refresh()

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all parameters, and the shadows, by the gradients as they are on the current stream."""
        self.flat.adopt_gradients()
        self.step_in_ranges([(0, self.flat.weights.tensor.numel())])

    def step_in_ranges(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Update all parameters range by range, so that one range may be updated while gradients of the next arrive.

        Args:
            ranges: [first, end) in elements of the flat tensors, multiples of `BLOCK` that cover all; each is updated
                on the current stream when it is yielded, by gradients that are in the flat tensor by then.
        """
        take_steps([self.steps], ranges)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Set all gradients to zero. They stay the views that they are, whatever `set_to_none` asks for."""
        self.flat.zero()

    def shadow(self, name: str) -> torch.Tensor:
        """Return the view of the shadows that holds parameter `name`, in its shape, rounded to `shadow_dtype`."""
        assert self.steps.shadow is not None, "the optimizer was made without shadow_dtype"
        return self.steps.shadow.views[name]

    @torch.no_grad()
    def cast_shadows(self) -> None:
        """Write all shadows anew; needed where somebody else than `step` has changed weights, as a load does."""
        if self.steps.shadow is not None:
            self.steps.shadow.tensor.copy_(self.flat.weights.tensor)

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Copy the state of this optimizer or of torch.optim's of the same kind into the flat tensors."""
        super().load_state_dict(state_dict)
        for name, value in self.defaults.items():  # which torch.optim's optimizers have in part
            self.param_groups[0].setdefault(name, value)
        self.steps.take_over()
