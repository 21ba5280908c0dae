"""Launching jitted kernels in a few microseconds."""

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl

TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
INTERPRETED: bool = triton.knobs.runtime.interpret


class CompiledKernel:
    """One way to compile a `@triton.jit` kernel: its compile-time arguments fixed.

    Triton's own launch inspects every argument to find what was compiled for its type and alignment, which takes the
    host longer than a small kernel takes the GPU. Here only the types in `dtypes` tell compiled kernels apart, so the
    kernel must not specialise on integers and must annotate those that may need 64 bits, and every tensor must begin at
    a multiple of 16 bytes but those that it names in `do_not_specialize_on_alignment`: Triton compiles for what divides
    the addresses that it is given first, and nothing looks at those that come later. `check` does, where a form is
    compiled and, so that tests find it, wherever kernels are interpreted.
    """

    def __init__(self, kernel: Any, options: Mapping[str, Any], constants: Mapping[str, Any]) -> None:
        """Fix the launch options, as num_warps, and the constants, which end the kernel's parameters in this order."""
        self._kernel, self._options, self.constants = kernel, options, constants
        self._values = tuple(constants.values())
        self._compiled: dict[tuple[int, tuple[torch.dtype, ...]], Any] = {}

    def __call__(self, programs: int, dtypes: tuple[torch.dtype, ...], *arguments: Any) -> None:
        """Launch `programs` programs on the current stream; none is nothing to do.

        Args:
            dtypes: of the tensors whose type the constants do not tell.
            arguments: the kernel's, constants left out; the first a tensor.
        """
        if programs == 0:
            return
        device = arguments[0].device.index
        compiled = self._compiled.get((device, dtypes))
        if compiled is None:
            self.check(*arguments)
            compiled = self._kernel[(programs,)](*arguments, **self.constants, **self._options)
            if compiled is not None:  # the interpreter compiles nothing
                self._compiled[device, dtypes] = compiled
            return
        stream = torch._C._cuda_getCurrentRawStream(device)
        metadata, values = compiled.packed_metadata, self._values
        compiled.run(programs, 1, 1, stream, compiled.function, metadata, None, None, None, *arguments, *values)

    def compile(self, *arguments: Any) -> Any:
        """Return the compiled kernel for these arguments without launching it."""
        self.check(*arguments)
        compiled = self._kernel.warmup(*arguments, **self.constants, **self._options, grid=(1,))
        compiled._init_handles()
        return compiled

    def check(self, *arguments: Any) -> None:
        """Refuse arguments that this form may not be launched with, see above."""
        kernel = self._kernel
        named = vars(kernel) if isinstance(kernel, triton.JITFunction) else kernel.kwargs
        general, unaligned = named["do_not_specialize"] or (), named["do_not_specialize_on_alignment"] or ()
        for name, argument in zip(kernel.arg_names, arguments, strict=False):
            if isinstance(argument, int):
                assert name in general, (
                    f"{kernel.__name__}: {name} is specialised on; name it in the kernel's do_not_specialize"
                )
            elif isinstance(argument, torch.Tensor) and name not in unaligned:
                assert argument.data_ptr() % 16 == 0, (
                    f"{kernel.__name__}: {name} begins {argument.data_ptr() % 16} bytes behind a multiple of 16; pass "
                    f"one that does not, or name it in the kernel's do_not_specialize_on_alignment"
                )
