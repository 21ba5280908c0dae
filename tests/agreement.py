"""What agrees: tolerances and the comparison of tensors. Imports no pytest: ranks run where it is missing."""

import torch

# Relative tolerance of each training loss against a run that must agree up to rounding. One table, the same in CI.
LOSS_TOLERANCE = {
    "adagrad": 1e-5,
    "rowwise_adagrad": 1e-5,
    "sgd": 1e-4,  # at a large learning rate, which amplifies rounding, but shows a wrong gradient scale at once
    "bf16_wire": 2e-5,  # both sides round to bfloat16, which by itself changes losses by 8e-5 in 20 steps
}
EVAL_TOLERANCE = 1e-5


def assert_same(actual: torch.Tensor, expected: torch.Tensor, name: str) -> None:
    """Check that two tensors are equal bit for bit, NaN to NaN, and name the first place where they are not."""
    assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype), name
    different = (actual != expected) & ~(actual.isnan() & expected.isnan())
    if different.any():
        place = tuple(different.nonzero()[0].tolist())
        found, wanted = actual[place].item(), expected[place].item()
        count = f"{int(different.sum())} of {actual.numel()} elements differ"
        raise AssertionError(f"{name} at {place}: {found!r} in place of {wanted!r}; {count}")
