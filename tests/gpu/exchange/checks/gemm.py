"""Products with their communication inside: every way against float64, under delays, captured; lost peers."""

from functools import cache, partial

import torch

from dlrm_overlap.dense.gemm.operators import all_gather_matmul, matmul_reduce_scatter
from dlrm_overlap.dense.gemm.products import ParallelProducts
from tests.agreement import assert_same
from tests.distributed.products import Case, check_operators
from tests.gpu.exchange.checks.faults import CULPRIT, TIMEOUT_S, flag_error
from tests.gpu.exchange.checks.stress import capture, take_late
from tests.gpu.exchange.place import Place, every

_HALF, _BRAIN = torch.float16, torch.bfloat16
_CASES = (
    Case(1, 1, 1, _BRAIN, bias=False),
    Case(5, 7, 3, _HALF),
    Case(300, 129, 65, _BRAIN),
    Case(8, 8, 8, _BRAIN, bias=False),
    Case(1024, 264, 520, _HALF, activation="none"),
    Case(2051, 513, 999, _BRAIN),
    Case(1030, 264, 520, _BRAIN, views=True),
    Case(300, 2100, 64, _BRAIN),
)
_TILED = (  # for tiles, which need N and K that are multiples of 8
    Case(8, 8, 8, _BRAIN, bias=False),
    Case(1024, 264, 520, _HALF, activation="none"),
    Case(2051, 520, 1000, _BRAIN),
    Case(1030, 264, 520, _BRAIN, views=True),
    Case(300, 2104, 64, _BRAIN),
)
_WAYS = ("auto", "serial", "copies", "tiles", "triggered")
_STEPS = 1000
_CALLS = ("copies", "tiles", "triggered")
_KEEPS = ("copies", "tiles")  # ways that keep gathered rows for the weight's gradient
_products_of = cache(ParallelProducts)  # one for each group and device; its windows may outlive a check


def _poison(place: Place, products: ParallelProducts) -> None:
    """Fill all windows with NaN while no rank is in a call."""
    place.meet()
    for window in products.windows.arenas if products.windows else ():
        window.local("memory").fill_(255)
    place.meet()


def _check_equal(place: Place, way: str) -> None:
    """Outputs and gradients at all sizes, whatever was in the windows."""
    products = _products_of(place.group, place.device)
    looser = 3 if way.startswith(("auto", "serial")) else 1  # NCCL sums in the tensors' dtype, not in float32
    for case in _TILED if way.startswith(("tiles", "triggered")) else _CASES:
        for _ in range(2):
            check_operators(case, (place.rank, place.world_size), place.device, looser, products=products, way=way)
            _poison(place, products)
    products.close()


class _Steps:
    """Steps of both operators in several ways. Inputs, and so outputs, are 1, 2, 4 or 8 times the same.

    Each input is overwritten with NaN after its call, and other products run on another stream.
    """

    def __init__(self, place: Place, timeout_s: float = 20.0) -> None:
        self.place, device, ranks = place, place.device, place.world_size
        self.products = _products_of(place.group, device)
        self.products.wait_timeout_s = timeout_s
        drawn = place.generator(place.rank)

        def halves(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=drawn, device=device).to(_BRAIN)

        self.shard, self.rows = halves(700, 256), halves(700 * ranks, 256)
        self.weights = [halves(192, 256), halves(320, 256)]
        self.inputs = [torch.empty_like(self.shard), torch.empty_like(self.rows)]
        self.number = torch.zeros((), device=device)
        self.bad = torch.zeros((), dtype=torch.int64, device=device)
        self.kept_weight = self.weights[0].clone().requires_grad_()
        self.expected = [self._gather("serial", self.shard), self._scatter("copies", self.rows)]
        self.expected.append(self._gradient("serial", self.shard))
        self.factor, self.other = halves(1024, 1024), torch.cuda.Stream(device)

    def _gather(self, way: str, x: torch.Tensor) -> torch.Tensor:
        return all_gather_matmul(x, self.weights[0], None, "relu", products=self.products, way=way)

    def _scatter(self, way: str, x: torch.Tensor) -> torch.Tensor:
        return matmul_reduce_scatter(x, self.weights[1], None, "relu", products=self.products, way=way)

    def _gradient(self, way: str, x: torch.Tensor) -> torch.Tensor:
        """Return the gradient of the weight by the rows that were kept, for an output gradient of ones."""
        out = all_gather_matmul(x, self.kept_weight, None, "none", products=self.products, way=way)
        if x is not self.shard:
            x.fill_(float("nan"))
        (gradient,) = torch.autograd.grad(out, self.kept_weight, torch.ones_like(out))
        return gradient

    def take(self) -> None:
        """Take a step, which can be captured."""
        current = torch.cuda.current_stream()
        self.number.copy_((self.number + 1) % 4)
        scale = torch.exp2(self.number)
        for way in _CALLS:
            self.other.wait_stream(current)
            with torch.cuda.stream(self.other):
                torch.mm(self.factor, self.factor)
            calls, sources = (self._gather, self._scatter, self._gradient), (self.shard, self.rows, self.shard)
            inputs = (self.inputs[0], self.inputs[1], self.inputs[0])
            for call, x, source, expected in zip(calls, inputs, sources, self.expected, strict=True):
                if call == self._gradient and way not in _KEEPS:
                    continue
                x.copy_(source * scale)
                out = call(way, x)
                x.fill_(float("nan"))  # must not be read any more
                error = (out.float() - expected.float() * scale).abs()
                # Some ways sum in another order; stale numbers, of around 20, are off by half.
                self.bad += (~(error <= 0.5 * scale + 0.05 * expected.float().abs() * scale)).sum()
            current.wait_stream(self.other)

    def check(self, what: str) -> None:
        self.place.synchronize()
        self.products.check()
        assert int(self.bad) == 0, f"{what}: {int(self.bad)} numbers are wrong"


