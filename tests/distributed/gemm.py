"""Cases of `test_gemm`: products with their communication inside, forward and gradients, against float64.

Every rank makes all ranks' operands from seeds, so each holds its own results against the whole.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional

from dlrm_overlap.config import InputError
from dlrm_overlap.gemm.operators import all_gather_matmul, matmul_reduce_scatter
from tests.agreement import assert_near

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
"""of an element, see `assert_near`: operands, partial products and the output are rounded to the type"""
CULPRIT = 1


class Case(NamedTuple):
    """One product: the rows of a rank, N and K of its weight."""

    rows: int
    columns: int
    inner: int
    dtype: torch.dtype = torch.float32
    bias: bool = True
    activation: Any = "relu"


CASES = [
    Case(5, 7, 3),
    Case(1, 1, 1, bias=False),
    Case(4, 6, 8, torch.bfloat16),
    Case(3, 9, 5, torch.bfloat16, bias=False),
    Case(2, 5, 4, activation="none"),
    Case(6, 3, 2, bias=False, activation="none"),
]


def drawn(seed: int, *shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return numbers of about unit size, of `dtype`."""
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(*shape, generator=generator, device=device).to(dtype)


class Operands(NamedTuple):
    """One operator's operands of one rank and the gradient of its output, and what it must give."""

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    gradient: torch.Tensor
    expected: list[torch.Tensor]
    """float64: output, gradients of x, weight and, if there is one, bias"""


def _expected(case: Case, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    out = functional.linear(x, weight, bias)
    return out.relu() if case.activation == "relu" else out


def gather_operands(case: Case, rank: int, world_size: int, device: torch.device) -> Operands:
    """Return what rank `rank` gives `all_gather_matmul`, and what all ranks' operands make of it."""
    shards = [drawn(rank, case.rows, case.inner, dtype=case.dtype, device=device) for rank in range(world_size)]
    x = torch.cat(shards).double().requires_grad_()
    outputs, gradients, leaves = [], [], []
    for each in range(world_size):
        weight = drawn(100 + each, case.columns, case.inner, dtype=case.dtype, device=device)
        bias = drawn(200 + each, case.columns, dtype=case.dtype, device=device) if case.bias else None
        gradient = drawn(300 + each, world_size * case.rows, case.columns, dtype=case.dtype, device=device)
        own = [weight.double().requires_grad_(), None if bias is None else bias.double().requires_grad_()]
        outputs.append(_expected(case, x, own[0], own[1]))
        gradients.append(gradient)
        leaves.append((weight, bias, own))
    torch.autograd.backward(outputs, [gradient.double() for gradient in gradients])
    weight, bias, own = leaves[rank]
    assert x.grad is not None
    dx = x.grad[rank * case.rows : (rank + 1) * case.rows]
    expected = [outputs[rank].detach(), dx, *(leaf.grad for leaf in own if leaf is not None)]
    return Operands(shards[rank], weight, bias, gradients[rank], expected)


def scatter_operands(case: Case, rank: int, world_size: int, device: torch.device) -> Operands:
    """Return what rank `rank` gives `matmul_reduce_scatter`, and what all ranks' operands make of it."""
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
    biases = []
    parts = []
    for each, part in enumerate(total.split(case.rows)):
        biases.append(None if bias is None else bias.double().requires_grad_())
        part = part if biases[each] is None else part + biases[each]
        parts.append(part.relu() if case.activation == "relu" else part)
    torch.autograd.backward(torch.cat(parts), gradient.double())
    x, weight, own = leaves[rank]
    expected = [parts[rank].detach(), *(leaf.grad for leaf in (*own, biases[rank]) if leaf is not None)]
    return Operands(x, weight, bias, gradient[own_rows], expected)


def run(operator: Callable[..., torch.Tensor], operands: Operands, case: Case, **options: Any) -> list[torch.Tensor]:
    """Return the operator's output and gradients, in the order of `Operands.expected`."""
    leaves = [operands.x, operands.weight] + ([] if operands.bias is None else [operands.bias])
    leaves = [leaf.clone().requires_grad_() for leaf in leaves]
    out = operator(*leaves, *([None] * (3 - len(leaves))), case.activation, **options)
    out.backward(operands.gradient)
    return [out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


NAMES = ("output", "gradient of x", "gradient of weight", "gradient of bias")


def check_operators(case: Case, place: tuple[int, int], device: torch.device, **options: Any) -> None:
    """Check both operators, twice: the second time must give the same bits."""
    operators = ((all_gather_matmul, gather_operands), (matmul_reduce_scatter, scatter_operands))
    for operator, operands_of in operators:
        operands = operands_of(case, *place, device)
        found, again = (run(operator, operands, case, **options) for _ in range(2))
        for name, tensor, other, expected in zip(NAMES, found, again, operands.expected, strict=False):
            what = f"{operator.__name__} {case}, {options}: {name}"
            assert tensor.dtype == case.dtype, what
            assert_near(tensor.double(), expected, TOLERANCE[case.dtype], what)
            assert torch.equal(tensor, other), f"{what}, again"


def check_serial() -> None:
    """Every case by the serial way, which auto takes on a CPU."""
    for case in CASES:
        check_operators(case, (dist.get_rank(), dist.get_world_size()), torch.device("cpu"))


def check_autocast() -> None:
    """Under autocast the product is bfloat16, and gradients have the types of what they belong to."""
    x, weight = torch.ones(2, 3, requires_grad=True), torch.ones(4, 3, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        out = all_gather_matmul(x, weight)
    out.float().sum().backward()
    assert out.dtype == torch.bfloat16
    assert x.grad is not None
    assert weight.grad is not None
    assert x.grad.dtype == weight.grad.dtype == torch.float32
    assert x.grad.eq(4 * dist.get_world_size()).all()


def _told(call: Callable[[], Any]) -> str:
    with pytest.raises(InputError) as error:
        call()
    return str(error.value)


def check_mistakes() -> None:
    """A mistake of one rank is told on all, and the next call is as good as any."""
    wrong, ranks = dist.get_rank() == CULPRIT, dist.get_world_size()
    x, weight = torch.zeros(2 * ranks, 3), torch.zeros(4, 3)
    assert "must be [rows, K] and [N, K]" in _told(lambda: all_gather_matmul(x, weight.t() if wrong else weight))
    told = _told(lambda: all_gather_matmul(x, weight, torch.zeros(3 if wrong else 4)))
    assert "bias (3,): must be [4]" in told, told
    told = _told(lambda: all_gather_matmul(x, weight.bfloat16() if wrong else weight))
    assert "must be one floating type" in told, told
    told = _told(lambda: matmul_reduce_scatter(x[: -1 if wrong else None], weight))
    assert "pad x to a multiple" in told, told
    told = _told(lambda: all_gather_matmul(x[: 1 if wrong else None], weight))
    assert f"rank 0 calls all_gather_matmul(M {2 * ranks * ranks}" in told, told
    assert f"rank {CULPRIT} all_gather_matmul(M {ranks}," in told, told
    assert "way fast is not known" in _told(lambda: all_gather_matmul(x, weight, way="fast"))
    assert all_gather_matmul(x, weight).shape == (2 * ranks * ranks, 4)


QUICK: dict[str, Callable[[], None]] = {
    "serial": check_serial,
    "autocast": check_autocast,
    "mistakes": check_mistakes,
}
