"""Steps of a torch.optim optimizer on flat parameters, by one kernel."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from dlrm_overlap.config import InputError
from dlrm_overlap.dense.flat import FlatParameters
from dlrm_overlap.dense.functions import kernels_on
from dlrm_overlap.kernels.dense.arguments import LINE, STATES, FlatUpdate

_KINDS = {
    torch.optim.SGD: "sgd",
    torch.optim.Adagrad: "adagrad",
    torch.optim.Adam: "adam",
    torch.optim.AdamW: "adam",
}
_UNSUPPORTED = ("amsgrad", "maximize", "differentiable")  # options that change an update if set


def unsupported_by_flat_steps(optimizer: Any) -> str | None:
    name = type(optimizer).__name__
    if type(optimizer) not in _KINDS:
        return f"{name} is none of torch.optim's SGD, Adagrad, Adam and AdamW"
    for group in optimizer.param_groups:
        if settings := [key for key in _UNSUPPORTED if group.get(key)]:
            return f"{name} has {settings[0]}"
    return None


class FlatSteps:
    """Takes a torch.optim optimizer's steps by one kernel over flat tensors, bit for bit equal.

    Only Adam with a beta1 below 0.5 differs by rounding: torch then adds up the mean of gradients in another way.

    The optimizer's state becomes views of flat tensors, so state dicts are those of torch.optim. Learning rates etc.
    are read from device memory, so captured steps follow changes. Idle parameters are not updated.
    """

    def __init__(self, flat: FlatParameters, optimizer: torch.optim.Optimizer) -> None:
        """Take over an optimizer's state; `unsupported_by_flat_steps` must return None for it."""
        self._flat, self._optimizer = flat, optimizer
        self._kind = _KINDS[type(optimizer)]
        names = {id(parameter): name for name, parameter in flat.named.items()}
        self._groups = [[names[id(p)] for p in g["params"] if id(p) in names] for g in optimizer.param_groups]
        self._names = [name for group in self._groups for name in group]
        device, rows = flat.device, len(self._names)
        kind, decays = self._form_of(self._numbers_now())
        self._states = {key: flat.like(torch.float32) for key in STATES[kind]}
        self.update = FlatUpdate(
            kind=kind,
            decays=decays,
            weights=flat.weights.tensor,
            gradients=flat.gradients.tensor,
            states=tuple(state.tensor for state in self._states.values()),
            shadow=flat.shadow.tensor if flat.shadow is not None else None,
            rows=torch.full((flat.weights.tensor.numel() // LINE,), -1, dtype=torch.int32, device=device),
            step=torch.zeros(rows, device=device),
            numbers=torch.zeros(rows, 7, dtype=torch.float64, device=device),
            factors=torch.zeros(rows, 8, device=device),
        )
        self._kernels = kernels_on(device, "update")
        self._known: list[tuple[Any, ...]] = [(0.0,) * 7] * len(self._groups)
        self._has_begun = False
        for row, name in enumerate(self._names):
            self._lines_of(name).fill_(row)
        self._take_over()
        self.refresh()

    def refresh(self) -> None:
        """Copy changes of the optimizer's `param_groups` and replaced state to device memory; must not be captured.

        Raises `InputError` if the groups need another kind of update than the kernel was prepared for.
        """
        optimizer, numbers = self._optimizer, self._numbers_now()
        kind, decays = self._form_of(numbers)
        if kind != self.update.kind or decays > self.update.decays or len(numbers) != len(self._groups):
            raise InputError(
                f"dense optimizer: {type(optimizer).__name__} has other groups of parameters, or momentum or weight "
                f"decay where it had none, than when its steps were captured; make the pipeline after they are set"
            )
        if optimizer.state is not self._taken_over:
            self._take_over()
            if self._has_begun:
                self._prepare()
        first = 0
        for index, (names, values) in enumerate(zip(self._groups, numbers, strict=True)):
            rows = slice(first, first + len(names))
            first += len(names)
            for column, (value, known) in enumerate(zip(values, self._known[index], strict=True)):
                if isinstance(value, torch.Tensor):
                    self.update.numbers[rows, column].copy_(value.detach())  # may have changed in place
                elif value != known:
                    self.update.numbers[rows, column].fill_(value)  # a kernel argument, so no synchronization
            self._known[index] = values

    def begin(self) -> None:
        """Begin a step before `update_range`: count it on the device and, outside of a capture, call `refresh`."""
        if self._flat.device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
            self.refresh()
            if not self._has_begun:
                self._has_begun = True
                self._prepare()
        self._kernels.begin_update(self.update)

    def update_range(self, first: int, end: int) -> None:
        """Update elements [first, end) of the flat weights; `first` and `end` are multiples of `BLOCK`."""
        self._kernels.update_range(self.update, first, end)

    @torch.no_grad()
    def _take_over(self) -> None:
        self._taken_over, self._made = self._optimizer.state, set[str]()
        for group, names in zip(self._optimizer.param_groups, self._groups, strict=True):
            for name in names:
                self._bind(name, group)

    def _bind(self, name: str, group: Mapping[str, Any]) -> None:
        parameter, step = self._flat.named[name], self.update.step[self._names.index(name)]
        state = self._optimizer.state.get(parameter, {})
        views = {key: state.views[name] for key, state in self._states.items()}
        for key, view in views.items():
            if state.get(key) is not None:
                view.copy_(state[key])
            else:
                view.fill_(group.get("initial_accumulator_value", 0.0))
        step.fill_(state.get("step", 0))
        if self._kind != "sgd":
            views = {"step": step, **views}
        elif not group.get("momentum"):
            views = {}
        if views:
            if not state:
                self._made.add(name)
            self._optimizer.state[parameter].update(views)  # in place: wrappers may hold this dictionary

    def _prepare(self) -> None:
        """Exclude idle parameters, and count a step for loaded momentum buffers."""
        for row, name in enumerate(self._names):
            if name in self._flat.idle:
                self._lines_of(name).fill_(-1)
                state = self._optimizer.state.get(self._flat.named[name], {})
                used = state.get("momentum_buffer" if self.update.kind == "momentum" else "step")
                if name in self._made and used is not None and not used.any():
                    del self._optimizer.state[self._flat.named[name]]  # torch.optim makes no such state
                elif "step" in state:
                    state["step"] = state["step"].clone()  # no longer advances
            elif self.update.kind == "momentum" and self._states["momentum_buffer"].views[name].any():
                self.update.step[row].clamp_(min=1)  # torch.optim's SGD has a buffer after the first step

    def _lines_of(self, name: str) -> torch.Tensor:
        position = self._flat.every_position[name]
        return self.update.rows[position.begin // LINE : -(-(position.begin + position.shape.numel()) // LINE)]

    def _numbers_now(self) -> list[tuple[Any, ...]]:
        return [_numbers(self._kind, group) for group in self._optimizer.param_groups]

    def _form_of(self, numbers: Sequence[tuple[Any, ...]]) -> tuple[str, bool]:
        momentum = self._kind == "sgd" and any(each[2] for each in numbers)
        return "momentum" if momentum else self._kind, any(each[5] or each[6] for each in numbers)


def take_steps(each: Sequence[FlatSteps], ranges: Iterable[tuple[int, int]]) -> None:
    """Take one step of each optimizer; all update parameters of the same flat tensor.

    `ranges` are [first, end) in elements, multiples of `BLOCK`, and cover the tensor. When `ranges` yields a range, its
    gradients must be final on the current stream.
    """
    with torch.no_grad():
        for steps in each:
            steps.begin()
        for first, end in ranges:
            for steps in each:
                steps.update_range(first, end)


def _numbers(kind: str, group: Mapping[str, Any]) -> tuple[Any, ...]:
    decay = group.get("weight_decay", 0.0)
    if kind == "sgd":
        momentum = group.get("momentum", 0.0)
        return group["lr"], 0.0, momentum, momentum and group["dampening"], group.get("nesterov", False), decay, 0.0
    if kind == "adagrad":
        return group["lr"], group["eps"], group.get("lr_decay", 0.0), 0.0, 0.0, decay, 0.0
    decoupled = group.get("decoupled_weight_decay", False)
    return group["lr"], group["eps"], *group["betas"], 0.0, 0.0 if decoupled else decay, decay if decoupled else 0.0
