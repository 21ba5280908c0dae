import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torchrec.modules.mlp import MLP

from dlrm_overlap.dense import tensor_parallel
from dlrm_overlap.dense.gemm.products import ParallelProducts
from dlrm_overlap.dense.tensor_parallel import Shard, divide_pairs, divided_layers, shards_of
from tests.agreement import assert_near, assert_same

RANKS, SAMPLES = 3, 4
TOLERANCE = 1e-5


def _mlp(activation: Any = torch.relu) -> MLP:
    torch.manual_seed(0)
    return MLP(5, [6, 4, 7, 2, 8], activation=activation)


def _divided(whole: MLP, rank: int) -> tuple[MLP, list[tuple[int, int]]]:
    mlp = copy.deepcopy(whole)
    group: Any = SimpleNamespace(rank=lambda: rank, size=lambda: RANKS)
    return mlp, divide_pairs(mlp, ParallelProducts(group, torch.device("cpu")))


def test_each_rank_has_its_shard_under_the_name_of_the_whole_parameter() -> None:
    whole = _mlp()
    state = whole.state_dict()
    for rank in range(RANKS):
        mlp, pairs = _divided(whole, rank)
        assert pairs == [(0, 1)], "3 ranks do not divide 7 neurons, and the last layer has no pair"
        assert mlp.state_dict().keys() == state.keys()
        shards = shards_of(mlp)
        shapes = {"0._linear.weight": (6, 5), "0._linear.bias": (6,), "1._linear.weight": (4, 6)}
        offsets = [(2 * rank, 0), (2 * rank,), (0, 2 * rank)]
        expected = {f"_mlp.{name}": Shard(*each) for name, *each in zip(shapes, shapes.values(), offsets, strict=True)}
        assert shards == expected
        for name, part in mlp.state_dict().items():
            first = shards[name].offsets if name in shards else [0] * part.dim()
            box = tuple(slice(begin, begin + size) for begin, size in zip(first, part.shape, strict=True))
            assert_same(part, state[name][box], name)


PAIRS = {
    "relu": (lambda: MLP(5, [6, 5]), "_mlp.1._linear.bias"),
    "no bias": (lambda: MLP(5, [6, 5], bias=False), ""),
    "gelu": (lambda: MLP(5, [6, 5], activation=nn.functional.gelu), "_mlp.1._linear.bias"),
}


@pytest.mark.parametrize("pair", PAIRS)
def test_gradients_are_parts_of_the_mean_over_the_ranks(pair: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank's pair in turn on the samples of all; stand-ins replace the gather and the scatter."""
    make, bias_name = PAIRS[pair]
    whole = make()
    samples, weights = torch.randn(RANKS * SAMPLES, 5, requires_grad=True), torch.randn(RANKS * SAMPLES, 5)
    (whole(samples) * weights).sum().div(SAMPLES * RANKS).backward()  # the mean over ranks of the mean over samples

    def scatter(x: torch.Tensor, weight: torch.Tensor, bias: Any, epilogue: str, **_: Any) -> torch.Tensor:
        partial.append(x @ weight.t())
        others = sum(partial[:-1], torch.zeros(())).detach() if len(partial) == RANKS else torch.zeros(())
        output = partial[-1] + others + (0 if bias is None else bias)
        return torch.relu(output) if epilogue == "relu" else output

    def gather(x: torch.Tensor, weight: torch.Tensor, bias: Any, epilogue: str, **_: Any) -> torch.Tensor:
        output = nn.functional.linear(x, weight, bias)
        return torch.relu(output) if epilogue == "relu" else output

    monkeypatch.setattr(tensor_parallel, "all_gather_matmul", gather)
    monkeypatch.setattr(tensor_parallel, "matmul_reduce_scatter", scatter)
    expected = {name: p.grad for name, p in whole.named_parameters() if p.grad is not None}
    of_input = torch.zeros(samples.shape)
    for rank in range(RANKS):
        partial: list[torch.Tensor] = []
        given = samples.detach().clone().requires_grad_()
        for other in [*(r for r in range(RANKS) if r != rank), rank]:
            part, _ = _divided(whole, other)
            output = part(given)
        assert_near(output, whole(samples), TOLERANCE, "output")
        (output * weights).sum().div(SAMPLES).backward()
        shards = shards_of(part)
        assert set(shards) == set(expected) - {bias_name}, "all others are divided"
        for name, shard in shards.items():
            gradient = part.get_parameter(name).grad
            assert gradient is not None
            box = tuple(slice(b, b + n) for b, n in zip(shard.offsets, gradient.shape, strict=True))
            assert_near(gradient, expected[name][box], TOLERANCE, name)
        # What data parallelism reduces: the mean over the ranks of this, whose samples are all ranks' here.
        if bias_name:
            bias = part.get_parameter(bias_name).grad
            assert bias is not None
            assert_near(bias / RANKS, expected[bias_name], TOLERANCE, "bias")
        assert given.grad is not None
        of_input += given.grad  # as the gather's backward adds what all ranks have of the samples
    # Each rank's own, of its mean over its samples: what comes before the pair is averaged over the ranks.
    assert samples.grad is not None
    assert_near(of_input / RANKS, samples.grad, TOLERANCE, "input")


def test_frozen_parameters_are_frozen_when_divided() -> None:
    whole = _mlp()
    frozen = {"_mlp.0._linear.weight", "_mlp.1._linear.bias", "_mlp.2._linear.weight"}
    for name in frozen:
        whole.get_parameter(name).requires_grad_(False)
    mlp, _ = _divided(whole, 1)
    assert {name for name, each in mlp.named_parameters() if not each.requires_grad} == frozen


def test_layers_whose_activation_has_parameters_stay_whole() -> None:
    """Such parameters are of all neurons: a rank would normalise by its own."""
    whole = MLP(5, [6, 3, 6, 3], activation="swish_layernorm")
    mlp, pairs = _divided(whole, 0)
    assert (pairs, mlp.state_dict().keys()) == ([], whole.state_dict().keys())


def test_a_copy_has_the_same_products() -> None:
    mlp, _ = _divided(_mlp(), 0)
    for layer, copied in zip(divided_layers(mlp), divided_layers(copy.deepcopy(mlp)), strict=True):
        assert copied.products is layer.products
