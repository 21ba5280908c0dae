"""The low-rank cross network as one autograd function: matrix products, and one elementwise kernel per layer.

Notation is that of `kernels.dense.cross`. Tensors are stacked from the last layer to the first, as in the flat
gradient, so that the weight gradients of all layers are one batched product.
"""

from collections.abc import Callable, Sequence
from importlib import import_module, metadata
from typing import Any, NamedTuple, Protocol

import torch
from torch.autograd.function import once_differentiable

from dlrm_overlap.config import InputError
from dlrm_overlap.dense.functions import Write, kernels_on, product_into
from dlrm_overlap.kernels.dense.arguments import GROUP, CrossGradient, stack


class CrossLayer(NamedTuple):
    """Parameters of a layer of width N and rank R, or their gradients."""

    w: torch.Tensor
    """[N, R]"""
    v: torch.Tensor
    """[R, N]"""
    bias: torch.Tensor
    """[N] float32"""


QUACK = "0.6."
"""beginning of the version of quack-kernels, whose interface changes; as in pyproject.toml"""

Later = Callable[[str, Write], None]
"""takes a field name of `CrossLayer`, and a `Write` for this parameter of all layers"""


class ComputeLayer(Protocol):
    """Writes w = narrow @ layer.w^T and out = x0 * (w + layer.bias) + x; `x` is `x0` for the first layer."""

    def __call__(
        self,
        narrow: torch.Tensor,
        layer: CrossLayer,
        x0: torch.Tensor,
        x: torch.Tensor,
        w: torch.Tensor,
        out: torch.Tensor,
    ) -> None: ...


def _by_two_kernels(
    narrow: torch.Tensor, layer: CrossLayer, x0: torch.Tensor, x: torch.Tensor, w: torch.Tensor, out: torch.Tensor
) -> None:
    torch.mm(narrow, layer.w.t(), out=w)  # autocast ignores products with `out`
    kernels_on(x0.device, "cross").add_layer(x0, x, w, layer.bias, out)


def _by_one_kernel(
    narrow: torch.Tensor, layer: CrossLayer, x0: torch.Tensor, x: torch.Tensor, w: torch.Tensor, out: torch.Tensor
) -> None:
    kernels = import_module("dlrm_overlap.kernels.dense.cross_product")
    is_aligned = all(each % kernels.ALIGNED == 0 for each in layer.w.shape) and x0.data_ptr() % 16 == 0
    if x0.dtype == torch.bfloat16 and is_aligned and len(layer.w) >= kernels.NARROWEST:
        kernels.add_layer(narrow, layer.w, x0, x, layer.bias, w, out)
    else:
        _by_two_kernels(narrow, layer, x0, x, w, out)


def compute_layer(kind: str, device: torch.device) -> ComputeLayer:
    """Return how layers are computed on a device; `kind` is `train.cross_kernel`.

    Raises:
        InputError: if the kind is cutlass, and the device or the installed packages do not support it.
    """
    reason = "" if kind == "triton" else why_not_one_kernel(device)
    if kind == "cutlass" and reason:
        raise InputError(f"train.cross_kernel: cutlass, but {reason}; or take auto or triton")
    return _by_two_kernels if kind == "triton" or reason else _by_one_kernel


def why_not_one_kernel(device: torch.device) -> str:
    """Return why a layer's product cannot do the elementwise work as its epilogue; empty if it can."""
    is_nvidia = device.type == "cuda" and torch.version.hip is None
    if not is_nvidia or torch.cuda.get_device_capability(device) != (9, 0):
        return f"{device} is no GPU of compute capability 9.0, such as an H100; take one"
    try:
        version = metadata.version("quack-kernels")
    except metadata.PackageNotFoundError:
        return 'quack-kernels is not installed; run pip install "dlrm-overlap[cutlass]"'
    if not version.startswith(QUACK):
        return f'quack-kernels is {version}, and must be {QUACK}*; run pip install "dlrm-overlap[cutlass]"'
    return ""


def cross(
    x0: torch.Tensor, layers: Sequence[CrossLayer], later: Later, compute: ComputeLayer = _by_two_kernels
) -> torch.Tensor:
    """Return the cross network's output [b, N], in the dtype of x0; differentiable once.

    Layer l computes x_{l+1} = x_0 * (W_l (V_l x_l) + b_l) + x_l (Wang et al., DCN V2, arXiv 2008.13535, sections 3.2
    and 3.3).

    Args:
        x0: [b, N] floating point, contiguous; must require a gradient in training, and stay unchanged until the
            backward.
        layers: at least one; w and v have the dtype of x0. Autograd does not see the parameters.
        later: called in the backward for bias, v and w, in this order, with a function that writes the gradients. Call
            this function once, on the backward's stream. During the products for v, multiprocessors are free to send
            the gradient of x0, so v precedes w.
        compute: see `compute_layer`.
    """
    assert x0.requires_grad or not torch.is_grad_enabled(), "x0 has no gradient: no backward would write the weights'"
    return _Cross.apply(x0, later, compute, *(tensor.detach() for layer in layers for tensor in layer))  # type: ignore[no-any-return]


