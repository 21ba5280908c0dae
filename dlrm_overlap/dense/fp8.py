"""Matrix products in 8 bits (`train.precision` fp8).

Weights and activations are e4m3, gradients e5m2. Scales are powers of two that depend on the number of samples alone,
so there is no state between steps: ranks agree, and a resumed run continues to the last bit.

- Activations * 2^4: normal from 2^-10 to 28. A table of 4 million rows begins with embeddings of at most 5e-4, which
  keep a step of 1.2e-4.
- Weights * 2^8: normal from 6e-5 to 1.75.
- Gradients * 2^8 * the samples, rounded up to a power of two (loss scaling, Micikevicius et al. 2018): a sample's
  gradient of its own loss is normal from 2.4e-7 to 224. That of a cross layer's product has the embedding as a factor,
  so it spans as many powers of two as the tables' rows and more than e4m3 has; hence e5m2.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from dlrm_overlap.dense.flat import FlatParameters
from dlrm_overlap.dense.functions import kernels_on
from dlrm_overlap.kernels.dense.arguments import fp8_tiles

ACTIVATION, GRADIENT = torch.float8_e4m3fn, torch.float8_e5m2
ACTIVATION_SCALE, WEIGHT_SCALE, _SAMPLE_SCALE = 2.0**4, 2.0**8, 2.0**8
MULTIPLE = 16
"""what the sizes of a product's weight must be multiples of"""
_POWERS = 64
_ALIGNED = 4  # float32 elements: 16 bytes


class Fp8(NamedTuple):
    """A tensor times a power of two, in 8 bits."""

    values: torch.Tensor
    scale: float


class Fp8Weight(NamedTuple):
    weight: Fp8
    """[N, K]"""
    transposed: Fp8
    """[K, N]"""


def why_not_fp8(device: torch.device) -> str:
    """Return why products in 8 bits do not run on a device; empty if they do. CPUs compute the reference."""
    if device.type == "cpu":
        return ""
    if device.type != "cuda" or torch.version.hip is not None or torch.cuda.get_device_capability(device) < (8, 9):
        return f"{device} has no products in 8 bits; take a GPU of compute capability 8.9 or more, such as an H100"
    return ""


def gradient_scale(samples: int) -> float:
    """Return the scale of the gradients of a loss that is a mean over `samples`."""
    return _SAMPLE_SCALE * 2.0 ** (samples - 1).bit_length()


class Fp8Products:
    """Products in 8 bits with float32 sums, and the 8-bit copies of weights that they need.

    cuBLAS multiplies rows by rows only, left [M, K] by right [N, K], so a weight has a copy for the forward and a
    transposed one for the backward.
    """

    def __init__(self, flat: FlatParameters, weights: Sequence[torch.Tensor]) -> None:
        """Make copies of `weights`, matrices that belong to `flat`, which must have a shadow."""
        assert flat.shadow is not None, "the parameters were made flat without shadow_dtype"
        self._shadow, names = flat.shadow, {id(each): name for name, each in flat.parameters.items()}
        self._positions = {id(each): flat.positions[names[id(each)]] for each in weights}
        matrices = [(at.begin, at.shape[0], at.shape[1]) for at in self._positions.values()]
        self._tiles = torch.tensor(fp8_tiles(matrices), dtype=torch.int32, device=flat.device)
        self._weights, self._transposed = (torch.zeros_like(flat.shadow.tensor, dtype=ACTIVATION) for _ in range(2))
        # Made here: a capture must not copy from the CPU.
        inverses = [[2.0**-power] * _ALIGNED for power in range(_POWERS)]
        self._inverses = torch.tensor(inverses, device=flat.device)

    def write(self) -> None:
        """Write the copies from the shadow, on the current stream."""
        kernels = kernels_on(self._tiles.device, "fp8")
        kernels.cast_weights(self._shadow.tensor, self._tiles, self._weights, self._transposed, WEIGHT_SCALE)

    def of(self, parameter: torch.Tensor) -> Fp8Weight:
        at = self._positions[id(parameter)]
        turned = at._replace(shape=torch.Size(reversed(at.shape)))
        weight, transposed = at.of(self._weights), turned.of(self._transposed)
        return Fp8Weight(Fp8(weight, WEIGHT_SCALE), Fp8(transposed, WEIGHT_SCALE))

    def cast(self, x: torch.Tensor, dtype: torch.dtype, scale: float) -> Fp8:
        out = torch.empty_like(x, dtype=dtype)
        kernels_on(x.device, "fp8").cast(x, out, scale)
        return Fp8(out, scale)

    def write_product(self, left: Fp8, right: Fp8, out: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        """Write left [M, K] @ right [N, K]^T + bias [N] to `out` [M, N]; `out` and `bias` are bfloat16."""
        if not left.values.is_cuda:
            product = left.values.float() @ right.values.float().t() / (left.scale * right.scale)
            out.copy_(product if bias is None else product + bias.float())
            return
        # Fast accumulation keeps sums in the tensor cores: without it, 8 bits are hardly faster than bfloat16.
        scales = self._inverse(left), self._inverse(right)
        torch.ops.aten._scaled_mm.out(  # noqa: SLF001
            left.values, right.values.t(), *scales, bias=bias, out_dtype=out.dtype, use_fast_accum=True, out=out
        )

    def _inverse(self, tensor: Fp8) -> torch.Tensor:
        return self._inverses[int(tensor.scale).bit_length() - 1, 0]
