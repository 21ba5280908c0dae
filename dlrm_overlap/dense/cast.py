"""Weights that are cast once a step, by the optimizer that writes them, and not by whoever computes with them."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from dlrm_overlap.dense.flat import FlatParameters, copy_all


class CastWeights:
    """Hands out a model's weights in the type of their shadow, and takes their gradients.

    Under autocast every product casts its weights anew, casts their gradient back, and adds it to a gradient that was
    set to zero before. Here a product is given the shadow of a weight, and all gradients are written to the flat
    gradient by one cast after the backward: nothing is set to zero and nothing is added. The numbers are autocast's.

    A step calls `begin`, computes with the weights that `of` gives, each asked for once, and calls `finish` after the
    backward. An autograd function that writes its parameters' gradients itself computes with `shadow`, and writes them
    in its backward to `places`, or hands `later` a function that does. Where the backward passes `ahead_of`, all
    gradients of then are written beside the rest of the backward, and may be reduced over the ranks meanwhile.
    """

    def __init__(self, flat: FlatParameters, cast: Collection[nn.Parameter]) -> None:
        """Take the parameters to cast, of those of `flat`; the others keep their gradients' usual way."""
        self.flat = flat
        """the parameters, which have a shadow"""
        self._name_of = {parameter: name for name, parameter in flat.parameters.items()}
        self._names = {self._name_of[parameter] for parameter in cast}
        flat.unseen |= self._names
        self._others = [name for name in flat.parameters if name not in self._names]
        self._complete: Callable[[str], None] = lambda _: None
        self._taken: dict[str, torch.Tensor] = {}
        self._later: list[tuple[list[str], Callable[[list[torch.Tensor]], None]]] = []
        self._written: set[str] = set()
        self._stream = torch.cuda.Stream(flat.device, priority=-1) if flat.device.type == "cuda" else None
        self._beside: list[Any] = []
        """tensors that the stream reads, until the current one has waited for it"""
        # Stands for the parameters in autograd, which would call their hooks though they get no gradient.
        self.anchor = torch.empty(0, device="cpu", requires_grad=True)
        """for autograd functions that write gradients themselves, and have no other input that requires one"""

    def on_complete(self, complete: Callable[[str], None]) -> None:
        """Have `complete` called with the name of each parameter whose gradient has been written, on that stream."""
        self._complete = complete

    def begin(self) -> None:
        """Begin a step: the gradients of the parameters that are not cast become zero.

        What somebody has put in a view's stead, as TorchRec's `init_state` does, is not taken for a step's gradient.
        """
        self._taken, self._later, self._written = {}, [], set()
        self.flat.show_gradients()
        self.flat.zero(self._others)

    def of(self, parameters: Mapping[str, nn.Parameter]) -> dict[str, torch.Tensor]:
        """Return weights to compute with; parameters that are not cast are returned as they are."""
        return {
            key: _CastOnce.apply(self.anchor, self.shadow(parameter), self, self._name_of[parameter])
            if self._name_of[parameter] in self._names
            else parameter
            for key, parameter in parameters.items()
        }

    def shadow(self, parameter: nn.Parameter) -> torch.Tensor:
        """Return the shadow of a parameter, without a way for autograd to its gradient."""
        assert self.flat.shadow is not None, "the parameters were made flat without shadow_dtype"
        return self.flat.shadow.views[self._name_of[parameter]]

    def later(self, parameters: Iterable[nn.Parameter], write: Callable[[list[torch.Tensor]], None]) -> None:
        """Have `write` called with where the optimizer reads the gradients of parameters, float32 and contiguous.

        So the gradient of the model's input, for which others wait, comes before gradients that nobody needs yet.
        Gradients are written in the order of these calls, and those of one call may travel while the next are computed.
        """
        names = [self._name_of[parameter] for parameter in parameters]
        assert self._names.issuperset(names), "the gradients of the other parameters are autograd's"
        self._later.append((names, write))

    def places(self, parameters: Sequence[nn.Parameter]) -> list[torch.Tensor]:
        """Return where the optimizer reads gradients of parameters, for an autograd function to write them at once."""
        self.later(parameters, lambda _: None)
        return [self.flat.gradients.views[self._name_of[parameter]] for parameter in parameters]

    def take(self, name: str, gradient: torch.Tensor) -> None:
        """Keep a parameter's gradient until `finish`."""
        self._taken[name] = gradient

    def ahead_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return `tensor`; its backward first writes the gradients taken by then, beside all that comes later.

        Example: with the bottom MLP's output, the head's gradients are written while the bottom MLP's are computed.
        """
        same = tensor.view_as(tensor)
        if same.requires_grad:
            same.register_hook(lambda _: self.write_beside())
        return same

    @torch.no_grad()
    def write_beside(self) -> None:
        """Write the gradients that have been taken by now, on a stream of their own."""
        if self._stream is None:
            self._write()
            return
        self._stream.wait_stream(torch.cuda.current_stream(self.flat.device))
        self._beside += [self._taken, self._later]
        with torch.cuda.stream(self._stream):
            self._write()

    @torch.no_grad()
    def finish(self) -> None:
        """Write the gradients of a step's backward for the optimizer; parameters without one get zeros."""
        if self._beside:
            assert self._stream is not None
            torch.cuda.current_stream(self.flat.device).wait_stream(self._stream)
            self._beside = []
        self._write()
        self.flat.zero(self._names - self._written)

    def _write(self) -> None:
        """Write the gradients that have been taken to the flat tensor, and report each as complete."""
        views = self.flat.gradients.views
        for names, write in self._later:
            write([views[name] for name in names])
            self._report(names)
        copy_all([views[name] for name in self._taken], list(self._taken.values()))
        self._report(self._taken)
        self._taken, self._later = {}, []

    def _report(self, names: Iterable[str]) -> None:
        for name in names:
            self._written.add(name)
            self._complete(name)


class _CastOnce(torch.autograd.Function):
    """The shadow of a parameter in the forward; in the backward, `CastWeights` takes its gradient."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, shadow: torch.Tensor, weights: CastWeights, name: str) -> Any:
        ctx.weights, ctx.name = weights, name
        return shadow.view_as(shadow)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[None, None, None, None]:
        ctx.weights.take(ctx.name, gradients[0])
        return None, None, None, None
