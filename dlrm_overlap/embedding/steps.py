"""One step through the embedding stage: its batch, and the values that its parts hand on."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_training import WeightDecayMode
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_overlap.kernels.optimizer_params import OptimizerParams

_LAZY = 3  # FBGEMM's CounterWeightDecayMode.ADAGRADW


@dataclass(frozen=True)
class BatchSizes:
    """How many samples each rank has in a step. Example: 3 and 2 samples; `first_sample` (0, 3, 5), `total` 5."""

    per_rank: tuple[int, ...]
    """samples of each rank, b"""
    first_sample: tuple[int, ...] = field(compare=False)
    """each rank's first sample in the global batch, and then B"""
    total: int = field(compare=False)
    """samples of all ranks, B"""
    most: int = field(compare=False)
    """samples of the rank that has most"""

    def __hash__(self) -> int:  # steps look up values for their sizes by it, several times each
        return self.total

    @staticmethod
    @lru_cache
    def of(per_rank: tuple[int, ...]) -> "BatchSizes":
        """Return the sizes and their sums."""
        first = (0, *accumulate(per_rank))
        return BatchSizes(per_rank, first, first[-1], max(per_rank))


class UpdateRule(NamedTuple):
    """The numbers by which a fused lookup's optimizer updates its rows."""

    lr: float
    arguments: Any
    """FBGEMM's OptimizerArgs: eps, weight_decay, max_norm and others"""
    frozen: bool = False
    """whether the rows stay as they are, and their state: no weights of the lookup require a gradient"""
    count: int = 0
    """FBGEMM's iter: forwards of the lookup, this one included, where its optimizer counts them"""
    always_decays: bool = False
    """whether `weight_decay_mode` has no say: Adam and LAMB take decay from the row"""

    @property
    def decays(self) -> bool:
        """Whether rows decay, or have a bound of their norm, or counters."""
        return bool(self.arguments.weight_decay or self.arguments.max_norm or self.count)

    @property
    def numbers(self) -> OptimizerParams:
        """The numbers as kernels and the reference take them."""
        given, mode = self.arguments, self.arguments.weight_decay_mode
        return OptimizerParams(
            lr=self.lr,
            eps=given.eps,
            l2=given.weight_decay * (mode == WeightDecayMode.L2.value and not self.always_decays),
            decoupled=given.weight_decay * (mode in (WeightDecayMode.DECOUPLE.value, _LAZY) or self.always_decays),
            max_norm=given.max_norm or OptimizerParams(0.0).max_norm,
            beta1=given.beta1,
            beta2=given.beta2,
            count=self.count,
            halflife=given.counter_halflife,
            decay_after=given.adjustment_iter,
            max_rate=given.adjustment_ub,
            lazy=float(mode == _LAZY),
        )


class Step:
    """One pass through the embedding stage: the values that its forward and its backward hand on."""

    work: Any = None
    """the collective under way"""
    received: torch.Tensor | None = None
    """the tensor that the collective fills"""
    set_aside: torch.Tensor | None = None
    """a copy of the pooled embeddings, if the next step began before they were asked for"""
    set_aside_event: Any = None
    """on GPUs: the event after which that copy may be read"""
    ids_ready: Any = None
    """on GPUs: the event after which the backward may read the ids"""
    number: int = 0
    """number of the step among those that have a backward, counted from the run's first"""
    rules: Sequence[UpdateRule] = ()
    """how each of this rank's fused lookups updates its rows, as it was at the forward"""
    runs: Sequence[Any] = ()
    """the ids of each input, sorted and cut into chunks for the update of their rows"""
    gradient: torch.Tensor | None = None
    """gradient of the pooled embeddings, from when it is there until the rows are updated"""
    sent: bool = False
    """whether the gradient is on its way to the owners of the rows"""
    replicated: KeyedJaggedTensor | None = None
    """of this rank's samples, the ids of tables that every rank holds, where this exchange looks those up"""
    own_offsets: torch.Tensor | None = None
    """[published * b + 1] int32: of this rank's samples, the offsets of the bags of all features and shares, see
    `IdLayout.published`, where this exchange sends the ids and tables are cut by rows, or bags are slots; the empty
    ones of such shards have not arrived, and get no gradient"""
    trains_weights: bool = False
    """whether weights of some of this rank's ids require a gradient"""
    weights_gradients: Sequence[torch.Tensor] = ()
    """their gradients [n] float32, input by input"""
    own_looked_up: Any = None
    """on GPUs: the event after which the backward may read the ids of those tables"""

    def __init__(self, inputs: Sequence[KeyedJaggedTensor], batch: BatchSizes) -> None:
        """Take the ids of this rank's tables, one tensor an input, each with B bags a feature."""
        self.inputs, self.batch = inputs, batch


def weights_of(ids: KeyedJaggedTensor) -> torch.Tensor | None:
    """Return the weights [n] float32 of ids, or None if they have none; integers are none, as for FBGEMM."""
    weights = ids.weights_or_none()
    return weights.float() if weights is not None and weights.is_floating_point() else None


def with_room(ids: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """Return ids as they are sent: those of a captured step's size, if an eager step reads them without their room."""
    given: Any = ids
    return ids if (sent := getattr(given, "with_room", None)) is None else sent


def with_float_weights(ids: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """Return ids whose weights are float32, or that have none; those that are so already are not copied."""
    weights = ids.weights_or_none()
    if weights is None or weights.dtype == torch.float32:
        return ids
    return KeyedJaggedTensor(ids.keys(), ids.values(), weights_of(ids), offsets=ids.offsets(), stride=ids.stride())


def tensors_of(ids: KeyedJaggedTensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return values, offsets and weights as kernels take them, see `Bags.tensors`."""
    values, weights = ids.values(), ids.weights_or_none()
    return values, ids.offsets(), values if weights is None else weights
