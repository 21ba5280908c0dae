"""Attention to histories against plain formulas, sample by sample."""

import pytest
import torch

from dlrm_overlap.config import SequenceConfig
from dlrm_overlap.train.attention import TargetAttention, pages_of

D = 4


def _attention(positions: int = 4) -> TargetAttention:
    torch.manual_seed(0)
    return TargetAttention(SequenceConfig(history=1, positions=positions, heads=3), D)


def _plain(attention: TargetAttention, candidate: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return the output [D] for one sample with the rows of its history [n, D]."""
    kept = rows[: len(attention.position) - 1]
    keys = torch.cat((kept + attention.position[: len(kept)], attention.position[-1:]))
    queries = attention.query(candidate).view(3, D)
    weights = (queries @ keys.T / D**0.5).softmax(dim=1)
    return attention.output((weights @ keys).flatten())


@pytest.mark.parametrize("autocast", [False, True], ids=["float64", "bf16"])
@pytest.mark.parametrize(
    ("positions", "lengths"),
    # Positions hold all but the oldest ids of one history; those of the second case take pages of 128.
    [(4, [2, 0, 5, 1, 3]), (300, [128, 129, 0, 303, 256, 300, 1]), (128, [128, 0])],
)
def test_outputs_and_gradients_are_those_of_the_formula(positions: int, lengths: list[int], autocast: bool) -> None:
    attention = _attention(positions).double()
    rows = torch.randn(sum(lengths), D, dtype=torch.float64, requires_grad=True)
    candidates = torch.randn(len(lengths), D, dtype=torch.float64, requires_grad=True)
    wanted = torch.stack([_plain(attention, *each) for each in zip(candidates, rows.split(lengths), strict=True)])
    inputs = [candidates, rows, *attention.parameters()]
    upstream = torch.randn_like(wanted)
    expected = torch.autograd.grad(wanted, inputs, upstream)
    if autocast:
        attention = attention.float()
        inputs = [each.detach().float().requires_grad_() for each in inputs[:2]] + list(attention.parameters())
    # A captured step's tensor of rows is as large as its capacity, and may hold anything after the last row.
    beyond = torch.cat((inputs[1], torch.full((3, D), torch.nan)))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        found = attention(inputs[0], beyond, torch.tensor(lengths, dtype=torch.int32))
    gradients = torch.autograd.grad(found, inputs, upstream.to(found.dtype))
    names = ["output", "candidates", "rows", *dict(attention.named_parameters())]
    for name, ours, theirs in zip(names, [found, *gradients], [wanted, *expected], strict=True):
        away = (ours - theirs).norm() / theirs.norm()
        assert away < (1e-2 if autocast else 1e-12), f"{name}: {away:.1e} of the norm"


def test_empty_histories_give_the_output_of_the_last_position() -> None:
    attention, candidates = _attention(), torch.randn(2, D)
    found = attention(candidates, torch.zeros(0, D), torch.zeros(2, dtype=torch.int64))
    torch.testing.assert_close(found[0], _plain(attention, candidates[0], torch.zeros(0, D)))
    assert attention(candidates[:0], torch.zeros(0, D), torch.zeros(0, dtype=torch.int64)).shape == (0, D)


def test_the_pages_of_a_small_example_are_those_by_hand() -> None:
    found = pages_of(torch.tensor([4, 1]), rows=6, positions=3, page_size=2)
    assert found.rows.tolist() == [[0, 1], [2, 0], [4, 0], [0, 0], [0, 0], [0, 0]]
    assert found.page.tolist() == [[0, 1, 5], [2, 5, 5]]
    assert found.entry.tolist() == [0, 1, 2, 11, 4, 11]
    assert found.is_empty.int().tolist() == [[[0, 0, 0, 1, 1, 1]], [[0, 1, 1, 1, 1, 1]]]


def test_attention_reads_no_value_back_from_the_device() -> None:
    meta = _attention().to("meta")  # whose tensors have sizes and no values: to ask for a value fails
    rows = torch.empty(64, D, device="meta", requires_grad=True)
    lengths = torch.empty(8, dtype=torch.int32, device="meta")
    found = meta(torch.empty(8, D, device="meta"), rows, lengths)
    found.sum().backward()
    assert found.shape == (8, D)
    with pytest.raises(RuntimeError):  # as it would if attention read a value
        lengths.max().item()
