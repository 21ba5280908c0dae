"""Dense parameters as views of one flat tensor, with gradients and optimizer state in flat tensors of one layout."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn
from torchrec.distributed.composable.table_batched_embedding_slice import TableBatchedEmbeddingSlice

from dlrm_overlap.kernels.dense.arguments import BLOCK, LINE


class FlatPlace(NamedTuple):
    """Where a parameter is in the flat tensors, in elements."""

    begin: int
    end: int
    """where the next parameter begins: zeros fill the gap"""
    shape: torch.Size

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the parameter's view of a flat tensor."""
        return flat[self.begin : self.begin + self.shape.numel()].view(self.shape)


class FlatTensor(NamedTuple):
    """A flat tensor with a view for each parameter, all of which stay the objects that they are."""

    tensor: torch.Tensor
    """[n], zero wherever no parameter is"""
    views: dict[str, torch.Tensor]
    """parameter -> its part of the tensor, in its shape"""


class FlatParameters:
    """Moves parameters into one flat tensor, and gives them gradients that are views of another.

    The parameters stay the objects that they were: modules and optimizers that hold them see the same values.
    Their gradients stay where they are as well, and backwards accumulate into them. A gradient that somebody else has
    put in a view's stead, as autograd does after `zero_grad`, is taken into the view by `adopt_gradients`. The
    gradient of a parameter that is `idle` is None, so that optimizers pass over it.

    The last parameter comes first, since a backward completes gradients in about the reverse of the order in which a
    model names them. Shards, of which each rank holds another part, come after all others, from a multiple of `BLOCK`
    elements on, so that all ranks hold alike the range [0, `shared_end`).

    TorchRec shows each of its data-parallel tables as a parameter of its own, which is a slice of one that holds all
    tables of a lookup. The slices stay slices: the parameter that holds them is moved, and has a gradient. Its backward
    ends last, so it comes after the others.

    Example: parameters of 3 and 100 elements have the places 128 .. 130 and 0 .. 99 of 1024 elements, the rest is zero.
    If the first of them is a shard, its place is 1024 .. 1026 of 2048 elements.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        shards: Collection[str] = (),
        shadow_dtype: torch.dtype | None = None,
    ) -> None:
        """Move `parameters`, against which `why_not_flat` finds nothing, by name, as `named_parameters` gives them.

        Args:
            parameters: as many elements on all ranks.
            shards: names of those of which each rank holds another part.
            shadow_dtype: float16 or bfloat16 of `shadow`; None makes none.
        """
        assert (reason := why_not_flat(parameters)) is None, reason
        self.named = dict(parameters)
        """the parameters as they were given, slices among them"""
        slices = _slices(parameters)
        whole = {name: parameter for name, parameter in reversed(self.named.items()) if name not in slices}
        holders = {holder: parameters[name]._original_tensor for name, (holder, _) in slices.items()}  # type: ignore[attr-defined]
        self.parameters: dict[str, nn.Parameter] = whole | holders
        """those that are moved: all but the slices, then the holders of slices"""
        self.unseen = set(holders)
        """names of the parameters whose gradients may be written without autograd, as lookups do to those of slices"""
        self.shards = frozenset(shards)
        """names of the parameters of which each rank holds another part"""
        self.idle: frozenset[str] = frozenset()
        """names of the parameters that get a gradient on no rank; zeros stand for it in the flat tensor"""
        self.device = next(iter(self.parameters.values())).device
        self.places: dict[str, FlatPlace] = {}
        """of `parameters`, in the order of the layout"""
        shared_end = self._place([name for name in self.parameters if name not in self.shards], 0)
        self.shared_end = -(-shared_end // BLOCK) * BLOCK
        """elements of the flat tensors up to the first shard: a multiple of `BLOCK`"""
        end = self._place([name for name in self.parameters if name in self.shards], self.shared_end)
        self._elements = -(-end // BLOCK) * BLOCK
        self._every_place = dict(self.places)
        for name, (holder, first) in slices.items():
            begin, shape = self.places[holder].begin + first, parameters[name].shape
            self._every_place[name] = FlatPlace(begin, begin + shape.numel(), shape)
        self.weights, self.gradients = self.like(torch.float32), self.like(torch.float32)
        for name, parameter in self.parameters.items():
            self.weights.views[name].copy_(parameter.data)
        for name, parameter in (self.parameters | self.named).items():
            parameter.data = self.weights.views[name]
        self.adopt_gradients()
        self.shadow = self.like(shadow_dtype) if shadow_dtype is not None else None
        """a copy of the weights, rounded to the nearest, which each update by `FlatSteps` writes along"""
        self.cast_shadow()

    def _place(self, names: Iterable[str], begin: int) -> int:
        """Place parameters one after the other from an element on, and return the end of the last one."""
        for name in names:
            shape = self.parameters[name].shape
            self.places[name] = FlatPlace(begin, begin + -(-shape.numel() // LINE) * LINE, shape)
            begin = self.places[name].end
        return begin

    def cast_shadow(self) -> None:
        """Write the shadow anew; needed where somebody else than `FlatSteps` has changed weights, as a load does."""
        if self.shadow is not None:
            self.shadow.tensor.copy_(self.weights.tensor)

    def like(self, dtype: torch.dtype) -> FlatTensor:
        """Return a flat tensor of zeros that has the parameters' layout."""
        zeros = torch.zeros(self._elements, dtype=dtype, device=self.device)
        return FlatTensor(zeros, {name: place.of(zeros) for name, place in self._every_place.items()})

    def zero(self, names: Collection[str] | None = None) -> None:
        """Set gradients to zero, and put the views back where others are.

        Args:
            names: of the parameters; None sets all by one operation.
        """
        self.show_gradients(names)
        if names is None:
            self.gradients.tensor.zero_()
        elif names:
            views = [self.gradients.views[name] for name in names]
            torch._foreach_zero_(views)  # pyright: ignore[reportPrivateImportUsage]

    def show_gradients(self, names: Iterable[str] | None = None) -> None:
        """Put the views back as the parameters' gradients, whatever took their place, and None where one is idle.

        Args:
            names: of the parameters; all if None.
        """
        for name in self.parameters if names is None else names:
            parameter, view = self.parameters[name], None if name in self.idle else self.gradients.views[name]
            if parameter.grad is not view:
                parameter.grad = view

    def drop_gradients(self) -> None:
        """Set gradients to None, so that a backward adds to nothing; `adopt_gradients` copies those that it leaves.

        Gradients that are written without autograd, in their place, are set to zero.
        """
        for name in self.parameters.keys() - self.unseen:
            self.parameters[name].grad = None
        self.zero(self.unseen)

    @torch.no_grad()
    def adopt_gradients(self, names: Iterable[str] | None = None) -> list[torch.Tensor]:
        """Copy gradients that are not the flat tensor's own into it, by few kernels, and put the views back.

        None counts as zero, and stays None where the parameter is idle.

        Args:
            names: of the parameters to look at; all if None.

        Returns:
            The gradients that the current stream copies; if another stream made them, hold them until it is awaited.
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
        """Keep the flat gradient, with its content, in `memory` [n] float32 from now on, such as one that peers see.

        Not once a CUDA graph has been captured, which would go on with the old memory.
        """
        tensor, views = self.gradients
        memory.copy_(tensor)
        tensor.data = memory
        for name, view in views.items():
            view.data = self._every_place[name].of(memory)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # the old memory is free, whatever stream takes it next


def copy_all(views: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> None:
    """Copy each tensor to its view, of the same shape, also from another type.

    PyTorch takes all of them by one kernel only if each pair has the same strides; one product's weight has not.
    """
    alike = [(view, tensor) for view, tensor in zip(views, tensors, strict=True) if view.stride() == tensor.stride()]
    for view, tensor in zip(views, tensors, strict=True):
        if view.stride() != tensor.stride():
            view.copy_(tensor)
    if alike:
        torch._foreach_copy_(*map(list, zip(*alike, strict=True)))  # type: ignore[arg-type]


def _slices(parameters: Mapping[str, nn.Parameter]) -> dict[str, tuple[str, int]]:
    """Return of each slice the name of its holder, made of the slices' names, and its first element there."""
    together: dict[int, list[tuple[str, TableBatchedEmbeddingSlice]]] = {}
    for name, parameter in parameters.items():
        if isinstance(parameter, TableBatchedEmbeddingSlice):
            together.setdefault(id(parameter._original_tensor), []).append((name, parameter))
    found: dict[str, tuple[str, int]] = {}
    for slices in together.values():
        names = "/".join(name for name, _ in slices)
        found |= {name: (f"lookup of {names}", each._start_offset) for name, each in slices}
    return found


def why_not_flat(parameters: Mapping[str, nn.Parameter]) -> str | None:
    """Return why `FlatParameters` cannot move parameters that take a gradient, or None if it can."""
    for name, given in parameters.items():
        parameter = given._original_tensor if isinstance(given, TableBatchedEmbeddingSlice) else given
        if type(parameter) is not nn.Parameter:
            return f"{name} is a {type(parameter).__name__} and must be a plain nn.Parameter, whose memory is its own"
        if parameter.dtype != torch.float32:
            return f"{name} is {parameter.dtype} and must be torch.float32"
    return None
