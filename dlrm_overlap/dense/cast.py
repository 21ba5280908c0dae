"""Low-precision weights that the optimizer writes once per step, instead of casts in every product."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from dlrm_overlap.dense.flat import FlatParameters, copy_all
from dlrm_overlap.dense.functions import Write


class CastWeights:
    """Provides low-precision copies of weights and collects their gradients; results equal autocast's.

    In each step call `begin`, compute with the weights of `of` (each used once), run the backward, and call `finish`.
    Autograd functions that write gradients themselves use `shadow`, and `later` or `now`.
    """

    def __init__(
        self, flat: FlatParameters, cast: Collection[nn.Parameter], in_float32: Collection[nn.Parameter] = ()
    ) -> None:
        """Provide the parameters `cast`, which belong to `flat`, as views of `flat.shadow`, which must exist.

        The model reads the parameters `in_float32` of `cast` in float32, although their gradients are collected here.
        """
        self.flat = flat
        self._name_of = {parameter: name for name, parameter in flat.parameters.items()}
        self._names = {self._name_of[parameter] for parameter in cast}
        flat.unseen |= self._names
        self._others = [name for name in flat.parameters if name not in self._names]
        self.in_float32 = {*self._others, *(self._name_of[parameter] for parameter in in_float32)}
        """names of parameters that the model reads in float32"""
        self._complete: Callable[[str], None] = lambda _: None
        self._before_reading: Callable[[], None] = lambda: None
        self._taken: dict[str, torch.Tensor] = {}
        self._later: list[tuple[list[str], Write]] = []
        self._written: set[str] = set()
        self._stream = torch.cuda.Stream(flat.device, priority=-1) if flat.device.type == "cuda" else None
        self._in_use: list[Any] = []
        """tensors that `_stream` reads, kept until the current stream has waited for `_stream`"""
        # Used instead of the parameters: autograd would call their hooks even without a gradient.
        self.anchor = torch.empty(0, device="cpu", requires_grad=True)
        """input that requires a gradient, for autograd functions that write the parameters' gradients themselves"""

    def on_complete(self, complete: Callable[[str], None]) -> None:
        """Call `complete` with a parameter's name once its gradient is written; the writing stream is then current.

        Work that this stream has waited for includes all that reads the parameter or its copy in this step, so that
        both may be overwritten (`dense.owner_updates`).
        """
        self._complete = complete

    def on_read(self, before_reading: Callable[[], None]) -> None:
        """Call `before_reading` before a forward reads a low-precision copy, possibly several times a step."""
        self._before_reading = before_reading

    def begin(self) -> None:
        """Begin a step: gradients are views of the flat tensor, zero for parameters that are not cast."""
        self._taken, self._later, self._written = {}, [], set()
        self.flat.show_gradients()
        self.flat.zero(self._others)

    def of(self, parameters: Mapping[str, nn.Parameter]) -> dict[str, torch.Tensor]:
        return {
            key: _CastOnce.apply(self.anchor, self.shadow(parameter), self, self._name_of[parameter])
            if self._name_of[parameter] in self._names
            else parameter
            for key, parameter in parameters.items()
        }

    def shadow(self, parameter: nn.Parameter) -> torch.Tensor:
        assert self.flat.shadow is not None, "the parameters were made flat without shadow_dtype"
        self._before_reading()
        return self.flat.shadow.views[self._name_of[parameter]]

    def later(self, parameters: Iterable[nn.Parameter], write: Write) -> None:
        """Defer the gradients of `parameters` to `write_concurrently` or `finish`, which calls `write` for them.

        `write` gets a contiguous float32 tensor per parameter and writes the gradient there. Deferred functions are
        called in the order of the flat gradient; the gradients of one may be reduced over the ranks while the next one
        runs.
        """
        names = [self._name_of[parameter] for parameter in parameters]
        assert self._names.issuperset(names), "the gradients of the other parameters are autograd's"
        self._later.append((names, write))

    def now(self, parameters: Sequence[nn.Parameter], write: Write) -> None:
        """Call `write` as `later` does, but at once. The gradients complete when `later` would have written them."""
        write([self.flat.gradients.views[self._name_of[parameter]] for parameter in parameters])
        self.later(parameters, lambda _: None)

    def take(self, name: str, gradient: torch.Tensor) -> None:
        self._taken[name] = gradient

    def ahead_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return `tensor`; its backward first calls `write_concurrently`."""
        same = tensor.view_as(tensor)
        if same.requires_grad:
            same.register_hook(lambda _: self.write_concurrently())
        return same

    @torch.no_grad()
    def write_concurrently(self) -> None:
        if self._stream is None:
            self._write()
            return
        self._stream.wait_stream(torch.cuda.current_stream(self.flat.device))
        self._in_use += [self._taken, self._later]
        with torch.cuda.stream(self._stream):
            self._write()

    @torch.no_grad()
    def finish(self) -> None:
        """Write the remaining gradients, and zeros for parameters without one."""
        if self._in_use:
            assert self._stream is not None
            torch.cuda.current_stream(self.flat.device).wait_stream(self._stream)
            self._in_use = []
        self._write()
        self.flat.zero(self._names - self._written)

    def _write(self) -> None:
        views, positions = self.flat.gradients.views, self.flat.positions
        for names, write in sorted(self._later, key=lambda each: min(positions[name] for name in each[0])):
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
    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, shadow: torch.Tensor, weights: CastWeights, name: str) -> Any:
        ctx.weights, ctx.name = weights, name
        return shadow.view_as(shadow)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[None, None, None, None]:
        ctx.weights.take(ctx.name, gradients[0])
        return None, None, None, None
