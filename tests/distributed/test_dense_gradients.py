"""Two ranks with samples of their own get the mean of their gradients, and train as one under DDP."""

from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from dlrm_overlap.dense.flat import FlatParameters
from dlrm_overlap.dense.gradients import GradientBuckets
from tests.agreement import assert_same
from tests.distributed import dense_stores
from tests.distributed.models import world
from tests.distributed.workers import cases_on_ranks

pytestmark = pytest.mark.slow  # tests of captured steps, which sum their gradients so, are not

STEPS = 4


class Branches(nn.Module):
    """A network with a second branch that a forward may leave out, and a layer that is not used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.last = nn.Linear(8, 70), nn.Linear(8, 70), nn.Linear(70, 1)
        self.unused = nn.Linear(3, 5)

    def forward(self, x: torch.Tensor, both: bool = True) -> torch.Tensor:
        hidden = self.first(x).tanh()
        return self.last(hidden + self.second(x).tanh() if both else hidden).square().mean()


def _samples(step: int, rank: int) -> torch.Tensor:
    return torch.randn(6, 8, generator=torch.Generator().manual_seed(step * 10 + rank))


def _gradients(model: nn.Module, step: int, rank: int, both: bool = True) -> dict[str, torch.Tensor]:
    twin = Branches()
    twin.load_state_dict(model.state_dict())
    twin(_samples(step, rank), both).backward()
    return {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in twin.named_parameters()}


def _check_mean(dtype: torch.dtype, bucket_bytes: int = 500, both: Sequence[bool] = (True, True)) -> None:
    """A rank that leaves out the branch, `not both[rank]`, has zeros for it."""
    rank = dist.get_rank()
    model = Branches()
    flat = FlatParameters(dict(model.named_parameters()))
    buckets = GradientBuckets(flat, world(), dtype, bucket_bytes)
    for step in range(STEPS):
        flat.zero()
        each = [_gradients(model, step, other, both[other]) for other in range(2)]
        model(_samples(step, rank), both[rank]).backward()
        buckets.finish()
        assert len(buckets.ranges) > 1
        for key, view in flat.gradients.views.items():
            first, second = ((gradients[key] / 2).to(dtype) for gradients in each)
            assert_same(view, (first + second).float(), f"{key} in step {step}")
            assert flat.parameters[key].grad is (None if key.startswith("unused") else view)
        flat.weights.tensor.sub_(flat.gradients.tensor)
    assert flat.idle == {"unused.weight", "unused.bias"}


def _check_ddp(make: Callable[..., torch.optim.Optimizer]) -> None:
    """A branch that rank 0 leaves out learns from rank 1 alone; what no rank uses neither learns nor decays."""
    rank = dist.get_rank()
    ours, theirs = Branches(), Branches()
    flat = FlatParameters(dict(ours.named_parameters()))
    optimizer, buckets = make(ours.parameters(), lr=0.1), GradientBuckets(flat, world(), bucket_bytes=500)
    wrapped = nn.parallel.DistributedDataParallel(theirs, find_unused_parameters=True)
    reference = make(theirs.parameters(), lr=0.1)
    for step in range(10):
        for model, each in ((ours, optimizer), (wrapped, reference)):
            each.zero_grad()
            model(_samples(step, rank), rank == 1).backward()
            if model is ours:
                buckets.finish()
            each.step()
    for (name, weight), expected in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert_same(weight.data, expected.data, name)
        assert (weight.grad is None) == (expected.grad is None) == name.startswith("unused")


CASES: dict[str, Callable[[], None]] = {
    "float32": partial(_check_mean, torch.float32),
    "bfloat16": partial(_check_mean, torch.bfloat16),
    "other parts on each rank": partial(_check_mean, torch.float32, 1, (False, True)),
    "as under DDP, with decay": partial(_check_ddp, torch.optim.AdamW),
} | dense_stores.CASES


def _run(case: str) -> None:
    CASES[case]()


two_ranks = cases_on_ranks(2, _run, list(CASES))
four_ranks = cases_on_ranks(4, _run, dense_stores.OF_FOUR)


@pytest.mark.parametrize("case", CASES)
def test_two_ranks(two_ranks: Callable[[str], None], case: str) -> None:
    two_ranks(case)


@pytest.mark.parametrize("case", dense_stores.OF_FOUR)
def test_four_ranks(four_ranks: Callable[[str], None], case: str) -> None:
    four_ranks(case)
