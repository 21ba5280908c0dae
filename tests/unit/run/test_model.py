import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torchrec.sparse.jagged_tensor import KeyedTensor

from dlrm_overlap.config import EmbeddingConfig, ModelConfig, TrainConfig
from dlrm_overlap.embedding import weights
from dlrm_overlap.embedding.weights import uniform_rows
from dlrm_overlap.predict.plain_model import PlainDLRM, _pool
from dlrm_overlap.train.assembly import LearningRate
from dlrm_overlap.train.interaction import DotInteraction
from dlrm_overlap.train.model import JoinInPlace, TrainTask, build_model, joined
from tests.agreement import assert_same


def test_the_dot_interaction_is_the_product_of_each_pair() -> None:
    torch.manual_seed(0)
    each = torch.randn(5, 4, 8)
    out = DotInteraction(4, 8)(each.flatten(1))
    pairs = [(each[:, i] * each[:, j]).sum(1) for i, j in itertools.combinations(range(4), 2)]
    torch.testing.assert_close(out, torch.cat((each[:, 0], torch.stack(pairs, 1)), 1))


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


def test_initial_rows_do_not_depend_on_the_rows_that_are_drawn_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, parts = torch.empty(37, 12), torch.empty(37, 12)
    uniform_rows(whole, 3, 0, 12, stream=5, bound=0.5)
    monkeypatch.setattr(weights, "_CHUNK_ELEMENTS", 60)
    uniform_rows(parts, 3, 0, 12, stream=5, bound=0.5)
    assert torch.equal(parts, whole)


def test_initial_rows_are_uniform() -> None:
    rows = torch.empty(2000, 50)
    uniform_rows(rows, 0, 0, 50, stream=1, bound=2.0)
    assert rows.min() >= -2
    assert rows.max() < 2
    counts = rows.histc(20, -2, 2)
    assert ((counts - 5000).abs() < 5 * 5000**0.5).all(), counts
    assert rows.mean().abs() < 5 * (4 / 12**0.5) / rows.numel() ** 0.5
    assert torch.corrcoef(torch.stack((rows[:-1].flatten(), rows[1:].flatten())))[0, 1].abs() < 0.02


@pytest.mark.parametrize("bags", [[], [[]], [[2, 2, 5], [], [6]]])
def test_plain_rows_of_16_bits_are_added_in_32(bags: list[list[int]]) -> None:
    config = ModelConfig(dim=16, bottom_mlp=[8, 16], top_mlp=[8, 1])
    model = build_model(config, EmbeddingConfig(weight_dtype="fp16"), [7, 9], 5, seed=0)
    halves = {
        name: torch.randn(tensor.shape).half() if tensor.is_meta else tensor
        for name, tensor in model.state_dict().items()
    }
    lengths = torch.tensor([len(bag) for bag in bags], dtype=torch.int64)
    ids = [(torch.tensor([*itertools.chain(*bags)], dtype=torch.int64), lengths)] * 2
    dense = torch.randn(len(bags), 5)
    found, expected = (
        PlainDLRM(config, weights, 2)(dense, ids)
        for weights in (halves, {name: tensor.float() for name, tensor in halves.items()})
    )
    assert found.shape == (len(bags), 1)
    assert torch.equal(found, expected)


class _Logits(nn.Module):
    """Stands in for the model: its dense features are the logits."""

    def forward(self, dense: torch.Tensor, sparse: None) -> torch.Tensor:
        return dense


@pytest.mark.parametrize("factors", [(1.0,), (1.0, 0.25, 3.0)])
def test_the_loss_is_the_weighted_sum_over_the_labels(factors: tuple[float, ...]) -> None:
    torch.manual_seed(0)
    logits, labels = (torch.randn(6, len(factors)).squeeze(1) for _ in range(2))
    labels = (labels > 0).float()
    model: Any = _Logits()
    batch: Any = SimpleNamespace(dense=logits, sparse=None, labels=labels)
    loss, (detached, *predictions) = TrainTask(model, "cpu", False, factors)(batch)
    chance = torch.where(labels > 0, logits.sigmoid(), 1 - logits.sigmoid())
    expected = -(chance.log() * torch.tensor(factors)).sum() / 6
    torch.testing.assert_close(loss, expected)
    assert detached == loss
    assert torch.equal(torch.stack(predictions), torch.stack((logits, labels)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_predictions_add_up_the_rows_of_each_bag(dtype: torch.dtype) -> None:
    table = torch.randn(5, 3).to(dtype)
    found = _pool(table, torch.tensor([4, 1, 1, 0]), torch.tensor([0, 3, 0, 1]))
    rows = table.float()
    torch.testing.assert_close(found, torch.stack([0 * rows[0], rows[4] + 2 * rows[1], 0 * rows[0], rows[0]]))


def test_the_learning_rate_warms_up_and_decays_by_the_square_of_the_steps_left() -> None:
    optimizer: Any = SimpleNamespace(param_groups=[{"lr": 0.5}, {"lr": 2.0}])
    schedule = LearningRate(optimizer, TrainConfig(warmup_steps=4, decay_start_step=10, decay_steps=10))
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


def _lent(values: torch.Tensor, leading: int) -> torch.Tensor:
    """Return `values` as a view that an exchange gives: with `leading` columns, here of NaN, in front of each row."""
    window = torch.full((values.shape[0], leading + values.shape[1]), torch.nan, dtype=values.dtype)
    window[:, leading:] = values
    return values.new_empty(0).set_(window.untyped_storage(), leading, values.shape, window.stride())


@pytest.mark.parametrize("keys", [["a", "b"], ["b", "a"]])
@pytest.mark.parametrize("leading", [0, 2, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_join_copies_only_without_room_or_in_another_order_or_type(
    keys: list[str], leading: int, dtype: torch.dtype
) -> None:
    dense = torch.arange(12.0).view(3, 4).bfloat16().requires_grad_()
    values = torch.arange(24.0).view(3, 8).to(dtype)
    pooled = _lent(values, leading).requires_grad_()
    embeddings = joined(dense, KeyedTensor(keys, [4, 4], pooled), ["a", "b"])
    in_order = torch.cat([values.split(4, dim=1)[keys.index(key)] for key in ("a", "b")], dim=1)
    assert_same(embeddings.detach(), torch.cat((dense.detach(), in_order.bfloat16()), dim=1), "embeddings")
    in_place = embeddings.untyped_storage().data_ptr() == pooled.untyped_storage().data_ptr()
    assert in_place == (leading == 4 and dtype == torch.bfloat16 and keys == ["a", "b"])
    gradient = torch.randn(3, 12).bfloat16()
    embeddings.backward(gradient)
    assert pooled.grad is not None
    assert dense.grad is not None
    of_tables: dict[str, torch.Tensor] = dict(zip(("a", "b"), gradient[:, 4:].split(4, dim=1), strict=True))
    assert_same(pooled.grad, torch.cat([of_tables[key] for key in keys], dim=1).to(dtype), "gradient of the embeddings")
    assert_same(dense.grad, gradient[:, :4].contiguous(), "gradient of what is in front")


def test_the_gradient_of_a_join_is_handed_out_without_a_copy() -> None:
    seen: list[torch.Tensor] = []
    parts = torch.ones(3, 4), _lent(torch.ones(3, 8), 4)
    for part in parts:
        part.requires_grad_().register_hook(seen.append)
    gradient = torch.randn(3, 12)
    JoinInPlace.apply(*parts).backward(gradient)
    assert [each.data_ptr() for each in seen] == [gradient.data_ptr(), gradient[:, 4:].data_ptr()]
    assert [each.stride() for each in seen] == [(12, 1)] * 2
