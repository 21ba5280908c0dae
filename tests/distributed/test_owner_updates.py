"""Owners update their shares of the dense weights, by the kernels under Triton's interpreter.

Results have the bits of means that every rank gets, and updates of all weights on every rank, by the same kernels.
"""

import copy
import logging
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchrec.optim.clipping import GradientClipping, GradientClippingOptimizer
from torchrec.optim.keyed import CombinedOptimizer

from dlrm_overlap.checkpoint.checkpoint import extents_to_store
from dlrm_overlap.checkpoint.storage import read_weights
from dlrm_overlap.dense import flat_steps
from dlrm_overlap.dense.flat import FlatParameters
from dlrm_overlap.dense.flat_steps import FlatSteps, take_steps
from dlrm_overlap.dense.functions import StoreOptions
from dlrm_overlap.dense.gradients import GradientBuckets, OwnedSteps
from dlrm_overlap.kernels.compiled import INTERPRETED
from dlrm_overlap.torchrec_private.check import check_private_api
from dlrm_overlap.train.graphs import dense_step, train_pipeline
from dlrm_overlap.train.graphs.train_pipeline import GraphTrainPipeline
from dlrm_overlap.train.trainer import Trainer
from tests.agreement import assert_all_near, assert_same
from tests.conftest import refuses
from tests.distributed.captured import captures
from tests.distributed.interpreted import without_streams
from tests.distributed.models import world
from tests.distributed.test_graph_pipeline import (
    ADAM,
    BF16,
    DCN,
    Losses,
    _batches,
    _checkpointer,
    _close,
    _evaluate,
    _state,
    _train,
    _trainer,
)
from tests.distributed.workers import cases_on_ranks

