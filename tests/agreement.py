"""What agrees: tolerances and the comparison of tensors. Imports no pytest: ranks run where it is missing."""

from collections.abc import Mapping
from typing import Any

import torch

# Relative tolerance of each training loss against a run that must agree up to rounding. One table, the same in CI.
LOSS_TOLERANCE = {
    "adagrad": 1e-5,
    "rowwise_adagrad": 1e-5,
    "sgd": 1e-4,  # at a large learning rate, which amplifies rounding, but shows a wrong gradient scale at once
    "programs": 1e-5,  # of 200 steps, of several optimizers
    "programs_on_gpu": 1e-3,  # where sums of some products depend on who comes first, and bfloat16 amplifies them
    "bf16_wire": 2e-5,  # both sides round to bfloat16, which by itself changes losses by 8e-5 in 20 steps
}
EVAL_TOLERANCE = 1e-5
# Tolerance of weights and optimizer states, see `assert_near`, where gradients are summed in another order.
WEIGHT_TOLERANCE = {
    "fp32": 5e-6,
    "first_moments": 3e-5,  # of gradients of both signs, which cancel
    "fp16_rows": 2e-3,  # what lies between two float16 may be rounded to the other one
    "fp16_sums": 2e-3,  # TorchRec adds partial sums up in float16, an exchange in float32
    "bf16_wire": 1e-3,  # the same of bfloat16, for some of a row's gradients and partial sums
}
# The same of pooled embeddings.
POOLED_TOLERANCE = {
    "fp32": WEIGHT_TOLERANCE["fp32"],
    "fp16_rows": 5 * WEIGHT_TOLERANCE["fp16_rows"],  # sums of up to five rows, each of which may be off by so much
    "bf16_wire": 2**-6,  # what lies between two bfloat16 may be rounded to the other one, and so may partial sums
}


def assert_same(actual: torch.Tensor, expected: torch.Tensor, name: str) -> None:
    """Check that two tensors are equal bit for bit, NaN to NaN, and name the first place where they are not."""
    assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype), name
    different = (actual != expected) & ~(actual.isnan() & expected.isnan())
    if different.any():
        place = tuple(different.nonzero()[0].tolist())
        found, wanted = actual[place].item(), expected[place].item()
        count = f"{int(different.sum())} of {actual.numel()} elements differ"
        raise AssertionError(f"{name} at {place}: {found!r} in place of {wanted!r}; {count}")


def assert_near(actual: torch.Tensor, expected: torch.Tensor, tolerance: float, name: str) -> None:
    """Check that no element is off by more than `tolerance` of its size and the mean's, and name the worst.

    Rounding is relative to what was summed, so an element near zero may be off by more of itself.
    """
    assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype), name
    if tolerance == 0 or actual.numel() == 0:
        assert_same(actual, expected, name)
        return
    actual, expected = actual.double(), expected.double()
    error = (actual - expected).abs() / (expected.abs() + expected.abs().mean()).clamp(min=1e-30)
    worst = tuple(int(i) for i in torch.unravel_index(error.argmax(), error.shape))
    assert error[worst] <= tolerance, (
        f"{name} at {worst}: {actual[worst].item()!r} in place of {expected[worst].item()!r}, "
        f"relative error {error[worst].item():.1e}"
    )


def assert_all_near(
    actual: Mapping[Any, torch.Tensor], expected: Mapping[Any, torch.Tensor], tolerance: float, what: str
) -> None:
    """Check tensors by name, see `assert_near`; exactly, where `tolerance` is 0."""
    assert list(actual) == list(expected), what
    for name, tensor in expected.items():
        assert_near(actual[name], tensor, tolerance, f"{what} {name}")


def assert_same_samples(made: Any, expected: Any) -> None:
    """Check that two batches are equal bit for bit, wherever the first one is."""
    pairs = {
        "dense": (made.dense, expected.dense),
        "lengths": (made.sparse.lengths(), expected.sparse.lengths()),
        "values": (made.sparse.values(), expected.sparse.values()),
        "labels": (made.labels, expected.labels),
    }
    for name, (actual, wanted) in pairs.items():
        assert_same(actual.cpu(), wanted.cpu(), name)
