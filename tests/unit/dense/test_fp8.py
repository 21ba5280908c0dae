"""The dense part in 8 bits, by the reference on a CPU, against the dense part in bfloat16."""

from typing import Any

import pytest
import torch
from torch import nn

from dlrm_overlap.config import EmbeddingConfig, InputError, ModelConfig
from dlrm_overlap.dense.flat import FlatParameters
from dlrm_overlap.dense.fp8 import ACTIVATION, ACTIVATION_SCALE, GRADIENT, Fp8Products, gradient_scale
from dlrm_overlap.train.dense_part import cast_once, in_flat_order
from dlrm_overlap.train.model import TrainTask, build_model

SAMPLES, TABLES, DIM = 1000, 5, 16


class _Step:
    def __init__(self, fp8: bool, **model: Any) -> None:
        keys = {"cross_rank": 32, "top_mlp": [64, 32, 1], "cross_layers": 3} | model
        config = ModelConfig(arch="dcn", dim=DIM, bottom_mlp=[DIM], **keys)
        self.dlrm = build_model(config, EmbeddingConfig(), [10] * TABLES, 13, seed=0)
        self.task = TrainTask(self.dlrm, "cpu", bf16=True)
        parameters = {name: each for name, each in self.task.named_parameters() if "embedding" not in name}
        self.flat = FlatParameters(in_flat_order(self.task, parameters), shadow_dtype=torch.bfloat16)
        self.casts = cast_once(self.task, self.flat, compiled=True, fp8=fp8)

    def __call__(self) -> dict[str, torch.Tensor]:
        """Return the loss and all gradients, also that of the pooled embeddings."""
        drawn = torch.Generator().manual_seed(0)
        dense, labels = torch.randn(SAMPLES, 13, generator=drawn), torch.rand(SAMPLES, generator=drawn) < 0.3
        pooled = (0.3 * torch.randn(SAMPLES, TABLES * DIM, generator=drawn)).requires_grad_()
        self.casts.begin()
        with self.task.autocast():
            logits = self.dlrm.head(self.dlrm.bottom(dense), pooled)
        loss = self.task.loss(logits.float(), labels.float())
        loss.backward()
        self.casts.finish()
        assert pooled.grad is not None
        return {"loss": loss.detach(), "pooled": pooled.grad, **self.flat.gradients.views}


def _apart(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def test_gradients_are_those_of_bfloat16_but_for_rounding() -> None:
    expected, found = _Step(fp8=False)(), _Step(fp8=True)()
    apart = {name: _apart(found[name], expected[name]) for name in expected}
    assert 0 < apart["loss"] < 1e-3
    # Sums over samples average the rounding errors; a wrong scale would be apart by 0.5 or more.
    assert apart.pop("pooled") < 0.3, apart
    assert max(apart.values()) < 0.2, apart
    assert min(each for name, each in apart.items() if "interaction" in name) > 0.01, "nothing was rounded"


def test_a_gradient_of_any_batch_size_has_the_same_error() -> None:
    assert [gradient_scale(samples) / 256 for samples in (1, 2, 3, 8192, 8193)] == [1, 2, 4, 8192, 16384]


def test_products_have_the_scales_of_their_factors() -> None:
    weight = nn.Parameter(torch.randn(32, 48) / 10)
    flat = FlatParameters({"other": nn.Parameter(torch.randn(3)), "weight": weight}, shadow_dtype=torch.bfloat16)
    products = Fp8Products(flat, [weight])
    products.write()
    x, bias = torch.randn(20, 48), torch.randn(32).bfloat16()
    out, back = torch.empty(20, 32).bfloat16(), torch.empty(20, 48).bfloat16()
    x8 = products.cast(x, ACTIVATION, ACTIVATION_SCALE)
    products.write_product(x8, products.of(weight).weight, out, bias)
    assert _apart(out.float(), x @ weight.detach().t() + bias.float()) < 0.05
    gradient = torch.randn(20, 32) / 20
    gradient8 = products.cast(gradient, GRADIENT, gradient_scale(20))
    products.write_product(gradient8, products.of(weight).transposed, back)
    assert _apart(back.float(), gradient @ weight.detach()) < 0.1


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"cross_rank": 24}, "a product's weight has 24 rows or columns, and 8 bits need multiples of 16"),
        ({"top_mlp": [40, 1]}, "a product's weight has 40 rows or columns, and 8 bits need multiples of 16"),
        ({"top_mlp": [32, 2]}, "the head is not a low-rank cross network and a top MLP with ReLU and one logit"),
    ],
)
def test_sizes_that_8_bits_cannot_have_are_refused(model: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        _Step(fp8=True, **model)