class _Cross(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x0: torch.Tensor, later: Later, compute: ComputeLayer, *parameters: torch.Tensor
    ) -> torch.Tensor:
        layers = _layers(parameters)
        inputs, products = stack(len(layers) - 1, x0), stack(len(layers), x0)  # x_{L-1} .. x_1; w_0 ..
        narrow = x0.new_empty(len(layers), len(x0), len(layers[0].v))
        output = torch.empty_like(x0)
        x = x0
        # x_{l+1} = x_0 * (W_l (V_l x_l) + b_l) + x_l
        for index, layer in enumerate(layers):
            left = len(layers) - 1 - index
            torch.mm(x, layer.v.t(), out=narrow[left])  # [b, R]
            after = inputs[left - 1] if left > 0 else output
            compute(narrow[left], layer, x0, x, products[index], after)
            x = after
        ctx.later = later
        ctx.save_for_backward(x0, inputs, products, narrow, *parameters)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x0, inputs, products, narrow, *parameters = ctx.saved_tensors
        layers = _layers(parameters)
        kernels = kernels_on(x0.device, "cross")
        through, du = stack(len(layers) - 1, x0), stack(len(layers), x0)  # p_1 ..; du_{L-1} .. du_0
        dx, dv = torch.empty_like(x0), torch.empty_like(narrow)
        bias = torch.stack([layer.bias for layer in layers])
        sums = bias.new_empty(len(layers), -(-len(x0) // GROUP), x0.shape[1])
        gradient = gradients[0].contiguous()
        # From the last layer to the first: gradients of the products, and dx at the first layer.
        for turn, index in enumerate(reversed(range(len(layers)))):
            tensors = CrossGradient(gradient, through, x0, products, bias, du[turn], dx, sums[index])
            kernels.gradient_of_layer(tensors, index, len(layers))
            torch.mm(du[turn], layers[index].w, out=dv[turn])  # [b, R]
            if index > 0:
                torch.mm(dv[turn], layers[index].v, out=through[index - 1])
            else:
                dx.addmm_(dv[turn], layers[0].v)

        # The products of the weight gradients, for the caller to run: bias, v, w.
        @torch.no_grad()
        def write_v(into: list[torch.Tensor]) -> None:
            _products_into(into[:0:-1], dv[:-1].transpose(1, 2), inputs)
            _products_into(into[:1], dv[-1:].transpose(1, 2), x0[None])

        @torch.no_grad()
        def write_w(into: list[torch.Tensor]) -> None:
            _products_into(into[::-1], du.transpose(1, 2), narrow)

        @torch.no_grad()
        def write_bias(into: list[torch.Tensor]) -> None:
            torch._foreach_copy_(into, list(sums.sum(1)))  # type: ignore[no-untyped-call]

        ctx.later("bias", write_bias)
        ctx.later("v", write_v)
        ctx.later("w", write_w)
        return dx, None, None, *(None for _ in parameters)


def _layers(tensors: Sequence[torch.Tensor]) -> list[CrossLayer]:
    return [CrossLayer(*tensors[first : first + 3]) for first in range(0, len(tensors), 3)]


def _products_into(out: Sequence[torch.Tensor], left: torch.Tensor, right: torch.Tensor) -> None:
    """Write left @ right, [n, N, b] and [n, b, R], to the n tensors `out`, accumulated in float32.

    If the tensors are a constant stride apart, one batched product is run, since a single product does not fill a GPU.
    """
    batch = _as_batch(out)
    if batch is None:
        for index, each in enumerate(out):
            _products_into([each], left[index : index + 1], right[index : index + 1])
    else:
        product_into(batch, left, right)


def _as_batch(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    if not tensors:
        return None
    first = tensors[0]
    offsets = [tensor.storage_offset() for tensor in tensors]
    apart = offsets[1] - offsets[0] if len(offsets) > 1 else first.numel()
    expected = list(range(offsets[0], offsets[0] + len(tensors) * apart, apart)) if apart >= first.numel() else []
    storages = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    if len(storages) > 1 or offsets != expected:
        return None
    return first.as_strided((len(tensors), *first.shape), (apart, *first.stride()))
