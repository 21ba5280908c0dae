import pytest
import torch
from torch import nn

from dlrm_overlap.kernels import reference


@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("most", [0, 3], ids=["empty bags", "some empty bags"])
def test_pooling_agrees_with_torchs_embedding_bag(mode: str, most: int) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(30, 12, generator=generator)
    lengths = torch.randint(0, most + 1, (9,), dtype=torch.int32, generator=generator)
    values = torch.randint(0, 30, (int(lengths.sum()),), dtype=torch.int32, generator=generator)
    offsets = lengths.cumsum(0) - lengths
    expected = nn.functional.embedding_bag(values.long(), weight, offsets, mode=mode)
    pooled = reference.pool(weight, lengths, values, mean=mode == "mean")
    torch.testing.assert_close(pooled, expected)


def test_pooling_is_as_in_its_example() -> None:
    weight = torch.arange(32.0).view(8, 4)
    pooled = reference.pool(weight, torch.tensor([1, 0, 2]), torch.tensor([5, 7, 7]))
    assert pooled.tolist() == [[20.0, 21, 22, 23], [0.0, 0, 0, 0], [56.0, 58, 60, 62]]


def test_half_precision_rows_are_summed_in_float32() -> None:
    weight = torch.tensor([[2048.0] * 4, [1.0] * 4]).half()  # 2049 is not a number of fp16
    pooled = reference.pool(weight, torch.tensor([2]), torch.tensor([0, 1]))
    assert pooled.dtype == torch.float32
    assert torch.equal(pooled, torch.full((1, 4), 2049.0))
