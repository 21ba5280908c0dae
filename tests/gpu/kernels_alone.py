"""Tests of `tests/kernels` on one GPU, in one process, with compiled kernels, which are interpreted elsewhere.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --report-api-errors no python -m tests.gpu.kernels_alone \
        tests/kernels -k "divide_ids or pull_ids or add_partials"

Arguments are pytest's. Ranks are windows in the memory of one GPU. Without a cache every tensor is a separate
allocation, so the sanitizer finds reads and writes beyond its ends. Random numbers are a CPU's. A test may fail here
if it makes tensors on a named device, or compares bits with a twin whose sums on a GPU have no fixed order.
"""

import sys
from collections.abc import Sequence
from typing import Any

import pytest
import torch


def main() -> int:
    """Run the tests on the GPU; return pytest's exit code."""
    if not torch.cuda.is_available():
        sys.exit("tests.gpu.kernels_alone: needs an NVIDIA GPU; without one, run pytest tests/kernels")
    return run_on(torch.device("cuda"), sys.argv[1:])


def run_on(device: torch.device, argv: Sequence[str]) -> int:
    """Run the tests that `argv` names with their tensors on `device`."""
    torch.set_default_device(device)
    for name in ("rand", "randint", "randn", "randperm"):
        setattr(torch, name, _moved(getattr(torch, name), device))
    from tests.kernels import emulation  # after the default device is set, since it makes tensors

    emulation.interpreted, emulation.CPU = pytest.mark.filterwarnings("default"), device
    emulation.to_wire = lambda pooled, wire: pooled.to(wire)  # a GPU rounds to the nearest
    return pytest.main(["-q", "-m", "not slow", *argv])


def _moved(draw: Any, device: torch.device) -> Any:
    return lambda *args, **options: draw(*args, **{**options, "device": "cpu"}).to(device)


if __name__ == "__main__":
    sys.exit(main())
