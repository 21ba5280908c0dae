"""Owners that update their shares of the dense weights against updates of all weights on every rank, bit for bit."""

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Literal
from unittest.mock import patch

import torch
from torch import nn

from dlrm_overlap.config import Config
from dlrm_overlap.dense.flat import FlatParameters
from dlrm_overlap.dense.flat_steps import FlatSteps, take_steps
from dlrm_overlap.dense.functions import StoreOptions
from dlrm_overlap.dense.gradients import GradientBuckets, OwnedSteps
from dlrm_overlap.train.graphs import dense_step
from dlrm_overlap.train.graphs.train_pipeline import GraphTrainPipeline
from dlrm_overlap.train.trainer import Trainer
from tests.agreement import assert_same
from tests.gpu.exchange.checks.dense import SHAPES, Capturable, check_late_steps
from tests.gpu.exchange.checks.faults import CULPRIT, TIMEOUT_S, flag_error
from tests.gpu.exchange.checks.training import make_trainer, small_config, train_steps
from tests.gpu.exchange.place import Place, every

_SHARD, _IN_FLOAT32 = "scale", "bias"
_BUCKETS = {"one": 1 << 30, "several": 1 << 20}  # bytes of a bucket, at least
_SMALL_BUCKET = 1 << 12  # bytes, so that a small model has several
_EAGER, _REPLAYED = 30, 600  # steps
_MOST_CYCLES = 300_000  # of a pause within a step, up to 0.2 ms
_MAKE: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=1e-3),
    "momentum": partial(torch.optim.SGD, lr=1e-3, momentum=0.9, nesterov=True, weight_decay=0.1),
    "adagrad": partial(torch.optim.Adagrad, lr=1e-2),
    "adam": partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1),
}


