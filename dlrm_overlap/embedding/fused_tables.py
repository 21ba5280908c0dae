"""FBGEMM's fused lookup of one GPU with our update of its rows; nothing is exchanged.

The ids are sorted on a side stream from the forward on, so the backward only sums gradients and updates rows.
"""

import logging
import weakref
from collections.abc import Iterator
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from fbgemm_gpu.split_embedding_configs import SparseType
from torch.autograd.function import once_differentiable
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_overlap.config import InputError
from dlrm_overlap.embedding.backends.rows import DeviceRules, InputRows
from dlrm_overlap.embedding.layout import FeatureShard
from dlrm_overlap.embedding.steps import UpdateRule
from dlrm_overlap.embedding.tables import LocalTables, rule_of
from dlrm_overlap.kernels.backward.optimizers import Rule
from dlrm_overlap.kernels.backward.row_runs import PreparedRuns
from dlrm_overlap.kernels.compiled import in_aligned_memory
from dlrm_overlap.torchrec_private import (
    EmbeddingLocation,
    PoolingMode,
    SplitTableBatchedEmbeddingBagsCodegen,
    WeightDecayMode,
)
from dlrm_overlap.torchrec_private.check import check_private_api
from dlrm_overlap.torchrec_private.fbgemm import LOOKUP_OPTIMIZERS, optimizer_of

log = logging.getLogger("dlrm_overlap")

_MAX_DIM = 1024  # a program holds whole rows in registers
_MAX_ELEMENTS = 1 << 33  # of a gradient: offsets are int32, in units of 4 elements
_ROW_TYPES = SparseType.FP32, SparseType.FP16  # FBGEMM takes rows in bfloat16 on CPUs only
_OUTPUT_TYPES = *_ROW_TYPES, SparseType.BF16
_WEIGHT_DECAYS = WeightDecayMode.NONE, WeightDecayMode.L2, WeightDecayMode.DECOUPLE, WeightDecayMode.COUNTER


class CheckedIds(NamedTuple):
    """The ids of a forward after FBGEMM's check of their bounds, on a GPU."""

    indices: torch.Tensor
    """[n] int32 or int64"""
    offsets: torch.Tensor
    """[features * B + 1], of the type of `indices`"""
    weights: torch.Tensor | None
    """[n] float32"""
    ready: torch.Event
    """the event after which they may be read"""


class SortedBatch(NamedTuple):
    runs: PreparedRuns | None
    """None without ids"""
    done: torch.Event
    """the event after which `runs` may be read"""


class TableUpdate:
    """The sort of a fused lookup's ids, and the update of its rows, on a GPU."""

    def __init__(self, tbe: SplitTableBatchedEmbeddingBagsCodegen) -> None:
        lookup: Any = weakref.proxy(tbe)  # which holds this object; a cycle would delay the release of the tables
        self._tbe, self._tables, device = lookup, LocalTables([lookup]), tbe.current_device
        self._unpooled = tbe.pooling_mode == PoolingMode.NONE
        dims = [tbe.embedding_specs[table][1] for table in tbe.feature_table_map]
        self._dim = dims[0] if self._unpooled else sum(dims)
        columns = [0] * len(dims) if self._unpooled else [*accumulate(dims, initial=0)]
        mean = tbe.pooling_mode == PoolingMode.MEAN
        shards = [
            FeatureShard(str(i), 0, 0, i, 0, table, 0, dim, mean, torch.float32, str(i))
            for i, (table, dim) in enumerate(zip(tbe.feature_table_map, dims, strict=True))
        ]
        self._columns = dict(zip(shards, columns, strict=False))
        self._keys = [shard.name for shard in shards]
        self._storage: tuple[int, ...] | None = None
        self._known: InputRows | None = None
        # The lowest priority: the sort is needed only in the backward.
        self._stream = torch.cuda.Stream(device, priority=0)
        self._rules, self._device = DeviceRules(device), device
        self._clock = torch.zeros(1, dtype=torch.int64, device=device)
        self._seed = torch.initial_seed() % 2**31

    def _rows(self) -> InputRows:
        if (storage := self._tables.storage()) != self._storage or self._known is None:
            parts = dict.fromkeys(self._columns, 0)
            with torch.cuda.stream(self._stream):  # which reads the tensors that are made here
                self._known = InputRows([*self._columns], self._tables, self._columns, parts)
            self._storage = storage
        return self._known

    def sort(self, ids: CheckedIds) -> SortedBatch:
        """Sort the ids by row, on a side stream."""
        for tensor in (ids.indices, ids.offsets, ids.weights):
            if tensor is not None:
                tensor.record_stream(self._stream)
        self._stream.wait_event(ids.ready)
        with torch.cuda.stream(self._stream):
            if self._unpooled:
                runs = self._rows().sort_unpooled(ids.indices, ids.offsets, self._dim)
            else:
                samples = (ids.offsets.numel() - 1) // len(self._keys)
                bags = KeyedJaggedTensor(self._keys, ids.indices, ids.weights, offsets=ids.offsets, stride=samples)
                runs = self._rows().sort(bags, samples, self._dim // 4)
            return SortedBatch(runs, self._stream.record_event())

    def update(self, batch: SortedBatch, gradient: torch.Tensor, rule: UpdateRule, step: int) -> None:
        """Update each row that the batch names once, on the current stream.

        Args:
            gradient: [B, sum of dims], or [n, dim] unpooled; float32, float16 or bfloat16.
            rule: of the forward of this batch.
            step: number of the forward, which stochastic rounding depends on.
        """
        if batch.runs is None or rule.frozen:
            return
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(batch.done)
        batch.runs.record_stream(stream)
        if rule.arguments.gradient_clipping:
            gradient = gradient.clamp(-rule.arguments.max_gradient, rule.arguments.max_gradient)
        gradient = in_aligned_memory(gradient)
        self._rules.follow([rule], step)
        on_device = Rule(self._rules.numbers(0), self._clock, step, self._seed)
        for rows in self._rows().ranges:
            rows.update(batch.runs, gradient, on_device)


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, _: torch.Tensor, tables: "FusedTables", *ids: Any) -> torch.Tensor:
        output, *ctx.pending = tables.look_up(*ids)
        ctx.tables = tables
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, ...]:
        batch, rule, step = ctx.pending
        ctx.tables.row_update.update(batch, gradient, rule, step)
        return (None,) * 5


