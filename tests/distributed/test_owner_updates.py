"""Owners update their shares of the dense weights, by the kernels under Triton's interpreter.

Results have the bits of means that every rank gets, and updates of all weights on every rank, by the same kernels.
"""

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from dlrm_overlap.config import Config, InputError
from dlrm_overlap.dense import flat_steps
from dlrm_overlap.dense.flat import FlatParameters
from dlrm_overlap.dense.flat_steps import FlatSteps, take_steps
from dlrm_overlap.dense.functions import StoreOptions
from dlrm_overlap.dense.gradients import GradientBuckets, OwnedSteps
from dlrm_overlap.kernels.compiled import INTERPRETED
from dlrm_overlap.train.graphs.train_pipeline import GraphTrainPipeline
from tests.agreement import assert_all_near, assert_same
from tests.conftest import refuses
from tests.distributed.captured import captures
from tests.distributed.interpreted import without_streams
from tests.distributed.models import world
from tests.distributed.test_graph_pipeline import ADAM, BF16, DCN, _batches, _close, _evaluate, _state, _train, _trainer
from tests.distributed.workers import cases_on_ranks

STORES = StoreOptions(programs=2, piece_elements=1 << 20, wait_timeout_s=60.0)
# In the order of the model; the backward completes them from the last to the first.
SHAPES = {"first": (3, 7), "shard": (5,), "bias": (130,), "idle": (9,), "wide": (40, 41), "last": (11, 70)}
SHARD, IDLE, IN_FLOAT32 = "shard", "idle", "bias"
_ADAM = partial(torch.optim.AdamW, lr=0.1, weight_decay=0.1)
_ADAGRAD, _SGD = partial(torch.optim.Adagrad, lr=0.1), partial(torch.optim.SGD, lr=0.1)


@contextmanager
def _interpreted_updates() -> Iterator[None]:
    from dlrm_overlap.kernels.dense import update

    with without_streams(), patch.object(flat_steps, "kernels_on", lambda *_: update):
        yield


def _gradients(step: int, rank: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return {name: torch.randn(shape, generator=generator).pow(3) for name, shape in SHAPES.items() if name != IDLE}


class _Model:
    """Parameters, and steps that read their shadow in a forward and in a backward, under random delays."""

    def __init__(self, make: Callable[..., torch.optim.Optimizer], dtype: torch.dtype, by_owners: bool) -> None:
        generator = torch.Generator().manual_seed(7)
        parameters = {name: nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in SHAPES.items()}
        self.flat = FlatParameters(parameters, [SHARD], torch.bfloat16)
        self.steps = FlatSteps(self.flat, make(parameters.values()))
        owned = OwnedSteps(self.steps, [IN_FLOAT32]) if by_owners else None
        self.buckets = GradientBuckets(self.flat, world(), dtype, bucket_bytes=2000, stores=STORES, owned=owned)
        self._late, self._rank = random.Random(dist.get_rank()), dist.get_rank()

    def late(self) -> None:
        time.sleep(self._late.choice([0, 0, 1e-4, 5e-3]))

    def step(self, number: int) -> None:
        shadow, weights = self.flat.shadow, self.flat.weights
        assert shadow is not None
        if (owners := self.buckets.owners) is not None:
            owners.is_stale = True
        forward = {name: view.clone() for name, view in shadow.views.items()}
        bias = weights.views[IN_FLOAT32].clone()
        gradients = _gradients(number, self._rank)
        self.flat.show_gradients()
        for name in self.flat.parameters:
            self.late()
            # Peers that are ahead must not overwrite what this backward still reads.
            assert_same(shadow.views[name], forward[name], f"{name} in the backward of step {number}")
            assert_same(weights.views[IN_FLOAT32], bias, f"float32 weights in the backward of step {number}") if (
                name == IN_FLOAT32
            ) else None
            if name == IDLE:
                continue
            self.flat.gradients.views[name].copy_(gradients[name])
            self.buckets.complete(name)
        if owners is None:
            take_steps([self.steps], self.buckets.finish_in_ranges())
        else:
            for first, end in list(self.buckets.finish_in_ranges()):
                if first >= self.flat.shared_end:
                    self.steps.update_range(first, end)
        self.late()
        for view in self.flat.gradients.views.values():  # peers have read them
            view.fill_(torch.nan)

    def used(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat([position.of(tensor).flatten() for position in self.flat.positions.values()])


def _check_steps(make: Callable[..., torch.optim.Optimizer], dtype: torch.dtype, steps: int) -> None:
    ours, theirs = _Model(make, dtype, by_owners=True), _Model(make, dtype, by_owners=False)
    owners = ours.buckets.owners
    assert owners is not None
    for step in range(steps):
        ours.step(step)
        theirs.step(step)
        assert ours.flat.shadow is not None
        assert theirs.flat.shadow is not None
        for name, view in ours.flat.shadow.views.items():
            assert_same(view, theirs.flat.shadow.views[name], f"bfloat16 {name} after step {step}")
        for name in (SHARD, IN_FLOAT32):
            found, expected = ours.flat.weights.views[name], theirs.flat.weights.views[name]
            assert_same(found, expected, f"float32 {name} after step {step}")
        if step in (0, steps - 1):
            own, whole = ours.flat.weights.tensor, theirs.flat.weights.tensor
            assert not torch.equal(ours.used(own), theirs.used(whole)), "the other shares are out of date"
            owners.gather()
            assert_same(ours.used(own), theirs.used(whole), f"weights after step {step}")
            for found, expected in zip(ours.steps.update.states, theirs.steps.update.states, strict=True):
                assert_same(ours.used(found), theirs.used(expected), f"a state after step {step}")
            assert_same(ours.steps.update.step, theirs.steps.update.step, "counts of steps")
    dist.barrier()
    for model in (ours, theirs):
        before = model.used(model.flat.weights.tensor).clone()
        model.buckets.close()
        assert_same(model.used(model.flat.weights.tensor), before, "weights, in memory of their own again")
        for name, parameter in model.flat.parameters.items():
            assert parameter.data_ptr() == model.flat.weights.views[name].data_ptr(), name


def _trainer_by(update: str, *options: str) -> "object":
    return _trainer("graph", *DCN, *BF16, "--train.dense_update", update, *options)


CASES: dict[str, Callable[[], None]] = {}


def _run(case: str) -> None:
    with _interpreted_updates():
        CASES[case]()


if INTERPRETED:
    CASES |= {
        "adagrad": partial(_check_steps, _ADAGRAD, torch.float32, 3),
        "adam": partial(_check_steps, _ADAM, torch.float32, 3),
        "sgd": partial(_check_steps, _SGD, torch.float32, 3),
        "bfloat16 gradients": partial(_check_steps, _ADAM, torch.bfloat16, 3),
        "longer": partial(_check_steps, _ADAGRAD, torch.float32, 40),
    }
QUICK = [case for case in CASES if case != "longer"]

two_ranks = cases_on_ranks(2, _run, QUICK)
four_ranks = cases_on_ranks(4, _run, list(CASES))


@pytest.mark.parametrize("case", QUICK)
def test_two_ranks(two_ranks: Callable[[str], None], case: str) -> None:
    two_ranks(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_four_ranks(four_ranks: Callable[[str], None], case: str) -> None:
    four_ranks(case)
