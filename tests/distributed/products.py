"""Operands of products with their communication inside, and the right results: forward and gradients, in float64.

Every rank makes the operands of all ranks from seeds. Imports no pytest.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from dlrm_overlap.dense.gemm.operators import all_gather_matmul, matmul_reduce_scatter
from tests.agreement import assert_near, assert_same

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
"""of an element, see `assert_near`: operands, partial products and the output are rounded to the type"""


class Case(NamedTuple):
    """One product: the rows of a rank, N and K of its weight."""

    rows: int
    columns: int
    inner: int
    dtype: torch.dtype = torch.float32
    bias: bool = True
    activation: Any = "relu"
    views: bool = False
    """whether rows are later elements of another tensor, and the weight a transpose"""


def drawn(seed: int, *shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(*shape, generator=generator, device=device).to(dtype)


def _as_view(operand: torch.Tensor) -> torch.Tensor:
    """Return the same numbers in a view that begins at a tensor's element 1."""
    return torch.cat((operand.new_zeros(1), operand.flatten()))[1:].view_as(operand)


class Operands(NamedTuple):
    """One operator's operands of one rank, the gradient of its output, and the right results."""

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    gradient: torch.Tensor
    expected: list[torch.Tensor]
    """float64: output, gradients of x, weight and, if there is one, bias"""


def _activated(case: Case, z: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Return the activation of `z`. Where a relu's input is so small that rounding decides, `gradient` becomes zero."""
    if case.activation == "none":
        return z
    gradient[z.abs() < 0.1 * z.abs().mean()] = 0
    return z.relu()


def gather_operands(case: Case, rank: int, world_size: int, device: torch.device) -> Operands:
    """Return the operands of rank `rank` for `all_gather_matmul`, and the right results of all ranks'."""
    shards = [drawn(rank, case.rows, case.inner, dtype=case.dtype, device=device) for rank in range(world_size)]
    x = torch.cat(shards).double().requires_grad_()
    outputs, gradients, leaves = [], [], []
    for each in range(world_size):
        weight = drawn(100 + each, case.columns, case.inner, dtype=case.dtype, device=device)
        bias = drawn(200 + each, case.columns, dtype=case.dtype, device=device) if case.bias else None
        gradient = drawn(300 + each, world_size * case.rows, case.columns, dtype=case.dtype, device=device)
        own = [weight.double().requires_grad_(), None if bias is None else bias.double().requires_grad_()]
        outputs.append(_activated(case, functional.linear(x, own[0], own[1]), gradient))
        gradients.append(gradient)
        leaves.append((weight, bias, own))
    torch.autograd.backward(outputs, [gradient.double() for gradient in gradients])
    weight, bias, own = leaves[rank]
    assert x.grad is not None
    dx = x.grad[rank * case.rows : (rank + 1) * case.rows]
    expected = [outputs[rank].detach(), dx, *(leaf.grad for leaf in own if leaf is not None)]
    return Operands(shards[rank], weight, bias, gradients[rank], expected)


def scatter_operands(case: Case, rank: int, world_size: int, device: torch.device) -> Operands:
    """Return the operands of rank `rank` for `matmul_reduce_scatter`, and the right results of all ranks'."""
    rows = world_size * case.rows
    bias = drawn(500, case.columns, dtype=case.dtype, device=device) if case.bias else None
    gradient = drawn(600, rows, case.columns, dtype=case.dtype, device=device)
    total: Any = 0
    leaves = []
    for each in range(world_size):
        x = drawn(700 + each, rows, case.inner, dtype=case.dtype, device=device)
        weight = drawn(800 + each, case.columns, case.inner, dtype=case.dtype, device=device)
        own = [x.double().requires_grad_(), weight.double().requires_grad_()]
        total = total + functional.linear(*own)
        leaves.append((x, weight, own))
    own_rows = slice(rank * case.rows, (rank + 1) * case.rows)
    biases, parts = [], []
    for each, part in enumerate(total.tensor_split(world_size)):
        biases.append(None if bias is None else bias.double().requires_grad_())
        part = part if biases[each] is None else part + biases[each]
        parts.append(_activated(case, part, gradient[each * case.rows : (each + 1) * case.rows]))
    torch.autograd.backward(torch.cat(parts), gradient.double())
    x, weight, own = leaves[rank]
    expected = [parts[rank].detach(), *(leaf.grad for leaf in (*own, biases[rank]) if leaf is not None)]
    return Operands(x, weight, bias, gradient[own_rows], expected)


def run(operator: Callable[..., torch.Tensor], operands: Operands, case: Case, **options: Any) -> list[torch.Tensor]:
    """Return the operator's output and gradients, in the order of `Operands.expected`."""
    leaves = [operands.x, operands.weight] + ([] if operands.bias is None else [operands.bias])
    leaves = [leaf.clone().requires_grad_() for leaf in leaves]
    given = leaves
    if case.views:
        x, weight, *bias = leaves
        given = [_as_view(x), weight.t().contiguous().t(), *bias]
    out = operator(*given, *([None] * (3 - len(leaves))), case.activation, **options)
    out.backward(operands.gradient)
    return [out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


NAMES = ("output", "gradient of x", "gradient of weight", "gradient of bias")


def check_operators(
    case: Case, place: tuple[int, int], device: torch.device, looser: float = 1, **options: Any
) -> None:
    """Check both operators twice; the second results must have the same bits. `looser` is a factor of the tolerance.

    All calls come before the first assertion, since other ranks may find nothing wrong and go on.
    """
    calls = []
    for operator, operands_of in ((all_gather_matmul, gather_operands), (matmul_reduce_scatter, scatter_operands)):
        operands = operands_of(case, *place, device)
        calls.append((operator, operands.expected, *(run(operator, operands, case, **options) for _ in range(2))))
    for operator, expectations, found, again in calls:
        for name, tensor, other, expected in zip(NAMES, found, again, expectations, strict=False):
            what = f"{operator.__name__} {case}, {options}: {name}"
            assert tensor.dtype == case.dtype, what
            assert_near(tensor.double(), expected, looser * TOLERANCE[case.dtype], what)
            assert_same(other, tensor, f"{what}, again")
