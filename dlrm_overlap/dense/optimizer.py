"""An optimizer that updates all dense parameters by one kernel."""

from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

import torch

from dlrm_overlap.config import InputError
from dlrm_overlap.dense.flat import FlatParameters
from dlrm_overlap.kernels.dense.arguments import STATES, FlatUpdate

_NOT_IMPLEMENTED = ("weight_decay", "momentum", "lr_decay", "amsgrad", "maximize")
"""settings of torch.optim's optimizers that change an update, unless they are 0 or False"""


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
        eps: float | None = None,
        betas: tuple[float, float] = (0.9, 0.999),
        shadow_dtype: torch.dtype | None = None,
    ) -> None:
        """Make the state of the parameters of `flat`, which others may share.

        Args:
            kind: sgd | adagrad | adam.
            eps: of Adagrad and Adam; None takes torch.optim's: 1e-10 and 1e-8.
            betas: of Adam.
            shadow_dtype: float16 or bfloat16 of a copy of the weights that each step writes along, see `shadow`.

        Raises:
            InputError: if there is no such kind.
        """
        if kind not in STATES:
            raise InputError(f"flat optimizer: {kind!r} is not known; take one of {', '.join(STATES)}")
        eps = {"adagrad": 1e-10}.get(kind, 1e-8) if eps is None else eps
        self.flat, self._kind = flat, kind
        """the parameters that `step` updates"""
        self._states = {name: flat.like(torch.float32) for name in STATES[kind]}
        self._shadow = flat.like(shadow_dtype) if shadow_dtype is not None else None
        self._update = FlatUpdate(
            kind=kind,
            weights=flat.weights.tensor,
            gradients=flat.gradients.tensor,
            states=tuple(state.tensor for state in self._states.values()),
            shadow=self._shadow.tensor if self._shadow is not None else None,
            step=torch.zeros(1, device=flat.device),
            numbers=torch.zeros(4, dtype=torch.float64, device=flat.device),
            factors=torch.zeros(6, device=flat.device),
        )
        self._kernels = _kernels_of(flat.device)
        super().__init__(list(flat.named.values()), {"lr": lr, "eps": eps, "betas": betas})
        self._known = [0.0] * 4
        self._bind()
        self.refresh()
        self.cast_shadows()

    def refresh(self) -> None:
        """Copy the numbers of `param_groups` that have changed to device memory, on the current stream.

        Within a CUDA graph's capture it would be one of the graph's nodes, and set older numbers again.
        """
        group = self.param_groups[0]
        for index, value in enumerate((group["lr"], group["eps"], *group["betas"])):
            if value != self._known[index]:
                self._update.numbers[index].fill_(value)  # a kernel with the value among its arguments: no wait
                self._known[index] = value

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update all parameters, and the shadows, by the gradients as they are on the current stream."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.flat.adopt_gradients()
        self.step_in_ranges([(0, self.flat.weights.tensor.numel())])
        return loss

    @torch.no_grad()
    def step_in_ranges(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Update all parameters range by range, so that one range may be updated while gradients of the next arrive.

        Args:
            ranges: [first, end) in elements of the flat tensors, multiples of `BLOCK` that cover all; each is updated
                on the current stream when it is yielded, by gradients that are in the flat tensor by then.
        """
        if self.flat.device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
            self.refresh()
        self._kernels.begin_update(self._update)
        for first, end in ranges:
            self._kernels.update_range(self._update, first, end)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Set all gradients to zero. They stay the views that they are, whatever `set_to_none` asks for."""
        self.flat.zero()

    def shadow(self, name: str) -> torch.Tensor:
        """Return the view of the shadows that holds parameter `name`, in its shape, rounded to `shadow_dtype`."""
        assert self._shadow is not None, "the optimizer was made without shadow_dtype"
        return self._shadow.views[name]

    @torch.no_grad()
    def cast_shadows(self) -> None:
        """Write all shadows anew; needed where somebody else than `step` has changed weights, as a load does."""
        if self._shadow is not None:
            self._shadow.tensor.copy_(self.flat.weights.tensor)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Take the parameters of `flat`, once.

        Raises:
            InputError: for any others.
        """
        if self.param_groups:
            raise InputError("flat optimizer: it updates its flat parameters; give others an optimizer of their own")
        super().add_param_group(param_group)

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Copy the state of this optimizer or of torch.optim's of the same kind into the flat tensors.

        Raises:
            InputError: if its settings are others than those that this optimizer has; nothing is loaded then.
        """
        for group in state_dict["param_groups"]:
            for name in _NOT_IMPLEMENTED:
                if group.get(name):
                    raise InputError(
                        f"flat optimizer: a state dict with {name} {group[name]}, which it does not have; load it into "
                        f"torch.optim's own optimizer, or set {name} to {type(group[name])()} in it"
                    )
        super().load_state_dict(state_dict)
        for name, value in self.defaults.items():  # which torch.optim's optimizers have in part
            self.param_groups[0].setdefault(name, value)
        loaded = {key: {name: value.clone() for name, value in state.items()} for key, state in self.state.items()}
        for flat in (self._update.step, *self._update.states):
            flat.zero_()  # torch.optim has no state of parameters that it has not updated yet
        self._bind()
        for parameter, state in loaded.items():
            for name, value in state.items():
                self.state[parameter][name].copy_(value)

    def _bind(self) -> None:
        """Let the state of each parameter be views of the flat tensors. SGD has none, as in torch.optim."""
        for name, parameter in self.flat.named.items():
            if self._states:
                views = {key: flat.views[name] for key, flat in self._states.items()}
                self.state[parameter] = {"step": self._update.step.view(()), **views}


def _kernels_of(device: torch.device) -> ModuleType:
    """Return the module of the kernels of a GPU, and for a CPU that of their twins."""
    if device.type == "cuda":
        from dlrm_overlap.kernels.dense import update as kernels  # a CPU needs no Triton
    else:
        from dlrm_overlap.kernels.dense import reference as kernels
    return kernels
