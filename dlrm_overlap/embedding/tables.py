"""This rank's rows, where FBGEMM keeps them: ids outside them, and their update by FBGEMM's own operator."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode, PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    SplitTableBatchedEmbeddingBagsCodegen,
    WeightDecayMode,
)
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_overlap.embedding.cache import HomeTable, RowCache, activate, make_caches
from dlrm_overlap.embedding.layout import FeatureShard, FusedLookup
from dlrm_overlap.embedding.steps import UpdateRule
from dlrm_overlap.kernels.optimizer_params import STATES

OPTIMIZERS = {
    EmbOptimType.EXACT_SGD: "sgd",
    EmbOptimType.EXACT_ADAGRAD: "adagrad",
    EmbOptimType.EXACT_ROWWISE_ADAGRAD: "rowwise_adagrad",
    EmbOptimType.ADAM: "adam",
    EmbOptimType.PARTIAL_ROWWISE_ADAM: "partial_rowwise_adam",
    EmbOptimType.LAMB: "lamb",
    EmbOptimType.PARTIAL_ROWWISE_LAMB: "partial_rowwise_lamb",
}
_WITH_COUNTER = "rowwise_adagrad_with_counter"
_BUFFERS = {name: ("momentum1", "momentum2")[: len(states)] for name, states in STATES.items()}
_BUFFERS[_WITH_COUNTER] = "momentum1", "prev_iter", "row_counter"
"""FBGEMM's buffers of each optimizer's states, in its order; optimizers with more than one count their steps"""

log = logging.getLogger("dlrm_overlap")

_SEGMENT_LENGTH = 32  # ids of one row that a warp sums, as FBGEMM's own autograd function passes it on NVIDIA GPUs


class StoredRows(NamedTuple):
    """Where a shard's rows are, and their optimizer."""

    weights: torch.Tensor
    """[n], flat: the rows of all shards of its lookup"""
    states: tuple[torch.Tensor, ...]
    """each [m] float32, flat, of their optimizer"""
    optimizer: str
    """as in `RowRange`"""
    stochastic_rounding: bool


