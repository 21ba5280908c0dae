"""Launches that are repeated with most arguments unchanged."""

from collections.abc import Sequence
from typing import Any

import torch

from dlrm_overlap.kernels.compiled import INTERPRETED, CompiledKernel


class Launch:
    """A kernel with its arguments, of which some are given anew by each call.

    Triton's launcher asks the driver about every tensor that it is given, and a launch of ours has a dozen. So it is
    given their addresses. The arguments must stay true: the tensors that stay are held, those that are given anew are
    of the type and on the device of the first. Nothing looks at that but Triton's interpreter, at the types.

    Example:
        # for a kernel _scale(values, count, factor, BLOCK: tl.constexpr)
        launch = Launch(scale, programs, (values.dtype,), (values, values.numel(), 0.5), changing=("values",))
        launch(values)
        launch(others)  # as many, of the same type
    """

    def __init__(
        self,
        kernel: CompiledKernel,
        programs: int | None,
        dtypes: tuple[torch.dtype, ...],
        arguments: Sequence[Any],
        changing: Sequence[str] = (),
    ) -> None:
        """Compile the kernel, if need be.

        Args:
            programs: of each launch; of 0 nothing is launched. None: each call says how many.
            dtypes: as `CompiledKernel` takes them.
            arguments: all run-time arguments, in the order of the kernel's parameters; the first is a tensor.
            changing: names of those that each call gives anew, in the order in which it does.
        """
        self._kernel, self._programs, self._dtypes = kernel, programs, dtypes
        self._changing = [kernel.arguments.index(name) for name in changing]
        self._device, self._types = arguments[0].device.index, [_type_of(arguments[each]) for each in self._changing]
        if not INTERPRETED and programs != 0:
            self._compiled = kernel.compiled(dtypes, *arguments)
        # Those that change would be held if they were not left out.
        self._held = [None if index in self._changing else argument for index, argument in enumerate(arguments)]
        self._given = self._held if INTERPRETED else [_address(argument) for argument in self._held]

    def __call__(self, *changed: Any, programs: int | None = None) -> None:
        """Launch on the current stream, with `changed` in place of the arguments that change.

        Args:
            changed: the arguments, in the order of `changing`: tensors, int and float.
            programs: of this launch, where those of each are not the same.
        """
        programs = self._programs if programs is None else programs
        assert programs is not None, "of how many programs?"
        arguments = list(self._given)
        for index, argument in zip(self._changing, changed, strict=True):
            arguments[index] = argument if INTERPRETED else _address(argument)
        if INTERPRETED:
            types = [_type_of(argument) for argument in changed]
            assert types == self._types, f"{types} are given to a launch of {self._types}"
            self._kernel(programs, self._dtypes, *arguments)
        elif programs:
            self._kernel.launch(self._compiled, programs, self._device, arguments)


def _type_of(argument: Any) -> Any:
    return argument.dtype if isinstance(argument, torch.Tensor) else type(argument)


def _address(argument: Any) -> Any:
    return argument.data_ptr() if isinstance(argument, torch.Tensor) else argument
