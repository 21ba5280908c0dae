"""What both sharded modules share."""

import logging
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any, Generic, TypeVar

import torch
from fbgemm_gpu.split_embedding_configs import SparseType
from torch import nn
from torchrec.distributed.types import LazyAwaitable, ShardingEnv, ShardingEnv2D, ShardingType
from torchrec.optim.keyed import CombinedOptimizer
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_overlap.backends import BACKENDS
from dlrm_overlap.comm.order import CommunicationOrder
from dlrm_overlap.config import InputError
from dlrm_overlap.embedding.backends.ids import IdTables
from dlrm_overlap.embedding.exchange import Exchange
from dlrm_overlap.embedding.id_layout import BatchCapacity
from dlrm_overlap.embedding.id_sender import IdSender
from dlrm_overlap.embedding.layout import Layout
from dlrm_overlap.embedding.options import ExchangeOptions
from dlrm_overlap.embedding.replicated import ReplicatedTables
from dlrm_overlap.embedding.shardings import build_layout, exchanging_group, groups_of, output_types, table_names
from dlrm_overlap.embedding.tables import LocalTables, max_gradients
from dlrm_overlap.embedding.torchrec_tables import TorchRecTables
from dlrm_overlap.embedding.unsupported import unsupported_by_exchange, unsupported_by_graphs
from dlrm_overlap.torchrec_private import DpPooledEmbeddingSharding, DpSequenceEmbeddingSharding
from dlrm_overlap.torchrec_private.attributes import shardings_by_type

log = logging.getLogger("dlrm_overlap")

_REPLICATED = DpPooledEmbeddingSharding, DpSequenceEmbeddingSharding
Served = TypeVar("Served", bound=Exchange)
Result = TypeVar("Result")


class Deferred(LazyAwaitable[Result]):
    def __init__(self, make: Callable[[], Result]) -> None:
        super().__init__()
        self._make = make

    def _wait_impl(self) -> Result:
        return self._make()


