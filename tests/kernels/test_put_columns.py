import pytest
import torch

from dlrm_overlap.kernels.forward.put_columns import PutColumns, put_columns
from tests.agreement import assert_same
from tests.kernels.emulation import GUARD, interpreted

SIZES = (3, 0, 5)  # samples of the node's ranks


@interpreted
@pytest.mark.parametrize(
    ("shards", "stride", "dtype", "word"),
    [
        ([(4, 8), (8, 12)], 20, torch.float32, 8),
        ([(12, 0), (4, 20)], 24, torch.bfloat16, 8),
        ([(4, 2), (4, 14)], 18, torch.float16, 4),
        ([(260, 4)], 268, torch.float32, 8),
        ([], 4, torch.float32, 8),
    ],
)
def test_the_columns_of_a_message_are_put_into_the_windows_and_nothing_else(
    shards: list[tuple[int, int]], stride: int, dtype: torch.dtype, word: int
) -> None:
    pitch = -(-sum(dim for dim, _ in shards) // 8) * 8
    message = torch.randn(sum(SIZES), pitch, generator=torch.Generator().manual_seed(0)).to(dtype)
    windows = [torch.full((7, stride), GUARD, dtype=dtype) for _ in SIZES]
    expected = [window.clone() for window in windows]
    first = 0
    for window, samples in zip(expected, SIZES, strict=True):
        column = 0
        for dim, into in shards:
            window[:samples, into : into + dim] = message[first : first + samples, column : column + dim]
            column += dim
        first += samples
    put = PutColumns.of(shards, stride, dtype.itemsize, torch.device("cpu"))
    assert put.word_bytes == word
    addresses = torch.tensor([window.data_ptr() for window in windows])
    first_sample = torch.tensor([10, *SIZES]).cumsum(0).int()  # the node's first rank is not the first of all
    put_columns(message, put, addresses, first_sample, stride, max(SIZES), here=1)
    for rank, window in enumerate(windows):
        assert_same(window, expected[rank], f"window of rank {rank}")
