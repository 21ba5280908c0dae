"""The arguments of the exchange's kernels: tensors, integers and tables of addresses."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch


class Bags(NamedTuple):
    """The bags of one input, on the rank that pools them: each of its features has a bag for every rank's samples.

    Example: features f and g, 2 samples, bags f: [5] [], g: [7, 7] [1]. values 5 7 7 1, offsets 0 1 1 3 4.
    """

    values: torch.Tensor
    """[n] int32 or int64, row ids, bag after bag"""
    offsets: torch.Tensor
    """[features * B + 1] int32 or int64: sample s of the input's feature f has bag i = f * B + s, which holds the ids
    [offsets[i], offsets[i + 1]) of `values`"""
    first_sample: torch.Tensor
    """[W + 1] int32: rank w owns samples [first_sample[w], first_sample[w + 1])"""
    samples: int
    """samples of all ranks, B"""
    samples_per_rank: int
    """samples of the rank that has most, b"""
    weights: torch.Tensor | None = None
    """[n] float32, by which the row of each id is multiplied; None: ids have none"""

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Values, offsets and weights, as kernels take them: without weights, the values stand for them, unread."""
        return self.values, self.offsets, self.values if self.weights is None else self.weights


@dataclass(frozen=True, eq=False)
class FeatureTable:
    """The features that one launch pools, whose tables have one dim and one type."""

    entries: torch.Tensor
    """[F, 6] int64, a row a feature: address of its table's first row, rows of the table (negative if ids outside it
    are not recorded), column of the window, index of the feature in the input that has its bags, 1 for a mean or 0 for
    a sum, and 1 if empty bags are not stored; see `pooling.FEATURE_COLUMNS`"""
    dim: int
    """D, a multiple of 4, at most 1024"""
    weight_dtype: torch.dtype
    """float32, float16 or bfloat16"""
    alignment: int
    """bytes, a power of two up to 16, that divide every table's address and every row's size"""
    column_alignment: int
    """elements, a power of two up to 16, that divide every column"""
    leaves_out: bool = False
    """whether empty bags of some of the features are not stored"""


EVERY_BAG = -1


class Partials(NamedTuple):
    """A sum of the partial sums of a table's row shards, in a window."""

    columns: Sequence[int]
    """first column of the partial sums of each row shard; the sum is stored at the first"""
    dim: int
    shares: Sequence[int] = ()
    """index of the feature whose bags are those of each row shard, where that is known; EVERY_BAG: of all bags, also
    those without ids, the partial sum has arrived"""


@dataclass(frozen=True, eq=False)
class Windows:
    """The memory that kernels store into, one window at each destination rank."""

    addresses: torch.Tensor
    """[W] int64: of each rank's window"""
    stride: int
    """elements of a window's row, D_total"""
    dtype: torch.dtype
    """of the elements, that of the wire: float32, bfloat16 or float16"""
    alignment: int = 16
    """bytes that divide every address"""


class Tuning(NamedTuple):
    """How a launch is cut into tasks and programs."""

    task_bags: int
    """bags a task, a power of two"""
    unroll: int
    """rows of each bag that are loaded at a time"""
    num_warps: int
    """warps a program"""
    groups: int = 1
    """groups of task_bags / groups bags that a program of the persistent kernel pools one after the other"""
    checked_ids: int = 64
    """ids of each bag that are checked at a time, a power of two, where they are checked"""


@lru_cache
def _short_ids(dim: int, itemsize: int) -> int:
    """Return the most ids that short bags have on average, of rows of `dim` elements of `itemsize` bytes."""
    row_bytes = power_of_2(dim) * itemsize
    return 6 if row_bytes <= 128 else 8 if row_bytes <= 256 else 1


def has_short_bags(table: FeatureTable, values: torch.Tensor, offsets: torch.Tensor) -> bool:
    """Return whether the bags of an input, see `Bags`, are short on average, by their shapes alone.

    How few ids that are depends on the table's rows (H200; docs/lab.md).

    Example: of rows of 64 float32, 512 ids in 64 bags are short, 513 are not; of 128 float32, 64 are and 65 are not.
    """
    return values.numel() <= _short_ids(table.dim, table.weight_dtype.itemsize) * (offsets.numel() - 1)


