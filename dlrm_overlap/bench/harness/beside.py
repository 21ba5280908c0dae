"""The embedding stage beside a matrix product that has nothing to do with it, as a dense part's."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dlrm_overlap.bench.harness.computations import make_product
from dlrm_overlap.bench.harness.contenders import Contender
from dlrm_overlap.bench.harness.rounds import Timing, time_contenders
from dlrm_overlap.bench.harness.timing import fraction_of_ideal
from dlrm_overlap.bench.harness.workload import Workload

_SIZE = {"cuda": 8192, "cpu": 128}


class _Product(Contender):
    """A square product in bf16 alone."""

    def __init__(self, workload: Workload) -> None:
        size = _SIZE[workload.device.type]
        self.product = make_product(f"product_{size}", size, size, size, workload.device)
        super().__init__(self.product.name, workload)

    def step(self, batch: Any) -> None:
        """Multiply."""
        self.product.call()


class _Beside(Contender):
    """Another contender's step beside the product, which begins first, on a stream of its own."""

    def __init__(self, product: _Product, contender: Contender) -> None:
        super().__init__(contender.name, contender.workload)
        self._product, self._contender = product, contender
        on_gpu = contender.workload.device.type == "cuda"
        self._stream = torch.cuda.Stream(contender.workload.device, priority=-1) if on_gpu else None

    def step(self, batch: Any) -> None:
        """Take the step and multiply; the current stream waits for both."""
        if self._stream is None:
            self._product.step(batch)
            self._contender.step(batch)
            return
        current = torch.cuda.current_stream(self.workload.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            self._product.step(batch)
        self._contender.step(batch)
        current.wait_stream(self._stream)


@dataclass(frozen=True)
class BesideProduct:
    """How long a contender's stage takes beside the product."""

    product: str | None = None
    """the product; None where nothing was measured"""
    product_ms: float | None = None
    """its time alone"""
    together_ms: float | None = None
    """of both"""
    fraction_of_ideal: float | None = None
    """(speedup - 1) / (ideal - 1) of both over one after the other, as in `bench concurrent`"""


def time_beside_product(
    contenders: Sequence[Contender], alone: Sequence[Timing], workload: Workload, steps: int
) -> list[BesideProduct]:
    """Return a `BesideProduct` for each contender, given its times alone. All ranks call this."""
    product = _Product(workload)
    beside = [_Beside(product, contender) for contender in contenders]
    first, *together = time_contenders([product, *beside], workload.batches, workload, steps)
    return [
        _compare(product.name, first.times.median_ms, stage.times.median_ms, both.times.median_ms)
        for stage, both in zip(alone, together, strict=True)
    ]


def _compare(product: str, product_ms: float, stage_ms: float, together_ms: float) -> BesideProduct:
    """Return the columns of a stage.

    Example: a product of 1.4 ms and a stage of 2 ms take 2.2 ms together: the speedup is 3.4 / 2.2 = 1.55, the ideal
    3.4 / 2 = 1.7, the fraction 0.55 / 0.7 = 0.78.
    """
    ideal = fraction_of_ideal(product_ms, stage_ms, together_ms)["fraction_of_ideal"]
    return BesideProduct(product, product_ms, together_ms, ideal)
