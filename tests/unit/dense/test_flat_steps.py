import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from dlrm_overlap.dense.flat import FlatParameters
from dlrm_overlap.dense.flat_steps import FlatSteps, take_steps, unsupported_by_flat_steps
from tests.agreement import assert_near, assert_same
from tests.conftest import refuses

_ROUNDING = 1e-6  # of fused optimizers; the others have the bits, see tests/kernels/test_update_parameters.py
SHAPES = {"weight": (7, 13), "bias": (7,), "idle": (3,), "wide": (1, 200)}
FORMS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, weight_decay=0.1),
    "momentum": partial(torch.optim.SGD, momentum=0.9, dampening=0.3, foreach=True),
    "nesterov": partial(torch.optim.SGD, momentum=0.9, nesterov=True),
    "adagrad": partial(torch.optim.Adagrad, lr_decay=0.1, initial_accumulator_value=0.2),
    "adam": partial(torch.optim.Adam, weight_decay=0.1),
    "adamw": partial(torch.optim.AdamW, fused=True),
}
every_form = pytest.mark.parametrize("form", FORMS)


class Run:
    """Parameters in two groups, one of which gets no gradient, updated by torch.optim or by `FlatSteps`."""

    def __init__(self, form: str) -> None:
        generator = torch.Generator().manual_seed(0)
        self.parameters = {n: nn.Parameter(torch.randn(s, generator=generator)) for n, s in SHAPES.items()}
        weight, bias, idle, wide = self.parameters.values()
        own: dict[str, Any] = {"lr": 0.05, "weight_decay": 0.0}
        self.optimizer = FORMS[form]([{"params": [weight, idle]}, {"params": [bias, wide], **own}], lr=0.1)
        self.flat: FlatParameters | None = None

    def take_over(self, shadow: torch.dtype | None = None) -> "Run":
        self.flat = FlatParameters(self.parameters, shadow_dtype=shadow)
        self.steps = FlatSteps(self.flat, self.optimizer)
        self.flat.idle = frozenset({"idle"})  # as the first backward shows
        return self

    def train(self, steps: int, first: int = 0) -> "Run":
        for step in range(first, first + steps):
            self.optimizer.param_groups[1]["lr"] = 0.05 / (1 + step % 3)
            generator = torch.Generator().manual_seed(step)
            for name, parameter in self.parameters.items():
                gradient = torch.randn(parameter.shape, generator=generator)
                parameter.grad = None if name == "idle" else gradient
            if self.flat is None:
                self.optimizer.step()
            else:
                self.flat.adopt_gradients()
                take_steps([self.steps], [(0, 1024)])
        return self

    def assert_same(self, other: "Run") -> None:
        for name, parameter in self.parameters.items():
            assert_near(parameter.data, other.parameters[name].data, _ROUNDING, name)
        ours, theirs = (run.optimizer.state_dict()["state"] for run in (self, other))
        assert ours.keys() == theirs.keys()
        for index, state in theirs.items():
            assert ours[index].keys() == state.keys()
            for key, value in state.items():
                assert_near(ours[index][key], value, _ROUNDING, f"{key} of parameter {index}")


@every_form
@pytest.mark.parametrize("taken_over", [(True, False), (False, True), (True, True)])
def test_state_dicts_are_exchangeable_with_those_of_torch_optim(form: str, taken_over: tuple[bool, bool]) -> None:
    written, read = (Run(form).take_over() if taken else Run(form) for taken in taken_over)
    written.train(4)
    read.train(2).optimizer.load_state_dict(copy.deepcopy(written.optimizer.state_dict()))
    for name, parameter in read.parameters.items():
        parameter.data.copy_(written.parameters[name].data)
    read.train(3, first=4).assert_same(written.train(3, first=4))


@every_form
@pytest.mark.parametrize("before", [0, 3])
def test_steps_are_those_of_torch_optim_from_any_step_on(form: str, before: int) -> None:
    run = Run(form).train(before)
    entries = dict(run.optimizer.state)
    run.take_over().train(9 - before, first=before).assert_same(Run(form).train(9))
    assert all(run.optimizer.state[key] is entry for key, entry in entries.items()), "wrappers hold these entries"


