"""Which runs average dense gradients by stores."""

import pytest
import torch

from dlrm_overlap.dense.functions import store_options


@pytest.mark.parametrize(
    ("dense_reduce", "device", "reaches_all", "stores"),
    [
        ("auto", "cuda", True, True),
        ("auto", "cuda", False, False),
        ("stores", "cuda", False, True),
        ("collective", "cuda", True, False),
        ("auto", "cpu", True, False),
        ("stores", "cpu", True, False),
    ],
)
def test_gradients_are_stored_where_all_ranks_are_reached_or_it_is_asked_for(
    dense_reduce: str, device: str, reaches_all: bool, stores: bool
) -> None:
    found = store_options(dense_reduce, torch.device(device), reaches_all, 7.0)
    assert (found is not None) == stores
    assert found is None or found.wait_timeout_s == 7.0
