"""Launches that are prepared once, then issued in two microseconds each, and the cache that finds them again.

Triton's launcher asks the driver about every tensor argument. A `Launch` keeps the arguments in a buffer, laid out as
the kernel reads them; a call overwrites those that have changed (docs/results/lab.md). On AMD GPUs, where nothing has
been run, a `Launch` uses Triton's launcher, which takes some microseconds more.
"""

import ctypes
from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache, wraps
from operator import attrgetter
from typing import Any, Generic, TypeVar, TypeVarTuple

import torch
from torch.cuda import is_current_stream_capturing, is_initialized

from dlrm_overlap.kernels.compiled import INTERPRETED, CompiledKernel
from dlrm_overlap.kernels.target import ON_AMD

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")
Arguments = TypeVarTuple("Arguments")

_MOST = 64  # values that no capture has used: batch sizes and learning rates rarely change
_NONE: Any = object()


class StepCache(Generic[Key, Value]):
    """Caches values by keys such as batch sizes: every value that a capture has used, and the 64 others used last.

    A CUDA graph holds addresses of its kernels' tensors, but no references, so values used during a capture are held as
    long as the cache. Others may be dropped: kernels that read them are issued before the next owner of their memory
    uses it. A value must hold the tensors that it is made from.
    """

    def __init__(self) -> None:
        self._captured: dict[Key, Value] = {}
        self._others: dict[Key, Value] = {}
        """the value used longest ago first"""
        self._replaced: list[Value] = []
        """captured values that `get` does not return any more"""

    def __len__(self) -> int:
        return len(self._captured) + len(self._others)

    def get(self, key: Key, make: Callable[[*Arguments], Value], *arguments: *Arguments) -> Value:
        """Return the value of `key`, or of `make(*arguments)`, which may call `forget`, but not `get`."""
        value = self._others.pop(key, _NONE)  # taken out and put back last, which is cheap: a step asks often
        if value is _NONE:
            if key in self._captured:
                return self._captured[key]
            value = make(*arguments)
            if len(self._others) >= _MOST:
                del self._others[next(iter(self._others))]
        if is_initialized() and is_current_stream_capturing():
            self._captured[key] = value
        else:
            self._others[key] = value
        return value

    def forget(self) -> None:
        """Let all values be made again; values that captures have used are held."""
        self._replaced += self._captured.values()
        self._captured, self._others = {}, {}


_TYPE, _DEVICE = attrgetter("dtype"), torch.Tensor.get_device

Owner = TypeVar("Owner")
Prepared = TypeVar("Prepared")


def prepared(
    make: Callable[[Owner, Sequence[torch.Tensor], *Arguments], Prepared],
) -> Callable[[Owner, Sequence[torch.Tensor], *Arguments], Prepared]:
    """Make a method that prepares launches return the launches of an earlier call with the same key.

    The method takes the tensors that each call of a launch gives, whose types and devices are in the key, then
    everything else that the launch is made from, which is hashable.

    Example:
        @prepared
        def _scaling(self, tensors, factor) -> Launch:
            return prepare_scale(*tensors, factor)

        self._scaling((values,), 0.5)(values)
    """

    @wraps(make)
    def find(owner: Owner, tensors: Sequence[torch.Tensor], *arguments: *Arguments) -> Prepared:
        key = make, arguments, *map(_TYPE, tensors), *map(_DEVICE, tensors)
        try:
            launches = owner._prepared_launches  # type: ignore[attr-defined]
        except AttributeError:
            launches = launches_of(owner)
        return launches.get(key, make, owner, tensors, *arguments)

    return find


def launches_of(owner: Any) -> StepCache[tuple[Any, ...], Any]:
    """Return the cache of an object's `prepared` methods; `forget` it if the object's tensors move."""
    return vars(owner).setdefault("_prepared_launches", StepCache())


# The driver's array of pointers: arguments are in one buffer, at this address, of this size.
_BUFFER_POINTER, _BUFFER_SIZE, _END = 1, 2, 0

_NUMBERS = int, float


