from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from dlrm_overlap.dense import gradients
from dlrm_overlap.dense.flat import FlatParameters
from dlrm_overlap.dense.gradients import GradientBuckets
from tests.agreement import assert_same
from tests.conftest import refuses

LAYERS = 4


class Chain(nn.Module):
    """Four layers of 4 KiB of weights; after them, though registered before, one that is used on demand."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(32, 32, bias=False)
        self.layers = nn.ModuleList(nn.Linear(32, 32, bias=False) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor, spare: bool = False) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.spare(x) if spare else x


class Reductions:
    """Stands in for a group of two ranks with equal gradients; its log has the numbers of elements reduced."""

    def __init__(self) -> None:
        self.log: list[Any] = []
        self.dtypes: set[torch.dtype] = set()

    def all_reduce(self, tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None) -> None:
        if op != dist.ReduceOp.MIN:  # of which gradients there are: the same on both
            self.log.append(tensor.numel())
            self.dtypes.add(tensor.dtype)
            tensor.mul_(2)

    def taken(self) -> list[Any]:
        log, self.log = self.log, []
        return log


@pytest.fixture
def reductions(monkeypatch: pytest.MonkeyPatch) -> Reductions:
    reductions = Reductions()
    monkeypatch.setattr(gradients.dist, "get_world_size", lambda group: 2)
    monkeypatch.setattr(gradients.dist, "all_reduce", reductions.all_reduce)
    return reductions


SAMPLES = torch.randn(8, 32, generator=torch.Generator().manual_seed(0))


def _make(
    bucket_kilobytes: int, shards: Sequence[str] = (), group: Any = None, **options: Any
) -> tuple[Chain, FlatParameters, GradientBuckets]:
    model = Chain()
    flat = FlatParameters(dict(model.named_parameters()), shards)
    return model, flat, GradientBuckets(flat, group, bucket_bytes=bucket_kilobytes << 10, **options)


def _backward(model: Chain, spare: bool = False) -> dict[str, torch.Tensor]:
    """Run a backward, and return the gradients that this rank alone has."""
    twin = Chain()
    twin.load_state_dict(model.state_dict())
    twin(SAMPLES, spare).square().mean().backward()
    model(SAMPLES, spare).square().mean().backward()
    return {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in twin.named_parameters()}


def _assert_gradients(flat: FlatParameters, expected: dict[str, torch.Tensor]) -> None:
    for name, gradient in expected.items():
        assert_same(flat.gradients.views[name], gradient, name)


def test_the_first_step_is_reduced_when_it_is_finished(reductions: Reductions) -> None:
    model, flat, buckets = _make(8)
    flat.gradients.tensor.fill_(1.0)  # of an earlier step
    flat.drop_gradients()
    expected = _backward(model)
    assert list(flat.positions) == [*(f"layers.{layer}.weight" for layer in (3, 2, 1, 0)), "spare.weight"]
    assert reductions.taken() == []
    buckets.finish()
    _assert_gradients(flat, expected)
    assert reductions.taken() == [2048, 2048, 1024]
    assert buckets.ranges == [(0, 2048), (2048, 4096), (4096, 5120)]


def test_a_bucket_is_reduced_as_soon_as_it_is_complete(reductions: Reductions) -> None:
    model, flat, buckets = _make(4)
    _backward(model, spare=True)
    buckets.finish()
    for number, layer in enumerate(model.layers.parameters()):
        layer.register_post_accumulate_grad_hook(lambda _, n=f"{number}": reductions.log.append(n))
    reductions.taken()
    for clear in (flat.zero, flat.drop_gradients):
        clear()
        expected = _backward(model, spare=True)
        # Each layer's comes before this test's hook; the spare one's was complete first, and waits for its turn.
        assert reductions.taken() == [1024, "3", 1024, "2", 1024, "1", 1024, 1024, "0"]
        buckets.finish()
        assert reductions.taken() == []
        _assert_gradients(flat, expected)


def test_shards_are_never_reduced_and_are_updated_first(reductions: Reductions) -> None:
    shards = ["layers.1.weight", "layers.3.weight"]
    model, flat, buckets = _make(1, shards)
    _backward(model)
    buckets.finish()
    assert list(flat.positions) == ["layers.2.weight", "layers.0.weight", "spare.weight", *reversed(shards)]
    reductions.taken()
    flat.drop_gradients()
    expected = _backward(model)
    assert reductions.taken() == [1024, 1024, 1024]
    assert list(buckets.finish_in_ranges()) == [(3072, 5120), (0, 3072)]
    assert reductions.taken() == []
    _assert_gradients(flat, expected)


@pytest.mark.parametrize(
    ("spare", "message"),
    [
        (True, "spare.weight got no gradient in this step, but one in the first, .* in every step"),
        (False, "spare.weight got a gradient in this step, but none in the first, "),
    ],
)
def test_the_parameters_that_get_gradients_must_not_change(reductions: Reductions, spare: bool, message: str) -> None:
    model, flat, buckets = _make(4)
    _backward(model, spare)
    for _ in range(2):
        buckets.finish()
        flat.zero()
        expected = _backward(model, spare)
    buckets.finish()
    _assert_gradients(flat, expected)
    flat.zero()

    with refuses(f"^dense gradients: {message}"):
        _backward(model, not spare)
        buckets.finish()


def test_a_parameter_without_a_gradient_is_not_updated(reductions: Reductions) -> None:
    """By AdamW, as under DDP; its bucket waits for the other gradients only."""
    model, flat, buckets = _make(4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    before = model.spare.weight.data.clone()
    _backward(model)
    for _ in range(2):
        buckets.finish()
        assert model.spare.weight.grad is None
        optimizer.step()
        flat.zero()
        reductions.taken()
        _backward(model)
        assert reductions.taken() == [1024] * 5
    assert_same(model.spare.weight.data, before, "unused weight")
    assert model.spare.weight not in optimizer.state
    assert model.layers[0].weight in optimizer.state


def test_gradients_that_are_not_the_flat_tensors_are_reduced(reductions: Reductions) -> None:
    model, flat, buckets = _make(4)
    _backward(model)
    buckets.finish()
    flat.zero()
    model.zero_grad(set_to_none=True)
    _assert_reduced(model, flat, buckets)


def _assert_reduced(model: Chain, flat: FlatParameters, buckets: GradientBuckets) -> None:
    """Check the gradients after a backward."""
    expected = _backward(model)
    buckets.finish()
    _assert_gradients(flat, expected)
    for name, view in flat.gradients.views.items():
        assert flat.parameters[name].grad is (None if name in flat.idle else view)


def test_gradients_are_sent_in_bfloat16_if_asked(reductions: Reductions) -> None:
    model, flat, buckets = _make(4, dtype=torch.bfloat16)
    expected = _backward(model)
    buckets.finish()
    assert reductions.dtypes == {torch.bfloat16}
    assert reductions.taken() == [2048, 2048, 1024], "4 KiB are 2048 elements"
    _assert_gradients(flat, {name: gradient.bfloat16().float() for name, gradient in expected.items()})


def test_a_second_backward_without_finish_is_refused(reductions: Reductions) -> None:
    model, _, buckets = _make(4)
    _backward(model)
    with pytest.raises(RuntimeError, match=r"gradient of layers\.\d\.weight: a second one .* call finish\(\) after"):
        _backward(model)
    buckets.finish()
    _backward(model)


def test_one_rank_sends_nothing(world_of_one: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    model, flat, buckets = _make(1, group=world_of_one, dtype=torch.bfloat16)
    monkeypatch.setattr(gradients.dist, "all_reduce", None)
    _backward(model)
    buckets.finish()
    for _ in range(2):
        flat.zero()
        _assert_reduced(model, flat, buckets)
