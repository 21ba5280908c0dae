"""The flat optimizer trains as torch.optim's do, and its checkpoints are theirs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint.state_dict_loader as dcp_loader
import torch.distributed.checkpoint.state_dict_saver as dcp_saver
from torch import nn
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper

from dlrm_overlap.dense.flat import FlatParameters
from dlrm_overlap.dense.optimizer import FlatOptimizer
from tests.agreement import assert_same

LR, EPS = 0.1, 1e-6
SHAPES = {"weight": (7, 13), "bias": (7,), "scale": (), "wide": (1, 200)}
KINDS = ("sgd", "adagrad", "adam")
every_kind = pytest.mark.parametrize("kind", KINDS)


def _optim(kind: str, parameters: Any) -> torch.optim.Optimizer:
    makers: dict[str, Callable[..., torch.optim.Optimizer]] = {
        "sgd": torch.optim.SGD,
        "adagrad": torch.optim.Adagrad,
        "adam": torch.optim.Adam,
    }
    return makers[kind](parameters, lr=LR, **({} if kind == "sgd" else {"eps": EPS}))


class Run:
    """Parameters under torch.optim's or our optimizer, alone or as a part of TorchRec's combined one."""

    def __init__(self, kind: str, flat: bool, shadow: torch.dtype | None = None) -> None:
        generator = torch.Generator().manual_seed(0)
        self.parameters = {n: nn.Parameter(torch.randn(s, generator=generator)) for n, s in SHAPES.items()}
        self.flat = FlatParameters(self.parameters) if flat else None
        self.kind, self._shadow = kind, shadow
        self.keyed = KeyedOptimizerWrapper(self.parameters, self._make)
        self.combined = CombinedOptimizer([("dense", self.keyed)])

    def _make(self, parameters: Any) -> torch.optim.Optimizer:
        if self.flat is None:
            self.optimizer = _optim(self.kind, parameters)
        else:
            self.optimizer = FlatOptimizer(self.flat, self.kind, LR, EPS, shadow_dtype=self._shadow)
        return self.optimizer

    @property
    def ours(self) -> FlatOptimizer:
        assert isinstance(self.optimizer, FlatOptimizer)
        return self.optimizer

    def train(self, steps: int, first: int = 0) -> "Run":
        """Take `steps` steps on random gradients, each at a learning rate of its own, as a schedule sets it."""
        for step in range(first, first + steps):
            self.combined.zero_grad()
            self.combined.param_groups[0]["lr"] = LR / (1 + step % 3)  # pyright: ignore[reportIndexIssue]
            generator = torch.Generator().manual_seed(step)
            losses = [(p * torch.randn(p.shape, generator=generator)).sum() for p in self.parameters.values()]
            torch.stack(losses).sum().backward()
            self.combined.step()
        return self

    def assert_same(self, other: "Run") -> None:
        for name, parameter in self.parameters.items():
            assert_same(parameter.data, other.parameters[name].data, name)
        ours, theirs = (run.keyed.state_dict()["state"] for run in (self, other))
        assert {n: set(state) for n, state in ours.items()} == {n: set(state) for n, state in theirs.items()}
        for name, state in ours.items():
            for key, tensor in state.items():
                assert_same(tensor, theirs[name][key], f"{key} of {name}")


@every_kind
def test_50_steps_have_the_bits_of_torch_optim(kind: str) -> None:
    ours, theirs = Run(kind, flat=True).train(50), Run(kind, flat=False).train(50)
    ours.assert_same(theirs)
    assert ours.flat is not None
    views = ours.flat.gradients.views
    assert all(parameter.grad is views[name] for name, parameter in ours.parameters.items())


def _load_as_a_checkpoint(run: Run, folder: Path) -> None:
    run.keyed.init_state()
    state = {"model": dict(run.parameters), "optimizer": run.combined.state_dict()}
    dcp_loader.load(state, checkpoint_id=folder, no_dist=True)
    run.combined.load_state_dict(state["optimizer"])


@every_kind
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(("written", "read"), [(True, False), (False, True), (True, True)])
def test_checkpoints_go_both_ways(kind: str, written: bool, read: bool, tmp_path: Path) -> None:
    whole = Run(kind, written).train(7)
    state = {"model": dict(whole.parameters), "optimizer": whole.combined.state_dict()}
    dcp_saver.save(state, checkpoint_id=tmp_path, no_dist=True)
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) < 100_000, "views are saved, not what they are of"
    other = Run(kind, read)
    with torch.no_grad():
        for parameter in other.parameters.values():
            parameter.fill_(9)
    _load_as_a_checkpoint(other, tmp_path)
    other.assert_same(whole)
    other.train(7, first=7).assert_same(whole.train(7, first=7))


def test_shadows_follow_the_weights() -> None:
    run = Run("adagrad", flat=True, shadow=torch.bfloat16)

    def assert_true() -> None:
        for name, parameter in run.parameters.items():
            assert_same(run.ours.shadow(name), parameter.data.bfloat16(), f"shadow of {name}")

    assert_true()
    run.train(2)
    assert_true()
    assert run.flat is not None
    run.flat.lay_out(sorted(run.parameters))
    assert_true()
    run.train(2, first=2)
    assert_true()
    run.parameters["weight"].data.fill_(1.1)
    run.ours.cast_shadows()
    assert_true()
    run.train(1, first=4)
    with pytest.raises(AssertionError, match="made without shadow_dtype"):
        Run("sgd", flat=True).ours.shadow("weight")


@every_kind
def test_another_layout_changes_no_result(kind: str) -> None:
    run, twin = Run(kind, flat=True).train(3), Run(kind, flat=False).train(3)
    assert run.flat is not None
    run.flat.lay_out(sorted(run.parameters))
    run.train(3, first=3).assert_same(twin.train(3, first=3))


def test_a_step_takes_gradients_that_others_have_set() -> None:
    ours, theirs = Run("adagrad", flat=True), Run("adagrad", flat=False)
    for run in (ours, theirs):
        for parameter in run.parameters.values():
            parameter.grad = torch.full_like(parameter, 0.25)
        run.optimizer.step()
    ours.assert_same(theirs)
    ours.optimizer.zero_grad(set_to_none=True)
    assert ours.flat is not None
    assert all(parameter.grad is ours.flat.gradients.views[name] for name, parameter in ours.parameters.items())


def test_the_learning_rate_is_read_where_refresh_has_put_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A capture reads device memory, which `refresh` alone writes."""
    run = Run("sgd", flat=True)
    run.ours.param_groups[0]["lr"] = 1.0
    monkeypatch.setattr(run.ours.flat, "device", torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    before = run.parameters["scale"].item()
    run.parameters["scale"].grad = torch.tensor(1.0)
    run.ours.step()
    assert run.parameters["scale"].item() == pytest.approx(before - LR)
    run.ours.refresh()
    run.ours.step()
    assert run.parameters["scale"].item() == pytest.approx(before - LR - 1.0)