@lru_cache
def tuning_for(dim: int, itemsize: int, groups: int = 1, short: bool = False) -> Tuning:
    """Return how to cut a launch for rows of `dim` elements of `itemsize` bytes.

    The fastest on H200 (docs/lab.md): a warp awaits up to 4 KB of rows at a time.
    Of rows of up to 128 bytes these are those of four bags side by side, so that a lane loads 16 bytes; of two bags up
    to 128 elements, and of one beyond. Ids are checked 64 at a time: with 16 or 32 the persistent kernel took up to 7%
    longer.

    Where bags are `short`, see `has_short_bags`, a program's chain of loads decides how long it takes: so it has four
    bags side by side, up to 128 elements. Of rows of up to 256 bytes it checks few ids at a time, which leaves
    registers to the rows, and has four rows of each bag under way. In the persistent kernel, which has several groups
    and fewer registers, and of larger rows, these are two.
    """
    block = power_of_2(dim)
    row_bytes = block * itemsize
    checked_ids = 64
    if short and block <= 128:
        bags, unroll = 4, 2 if groups > 1 or row_bytes > 256 else 4
        if row_bytes <= 256:
            checked_ids = 16 if unroll == 4 and row_bytes > 128 else 8
    elif row_bytes <= 128:
        bags, unroll = 4, 8
    elif row_bytes <= 256:
        bags, unroll = 2, 8
    else:
        bags, unroll = (2, 4) if block <= 128 else (1, 4) if block == 256 else (1, 2)
    return Tuning(bags * groups, unroll, max(1, block // 256), groups, checked_ids)


@lru_cache
def put_tuning_for(dim: int, itemsize: int) -> Tuning:
    """Return the same for messages to other nodes: four times as many warps, and bags, but 8 bags at most.

    All warps of the program that completes a group put it. Where NVSHMEM copies, over NVLink, one warp takes 25 us for
    64 KB. A group of a message has 8 rows at least (kernels/messages.py), and a task lies in one group.
    """
    tuning = tuning_for(dim, itemsize)
    return tuning._replace(task_bags=min(8, 4 * tuning.task_bags), num_warps=4 * tuning.num_warps)


def power_of_2(n: int) -> int:
    """Return the least power of two that is at least `n`."""
    return 1 << (n - 1).bit_length()


class PoolingOptions(NamedTuple):
    """Arguments shared by `store_pooled` and `put_slices`, beside their tensors."""

    rank: int
    """of the caller; the schedule begins at the next one"""
    schedule: str
    """linear | remote_first | balanced, see `schedule`"""
    tuning: Tuning
    check_ids: bool = True
    """record ids outside their table and take row 0 in their place, in `Bags.values` too"""


class OptimizerParams(NamedTuple):
    """The numbers by which an optimizer updates rows, of which each reads some; FBGEMM has others' names for a few."""

    lr: float
    """learning rate"""
    eps: float = 0.0
    """added to a square root"""
    l2: float = 0.0
    """decay that is added to the gradient; weight_decay under WeightDecayMode.L2"""
    decoupled: float = 0.0
    """decay that is taken from the row; weight_decay under WeightDecayMode.DECOUPLE, and of Adam and LAMB"""
    max_norm: float = torch.finfo(torch.float32).max
    """the most that a row's norm may be; max_norm"""
    beta1: float = 0.0
    """share of the mean of gradients that a step keeps"""
    beta2: float = 0.0
    """the same of the mean of their squares"""
    count: float = 0.0
    """steps of the optimizer, this one included; iter"""
    halflife: float = 0.0
    """steps in which a row's counter is halved; 0: it stays 1; negative: it counts the row's steps; counter_halflife"""
    decay_after: float = 0.0
    """the count after which rows decay by their counters; adjustment_iter"""
    max_rate: float = 0.0
    """the most that AdagradW's rate may be under a halflife of -2; adjustment_ub"""
    lazy: float = 0.0
    """1 for AdagradW, else 0"""


STATES: dict[str, tuple[str, ...]] = {
    "sgd": (),
    "adagrad": ("elements",),
    "rowwise_adagrad": ("number",),
    "decaying_rowwise_adagrad": ("number",),
    "rowwise_adagrad_with_counter": ("number", "number", "number"),
    "adam": ("elements", "elements"),
    "partial_rowwise_adam": ("elements", "number"),
    "lamb": ("elements", "elements"),
    "partial_rowwise_lamb": ("elements", "number"),
}
"""of each optimizer's states, in FBGEMM's order, what is kept of a row: elements, one for each of its own, or number"""


def state_bytes(optimizer: str, dim: float) -> float:
    """Return the bytes of all states of a row."""
    return sum(4 * dim if kind == "elements" else 4 for kind in STATES[optimizer])


def looks_at_rows(optimizer: str) -> bool:
    """Return whether columns of a row, each updated on its own, would be updated otherwise than the row as a whole."""
    return "number" in STATES[optimizer] or "lamb" in optimizer


MOST_USES = 3
"""upper limit of a row's reference counter in the CLOCK replacement"""
_NEVER = -2  # a step before all: the first one may take a slot of it


class CacheState(NamedTuple):
    """Which rows have slots in a cache, and when they were used: of R rows, S have one at a time.

    Example: 3 rows and 2 slots, the first of which has row 2: `slot_of` -1 -1 0, `row_in` 2 -1.
    """

    slot_of: torch.Tensor
    """[R] int32: the slot of each row; -1 without one"""
    row_in: torch.Tensor
    """[S] int64: the row in each slot; -1 without one"""
    used_at: torch.Tensor
    """[S] int32: the last step that named the slot's row"""
    uses: torch.Tensor
    """[S] int32: the steps that named the row after it came, up to `MOST_USES`, less the visits of the hand"""
    named: torch.Tensor
    """[R / 32, rounded up] int32: a bit for each row, all 0 between two steps"""
    clock: torch.Tensor
    """[3] int64: the number of the next step, and the slot that the hand points to, twice"""

    @classmethod
    def empty(cls, rows: int, slots: int, device: torch.device) -> "CacheState":
        """Return the state of a cache that has no row yet."""
        return cls(
            torch.full((rows,), -1, dtype=torch.int32, device=device),
            torch.full((slots,), -1, dtype=torch.int64, device=device),
            torch.full((slots,), _NEVER, dtype=torch.int32, device=device),
            torch.zeros(slots, dtype=torch.int32, device=device),
            torch.zeros(-(-rows // 32), dtype=torch.int32, device=device),
            torch.zeros(3, dtype=torch.int64, device=device),
        )


class Swaps(NamedTuple):
    """Rows that change places between the slots of a cache and their table.

    Entry i stores the content of a slot to a row of the table, then another row to the slot. No slot and no row is in
    two entries.
    """

    slots: torch.Tensor
    """[n] int64"""
    leaving: torch.Tensor
    """[n] int64: the row that the slot's content is stored to; below 0 stores nothing"""
    entering: torch.Tensor
    """[n] int64: the row that comes to the slot; below 0 brings none"""
    count: torch.Tensor
    """[1] int64: how many entries there are; the rest are anything"""