class LocalTables:
    """The fused lookups (TBE) that hold this rank's shards; their storage is read and updated in place.

    Rows of tables that have a cache are in it from `open_caches` to `close_caches`, see `cache`.
    """

    def __init__(
        self,
        lookups: Sequence[SplitTableBatchedEmbeddingBagsCodegen],
        fractions: Mapping[tuple[int, int], float] | None = None,
    ) -> None:
        """Take the lookups and, by lookup and table, the share of the rows for which a cache has slots."""
        self.lookups = list(lookups)
        self.fractions = fractions or {}
        self._cached: dict[tuple[int, int], RowCache] = {}
        self._cached_features: list[tuple[RowCache, torch.Tensor]] = []
        self._may_be_written = False
        """whether rows at home may have been written to since those in caches were stored there"""
        self._storages: list[tuple[Any, str]] = [
            (tbe, f"{name}_{'host' if tbe.use_cpu else 'dev'}")
            for tbe in lookups
            for name in ("weights", *_BUFFERS.get(optimizer_of(tbe), ()))
        ]
        for number in {lookup for lookup, _ in self.fractions}:
            if not lookups[number].use_cpu:
                self._storages.append((lookups[number], "weights_uvm"))
        self._storage: tuple[int, ...] | None = None
        self._weights: list[list[torch.Tensor]] = []
        self._states: list[list[list[torch.Tensor]]] = []
        self._counting: list[Any] = [tbe for tbe in lookups if counts(tbe)]
        self._step: int | None = None
        """number of the step up to which FBGEMM's `iter_cpu` has counted"""

    @classmethod
    def of(cls, lookups: Sequence[Any], cached: Mapping[str, float] | None = None) -> "LocalTables":
        """Return the tables of TorchRec's lookup modules, one a sharding; of those `cached`, by name, the share."""
        modules, cached = [module for lookup in lookups for module in lookup._emb_modules], cached or {}
        fractions = {
            (number, index): cached[table.name]
            for number, module in enumerate(modules)
            for index, table in enumerate(module._config.embedding_tables)
            if table.name in cached
        }
        return cls([module.emb_module for module in modules], fractions)

    @property
    def bounds_checks(self) -> list[BoundsCheckMode]:
        """The treatment of ids outside the tables of each lookup, see `BadIds`."""
        return [BoundsCheckMode(lookup.bounds_check_mode_int) for lookup in self.lookups]

    def storage(self) -> tuple[int, ...]:
        """Return the addresses of the lookups' rows and states, which change when these are moved or replaced."""
        homes = [getattr(tbe, name).data_ptr() for tbe, name in self._storages]
        return *homes, *[cache.rows[0].data_ptr() for cache, _ in self._cached_features]

    def _at_home(self, lookup: int, table: int) -> list[torch.Tensor]:
        """Return a table's rows [rows, D] and its optimizer's states, each [rows, D] or [rows] float32."""
        if (storage := self.storage()) != self._storage:
            self._weights = [tbe.split_embedding_weights() for tbe in self.lookups]
            self._states = [tbe.split_optimizer_states() for tbe in self.lookups]
            self._storage = storage
        states = self._states[lookup]
        return [self._weights[lookup][table], *(states[table] if states else ())]

    def _tensors(self, shard: FeatureShard) -> list[torch.Tensor]:
        """Return the same of a shard of this rank or, if it has a cache, of its slots."""
        cached = self._cached.get((shard.lookup, shard.table))
        return self._at_home(shard.lookup, shard.table) if cached is None else cached.rows

    def weight(self, shard: FeatureShard) -> torch.Tensor:
        """Return the rows [rows, D] of a shard of this rank, or the slots that its ids name."""
        return self._tensors(shard)[0]

    def states(self, shard: FeatureShard) -> list[torch.Tensor]:
        """Return the optimizer's states of a shard's rows or slots, each [rows, D] or [rows] float32."""
        return self._tensors(shard)[1:]

    def rows(self, shard: FeatureShard) -> int:
        """Return the number of rows of a shard of this rank."""
        return self._at_home(shard.lookup, shard.table)[0].shape[0]

    def stored(self, shard: FeatureShard) -> StoredRows:
        """Return where a shard's rows or slots are, on a GPU."""
        tbe: Any = self.lookups[shard.lookup]
        optimizer, tensors = self.optimizer(shard), self._tensors(shard)
        if (shard.lookup, shard.table) in self._cached:
            weights, *states = [rows.flatten() for rows in tensors]
        else:
            weights, *states = [
                _holding(rows, getattr(tbe, f"{name}_dev"), getattr(tbe, f"{name}_uvm"))
                for name, rows in zip(("weights", *_BUFFERS[optimizer]), tensors, strict=True)
            ]
        given = tbe.optimizer_args  # of which SGD and Adagrad read neither, as under FBGEMM
        if optimizer == "rowwise_adagrad" and (given.weight_decay_mode or given.max_norm):
            optimizer = "decaying_rowwise_adagrad"
        return StoredRows(weights, tuple(states), optimizer, bool(tbe.stochastic_rounding))

    def open_caches(self, shards: Sequence[FeatureShard], ids: Sequence[int], device: torch.device) -> None:
        """Make the caches, from whose slots rows are looked up from now on.

        Args:
            shards: of this rank, in the order of the features of its only input.
            ids: the most ids of a step, by shard.

        Raises:
            InputError: if there is no room for them.
        """
        assert not self._cached, "caches are closed before others are made"
        homes = dict[tuple[int, int], HomeTable]()
        for (number, table), fraction in sorted(self.fractions.items()):
            given: Any = self.lookups[number].optimizer_args
            if self.lookups[number].use_cpu and (given.weight_decay or given.max_norm):
                continue  # FBGEMM's operator for CPUs updates such rows, at home
            tensors = self._at_home(number, table)
            held = zip(shards, ids, strict=True)
            most = sum(count for shard, count in held if (shard.lookup, shard.table) == (number, table))
            if tensors[0].shape[0]:
                homes[number, table] = HomeTable(tensors, fraction, most)
        for cache, firsts in make_caches(homes, device):
            self._cached |= dict.fromkeys(firsts, cache)
            first = [firsts.get((shard.lookup, shard.table), -1) for shard in shards]
            # After the features of the shards, one that pads the number of ids.
            self._cached_features.append((cache, torch.tensor([*first, -1, -1], device=device)))

    def close_caches(self, write_back: bool = True) -> None:
        """Store the rows of the caches to their tables, where they are looked up from now on; on the current stream."""
        if write_back:
            self.write_back()
        self._cached, self._cached_features = {}, []

    def activate(self, ids: KeyedJaggedTensor) -> None:
        """Bring the rows of the next step to the caches, and replace its ids by slots; on the current stream."""
        self.read_again()
        activate(self._cached_features, ids)

    def write_back(self) -> None:
        """Store the rows of the caches to their tables, and keep them; on the current stream."""
        self.read_again()
        for cache, _ in self._cached_features:
            cache.write_back()

    def note_writes(self) -> None:
        """Store the rows of the caches to their tables, which others may write to until the next step."""
        self.write_back()
        self._may_be_written = bool(self._cached_features)

    def read_again(self) -> None:
        """Read the rows of the caches from their tables, if these may have been written to; on the current stream."""
        if self._may_be_written:
            self._may_be_written = False
            for cache, _ in self._cached_features:
                cache.read_again()

    def optimizer(self, shard: FeatureShard) -> str:
        """Return the optimizer of a shard's rows, by FBGEMM's name."""
        return optimizer_of(self.lookups[shard.lookup])

    def rules(self, step: int) -> list[UpdateRule]:
        """Return by which numbers each lookup updates its rows after the forward of step number `step`.

        FBGEMM, too, reads them at the forward, and counts it. Here `iter_cpu` counts the steps since the last call,
        replays of captured steps included; a second call of one step counts nothing.
        """
        if self._counting:
            self._count(1 if self._step is None else step - self._step)
            self._step = step
        return [
            UpdateRule(
                tbe.get_learning_rate(),
                tbe.optimizer_args,
                _frozen(tbe),
                int(tbe.iter_cpu) if counts(tbe) else 0,
                "momentum2" in _BUFFERS[optimizer_of(tbe)],
            )
            for tbe in self.lookups
        ]

    def _count(self, forwards: int) -> None:
        for tbe in self._counting:
            if forwards and int(tbe.iter_cpu) == 0:  # FBGEMM's way to take a count that was set: set_optimizer_step
                tbe.iter_cpu.fill_(int(tbe.iter))
            tbe.iter_cpu.add_(forwards)

    def count_on_device(self) -> None:
        """Raise the lookups' `iter`, as FBGEMM does, at a forward; a captured one raises it in each replay."""
        for tbe in self._counting:
            tbe.iter.add_(1)

    def count_evaluation(self) -> bool:
        """Count a forward without backward, which FBGEMM counts, too; return whether any lookup counts."""
        self._count(1)
        self.count_on_device()
        return bool(self._counting)