class _Config(ctypes.Structure):
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
    """A kernel with its arguments; each call gives some of them again.

    Two threads must not call it at the same time. It holds the tensors that stay. The tensors of a call have the type
    and the device of the first ones, which is not checked, except for types where Triton launches.

    Example:
        # for a kernel _scale(values, count, factor, BLOCK: tl.constexpr)
        launch = Launch(scale, programs, (values.dtype,), (values, values.numel(), 0.5), changing=("values",))
        launch(others)  # of the same number and type
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
            programs: 0 launches nothing. None: each call gives the number.
            dtypes: see `CompiledKernel`.
            arguments: all run-time arguments; the first is a tensor.
            changing: names of the arguments that each call gives, in its order.
        """
        self._kernel, self._programs, self._dtypes = kernel, programs, dtypes
        self._arguments = list(arguments)
        self._changing = [kernel.arguments.index(name) for name in changing]
        self._device = arguments[0].device.index
        self._by_triton = INTERPRETED or ON_AMD
        self._types = [_type_of(arguments[index]) for index in self._changing]
        if not INTERPRETED and programs != 0:
            compiled = kernel.compiled(dtypes, *arguments)
            if not self._by_triton:
                self._pack(compiled)
        for index in self._changing:  # do not hold the tensors of the first call
            self._arguments[index] = None

    def _pack(self, compiled: Any) -> None:
        # Check what the driver's call assumes.
        driver, metadata = _driver(), compiled.metadata
        devices = {argument.device for argument in self._arguments if isinstance(argument, torch.Tensor)}
        assert len(devices) == 1, f"{self._kernel.name}: tensors on {' and '.join(sorted(map(str, devices)))}"
        assert metadata.global_scratch_size == metadata.profile_scratch_size == 0, "a kernel without scratch memory"
        assert metadata.num_ctas == 1, "a launch without clusters"
        assert not metadata.launch_cooperative_grid, "a launch that is not cooperative"
        assert not metadata.launch_pdl, "a launch that waits for the one before"
        self._function = ctypes.c_void_p(compiled.function)
        # Fill the buffer. Triton's own parameters follow: pointers to scratch memory, null without any.
        parameters = _parameters(driver, self._function)
        assert len(parameters) >= len(self._arguments), (
            f"{len(self._arguments)} arguments for {len(parameters)} parameters"
        )
        assert all(size == 8 for _, size in parameters[len(self._arguments) :]), "parameters that are no arguments"
        self._size = ctypes.c_size_t(sum(parameters[-1]))
        self._buffer = ctypes.create_string_buffer(self._size.value)
        fields = []
        for argument, (offset, size) in zip(self._arguments, parameters, strict=False):
            fields.append(_stored(argument, size).from_buffer(self._buffer, offset))
            fields[-1].value = value = argument.data_ptr() if isinstance(argument, torch.Tensor) else argument
            assert isinstance(value, float) or fields[-1].value == value, f"{value} in a parameter of {size} bytes"
        self._fields = [fields[index] for index in self._changing]
        # Describe the launch.
        self._config = _Config(0, (1, 1), (32 * metadata.num_warps, 1, 1), metadata.shared)
        extra = _BUFFER_POINTER, ctypes.addressof(self._buffer), _BUFFER_SIZE, ctypes.addressof(self._size), _END
        self._extra = (ctypes.c_void_p * len(extra))(*extra)
        self._addresses = (
            ctypes.c_void_p(ctypes.addressof(self._config)),
            ctypes.c_void_p(ctypes.addressof(self._extra)),
        )
        self._call = driver.cuLaunchKernelEx

    def __call__(self, *changed: Any, programs: int | None = None) -> None:
        """Launch on the current stream with `changed`, in the order of `changing`: tensors, int, float."""
        if programs is None:
            programs = self._programs
            assert programs is not None, f"{self._kernel.name}: the number of programs is not given"
        if self._by_triton:
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
    return argument.dtype if isinstance(argument, torch.Tensor) else type(argument)


def _stored(argument: Any, size: int) -> Any:
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
    # A CDLL's calls release the GIL: a launch may wait long for room in the stream's queue.
    return ctypes.CDLL("libcuda.so.1")


def _parameters(driver: ctypes.CDLL, function: ctypes.c_void_p) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    offset, size = ctypes.c_size_t(), ctypes.c_size_t()
    ask = driver.cuFuncGetParamInfo
    while ask(function, ctypes.c_size_t(len(found)), ctypes.byref(offset), ctypes.byref(size)) == 0:
        found.append((offset.value, size.value))
    return found


def _error(status: int) -> str:
    text = ctypes.c_char_p()
    _driver().cuGetErrorString(status, ctypes.byref(text))
    return f"CUDA error {status}: {(text.value or b'?').decode()}"
