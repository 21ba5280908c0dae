"""Launching jitted kernels in a few microseconds."""

import inspect
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl

from dlrm_overlap.kernels.target import any_tensor_size, compile_options

TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
INTERPRETED: bool = triton.knobs.runtime.interpret


class CompiledKernel:
    """A `@triton.jit` kernel with its compile-time arguments fixed, launched by position.

    Triton's own launch inspects every argument, which takes longer than a small kernel. This class inspects arguments
    in the first launch only, so kernels and callers follow four rules, which `check` asserts:

    - Order: launches pass the run-time arguments in the order of the kernel's parameters.
    - Integers: the kernel names them in `do_not_specialize`, and annotates 64-bit ones as `tl.int64`.
    - Alignment: tensors begin at multiples of 16 bytes, except those named in `do_not_specialize_on_alignment`.
    - Types: `dtypes` has those of all tensors whose type the constants leave open.

    Example:
        scale = CompiledKernel(_scale, num_warps=4, BLOCK=1024)  # _scale(values, count, factor, BLOCK: tl.constexpr)
        scale(programs, (values.dtype,), values, values.numel(), 0.5)
    """

    def __init__(
        self,
        kernel: Any,
        *,
        num_warps: int,
        num_stages: int | None = None,
        fuse_sums: bool = True,
        registers: int | None = None,
        libraries: tuple[tuple[str, str], ...] = (),
        prepare: Callable[[int], None] | None = None,
        **constants: Any,
    ) -> None:
        """Fix the constants.

        Args:
            kernel: its `tl.constexpr` parameters come last.
            num_warps: warps of a program, of 32 lanes each.
            num_stages: loads of a pipelined loop in flight at once.
            fuse_sums: let a product and a sum become one instruction. Without, results have a CPU's bits.
            registers: limit of a thread's registers, on NVIDIA GPUs.
            libraries: name and file of each library of device functions.
            prepare: called with the module's handle before the first launch.
            constants: the `tl.constexpr` parameters, in their order. Fields of a named tuple are constants, too, but
                must not be functions, whose changes Triton's cache on disk would not see there.
        """
        constants = {name: _with_constant_fields(value) for name, value in constants.items()}
        names = tuple(inspect.signature(kernel.fn).parameters)
        self.arguments = names[: len(names) - len(constants)]
        """names of the run-time arguments"""
        assert names == (*self.arguments, *constants), f"{kernel.__name__}: its parameters do not end in {[*constants]}"
        self._kernel, self.constants, self._values = kernel, constants, tuple(constants.values())
        given: dict[str, Any] = {"num_stages": num_stages, "maxnreg": registers, "extern_libs": dict(libraries) or None}
        given["enable_fp_fusion"] = None if fuse_sums else False
        options = {"num_warps": num_warps} | {name: value for name, value in given.items() if value is not None}
        self._options = compile_options(options)
        self._prepare = prepare
        self._compiled: dict[tuple[int, tuple[torch.dtype, ...]], Any] = {}
        self._types: dict[tuple[torch.dtype, ...], list[torch.dtype]] = {}
        """dtypes of a launch -> dtypes of all its tensors, for `check`"""

    def __call__(self, programs: int, dtypes: tuple[torch.dtype, ...], *arguments: Any) -> None:
        """Launch `programs` programs on the current stream, or nothing if 0. The first of `arguments` is a tensor."""
        if programs == 0:
            return
        if INTERPRETED:
            self.check(dtypes, *arguments)
            self._kernel[(programs,)](*arguments, **self.constants, **self._options)
            return
        compiled = self.compiled(dtypes, *arguments)
        stream = torch._C._cuda_getCurrentRawStream(arguments[0].device.index)
        metadata, values = compiled.packed_metadata, self._values
        compiled.run(programs, 1, 1, stream, compiled.function, metadata, None, None, None, *arguments, *values)

    @property
    def name(self) -> str:
        return self._kernel.__name__

    def compiled(self, dtypes: tuple[torch.dtype, ...], *arguments: Any) -> Any:
        key = arguments[0].device.index, dtypes
        if key not in self._compiled:
            self.check(dtypes, *arguments)
            self._compiled[key] = self.compile(*arguments)
            if self._prepare is not None:
                self._prepare(self._compiled[key].module)
        return self._compiled[key]

    def compile(self, *arguments: Any) -> Any:
        with any_tensor_size():
            compiled = self._kernel.warmup(*arguments, **self.constants, **self._options, grid=(1,))
        compiled._init_handles()
        return compiled

    def check(self, dtypes: tuple[torch.dtype, ...], *arguments: Any) -> None:
        kernel = self._kernel
        assert len(arguments) == len(self.arguments), (
            f"{kernel.__name__}: {len(arguments)} arguments are passed; pass {', '.join(self.arguments)}"
        )
        named = vars(kernel) if isinstance(kernel, triton.JITFunction) else kernel.kwargs
        general, unaligned = named["do_not_specialize"] or (), named["do_not_specialize_on_alignment"] or ()
        for name, argument in zip(self.arguments, arguments, strict=True):
            if isinstance(argument, int):
                assert name in general, (
                    f"{kernel.__name__}: {name} is specialised on; name it in the kernel's do_not_specialize"
                )
            elif isinstance(argument, torch.Tensor) and name not in unaligned:
                assert argument.data_ptr() % 16 == 0, (
                    f"{kernel.__name__}: {name} begins {argument.data_ptr() % 16} bytes after a multiple of 16; pass "
                    f"an aligned one, or name it in the kernel's do_not_specialize_on_alignment"
                )
        types = [each.dtype for each in arguments if isinstance(each, torch.Tensor)]
        before = self._types.setdefault(dtypes, types)
        assert types == before, (
            f"{kernel.__name__}: tensors of {types} are passed after those of {before}, both with the dtypes {dtypes}; "
            f"pass in dtypes each type that differs"
        )


def in_aligned_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor that is contiguous from a multiple of 16 bytes on; a copy only if needed."""
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()


def _with_constant_fields(value: Any) -> Any:
    return value._make(map(tl.constexpr, value)) if hasattr(value, "_fields") else value


specialised = lru_cache(maxsize=None, typed=True)(CompiledKernel)
"""`CompiledKernel`, made once for each kernel and constants"""
