"""The command: `python -m tests.gpu.cross`, on one GPU, in about a minute.

Checks the cross network at the size of MLPerf's DLRM-DCNv2 against float64, beside autocast's error. Then times, in
CUDA graphs and in turns, the head, forward and backward, as torch.compile makes it from TorchRec's module and as it is
here. Needs no pytest; `tests.gpu.kernels_alone tests/kernels/test_cross.py` holds the kernels against their twins.
"""

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torchrec.modules.crossnet import LowRankCrossNet

from dlrm_overlap.config import EmbeddingConfig, ModelConfig
from dlrm_overlap.dense.cast import CastWeights
from dlrm_overlap.dense.cross import CrossLayer, cross
from dlrm_overlap.dense.flat import FlatParameters
from dlrm_overlap.train.dense_part import _with_casts, cast_once
from dlrm_overlap.train.model import TrainTask, build_model
from tests.gpu.one_gpu import capture, run_parts, times_us

WIDTH, RANK, LAYERS, SAMPLES = 3456, 512, 3, 8192  # MLPerf's DLRM-DCNv2
DEVICE = torch.device("cuda", 0)


def bf16(*shape: int, seed: int = 0) -> torch.Tensor:
    """Return normally distributed numbers."""
    return torch.randn(*shape, generator=torch.Generator(DEVICE).manual_seed(seed), device=DEVICE).bfloat16()


class Network:
    """TorchRec's module with weights that are bfloat16 numbers, and biases that are not zero."""

    def __init__(self, width: int, rank: int, layers: int) -> None:
        torch.manual_seed(0)
        self.shape = width, layers, rank
        self.module = LowRankCrossNet(*self.shape).to(DEVICE)
        with torch.no_grad():
            for weight in (*self.module.W_kernels, *self.module.V_kernels):
                weight.copy_(weight.bfloat16())
            for bias in self.module.bias:
                bias.normal_(std=0.1)

    def copy(self, dtype: torch.dtype) -> LowRankCrossNet:
        """Return the module with parameters of another type."""
        module = LowRankCrossNet(*self.shape).to(DEVICE, dtype)
        module.load_state_dict(self.module.state_dict())
        return module

    @staticmethod
    def layers(module: LowRankCrossNet, weights: torch.dtype | None = None) -> list[CrossLayer]:
        """Return the parameters; with a type, copies of them, W and V in that type."""
        each = zip(module.W_kernels, module.V_kernels, module.bias, strict=True)
        if weights is None:
            return [CrossLayer(*layer) for layer in each]
        return [CrossLayer(w.detach().to(weights), v.detach().to(weights), b.detach()) for w, v, b in each]


