"""The command: `python -m tests.gpu.cross`, on one GPU, in about a minute.

Times the head of MLPerf's DLRM-DCNv2, forward and backward, in CUDA graphs that alternate: TorchRec's module under
torch.compile, and this project's with each `train.cross_kernel`. Their gradients must agree.
If the extra `cutlass` is installed, its kernel is compared with the other ones first. Needs no pytest; the command
`tests.gpu.kernels_alone tests/kernels/test_cross.py` compares the other kernels with their twins.
"""

import math
import sys
from functools import partial

import torch

from dlrm_overlap.config import EmbeddingConfig, ModelConfig
from dlrm_overlap.dense.cast import CastWeights
from dlrm_overlap.dense.cross import CrossLayer, compute_layer, why_not_one_kernel
from dlrm_overlap.dense.flat import FlatParameters
from dlrm_overlap.train.dense_part import _with_casts, cast_once, in_flat_order
from dlrm_overlap.train.model import TrainTask, build_model
from tests.agreement import assert_near
from tests.gpu.one_gpu import capture, run_parts, times_us

RANK, LAYERS, SAMPLES = 512, 3, 8192  # MLPerf's DLRM-DCNv2
DEVICE = torch.device("cuda", 0)


def bf16(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator(DEVICE).manual_seed(seed), device=DEVICE).bfloat16()


class HeadStep:
    """The head of MLPerf's DLRM-DCNv2 with its loss, forward and backward, with cast weights and compiled."""

    def __init__(self, samples: int, cross_kernel: str | None) -> None:
        """`cross_kernel` is None for TorchRec's module."""
        config = ModelConfig(
            arch="dcn", dim=128, bottom_mlp=[512, 256, 128], top_mlp=[1024, 1024, 512, 256, 1],
            cross_layers=LAYERS, cross_rank=RANK,
        )  # fmt: skip
        dlrm = build_model(config, EmbeddingConfig(), [10] * 26, 13, seed=0)
        self.task, self.head = TrainTask(dlrm, DEVICE.type, bf16=True), dlrm.head.to(DEVICE)
        dlrm.bottom.to(DEVICE)
        parameters = {n: p for n, p in self.task.named_parameters() if "embedding" not in n}
        flat = FlatParameters(in_flat_order(self.task, parameters), shadow_dtype=torch.bfloat16)
        if cross_kernel is not None:
            self.casts = cast_once(self.task, flat, compiled=True, cross_kernel=cross_kernel)
        else:
            self.casts = CastWeights(flat, [p for name, p in parameters.items() if "interaction.bias" not in name])
            self.head.in_training = _with_casts(self.head, self.casts, compiled=True)
        self.flat, self.labels = flat, (bf16(samples, seed=2) < -0.5).float()
        self.dense = bf16(samples, 128).requires_grad_()
        self.pooled = bf16(samples, 26 * 128, seed=1).float().requires_grad_()

    def forward(self) -> torch.Tensor:
        with self.task.autocast():
            logits = self.head(self.casts.ahead_of(self.dense), self.pooled)
        return self.task.loss(logits.float(), self.labels)

    def __call__(self) -> torch.Tensor:
        self.casts.begin()
        self.dense.grad = self.pooled.grad = None
        loss = self.forward()
        loss.backward()
        self.casts.finish()
        return loss.detach()


def check_one_kernel() -> None:
    """Compare layers that one kernel computes with those of two kernels, and print which share has the same bits."""
    for samples, width, rank in ((SAMPLES, 27 * 128, RANK), (1000, 392, 16), (1, 384, 8)):
        layer = CrossLayer(bf16(width, rank), bf16(rank, width), bf16(width).float())
        narrow, x0, other = (
            bf16(samples, rank, seed=1) / rank**0.5,
            bf16(samples, width, seed=2),
            bf16(samples, width, seed=3),
        )
        for x in (x0, other):
            tensors = torch.full((2, 2, samples, width), torch.nan, dtype=torch.bfloat16, device=DEVICE)
            for kind, (w, out) in zip(("triton", "cutlass"), tensors, strict=True):
                compute_layer(kind, DEVICE)(narrow, layer, x0, x, w, out)
            for name, expected, found in zip(("product", "output"), *tensors, strict=True):
                assert_near(found, expected, 2**-6, f"{name} of {samples} samples")  # the product may round differently
            share = float((tensors[0] == tensors[1]).float().mean())
            print(f"one kernel, {samples} x {width}, rank {rank}: {share:.4%} of the elements have the same bits")


def time_head(samples: int) -> None:
    """Print the times of the head with torch.compile and with `cross`, and the difference of their gradients."""
    steps = {"compiled": HeadStep(samples, None), "ours": HeadStep(samples, "triton")}
    if not why_not_one_kernel(DEVICE):
        steps["one kernel"] = HeadStep(samples, "cutlass")
    losses = {name: step().item() for name, step in steps.items()}
    expected = steps["compiled"].flat.gradients.views
    for name, step in steps.items():
        found = step.flat.gradients.views
        of_each = [float((found[each] - expected[each]).norm()) for each in expected]
        apart = math.hypot(*of_each) / float(steps["compiled"].flat.gradients.tensor.norm())
        print(f"head, {name}, loss {losses[name]}, dense gradients apart from compiled by {apart:.1e} of their norm")
        assert apart < 0.2, "gradients differ by more than bfloat16's rounding and the ReLUs that it switches"
    graphs = {f"{name}, forward": capture(step.forward) for name, step in steps.items()}
    graphs |= {f"{name}, both": capture(step) for name, step in steps.items()}
    for name, us in zip(graphs, times_us(list(graphs.values())), strict=True):
        print(f"head, {samples} samples, {name:24} {us:7.1f} us")


def main() -> int:
    """Time the head; return 1 if its gradients differ, 2 without a GPU."""
    if not torch.cuda.is_available():
        print("tests.gpu.cross: no GPU is there, and one must be; run it where nvidia-smi shows one", file=sys.stderr)
        return 2
    torch.cuda.set_device(DEVICE)
    parts = {f"head, on {torch.cuda.get_device_name(DEVICE)}": partial(time_head, SAMPLES)}
    if reason := why_not_one_kernel(DEVICE):
        print(f"the cross layers of one kernel are left out: {reason}")
    else:
        parts = {"cross layers of one kernel": check_one_kernel, **parts}
    return int(run_parts(parts) > 0)


if __name__ == "__main__":
    sys.exit(main())
