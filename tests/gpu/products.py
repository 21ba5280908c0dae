"""The command: `python -m tests.gpu.products`, on one GPU, in about a minute.

Times the products of MLPerf's DLRM-DCNv2 whose elementwise work is a kernel of its own, in CUDA graphs that alternate:
by cuBLAS, by QuACK if the extra `cutlass` is installed, and in 8 bits, without casts, where the GPU supports them.
All must agree with the product in float32.
"""

import sys
from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from dlrm_overlap.dense.cross import why_not_one_kernel
from dlrm_overlap.dense.flat import FlatParameters
from dlrm_overlap.dense.fp8 import ACTIVATION, ACTIVATION_SCALE, GRADIENT, Fp8Products, gradient_scale, why_not_fp8
from tests.gpu.one_gpu import capture, run_parts, times_us

SAMPLES, WIDTH, RANK, TOP = 8192, 27 * 128, 512, 1024
# Name -> columns of the input, and of the output; whether the weight is transposed, and whether the product is added.
PRODUCTS = {
    "V": (WIDTH, RANK, True, False),
    "W": (RANK, WIDTH, True, False),
    "gradient through W": (WIDTH, RANK, False, False),
    "gradient through V": (RANK, WIDTH, False, False),
    "gradient through V, added": (RANK, WIDTH, False, True),
    "first top layer": (WIDTH, TOP, True, False),
    "gradient through it": (TOP, WIDTH, False, False),
}
_REPEATED = 8
_BF16, _FP8 = 0.01, 0.1  # errors, as shares of the norm
DEVICE = torch.device("cuda", 0)


def _ways(name: str) -> dict[str, tuple[Callable[[], None], torch.Tensor]]:
    """Return functions that compute a product, and what they write; compare each with the product in float32."""
    inner, outer, is_transposed, adds = PRODUCTS[name]
    drawn = torch.Generator(DEVICE).manual_seed(0)
    x = torch.randn(SAMPLES, inner, generator=drawn, device=DEVICE).bfloat16() / (1 if is_transposed else SAMPLES)
    shape = (outer, inner) if is_transposed else (inner, outer)
    weight = nn.Parameter(0.02 * torch.randn(shape, generator=drawn, device=DEVICE))
    flat = FlatParameters({"weight": weight}, shadow_dtype=torch.bfloat16)
    assert flat.shadow is not None
    right = flat.shadow.views["weight"]
    right = right.t() if is_transposed else right  # [K, N]
    outs = torch.zeros(3, SAMPLES, outer, device=DEVICE, dtype=torch.bfloat16)
    ways: dict[str, tuple[Callable[[], None], torch.Tensor]] = {}
    ways["cuBLAS"] = partial(outs[0].addmm_ if adds else partial(torch.mm, out=outs[0]), x, right), outs[0]  # type: ignore[arg-type]
    if not why_not_one_kernel(DEVICE):
        from tests.gpu.quack_products import write_product

        ways["QuACK"] = partial(write_product, x, right, outs[1], wide=outer == WIDTH, adds=adds), outs[1]
    if not adds and not why_not_fp8(DEVICE):
        products = Fp8Products(flat, [weight])
        products.write()
        about = (ACTIVATION, ACTIVATION_SCALE) if is_transposed else (GRADIENT, gradient_scale(SAMPLES))
        copies = products.of(weight)
        second = copies.weight if is_transposed else copies.transposed
        ways["8 bits"] = partial(products.write_product, products.cast(x, *about), second, outs[2]), outs[2]
    expected = x.float() @ right.float()
    for way, (compute, out) in ways.items():
        compute()
        apart = float((out.float() - expected).norm() / expected.norm())
        assert apart < (_FP8 if way == "8 bits" else _BF16), f"{name} by {way} is apart by {apart:.1e} of the norm"
    return ways


def time_product(name: str) -> None:
    ways = _ways(name)

    def repeat(compute: Callable[[], None]) -> None:
        for _ in range(_REPEATED):
            compute()

    graphs = [capture(partial(repeat, compute), 1) for compute, _ in ways.values()]
    for way, us in zip(ways, times_us(graphs), strict=True):
        print(f"{name}, {SAMPLES} samples, {way:8} {us / _REPEATED:7.1f} us")


def main() -> int:
    """Time all products; return 1 if one is wrong, 2 without a GPU."""
    if not torch.cuda.is_available():
        print(
            "tests.gpu.products: no GPU is there, and one must be; run it where nvidia-smi shows one", file=sys.stderr
        )
        return 2
    torch.cuda.set_device(DEVICE)
    print(torch.cuda.get_device_name(DEVICE))
    return int(run_parts({name: partial(time_product, name) for name in PRODUCTS}) > 0)


if __name__ == "__main__":
    sys.exit(main())