class FusedTables(SplitTableBatchedEmbeddingBagsCodegen):
    """FBGEMM's `SplitTableBatchedEmbeddingBagsCodegen` with our backward: the same arguments, rows, states, state dict.

    The forward is FBGEMM's, and sorts the ids on a side stream. The backward sums the gradients of each row in float32
    in a fixed order, and updates the row once; equal gradients give equal bits. On a CPU everything is FBGEMM's.

    These calls take FBGEMM's backward, with a warning the first time: `batch_size_per_feature_per_rank`,
    `feature_requires_grad`, weights that require a gradient, and outputs of more than 2^33 elements.

    Raises:
        InputError: for what the update does not support: tables outside GPU memory (`MANAGED`, `MANAGED_CACHING`), dims
            above 1024, rows of other types than float32 and float16, outputs of other types than these and bfloat16,
            other optimizers than SGD, Adagrad, Adam, LAMB and their row-wise forms, other weight decays than NONE, L2,
            DECOUPLE and COUNTER, learning rates by a counter, states of other types than float32, row-wise bias
            correction, writeback hooks, streamed rows, and features that are not in the order of their tables.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        check_private_api()
        super().__init__(*args, **kwargs)
        if (reason := next(_unsupported(self), None)) is not None:
            raise InputError(f"FusedTables: {reason}, or use FBGEMM's SplitTableBatchedEmbeddingBagsCodegen")
        self._row_update: TableUpdate | None = None
        self._checked: list[CheckedIds] | None = None
        """filled by `prepare_inputs` during a forward that trains"""
        self._updates = not self.use_cpu
        self._step = 0
        self._warned = set[str]()

    @property
    def row_update(self) -> TableUpdate:
        if self._row_update is None:
            self._row_update = TableUpdate(self)
        return self._row_update

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles make their own streams and launches."""
        return {**self.__dict__, "_row_update": None}

    def forward(
        self,
        indices: torch.Tensor,
        offsets: torch.Tensor,
        per_sample_weights: torch.Tensor | None = None,
        feature_requires_grad: torch.Tensor | None = None,
        batch_size_per_feature_per_rank: list[list[int]] | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Look up rows; arguments and result are those of FBGEMM's `forward`.

        Args:
            indices: [n] int32 or int64, ids of all features.
            offsets: [features * B + 1] int32 or int64, of the bags.
            per_sample_weights: [n] factors of the rows, of any floating-point type; ignored with `PoolingMode.NONE`.
            feature_requires_grad, batch_size_per_feature_per_rank, kwargs: as in FBGEMM.

        Returns:
            [B, sum of dims] of `output_dtype`; [n, dim] with `PoolingMode.NONE`.
        """
        trains = torch.is_grad_enabled() and self.placeholder_autograd_tensor.requires_grad
        if trains and self._updates:
            fallback = next(self._left_to_fbgemm(indices, offsets, per_sample_weights), None)
            if feature_requires_grad is not None:
                fallback = "feature_requires_grad"
            elif batch_size_per_feature_per_rank is not None:
                fallback = "batch_size_per_feature_per_rank"
            if fallback is None:
                given = indices, offsets, per_sample_weights
                return _Lookup.apply(self.placeholder_autograd_tensor, self, *given)  # type: ignore[no-any-return]
            if fallback not in self._warned:
                self._warned.add(fallback)
                log.warning("FusedTables: %s: FBGEMM updates the rows of such a step", fallback)
        given = indices, offsets, per_sample_weights, feature_requires_grad, batch_size_per_feature_per_rank
        return super().forward(*given, **kwargs)

    def _left_to_fbgemm(
        self, indices: torch.Tensor, offsets: torch.Tensor, weights: torch.Tensor | None
    ) -> Iterator[str]:
        if weights is not None and weights.requires_grad:
            yield "per_sample_weights that require a gradient"
        if self.pooling_mode == PoolingMode.NONE:
            elements = indices.numel() * self.max_D
        else:
            elements = (offsets.numel() - 1) // len(self.feature_table_map) * self.total_D
        if elements > _MAX_ELEMENTS:
            yield f"an output of {elements} elements, more than 2^33"

    def prepare_inputs(self, *args: Any, **kwargs: Any) -> Any:
        """Prepare ids as FBGEMM does, which checks their bounds; our sort reads the ids that this returns."""
        found = super().prepare_inputs(*args, **kwargs)
        if self._checked is not None:
            ready = torch.cuda.current_stream(self.current_device).record_event()
            self._checked.append(CheckedIds(*found[:3], ready))
        return found

    def look_up(
        self, indices: torch.Tensor, offsets: torch.Tensor, weights: torch.Tensor | None
    ) -> tuple[torch.Tensor, SortedBatch, UpdateRule, int]:
        """Return the output, and what the update of this batch takes: the sorted ids, the rule, the step's number."""
        self._checked = found = list[CheckedIds]()
        try:
            output = super().forward(indices, offsets, weights)
        finally:
            self._checked = None
        self._step += 1
        return output, self.row_update.sort(*found), rule_of(self), self._step


def _unsupported(tbe: Any) -> Iterator[str]:
    """Yield what the update does not support, with the rule and a cure."""
    locations = {EmbeddingLocation.HOST if tbe.use_cpu else EmbeddingLocation.DEVICE}
    for _, dim, location, _ in tbe.embedding_specs:
        if location not in locations:
            yield f"a table in {location.name}, but rows must be in the device's memory; make it {locations.pop().name}"
        if dim > _MAX_DIM:
            yield f"dim {dim}, at most {_MAX_DIM} is supported; cut the table by columns"
    if tbe.feature_table_map != sorted(tbe.feature_table_map):
        yield f"feature_table_map {tbe.feature_table_map} is not in the order of the tables; sort the features"
    if tbe.weights_precision not in _ROW_TYPES:
        types = " or ".join(each.name for each in _ROW_TYPES)
        yield f"weights_precision {tbe.weights_precision.name} is not {types}; choose one of these"
    if tbe.output_dtype not in [each.as_int() for each in _OUTPUT_TYPES]:
        types = " or ".join(each.name for each in _OUTPUT_TYPES)
        yield f"output_dtype {SparseType.from_int(tbe.output_dtype).name} is not {types}; choose one of these"
    if (optimizer := optimizer_of(tbe)) not in LOOKUP_OPTIMIZERS:
        yield f"optimizer {optimizer} is not one of {', '.join(LOOKUP_OPTIMIZERS)}; choose one of these"
    if tbe.weight_decay_mode not in _WEIGHT_DECAYS:
        modes = ", ".join(each.name for each in _WEIGHT_DECAYS)
        yield f"weight_decay_mode {tbe.weight_decay_mode.name} is not one of {modes}; choose one of these"
    if tbe.optimizer_args.learning_rate_mode >= 0:
        yield "a learning_rate_mode by a counter is not supported; leave it out"
    if tbe.optimizer_args.use_rowwise_bias_correction:
        yield "use_rowwise_bias_correction is not supported; leave it out"
    if tbe.use_writeback_bwd_prehook:
        yield "use_writeback_bwd_prehook is not supported; leave it out"
    if tbe.enable_raw_embedding_streaming:
        yield "enable_raw_embedding_streaming is not supported; leave it out"
    if types := {state.dtype for states in tbe.split_optimizer_states() for state in states} - {torch.float32}:
        yield f"optimizer states of type {types.pop()}, but they must be float32; leave optimizer_state_dtypes out"
