"""Launches that are repeated with most arguments unchanged: packed once, then issued in two microseconds.

Triton's launcher asks the driver about every tensor that it is given, and a launch of ours has a dozen. Here the
arguments lie in a buffer as the kernel reads them; a launch overwrites those that have changed and calls the driver.
"""

import ctypes
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch

from dlrm_overlap.kernels.compiled import INTERPRETED, CompiledKernel

# The driver's array of pointers: arguments come in one buffer, at this address, of this size.
_BUFFER_POINTER, _BUFFER_SIZE, _END = 1, 2, 0

_NUMBERS = int, float


class _Config(ctypes.Structure):
    """The driver's CUlaunchConfig."""

    _fields_ = (
        ("programs", ctypes.c_uint),
        ("programs_yz", ctypes.c_uint * 2),
        ("threads", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("attribute_count", ctypes.c_uint),
    )


class Launch:
    """A kernel with its arguments, of which some are given anew by each call.

    It belongs to one caller, whose calls follow each other: two threads must not call one at the same time. Its
    arguments must stay true: the tensors that stay are held, those that are given anew are of the type and on the
    device of the first. Nothing looks at that but Triton's interpreter, at the types.

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
        """Compile the kernel, if need be, and pack the arguments.

        Args:
            programs: of each launch; of 0 nothing is launched. None: each call says how many.
            dtypes: as `CompiledKernel` takes them.
            arguments: all run-time arguments, in the order of the names; the first is a tensor.
            changing: names of those that each call gives anew, in the order in which it does.
        """
        self._kernel, self._programs, self._dtypes = kernel, programs, dtypes
        self._arguments = list(arguments)
        self._changing = [kernel.arguments.index(name) for name in changing]
        self._device = arguments[0].device.index
        self._interpreted, self._types = INTERPRETED, [_type_of(arguments[index]) for index in self._changing]
        if not INTERPRETED and programs != 0:
            self._pack(kernel.compiled(dtypes, *arguments))
        for index in self._changing:  # else those of the first call would be held
            self._arguments[index] = None

    def _pack(self, compiled: Any) -> None:
        """Lay the arguments out as the kernel's function has its parameters, and prepare the driver's call."""
        driver, metadata = _driver(), compiled.metadata
        devices = {argument.device for argument in self._arguments if isinstance(argument, torch.Tensor)}
        assert len(devices) == 1, f"{self._kernel.name}: tensors on {' and '.join(sorted(map(str, devices)))}"
        assert metadata.global_scratch_size == metadata.profile_scratch_size == 0, "a kernel that is given no scratch"
        assert metadata.num_ctas == 1, "a launch without clusters"
        assert not metadata.launch_cooperative_grid, "a launch that is not cooperative"
        assert not metadata.launch_pdl, "a launch that waits for the one before"
        self._function = ctypes.c_void_p(compiled.function)
        places = _parameters(driver, self._function)
        # After the arguments come Triton's own, for scratch memory: of a kernel that has none, null pointers.
        assert len(places) >= len(self._arguments), f"{len(self._arguments)} arguments for {len(places)} parameters"
        assert all(size == 8 for _, size in places[len(self._arguments) :]), "parameters that are no arguments"
        self._size = ctypes.c_size_t(sum(places[-1]))
        self._buffer = ctypes.create_string_buffer(self._size.value)
        fields = []
        for argument, (offset, size) in zip(self._arguments, places, strict=False):
            fields.append(_stored(argument, size).from_buffer(self._buffer, offset))
            fields[-1].value = value = argument.data_ptr() if isinstance(argument, torch.Tensor) else argument
            assert isinstance(value, float) or fields[-1].value == value, f"{value} in a parameter of {size} bytes"
        self._fields = [fields[index] for index in self._changing]
        self._config = _Config(0, (1, 1), (32 * metadata.num_warps, 1, 1), metadata.shared)
        extra = _BUFFER_POINTER, ctypes.addressof(self._buffer), _BUFFER_SIZE, ctypes.addressof(self._size), _END
        self._extra = (ctypes.c_void_p * len(extra))(*extra)
        self._addresses = (
            ctypes.c_void_p(ctypes.addressof(self._config)),
            ctypes.c_void_p(ctypes.addressof(self._extra)),
        )
        self._call = driver.cuLaunchKernelEx

    def __call__(self, *changed: Any, programs: int | None = None) -> None:
        """Launch on the current stream, with `changed` in place of the arguments that change.

        Args:
            changed: the arguments, in the order of `changing`: tensors, int and float.
            programs: of this launch, where those of each are not the same.
        """
        if programs is None:
            programs = self._programs
            assert programs is not None, f"{self._kernel.name}: of how many programs?"
        if self._interpreted:
            arguments = list(self._arguments)
            for index, argument, kind in zip(self._changing, changed, self._types, strict=True):
                assert _type_of(argument) == kind, f"{self._kernel.name}: {_type_of(argument)}, prepared for {kind}"
                arguments[index] = argument
            self._kernel(programs, self._dtypes, *arguments)
            return
        if programs == 0:
            return
        for field, argument in zip(self._fields, changed, strict=True):
            field.value = argument if type(argument) in _NUMBERS else argument.data_ptr()
        config, extra = self._addresses
        self._config.programs = programs
        self._config.stream = torch._C._cuda_getCurrentRawStream(self._device)
        if status := self._call(config, self._function, None, extra):
            raise RuntimeError(f"{self._kernel.name}: {_error(status)}")


def _type_of(argument: Any) -> Any:
    """Return the type of a number, or of a tensor's elements."""
    return argument.dtype if isinstance(argument, torch.Tensor) else type(argument)


def _stored(argument: Any, size: int) -> Any:
    """Return how an argument is stored in a parameter of `size` bytes."""
    kinds = {torch.Tensor: "pointer", int: "integer", float: "float"}
    kind = next(kind for known, kind in kinds.items() if isinstance(argument, known))
    known = {
        ("pointer", 8): ctypes.c_uint64,
        ("integer", 8): ctypes.c_int64,
        ("integer", 4): ctypes.c_int32,
        ("float", 4): ctypes.c_float,
    }
    assert (kind, size) in known, f"{kind} in a parameter of {size} bytes"
    return known[kind, size]


@lru_cache
def _driver() -> ctypes.CDLL:
    # Its calls let other threads of Python run: one that waits for room in the stream's queue may wait for long.
    return ctypes.CDLL("libcuda.so.1")


def _parameters(driver: ctypes.CDLL, function: ctypes.c_void_p) -> list[tuple[int, int]]:
    """Return the offset and the size in bytes of each of a function's parameters."""
    found: list[tuple[int, int]] = []
    offset, size = ctypes.c_size_t(), ctypes.c_size_t()
    ask = driver.cuFuncGetParamInfo
    while ask(function, ctypes.c_size_t(len(found)), ctypes.byref(offset), ctypes.byref(size)) == 0:
        found.append((offset.value, size.value))
    return found


def _error(status: int) -> str:
    """Return the driver's text for a status."""
    text = ctypes.c_char_p()
    _driver().cuGetErrorString(status, ctypes.byref(text))
    return f"CUDA error {status}: {(text.value or b'?').decode()}"
