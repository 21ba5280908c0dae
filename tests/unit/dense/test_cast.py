"""Weights that are cast once a step compute what autocast computes, and get its gradients, bit for bit."""

from functools import partial

import pytest
import torch
from torch import nn

from dlrm_overlap.config import EmbeddingConfig, ModelConfig
from dlrm_overlap.dense.cast import CastWeights
from dlrm_overlap.dense.flat import FlatParameters
from dlrm_overlap.dense.flat_steps import FlatSteps, take_steps
from dlrm_overlap.train.dense_part import cast_once, in_flat_order
from dlrm_overlap.train.model import TrainTask, build_model
from tests.agreement import assert_near, assert_same

LR, FEATURES, TABLES, SAMPLES = 0.1, 5, 3, 9


class Dense:
    """A DLRM's dense part under bfloat16, with flat parameters."""

    def __init__(self, arch: str, casts: bool, compiled: bool = False, top: tuple[int, ...] = (16, 1)) -> None:
        config = ModelConfig(arch=arch, dim=8, bottom_mlp=[12, 8], top_mlp=[*top], cross_layers=2, cross_rank=4)  # type: ignore[arg-type]
        dlrm = build_model(config, EmbeddingConfig(), [7] * TABLES, FEATURES, seed=0)
        self.task = TrainTask(dlrm, "cpu", bf16=True)
        named = {n: p for n, p in self.task.named_parameters() if "embedding" not in n}
        parameters = in_flat_order(self.task, named)
        self.flat = FlatParameters(parameters, shadow_dtype=torch.bfloat16)
        self.steps = FlatSteps(self.flat, torch.optim.SGD(parameters.values(), lr=LR))
        self.casts = cast_once(self.task, self.flat, compiled) if casts else None

    def logits(self, number: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(number)
        dense = torch.randn(SAMPLES, FEATURES, generator=generator)
        self.pooled = torch.randn(SAMPLES, TABLES * 8, generator=generator).requires_grad_()
        with self.task.autocast():
            return self.task.dlrm.head(self.task.dlrm.bottom(dense), self.pooled)

    def step(self, number: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return logits, the gradient of the pooled embeddings, and the flat gradient; then update."""
        if self.casts is not None:
            for parameter in self.flat.parameters.values():
                parameter.grad = torch.ones_like(parameter)  # as TorchRec's `init_state` leaves it
            self.casts.begin()
        else:
            self.flat.zero()
        logits = self.logits(number)
        logits.float().sigmoid().sum().backward()
        if self.casts is not None:
            self.casts.finish()
        self.flat.adopt_gradients()
        gradient = self.flat.gradients.tensor.clone()
        take_steps([self.steps], [(0, gradient.numel())])
        assert self.pooled.grad is not None
        return logits.detach(), self.pooled.grad, gradient


@pytest.mark.parametrize("arch", ["dot", "dcn"])
def test_cast_weights_give_the_bits_of_autocast(arch: str) -> None:
    ours, autocast = Dense(arch, casts=True), Dense(arch, casts=False)
    for number in range(4):
        names = ("logits", "pooled embeddings' gradient", "dense gradient")
        for name, found, expected in zip(names, ours.step(number), autocast.step(number), strict=True):
            assert_same(found, expected, f"{name} in step {number}")
        assert_same(ours.flat.weights.tensor, autocast.flat.weights.tensor, f"weights after step {number}")
    assert all(view.any() for view in ours.flat.gradients.views.values()), "gradients of zero agree with anything"


@pytest.mark.parametrize("arch", ["dot", "dcn"])
def test_the_forward_reads_the_shadows(arch: str) -> None:
    dense = Dense(arch, casts=True)
    assert dense.casts is not None
    dense.casts.begin()
    before = dense.logits(0)
    dense.flat.weights.tensor.mul_(2)  # not by the optimizer
    assert_same(dense.logits(0), before, "the shadows are those of before")
    dense.flat.cast_shadow()
    assert not torch.equal(dense.logits(0), before)


@pytest.fixture
def _not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torch.compile return its argument: to compile takes a minute."""
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)


@pytest.mark.usefixtures("_not_compiled")
@pytest.mark.parametrize("arch", ["dot", "dcn"])
def test_a_compiled_interaction_is_as_near_as_autocast(arch: str) -> None:
    ours, autocast = Dense(arch, casts=True, compiled=True), Dense(arch, casts=False)
    views, completed, written = ours.flat.gradients.views, list[str](), dict[str, set[str]]()

    def complete(name: str) -> None:
        completed.append(name)
        written[name] = {other for other, view in views.items() if not view.isnan().any()}

    assert ours.casts is not None
    ours.casts.on_complete(complete)
    first, before = ({name for name in views if part in name} for part in ("V_kernels", "interaction.bias"))
    for number in range(4):
        for view in views.values():
            view.fill_(torch.nan)
        found, expected = ours.step(number), autocast.step(number)
        pairs = {"logits": (found[0], expected[0]), "pooled embeddings' gradient": (found[1], expected[1])}
        pairs |= {f"gradient of {n}": (view, autocast.flat.gradients.views[n]) for n, view in views.items()}
        for name, (left, right) in pairs.items():
            error = float((left.float() - right.float()).norm() / right.float().norm())
            assert error < 5e-2, f"{name} in step {number}: {error:.1e}"
        assert sorted(completed) == sorted(ours.flat.parameters), "each completes once"
        for name in first:
            assert written[name] == first | before, "they complete, and may be sent, before the others are computed"
        completed.clear()
        autocast.flat.weights.tensor.copy_(ours.flat.weights.tensor)


@pytest.mark.usefixtures("_not_compiled")
@pytest.mark.parametrize("arch", ["dot", "dcn"])
def test_the_top_mlps_gradients_are_written_after_that_of_the_pooled_embeddings(arch: str) -> None:
    dense = Dense(arch, casts=True, compiled=True, top=(16, 12, 1))
    dense.step(0)
    assert dense.casts is not None
    views, written = dense.flat.gradients.views, list[bool]()
    names = [name for name in views if "head.top" in name and "weight" in name]
    dense.casts.begin()
    logits = dense.logits(0)
    for name in names:
        views[name].fill_(torch.nan)
    dense.pooled.register_hook(lambda _: written.extend(not views[name].isnan().any() for name in names))
    logits.float().sum().backward()
    assert written == [False] * 2
    dense.casts.finish()
    assert not any(views[name].isnan().any() for name in names)


@pytest.mark.usefixtures("_not_compiled")
def test_gradients_complete_in_the_order_of_the_flat_tensor() -> None:
    dense, completed = Dense("dcn", casts=True, compiled=True, top=(16, 12, 1)), list[str]()
    assert dense.casts is not None
    dense.casts.on_complete(completed.append)
    dense.step(0)
    parts = [name.removeprefix("dlrm.").removeprefix("head.").rsplit(".", 1)[0] for name in dense.flat.positions]
    top = [f"top._mlp.{index}._linear" for index in (0, 0, 1, 1)]
    cross = [f"interaction.{kind}" for kind in ("bias", "V_kernels", "W_kernels") for _ in range(2)]
    assert parts[:12] == [*cross, *top, "logit", "logit"]
    assert all(part.startswith("bottom") for part in parts[12:]), "what is reduced last is small"
    first_part = dict.fromkeys(name.split("head.")[-1] for name in completed if "_kernels.0" in name or "top" in name)
    assert [name for name in first_part if "bias" not in name] == [
        "interaction.V_kernels.0",
        "interaction.W_kernels.0",
        "top._mlp.0._linear.weight",
        "top._mlp.1._linear.weight",
    ]


@pytest.mark.usefixtures("_not_compiled")
def test_a_hidden_layer_of_one_neuron_has_its_relu() -> None:
    ours, autocast = (Dense("dot", casts=each, compiled=each, top=(1, 3)) for each in (True, False))
    found, expected = ours.logits(0), autocast.logits(0)
    assert_near(found.float(), expected.float(), 5e-2, "logits")
    assert not torch.equal(expected[0], expected[1]), "the neuron is not at rest"


@pytest.mark.usefixtures("_not_compiled")
@pytest.mark.parametrize("compiled", [False, True])
def test_evaluation_reads_the_weights(compiled: bool) -> None:
    dense, autocast = Dense("dcn", casts=True, compiled=compiled), Dense("dcn", casts=False)
    for each in (dense, autocast):
        each.flat.weights.tensor.mul_(2)
        each.task.eval()
    assert_same(dense.logits(0), autocast.logits(0), "without the shadows")
    assert dense.task.state_dict().keys() == autocast.task.state_dict().keys()


class Branches(nn.Module):
    """Two layers, one of which may be unused, and a scale that is not cast."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scale = nn.Parameter(torch.tensor(3.0))
        self.first, self.second = (nn.Parameter(torch.randn(4, 4)) for _ in range(2))
        self.flat = FlatParameters(dict(self.named_parameters()), shadow_dtype=torch.bfloat16)
        self.casts = CastWeights(self.flat, [self.first, self.second])

    def backward(self, *used: str) -> None:
        self.casts.begin()
        weights = self.casts.of({name: self.get_parameter(name) for name in (*used, "scale")})
        x = torch.ones(2, 4, dtype=torch.bfloat16)
        for name in used:
            assert weights[name].dtype == torch.bfloat16
            x = x @ weights[name]
        assert weights["scale"] is self.scale
        (x.float() * weights["scale"]).sum().backward()
        self.casts.finish()


def test_an_unused_weight_gets_a_gradient_of_zeros() -> None:
    model = Branches()
    views = model.flat.gradients.views
    model.backward("first", "second")
    assert views["first"].any()
    assert views["second"].any()
    scale = views["scale"].clone()
    model.backward("first")
    assert views["first"].any()
    assert_same(views["second"], torch.zeros(4, 4), "nothing is left of the step before")
    assert scale.item() != 0
    assert_same(views["scale"], (torch.ones(2, 4).bfloat16() @ model.first.bfloat16()).float().sum(), "not added up")
    for name, parameter in model.flat.parameters.items():
        assert parameter.grad is views[name], f"{name}: the optimizer reads it"


def test_each_gradient_completes_once() -> None:
    model = Branches()
    completed: list[str] = []
    for name, parameter in model.flat.parameters.items():
        hook = partial(lambda name, _: completed.append(f"autograd: {name}"), name)
        parameter.register_post_accumulate_grad_hook(hook)
    gradients: list[torch.Tensor] = []

    def complete(name: str) -> None:
        completed.append(name)
        gradients.append(model.flat.gradients.views[name].clone())

    model.casts.on_complete(complete)
    for used in (("first", "second"), ("second",)):
        model.backward(*used)
        assert sorted(completed) == sorted(["autograd: scale", *used])
        assert all(gradient.any() for gradient in gradients), "they are written before they complete"
        completed.clear()


@pytest.mark.parametrize("arch", ["dot", "dcn"])
def test_the_heads_gradients_are_written_before_the_bottom_mlps_are_computed(arch: str) -> None:
    dense, completed = Dense(arch, casts=True), list[str]()
    assert dense.casts is not None
    dense.casts.on_complete(completed.append)
    dense.casts.begin()
    dense.logits(0).float().sum().backward()
    early = list(completed)
    assert early, "nothing was written while the backward ran"
    assert all("head" in name for name in early)
    dense.casts.finish()
    late = completed[len(early) :]
    assert late, "the bottom MLP's are written after the backward"
    assert all("bottom" in name for name in late)