@every_form
@pytest.mark.parametrize("in_place", [False, True], ids=["replaced", "in_place"])
def test_states_that_are_loaded_before_the_first_step_are_used(form: str, in_place: bool) -> None:
    writer, read = Run(form).train(4), Run(form).take_over()
    written = writer.optimizer.state_dict()
    if in_place:  # as TorchRec's wrappers do
        for index, parameter in enumerate(read.parameters[name] for name in ("weight", "idle", "bias", "wide")):
            for key, value in written["state"].get(index, {}).items():
                read.optimizer.state[parameter][key].copy_(value)
    else:
        read.optimizer.load_state_dict(copy.deepcopy(written))
    for name, parameter in read.parameters.items():
        parameter.data.copy_(writer.parameters[name].data)
    read.train(2, first=4).assert_same(writer.train(2, first=4))


@every_form
def test_a_loaded_state_is_kept_without_a_gradient(form: str) -> None:
    run = Run(form)
    flat, idle = FlatParameters(run.parameters), run.parameters["idle"]
    steps = FlatSteps(flat, run.optimizer)
    loaded = dict(run.optimizer.state.get(idle, {}))
    for value in loaded.values():
        value.fill_(5)
    flat.idle = frozenset({"idle"})  # as the first backward shows
    take_steps([steps], [(0, 1024)])
    for key, value in loaded.items():
        assert_same(run.optimizer.state[idle][key], torch.full_like(value, 5), key)


def test_the_shadow_follows_the_weights() -> None:
    run = Run("adagrad").take_over(torch.bfloat16)

    flat: Any = run.flat

    def changed() -> None:
        run.parameters["weight"].data.fill_(1.1)
        flat.cast_shadow()

    for change in (lambda: None, lambda: run.train(2), changed):
        change()
        for name, parameter in run.parameters.items():
            assert_same(flat.shadow.views[name], parameter.data.bfloat16(), f"shadow of {name}")


def test_a_captured_step_reads_the_learning_rate_that_refresh_wrote(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run("sgd").take_over()
    assert run.flat is not None
    monkeypatch.setattr(run.flat, "device", torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    changes = []
    for refreshes in (False, True):
        run.optimizer.param_groups[1]["lr"] = 1.0
        before = run.parameters["bias"][0].item()
        run.flat.gradients.views["bias"].fill_(1.0)
        if refreshes:
            run.steps.refresh()
        take_steps([run.steps], [(0, 1024)])
        changes.append(before - run.parameters["bias"][0].item())
    assert changes == pytest.approx([0.05, 1.0])


def test_a_learning_rate_in_a_tensor_is_followed() -> None:
    runs = Run("adam").take_over(), Run("adam")
    rate = torch.tensor(0.2)
    runs[0].optimizer.param_groups[0]["lr"] = rate
    for step in range(3):
        rate.fill_(0.5 / (1 + step))
        runs[1].optimizer.param_groups[0]["lr"] = rate.item()
        for run in runs:
            run.train(1, first=step)
    runs[0].assert_same(runs[1])


@pytest.mark.parametrize("change", [{"momentum": 0.9}, {"weight_decay": 0.1}])
def test_groups_that_the_kernel_was_not_compiled_for_are_refused(change: dict[str, float]) -> None:
    run = Run("sgd" if "momentum" in change else "nesterov").take_over()
    run.optimizer.param_groups[0].update(change, dampening=0.0)
    with refuses(r"SGD has other groups .* make the pipeline after they are set"):
        run.steps.refresh()


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (FORMS["nesterov"], None),
        (partial(torch.optim.Adam, amsgrad=True), "Adam has amsgrad"),
        (partial(torch.optim.SGD, maximize=True), "SGD has maximize"),
        (torch.optim.LBFGS, "LBFGS is none of torch.optim's SGD, Adagrad, Adam and AdamW"),
    ],
)
def test_an_optimizer_that_is_not_supported_has_a_reason(
    make: Callable[..., torch.optim.Optimizer], reason: str | None
) -> None:
    assert unsupported_by_flat_steps(make([nn.Parameter(torch.ones(2))], lr=0.1)) == reason
