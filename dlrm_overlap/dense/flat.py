"""Dense parameters, their gradients and optimizer state as views of flat tensors."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn

from dlrm_overlap.config import InputError
from dlrm_overlap.kernels.dense.arguments import BLOCK, LINE
from dlrm_overlap.torchrec_private import TableBatchedEmbeddingSlice
from dlrm_overlap.torchrec_private.attributes import first_element, holder_of


class FlatPosition(NamedTuple):
    """Offsets of a parameter in the flat tensors, in elements."""

    begin: int
    end: int
    """where the next parameter begins; elements between the two are zero"""
    shape: torch.Size

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        return flat[self.begin : self.begin + self.shape.numel()].view(self.shape)


class FlatTensor(NamedTuple):
    tensor: torch.Tensor
    """[n], zero where no parameter is"""
    views: dict[str, torch.Tensor]


class FlatParameters:
    """Moves parameters into one flat tensor, with gradients that are views of another.

    The parameters stay the same objects. They are in reverse order: the gradient of the last one given is expected
    first. Shards, which differ between ranks, come last, from a multiple of `BLOCK` on. TorchRec's data-parallel tables
    are slices of a parameter that holds them; here that holder is moved.

    Example: parameters of 3 and 100 elements get the positions 128 .. 130 and 0 .. 99 of 1024. If the first is a shard,
    its position is 1024 .. 1026 of 2048.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        shards: Collection[str] = (),
        shadow_dtype: torch.dtype | None = None,
    ) -> None:
        """Move `parameters`, by name; `unsupported_by_flat` must return None for them.

        `shards` names parameters that differ between ranks, as each holds a part or trains it alone; the others are the
        same size on all ranks. If a slice is a shard, so is its holder.
        `shadow_dtype` is float16 or bfloat16; None makes no shadow.
        """
        assert (reason := unsupported_by_flat(parameters)) is None, reason
        self.named = dict(parameters)
        """the parameters as given, including slices"""
        # The parameters to move: slices are moved with their holders.
        slices = _slices(parameters)
        whole = {name: parameter for name, parameter in reversed(self.named.items()) if name not in slices}
        holders = {holder: holder_of(parameters[name]) for name, (holder, _) in slices.items()}
        self.parameters: dict[str, nn.Parameter] = whole | holders
        """all parameters but slices, then the holders of slices"""
        self.unseen = set(holders)
        """names of parameters whose gradients may be written without autograd"""
        self.shards = frozenset(shards) | {holder for name, (holder, _) in slices.items() if name in shards}
        self.idle: frozenset[str] = frozenset()
        """names of parameters that get a gradient on no rank: `grad` is None, and the flat gradient is zero there"""
        # The layout: shared parameters, then shards.
        self.device = next(iter(self.parameters.values())).device
        self.positions: dict[str, FlatPosition] = {}
        shared_end = self._assign_positions([name for name in self.parameters if name not in self.shards], 0)
        self.shared_end = -(-shared_end // BLOCK) * BLOCK
        """elements before the first shard, a multiple of `BLOCK`: the same on all ranks"""
        end = self._assign_positions([name for name in self.parameters if name in self.shards], self.shared_end)
        self._elements = -(-end // BLOCK) * BLOCK
        self.every_position = dict(self.positions)
        """`positions`, and the positions of slices"""
        for name, (holder, first) in slices.items():
            begin, shape = self.positions[holder].begin + first, parameters[name].shape
            self.every_position[name] = FlatPosition(begin, begin + shape.numel(), shape)
        # Move weights and gradients.
        self.weights, self.gradients = self.like(torch.float32), self.like(torch.float32)
        for name, parameter in self.parameters.items():
            self.weights.views[name].copy_(parameter.data)
        self._show_weights()
        self.adopt_gradients()
        self.shadow = self.like(shadow_dtype) if shadow_dtype is not None else None
        """weights rounded to nearest in `shadow_dtype`, kept up to date by `FlatSteps`"""
        self.cast_shadow()

    def _assign_positions(self, names: Iterable[str], begin: int) -> int:
        for name in names:
            shape = self.parameters[name].shape
            self.positions[name] = FlatPosition(begin, begin + -(-shape.numel() // LINE) * LINE, shape)
            begin = self.positions[name].end
        return begin

    def cast_shadow(self) -> None:
        """Write the shadow; needed if anything but `FlatSteps` has changed weights."""
        if self.shadow is not None:
            self.shadow.tensor.copy_(self.weights.tensor)

    def like(self, dtype: torch.dtype) -> FlatTensor:
        zeros = torch.zeros(self._elements, dtype=dtype, device=self.device)
        return FlatTensor(zeros, {name: position.of(zeros) for name, position in self.every_position.items()})

    def zero(self, names: Collection[str] | None = None) -> None:
        """Zero the gradients of `names` (None: all, in one operation), and make them views of the flat gradient."""
        self.show_gradients(names)
        if names is None:
            self.gradients.tensor.zero_()
        elif names:
            views = [self.gradients.views[name] for name in names]
            torch._foreach_zero_(views)  # pyright: ignore[reportPrivateImportUsage]

    def show_gradients(self, names: Iterable[str] | None = None) -> None:
        """Make `grad` of each parameter of `names` (None: all) a view of the flat gradient, or None if it is idle."""
        for name in self.parameters if names is None else names:
            parameter, view = self.parameters[name], None if name in self.idle else self.gradients.views[name]
            if parameter.grad is not view:
                parameter.grad = view

    def drop_gradients(self) -> None:
        """Set gradients to None, so that a backward does not accumulate; zero the gradients of `unseen` parameters."""
        for name in self.parameters.keys() - self.unseen:
            self.parameters[name].grad = None
        self.zero(self.unseen)

    @torch.no_grad()
    def adopt_gradients(self, names: Iterable[str] | None = None) -> list[torch.Tensor]:
        """Copy gradients of `names` (None: all) that are not views to the flat tensor, and restore the views.

        A gradient that is None counts as zero, and stays None if its parameter is idle. The copies run on the current
        stream by few kernels. Keep the returned gradients until the copies are done, if another stream made them.
        """
        views, gradients = list[torch.Tensor](), list[torch.Tensor]()
        for name in self.parameters if names is None else names:
            parameter, view = self.parameters[name], self.gradients.views[name]
            if parameter.grad is view or (parameter.grad is None and name in self.idle):
                continue
            if parameter.grad is None:
                view.zero_()
            else:
                views.append(view)
                gradients.append(parameter.grad)
            parameter.grad = view
        copy_all(views, [gradient.to_dense() for gradient in gradients])  # nn.Embedding's may be sparse
        return gradients

    @torch.no_grad()
    def keep_gradients_in(self, memory: torch.Tensor) -> None:
        """Move the flat gradient to `memory` [n] float32, and wait for the GPU. Call it before a graph is captured."""
        self._move(self.gradients, memory)

    @torch.no_grad()
    def keep_weights_in(self, weights: torch.Tensor, shadow: torch.Tensor) -> None:
        """Move the flat weights to `weights` [n] float32, and the shadow, which must exist, to `shadow` [n].

        Waits for the GPU. Call it before a graph is captured.
        """
        assert self.shadow is not None, "the parameters were made flat without shadow_dtype"
        self._move(self.weights, weights)
        self._show_weights()
        self._move(self.shadow, shadow)

    @torch.no_grad()
    def adopt_weights(self) -> bool:
        """Copy weights that are not views to the flat tensor and the shadow, and restore the views.

        A weight is not a view if the program has given it other memory, as `parameter.data = ..` does.

        Returns:
            Whether there was such a weight.

        Raises:
            InputError: if a weight has another shape, dtype or device than before.
        """
        if [parameter.data_ptr() for parameter in self._shown] == self._addresses:
            return False
        found = dict[str, torch.Tensor]()
        for name, parameter in (self.parameters | self.named).items():
            if parameter.data_ptr() != (view := self.weights.views[name]).data_ptr():
                if _form_of(parameter) != _form_of(view):
                    raise InputError(
                        f"dense parameter {name}: its data is now {_form_of(parameter)}, and was {_form_of(view)} when "
                        f"the pipeline began; keep its shape, dtype and device, or make another pipeline"
                    )
                found[name] = parameter.data.clone()  # it may be the view of another parameter
        for name, value in found.items():
            self.weights.views[name].copy_(value)
            if self.shadow is not None:
                self.shadow.views[name].copy_(value)
        self._show_weights()
        return True

    def _show_weights(self) -> None:
        shown = self.parameters | self.named
        for name, parameter in shown.items():
            parameter.data = self.weights.views[name]
        self._shown = list(shown.values())
        self._addresses = [parameter.data_ptr() for parameter in self._shown]

    def _move(self, flat: FlatTensor, memory: torch.Tensor) -> None:
        memory.copy_(flat.tensor)
        flat.tensor.data = memory
        for name, view in flat.views.items():
            view.data = self.every_position[name].of(memory)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # the old memory may be reused on any stream


def _form_of(tensor: torch.Tensor) -> str:
    return f"{list(tensor.shape)} {tensor.dtype} on {tensor.device}"


def copy_all(views: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> None:
    """Copy each tensor to the view at the same position of `views`, possibly of another dtype.

    One operation copies all tensors that have the strides of their views.
    """
    same_strides = [
        (view, tensor) for view, tensor in zip(views, tensors, strict=True) if view.stride() == tensor.stride()
    ]
    for view, tensor in zip(views, tensors, strict=True):
        if view.stride() != tensor.stride():
            view.copy_(tensor)
    if same_strides:
        torch._foreach_copy_(*map(list, zip(*same_strides, strict=True)))  # type: ignore[arg-type]


def _slices(parameters: Mapping[str, nn.Parameter]) -> dict[str, tuple[str, int]]:
    holders: dict[int, list[tuple[str, TableBatchedEmbeddingSlice]]] = {}
    for name, parameter in parameters.items():
        if isinstance(parameter, TableBatchedEmbeddingSlice):
            holders.setdefault(id(holder_of(parameter)), []).append((name, parameter))
    found: dict[str, tuple[str, int]] = {}
    for slices in holders.values():
        names = "/".join(name for name, _ in slices)
        found |= {name: (f"lookup of {names}", first_element(each)) for name, each in slices}
    return found


def unsupported_by_flat(parameters: Mapping[str, nn.Parameter]) -> str | None:
    for name, given in parameters.items():
        parameter = holder_of(given)
        if type(parameter) is not nn.Parameter:
            return f"{name} is a {type(parameter).__name__} and must be a plain nn.Parameter with memory of its own"
        if parameter.dtype != torch.float32:
            return f"{name} is {parameter.dtype} and must be torch.float32"
    return None
