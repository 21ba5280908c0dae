"""The oracle against torch's own operator, and TorchRec's sharded lookup against the oracle."""

import torch
from torch import nn

from dlrm_overlap.kernels.reference import pooled_lookup


def test_pooled_lookup_against_embedding_bag() -> None:
    torch.manual_seed(0)
    tables, samples, dim = [7, 1, 30], 5, 12
    weights = [torch.randn(rows, dim) for rows in tables]
    lengths = torch.randint(0, 4, (len(tables), samples), dtype=torch.int32)
    lengths[1] = 0  # a table with empty bags only
    bags = [torch.randint(0, rows, (int(n.sum()),)) for rows, n in zip(tables, lengths, strict=True)]
    pooled = pooled_lookup(weights, lengths.flatten(), torch.cat(bags).int())
    for t, (weight, bag) in enumerate(zip(weights, bags, strict=True)):
        offsets = lengths[t].long().cumsum(0) - lengths[t]
        expected = nn.functional.embedding_bag(bag, weight, offsets, mode="sum")
        torch.testing.assert_close(pooled[:, t * dim : (t + 1) * dim], expected, msg=f"table {t}")


def test_worked_example() -> None:
    weights = [torch.arange(32.0).view(8, 4), torch.arange(16.0).view(4, 4)]
    pooled = pooled_lookup(weights, torch.tensor([1, 2, 0, 1]), torch.tensor([5, 7, 7, 3]))
    expected = torch.tensor([[20.0, 21, 22, 23, 0, 0, 0, 0], [56.0, 58, 60, 62, 12, 13, 14, 15]])
    assert torch.equal(pooled, expected)


def test_half_precision_rows_are_summed_in_float32() -> None:
    weight = torch.full((1, 4), 2049.0).half()  # 2048 in fp16; 3 x 2048 = 6144 either way, 2048 + 1 is not
    weight = torch.cat((weight, torch.ones(1, 4).half()))
    pooled = pooled_lookup([weight], torch.tensor([2]), torch.tensor([0, 1]))
    assert pooled.dtype == torch.float32
    assert torch.equal(pooled, torch.full((1, 4), 2049.0))