STORES = StoreOptions(programs=2, piece_elements=1 << 20, wait_timeout_s=60.0)
# In the order of the model; the backward completes them from the last to the first.
SHAPES = {"first": (3, 7), "shard": (5,), "bias": (130,), "idle": (9,), "wide": (40, 41), "last": (11, 70)}
SHARD, IDLE = "shard", "idle"
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
    """Parameters, and steps that read their shadow in a forward and in a backward, under random delays.

    One parameter, which is not in the last bucket if it is deferred, is also read in float32.
    """

    def __init__(
        self, make: Callable[..., torch.optim.Optimizer], dtype: torch.dtype, by_owners: bool, defers: bool
    ) -> None:
        generator = torch.Generator().manual_seed(7)
        parameters = {name: nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in SHAPES.items()}
        self.flat = FlatParameters(parameters, [SHARD], torch.bfloat16)
        self.steps = FlatSteps(self.flat, make(parameters.values()))
        self.in_float32 = "wide" if defers else "bias"
        owned = OwnedSteps(self.steps, {self.in_float32}, defers) if by_owners else None
        self.buckets = GradientBuckets(self.flat, world(), dtype, bucket_bytes=2000, stores=STORES, owned=owned)
        self.deferred = self.buckets.deferred
        assert (self.deferred is not None) == (by_owners and defers)
        self._late, self._rank = random.Random(dist.get_rank()), dist.get_rank()
        self.forward: dict[str, torch.Tensor] = {}
        """copies of what a forward reads, taken as soon as it may read: the next one, or if a bucket is deferred the
        last one"""
        reduction: Any = self.buckets._reduction
        average = reduction._average

        def average_late(piece: Any) -> None:
            time.sleep(self._late.choice([0, 3e-2]))  # longer than an interpreted kernel
            average(piece)

        reduction._average = average_late

    def late(self) -> None:
        time.sleep(self._late.choice([0, 0, 1e-4, 5e-3]))

    def step(self, number: int) -> None:
        shadow, weights = self.flat.shadow, self.flat.weights
        assert shadow is not None
        if (owners := self.buckets.owners) is not None:
            owners.is_stale = True
        if self.deferred is not None:
            self.deferred.reduce()
            self.late()
            self.deferred.wait()
            self._read()
        bias = weights.views[self.in_float32].clone()
        self.forward = self.forward or {name: view.clone() for name, view in shadow.views.items()}
        gradients = _gradients(number, self._rank)
        self.flat.show_gradients()
        for name in self.flat.parameters:
            self.late()
            # Peers that are ahead must not overwrite what this backward still reads.
            assert_same(shadow.views[name], self.forward[name], f"{name} in the backward of step {number}")
            if name == self.in_float32:
                assert_same(weights.views[name], bias, f"float32 {name} in the backward of step {number}")
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
        if self.deferred is not None:
            self.deferred.step_is_issued()
        else:
            self._read()
        self.late()

    def _read(self) -> None:
        """Copy what the forward reads, and overwrite the gradients, which peers have read."""
        assert self.flat.shadow is not None
        self.forward = {name: view.clone() for name, view in self.flat.shadow.views.items()}
        self.forward[f"float32 {self.in_float32}"] = self.flat.weights.views[self.in_float32].clone()
        for view in self.flat.gradients.views.values():
            view.fill_(torch.nan)

    def used(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat([position.of(tensor).flatten() for position in self.flat.positions.values()])


def _check_steps(
    make: Callable[..., torch.optim.Optimizer], dtype: torch.dtype, steps: int, defers: bool = False
) -> None:
    ours, theirs = (_Model(make, dtype, by_owners, defers) for by_owners in (True, False))
    owners = ours.buckets.owners
    assert owners is not None
    for step in range(steps):
        before = dict(theirs.forward)
        ours.step(step)
        theirs.step(step)
        expected = before or ours.forward if defers else theirs.forward
        for name, found in ours.forward.items():
            assert_same(found, expected[name], f"{name} after step {step}")
        found, expected = (model.flat.weights.views[SHARD] for model in (ours, theirs))
        assert_same(found, expected, f"float32 {SHARD} after step {step}")
        if step in (0, steps // 2, steps - 1):
            own, whole = ours.flat.weights.tensor, theirs.flat.weights.tensor
            assert not torch.equal(ours.used(own), theirs.used(whole)), "the other shares are out of date"
            if ours.deferred is not None:
                ours.deferred.flush()
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


def _trainers(*options: str, update: str = "owner") -> tuple[Trainer, Trainer]:
    """Return trainers of captured steps whose owners update weights, and on whose ranks all are updated."""
    each = (_trainer("graph", *DCN, *BF16, "--train.dense_update", update, *options) for update in (update, "all"))
    return next(each), next(each)


def _owners(trainer: Trainer) -> Any:
    assert isinstance(trainer.pipeline, GraphTrainPipeline)
    return trainer.pipeline._dense.buckets.owners


def _check_captured(*options: str, update: str = "owner") -> None:
    """Segments that are captured or not, with evaluations between them and within one, have the bits of the old way."""
    with captures() as taken, patch.object(dense_step, "_BUCKET_BYTES", 1 << 10):
        ours, theirs = _trainers(*options, update=update)
        for what, (found, expected) in enumerate(zip(_run_all(ours), _run_all(theirs), strict=True)):
            assert_same(found, expected, f"result {what}")
        assert _owners(ours) is not None
        assert _owners(theirs) is None
        pipeline: Any = ours.pipeline
        assert (pipeline._dense.buckets.deferred is not None) == (update == "owner_deferred")
        assert taken["captured"] >= 4
        assert taken["replayed"] >= 8
        ours.gather_dense()
        assert_all_near(_state(ours), _state(theirs), 0.0, "weights and states")
        _close(ours, theirs)
    assert_all_near(_state(ours), _state(theirs), 0.0, "weights and states in memory of their own")


def _run_all(trainer: Trainer) -> Losses:
    results, batches = list[torch.Tensor](), _batches(trainer)
    results += _train(trainer, 0, 6, batches)
    results += _evaluate(trainer, [0, 1], batches)
    results += _train(trainer, 6, 9, batches)
    trainer.pipeline.reset()
    results += _train(trainer, 9, 16)
    with pytest.raises(StopIteration):
        trainer.step(iter([]))
    results.append(torch.tensor(trainer.evaluate()["loss"]))
    trainer.pipeline.reset()
    return results + _train(trainer, 16, 22)


def _check_stale_weights() -> None:
    """What a user does between steps is refused, or works as if every rank had all weights."""
    ours, theirs = _trainers(*ADAM)
    batches = [_batches(trainer) for trainer in (ours, theirs)]
    for trainer, each in zip((ours, theirs), batches, strict=True):
        _train(trainer, 0, 3, each)
    module: Any = ours.model.module
    optimizers = [optimizer for _, optimizer in ours.optimizer.optimizers]
    reads: list[Callable[[], Any]] = [ours.model.state_dict, module.state_dict, ours.optimizer.state_dict]
    reads += [optimizers[-1].state_dict, partial(copy.deepcopy, module.dlrm.head), module.dlrm.head.top.state_dict]
    for read in reads:
        with refuses("^dense_update: owner, .* call the pipeline's gather_dense"):
            read()
    module.dlrm.head.eval()
    with refuses("^dense_update: owner, "):
        module.dlrm.head(torch.zeros(2, 9 * 8))
    module.dlrm.head.train()
    ours.gather_dense()
    assert_all_near(_state(ours), _state(theirs), 0.0, "weights and states, gathered")
    copied = copy.deepcopy(module.dlrm.head)
    for trainer, each in zip((ours, theirs), batches, strict=True):
        _train(trainer, 3, 5, each)
    copied.state_dict()
    # A second pipeline of the model and its optimizer begins with all weights.
    for trainer, each in zip((ours, theirs), batches, strict=True):
        before = trainer.pipeline
        assert isinstance(before, GraphTrainPipeline)
        trainer.pipeline = GraphTrainPipeline(
            trainer.model, trainer.optimizer, trainer.device, casts=before._casts, dense_update="all"
        )
        _train(trainer, 5, 8, each)
    assert_all_near(_state(ours), _state(theirs), 0.0, "weights and states of the second pipeline")
    _close(ours, theirs)


def _check_resumed(update: str = "owner") -> None:
    """A checkpoint that is loaded in the middle of a run is trained on from."""
    ours, theirs = _trainers(*ADAM, update=update)
    folder, checkpointer = _checkpointer()
    saved = list[torch.Tensor]()
    for trainer in (ours, theirs):
        _train(trainer, 0, 5)
        trainer.gather_dense()
        if trainer is ours:
            checkpointer.write(5, extents_to_store(trainer.model, trainer.optimizer))
        _train(trainer, 5, 8)
        trainer.gather_dense()
        dist.barrier()
        trainer._load(folder / "step_5", 5)
        trainer.pipeline.reset()
        saved.append(torch.stack(_train(trainer, 5, 9)))
        trainer.gather_dense()
    assert_same(saved[0], saved[1], "losses after the load")
    assert_all_near(_state(ours), _state(theirs), 0.0, "weights and states")
    _close(ours, theirs)


def _check_whole_run() -> None:
    """A run that evaluates, saves and writes deltas has the results of the old way, also in its checkpoints."""
    results = list[tuple[dict[str, Any], dict[str, torch.Tensor]]]()
    for update in ("owner", "all"):
        folder, _ = _checkpointer()
        options = ["--log.dir", str(folder), "--train.steps", "5", "--train.eval_every", "2", "--checkpoint.every", "3"]
        options += ["--checkpoint.last", "true", "--checkpoint.delta_every", "1", "--train.dense_update", update]
        trainer = _trainer("graph", *DCN, *BF16, *ADAM, *options)
        summary = trainer.fit()
        assert (_owners(trainer) is not None) == (update == "owner")
        tensors = _state(trainer)
        for path in sorted(trainer.checkpointer.folder.glob("step_*")):
            weights = read_weights(path)
            tensors |= {f"{path.name}, {name}": tensor for name, tensor in weights.items()}
        results.append((summary, tensors))
        _close(trainer)
    (summary, tensors), (expected, expected_tensors) = results
    assert summary["eval_loss"] == expected["eval_loss"]
    assert any(name.startswith("step_5, ") for name in tensors), list(tensors)
    assert_all_near(tensors, expected_tensors, 0.0, "weights and states")


def _check_every_rank_updates(trainer: Trainer, reason: str) -> None:
    with patch.object(logging.getLogger("dlrm_overlap"), "warning") as warning:
        _train(trainer, 0, 2)
    assert _owners(trainer) is None
    said = [call.args[0] % call.args[1:] for call in warning.call_args_list]
    expected = [f"dense_update: all instead of owner, since {reason}"] if dist.get_rank() == 0 else []
    assert said == expected
    _state(trainer)
    _close(trainer)


def _check_not_by_owners(reason: str, *options: str) -> None:
    """Where owners cannot update, every rank does, and rank 0 says why."""
    _check_every_rank_updates(_trainer("graph", "--train.dense_update", "owner", *options), reason)


def _check_clipped() -> None:
    trainer = _trainer("graph", *BF16)
    _, dense = trainer.optimizer.optimizers[-1]
    clipped = GradientClippingOptimizer(dense, clipping=GradientClipping.NORM, max_gradient=1.0)
    optimizer = CombinedOptimizer([trainer.model.fused_optimizer, ("dense", clipped)])
    before = trainer.pipeline
    assert isinstance(before, GraphTrainPipeline)
    trainer.pipeline = GraphTrainPipeline(
        trainer.model, optimizer, trainer.device, casts=before._casts, dense_update="owner"
    )
    _check_every_rank_updates(trainer, "gradients are clipped by their mean over the ranks")


CASES: dict[str, Callable[[], None]] = {}


def _run(case: str) -> None:
    check_private_api()  # before FBGEMM's operators are replaced
    stores = patch.object(train_pipeline, "store_options", lambda *_: None if "collective" in case else STORES)
    with _interpreted_updates(), stores:
        CASES[case]()


if INTERPRETED:
    CASES |= {
        "adagrad": partial(_check_steps, _ADAGRAD, torch.float32, 3),
        "deferred": partial(_check_steps, _ADAM, torch.float32, 4, defers=True),
        "stale weights": _check_stale_weights,
        "clipped": _check_clipped,
        "in float32": partial(_check_not_by_owners, "the dense part does not use bfloat16 copies of its weights"),
        "by a collective": partial(_check_not_by_owners, "dense gradients are averaged by a collective", *BF16),
        "adam": partial(_check_steps, _ADAM, torch.float32, 3),
        "sgd": partial(_check_steps, _SGD, torch.float32, 3),
        "bfloat16 gradients": partial(_check_steps, _ADAM, torch.bfloat16, 3),
        "captured": partial(_check_captured, *ADAM),
        "captured, deferred": partial(_check_captured, *ADAM, update="owner_deferred"),
        "deferred, bfloat16 gradients": partial(_check_steps, _ADAGRAD, torch.bfloat16, 3, defers=True),
        "captured, bfloat16 gradients": partial(_check_captured, "--train.gradient_dtype", "bf16"),
        "resumed": _check_resumed,
        "resumed, deferred": partial(_check_resumed, "owner_deferred"),
        "whole run": _check_whole_run,
        "longer": partial(_check_steps, _ADAGRAD, torch.float32, 40),
    }
QUICK = list(CASES)[:6]
SLOW = list(CASES)[6:-1]
OF_FOUR = [
    case for case in CASES if case in ("adagrad", "bfloat16 gradients", "captured", "captured, deferred", "longer")
]

two_ranks = cases_on_ranks(2, _run, QUICK)
two_ranks_more = cases_on_ranks(2, _run, SLOW)
four_ranks = cases_on_ranks(4, _run, OF_FOUR)


@pytest.mark.parametrize("case", QUICK)
def test_two_ranks(two_ranks: Callable[[str], None], case: str) -> None:
    two_ranks(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", SLOW)
def test_two_ranks_more(two_ranks_more: Callable[[str], None], case: str) -> None:
    two_ranks_more(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", OF_FOUR)
def test_four_ranks(four_ranks: Callable[[str], None], case: str) -> None:
    four_ranks(case)
