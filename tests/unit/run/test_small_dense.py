"""The dense part of a small model in float32, whose MLPs are one kernel each way."""

from dataclasses import replace

import pytest
import torch

from dlrm_overlap.config import EmbeddingConfig, ModelConfig
from dlrm_overlap.train.dense_part import small_form
from dlrm_overlap.train.model import TrainTask, build_model
from tests.agreement import assert_near

SAMPLES, TABLES, FEATURES = 19, 3, 5
SMALL = ModelConfig(dim=8, bottom_mlp=[12, 8], top_mlp=[20, 6, 1], activation="gelu")


def _task(config: ModelConfig, bf16: bool = False) -> TrainTask:
    return TrainTask(build_model(config, EmbeddingConfig(), [10] * TABLES, FEATURES, seed=0), "cpu", bf16)


@pytest.mark.parametrize("labels", [1, 2])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_it_computes_the_same_as_the_modules(activation, labels: int) -> None:
    task = _task(replace(SMALL, activation=activation, top_mlp=[20, 6, labels]))
    dense, pooled = torch.randn(SAMPLES, FEATURES), torch.randn(SAMPLES, TABLES * SMALL.dim).requires_grad_()
    bottom, head = task.dlrm.bottom, task.dlrm.head
    forms = small_form(task, bottom), small_form(task, head)
    assert forms[0] is not None
    assert forms[1] is not None
    expected = head.compute(torch.cat((bottom.compute(dense), pooled), dim=1))
    found = forms[1](torch.cat((forms[0](dense), pooled), dim=1))
    assert_near(found, expected, 1e-5, "logits")
    wanted = [pooled, *bottom.parameters(), *head.parameters()]
    gradient = torch.randn_like(expected)
    pairs = zip(
        torch.autograd.grad(found, wanted, gradient), torch.autograd.grad(expected, wanted, gradient), strict=True
    )
    for number, (each, right) in enumerate(pairs):
        assert_near(each, right, 1e-5, f"gradient of {number}")


def test_a_large_or_cast_model_has_none() -> None:
    wide = _task(replace(SMALL, bottom_mlp=[12, 8], top_mlp=[256, 1]))
    assert small_form(wide, wide.dlrm.bottom) is not None
    assert small_form(wide, wide.dlrm.head) is None
    crossed = _task(replace(SMALL, arch="dcn", cross_layers=1, cross_rank=4))
    assert small_form(crossed, crossed.dlrm.head) is None
    cast = _task(SMALL, bf16=True)
    assert small_form(cast, cast.dlrm.bottom) is None
