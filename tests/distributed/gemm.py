"""Cases of `test_collectives`: products with their communication inside, forward and backward, against float64."""

import contextlib
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dlrm_overlap.dense.gemm.layer import ProductLayer
from dlrm_overlap.dense.gemm.operators import all_gather_matmul, matmul_reduce_scatter
from dlrm_overlap.dense.gemm.products import ParallelProducts
from dlrm_overlap.kernels.compiled import INTERPRETED
from tests.agreement import assert_same
from tests.distributed.interpreted import without_streams
from tests.distributed.models import CPU, world
from tests.distributed.products import Case, check_operators

CASES = [
    Case(5, 7, 3),
    Case(1, 1, 1, bias=False),
    Case(4, 6, 8, torch.bfloat16),
    Case(3, 9, 5, torch.bfloat16, bias=False),
    Case(2, 5, 4, activation="none"),
    Case(6, 3, 2, bias=False, activation="none"),
    Case(0, 3, 2),
    Case(4, 5, 3, torch.float16, views=True),
]


def _products() -> ParallelProducts:
    return ParallelProducts(world(), CPU)


def _check(case: Case, **options: Any) -> None:
    check_operators(case, (dist.get_rank(), dist.get_world_size()), CPU, **options)


def check_serial() -> None:
    """Auto is serial on a CPU."""
    for case in CASES:
        _check(case, products=_products())


def check_autocast() -> None:
    """Under autocast the product is bfloat16, and gradients have the types of their tensors."""
    x, weight = torch.ones(2, 3, requires_grad=True), torch.ones(4, 3, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        out = all_gather_matmul(x, weight, products=_products())
    out.float().sum().backward()
    assert out.dtype == torch.bfloat16
    assert x.grad is not None
    assert weight.grad is not None
    assert x.grad.dtype == weight.grad.dtype == torch.float32
    assert x.grad.eq(4 * dist.get_world_size()).all()


def check_kept() -> None:
    """Gathered rows are kept if a backward may need them, not in an evaluation."""
    products, kept = _products(), list[bool]()
    gather = products.all_gather_matmul

    def noted(
        x_shard: torch.Tensor, layer: ProductLayer, way: str, keep: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        kept.append(keep)
        return gather(x_shard, layer, way, keep)

    products.all_gather_matmul = noted  # type: ignore[method-assign]
    x, weight = torch.ones(2, 3), torch.ones(4, 3, requires_grad=True)
    for context in (torch.enable_grad(), torch.no_grad(), torch.inference_mode()):
        with context:
            all_gather_matmul(x, weight, products=products)
    all_gather_matmul(x, weight.detach(), products=products)
    assert kept == [True, False, False, False]


def check_compiled() -> None:
    """torch.compile leaves the operators as they are, and compiles the code around them."""
    x, weight = torch.ones(2, 3), torch.full((4, 3), 2.0, requires_grad=True)
    graphs, products = [], _products()

    def counted(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    @torch.compile(backend=counted)
    def pair(x: torch.Tensor) -> torch.Tensor:
        gathered = all_gather_matmul(x * 2, weight, products=products)
        return matmul_reduce_scatter(gathered, weight.t(), products=products) + 1

    out, ranks = pair(x), dist.get_world_size()
    assert graphs, "nothing was compiled"
    assert_same(out.detach(), torch.full((2, 3), 4 * 12.0 * 2 * ranks + 1), "the pair")
    out.sum().backward()
    assert weight.grad is not None


COPIED = [
    Case(19, 7, 3, torch.float16),
    Case(16, 8, 8, torch.bfloat16, bias=False),
    Case(9, 5, 2, torch.float16, bias=False, activation="none"),
    Case(1, 3, 4, torch.float16),
    Case(2, 5, 3, torch.bfloat16, views=True),
    Case(19, 1500, 2, torch.bfloat16),
]
"""small enough for the interpreter; 19 rows are parts of 8, 8 and 3, or of 16 and 3, or one for 1500 columns"""


@contextlib.contextmanager
def _between_gpus(timeout_s: float = 60.0) -> Iterator[ParallelProducts]:
    """Run products as between GPUs: kernels by the interpreter, copies by the CPU."""
    from dlrm_overlap.comm.copy_engine import CopyEngine
    from dlrm_overlap.dense.gemm.windows import ProductWindows
    from dlrm_overlap.kernels.gemm.product import Tiling

    def counted(engine: CopyEngine, word: torch.Tensor, count: int) -> None:
        assert int(word) >= count, "a part is sent that is not complete"

    with without_streams(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(CopyEngine, "wait_counter", counted)
        patch.setattr(ProductWindows, "tiling", Tiling(block_m=16, block_n=16, block_k=16, group=2))
        products = ParallelProducts(world(), CPU, timeout_s)
        yield products
        products.close()


def check_copies() -> None:
    """By copy engines and cuBLAS; ranks are late at random."""
    late = random.Random(dist.get_rank())
    with _between_gpus() as products:
        with torch.inference_mode():  # it allocates memory that training uses later
            all_gather_matmul(torch.ones(19, 3).half(), torch.ones(7, 3).half(), products=products, way="copies")
        for case in COPIED:
            time.sleep(late.choice([0, 2e-3]))
            _check(case, products=products, way="copies")


TILED = [
    Case(21, 16, 24, torch.bfloat16),
    Case(16, 8, 8, torch.float16, bias=False, activation="none"),
    Case(16, 8, 8, torch.float16, views=True),
]
"""N and K are multiples of 8, also in the gradients; 21 rows are two tiles"""


def check_tiles() -> None:
    """By one kernel with the communication inside, in windows that copies use, too."""
    with _between_gpus() as products:
        for case in TILED:
            for name in ("tiles", "triggered", "copies") if case is TILED[0] else ("tiles",):
                _check(case, products=products, way=name)


QUICK: dict[str, Callable[[], None]] = {
    "serial": check_serial,
    "autocast": check_autocast,
    "kept": check_kept,
    "compiled": check_compiled,
}
if INTERPRETED:
    QUICK |= {"copies": check_copies, "tiles": check_tiles}