def _gradients(module: LowRankCrossNet, x0: torch.Tensor, gradient: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return output and gradients of TorchRec's module by autograd."""
    x0 = x0.requires_grad_()
    output = module(x0)
    layers = Network.layers(module)
    wanted = [x0, *(tensor for layer in layers for tensor in layer)]
    found = torch.autograd.grad(output, wanted, gradient.to(output.dtype))
    return dict(
        zip(_names(len(layers)), (output.detach().to(x0.dtype), *found), strict=True)
    )  # as the top MLP takes it


def _names(layers: int) -> list[str]:
    return ["output", "x0", *(f"{name} {index}" for index in range(layers) for name in CrossLayer._fields)]


def _places(layers: Sequence[CrossLayer]) -> list[CrossLayer]:
    """Return poisoned float32 tensors for the gradients, one layer behind the other as in a flat gradient."""
    flat = torch.full((len(layers), sum(t.numel() for t in layers[0])), torch.nan, device=DEVICE)
    each = [row.split([t.numel() for t in layers[0]]) for row in flat]
    return [CrossLayer(*(part.view_as(t) for part, t in zip(row, layers[0], strict=True))) for row in each]


def _ours(network: Network, x0: torch.Tensor, gradient: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return output and gradients of `cross`, those of the parameters written as float32."""
    layers = Network.layers(network.module, torch.bfloat16)
    into = _places(layers)
    x0 = x0.requires_grad_()
    output = cross(x0, layers, lambda name, write: write([getattr(layer, name) for layer in into]))
    (found,) = torch.autograd.grad(output, x0, gradient)
    return dict(zip(_names(len(layers)), (output.detach(), found, *(t for layer in into for t in layer)), strict=True))


def check_network(samples: int, width: int, rank: int, layers: int) -> None:
    """Hold output and gradients against float64; the error may be 1.5 times autocast's."""
    network = Network(width, rank, layers)
    x0, gradient = bf16(samples, width), bf16(samples, width, seed=1)
    with torch.autocast(DEVICE.type, torch.bfloat16):
        theirs = _gradients(network.copy(torch.float32), x0.clone(), gradient)
    expected = _gradients(network.copy(torch.float64), x0.double(), gradient.double())
    ours = _ours(network, x0.clone(), gradient)
    for name, tensor in expected.items():
        found, autocast = (float((each[name].double() - tensor).norm() / tensor.norm()) for each in (ours, theirs))
        print(f"        {name:8} error {found:.2e}, autocast's {autocast:.2e}")
        assert found < 1.5 * autocast + 1e-3, name


class HeadStep:
    """The head of MLPerf's DLRM-DCNv2 with its loss, forward and backward, with cast weights and compiled."""

    def __init__(self, ours: bool, samples: int) -> None:
        config = ModelConfig(
            arch="dcn", dim=128, bottom_mlp=[512, 256, 128], top_mlp=[1024, 1024, 512, 256, 1],
            cross_layers=LAYERS, cross_rank=RANK,
        )  # fmt: skip
        dlrm = build_model(config, EmbeddingConfig(), [10] * 26, 13, seed=0)
        self.task, self.head = TrainTask(dlrm, DEVICE.type, bf16=True), dlrm.head.to(DEVICE)
        dlrm.bottom.to(DEVICE)
        parameters = {n: p for n, p in self.task.named_parameters() if "embedding" not in n}
        flat = FlatParameters(parameters, shadow_dtype=torch.bfloat16)
        if ours:
            self.casts = cast_once(self.task, flat, compiled=True)
        else:
            self.casts = CastWeights(flat, [p for name, p in parameters.items() if "interaction.bias" not in name])
            self.head.in_training = _with_casts(self.head, self.casts, compiled=True)
        self.flat, self.labels = flat, (bf16(samples, seed=2) < -0.5).float()
        self.dense = bf16(samples, 128).requires_grad_()
        self.pooled = bf16(samples, 26 * 128, seed=1).float().requires_grad_()

    def forward(self) -> torch.Tensor:
        with self.task.autocast():
            logits = self.head(self.dense, self.pooled)
        return self.task.loss(logits.float(), self.labels)

    def __call__(self) -> torch.Tensor:
        self.casts.begin()
        self.dense.grad = self.pooled.grad = None
        loss = self.forward()
        loss.backward()
        self.casts.finish()
        return loss.detach()


def time_head(samples: int) -> None:
    """Print what the head takes, whole by torch.compile and with `cross`, and how far their gradients part."""
    steps = {"compiled": HeadStep(False, samples), "ours": HeadStep(True, samples)}
    losses = {name: step().item() for name, step in steps.items()}
    first, second = (step.flat.gradients.tensor for step in steps.values())
    apart = float((first - second).norm() / first.norm())
    print(f"head, losses {losses}, dense gradients apart by {apart:.1e} of their norm")
    assert apart < 0.2, "more than the rounding of bfloat16 and the ReLUs that it switches parts the gradients"
    names = [f"{name}, {part}" for part in ("forward", "both") for name in steps]
    graphs = [capture(step.forward) for step in steps.values()] + [capture(step) for step in steps.values()]
    for name, us in zip(names, times_us(graphs), strict=True):
        print(f"head, {samples} samples, {name:18} {us:7.1f} us")


def main() -> int:
    """Run the checks, then time the head; return 1 if something failed, 2 without a GPU."""
    if not torch.cuda.is_available():
        print("tests.gpu.cross: no GPU is there, and one must be; run it where nvidia-smi shows one", file=sys.stderr)
        return 2
    torch.cuda.set_device(DEVICE)
    parts: dict[str, Callable[[], Any]] = {
        "network, MLPerf's size": partial(check_network, SAMPLES, WIDTH, RANK, LAYERS),
        "network, odd size": partial(check_network, 1003, 11 * 92, 72, 2),
        f"head, on {torch.cuda.get_device_name(DEVICE)}": partial(time_head, SAMPLES),
    }
    return int(run_parts(parts) > 0)


if __name__ == "__main__":
    sys.exit(main())
