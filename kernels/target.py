"""What differs between the GPUs that kernels are compiled for: NVIDIA's, and AMD's, on which nothing has been run."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import triton
from triton.language import core

ON_AMD = torch.version.hip is not None
"""whether this torch drives AMD GPUs"""
_LANES, _AMD_LANES = 32, 64  # of a warp


def compile_options(options: Mapping[str, Any], on_amd: bool = ON_AMD) -> dict[str, Any]:
    """Return a kernel's options for the GPUs of one vendor.

    Kernels state their warps of 32 lanes. On AMD half as many have as many threads; one warp stays one, of 64 lanes.
    Triton has no limit of registers there.
    """
    if not on_amd:
        return dict(options)
    num_warps = max(1, options["num_warps"] * _LANES // _AMD_LANES)
    return {name: value for name, value in options.items() if name != "maxnreg"} | {"num_warps": num_warps}


@contextmanager
def any_tensor_size(on_amd: bool = ON_AMD) -> Iterator[None]:
    """In the context, Triton compiles kernels for tensors of any size.

    For AMD it would else specialise on tensors below 2 GB, and a kernel is compiled once for tensors of all sizes.
    """
    if not on_amd:
        yield
        return
    with triton.knobs.amd.scope():
        triton.knobs.amd.use_buffer_ops = False
        yield


# Constants of device code, which a compilation evaluates for its target. The interpreter does not know them.


@core.builtin
def is_amd(_semantic=None):  # type: ignore[no-untyped-def]
    return core.constexpr(_semantic.builder.options.backend_name == "hip")


@core.builtin
def has_tma(_semantic=None):  # type: ignore[no-untyped-def]
    """Return whether bulk copies (TMA) exist: on Hopper and later."""
    options = _semantic.builder.options
    return core.constexpr(options.backend_name == "cuda" and int(options.arch.removeprefix("sm")) >= 90)


@core.builtin
def num_threads(_semantic=None):  # type: ignore[no-untyped-def]
    options = _semantic.builder.options
    return core.constexpr(options.num_warps * options.warp_size)
