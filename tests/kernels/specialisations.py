"""What Triton compiles a kernel for: its constants, its options, and the types of its arguments."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from dlrm_overlap.kernels.compiled import CompiledKernel

_TYPES = {
    torch.float64: "fp64", torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16",
    torch.int64: "i64", torch.int32: "i32", torch.int16: "i16", torch.int8: "i8", torch.uint8: "u8",
}  # fmt: skip


class Specialisation(NamedTuple):
    made: CompiledKernel
    types: tuple[str, ...]
    """of the run-time arguments, as Triton writes them: *bf16, i64"""

    @staticmethod
    def of(made: CompiledKernel, dtypes: tuple[torch.dtype, ...], arguments: tuple[Any, ...]) -> "Specialisation":
        made.check(dtypes, *arguments)
        parameters = made._kernel.params
        pairs = zip(parameters, arguments, strict=False)  # constants are the last parameters
        types = [parameter.annotation_type or _type_of(each) for parameter, each in pairs]
        return Specialisation(made, tuple(types))

    @staticmethod
    def with_types(made: CompiledKernel, types: Mapping[str, str]) -> "Specialisation":
        """Return a specialisation for arguments of `types` by name; others are i32."""
        return Specialisation(made, tuple(types.get(name, "i32") for name in made.arguments))

    @property
    def signature(self) -> dict[str, str]:
        """The type of each parameter."""
        return dict(zip(self.made.arguments, self.types, strict=True)) | dict.fromkeys(self.made.constants, "constexpr")

    @property
    def aligned(self) -> list[str]:
        """Names of the tensors that begin at multiples of 16 bytes, which `CompiledKernel.check` asserts."""
        unaligned = self.made._kernel.do_not_specialize_on_alignment
        return [name for name, kind in self.signature.items() if kind.startswith("*") and name not in unaligned]

    @property
    def name(self) -> str:
        return f"{self.made._kernel.fn.__module__.removeprefix('dlrm_overlap.kernels.')}.{self.made.name}"

    def __str__(self) -> str:
        options = " ".join(f"{name}={value}" for name, value in self.made._options.items())
        constants = " ".join(f"{name}={_text(value)}" for name, value in self.made.constants.items())
        return f"{self.name} {options} | {constants} | {' '.join(self.types)}"


def _type_of(argument: Any) -> str:
    if isinstance(argument, torch.Tensor):
        return f"*{_TYPES[argument.dtype]}"
    if isinstance(argument, TensorDescriptor):
        return f"tensordesc<{_TYPES[argument.base.dtype]}{list(argument.block_shape)}>"
    if isinstance(argument, float):
        return "fp32"
    assert isinstance(argument, int), f"{argument} is no argument of a kernel"
    return "i32" if -(2**31) <= argument < 2**31 else "i64"


def _text(value: Any) -> str:
    value = getattr(value, "value", value)  # of a constexpr
    if hasattr(value, "_fields"):
        return "(" + " ".join(f"{name}={_text(field)}" for name, field in zip(value._fields, value, strict=True)) + ")"
    return getattr(value, "__name__", None) or str(value)


@contextmanager
def noting_on_gpu() -> Iterator[dict[str, Specialisation]]:
    """Yield a dictionary to which each specialisation is added that this process launches on a GPU, by its text."""
    noted: dict[str, Specialisation] = {}
    compiled = CompiledKernel.compiled

    def compiled_and_noted(made: CompiledKernel, dtypes: Any, *arguments: Any) -> Any:
        specialisation = Specialisation.of(made, dtypes, arguments)
        noted[str(specialisation)] = specialisation
        return compiled(made, dtypes, *arguments)

    with patch.object(CompiledKernel, "compiled", compiled_and_noted):
        yield noted


@contextmanager
def noting_launches() -> Iterator[dict[str, Specialisation]]:
    """As `noting_on_gpu`, of kernels that would be launched on CPU tensors; none is executed."""
    noted: dict[str, Specialisation] = {}

    def note(made: CompiledKernel, programs: int, dtypes: tuple[torch.dtype, ...], *arguments: Any) -> None:
        if programs:
            specialisation = Specialisation.of(made, dtypes, arguments)
            noted[str(specialisation)] = specialisation

    with patch.object(CompiledKernel, "__call__", note):
        yield noted