def optimizer_of(tbe: Any) -> str:
    """Return the optimizer of a fused lookup, by the name of FBGEMM's operator."""
    counter = tbe.optimizer == EmbOptimType.EXACT_ROWWISE_ADAGRAD and tbe.weight_decay_mode == WeightDecayMode.COUNTER
    return _WITH_COUNTER if counter else OPTIMIZERS.get(tbe.optimizer, str(tbe.optimizer))


def counts(tbe: Any) -> bool:
    """Return whether the optimizer of a fused lookup counts its steps."""
    return len(_BUFFERS.get(optimizer_of(tbe), ())) > 1


def _frozen(tbe: Any) -> bool:
    """Return whether FBGEMM's own forward would have no backward: none of its parameters requires a gradient.

    On a CPU its weights are one, on a GPU a placeholder stands for them.
    """
    known = [parameter for parameter in tbe._parameters.values() if parameter is not None]
    return bool(known) and not any(parameter.requires_grad for parameter in known)


def _holding(rows: torch.Tensor, *memories: torch.Tensor) -> torch.Tensor:
    """Return the one of some allocations that holds `rows`."""
    for memory in memories:
        if memory.data_ptr() <= rows.data_ptr() < memory.data_ptr() + max(1, memory.nbytes):
            return memory.detach()
    return memories[0].detach()  # of a shard without rows


