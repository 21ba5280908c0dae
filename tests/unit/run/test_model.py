"""The single-device model, its initial weights and its learning rates, against plain formulas."""

import itertools

import pytest
import torch
from torch import nn

from dlrm_overlap.config import EmbeddingConfig, ModelConfig, TrainConfig
from dlrm_overlap.embedding.weights import uniform_rows
from dlrm_overlap.model import DotInteraction, build_model
from dlrm_overlap.pipeline import LearningRate


def test_dot_interaction_pairs() -> None:
    torch.manual_seed(0)
    each = torch.randn(5, 4, 8)
    out = DotInteraction(4, 8)(each.flatten(1))
    pairs = [(each[:, i] * each[:, j]).sum(1) for i, j in itertools.combinations(range(4), 2)]
    torch.testing.assert_close(out, torch.cat((each[:, 0], torch.stack(pairs, 1)), 1))


def test_dot_interaction_gradient() -> None:
    interaction = DotInteraction(3, 4).double()
    x = torch.randn(2, 12, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(interaction, (x,))


@pytest.mark.parametrize("arch", ["dot", "dcn"])
def test_dense_weights_depend_on_the_seed_alone(arch: str) -> None:
    config = ModelConfig(arch=arch, cross_rank=4)  # type: ignore[arg-type]
    state = torch.random.get_rng_state()
    models = [build_model(config, EmbeddingConfig(), [7, 9], 5, seed) for seed in (0, 0, 1)]
    assert torch.equal(torch.random.get_rng_state(), state), "the caller's generator stays"
    same, again, other = ([p for n, p in m.named_parameters() if not n.startswith("embedding.")] for m in models)
    assert all(torch.equal(a, b) for a, b in zip(same, again, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(same, other, strict=True))
    assert all(p.is_meta for p in models[0].embedding.parameters()), "tables get storage by sharding"


def test_initial_rows_do_not_depend_on_the_shard() -> None:
    whole = torch.full((37, 12), torch.nan)
    uniform_rows(whole, 0, 0, 12, stream=5, bound=0.5)
    shard = torch.full((11, 4), torch.nan)
    uniform_rows(shard, 20, 8, 12, stream=5, bound=0.5)
    assert torch.equal(shard, whole[20:31, 8:])
    other = torch.empty_like(whole)
    uniform_rows(other, 0, 0, 12, stream=6, bound=0.5)
    assert not (other == whole).any()


def test_initial_rows_are_uniform() -> None:
    rows = torch.empty(2000, 50)
    uniform_rows(rows, 0, 0, 50, stream=1, bound=2.0)
    assert rows.min() >= -2
    assert rows.max() < 2
    counts = rows.histc(20, -2, 2)
    assert ((counts - 5000).abs() < 5 * 5000**0.5).all(), counts
    assert rows.mean().abs() < 5 * (4 / 12**0.5) / rows.numel() ** 0.5
    assert torch.corrcoef(torch.stack((rows[:-1].flatten(), rows[1:].flatten())))[0, 1].abs() < 0.02


class _Groups:
    def __init__(self) -> None:
        self.param_groups = [{"lr": 0.5}, {"lr": 2.0}]


def test_learning_rate_schedule() -> None:
    optimizer = _Groups()
    schedule = LearningRate(
        optimizer,  # type: ignore[arg-type]
        TrainConfig(warmup_steps=4, decay_start_step=10, decay_steps=10),
    )
    rates = []
    for step in range(24):
        schedule.set(step)
        assert optimizer.param_groups[1]["lr"] == 4 * optimizer.param_groups[0]["lr"]
        rates.append(optimizer.param_groups[0]["lr"] / 0.5)
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[4:11] == [1.0] * 7
    assert rates[15] == 0.25
    assert rates[20:] == [0.0] * 4
    schedule.set(0)
    assert optimizer.param_groups == [{"lr": 0.125}, {"lr": 0.5}]


def test_constant_learning_rate_by_default() -> None:
    schedule = LearningRate(_Groups(), TrainConfig())  # type: ignore[arg-type]
    assert {schedule.factor(step) for step in range(100)} == {1.0}


def test_head_takes_any_dense_precision() -> None:
    model = build_model(ModelConfig(), EmbeddingConfig(), [3, 3], 4, 0)
    with torch.autocast("cpu", torch.bfloat16):
        logits = model.head(model.bottom(torch.randn(6, 4)), torch.randn(6, 32))
    assert logits.shape == (6,)
    assert isinstance(model.head.logit, nn.Linear)
