"""Attention to histories against plain formulas, sample by sample."""

import pytest
import torch

from dlrm_overlap.config import SequenceConfig
from dlrm_overlap.train.attention import TargetAttention, by_position

D, LENGTHS = 4, [2, 0, 5, 1, 3]  # of which 4 positions hold all but the oldest id of one history


@pytest.fixture
def attention() -> TargetAttention:
    torch.manual_seed(0)
    return TargetAttention(SequenceConfig(history=1, positions=4, heads=3), D)


def _plain(attention: TargetAttention, candidate: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return the output [D] for one sample with the rows of its history [n, D]."""
    kept = rows[:4]
    keys = torch.cat((kept + attention.position[: len(kept)], attention.position[4:]))
    queries = attention.query(candidate).view(3, D)
    weights = (queries @ keys.T / D**0.5).softmax(dim=1)
    return attention.output((weights @ keys).flatten())


def test_outputs_and_gradients_are_those_of_the_formula(attention: TargetAttention) -> None:
    rows = torch.randn(sum(LENGTHS), D, requires_grad=True)
    candidates = torch.randn(len(LENGTHS), D, requires_grad=True)
    wanted = torch.stack([_plain(attention, *each) for each in zip(candidates, rows.split(LENGTHS), strict=True)])
    inputs = [candidates, rows, *attention.parameters()]
    upstream = torch.randn_like(wanted)
    expected = torch.autograd.grad(wanted, inputs, upstream)
    # A captured step's tensor of rows is as large as its bound, and may hold anything after the last row.
    beyond = torch.cat((rows, torch.full((3, D), torch.nan)))
    found = attention(candidates, beyond, torch.tensor(LENGTHS, dtype=torch.int32))
    torch.testing.assert_close(found, wanted)
    for name, ours, theirs in zip(
        ["candidates", "rows", *dict(attention.named_parameters())],
        torch.autograd.grad(found, inputs, upstream),
        expected,
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, msg=lambda text, name=name: f"{name}: {text}")


def test_no_history_at_all(attention: TargetAttention) -> None:
    candidates = torch.randn(2, D)
    found = attention(candidates, torch.zeros(0, D), torch.zeros(2, dtype=torch.int64))
    torch.testing.assert_close(found[0], _plain(attention, candidates[0], torch.zeros(0, D)))


def test_order_counts(attention: TargetAttention) -> None:
    rows, lengths = torch.randn(3, D), torch.tensor([3])
    ways = [attention(torch.ones(1, D), each, lengths) for each in (rows, rows.flip(0))]
    assert (ways[0] - ways[1]).abs().max() > 1e-3


def test_rows_by_position() -> None:
    rows, is_there = by_position(torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([1, 0, 2]), 2)
    assert rows.tolist() == [[[1], [0]], [[0], [0]], [[2], [0]]]
    assert is_there.tolist() == [[True, False], [False, False], [True, False]]


def test_nothing_is_read_back(attention: TargetAttention) -> None:
    """Tensors of the meta device have sizes and no values, so whoever asks for a value fails."""
    meta = attention.to("meta")
    rows = torch.empty(64, D, device="meta", requires_grad=True)
    lengths = torch.empty(8, dtype=torch.int32, device="meta")
    found = meta(torch.empty(8, D, device="meta"), rows, lengths)
    found.sum().backward()
    assert found.shape == (8, D)
    with pytest.raises(RuntimeError):
        lengths.max().item()