class ExchangingModule(nn.Module, Generic[Served]):
    """Decides which shardings of a module an exchange serves; a subclass also inherits from TorchRec's module."""

    _env: ShardingEnv
    _lookups: Any
    _device: torch.device
    _optim: CombinedOptimizer
    _kind = "tables"
    _exchange_type: type[Served]

    exchange: Served | None
    sender: IdSender | None
    """set by `take_ids`"""
    takes_ids: bool
    """True once `take_ids` was called: `sender` sends the ids, not TorchRec"""
    _ids_keys: list[str]
    torchrec_tables: TorchRecTables | None
    """tables that stay with TorchRec, set by `take_ids`"""
    unpooled_features: Collection[str] = ()
    id_map: Any = None
    """the `IdMap` of tables of any id; None for other tables"""
    change_ids: Callable[[KeyedJaggedTensor], KeyedJaggedTensor] | None = None
    """changes the ids of a batch before `sender` sends them"""
    mixes: bool = False
    """whether ids are replaced by a bijective hash before they are sent"""
    loads: int = 0
    """number of loads of the ids of tables of any id; ids that arrived before the last load have outdated rows"""
    _entry: Callable[[], nn.Module | None] | None = None
    _uncaptured: str | None = None
    _buckets: Mapping[str, int] = MappingProxyType({})
    """table of any id -> its number of buckets"""

    def __init__(self, *args: Any, options: ExchangeOptions, cached: Mapping[str, float], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._options = options
        self.cached = cached
        """table that the exchange caches -> share of its rows with slots"""
        if cached:
            self.register_state_dict_pre_hook(lambda *_: self.note_writes())
            self.register_load_state_dict_pre_hook(lambda *_: self.note_writes())
        self._reasons_told: set[str] = set()
        self._set_up()

    @property
    def _shardings(self) -> list[Any]:
        return list(self._shardings_by_type.values())

    @property
    def _shardings_by_type(self) -> dict[str, Any]:
        module: Any = self
        return shardings_by_type(module)

    def _names_in_output(self, numbers: Sequence[int]) -> Mapping[str, str]:
        """Return unique output name -> TorchRec's name, for the shardings `numbers`, in the exchange's order."""
        raise NotImplementedError

    def _set_up(self) -> None:
        if self.cached:
            self._optim = _TableOptimizer(self._optim, self)
        self.exchange, self.sender, self.torchrec_tables, self._replicated_tables = None, None, None, None
        self.takes_ids = False
        # Which shardings can be exchanged; rank 0 logs the others.
        by_type = self._shardings_by_type
        every = list(by_type.values())
        reasons = unsupported_by_exchange(by_type, self._env, self._options.wire_dtype, self.cached, self._device)
        self.unsupported_reasons: Mapping[str, str | None] = reasons
        """sharding type -> why its tables stay with TorchRec, None if they are exchanged; identical on every rank"""
        for sharding_type, reason in reasons.items():
            if reason and sharding_type != ShardingType.DATA_PARALLEL.value:  # which has nothing to exchange
                self._tell_once(f"{sharding_type} {self._kind} stay with TorchRec: {reason}")
        self._exchanged = [i for i, reason in enumerate(reasons.values()) if reason is None]
        self._replicated = [i for i, sharding in enumerate(every) if type(sharding) in _REPLICATED]
        self._ours = self._exchanged
        """shardings whose columns the exchange fills; once it takes ids, also data-parallel ones"""
        exchanged = [every[i] for i in self._exchanged]
        self.table_counts = len(table_names(exchanged)), len(table_names(every))
        """numbers of tables: exchanged, and all"""
        self._resolved = self._options_for(exchanged) if exchanged else self._options
        if self._is_first:
            text = "backend %s: %d of %d %s exchanged, update by %s"
            update = self._resolved.resolved_backward if exchanged else "FBGEMM"
            log.info(text, self._options.backend, *self.table_counts, self._kind, update)
        if exchanged:
            self.exchange = self._make_exchange()

    def _options_for(self, shardings: Sequence[Any]) -> ExchangeOptions:
        options, groups = self._options, [group for sharding in shardings for group in groups_of(sharding)]
        if (output := output_types(shardings[0]).pop()) != SparseType.FP32:
            options = replace(options, output_dtype=output.as_dtype(), wire_dtype=output.as_dtype())
        return replace(options, max_gradient=max_gradients(group.fused_params or {} for group in groups).pop())

    def _layout(self, numbers: Sequence[int]) -> Layout:
        every, group = self._shardings, exchanging_group(self._env)
        exchanged, replicated = (
            [every[i] for i in kind if i in numbers] for kind in (self._exchanged, self._replicated)
        )
        names = list(self._names_in_output(numbers))
        return build_layout(exchanged, names, group.size(), replicated, self._buckets)

    def _make_exchange(self) -> Served:
        tables = LocalTables.of([self._lookups[i] for i in self._exchanged], self.cached)
        layout, group = self._layout(self._exchanged), exchanging_group(self._env)
        return self._exchange_type(layout, tables, self._resolved, group, torch.device(self._device))

    def take_ids(
        self,
        keys: Sequence[str],
        capacity: BatchCapacity,
        order: CommunicationOrder | None = None,
        weighted: bool = False,
    ) -> None:
        """From now on, send the ids by an `IdSender`, instead of TorchRec's input_dist; a collective.

        Args:
            keys: features in the order of every batch, the same on all ranks.
            capacity: the largest batch of a rank, the same on all ranks.
            order: order of communication in the captured step; if None, the exchange keeps its own.
            weighted: whether the ids of every batch have weights, the same on all ranks.
        """
        if self._replicated:
            self.exchange, self._ours = self.exchange or self._make_exchange(), self._looked_up_in_step
            shardings, lookups = ([kept[i] for i in self._replicated] for kept in (self._shardings, self._lookups))
            self._replicated_tables = ReplicatedTables.of(shardings, lookups)
        if self.exchange is not None and order is not None:
            self.exchange.order = order
        self._take_ids(keys, capacity, weighted)
        self.takes_ids, self._ids_keys = True, list(keys)

    def _take_ids(self, keys: Sequence[str], capacity: BatchCapacity, weighted: bool) -> None:
        """Make `sender`, and `torchrec_tables` for tables that stay with TorchRec; a collective."""
        raise NotImplementedError

    @property
    def _looked_up_in_step(self) -> list[int]:
        return sorted({*self._exchanged, *self._replicated})

    @property
    def entry(self) -> nn.Module:
        """The module that the model calls: this one, or a managed collision module around it."""
        around = self._entry() if self._entry is not None else None
        return around if around is not None else self

    def own_ids(
        self,
        entry: nn.Module,
        id_map: Any,
        buckets: Mapping[str, int],
        mixes: bool,
        make_tables: Callable[[Exchange], IdTables],
        uncaptured: str | None = None,
        change_ids: Callable[[KeyedJaggedTensor], KeyedJaggedTensor] | None = None,
    ) -> None:
        """Look up ids that `id_map` maps to rows, inside the managed collision module `entry`.

        `id_map` is None if the ids are not counted. `buckets` are by table. `make_tables` returns the `IdTables` that
        map the ids of an exchange with an `IdSender`. `uncaptured` is the reason if steps cannot be captured.
        """
        self._uncaptured, self._buckets, self.change_ids = uncaptured, buckets, change_ids
        self._entry, self.id_map, self.mixes = weakref.ref(entry), id_map, mixes
        if self.exchange is not None:
            self.exchange.id_tables = make_tables(self.exchange)

    def stay_uncaptured(self, entry: nn.Module, reason: str) -> None:
        """Look up ids that the managed collision module `entry` maps to rows in steps that cannot be captured."""
        self._entry, self._uncaptured = weakref.ref(entry), reason

    def why_ids_are_not_taken(self) -> str | None:
        """Return why `take_ids` would fail, if it would; identical on every rank."""
        shardings = dict(zip(self.unsupported_reasons, self._shardings, strict=True))
        if (reason := unsupported_by_graphs(shardings, self.unsupported_reasons)) is not None:
            return reason
        if self._entry is not None and (reason := self.why_not_exchanged) is not None:
            return f"tables of any id stay with TorchRec: {reason}"
        options = self._resolved
        if not BACKENDS[options.backend].stores_to_peers or options.resolved_backward == "collective":
            return f"backend {options.backend} waits for the host"
        if self.has_tracker:
            return "a tracker is registered"
        return self._uncaptured

    @property
    def has_tracker(self) -> bool:
        """Whether a tracker of TorchRec's is registered, which only TorchRec's lookups call."""
        trackers = (getattr(self._lookups[i], "optim_state_tracker_fn", None) for i in self._exchanged)
        return bool(self.post_lookup_tracker_fn or self.post_odist_tracker_fn or any(trackers))

    @property
    def why_not_exchanged(self) -> str | None:
        """Why some tables stay with TorchRec, if they do; identical on every rank."""
        return next((reason for reason in self.unsupported_reasons.values() if reason is not None), None)

    def note_load(self) -> None:
        """Let `GraphTrainPipeline` send the next step's ids again, if it has sent them; call it on all ranks."""
        self.loads += 1

    def note_writes(self) -> None:
        """See `LocalTables.note_writes`."""
        if self.exchange is not None:
            self.exchange.tables.note_writes()

    def compute(self, ctx: Any, dist_input: Any) -> list[torch.Tensor]:
        """Look up by TorchRec, for another module that calls `compute` and `output_dist` itself."""
        if self.exchange is not None:
            self._tell_once("steps stay with TorchRec: another module calls compute and output_dist")
        return self._look_up_by_torchrec(partial(super().compute, ctx, dist_input))  # type: ignore[misc]

    def _look_up_by_torchrec(self, look_up: Callable[[], Result]) -> Result:
        """Call TorchRec's lookup in a module whose steps may be captured, and return its result.

        Before the call, cached rows are written back to their tables, and FBGEMM's step counts are set to those of the
        captured steps. After the call, the captured steps get FBGEMM's new counts.
        """
        if self.exchange is None:
            return look_up()
        if self.exchange.tables.marks is not None and self.training and torch.is_grad_enabled():
            raise InputError(
                f"checkpoint.delta_every: a training step's {self._kind} stay with TorchRec, whose updates are not "
                f"marked; the log says why; set it to 0"
            )
        self.note_writes()
        self.exchange.follow_rules()
        found = look_up()
        self.exchange.follow_rules()
        return found

    @property
    def _is_first(self) -> bool:
        """Whether this rank logs: rank 0 of all ranks, not of each sharding group."""
        return (self._env.global_rank if isinstance(self._env, ShardingEnv2D) else self._env.rank) == 0

    def _tell_once(self, what: str) -> None:
        if what not in self._reasons_told and self._is_first:
            log.warning("backend %s: %s", self._options.backend, what)
        self._reasons_told.add(what)


def exchanges_of(modules: Iterable[ExchangingModule[Any]]) -> list[Exchange]:
    return [module.exchange for module in modules if module.exchange is not None]


class _TableOptimizer(CombinedOptimizer):
    """The optimizer of a module's tables; reading its states first writes caches back."""

    def __init__(self, optimizer: CombinedOptimizer, module: ExchangingModule[Any]) -> None:
        self._note_writes = module.note_writes
        super().__init__(list(optimizer.optimizers))

    @property
    def state(self) -> Mapping[torch.Tensor, Any]:
        self._note_writes()
        return super().state
