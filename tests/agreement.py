"""Tolerances, and comparisons of tensors. Imports no pytest: ranks run where it is missing."""

from collections.abc import Mapping
from typing import Any

import torch

# Relative tolerance of each training loss against a run that must agree except for rounding; the same in CI.
LOSS_TOLERANCE = {
    "adagrad": 1e-5,
    "rowwise_adagrad": 1e-5,
    "sgd": 1e-4,  # at a large learning rate, which amplifies rounding, but shows a wrong gradient scale at once
    "programs": 1e-5,  # of 200 steps, of several optimizers
    "programs_on_gpu": 1e-3,  # where the order of some sums changes, and bfloat16 amplifies it
    "bf16_wire": 2e-5,  # both sides round to bfloat16, which by itself changes losses by 8e-5 in 20 steps
}
EVAL_TOLERANCE = 1e-5
# Tolerance of weights and optimizer states, see `assert_near`, where gradients are summed in another order.
WEIGHT_TOLERANCE = {
    "fp32": 5e-6,
    "first_moments": 3e-5,  # of gradients of both signs, which cancel
    "fp16_rows": 2e-3,  # a number between two of float16 may be rounded to the other one
    "fp16_sums": 2e-3,  # TorchRec adds partial sums in float16, an exchange in float32
    "bf16_wire": 1e-3,  # the same in bfloat16, for some of a row's gradients and partial sums
}
# The same for pooled embeddings.
POOLED_TOLERANCE = {
    "fp32": WEIGHT_TOLERANCE["fp32"],
    "fp16_rows": 5 * WEIGHT_TOLERANCE["fp16_rows"],  # sums of up to five rows, each with this error
    "bf16_wire": 2**-6,  # a number between two of bfloat16 may be rounded to the other one, also in partial sums
}


def assert_same(actual: torch.Tensor, expected: torch.Tensor, name: str) -> None:
    """Check that two tensors are equal bit for bit, NaN to NaN, and name the first element that differs."""
    assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype), name
    different = (actual != expected) & ~(actual.isnan() & expected.isnan())
    if different.any():
        index = tuple(different.nonzero()[0].tolist())
        found, wanted = actual[index].item(), expected[index].item()
        count = f"{int(different.sum())} of {actual.numel()} elements differ"
        raise AssertionError(f"{name} at {index}: {found!r} instead of {wanted!r}; {count}")


def assert_near(actual: torch.Tensor, expected: torch.Tensor, tolerance: float, name: str) -> None:
    """Check that no element has an error above `tolerance` times its own plus the mean magnitude, and name the worst.

    Rounding is relative to the terms of a sum, so an element near zero may have a larger relative error.
    """
    assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype), name
    if tolerance == 0 or actual.numel() == 0:
        assert_same(actual, expected, name)
        return
    actual, expected = actual.double(), expected.double()
    error = (actual - expected).abs() / (expected.abs() + expected.abs().mean()).clamp(min=1e-30)
    worst = tuple(int(i) for i in torch.unravel_index(error.argmax(), error.shape))
    assert error[worst] <= tolerance, (
        f"{name} at {worst}: {actual[worst].item()!r} instead of {expected[worst].item()!r}, "
        f"relative error {error[worst].item():.1e}"
    )


def assert_all_near(
    actual: Mapping[Any, torch.Tensor], expected: Mapping[Any, torch.Tensor], tolerance: float, what: str
) -> None:
    """Check tensors by name, see `assert_near`; exactly if `tolerance` is 0."""
    assert list(actual) == list(expected), what
    for name, tensor in expected.items():
        assert_near(actual[name], tensor, tolerance, f"{what} {name}")


def assert_same_samples(made: Any, expected: Any) -> None:
    """Check that two batches, on any devices, are equal bit for bit."""
    actual, wanted = ((b.dense, b.sparse.lengths(), b.sparse.values(), b.labels) for b in (made, expected))
    for name, found, other in zip(("dense", "lengths", "values", "labels"), actual, wanted, strict=True):
        assert_same(found.cpu(), other.cpu(), name)