def _check_any_delays(place: Place, mode: str) -> None:
    steps = _Steps(place)
    steps.take()
    _poison(place, steps.products)
    take_late(place, steps.take, mode, _STEPS // len(_CALLS))
    steps.check(mode)
    place.close(steps.products)


def _check_nothing(place: Place) -> None:
    """Without rows the output is empty; without anything to sum it is the bias."""
    products, ranks = _products_of(place.group, place.device), place.world_size
    for rows, inner in ((0, 16), (8, 0)):
        x = torch.ones(rows, inner, device=place.device, dtype=_BRAIN)
        weight, bias = x.new_ones(8, inner), x.new_ones(8)
        out = all_gather_matmul(x, weight, bias, products=products)
        assert_same(out, x.new_ones(rows * ranks, 8), f"gathered, {rows} rows, K {inner}")
        out = matmul_reduce_scatter(x.new_ones(rows * ranks, inner), weight, bias, products=products)
        assert_same(out, x.new_ones(rows, 8), f"scattered, {rows} rows, K {inner}")
    place.close(products)


def _check_owners(place: Place) -> None:
    """Captured calls of one owner continue after another owner with the same problems has freed its memory."""
    x = torch.ones(64, 32, device=place.device, dtype=_BRAIN)
    weight, outputs = torch.ones(16, 32, device=place.device, dtype=_BRAIN), []
    mine, other = (ParallelProducts(place.group, place.device) for _ in range(2))

    def step() -> None:
        outputs[:] = [all_gather_matmul(x, weight, products=mine, way=way) for way in ("copies", "tiles")]

    step()
    for way in ("copies", "tiles"):
        all_gather_matmul(x, weight, products=other, way=way)
    replay = capture(place, step)
    place.close(other)
    x.fill_(2)
    replay()
    place.meet()
    for out in outputs:
        assert_same(out, torch.full_like(out, 64), "a replay after another owner was closed")
    mine.close()


def _check_inference_first(place: Place) -> None:
    """Training can use the memory that an evaluation in inference mode has allocated."""
    case, ranks = Case(1024, 264, 520, _HALF, activation="none"), place.world_size
    x = torch.ones(case.rows * ranks, case.inner, device=place.device, dtype=case.dtype)
    weight = x.new_ones(case.columns, case.inner)
    products = _products_of(place.group, place.device)
    for way in ("copies", "tiles", "triggered"):
        with torch.inference_mode():
            all_gather_matmul(x[: case.rows], weight, products=products, way=way)
            matmul_reduce_scatter(x, weight, products=products, way=way)
        check_operators(case, (place.rank, ranks), place.device, products=products, way=way)
    place.close(products)


def _check_lost_peer(place: Place, operator: str, how: str, way: str) -> None:
    """All ranks except the culprit raise an error that names the peer, in time."""
    products, ranks = _products_of(place.group, place.device), place.world_size
    products.wait_timeout_s = TIMEOUT_S
    x, weight = (torch.ones(n, 64, device=place.device, dtype=_BRAIN) for n in (64 * ranks, 32))

    def call() -> None:
        run = all_gather_matmul if operator == "gather" else matmul_reduce_scatter
        run(x, weight, products=products, way=way)

    for _ in range(2):
        call()
    replay = capture(place, call) if how == "captured" else call
    place.meet()
    flag, message = flag_error(place, products.check, "product's part", replay)
    assert flag[:3] == [place.rank, 0, CULPRIT], message
    place.leave()


CHECKS = (
    every("gemm", _check_equal, way=list(_WAYS), gpu_only=True)
    | every("gemm_nothing", _check_nothing, gpu_only=True)
    | every("gemm_owners", _check_owners, gpu_only=True)
    | every("gemm_inference_first", _check_inference_first, gpu_only=True)
    | every("gemm_delays", _check_any_delays, mode=("eager", "captured", "mixed"), gpu_only=True)
)
LOST = {
    name: check
    for operator in ("gather", "scatter")
    for how, way in (("dies", "tiles"), ("captured", "copies"))
    for name, check in every(
        f"gemm_{operator}_peer_{how}_{way}", partial(_check_lost_peer, operator=operator, how=how, way=way),
        timeout_s=60.0, gpu_only=True, alone=True,
    ).items()
}  # fmt: skip