class FbgemmUpdate:
    """FBGEMM's own backward of one fused lookup, run without its forward.

    It applies gradients of pooled embeddings to the lookup's rows, in place, by the lookup's own optimizer.
    """

    def __init__(self, tbe: SplitTableBatchedEmbeddingBagsCodegen) -> None:
        name = f"split_embedding_backward_codegen_{optimizer_of(tbe)}_{{}}_pt2_wrapper"
        self._tbe = tbe
        self._operators = [getattr(torch.ops.fbgemm, name.format(kind)).default for kind in ("unweighted", "weighted")]

    def apply(self, gradient: torch.Tensor, ids: KeyedJaggedTensor, rule: UpdateRule) -> None:
        """Update the rows that `ids` name, each once, by the sum of its bags' gradients [B, sum of dims] float32."""
        if gradient.shape[0] == 0:
            return
        tbe, weights = self._tbe, ids.weights_or_none()
        operator = self._operators[weights is not None]
        bits, mask = torch.ops.fbgemm.get_infos_metadata(tbe.D_offsets, gradient.shape[0], tbe.D_offsets.numel() - 1)  # type: ignore
        known: dict[str, Any] = {
            "grad_output": gradient,
            "indices": ids.values().to(tbe.embedding_table_index_type),
            "offsets": ids.offsets().to(tbe.embedding_table_index_type),
            "indice_weights": gradient.new_empty(0) if weights is None else weights,
            "pooling_mode": int(PoolingMode.SUM if tbe.pooling_mode == PoolingMode.NONE else tbe.pooling_mode),
            "lxu_cache_locations": tbe.lxu_cache_locations_empty,
            "use_uniq_cache_locations": tbe.use_uniq_cache_locations_bwd,
            "BT_block_size": _SEGMENT_LENGTH,
            "max_segment_length_per_warp": _SEGMENT_LENGTH,
            "info_B_num_bits": bits,
            "info_B_mask_int64": mask,
            "output_dtype": tbe.output_dtype,
            "learning_rate_tensor": torch.full_like(tbe.learning_rate_tensor, rule.lr),
            "iter": rule.count,
            "max_counter": 1.0,  # read by learning rates of rare ids alone, which stay with TorchRec
            **rule.arguments._asdict(),
        }
        if optimizer_of(tbe) == "adam":  # a state of its row-wise correction, which is off, but whose type is checked
            known |= {f"row_counter_{memory}": gradient.new_empty(0) for memory in ("host", "dev", "uvm")}
            known["row_counter_placements"] = gradient.new_empty(0, dtype=torch.int32)
            known["row_counter_offsets"] = gradient.new_empty(0, dtype=torch.int64)
        for memory in ("host", "dev", "uvm"):
            known[f"{memory}_weights"] = getattr(tbe, f"weights_{memory}")
        names = [argument.name for argument in operator._schema.arguments]
        operator(*[known[name] if name in known else getattr(tbe, name) for name in names])


def bags_of(lookup: FusedLookup, inputs: Sequence[KeyedJaggedTensor]) -> KeyedJaggedTensor:
    """Return the bags of one fused lookup, out of its owner's `inputs`."""
    ids = inputs[lookup.input]
    first, features, total = lookup.first_feature, len(lookup.shards), len(ids.keys())
    return ids if features == total else ids.split([first, features, total - first - features])[1]


class BadIds:
    """The response to an id outside its table, by FBGEMM's bounds check modes, of which the strictest holds for all.

    NONE does not look for such ids, IGNORE and WARNING take row 0 instead, FATAL stops the run.
    """

    def __init__(self, modes: Sequence[BoundsCheckMode]) -> None:
        """Take the mode of each lookup."""
        self.mode = min(modes, default=BoundsCheckMode.NONE)
        self.looks = self.mode != BoundsCheckMode.NONE
        self._warned = False

    def report(self, message: str) -> None:
        """Stop the run or, under WARNING, log the first such id, for which row 0 was taken.

        Raises:
            ValueError: under FATAL.
        """
        if self.mode == BoundsCheckMode.FATAL:
            raise ValueError(message)
        if self.mode == BoundsCheckMode.WARNING and not self._warned:
            log.warning("%s; row 0 was taken. Later ones are not reported", message)
            self._warned = True


def bounds_check_modes(fused_params: Iterable[Mapping[str, Any]]) -> list[BoundsCheckMode]:
    """Return the bounds check modes of lookups made with these."""
    modes = (each.get("bounds_check_mode", BoundsCheckMode.WARNING) for each in fused_params)  # FBGEMM's default
    return [BoundsCheckMode[BoundsCheckMode(mode).name.removeprefix("V2_")] for mode in modes]


def bad_id_message(name: str, value: int | None, rows: int) -> str:
    """Return the message about an id outside its table."""
    what = "an id" if value is None else f"id {value}"
    return f"{name}: {what} is outside its table of {rows} rows; map ids into 0 .. {rows - 1} where they are read"


def max_gradients(fused_params: Iterable[Mapping[str, Any]]) -> set[float | None]:
    """Return the bounds to which lookups made with these clip gradients of pooled embeddings; None is no bound."""
    return {each.get("max_gradient", 1.0) if each.get("gradient_clipping") else None for each in fused_params}
