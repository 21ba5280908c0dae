"""Ids are stored as words, and hashed before if so asked."""

import pytest
import torch

from dlrm_overlap.kernels.ids.id_map import mix
from dlrm_overlap.kernels.reference import joined_words
from dlrm_overlap.kernels.store_words import store_words
from tests.kernels.emulation import interpreted
from tests.kernels.test_divide_ids import EXTREME, wide_ids

pytestmark = interpreted


@pytest.mark.parametrize("count", [0, 1, len(EXTREME), 3000])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("mixes", [False, True])
def test_words_are_those_of_the_ids(count: int, dtype: torch.dtype, mixes: bool) -> None:
    ids, room = wide_ids(count, torch.Generator().manual_seed(count)).to(dtype), -(-count // 4) * 4
    window = torch.full((2 * room + 4,), -7, dtype=torch.int32)
    low, high = window[:count], window[room : room + count]
    store_words(ids, low, high, mixes)
    assert torch.equal(joined_words(low, high), mix(ids.long()) if mixes else ids.long())
    rest = torch.cat([window[count:room], window[room + count :]])
    assert torch.equal(rest, torch.full_like(rest, -7))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_ids_may_begin_anywhere_in_their_memory(dtype: torch.dtype) -> None:
    """As those of some features of a batch: they are views of the ids of all features."""
    ids, low, high = torch.arange(-3, 6, dtype=dtype)[1:], *torch.empty(2, 8, dtype=torch.int32)
    store_words(ids, low, high)
    assert torch.equal(joined_words(low, high), ids.long())
