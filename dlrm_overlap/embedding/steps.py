"""What a step through the embedding stage is given."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_overlap.kernels.backward.row_runs import PreparedRuns
from dlrm_overlap.kernels.optimizer_params import OptimizerParams
from dlrm_overlap.torchrec_private import WeightDecayMode

_LAZY = 3  # FBGEMM's CounterWeightDecayMode.ADAGRADW


@dataclass(frozen=True)
class BatchSizes:
    per_rank: tuple[int, ...]
    """b, the number of samples of each rank"""
    first_sample: tuple[int, ...] = field(compare=False)
    """[W + 1] index of each rank's first sample in the global batch, then B"""
    total: int = field(compare=False)
    """B, the number of samples of all ranks"""
    most: int = field(compare=False)
    """the largest b"""

    def __hash__(self) -> int:  # cheap, since a step looks up several values by its sizes
        return self.total

    @staticmethod
    @lru_cache
    def of(per_rank: tuple[int, ...]) -> "BatchSizes":
        first = (0, *accumulate(per_rank))
        return BatchSizes(per_rank, first, first[-1], max(per_rank))


class UpdateRule(NamedTuple):
    lr: float
    arguments: Any
    """FBGEMM's OptimizerArgs"""
    frozen: bool = False
    """rows and states keep their values, because no weight of the lookup requires a gradient"""
    count: int = 0
    """FBGEMM's `iter`: forwards of the lookup including this one; 0 if its optimizer does not count them"""
    always_decays: bool = False
    """whether rows decay regardless of `weight_decay_mode`, as with Adam and LAMB"""

    @property
    def decays(self) -> bool:
        return bool(self.arguments.weight_decay or self.arguments.max_norm or self.count)

    @property
    def numbers(self) -> OptimizerParams:
        given, mode = self.arguments, self.arguments.weight_decay_mode
        return OptimizerParams(
            lr=self.lr,
            eps=given.eps,
            l2=given.weight_decay * (mode == WeightDecayMode.L2.value and not self.always_decays),
            decoupled=given.weight_decay * (mode in (WeightDecayMode.DECOUPLE.value, _LAZY) or self.always_decays),
            max_norm=given.max_norm or math.inf,
            beta1=given.beta1,
            beta2=given.beta2,
            count=self.count,
            halflife=given.counter_halflife,
            decay_after=given.adjustment_iter,
            max_rate=given.adjustment_ub,
            lazy=float(mode == _LAZY),
        )


class Step(NamedTuple):
    inputs: Sequence[KeyedJaggedTensor]
    """ids of this rank's tables, one tensor for each input of the layout, with B bags a feature"""
    batch: BatchSizes
    replicated: KeyedJaggedTensor | None = None
    """ids of this rank's samples for the tables that every rank holds, if this exchange looks up such tables"""
    own_offsets: torch.Tensor | None = None
    """[published * b + 1] int32: offsets of the bags of this rank's samples, in the order of `IdLayout.published`.
    Empty bags of row shards and empty slots do not arrive, and get no gradient. None if all bags arrive"""
    repeats: bool = False
    """whether most steps have inputs of the same sizes, as padded ids have"""


class PendingBackward(NamedTuple):
    step: Step
    number: int
    """index among the steps with a backward, from 0"""
    rules: Sequence[UpdateRule]
    """update rule of each fused lookup at the time of the forward"""
    trains_weights: bool = False
    """whether some ids' weights require a gradient"""
    ids_ready: torch.Event | None = None
    """the event after which the backward may read the ids, on GPUs"""
    runs: Sequence[PreparedRuns | None] | None = None
    """each input's ids, sorted and cut into chunks, on GPUs after `Backward.prepare`"""


def weights_of(ids: KeyedJaggedTensor) -> torch.Tensor | None:
    """Return the ids' weights [n] as float32, or None without weights; as in FBGEMM, integer weights are ignored."""
    weights = ids.weights_or_none()
    return weights.float() if weights is not None and weights.is_floating_point() else None


def padded(ids: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """Return the padded ids, which are sent, if `ids` are an eager step's view without the padding; else `ids`."""
    given: Any = ids
    return ids if (sent := getattr(given, "padded", None)) is None else sent


def with_float_weights(ids: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """Return ids with float32 weights or none; `ids` itself if it needs no change."""
    weights = ids.weights_or_none()
    if weights is None or weights.dtype == torch.float32:
        return ids
    return KeyedJaggedTensor(ids.keys(), ids.values(), weights_of(ids), offsets=ids.offsets(), stride=ids.stride())


def tensors_of(ids: KeyedJaggedTensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return values, offsets and weights as kernels take them, see `Bags.tensors`."""
    values, weights = ids.values(), ids.weights_or_none()
    return values, ids.offsets(), values if weights is None else weights
