"""Cases of `test_dense_gradients`: gradients reduced by stores, by the kernels under Triton's interpreter.

Ranks are late at random. A rank fills a gradient with NaN once it has all of the mean, and with numbers just before it
signals: a read or write that is too early or too late gives something else than the mean.
"""

import random
import time
from collections.abc import Callable
from dataclasses import replace
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from dlrm_overlap.comm.device_errors import ExchangeTimeoutError
from dlrm_overlap.dense.flat import FlatParameters
from dlrm_overlap.dense.flat_steps import FlatSteps, take_steps
from dlrm_overlap.dense.functions import StoreOptions
from dlrm_overlap.dense.gradients import GradientBuckets
from dlrm_overlap.dense.stores import StoreReduction
from dlrm_overlap.kernels.compiled import INTERPRETED
from dlrm_overlap.kernels.dense.arguments import LINE
from tests.agreement import assert_near, assert_same
from tests.distributed.interpreted import without_streams
from tests.distributed.models import world

ELEMENTS = 5003  # 79 lines: shares and pieces of unequal size
RANGES = [(0, 7 * LINE), (7 * LINE, 79 * LINE)]
PIECE = 20 * LINE
CULPRIT = 1
ROUNDED = 2e-2  # the interpreter cuts bfloat16 off, once for each rank and once for the mean


def _reduction(dtype: torch.dtype) -> tuple[FlatParameters, StoreReduction]:
    flat = FlatParameters({"weight": nn.Parameter(torch.zeros(ELEMENTS))})
    return flat, StoreReduction(flat, world(), dtype, RANGES, StoreOptions(2, PIECE, 60.0))


def _gradient(step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(ELEMENTS, generator=generator).pow(3)


def _reduce(reduction: StoreReduction, flat: FlatParameters, late: Callable[[], None]) -> None:
    for number in range(len(RANGES)):
        late()
        reduction.reduce(number)
    gradient = flat.gradients.tensor
    before = 0
    for arrived in reduction.arrivals(None):
        assert gradient[before:arrived].isfinite().all(), f"elements {before} .. {arrived} have arrived"
        before = arrived
        late()
    assert before == RANGES[-1][1]


def _check_mean(dtype: torch.dtype, steps: int) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    source = random.Random(rank)
    flat, reduction = _reduction(dtype)
    gradient = flat.gradients.views["weight"]

    def late() -> None:
        time.sleep(source.choice([0, 0, 1e-4, 5e-3]))

    def average_late(*arguments: Any) -> None:
        late()
        average(*arguments)

    average = reduction._average
    reduction._average = average_late  # type: ignore[method-assign]
    for step in range(steps):
        gradient.copy_(_gradient(step, rank))
        _reduce(reduction, flat, late)
        each = [_gradient(step, other) for other in range(ranks)]
        exact = torch.stack(each).double().mean(0).float()
        assert_near(gradient, exact, 1e-6 if dtype == torch.float32 else ROUNDED, f"mean of step {step}")
        if dtype == torch.float32:
            total = reduce(torch.add, each)
            assert_same(gradient, total * (1 / ranks), f"sum in the order of the ranks in step {step}")
        gathered = [torch.empty_like(gradient) for _ in range(ranks)]
        if step % 10 == 0:
            dist.all_gather(gathered, gradient)
            for other, theirs in enumerate(gathered):
                assert_same(gradient, theirs, f"step {step}: rank {rank} and rank {other}")
        assert not flat.gradients.tensor[ELEMENTS:].any(), "padding stays zero"
        gradient.fill_(torch.nan)
        late()
    dist.barrier()
    reduction.close()
    assert flat.parameters["weight"].grad is gradient
    assert_same(gradient, torch.full_like(gradient, torch.nan), "the gradient, in memory of its own again")


def _check_dead_peer() -> None:
    """The other ranks name the culprit, which never signals."""
    flat, reduction = _reduction(torch.float32)
    _reduce(reduction, flat, lambda: None)
    dist.barrier()
    if dist.get_rank() != CULPRIT:
        began, told = time.monotonic(), None
        reduction._flags = [replace(flags, timeout=300) for flags in reduction._flags]  # turns of the interpreter
        try:
            reduction.reduce(0)
            reduction.check()
        except ExchangeTimeoutError as error:
            told = str(error)
        expected = f"for dense gradients' flag 0 of rank {CULPRIT}: expected epoch 2, seen 1"
        assert told is not None, "a dead peer"
        assert expected in told, told
        assert time.monotonic() - began < 20
    dist.barrier()


def _check_updates() -> None:
    """Pieces are updated as their gradients arrive, as torch.optim updates all by the mean."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    theirs = nn.Parameter(torch.zeros(ELEMENTS))
    reference = torch.optim.Adagrad([theirs], lr=0.1)
    flat = FlatParameters({"weight": nn.Parameter(torch.zeros(ELEMENTS))})
    steps = FlatSteps(flat, torch.optim.Adagrad(flat.parameters.values(), lr=0.1))
    buckets = GradientBuckets(flat, world(), stores=StoreOptions(piece_elements=1500, programs=2))
    for step in range(5):
        flat.gradients.views["weight"].copy_(_gradient(step, rank))
        buckets.complete("weight")
        taken = list[tuple[int, int]]()

        def noted(ranges: Any, taken: list[tuple[int, int]] = taken) -> Any:
            for each in ranges:
                taken.append(each)
                yield each

        take_steps([steps], noted(buckets.finish_in_ranges()))
        assert taken == [(0, 1024), (1024, 3072), (3072, 5120)], "pieces of 27 lines, rounded down to blocks"
        theirs.grad = reduce(torch.add, [_gradient(step, other) for other in range(ranks)]) * (1 / ranks)
        reference.step()
        assert_same(flat.weights.views["weight"], theirs.data, f"weights after step {step}")
    dist.barrier()
    buckets.close()


def _interpreted(check: Callable[..., None], *arguments: Any) -> Callable[[], None]:
    def run() -> None:
        with without_streams():
            check(*arguments)

    return run


CASES: dict[str, Callable[[], None]] = {}
if INTERPRETED:
    CASES = {f"stores, {dtype}": _interpreted(_check_mean, dtype, 2) for dtype in (torch.float32, torch.bfloat16)}
    CASES |= {"stores, updates": _interpreted(_check_updates), "stores, dead peer": _interpreted(_check_dead_peer)}
    CASES |= {
        f"stores, {dtype}, longer": _interpreted(_check_mean, dtype, 8) for dtype in (torch.float32, torch.bfloat16)
    }
OF_FOUR = [case for case in CASES if not case.endswith("longer")]