class _Weights:
    """Weights that owners update, or every rank."""

    def __init__(self, steps: "_Steps", optimizer: str, bucket_bytes: int, stores: StoreOptions, owners: bool) -> None:
        place = steps.place
        generator = place.generator(1)
        values = {name: torch.randn(s, generator=generator, device=place.device) for name, s in SHAPES.items()}
        self.flat = FlatParameters({name: nn.Parameter(v) for name, v in values.items()}, [_SHARD], torch.bfloat16)
        self.steps = FlatSteps(self.flat, _MAKE[optimizer](self.flat.parameters.values()))
        owned = OwnedSteps(self.steps, {_IN_FLOAT32}) if owners else None
        about = place.group, steps.dtype, bucket_bytes, steps.order, stores, owned
        self.buckets = GradientBuckets(self.flat, *about)
        self.flat.show_gradients()

    @property
    def shadow(self) -> torch.Tensor:
        assert self.flat.shadow is not None
        return self.flat.shadow.tensor

    def used(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat([position.of(tensor).flatten() for position in self.flat.positions.values()])


class _Steps(Capturable):
    """Steps of both kinds by the same gradients; a step checks that no weight changes while it reads them."""

    def __init__(
        self, place: Place, optimizer: str, dtype: torch.dtype, bucket_bytes: int, stores: StoreOptions
    ) -> None:
        super().__init__(place)
        self.dtype = dtype
        self.ours, self.theirs = (_Weights(self, optimizer, bucket_bytes, stores, owners) for owners in (True, False))
        self.both = self.ours, self.theirs
        self.counters = [each for weights in self.both for each in weights.buckets.counters]
        self.source = torch.zeros_like(self.ours.flat.gradients.tensor)
        self.bad, self.changed = torch.zeros((2,), dtype=torch.int64, device=place.device)
        self._generator, self._chance = place.generator(place.rank + 1), random.Random(place.rank)

    def take(self) -> None:
        """Take a step of both, with pauses at random, and overwrite the gradients with NaN after it."""
        for weights in self.both:
            flat, owners = weights.flat, weights.buckets.owners
            assert flat.shadow is not None
            before = weights.shadow.clone()
            bias = flat.weights.views[_IN_FLOAT32].clone()
            for name, position in flat.positions.items():
                torch.cuda._sleep(self._chance.choice((0, 0, self._chance.randrange(_MOST_CYCLES))))
                self.changed += (flat.shadow.views[name] != position.of(before)).sum()
                if name == _IN_FLOAT32:
                    self.changed += (flat.weights.views[name] != bias).sum()
                flat.gradients.views[name].copy_(position.of(self.source))
                weights.buckets.complete(name)
            if owners is None:
                take_steps([weights.steps], weights.buckets.finish_in_ranges())
            else:
                owners.is_stale = True
                for first, end in list(weights.buckets.finish_in_ranges()):
                    if first >= flat.shared_end:
                        weights.steps.update_range(first, end)
            for view in flat.gradients.views.values():
                view.fill_(torch.nan)

    def step(self, take: Callable[[], Any]) -> None:
        """Take a step by `take`, and count the weights that differ; no wait for the device."""
        self.source.normal_(generator=self._generator).pow_(3)
        take()
        owners = self.ours.buckets.owners
        assert owners is not None
        owners.is_stale = True
        self.bad += (self.ours.used(self.ours.shadow) != self.theirs.used(self.theirs.shadow)).sum()
        ours, theirs = (weights.flat.weights.views[_IN_FLOAT32] for weights in self.both)
        self.bad += (ours != theirs).sum()

    def check(self, what: str) -> None:
        """Check that no step was wrong on this rank, and gather and compare weights and states."""
        for weights in self.both:
            weights.buckets.check()
        assert int(self.changed) == 0, f"{what}: {int(self.changed)} weights changed while a step read them"
        assert int(self.bad) == 0, f"{what}: {int(self.bad)} weights differ"
        owners = self.ours.buckets.owners
        assert owners is not None
        owners.gather()
        ours, theirs = self.both
        assert_same(ours.used(ours.flat.weights.tensor), theirs.used(theirs.flat.weights.tensor), f"{what}: weights")
        for found, expected in zip(ours.steps.update.states, theirs.steps.update.states, strict=True):
            assert_same(ours.used(found), theirs.used(expected), f"{what}: a state")


def _check_bits(place: Place, dtype: torch.dtype, optimizer: str, bucket: str) -> None:
    stores = StoreOptions(programs=8, piece_elements=300_000, wait_timeout_s=60.0)
    steps = _Steps(place, optimizer, dtype, _BUCKETS[bucket], stores)
    check_late_steps(place, steps, _EAGER, _REPLAYED)
    place.close(*(weights.buckets for weights in steps.both))


def _config(place: Place, arch: Literal["dot", "dcn"], optimizer: Any, update: Any) -> Config:
    config = small_config(place, "pgas", "rowwise_adagrad", pipeline="graph", precision="bf16", lr=0.01)
    cross = {"cross_rank": 16, "cross_layers": 2} if arch == "dcn" else {}
    model = replace(config.model, arch=arch, activation="relu", **cross)
    train = replace(config.train, optimizer=optimizer, dense_update=update, compile_dense=arch == "dcn")
    return replace(config, model=model, train=train)


def _owners(trainer: Trainer) -> Any:
    assert isinstance(trainer.pipeline, GraphTrainPipeline)
    return trainer.pipeline._dense.buckets.owners


def _check_training(place: Place, arch: Literal["dot", "dcn"], optimizer: str, by_owners: str = "owner") -> None:
    """Losses, evaluations, weights and states of captured steps have the same bits."""
    found = list[tuple[list[float], dict[str, float], dict[str, torch.Tensor]]]()
    for update in (by_owners, "all"):
        trainer = make_trainer(place, _config(place, arch, optimizer, update))
        with patch.object(dense_step, "_BUCKET_BYTES", _SMALL_BUCKET):
            losses = train_steps(place, trainer, 0, 30)
        assert (_owners(trainer) is not None) == (update == by_owners)
        pipeline: Any = trainer.pipeline
        assert (pipeline._dense.buckets.deferred is not None) == (update == "owner_deferred")
        values = trainer.evaluate()
        losses += train_steps(place, trainer, 30, 50)
        trainer.gather_dense()
        tensors = {
            name: each.clone() for name, each in trainer.model.state_dict().items() if type(each) is torch.Tensor
        }
        for name, states in trainer.optimizer.state_dict()["state"].items():
            plain = {key: each for key, each in states.items() if type(each) is torch.Tensor}
            tensors |= {f"{name}, {key}": each.clone() for key, each in plain.items()}
        found.append((losses, values, tensors))
        place.close(trainer)
    (losses, values, tensors), (expected, expected_values, expected_tensors) = found
    assert losses == expected
    assert values == expected_values
    assert tensors.keys() == expected_tensors.keys()
    for name, tensor in tensors.items():
        assert_same(tensor, expected_tensors[name], name)
    assert len(tensors) > 8, "weights and states of the dense part"


def _check_lost_peer(place: Place, captured: bool) -> None:
    """All ranks except the culprit name the rank for which they waited, in time."""
    stores = StoreOptions(wait_timeout_s=TIMEOUT_S)
    steps = _Steps(place, "adagrad", torch.float32, _BUCKETS["one"], stores)
    for _ in range(3):
        steps.step(steps.take)
    take = steps.capture() if captured else steps.take
    steps.step(take)
    place.meet()
    flag, message = flag_error(place, steps.ours.buckets.check, "dense gradients' flag", take, 3 * TIMEOUT_S)
    assert flag == [place.rank, 0, CULPRIT, 5, 4], message
    place.leave()


_TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
CHECKS = every(
    "owner_update_bits", _check_bits, dtype=_TYPES, optimizer=["adagrad", "adam"], bucket=list(_BUCKETS), gpu_only=True
)
CHECKS |= every(
    "owner_update_bits", partial(_check_bits, dtype=torch.float32, bucket="several"),
    optimizer=["sgd", "momentum"], gpu_only=True,
)  # fmt: skip
_check_dot, _check_dcn = (partial(_check_training, arch=arch) for arch in ("dot", "dcn"))
CHECKS |= every("owner_update_training_dot", _check_dot, optimizer=["sgd", "adagrad", "adam"], gpu_only=True)
CHECKS |= every(
    "owner_update_training_deferred", partial(_check_dot, by_owners="owner_deferred"), optimizer=["sgd", "adam"],
    gpu_only=True,
)  # fmt: skip
CHECKS |= every(
    "owner_update_training_dcn_deferred", partial(_check_dcn, by_owners="owner_deferred"), optimizer=["adagrad"],
    timeout_s=300.0, gpu_only=True,
)  # fmt: skip
CHECKS |= every("owner_update_training_dcn", _check_dcn, optimizer=["adagrad"], timeout_s=300.0, gpu_only=True)
LOST = every(
    "owner_update_peer_stalls", _check_lost_peer, captured={"eager": False, "captured": True}, gpu_only=True, alone=True
)
